#!/usr/bin/env python3
"""./dev bench verify: what it costs to know that engines serve what was committed.

A Megatron TP2 x PP2 trainer publishes to two vLLM engines, TP1 and TP2, in processes of their own; then every rank sums what
it serves, again and again, and the coordinator compares. `verify` is the whole call, `rank` the slowest rank's part of it, one
worker thread of its agent. In every round both engines have to have the same root. `publish` and `publish while verifying` are
the transfers of versions in the same run, alternately without and with a verification that begins as they do.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time

from demo import checkpoint
from demo.fleet import Engine, Fleet
from report import add_options, spread, write
from weightwire import Client


def verify(client: Client, verdicts: list) -> float:
    started = time.perf_counter()
    verdicts.append(client.verify(timeout=120))
    return time.perf_counter() - started


def publish(fleet: Fleet, version: int) -> float:
    fleet.publish(version)
    return fleet.wait_serving(version).epochs[0].transfer_seconds


def measure(fleet: Fleet, rounds: int, work: str) -> list[dict]:
    folders = [f"{work}/v{seed}" for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        checkpoint.write(folder, fleet.config, seed=seed)
    version, alone, beside, seconds, ranks = 0, [], [], [], []
    with Client(fleet.hub.grpc) as client:
        for turn in range(2 * rounds + 2):
            fleet.each(fleet.trainers, "load", folders[turn % 2])
            version += 1
            verdicts: list = []
            busy = turn >= 2 and turn // 2 % 2 == 1
            other = threading.Thread(target=verify, args=(client, verdicts))
            if busy:
                other.start()
            took = publish(fleet, version)
            if busy:
                other.join()
                if verdicts[0].differences_total:
                    raise AssertionError(f"a verification beside an epoch found {verdicts[0].differences}")
            if turn >= 2:
                (beside if busy else alone).append(took)
            seconds.append(verify(client, verdicts))
            if not verdicts[-1].equal or len({engine.root for engine in verdicts[-1].engines}) != 1:
                raise AssertionError(f"version {version}: {verdicts[-1]}")
            ranks.append(max(engine.seconds for engine in verdicts[-1].engines))
    read = sum(engine.bytes for engine in verdicts[-1].engines)
    return [{"name": name, "bytes": read, "rounds": len(values),
             **{f"seconds_{what}": value for what, value in spread(values).items()}}
            for name, values in (("verify", seconds), ("rank", ranks), ("publish", alone),
                                 ("publish while verifying", beside))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench verify", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=6, help="pairs of versions")
    parser.add_argument("--small", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    config = checkpoint.SMALL if args.small else checkpoint.QWEN25_05B
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-") as work:
        with Fleet(config, args.binary, engines=[Engine("engine-a", 1, "shm"), Engine("engine-b", 2, "shm")]) as fleet:
            rows = measure(fleet, args.rounds, work)
    for row in rows:
        print(f"{row['name']:24s} median {row['seconds_median']:7.3f} s  (min {row['seconds_min']:.3f}, "
              f"max {row['seconds_max']:.3f}) of {row['rounds']}")
    write(args, f"{rows[0]['bytes'] / 1e6:,.0f} MB in two engines: summed and compared", rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
