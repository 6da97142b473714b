#!/usr/bin/env python3
"""./dev sim: fleets under random faults, one for each seed, on every core; then the same simulation with one planted bug
after another, each of which must be caught (mutants.py; some minutes each). Exit 0: nothing was violated, every bug was
caught and, from 5,000 seeds on, everything that must be reached was."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import mutants

_FIRST = 100_001  # as ctest's sim.Seeds
_SEEDS_THAT_REACH_ALL = 5000


def run_seeds(binary: Path, first: int, seeds: int) -> dict:
    """Violations are the seeds at which each process stopped; replay one with WEIGHTWIRE_SEED."""
    env = {**os.environ, "WEIGHTWIRE_FIRST": str(first), "WEIGHTWIRE_SEEDS": str(seeds), "WEIGHTWIRE_REACH_ALL": "1",
           "WEIGHTWIRE_PROCESSES": str(min(os.cpu_count() or 1, seeds)), "GLIBC_TUNABLES": "glibc.malloc.tcache_count=2000"}
    began = time.monotonic()
    done = subprocess.run([binary, "--gtest_filter=FleetFaults.*"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, errors="replace")
    took = time.monotonic() - began
    failed = sorted(map(int, re.findall(r"failed with WEIGHTWIRE_SEED=(\d+)", done.stdout)))
    unreached = re.findall(r"never reached: (.*)", done.stdout)
    if done.returncode != 0 and not unreached:
        print(done.stdout[-4000:], file=sys.stderr)
    # A process that a check ended has named no seed.
    violations = len(failed) or int(done.returncode != 0 and not unreached)
    return {"seeds": seeds, "violations": violations, "failed_seeds": failed, "unreached": unreached, "seconds": round(took, 1)}


def run_planted(only: list[str]) -> dict[str, bool]:
    if wrong := mutants.misfits(mutants.ROOT):
        raise SystemExit("\n".join(wrong))
    mutants.copy_tree()
    chosen = [mutant for mutant in mutants.MUTANTS if not only or mutant.name in only]
    caught = {}
    for i, mutant in enumerate(chosen, 1):
        scenario, seed = mutants.planted(mutant)
        caught[mutant.name] = bool(scenario or seed)
        print(f"planted {i}/{len(chosen)} {mutant.name}: {f'caught by {scenario}' if scenario else f'caught at seed {seed}' if seed else 'NOT CAUGHT'}",
              flush=True)
    return caught


def main() -> int:
    names = [mutant.name for mutant in mutants.MUTANTS]
    parser = argparse.ArgumentParser(prog="./dev sim", description=__doc__)
    parser.add_argument("--binary", required=True, type=Path, help="fleet_test of the release build")
    parser.add_argument("--seeds", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=_FIRST, help="the first seed")
    parser.add_argument("--planted", action="append", metavar="NAME", choices=names, help="only this planted bug; may be repeated")
    parser.add_argument("--no-planted", action="store_true", help="no planted bugs")
    parser.add_argument("--json", metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error("--seeds: at least 1")
    result = run_seeds(args.binary, args.first, args.seeds)
    print(f"{args.seeds} seeds in {result['seconds']} s: {result['violations']} violations, never reached: "
          f"{', '.join(result['unreached']) or 'nothing'}", flush=True)
    result["planted_bugs"] = {} if args.no_planted else run_planted(args.planted or [])
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    missed = [name for name, caught in result["planted_bugs"].items() if not caught]
    return 1 if result["violations"] or missed or (result["unreached"] and args.seeds >= _SEEDS_THAT_REACH_ALL) else 0


if __name__ == "__main__":
    sys.exit(main())
