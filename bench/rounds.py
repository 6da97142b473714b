"""Versions through a whole fleet, timed and compared: what the benchmarks of a sync share."""

from __future__ import annotations

import shutil
import tempfile

from demo import checkpoint
from demo.fleet import Fleet


def timed_rounds(fleet: Fleet, config: dict, rounds: int) -> tuple[list[float], int, dict[str, int]]:
    """Publishes `rounds` + 1 versions one after another. Returns the seconds from each publish call to the last STAGED
    (the first one paid for connections and page faults), and of the last version its bytes and those by transport.

    Other bytes go out in the last round, and every engine's are compared with the checkpoint after it."""
    work = tempfile.mkdtemp(prefix="weightwire-bench-")
    last = rounds + 1
    times = []
    try:
        for version in range(1, last + 1):
            if version in (1, last):
                checkpoint.write(work, config, seed=version)
                fleet.each(fleet.trainers, "load", work)
            times.append(fleet.publish(version)[1])
            status = fleet.wait_serving(version)
        for engine, rank in ((e, rank) for e in fleet.engines for rank in e.ranks):
            _, wrong, serving = rank.ask("verify", last, work)
            if wrong or serving != last:
                raise AssertionError(f"{engine.name} serves version {serving} with {wrong} wrong elements")
        moved = next(e for e in status.epochs if e.version == last)
        return times, moved.bytes, dict(moved.bytes_by_transport)
    finally:
        shutil.rmtree(work, ignore_errors=True)
