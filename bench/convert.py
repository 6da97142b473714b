#!/usr/bin/env python3
"""./dev bench convert: conversions of a checkpoint of 988 MB between formats, each a process of its own from start to end,
against copying the same bytes.

cp, cp + sync     coreutils' cp of the folder; with sync FILE after it, as every conversion here is durable when it ends
A -> B            python -m weightwire.checkpoint convert, planner and start included; what comes back as hf is compared
                  bit for bit. Formats that are written with torch need the environment of tests/envs/make.sh megatron
mbridge: A -> B   there too: mbridge builds megatron-core's model on the CPU (tp1, one process) and loads or saves Hugging
                  Face; megatron-core's dist_checkpointing saves or loads torch_dist
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Callable

import numpy as np

from demo import checkpoint
from report import Report, add_options, write

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MEGATRON = pathlib.Path(os.environ.get("WEIGHTWIRE_VENVS", pathlib.Path.home() / ".cache/weightwire/venvs")) / "megatron"
_SECONDS = 600
#: (from, to) in an order in which each source has been made before
_CONVERSIONS = [("hf", "weightwire:megatron:tp2,pp2"), ("weightwire:megatron:tp2,pp2", "hf")]
_WITH_TORCH = [("hf", "megatron:tp2,pp2"), ("megatron:tp2,pp2", "hf"), ("hf", "torch_dist"), ("torch_dist", "hf")]


def equal(folder: pathlib.Path, source: dict[str, np.ndarray]) -> bool:
    """Whether the Hugging Face checkpoint there holds exactly the source's tensors, whatever its files are called."""
    found = checkpoint.read(str(folder))
    return found.keys() == source.keys() and all(np.array_equal(found[name], source[name]) for name in source)


class Bench:
    """Conversions below `work`, timed."""

    def __init__(self, work: pathlib.Path, wwctl: str, rounds: int, config: dict) -> None:
        self.work, self.rounds = work, rounds
        self.report = Report("cp + sync")
        self._environment = {**os.environ, "PYTHONPATH": str(_ROOT / "client/python"), "OMP_NUM_THREADS": str(os.cpu_count()),
                             "WEIGHTWIRE_BIN_DIR": str(pathlib.Path(wwctl).resolve().parent)}
        checkpoint.write(str(work / "hf"), config, seed=1)
        self.source = checkpoint.read(str(work / "hf"))
        self.bytes = sum(array.nbytes for array in self.source.values())

    def row(self, name: str, commands: Callable[[pathlib.Path], list[list[str]]], keep: pathlib.Path | None = None,
            hf: bool = False) -> None:
        """`commands(target)` one after another, `rounds` times, each time into a target that does not exist."""
        seconds, target = [], self.work / "target"
        for _ in range(self.rounds):
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            started = time.perf_counter()
            for command in commands(target):
                run = subprocess.run(command, timeout=_SECONDS, env=self._environment, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.PIPE, text=True)
                if run.returncode:
                    raise RuntimeError(f"{name}: {' '.join(command)} ended with {run.returncode}:\n{run.stderr[-2000:]}")
            seconds.append(time.perf_counter() - started)
        self.report.add(name, self.bytes, seconds, not hf or equal(target, self.source))
        if keep:
            target.rename(keep)
        shutil.rmtree(target, ignore_errors=True)

    def copies(self) -> None:
        def copied(target: pathlib.Path) -> list[list[str]]:
            return [["cp", "-r", str(self.work / "hf"), str(target)]]
        self.row("cp + sync", lambda target: [*copied(target), ["sync", *(str(target / path.name) for path in
                                                                       (self.work / "hf").iterdir())]], hf=True)
        self.row("cp", copied, hf=True)

    def convert(self, python: str, source: str, target: str) -> None:
        def command(folder: pathlib.Path) -> list[list[str]]:
            return [[python, "-m", "weightwire.checkpoint", "convert", str(self.folder(source)), str(folder), "--to", target,
                     "--config", str(self.work / "hf/config.json"), "--quiet"]]
        self.row(f"{source} -> {target}", command, None if target == "hf" else self.folder(target), target == "hf")

    def mbridge(self, python: str) -> None:
        def to(target: str, source: pathlib.Path) -> Callable[[pathlib.Path], list[list[str]]]:
            return lambda folder: [[python, str(_ROOT / "bench/convert_mbridge.py"), target, str(self.work / "hf"),
                                    str(source), str(folder)]]
        made = self.work / "mbridge"
        self.row("mbridge: hf -> torch_dist", to("torch_dist", self.work / "hf"), made)
        self.row("mbridge: torch_dist -> hf", to("hf", made), hf=True)

    def folder(self, kind: str) -> pathlib.Path:
        return self.work / kind.replace(":", "-").replace(",", "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench convert", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wwctl", required=True)
    parser.add_argument("--folder", help="where to work; default: a new one in the temporary folder. Needs 6 GB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-mbridge", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    python = str(_MEGATRON / "bin/python") if (_MEGATRON / ".weightwire").exists() else None
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-", dir=args.folder) as work:
        bench = Bench(pathlib.Path(work), args.wwctl, args.rounds, checkpoint.SMALL if args.small else checkpoint.QWEN25_05B)
        bench.copies()
        for source, target in _CONVERSIONS:
            bench.convert(sys.executable, source, target)
        if python is None:
            print(f"without the formats that torch writes, and mbridge: {_MEGATRON} is not there")
        else:
            for source, target in _WITH_TORCH:
                bench.convert(python, source, target)
            if not args.no_mbridge:
                bench.mbridge(python)
        write(args, f"Conversions of a checkpoint of {bench.bytes / 1e6:,.0f} MB", bench.report.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
