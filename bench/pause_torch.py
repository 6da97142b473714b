#!/usr/bin/env python3
"""The part of ./dev bench pause that runs with torch: how long `publish` of weightwire.torch, and a round of a stream of whole tensors as
verl and TRL give it, block a trainer of one rank, on CPUs.

Prints one line of JSON: seconds of `publish`, of a memcpy of as many bytes, of a stream's round (its copy and its publish until every
engine has the version) and of its publish alone, in every round. Each version is one that an engine has taken whole, and its last bytes
are compared; nothing is left to be waited for when the next one is published.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

import weightwire.torch
from demo import checkpoint
from demo.fleet import Daemon
from weightwire import Release, Subscriber, TensorMeta, boxes
from weightwire.tensor_stream import TensorSource

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

    def memcpy() -> float:
        began = time.perf_counter()
        ctypes.memmove(target.ctypes.data, source.ctypes.data, nbytes)
        return time.perf_counter() - began

    def versions(agent: str, send: Callable[[int], Release]) -> None:
        """Every version is whole on the engine before the next one."""
        with Subscriber(group="engine", rank=0, world_size=1, agent=agent, timeout=_SECONDS) as engine:
            engine.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
            for version in range(1, _WARM_ROUNDS + args.rounds + 1):
                for tensor in weights.values():
                    tensor.fill_(version)
                release = send(version)
                offer = engine.wait_offer(_SECONDS)
                if offer is None or offer.version != version:
                    raise AssertionError(f"version {version} did not come: {offer}; {engine.last_fence}")
                held = engine.flip(offer)
                engine.acknowledge(offer)
                release.wait_released(_SECONDS)
                for name, tensor in weights.items():
                    if int(held[name].reshape(-1)[-1]) != int(tensor.view(torch.int16).reshape(-1)[-1]) & 0xFFFF:
                        raise AssertionError(f"version {version}: {name} is not what was published")

    def live(publisher: weightwire.torch.Publisher, version: int) -> Release:
        copied.append(memcpy())
        release = publisher.publish(version)
        blocked.append(publisher.blocked_seconds)
        return release

    def stream(tensors: TensorSource, version: int) -> Release:
        began = time.perf_counter()
        tensors.load(iter(weights.items()), _SECONDS)
        loaded = time.perf_counter()
        release = tensors.publish(version, _SECONDS)
        release.wait_released(_SECONDS)
        ended = time.perf_counter()
        streamed.append(ended - began)
        published.append(ended - loaded)
        stream_copied.append(memcpy())
        return release

    blocked, copied, streamed, published, stream_copied = [], [], [], [], []
    with tempfile.TemporaryDirectory(prefix="weightwire-pause-") as work:
        for name in ("live", "stream"):
            daemon = Daemon(binary, f"{work}/{name}", "hub", role="all", listen="127.0.0.1:0")
            if name == "live":
                with weightwire.torch.Publisher(weights, agent=daemon.agent_socket, timeout=_SECONDS, device="cpu") as publisher:
                    versions(daemon.agent_socket, functools.partial(live, publisher))
            else:
                tensors = TensorSource(512 << 20, agent=daemon.agent_socket, timeout=_SECONDS)
                versions(daemon.agent_socket, functools.partial(stream, tensors))
                tensors.close()
            daemon.stop()
    kept = slice(_WARM_ROUNDS, None)
    print(json.dumps({"bytes": nbytes, "blocked": blocked[kept], "memcpy": copied[kept], "stream": streamed[kept],
                      "stream_publish": published[kept], "stream_memcpy": stream_copied[kept]}))


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    main()
