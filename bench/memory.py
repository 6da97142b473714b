#!/usr/bin/env python3
"""./dev bench memory: what agents take while versions move, against what `wwctl plan` says in advance.

A Megatron TP2 x PP2 trainer to a vLLM TP1 engine, over shm through one agent and over tcp through two. An agent may have in
memory: what `wwctl plan` states for it (slots, scratch, and the stage where an engine's rank is behind it), the
application memory that it maps, which is not its own, and 64 MiB for itself. Measured is the peak of its resident set, as
the kernel counts it (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile

import numpy as np

from demo import checkpoint
from demo.fleet import Daemon, Engine, Fleet
from report import add_options, write
from rounds import timed_rounds

OWN_BYTES = 64 << 20
#: layers and vocabulary that make the named number of gigabytes (1e9 bytes)
MODELS = {"1": checkpoint.QWEN25_05B,
          "4": {**checkpoint.QWEN25_05B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 28,
                "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 151_936}}


def metric(daemon: Daemon, name: str) -> int:
    return int(float(re.search(rf"^{name} (\S+)$", daemon.metrics(), re.M)[1]))


def peak(daemon: Daemon) -> int:
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", open(f"/proc/{daemon.pid}/status").read(), re.M)[1]) * 1024


def stated(wwctl: str, config: dict) -> dict:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        plan = subprocess.run([wwctl, "plan", "--config", file.name, "--from", "megatron:tp2,pp2", "--to", "vllm:tp1",
                               "--json"], check=True, stdout=subprocess.PIPE, timeout=60)
    return json.loads(plan.stdout)["staging"]


def measure(binary: str, config: dict, via: str, rounds: int) -> list[dict]:
    staging = stated(binary.replace("weightwired", "wwctl"), config)
    with Fleet(config, binary, engines=[Engine("engine", 1, via)]) as fleet:
        timed_rounds(fleet, config, rounds)
        rows = []
        for daemon in fleet.daemons:
            has_engine = daemon is fleet.daemons[-1]
            own = int(staging["target_max"] if has_engine else staging["source_max"])
            mapped = metric(daemon, "weightwire_registered_memory_bytes") - metric(daemon, "weightwire_staging_bytes")
            if via == "shm":  # its engine maps it once more; the kernel counts a page each time that it is mapped
                mapped *= 2
            rows.append({"agent": daemon.name, "via": via, "peak": peak(daemon), "stated": own, "mapped": mapped,
                         "bound": own + mapped + OWN_BYTES})
        return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench memory", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--models", nargs="+", choices=[*MODELS, "small"], default=["1"], help="gigabytes; 4 needs 14 GB")
    parser.add_argument("--rounds", type=int, default=3)
    add_options(parser)
    args = parser.parse_args()
    rows = []
    for model in args.models:
        config = MODELS.get(model, checkpoint.SMALL)
        nbytes = sum(2 * int(np.prod(s)) for s in checkpoint.hf_shapes(config).values())
        for via in ("shm", "tcp"):
            for row in measure(args.binary, config, via, args.rounds):
                rows.append({"model_bytes": nbytes, "name": f"{nbytes / 1e6:,.0f} MB by {via}, {row['agent']}",
                             "bars": {"peak": row["peak"] / 1e6, "bound": row["bound"] / 1e6}, **row})
                print(f"{nbytes / 1e6:6,.0f} MB by {via}, {row['agent']:6s} peak {row['peak'] / 1e6:8,.0f} MB, bound "
                      f"{row['bound'] / 1e6:8,.0f} (stated {row['stated'] / 1e6:,.0f}, mapped {row['mapped'] / 1e6:,.0f})  "
                      f"{row['peak'] / row['bound']:.2f}", flush=True)
    write(args, "Peak resident memory of agents, and what they may take", rows, unit="MB")
    over = [row for row in rows if row["peak"] > row["bound"]]
    for row in over:
        print(f"{row['agent']} by {row['via']} took more than it stated", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
