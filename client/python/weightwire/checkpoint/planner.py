"""The planner: weightwire's own, in libweightwire_checkpoint.so, computes layouts, plans, and proves the plan; this reads
what it says."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Dict, List, Optional, Set, Tuple

from weightwire.boxes import Box, Held
from weightwire.checkpoint.library import ALL_RANKS, Library, library_of
from weightwire.checkpoint.stored import CheckpointError
from weightwire.memory import TensorMeta

_MAGIC = b"wwplan2\n"


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


@dataclass(frozen=True)
class Filtered:
    """Local tensors of each rank; empty lists where nothing is left out."""

    #: All of whose content is left out.
    gone: List[Set[str]]
    #: A part of whose content is left out, and the name of such a part.
    partly: List[Dict[str, str]]


class Planner:
    """Layouts and plans for the model of the config.json with this text. It remembers what it made."""

    def __init__(self, config: str, library: Library):
        self._config, self.library = config, library
        self._layouts: Dict[str, List[List[TensorMeta]]] = {}
        self._boxes: Dict[str, List[List[Held]]] = {}
        self._plans: Dict[Tuple[str, str, int], Plan] = {}

    def layout(self, spec: str) -> List[List[TensorMeta]]:
        """What each rank of `spec` holds, in the order that plans number it."""
        if spec not in self._layouts:
            shown = json.loads(self.library.layout(self._config, spec))
            ranks: List[List[TensorMeta]] = [[] for _ in range(shown["ranks"])]
            for t in shown["tensors"]:
                ranks[t["rank"]].append(_meta(t))
            self._layouts[spec] = ranks
        return self._layouts[spec]

    def rank_layout(self, spec: str, rank: int) -> List[TensorMeta]:
        """The same of one rank, which is less to say."""
        if spec in self._layouts:
            return self._layouts[spec][rank]
        return [_meta(t) for t in json.loads(self.library.layout(self._config, spec, rank))["tensors"]]

    def boxes(self, spec: str) -> List[List[Held]]:
        """What each rank holds, and what lies in each tensor."""
        if spec not in self._boxes:
            shown = json.loads(self.library.layout(self._config, spec, pieces=True))
            ranks: List[List[Held]] = [[] for _ in range(shown["ranks"])]
            for t in shown["tensors"]:
                ranks[t["rank"]].append(_held(t))
            self._boxes[spec] = ranks
        return self._boxes[spec]

    def rank_boxes(self, spec: str, rank: int) -> List[Held]:
        """The same of one rank."""
        if spec in self._boxes:
            return self._boxes[spec][rank]
        return [_held(t) for t in json.loads(self.library.layout(self._config, spec, rank, pieces=True))["tensors"]]

    @staticmethod
    def unfiltered(spec: str) -> str:
        """The same layout with all that it leaves out."""
        name, colon, words = spec.partition(":")
        kept = [word for word in words.split(",") if not word.startswith(("only=", "skip="))]
        return name + colon + ",".join(kept) if kept and colon else name

    def filtered(self, spec: str) -> Filtered:
        """What only= and skip= of `spec` leave out, by rank. Without them nothing is, and nothing is computed."""
        if self.unfiltered(spec) == spec:
            return Filtered([], [])
        plain = self.boxes(self.unfiltered(spec))
        gone: List[Set[str]] = []
        partly: List[Dict[str, str]] = []
        for before, after in zip(plain, self.boxes(spec)):
            gone.append({held.meta.name for held, left in zip(before, after) if held.boxes and not left.boxes})
            partly.append({held.meta.name: (set(b.name for b in held.boxes) - set(b.name for b in left.boxes)).pop()
                           for held, left in zip(before, after) if left.boxes and len(left.boxes) < len(held.boxes)})
        everywhere = set().union(*gone)
        for rank, held_by in enumerate(plain):  # a rank may hold nothing but padding of what is left out
            gone[rank] |= {held.meta.name for held in held_by if not held.boxes and held.meta.name in everywhere}
        return Filtered(gone, partly)

    def plan(self, source: str, target: str, rank: int = ALL_RANKS) -> Plan:
        """Planned and proved: every element of the target's ranks, or of one, written once, from a rank that holds it."""
        key = (source, target, rank)
        if key not in self._plans:
            self._plans[key] = read_plan(self.library.plan(self._config, *key))
        return self._plans[key]


def _meta(t: Any) -> TensorMeta:
    return TensorMeta(t["name"], t["dtype"], tuple(t["shape"]))


def _held(t: Any) -> Held:
    return Held(_meta(t), [Box(p["tensor"], tuple(p["begin"]), tuple(p["extent"]), p["local_offset"], tuple(p["local_stride"]))
                           for p in t["pieces"]])


def planner_of(config: str, wwctl: Optional[str] = None) -> Planner:
    """With the library beside `wwctl` (see `library_of`). The last one is kept: a composed checkpoint asks the same for each
    of its parts."""
    return _last(config, library_of(wwctl))


_last = lru_cache(maxsize=1)(Planner)
forget = _last.cache_clear


def read_plan(data: bytes) -> Plan:
    """A plan as `wwctl plan --out` writes it, too; server/plan/plan_bytes.h has the format."""
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
                if number():
                    raise CheckpointError("the plan quantizes weights on the way, which loading cannot",
                                          remedy="load the checkpoint into ranks of its own dtype")
                for _ in range(2):  # blocks
                    for _ in range(number()):
                        number()
                copies.append(Copy(names[name], source_rank, source_tensor, target_rank, target_tensor, extent,
                                   source_offset, source_stride, target_offset, target_stride))
    except (IndexError, UnicodeDecodeError) as error:
        raise CheckpointError("the plan is cut short", remedy="use the wwctl of this release") from error
    if at != len(data):
        raise CheckpointError("the plan goes on after its end", remedy="use the wwctl of this release")
    return Plan(f"{high:016x}{low:016x}", copies)
