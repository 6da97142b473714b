"""Layouts as boxes, and what to copy between two of them: for tensors that no scheme describes.

A layout is words that `wwctl` knows (`megatron:tp2,pp2`), or explicit boxes that a trainer gives for what it holds. Where
one side is boxes this plans; where both are words `wwctl` does, and proves it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple, Union

from weightwire.boxes import Box, Held, whole
from weightwire.checkpoint.planner import Copy, Plan
from weightwire.checkpoint.stored import CheckpointError, damaged
from weightwire.memory import TensorMeta

#: What a layout of explicit boxes is called where others have words.
BOXES = "boxes"
_NAMES_MAX, _BOXES_MAX = 1_000_000, 4_000_000
Range = Tuple[Tuple[int, ...], Tuple[int, ...]]
_Place = Tuple[int, int, Box]


class Unheld(CheckpointError):
    """Elements [begin, end) of the whole tensor `name`, which are wanted, are held by no rank of the source."""

    def __init__(self, name: str, begin: Sequence[int], end: Sequence[int], rank: int, tensor: str):
        super().__init__(f"elements {list(begin)} to {list(end)} of {name} are held by no rank of the source", code="FAILED_PRECONDITION",
                         reason="tensor_missing", rank=str(rank), tensor=tensor,
                         remedy="a rank is missing, or the names of the two sides differ")
        self.name, self.begin, self.end = name, tuple(begin), tuple(end)


@dataclass(frozen=True)
class Explicit:
    """What a rank holds, box by box, as `weightwire.fsdp.read_sharded` and the like find it.

    canonical: the whole tensors by name, the same on every rank
    held:      the local tensors of this rank, of those whole ones
    """

    canonical: Mapping[str, TensorMeta]
    held: Sequence[Held]


Layout = Union[str, Explicit]


def words(layout: Layout) -> str:
    return layout if isinstance(layout, str) else BOXES


def plan_boxes(source: Sequence[Sequence[Held]], targets: Mapping[int, Sequence[Held]]) -> Plan:
    """Every element of the targets (by rank) once, from a rank that holds it; replicas share the reads.

    Unheld: an element is held by nobody; names rank and tensor.
    """
    by_name: Dict[str, List[_Place]] = {}
    for rank, tensors in enumerate(source):
        for number, held in enumerate(tensors):
            for box in held.boxes:
                by_name.setdefault(box.name, []).append((rank, number, box))
    copies: List[Copy] = []
    for rank, tensors in targets.items():
        for number, held in enumerate(tensors):
            for box in held.boxes:
                copies += _copies(by_name.get(box.name, []), rank, number, held, box, len(source))
    return Plan(hashlib.sha256(repr(copies).encode()).hexdigest()[:32], copies)


def _copies(places: Sequence[_Place], rank: int, number: int, held: Held, box: Box, ranks: int) -> Iterator[Copy]:
    left: List[Range] = [(box.begin, box.extent)]
    for source_rank, source_number, there in sorted(places, key=lambda place: (place[0] - rank) % ranks):
        after: List[Range] = []
        for part in left:
            common = _common(part, (there.begin, there.extent))
            if common is None:
                after.append(part)
                continue
            begin, extent = common
            yield Copy(box.name, source_rank, source_number, rank, number, extent, _offset(there, begin), there.stride,
                       _offset(box, begin), box.stride)
            after += _without(part, common)
        left = after
        if not left:
            return
    begin, extent = left[0]
    raise Unheld(box.name, begin, [at + n for at, n in zip(begin, extent)], rank, held.meta.name)


def _offset(box: Box, begin: Sequence[int]) -> int:
    return box.offset + sum((at - first) * stride for at, first, stride in zip(begin, box.begin, box.stride))


def _common(a: Range, b: Range) -> Union[Range, None]:
    begin = tuple(map(max, a[0], b[0]))
    extent = tuple(min(x + n, y + m) - at for x, n, y, m, at in zip(*a, *b, begin))
    return (begin, extent) if len(a[0]) == len(b[0]) and all(n > 0 for n in extent) else None


def _without(outer: Range, inner: Range) -> Iterator[Range]:
    """The blocks of `outer` beside `inner`, which lies in it."""
    begin, extent = list(outer[0]), list(outer[1])
    for d, (first, count) in enumerate(zip(*inner)):
        before, after = first - begin[d], begin[d] + extent[d] - first - count
        if before:
            yield tuple(begin), (*extent[:d], before, *extent[d + 1:])
        if after:
            yield (*begin[:d], first + count, *begin[d + 1:]), (*extent[:d], after, *extent[d + 1:])
        begin[d], extent[d] = first, count


def check_complete(canonical: Mapping[str, Sequence[int]], ranks: Sequence[Sequence[Held]]) -> None:
    """CheckpointError: the ranks together do not hold every element of the whole tensors."""
    wanted = [whole(TensorMeta(name, "U8", tuple(shape))) for name, shape in canonical.items() if math.prod(shape)]
    plan_boxes(ranks, {0: wanted})


def to_json(layout: Explicit) -> Dict[str, Any]:
    """A rank's part of a manifest."""
    return {"canonical": {name: list(meta.shape) for name, meta in layout.canonical.items()},
            "boxes": {held.meta.name: [[b.name, list(b.begin), list(b.extent), b.offset, list(b.stride)] for b in held.boxes]
                      for held in layout.held}}


def from_json(canonical: Any, boxes: Any, metas: Mapping[str, TensorMeta], where: str) -> List[Held]:
    """A rank's boxes out of a manifest, in the order of `metas`. CheckpointError (DATA_LOSS): they are none, or leave
    their tensors."""
    try:
        if len(canonical) > _NAMES_MAX or boxes.keys() != metas.keys() or sum(map(len, boxes.values())) > _BOXES_MAX:
            raise ValueError("its tensors are not those of the files")
        made = [Held(meta, [_box(canonical, meta, entry) for entry in boxes[name]]) for name, meta in metas.items()]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise damaged(where, f"boxes that are none: {error}") from error
    return made


def _box(canonical: Any, meta: TensorMeta, entry: Any) -> Box:
    name, begin, extent, offset, stride = entry
    shape = canonical[name]
    numbers = [*begin, *extent, offset, *stride, *shape]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"a box of {str(name)[:80]!r} has numbers that are none")
    if not len(begin) == len(extent) == len(stride) == len(shape) or any(
            n < 1 or b + n > s for b, n, s in zip(begin, extent, shape)):
        raise ValueError(f"a box leaves {str(name)[:80]!r}")
    if offset + 1 + sum((n - 1) * s for n, s in zip(extent, stride)) > math.prod(meta.shape):
        raise ValueError(f"a box of {str(name)[:80]!r} leaves {meta.name!r}")
    return Box(name, tuple(begin), tuple(extent), offset, tuple(stride))
