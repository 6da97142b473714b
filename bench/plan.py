#!/usr/bin/env python3
"""./dev bench plan: seconds and memory of planning true model sizes on one core, by `wwctl plan`.

`seconds` is layouts, plan and proof by the clock; `wall` the whole process with the bounds and the
simulation, `cpu` its processor time, which other work on the machine does not lengthen much. `egress` is what a
coordinator sends for the plan: slices once, Prepares with every version; `old_` to agents that understand less.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time

from report import add_options, write

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "tests/data/configs"
CASES = [
    ("kimi-k2", "megatron:tp8,pp8,ep32,etp1,dp4,first=7,last=6", "vllm:tp16,dp8,ep"),
    ("deepseek-v3", "megatron:tp8,pp16,ep16,etp1,dp2,first=3,last=2", "vllm:tp32,dp8,ep"),
    # 1,024 ranks to 512, all of different layouts
    ("kimi-k2", "megatron:tp8,pp8,ep32,etp1,dp16,first=7,last=6", "vllm:tp16,dp8,pp4,ep"),
    ("kimi-k2.5", "megatron:tp8,pp8,ep32,etp1,dp4,first=7,last=6,spec=te", "vllm:tp16,dp8,ep"),
    ("glm-5", "megatron:tp8,pp8,ep32,etp1,dp4,first=9,last=9,spec=te", "vllm:tp16,dp8,ep"),
    ("deepseek-v3.2", "megatron:tp8,pp8,ep32,etp1,dp4,first=7,last=6,spec=te", "vllm:tp16,dp8,ep"),
    ("minimax-m2", "megatron:tp8,pp8,ep32,etp1,dp4,first=7,last=7,spec=te", "vllm:tp16,dp8,ep"),
    # The text model alone, as weightwire.megatron hands it over; and without what vLLM holds as something computed.
    ("qwen3.5-397b-a17b-text", "megatron:tp2,pp4,ep32,etp1,dp32,spec=te,out_norm=plain", "vllm:tp8,dp16,ep"),
    ("nemotron-3-super-like", "megatron:tp2,pp4,ep32,etp1,dp32,spec=te", "vllm:tp8,dp16,ep,skip=*.A_log"),
    ("qwen2-7b", "megatron:tp4,pp2,dp2", "vllm:tp4"),
    ("qwen2.5-0.5b", "megatron:tp2,pp2", "vllm:tp1"),
    ("qwen2.5-0.5b", "megatron:tp2,pp2", "vllm:tp2"),
]


def one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def plan(wwctl: str, model: str, source: str, target: str, *more: str) -> dict:
    cpu_before = cpu_of_children()
    started = time.perf_counter()
    text = subprocess.check_output(
        [wwctl, "plan", "--config", CONFIGS / f"{model}.json", "--from", source, "--to", target, "--json", *more],
        preexec_fn=one_core)
    return {**json.loads(text), "wall": time.perf_counter() - started, "cpu": cpu_of_children() - cpu_before}


def row(wwctl: str, model: str, source: str, target: str) -> dict:
    answers = [plan(wwctl, model, source, target) for _ in range(3)]
    if len({a["plan_id"] for a in answers}) != 1 or any(a["proof"] != "exact" for a in answers):
        raise AssertionError(f"{model} {source} -> {target}: plans differ or are not proved")
    seconds = sorted(a["seconds"] for a in answers)
    return {"name": f"{model} {source} -> {target}", **answers[0], "bytes": answers[0]["bytes_total"],
            "rounds": len(answers), "seconds_median": statistics.median(seconds), "seconds_min": seconds[0],
            "seconds_max": seconds[-1], "wall_min": min(a["wall"] for a in answers),
            "cpu_min": min(a["cpu"] for a in answers), "egress": plan(wwctl, model, source, target, "--egress")["egress"],
            "checked": True}


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench plan", description=__doc__)
    parser.add_argument("--wwctl", required=True)
    add_options(parser)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        r = row(args.wwctl, *case)
        rows.append(r)
        print(f"{r['name']}\n    {r['seconds_min']:.3f} s (process {r['wall_min']:.3f} s, {r['cpu_min']:.3f} s of processor)  "
              f"{r['peak_rss_bytes'] / 1e6:,.0f} MB  {r['copies']:,d} copies  {r['bytes_total'] / 1e9:,.1f} GB  "
              f"egress {r['egress_over_bound']:.4f}  ingress {r['ingress_over_bound']:.4f}  "
              f"simulated {r['simulated_over_bound']:.4f} of the bound\n    coordinator sends "
              + ", ".join(f"{what} {n:,d}" for what, n in r["egress"].items()), flush=True)
    write(args, "Layouts, plan and proof on one core", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
