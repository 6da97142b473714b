#!/usr/bin/env python3
"""./dev bench quantize: weights made fp8 on the way to an engine, against the same weights sent as they are.

A trainer holds bf16 with the names and shapes of Qwen2.5-0.5B, an engine has them as checkpoints do: in bf16, or its linear
layers in fp8 with scales of 128 x 128 blocks, or in MXFP8. Two agents, tcp, every element changes before every version, and the
rows take turns. Seconds: from the publish call until the trainer is released. Each element of the last version is compared with
the float that it was made of: they may differ by what rounding to the nearest code loses.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time

import numpy as np

from demo import checkpoint
from demo.fleet import Daemon
from report import Report, add_options, write
from weightwire import Publisher, Subscriber, TensorMeta

_BLOCK = {"fp8 128 x 128": (128, 128, "F32"), "mxfp8": (1, 32, "U8")}
_METHOD = {"fp8 128 x 128": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
           "mxfp8": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}
_CODES = np.array([(-1) ** (c >> 7) * ((8 + c % 8) * 2.0 ** ((c >> 3 & 15) - 10) if c >> 3 & 15 else c % 8 * 2.0 ** -9)
                   for c in range(256)], np.float32)


def quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


class Job:
    """A job of its own: one trainer rank, one engine rank, an agent job."""

    def __init__(self, binary: str, work: str, kind: str, config: dict):
        self.kind, self.shapes = kind, checkpoint.hf_shapes(config)
        options = {"transports": "[tcp]", "delta": '"off"'}
        self._hub = Daemon(binary, f"{work}/hub", "hub", role="all", listen="127.0.0.1:0", **options)
        self._rollout = Daemon(binary, f"{work}/rollout", "rollout", role="agent", coordinator=self._hub.grpc, **options)
        observed = [TensorMeta(name, "BF16", shape) for name, shape in self.shapes.items()]
        self._publisher = Publisher(rank=0, world_size=1, agent=self._hub.agent_socket)
        self._engine = Subscriber(group="engine", rank=0, world_size=1, agent=self._rollout.agent_socket)
        self.weights = {name: buffer.view(np.uint16) for name, buffer in self._publisher.bind(config, "hf", observed).items()}
        if kind in _METHOD:
            rows, columns, dtype = _BLOCK[kind]
            config = {**config, "quantization_config": {**_METHOD[kind], "modules_to_not_convert": ["lm_head"]}}
            observed = [TensorMeta(t.name, "F8_E4M3" if quantized(t.name) else "BF16", t.shape) for t in observed]
            observed += [TensorMeta(f"{t.name}_scale_inv", dtype, (-(-t.shape[0] // rows), -(-t.shape[1] // columns)))
                         for t in observed if quantized(t.name)]
        self._engine.bind(config, "hf", observed)
        rng = np.random.Generator(np.random.SFC64(3))
        for weights in self.weights.values():
            values = 0.02 * rng.standard_normal(weights.size, np.float32).reshape(weights.shape)
            weights[...] = (values.view(np.uint32) >> 16).astype(np.uint16)
        self.seconds: list[float] = []

    def version(self, version: int) -> None:
        for weights in self.weights.values():
            weights ^= 0x0101
        flipped = threading.Thread(target=self._flip)
        flipped.start()
        started = time.perf_counter()
        self._publisher.publish(version).wait_released(120)
        self.seconds.append(time.perf_counter() - started)
        flipped.join()

    def _flip(self) -> None:
        offer = self._engine.wait_offer(120)
        self._engine.flip(offer)
        self._engine.acknowledge(offer)

    def right(self) -> bool:
        for name, bits in self.weights.items():
            got = self._engine.params[name]
            if self.kind not in _BLOCK or not quantized(name):
                if not np.array_equal(got.view(np.uint16), bits):
                    return False
                continue
            rows, columns, dtype = _BLOCK[self.kind]
            scales = self._engine.params[f"{name}_scale_inv"]
            scales = scales.view(np.float32) if dtype == "F32" else np.exp2(scales.view(np.uint8).astype(np.float32) - 127)
            scales = np.repeat(np.repeat(scales, rows, 0), columns, 1)[:bits.shape[0], :bits.shape[1]]
            wanted = (bits.astype(np.uint32) << 16).view(np.float32)
            lost = np.abs(_CODES[got.view(np.uint8)] * scales - wanted)
            if not (lost <= 1.00001 * np.maximum(np.abs(wanted) / 16, scales / 1024)).all() or (scales * 448 > 4).any():
                return False
        return True

    def close(self) -> None:
        self._engine.close()
        self._publisher.close()
        for daemon in (self._rollout, self._hub):
            if daemon.stop() != 0:
                raise AssertionError(f"{daemon.name} did not end well")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench quantize", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    config = checkpoint.SMALL if args.small else checkpoint.QWEN25_05B
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-") as work:
        jobs = [Job(args.binary, f"{work}/{i}", kind, config) for i, kind in enumerate(("bf16", *_METHOD))]
        for version in range(1, args.rounds + 2):
            for job in jobs:
                job.version(version)
        report = Report("bf16")
        for job in jobs:
            nbytes = sum(weights.nbytes for weights in job.weights.values())
            report.add(job.kind, nbytes, job.seconds[1:], job.right(), job.seconds[0])
        for job in jobs:
            job.close()
    write(args, "Weights of a trainer in bf16, to an engine over tcp", report.rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
