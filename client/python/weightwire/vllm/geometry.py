"""Which block of a checkpoint tensor a torch view shows: plain integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Sequence


class Unrecordable(Exception):
    """A loader did something that no block of a tensor describes."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1:]) for dim in range(len(shape)))


@dataclass(frozen=True)
class Block:
    """`size` elements from `start` on in every dimension of a tensor of `shape`. `dims` tells, for each dimension
    of the view in turn, which dimensions of the tensor it runs over: none for one that the view only adds (its
    extent is 1), several where the view joins neighbours."""

    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def target_strides(self, strides: Sequence[int]) -> tuple[int, ...]:
        """Strides by dimension of the tensor from strides by dimension of the view; 1 where the view has none."""
        out = [1] * len(self.shape)
        for joined, stride in zip(self.dims, strides):
            for dim in reversed(joined):
                out[dim] = stride
                stride *= self.size[dim]
        return tuple(out)


def block_of(shape: Sequence[int], size: Sequence[int], stride: Sequence[int], offset: int) -> Block:
    """The block that a view of (`size`, `stride`, `offset`) shows of a contiguous tensor of `shape`.

    Raises Unrecordable when it shows none: a broadcast, a step, a diagonal, a part of joined dimensions.
    """
    strides = row_major(shape)
    start = [offset // step % extent for step, extent in zip(strides, shape)]
    length = [1] * len(shape)
    dims: list[tuple[int, ...]] = []
    for extent, step in zip(size, stride):
        joined: list[int] = []
        while extent > 1:
            dim = next((d for d in range(len(shape)) if strides[d] == step and shape[d] > 1), None)
            if dim is None:
                break
            take = min(extent, shape[dim] - start[dim])
            length[dim] = take
            joined.insert(0, dim)
            extent, step = extent // take, step * take
        dims.append(tuple(joined))
    # Unequal too where a dimension of the view found no or only a part of its elements, or shares a dimension.
    if prod(length) != prod(size):
        raise Unrecordable(f"a view of size {tuple(size)}, stride {tuple(stride)}, offset {offset} is no block of a "
                           f"tensor of shape {tuple(shape)}")
    return Block(tuple(shape), tuple(start), tuple(length), tuple(dims))
