#!/usr/bin/env python3
"""./dev bench delta: versions of one model of which little changed, sent whole and as changes, in one run.

The model is in bf16 and has the names and shapes of Qwen2.5-0.5B. A trainer (Megatron TP2 x PP2, 4 processes) keeps float32
masters, moves each by a small random step and publishes what they round to: so many elements change as the rows say, most of
them by one unit in the last place, as under Adam. Each version is compared with a checkpoint that numpy writes of the masters.

dense-1gbit, delta-1gbit-D   an engine (vLLM TP1) reads over tcp at 125 MB/s; D: per cent of the elements that changed
xorzstd-D                    bytes of zstd -1 of the XOR of the same two versions, by segments of 1 MiB
dense-loopback, auto-loopback   delta: off and auto, tcp without a limit
encode-1, apply-1            one core, 1 per cent changed (./dev bench kernels --only delta)
Seconds: from the publish call until the trainer is released. bytes_sent: what the engine's agent read.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

import numpy as np

from demo import checkpoint
from demo.fleet import Engine, Fleet
from report import add_options, write

_GBIT = 125_000_000
_SEGMENT = 1 << 20
#: A step of this size changes about so many per cent of the elements.
_STEPS = {"0.43": 1.5e-7, "3.1": 1.48e-6}


def bits(values: np.ndarray) -> np.ndarray:
    """bf16, rounded to nearest even."""
    raw = values.view(np.uint32)
    return ((raw + (((raw >> 16) & 1) + 0x7FFF).astype(np.uint32)) >> 16).astype(np.uint16)


class Model:
    """Masters, and the bf16 bits that they round to, in the order of `checkpoint.hf_shapes`."""

    def __init__(self, config: dict):
        self.config = config
        self._rng = np.random.Generator(np.random.SFC64(11))
        self._masters = [0.02 * self._rng.standard_normal(int(np.prod(shape)), np.float32)
                         for shape in checkpoint.hf_shapes(config).values()]
        self.now = [bits(master) for master in self._masters]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.now)

    def step(self, size: float) -> float:
        """Moves every master by up to `size`; the share of elements whose bits changed."""
        changed = 0
        for i, master in enumerate(self._masters):
            master += np.float32(2 * size) * (self._rng.random(master.size, np.float32) - np.float32(0.5))
            before, self.now[i] = self.now[i], bits(master)
            changed += int(np.count_nonzero(before != self.now[i]))
        return 2 * changed / self.nbytes

    def write(self, directory: str) -> None:
        checkpoint.write_tensors(directory, self.config, (memoryview(tensor).cast("B") for tensor in self.now))


def versions(binary: str, model: Model, size: float, rounds: int, options: dict, agent: dict) -> dict:
    """A row: `rounds` versions after two that are not measured, the last one compared in every element."""
    seconds, sent, density, last = [], [], [], rounds + 2
    work = tempfile.mkdtemp(prefix="weightwire-bench-")
    try:
        with Fleet(model.config, binary, engines=[Engine("engine", 1, "tcp")], options=options, agent_options=agent) as fleet:
            for version in range(1, last + 1):
                share = model.step(size)
                model.write(work)
                fleet.each(fleet.trainers, "load", work)
                took = fleet.publish(version)[1]
                status = fleet.wait_serving(version)
                if version <= 2:
                    continue
                epoch = next(e for e in status.epochs if e.version == version)
                seconds.append(took)
                sent.append(sum(epoch.bytes_by_transport.values()))
                density.append(share)
            _, wrong, serving = fleet.engines[0].ranks[0].ask("verify", last, work)
            if wrong or serving != last:
                raise AssertionError(f"the engine serves version {serving} with {wrong} wrong elements")
            memory = fleet.hub.counter("weightwire_staging_bytes")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"bytes_dense": model.nbytes, "bytes_sent": int(statistics.median(sent)), "rounds": rounds,
            "seconds_median": statistics.median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds),
            "density": statistics.median(density), "staging_bytes": memory, "checked": True}


def xor_zstd(model: Model, size: float) -> dict:
    """What others send of one step."""
    name = ctypes.util.find_library("zstd")
    if name is None:
        raise RuntimeError("libzstd is not installed")
    zstd = ctypes.CDLL(name)
    for function in (zstd.ZSTD_compress, zstd.ZSTD_compressBound, zstd.ZSTD_decompress):
        function.restype = ctypes.c_size_t
    before = list(model.now)
    share = model.step(size)
    room = ctypes.create_string_buffer(zstd.ZSTD_compressBound(ctypes.c_size_t(_SEGMENT)))
    back = ctypes.create_string_buffer(_SEGMENT)
    sent = 0
    for old, new in zip(before, model.now):
        difference = (old ^ new).tobytes()
        for at in range(0, len(difference), _SEGMENT):
            part = difference[at:at + _SEGMENT]
            made = zstd.ZSTD_compress(room, ctypes.c_size_t(len(room)), part, ctypes.c_size_t(len(part)), 1)
            if zstd.ZSTD_decompress(back, ctypes.c_size_t(_SEGMENT), room, ctypes.c_size_t(made)) != len(part) or \
                    back.raw[:len(part)] != part:
                raise AssertionError("zstd does not give back what it took")
            sent += made
    return {"bytes_dense": model.nbytes, "bytes_sent": sent, "rounds": 1, "seconds_median": None, "density": share,
            "checked": True}


def kernels(binary: str) -> list[dict]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run([str(pathlib.Path(binary).with_name("kernels_bench")), "--only", "delta", "--json", out.name], check=True,
                       stdout=subprocess.DEVNULL)
        rows = json.load(open(out.name))["rows"]
    found = []
    for name, wanted in (("encode-1", "encode+copy"), ("apply-1", "apply")):
        row = next(r for r in rows if r["name"] == f"delta {wanted}, 1 %")
        found.append({**row, "name": name, "bytes_dense": row["bytes"], "bytes_sent": None, "density": 0.01, "checked": True})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench delta", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    model = Model(checkpoint.SMALL if args.small else checkpoint.QWEN25_05B)
    limit, rows = {"rate_limit": _GBIT}, []

    def add(name: str, row: dict) -> dict:
        rows.append({"name": name, **row})
        sent, took = row["bytes_sent"], row["seconds_median"]
        print(f"{name:18s} {row['bytes_dense'] / 1e6:8,.0f} MB" + (f"  sent {sent / 1e6:9.2f} MB" if sent else "")
              + (f"  median {took:.3f} s" if took else "") + f"  {100 * row['density']:.2f} % changed"
              + (f"  {row['bytes_dense'] / took / 1e9:.2f} GB/s" if took else ""), flush=True)
        return rows[-1]

    dense = add("dense-1gbit", versions(args.binary, model, _STEPS["3.1"], 2, {**limit, "delta": '"off"'}, {**limit, "delta": '"off"'}))
    for name, size in _STEPS.items():
        row = add(f"delta-1gbit-{name}", versions(args.binary, model, size, args.rounds, {**limit, "delta": "auto"}, limit))
        print(f"  {row['bytes_dense'] / row['bytes_sent']:.1f} x fewer bytes, "
              f"{dense['seconds_median'] / row['seconds_median']:.1f} x less time than dense; the trainer's agent counts "
              f"{(row['staging_bytes'] or 0) / 1e6:,.0f} MB")
    xor = add("xorzstd-3.1", xor_zstd(model, _STEPS["3.1"]))
    print(f"  changes are {next(r for r in rows if r['name'] == 'delta-1gbit-3.1')['bytes_sent'] / xor['bytes_sent']:.2f} of it")
    # In turns: what else this machine does meets both.
    off: list[dict] = []
    auto: list[dict] = []
    for _ in range(2):
        off.append(versions(args.binary, model, _STEPS["3.1"], args.rounds, {"delta": '"off"'}, {}))
        auto.append(versions(args.binary, model, _STEPS["3.1"], args.rounds, {"delta": "auto"}, {}))
    best = [add(name, min(runs, key=lambda run: run["seconds_median"])) for name, runs in (("dense-loopback", off), ("auto-loopback", auto))]
    print(f"  auto is {best[1]['seconds_median'] / best[0]['seconds_median']:.2f} x dense")
    for row in kernels(args.binary):
        add(row.pop("name"), row)
    write(args, f"{model.nbytes / 1e6:,.0f} MB of which little changed", rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
