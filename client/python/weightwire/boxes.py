"""Explicit layouts: which boxes of which whole tensors lie where in what a rank holds. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Iterator, Mapping, Sequence

from weightwire.memory import TensorMeta
from weightwire.v1 import types_pb2


@dataclass(frozen=True)
class Box:
    """`extent` elements from `begin` on, in each dimension of the whole tensor `name`."""

    name: str
    begin: tuple[int, ...]
    extent: tuple[int, ...]
    #: Where the box's first element lies in the local tensor, in elements.
    offset: int
    #: Elements between neighbours in each dimension of the whole tensor, in the local tensor.
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """A local tensor (row-major storage of `meta.shape`) and what lies in it. What no box covers is padding."""

    meta: TensorMeta
    boxes: list[Box] = field(default_factory=list)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, each at least 1."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = max(1, strides[d] * shape[d])
    return tuple(strides)


def whole(meta: TensorMeta) -> Held:
    """A rank that holds all of `meta`."""
    return block(meta.name, meta.dtype, [0] * len(meta.shape), meta.shape)


def block(name: str, dtype: str, begin: Sequence[int], extent: Sequence[int]) -> Held:
    """A rank that holds one block of tensor `name`, row-major, and nothing else under that name."""
    meta = TensorMeta(name, dtype, tuple(extent))
    if 0 in meta.shape:
        return Held(meta)
    return Held(meta, [Box(name, tuple(begin), tuple(extent), 0, row_major(extent))])


def flat_boxes(name: str, shape: Sequence[int], begin: int, end: int, offset: int) -> Iterator[Box]:
    """Elements [begin, end) of the row-major tensor `name` of `shape`, stored one after another from element
    `offset` on: at most 2n - 1 boxes for n dimensions."""
    if not shape and begin < end:
        yield Box(name, (), (), offset, ())
        return
    strides = row_major(shape)
    start = begin
    while begin < end:
        # The outermost dimension whose slices begin here and fit.
        d = next(d for d, s in enumerate(strides) if begin % s == 0 and s <= end - begin)
        at = [begin // strides[k] % shape[k] for k in range(d + 1)] + [0] * (len(shape) - d - 1)
        count = min(shape[d] - at[d], (end - begin) // strides[d])
        extent = [1] * d + [count] + list(shape[d + 1:])
        yield Box(name, tuple(at), tuple(extent), offset + begin - start, strides)
        begin += count * strides[d]


def cut(held: Held, begin: int, end: int) -> Held:
    """What elements [begin, end) of a local tensor hold, as a local tensor of one dimension and the same name: a rank's
    range of a flat buffer, as distributed optimizers shard their states."""
    made = Held(TensorMeta(held.meta.name, held.meta.dtype, (end - begin,)))
    for box in held.boxes:
        made.boxes.extend(_cut(box, begin, end))
    return made


def _cut(box: Box, begin: int, end: int) -> Iterator[Box]:
    last = box.offset + sum((n - 1) * s for n, s in zip(box.extent, box.stride))
    if last < begin or box.offset >= end:
        return
    if begin <= box.offset and last < end:
        yield Box(box.name, box.begin, box.extent, box.offset - begin, box.stride)
        return
    d = max((k for k, n in enumerate(box.extent) if n > 1), key=lambda k: box.stride[k])
    stride = box.stride[d]
    inner = last - (box.extent[d] - 1) * stride - box.offset

    def slices(first: int, count: int) -> Box:
        return Box(box.name, (*box.begin[:d], box.begin[d] + first, *box.begin[d + 1:]),
                   (*box.extent[:d], count, *box.extent[d + 1:]), box.offset + first * stride, box.stride)
    # Slices along the widest stride: those that lie inside stay together, those at the edges are cut again.
    touched = range(max(0, -((box.offset + inner - begin) // stride)), min(box.extent[d], -((box.offset - end) // stride)))
    low = max(touched.start, -((box.offset - begin) // stride))
    high = min(touched.stop, (end - 1 - inner - box.offset) // stride + 1)
    if low < high:
        yield from _cut(slices(low, high - low), begin, end)
    for first in touched:
        if not low <= first < high:
            yield from _cut(slices(first, 1), begin, end)


def submission(canonical: Mapping[str, TensorMeta], held: Sequence[Held]) -> types_pb2.LayoutSubmission:
    """What this rank submits. `canonical` (whole tensors by name) must be the same on every rank of the group."""
    names = sorted(canonical)
    index = {name: i for i, name in enumerate(names)}
    explicit = types_pb2.LayoutSubmission.Explicit(
        canonical=types_pb2.CanonicalSpace(tensors=[canonical[name].to_proto() for name in names]),
        layout=types_pb2.RankLayout(tensors=[
            types_pb2.LocalTensor(spec=h.meta.to_proto(), pieces=[
                types_pb2.Piece(tensor=index[b.name], begin=b.begin, extent=b.extent, local_offset=b.offset,
                                local_stride=b.stride) for b in h.boxes]) for h in held]))
    return types_pb2.LayoutSubmission(boxes=explicit)


def of_models(models: Iterable[tuple[str, types_pb2.LayoutSubmission, int, int]]) -> types_pb2.LayoutSubmission:
    """The layouts of several models of a trainer, or of the one that an engine holds: (name, layout, rank, world size) of each, the
    rank among those that share the model."""
    return types_pb2.LayoutSubmission(models=types_pb2.LayoutSubmission.Models(models=[
        types_pb2.LayoutSubmission.Model(name=name, rank=rank, world_size=world_size, layout=layout)
        for name, layout, rank, world_size in models]))
