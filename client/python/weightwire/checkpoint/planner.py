"""The planner, asked offline: `wwctl` computes layouts, plans, and proves the plan; this reads what it says."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from weightwire.boxes import Box, Held
from weightwire.checkpoint.stored import CheckpointError
from weightwire.memory import TensorMeta

_MAGIC = b"wwplan1\n"
_TIMEOUT = 600


@dataclass(frozen=True)
class Copy:
    """One strided block, in elements: (i…) is at offset + sum(i * stride) of each side's row-major tensor."""

    canonical: str
    source_rank: int
    source_tensor: int
    target_rank: int
    target_tensor: int
    extent: Tuple[int, ...]
    source_offset: int
    source_stride: Tuple[int, ...]
    target_offset: int
    target_stride: Tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.extent)


@dataclass(frozen=True)
class Plan:
    id: str
    copies: List[Copy]


class Planner:
    """`wwctl`, at `path`, for the model of the config.json with this text. It remembers what it said."""

    def __init__(self, config: str, path: str):
        self._config, self._path = config, path
        self._boxes: Dict[str, List[List[Held]]] = {}
        self._rank_boxes: Dict[Tuple[str, int], List[Held]] = {}
        self._plans: Dict[Tuple[str, str], Plan] = {}

    def layout(self, spec: str) -> List[List[TensorMeta]]:
        """What each rank of `spec` holds, in the order that plans number it."""
        return [[held.meta for held in rank] for rank in self.boxes(spec)]

    def boxes(self, spec: str) -> List[List[Held]]:
        """The same, with what lies in each tensor."""
        if spec not in self._boxes:
            shown = self._show(spec, "--tensor", "*")
            ranks: List[List[Held]] = [[] for _ in range(shown["ranks"])]
            for t in shown["tensors"]:
                ranks[t["rank"]].append(_held(t))
            self._boxes[spec] = ranks
        return self._boxes[spec]

    def rank_boxes(self, spec: str, rank: int) -> List[Held]:
        """Those of one rank, which is less to say."""
        if spec in self._boxes:
            return self._boxes[spec][rank]
        if (spec, rank) not in self._rank_boxes:
            self._rank_boxes[spec, rank] = [_held(t) for t in self._show(spec, "--rank", str(rank))["tensors"]]
        return self._rank_boxes[spec, rank]

    def _show(self, spec: str, *arguments: str) -> Any:
        return json.loads(self._run("layout", "show", "--spec", spec, *arguments, "--json"))

    def plan(self, source: str, target: str) -> Plan:
        """Planned and proved: every element of the target written once, from a rank that holds it."""
        if (source, target) not in self._plans:
            with tempfile.TemporaryDirectory() as folder:
                out = os.path.join(folder, "plan")
                self._run("plan", "--from", source, "--to", target, "--per", "rank", "--out", out)
                self._plans[source, target] = read_plan(Path(out).read_bytes())
        return self._plans[source, target]

    def _run(self, *arguments: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            config = os.path.join(folder, "config.json")
            Path(config).write_text(self._config)
            try:
                ran = subprocess.run([self._path, *arguments, "--config", config], stdout=subprocess.PIPE,
                                     stderr=subprocess.PIPE, timeout=_TIMEOUT, text=True)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise CheckpointError(f"{self._path} did not run: {error}", code="UNAVAILABLE") from error
        if ran.returncode:
            raise CheckpointError(f"wwctl {arguments[0]}: {(ran.stderr or ran.stdout).strip()}",
                                  code="FAILED_PRECONDITION")
        return ran.stdout


def _held(t: Any) -> Held:
    return Held(TensorMeta(t["name"], t["dtype"], tuple(t["shape"])), [
        Box(p["tensor"], tuple(p["begin"]), tuple(p["extent"]), p["local_offset"], tuple(p["local_stride"]))
        for p in t["pieces"]])


def planner_of(config: str, path: Optional[str] = None) -> Planner:
    """`path`: by default $WEIGHTWIRE_BIN_DIR/wwctl, else the one on PATH. The last one is kept: a composed checkpoint asks
    the same for each of its parts."""
    folder = os.environ.get("WEIGHTWIRE_BIN_DIR")
    found = path or (shutil.which("wwctl", path=folder) if folder else shutil.which("wwctl"))
    if not found:
        raise CheckpointError("wwctl, which makes the plan, was not found", code="FAILED_PRECONDITION",
                              remedy="put it on PATH, name its folder in WEIGHTWIRE_BIN_DIR, or pass --wwctl")
    return _last(config, found)


_last = lru_cache(maxsize=1)(Planner)
forget = _last.cache_clear


def read_plan(data: bytes) -> Plan:
    """A file that `wwctl plan --out` wrote; server/plan/plan_bytes.h has the format."""
    if not data.startswith(_MAGIC):
        raise CheckpointError("not a plan of this wwctl's form", remedy="use the wwctl of this release")
    at = len(_MAGIC)

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    try:
        high, low = number(), number()
        for _ in range(8):  # fingerprints, ranks and totals
            number()
        names = []
        for _ in range(number()):
            size = number()
            names.append(data[at:at + size].decode())
            at += size
        copies = []
        for _ in range(number()):
            source_rank, target_rank, _ = number(), number(), number()
            for _ in range(number()):
                name, source_tensor, target_tensor, _, _, source_offset, target_offset = (number() for _ in range(7))
                dims: List[Any] = [(number(), number(), number()) for _ in range(number())]
                extent, source_stride, target_stride = zip(*dims) if dims else ((), (), ())
                copies.append(Copy(names[name], source_rank, source_tensor, target_rank, target_tensor, extent,
                                   source_offset, source_stride, target_offset, target_stride))
    except (IndexError, UnicodeDecodeError) as error:
        raise CheckpointError("the plan is cut short", remedy="use the wwctl of this release") from error
    if at != len(data):
        raise CheckpointError("the plan goes on after its end", remedy="use the wwctl of this release")
    return Plan(f"{high:016x}{low:016x}", copies)
