#!/usr/bin/env python3
"""The part of ./dev bench pause that runs with torch: how long `publish` of weightwire.torch blocks a trainer of one rank, on CPUs.

Prints one line of JSON: seconds of `publish`, and of a memcpy of as many bytes, in every round. Each version is one that an engine has
taken whole, and its last bytes are compared; nothing is left to be waited for when the next one is published.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import tempfile
import time

import numpy as np
import torch

import weightwire.torch
from demo import checkpoint
from demo.fleet import Daemon
from weightwire import Subscriber, TensorMeta, boxes

_WARM_ROUNDS = 2  # both buffers of the stage have been written
_SECONDS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    binary = os.path.join(os.environ["WEIGHTWIRE_BIN_DIR"], "weightwired")
    shapes = checkpoint.hf_shapes(checkpoint.SMALL if args.small else checkpoint.QWEN25_05B)
    weights = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    nbytes = sum(tensor.nbytes for tensor in weights.values())
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    metas = {name: TensorMeta(name, "BF16", tuple(shape)) for name, shape in shapes.items()}
    blocked, copied = [], []
    with tempfile.TemporaryDirectory(prefix="weightwire-pause-") as work:
        daemon = Daemon(binary, f"{work}/hub", "hub", role="all", listen="127.0.0.1:0")
        with Subscriber(group="engine", rank=0, world_size=1, agent=daemon.agent_socket, timeout=_SECONDS) as engine, \
                weightwire.torch.Publisher(weights, agent=daemon.agent_socket, timeout=_SECONDS, device="cpu") as publisher:
            engine.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
            for version in range(1, _WARM_ROUNDS + args.rounds + 1):
                for tensor in weights.values():
                    tensor.fill_(version)
                began = time.perf_counter()
                ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
                copied.append(time.perf_counter() - began)
                release = publisher.publish(version)
                blocked.append(publisher.blocked_seconds)
                offer = engine.wait_offer(_SECONDS)
                if offer is None or offer.version != version:
                    raise AssertionError(f"version {version} did not come: {offer}; {engine.last_fence}")
                held = engine.flip(offer)
                engine.acknowledge(offer)
                release.wait_released(_SECONDS)
                for name, tensor in weights.items():
                    if int(held[name].reshape(-1)[-1]) != int(tensor.view(torch.int16).reshape(-1)[-1]) & 0xFFFF:
                        raise AssertionError(f"version {version}: {name} is not what was published")
        daemon.stop()
    print(json.dumps({"bytes": nbytes, "blocked": blocked[_WARM_ROUNDS:], "memcpy": copied[_WARM_ROUNDS:]}))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
