#!/usr/bin/env python3
"""./dev bench convert-memory: the peak of the resident set (VmHWM, planner included) of conversions between
safetensors forms of a model that fits no bound: to ranks and back to whole tensors, the latter interrupted by SIGINT on
the way and called again. What comes back is compared with what there was, byte by byte.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from demo import checkpoint
from report import add_options, write

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_CODE = ("import sys; from weightwire.checkpoint.__main__ import main; status = main(sys.argv[1:]); "
         "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))); "
         "sys.exit(status)")
#: 4.4 GB
MODEL = {**checkpoint.QWEN25_05B, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 24,
         "num_attention_heads": 16, "num_key_value_heads": 4}


def convert(source: pathlib.Path, target: pathlib.Path, to: str, memory: str, stop_after: float = 0.0) -> dict:
    """One process; with `stop_after`, a SIGINT when that part of its bytes is written, and another process that goes on."""
    command = [sys.executable, "-c", _CODE, "convert", str(source), str(target), "--to", to, "--memory", memory]
    peaks, begin = [], time.monotonic()
    while True:
        ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in ran.stderr:
            words = line.split()
            if stop_after and words[0] == "write:" and float(words[1]) > stop_after * float(words[3]):
                ran.send_signal(signal.SIGINT)
                stop_after = 0.0
        said = ran.stdout.read().split()
        status = ran.wait(600)
        peaks.append(1024 * int(said[-1]))
        if status != 130:
            assert status == 0, (status, said)
            return {"name": f"{source.name} -> {to}", "runs": len(peaks), "peak_bytes": max(peaks),
                    "seconds": time.monotonic() - begin}


def places(file: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes lie in a safetensors file."""
    with open(file, "rb") as source:
        length = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(length))
    return {name: (8 + length + entry["data_offsets"][0], entry["data_offsets"][1] - entry["data_offsets"][0])
            for name, entry in header.items() if name != "__metadata__"}


def equal(a: pathlib.Path, b: pathlib.Path) -> bool:
    """The same tensors with the same bytes, a few of them in memory at a time."""
    here, there = places(a), places(b)
    with open(a, "rb") as one, open(b, "rb") as other:
        for name, (begin, size) in here.items():
            for at in range(0, size, 16 << 20):
                one.seek(begin + at)
                other.seek(there[name][0] + at)
                count = min(16 << 20, size - at)
                if one.read(count) != other.read(count):
                    return False
    return {n: size for n, (_, size) in here.items()} == {n: size for n, (_, size) in there.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wwctl", required=True)
    parser.add_argument("--memory", default="256MiB")
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"])
    add_options(parser)
    args = parser.parse_args()
    os.environ.update(WEIGHTWIRE_BIN_DIR=str(pathlib.Path(args.wwctl).resolve().parent),
                      PYTHONPATH=str(_ROOT / "client/python"))
    work = pathlib.Path(tempfile.mkdtemp(prefix="weightwire-bench-"))
    try:
        checkpoint.write(str(work / "hf"), {**MODEL, "num_hidden_layers": args.layers}, seed=1)
        size = (work / "hf/model.safetensors").stat().st_size
        rows = [convert(work / "hf", work / "native", "weightwire:megatron:tp2,pp2", args.memory),
                convert(work / "native", work / "back", "hf", args.memory, stop_after=0.3)]
        assert equal(work / "hf/model.safetensors", work / "back/model.safetensors")
    finally:
        shutil.rmtree(work)
    for row in rows:
        print(f"{row['name']}: {size / 1e9:.2f} GB, --memory {args.memory}: at most {row['peak_bytes'] / 1e6:.0f} MB resident "
              f"({row['peak_bytes'] / 2**20:.0f} MiB); {row['runs']} runs, {row['seconds']:.0f} s")
    write(args, "Checkpoints converted in bounded memory", [{**row, "bars": {"peak": row["peak_bytes"] / 1e6}} for row in rows], "MB")


if __name__ == "__main__":
    main()
