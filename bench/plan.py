#!/usr/bin/env python3
"""./dev bench plan: seconds and memory of planning true model sizes, by `wwctl plan`."""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys

from report import machine

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "tests/data/configs"
CASES = [
    ("qwen2.5-0.5b", "megatron:tp2,pp2", "vllm:tp1"),
    ("qwen2.5-0.5b", "megatron:tp2,pp2", "vllm:tp2"),
    ("qwen2-7b", "megatron:tp4,pp2,dp2", "vllm:tp4"),
]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench plan", description=__doc__)
    parser.add_argument("--wwctl", required=True)
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args()
    rows = []
    for model, source, target in CASES:
        answers = [json.loads(subprocess.check_output(
            [args.wwctl, "plan", "--config", CONFIGS / f"{model}.json", "--from", source, "--to", target, "--json"]))
            for _ in range(3)]
        seconds = [a["seconds"] for a in answers]
        same = len({a["plan_id"] for a in answers}) == 1 and all(a["proof"] == "exact" for a in answers)
        if not same:
            raise AssertionError(f"{model} {source} -> {target}: plans differ or are not proved")
        rows.append({"name": f"{model} {source} -> {target}", **answers[0], "seconds_min": min(seconds)})
        a = answers[0]
        print(f"{rows[-1]['name']:48s} {min(seconds):.3f} s  {a['copies']:7,d} copies  {a['bytes_total'] / 1e6:9,.0f} MB  "
              f"egress {a['egress_over_bound']:.3f}  ingress {a['ingress_over_bound']:.3f} of the bound")
    if args.json:
        with open(args.json, "w") as out:
            json.dump({"machine": machine(), "rows": rows}, out, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
