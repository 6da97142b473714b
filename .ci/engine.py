#!/usr/bin/env python3
"""CI's last part: of the suites with real engines and trainers (ctest label `engine`), those that the time left allows.

Suites run one at a time, those that prove most first, the others in an order that changes with the commit: none is left out
again and again. Each carries in its COST property the seconds that it takes on a
quiet machine of two cores; one for which twice that is no longer left is left out, named, and makes nothing fail. A suite
that fails runs once more at once: passing then, it is named FLAKY. What the end of the time cuts off counts as not run (a
suite that hangs meets its own TIMEOUT); only a second run may go on beyond it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# What proves most, first: a real engine and what fails on its way, then one suite of each kind of trainer.
FIRST = ("engine.failures", "trainers.megatron", "trainers.fsdp", "verl.backend", "sglang.hook")


def order(costs: dict[str, float], turn: str) -> list[str]:
    """The suites of `costs` (name -> seconds) as they are tried; turn: another one, another order of those not in FIRST."""
    def place(name: str) -> tuple[int, str]:
        if name in FIRST:
            return FIRST.index(name), ""
        return len(FIRST), hashlib.sha256(f"{turn} {name}".encode()).hexdigest()

    return sorted(costs, key=place)


def commit() -> str:
    """Of the tree; empty where there is none (an archive)."""
    shown = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return shown.stdout.strip()


def choose(waiting: list[str], costs: dict[str, float], left: float) -> str | None:
    """The first of `waiting` that could run twice in `left` seconds; None when none does."""
    return next((name for name in waiting if 2 * costs[name] <= left), None)


def listed(build: Path) -> dict[str, float]:
    """name -> seconds, as ctest knows them. A suite without COST is an error: it could not be planned."""
    shown = subprocess.run(["ctest", "--test-dir", build, "--show-only=json-v1", "-L", "^engine$"], check=True,
                           stdout=subprocess.PIPE, timeout=60)
    costs = {}
    for test in json.loads(shown.stdout)["tests"]:
        cost = next((p["value"] for p in test["properties"] if p["name"] == "COST"), None)
        if cost is None:
            raise SystemExit(f"engine.py: {test['name']} has no COST in its CMakeLists.txt")
        costs[test["name"]] = float(cost)
    if not costs:
        raise SystemExit(f"engine.py: no test of label engine in {build}")
    return costs


def run(build: Path, name: str, seconds: float) -> bool:
    """Whether the suite passed; ctest ends it, with its children, when `seconds` are over."""
    stop = (datetime.now() + timedelta(seconds=seconds)).strftime("%H:%M:%S")
    return subprocess.run(["ctest", "--test-dir", build, "--output-on-failure", "--no-tests=error", "--stop-time", stop,
                           "-L", "^engine$", "-R", f"^{name.replace('.', '[.]')}$"]).returncode == 0


def run_all(build: Path, costs: dict[str, float], seconds: float) -> tuple[list[str], bool]:
    """Lines that tell what became of each suite, and whether all that ran passed."""
    end = time.monotonic() + seconds
    waiting, lines, good = order(costs, commit()), [], True
    while (name := choose(waiting, costs, end - time.monotonic())) is not None:
        waiting.remove(name)
        start = time.monotonic()
        print(f"==> {name}, {costs[name]:.0f} s on a quiet machine, {end - start:.0f} s left", flush=True)
        if run(build, name, end - start):
            lines.append(f"passed: {name}, {time.monotonic() - start:.0f} s")
        elif time.monotonic() >= end - 2:
            lines.append(f"NOT RUN: {name}, cut off after {time.monotonic() - start:.0f} s by the end of the time, "
                         f"needs {costs[name]:.0f} s")
        elif run(build, name, max(end - time.monotonic(), 2 * costs[name])):
            lines.append(f"FLAKY: {name}, failed once, {time.monotonic() - start:.0f} s for both")
        else:
            good = False
            lines.append(f"FAILED: {name}, twice")
    left = max(0.0, end - time.monotonic())
    for name in waiting:
        lines.append(f"NOT RUN: {name}, would need up to {2 * costs[name]:.0f} s, {left:.0f} s were left")
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="all the time there is; a suite starts only if it could run twice")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release", help="a configured and built tree")
    parser.add_argument("--list", action="store_true", help="print the suites in their order and their seconds; run none")
    options = parser.parse_args()
    costs = listed(options.build)
    if options.list:
        print("\n".join(f"{costs[name]:5.0f} s  {name}" for name in order(costs, commit())), f"{sum(costs.values()):5.0f} s  all", sep="\n")
        return 0
    if options.seconds is None:
        parser.error("--seconds or --list")
    lines, good = run_all(options.build, costs, options.seconds)
    print("\n".join(["==> suites with real engines and trainers:", *lines]))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
