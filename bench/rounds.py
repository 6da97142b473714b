"""Versions through a whole fleet, timed and compared: what the benchmarks of a sync share."""

from __future__ import annotations

import os
import shutil
import tempfile

from demo import checkpoint
from demo.fleet import Fleet


def cpu_seconds(pids: list[int]) -> float:
    """Processor time that the processes have taken so far, user and system, all threads."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def timed_rounds(fleet: Fleet, config: dict, rounds: int) -> tuple[list[float], list[float], int, dict[str, int]]:
    """Publishes `rounds` + 1 versions one after another. Returns the seconds from each publish call to the last STAGED
    (the first one paid for connections and page faults), the daemons' processor seconds meanwhile, and of the last
    version its bytes and those by transport.

    Every version differs from the one before in every element: what an engine has already would not be sent. After the
    last one every engine's bytes are compared with the checkpoint."""
    work = tempfile.mkdtemp(prefix="weightwire-bench-")
    last = rounds + 1
    times, cpu = [], []
    daemons = [daemon.pid for daemon in fleet.daemons]
    try:
        for version in range(1, last + 1):
            if version in (1, last):
                checkpoint.write(work, config, seed=version)
                fleet.each(fleet.trainers, "load", work)
            else:
                fleet.each(fleet.trainers, "change")
            before = cpu_seconds(daemons)
            times.append(fleet.publish(version)[1])
            cpu.append(cpu_seconds(daemons) - before)
            status = fleet.wait_serving(version)
        for engine, rank in ((e, rank) for e in fleet.engines for rank in e.ranks):
            _, wrong, serving = rank.ask("verify", last, work)
            if wrong or serving != last:
                raise AssertionError(f"{engine.name} serves version {serving} with {wrong} wrong elements")
        moved = next(e for e in status.epochs if e.version == last)
        return times, cpu, moved.bytes, dict(moved.bytes_by_transport)
    finally:
        shutil.rmtree(work, ignore_errors=True)
