"""Runs a plan between two checkpoints with bounded memory: no tensor need fit."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Callable, Iterator, List, Sequence, Tuple

import numpy as np

from weightwire.checkpoint.library import Library
from weightwire.checkpoint.planner import Copy, Plan
from weightwire.checkpoint.stored import Bits, CheckpointError, Files, Stored, bits_of
from weightwire.memory import DTYPES, FROM_TORCH, TensorMeta, dtype_bytes


#: How NumPy calls what it can interpret.
NUMPY = {name: np.dtype(kind).name for name, (_, kind) in DTYPES.items()}


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
        after_step: Callable[[int, int], None], library: Library) -> None:
    """Copies what `steps` say. `after_step(step, bytes)` follows each target tensor.

    At most about `memory` bytes are held: a quarter for a target's buffer, half for a source that must be assembled.
    """
    quarter = max(memory // 4, 1 << 16)
    for number, ((rank, index), copies) in enumerate(steps):
        made = target.tensor(rank, index)
        if made.bytes <= quarter:
            buffer = np.zeros(made.count, bits_of(made.dtype))
            for copy in copies:
                for part in split(copy, made.dtype, quarter, source_only=True):
                    place(library, buffer, source, part)
            target.files.write(made, 0, buffer)
        else:
            for copy in copies:
                for part in split(copy, made.dtype, quarter):
                    begin, end = part.target_offset, part.target_offset + span(part.extent, part.target_stride)
                    window = target.files.flat(made, begin, end)
                    place(library, window, source, replace(part, target_offset=0))
                    target.files.write(made, begin, window)
        after_step(number, made.bytes)


def place(library: Library, flat: Bits, source: Bound, part: Copy) -> None:
    """Copies one part into the target tensor's elements, which are in memory and nobody reads soon."""
    _check_inside(flat, part.target_offset, part.extent, part.target_stride)
    tensor, begin = source.tensor(part.source_rank, part.source_tensor), part.source_offset
    end = begin + span(part.extent, part.source_stride)
    where = source.files.place(tensor, begin, end)
    if where is None:
        values = source.files.flat(tensor, begin, end)
        library.copy(flat, part.target_offset, part.target_stride, values, part.source_stride, part.extent)
        return
    file, offset = where
    library.read(flat, part.target_offset, part.target_stride, source.files.fd(file), offset, file, part.source_stride,
                 part.extent)


def memory_bits(tensor: Any, local: TensorMeta, rank: int) -> Bits:
    """The elements of a NumPy array or torch tensor as bits, in place. CheckpointError: it is not as `local` says."""
    dtype = str(tensor.dtype)
    if dtype.startswith("torch."):  # viewed as bytes by a dtype of its own library, which is not imported here
        known = FROM_TORCH.get(dtype[len("torch."):]) == local.dtype
        usable = tensor.device.type == "cpu" and tensor.is_contiguous()
        bits = tensor.detach().view(-1).view(sys.modules["torch"].uint8).numpy() if known and usable else None
    else:
        known = np.dtype(dtype).itemsize == dtype_bytes(local.dtype) and dtype in (NUMPY[local.dtype], str(bits_of(local.dtype)))
        usable = tensor.flags.c_contiguous and tensor.flags.writeable
        bits = tensor.reshape(-1).view(np.uint8) if known and usable else None
    if bits is None or tuple(tensor.shape) != local.shape:
        raise CheckpointError(f"expected {local.dtype} {list(local.shape)}, contiguous and writable in host memory, "
                              f"found {dtype} {list(tensor.shape)}", reason="shape_mismatch" if known else "dtype_mismatch",
                              rank=str(rank), tensor=local.name, remedy="a load copies bits and casts nothing")
    made: Bits = bits.view(bits_of(local.dtype))
    return made


def compare(steps: Sequence[Tuple[Tuple[int, int], List[Copy]]], source: Bound, target: Bound, memory: int,
            after_step: Callable[[int, int], None]) -> None:
    """Reads both sides and compares every bit that the plan moved. CheckpointError names the first tensor that differs."""
    quarter = max(memory // 4, 1 << 16)
    for number, ((rank, index), copies) in enumerate(steps):
        made = target.tensor(rank, index)
        for copy in copies:
            for part in split(copy, made.dtype, quarter):
                begin, end = part.target_offset, part.target_offset + span(part.extent, part.target_stride)
                got = strided(target.files.flat(made, begin, end), 0, part.extent, part.target_stride)
                if not np.array_equal(got, _source(source, part)):
                    raise CheckpointError(f"what was written differs from the source's {copy.canonical}",
                                          code="DATA_LOSS", reason="digest_mismatch", rank=str(rank), tensor=made.name)
        after_step(number, made.bytes)


def span(extent: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from a block's first to its last, both counted."""
    return 1 + sum((n - 1) * s for n, s in zip(extent, stride))


def split(copy: Copy, dtype: str, limit: int, *, source_only: bool = False) -> Iterator[Copy]:
    """Parts of `copy` whose spans on both sides (or the source's alone) are at most `limit` bytes, or one element."""
    item = dtype_bytes(dtype)
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
    return strided(source.files.flat(tensor, begin, end), 0, part.extent, part.source_stride)


def strided(flat: Bits, offset: int, extent: Sequence[int], stride: Sequence[int]) -> Bits:
    """A block of the elements `flat`, as a view; it is checked that it lies inside."""
    _check_inside(flat, offset, extent, stride)
    item = flat.itemsize
    return np.lib.stride_tricks.as_strided(flat[offset:], extent, [s * item for s in stride])


def _check_inside(flat: Bits, offset: int, extent: Sequence[int], stride: Sequence[int]) -> None:
    if offset < 0 or offset + span(extent, stride) > len(flat):
        raise CheckpointError("a copy leaves its tensor", reason="internal")
