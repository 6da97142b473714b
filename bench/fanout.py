#!/usr/bin/env python3
"""./dev bench fanout: one trainer to 1, 2, … N engines whose links are narrow, every agent with a rate_limit: all engines
read from the trainer (star), each from the one before it (chain), or from one that feeds two (tree). As root each agent
has an IPC namespace of its own and so counts as a host; else there is one host, on which a tree is a chain, and is left out.

A Megatron TP2 x PP2 trainer behind one agent, each vLLM TP1 engine behind an agent of its own, all over tcp on this
machine. Cores must not be the limit: choose a rate that they can serve N times over. Seconds are from the publish call
to the last STAGED; every engine's bytes are compared in the last round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

import numpy as np

from demo import checkpoint
from demo.fleet import Engine, Fleet
from report import add_options, write
from rounds import timed_rounds

# A relay passes a slot on when it has it: smaller slots make a chain's start shorter.
SLOTS = {"slot_bytes": 2 << 20, "chunk_bytes": 1 << 20, "segment_bytes_max": 1 << 18, "slots_in_pool": 64}
ROOT = os.geteuid() == 0
MODEL = {**checkpoint.QWEN25_05B, "num_hidden_layers": 8, "vocab_size": 37_984}


def measure(binary: str, config: dict, fanout: str, engines: int, rate: int, rounds: int) -> list[float]:
    limit = {"rate_limit": rate, **SLOTS}
    with Fleet(config, binary, engines=[Engine(f"engine-{i}", 1, "tcp") for i in range(engines)],
               options={**limit, "fanout": fanout}, agent_options=limit, own_hosts=ROOT) as fleet:
        return timed_rounds(fleet, config, rounds)[0][1:]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench fanout", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rate", type=float, default=1e8, help="rate_limit of every agent, bytes a second")
    parser.add_argument("--rounds", type=int, default=5)
    add_options(parser)
    args = parser.parse_args()
    nbytes = sum(2 * int(np.prod(s)) for s in checkpoint.hf_shapes(MODEL).values())
    memory = nbytes * (2 + 2 * max(args.engines))
    print(f"{nbytes / 1e6:,.0f} MB at {args.rate:.3g} B/s an agent; one engine takes about "
          f"{nbytes / args.rate:.2f} s. Memory for {max(args.engines)} engines: {memory / 1e9:.1f} GB")
    rows = []
    ways = ("star", "chain", "tree") if ROOT else ("star", "chain")
    for engines, fanout in [(n, f) for n in args.engines for f in (ways if n > 1 else ways[:1])]:
        seconds = measure(args.binary, MODEL, fanout, engines, int(args.rate), args.rounds)
        median = statistics.median(seconds)
        rows.append({"name": f"{fanout}-{engines}", "engines": engines, "bytes": nbytes, "rate": args.rate,
                     "rounds": len(seconds), "seconds_median": median, "seconds_min": min(seconds),
                     "seconds_max": max(seconds), "ratio_to_first": median / rows[0]["seconds_median"] if rows else 1.0})
        print(f"{fanout:5s}, {engines:2d} engines  median {median:7.2f} s  (min {min(seconds):.2f}, max {max(seconds):.2f})  "
              f"{rows[-1]['ratio_to_first']:5.2f} x {args.engines[0]}", flush=True)
    write(args, f"{nbytes / 1e6:,.0f} MB to several engines at {args.rate:.3g} B/s an agent", rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
