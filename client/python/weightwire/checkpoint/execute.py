"""Runs a plan between two checkpoints with bounded memory: no tensor need fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from typing import Callable, Iterator, List, Sequence, Tuple

import numpy as np

from weightwire.checkpoint.planner import Copy, Plan
from weightwire.checkpoint.stored import ITEM_BYTES, Bits, CheckpointError, Files, Stored, bits_of


@dataclass(frozen=True)
class Bound:
    """A layout's tensors, found in a checkpoint: by rank, in the layout's order."""

    files: Files
    ranks: List[List[Stored]]

    def tensor(self, rank: int, index: int) -> Stored:
        return self.ranks[rank][index]


def by_target(plan: Plan) -> List[Tuple[Tuple[int, int], List[Copy]]]:
    """The plan's copies for each (target rank, tensor), in the order in which they are run."""
    def key(copy: Copy) -> Tuple[int, int]:
        return copy.target_rank, copy.target_tensor
    ordered = sorted(plan.copies, key=lambda copy: (key(copy), copy.target_offset))
    return [(where, list(copies)) for where, copies in groupby(ordered, key)]


def run(steps: Sequence[Tuple[Tuple[int, int], List[Copy]]], source: Bound, target: Bound, memory: int,
        after_step: Callable[[int, int], None]) -> None:
    """Copies what `steps` say. `after_step(step, bytes)` follows each target tensor.

    At most about `memory` bytes are held: a quarter for a target's buffer, a quarter for a source that must be
    assembled, half for mapped pages of the source.
    """
    quarter = max(memory // 4, 1 << 16)
    for number, ((rank, index), copies) in enumerate(steps):
        made = target.tensor(rank, index)
        if made.bytes <= quarter:
            buffer = np.zeros(made.count, bits_of(made.dtype))
            for copy in copies:
                for part in split(copy, made.dtype, quarter, source_only=True):
                    np.copyto(_strided(buffer, part.target_offset, part.extent, part.target_stride), _source(source, part))
                    _let_go(source, quarter)
            target.files.write(made, 0, buffer)
        else:
            for copy in copies:
                for part in split(copy, made.dtype, quarter):
                    begin, end = part.target_offset, part.target_offset + span(part.extent, part.target_stride)
                    window = np.array(target.files.flat(made, begin, end))
                    np.copyto(_strided(window, 0, part.extent, part.target_stride), _source(source, part))
                    target.files.write(made, begin, window)
                    _let_go(source, quarter)
                    _let_go(target, quarter)
        after_step(number, made.bytes)


def compare(steps: Sequence[Tuple[Tuple[int, int], List[Copy]]], source: Bound, target: Bound, memory: int,
            after_step: Callable[[int, int], None]) -> None:
    """Reads both sides and compares every bit that the plan moved. CheckpointError names the first tensor that differs."""
    quarter = max(memory // 4, 1 << 16)
    for number, ((rank, index), copies) in enumerate(steps):
        made = target.tensor(rank, index)
        for copy in copies:
            for part in split(copy, made.dtype, quarter):
                begin, end = part.target_offset, part.target_offset + span(part.extent, part.target_stride)
                got = _strided(target.files.flat(made, begin, end), 0, part.extent, part.target_stride)
                if not np.array_equal(got, _source(source, part)):
                    raise CheckpointError(f"what was written differs from the source's {copy.canonical}",
                                          code="DATA_LOSS", reason="digest_mismatch", rank=str(rank), tensor=made.name)
                _let_go(source, quarter)
                _let_go(target, quarter)
        after_step(number, made.bytes)


def span(extent: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a block's first to its last, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(extent, stride))


def split(copy: Copy, dtype: str, limit: int, *, source_only: bool = False) -> Iterator[Copy]:
    """Parts of `copy` whose spans on both sides (or the source's alone) are at most `limit` bytes, or one element."""
    item = ITEM_BYTES[dtype]
    stride = copy.source_stride
    if source_only or span(copy.extent, copy.source_stride) * item > limit:
        fits = span(copy.extent, copy.source_stride) * item <= limit
    else:
        stride = copy.target_stride
        fits = span(copy.extent, copy.target_stride) * item <= limit
    if fits or max(copy.extent, default=1) == 1:
        yield copy
        return
    d = max(range(len(copy.extent)), key=lambda k: (copy.extent[k] - 1) * stride[k])
    half = copy.extent[d] // 2

    def part(first: int, count: int) -> Copy:
        extent = (*copy.extent[:d], count, *copy.extent[d + 1:])
        return replace(copy, extent=extent, source_offset=copy.source_offset + first * copy.source_stride[d],
                       target_offset=copy.target_offset + first * copy.target_stride[d])
    yield from split(part(0, half), dtype, limit, source_only=source_only)
    yield from split(part(half, copy.extent[d] - half), dtype, limit, source_only=source_only)


def _source(source: Bound, part: Copy) -> Bits:
    tensor = source.tensor(part.source_rank, part.source_tensor)
    begin, end = part.source_offset, part.source_offset + span(part.extent, part.source_stride)
    return _strided(source.files.flat(tensor, begin, end), 0, part.extent, part.source_stride)


def _strided(flat: Bits, offset: int, extent: Sequence[int], stride: Sequence[int]) -> Bits:
    if offset < 0 or offset + span(extent, stride) > len(flat):
        raise CheckpointError("a copy leaves its tensor", reason="internal")
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[offset:], extent, [s * item for s in stride])


def _let_go(side: Bound, limit: int) -> None:
    if side.files.touched > limit:
        side.files.release()
