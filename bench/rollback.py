#!/usr/bin/env python3
"""./dev bench rollback: how long it takes to go back to the version before, and forward again.

A Megatron TP2 x PP2 trainer publishes two versions to a vLLM engine in processes of its own; then the coordinator is asked
for the other one again and again. Seconds are of the call, from the client to its answer: prepare, the journal's sync and
the change of pointers; flip is the slower engine's own part, transfer
that of the publish before. The bytes of both versions are compared at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time

from demo import checkpoint
from demo.fleet import Engine, Fleet
from report import add_options, spread, write
from weightwire import Client


def measure(fleet: Fleet, rounds: int, work: str) -> list[dict]:
    for version in (1, 2):
        checkpoint.write(f"{work}/v{version}", fleet.config, seed=version)
        fleet.each(fleet.trainers, "load", f"{work}/v{version}")
        fleet.publish(version)
        published = fleet.wait_serving(version).epochs[0]
    seconds, flips = [], []
    with Client(fleet.hub.grpc) as client:
        for turn in range(2 * rounds):
            version = 1 + turn % 2
            started = time.perf_counter()
            result = client.rollback(version)
            seconds.append(time.perf_counter() - started)
            flips.append(next(e.flip_seconds_max for e in fleet.status().epochs if e.epoch == result.epoch))
            if turn < 2 * rounds - 2:
                continue
            for rank in fleet.engine_ranks():
                _, wrong, serving = rank.ask("verify", version, f"{work}/v{version}")
                if wrong or serving != version:
                    raise AssertionError(f"version {serving} is served with {wrong} wrong elements")
    return [{"name": name, "bytes": published.bytes, "rounds": len(values),
             **{f"seconds_{what}": value for what, value in spread(values).items()}}
            for name, values in (("rollback", seconds), ("flip", flips), ("transfer", [published.transfer_seconds]))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench rollback", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=10, help="each goes back once and forward once")
    parser.add_argument("--small", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    config = checkpoint.SMALL if args.small else checkpoint.QWEN25_05B
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-") as work:
        with Fleet(config, args.binary, engines=[Engine("engine-a", 1, "shm"), Engine("engine-b", 2, "shm")],
                   options={"state_dir": f"{work}/state"}) as fleet:
            rows = measure(fleet, args.rounds, work)
    for row in rows:
        print(f"{row['name']:10s} median {row['seconds_median'] * 1e3:8.2f} ms  (min {row['seconds_min'] * 1e3:.2f}, "
              f"max {row['seconds_max'] * 1e3:.2f}) of {row['rounds']}")
    write(args, f"{rows[0]['bytes'] / 1e6:,.0f} MB in two engines: going back and forward", rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
