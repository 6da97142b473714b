"""Layouts that are recorded from a framework's own exporter: it is run on tensors whose elements say where they lie.

An exporter (transformers' reverse conversion, a bridge's task) takes a model's tensors and gives a checkpoint's. Here it gets
tensors of the same names and shapes that hold numbers instead: which tensor this is, and the element's place along one
dimension, a dimension at a time. What comes out is read back as boxes. An exporter that only moves elements gives such numbers
back as they were. One that adds a whole number (norms that are held less one) is seen to, and what is added is said; one that
computes anything else is refused by name.

The numbers are views that take no memory until the exporter copies; it is called for a layer at a time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Callable, Container, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch

from weightwire.adapter import refuse
from weightwire.boxes import Box, Held
from weightwire.memory import TensorMeta

#: From a model's tensors by name to a checkpoint's.
Export = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]

_LAYER = re.compile(r"^(.*?\.\d+)\.")
_BOXES_MAX = 1 << 20
_COMPUTED = "publish what the exporter gives through weightwire.torch, or leave the tensor out by `names`"
#: A number that an exporter moves comes back as it was in every encoding (factor, shift); one that it computes with does not.
_ENCODINGS: tuple[tuple[int, int], ...] = ((1, 0), (1, 1), (7, 3))


@dataclass(frozen=True)
class Piece:
    """A block of the checkpoint's tensor `name`, and where its elements lie in one tensor of the model."""

    name: str
    begin: tuple[int, ...]
    extent: tuple[int, ...]
    at: tuple[int, ...]  #: place of the block's first element, in each dimension of the model's tensor
    axis: tuple[int, ...]  #: for each dimension of the block: along which of the model's tensor it lies; -1: extent 1
    step: tuple[int, ...]  #: by how many elements


@dataclass(frozen=True)
class Recording:
    shapes: Mapping[str, tuple[int, ...]]  #: of the checkpoint's tensors
    sources: Mapping[str, str]  #: of each, one tensor of the model that it is made of
    pieces: Mapping[str, list[Piece]] = field(default_factory=dict)  #: by the model's tensor
    #: What is added to the elements of one of the model's tensors, in its dtype, where something is.
    added: Mapping[str, int] = field(default_factory=dict)
    _made: dict[str, tuple[Held, Held]] = field(default_factory=dict)  # by local tensor: for each version the same

    def held(self, held: Held) -> Held:
        """The local tensor `held`, whose boxes are of the model's tensors, with boxes of the checkpoint's."""
        before = self._made.get(held.meta.name)
        if before is not None and before[0] == held:
            return before[1]
        made = Held(held.meta)
        for box in held.boxes:
            for piece in self.pieces.get(box.name, ()):
                made.boxes.extend(_clip(piece, box))
        self._made[held.meta.name] = held, made
        return made

    def whole(self, metas: Mapping[str, TensorMeta]) -> dict[str, TensorMeta]:
        """The checkpoint's tensors, where `metas` are the model's."""
        return {name: TensorMeta(name, metas[self.sources[name]].dtype, shape) for name, shape in self.shapes.items()
                if self.sources[name] in metas}


def record(export: Export, shapes: Mapping[str, Sequence[int]], *, partly: Container[str] = ()) -> Recording:
    """shapes: of the model's tensors by name; partly: those of which it may leave out elements, as padding.

    RefusedError: the exporter computes, repeats or leaves out elements; names the tensor
    """
    numbers = {name: i for i, name in enumerate(sorted(shapes))}
    expected = {name: tuple(t.shape) for name, t in export({n: torch.empty(tuple(s), device="meta") for n, s in shapes.items()}).items()}
    out: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}
    added: dict[str, set[int]] = {name: set() for name in shapes}
    pieces: dict[str, list[Piece]] = {name: [] for name in shapes}
    for group in layers(shapes):
        part = {name: tuple(shapes[name]) for name in group}
        for name, (arrays, plus) in _numbered(export, part, numbers).items():
            out[name] = np.broadcast_shapes(*(array.shape for array in arrays))
            for source, piece in _pieces(name, arrays, out[name], sorted(shapes)):
                if any(not 0 <= at < max(1, size) for at, size in zip(piece.at, shapes[source])):
                    raise _computes(name)
                sources.setdefault(name, source)
                pieces[source].append(piece)
                added[source].add(plus)
    if out != expected:
        wrong = sorted(name for name in out.keys() | expected.keys() if out.get(name) != expected.get(name))
        raise refuse("the exporter gives another tensor when it sees one layer than when it sees all", tensor=wrong[0],
                     remedy="give checkpoint names by `names`")
    for name, found in pieces.items():
        count, size = sum(math.prod(piece.extent) for piece in found), math.prod(shapes[name])
        if count not in (0, size) and not (name in partly and count < size):
            raise refuse(f"the exporter gives {count} of its {size} elements", tensor=name, remedy="give checkpoint names by `names`")
        if len(added[name]) > 1:
            raise refuse(f"the exporter adds different numbers to parts of it: {sorted(added[name])}", tensor=name, remedy=_COMPUTED)
    return Recording(out, sources, pieces, {name: plus.pop() for name, plus in added.items() if plus - {0}})


def layers(shapes: Iterable[str]) -> list[list[str]]:
    """Tensors of one layer together: exporters join and cut within one."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        layer = _LAYER.match(name)
        groups.setdefault(layer.group(1) if layer else "", []).append(name)
    return list(groups.values())


def _numbered(export: Export, shapes: Mapping[str, tuple[int, ...]],
              numbers: Mapping[str, int]) -> dict[str, tuple[list[np.ndarray], int]]:
    """For each of the checkpoint's tensors: which of the model's its elements are of, and their place in each dimension; and
    what is added to them. Dimensions along which numbers do not change have size 1, where memory shows it."""
    dims = max((len(shape) for shape in shapes.values()), default=0)
    found: dict[str, list[np.ndarray]] = {}
    added: dict[str, int] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for what in range(-1, dims):
        passes = []
        for factor, shift in _ENCODINGS:
            given = {name: (_number(shape, numbers[name] if what < 0 else None, what) * factor + shift).expand(shape)
                     for name, shape in shapes.items()}
            try:
                passes.append(export(dict(given)))
            except RuntimeError:  # a view of what is no memory of its own
                passes.append(export({name: number.contiguous() for name, number in given.items()}))
        for name, tensor in passes[0].items():
            sizes[name] = tuple(tensor.shape)
            one, plus = _decoded(name, [_narrow(answer[name]) for answer in passes])
            if added.setdefault(name, plus) != plus:
                raise _computes(name)
            found.setdefault(name, []).append(one - plus)
    for name, arrays in found.items():
        for d, size in enumerate(sizes[name]):  # where no number changes, the size must not be lost
            if size != 1 and all(array.shape[d] == 1 for array in arrays):
                raise refuse("the exporter repeats an element of the model's parameters", tensor=name,
                             remedy="give checkpoint names by `names`")
    return {name: (arrays, added[name]) for name, arrays in found.items()}


def _decoded(name: str, answers: Sequence[np.ndarray]) -> tuple[np.ndarray, int]:
    """What came out for the same numbers in each encoding, and what was added in all."""
    if any(answer.dtype.kind not in "iu" or answer.shape != answers[0].shape for answer in answers):
        raise _computes(name)
    plain = answers[0].astype(np.int64)
    factor, shift = _ENCODINGS[-1]
    plus = int(plain.flat[0] * factor + shift - answers[-1].flat[0]) // (factor - 1) if plain.size else 0
    for (factor, shift), answer in zip(_ENCODINGS, answers):
        if ((plain - plus) * factor + shift + plus != answer).any():
            raise _computes(name)
    return plain, plus


def _computes(name: str) -> Exception:
    return refuse("the exporter computes it from the model's parameters, and does not only move them", tensor=name, remedy=_COMPUTED)


def _number(shape: tuple[int, ...], number: int | None, dim: int) -> torch.Tensor:
    """Broadcasts to `shape`."""
    if number is not None or dim >= len(shape):
        return torch.tensor(number or 0, dtype=torch.int64).view([1] * len(shape))
    return torch.arange(shape[dim], dtype=torch.int64).view([-1 if d == dim else 1 for d in range(len(shape))])


def _narrow(tensor: torch.Tensor) -> np.ndarray:
    index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())
    return np.asarray(tensor[index].numpy())


def _pieces(name: str, arrays: Sequence[np.ndarray], shape: tuple[int, ...], names: Sequence[str]) -> Iterator[tuple[str, Piece]]:
    todo = [((0,) * len(shape), shape)]
    count = 0
    while todo:
        begin, extent = todo.pop()
        if 0 in extent:
            continue
        parts = [_part(array, begin, extent) for array in arrays]
        cut = _cut(parts, extent)
        if cut is None:
            count += 1
            if count > _BOXES_MAX:
                raise refuse(f"the exporter takes it apart into more than {_BOXES_MAX} blocks", tensor=name)
            if not 0 <= parts[0].flat[0] < len(names):
                raise _computes(name)
            yield names[int(parts[0].flat[0])], _piece(name, parts, begin, extent)
            continue
        d, at = cut
        for first, size in ((0, at), (at, extent[d] - at)):
            todo.append(((*begin[:d], begin[d] + first, *begin[d + 1:]), (*extent[:d], size, *extent[d + 1:])))


def _part(array: np.ndarray, begin: Sequence[int], extent: Sequence[int]) -> np.ndarray:
    return array[tuple(slice(b, b + e) if n > 1 else slice(0, 1) for b, e, n in zip(begin, extent, array.shape))]


def _cut(parts: Sequence[np.ndarray], extent: Sequence[int]) -> tuple[int, int] | None:
    """Where a block that is not one piece is to be cut: (dimension, at); None when it is one. One piece: of one tensor, and
    each of its dimensions goes along one of that tensor's, in equal steps."""
    mixed = []
    for d, size in enumerate(extent):
        if size == 1:
            continue
        steps = []
        for part in parts:
            if part.shape[d] == 1:
                steps.append(np.zeros(size - 1, dtype=np.int64))
                continue
            change = np.moveaxis(np.diff(part, axis=d), d, 0).reshape(size - 1, -1)
            if (change != change[:, :1]).any():
                break  # it depends on where one is in another dimension
            steps.append(change[:, 0])
        if len(steps) < len(parts):
            mixed.append(d)
            continue
        together = np.stack(steps)
        moves = (together[0] == 0) & ((together[1:] > 0).sum(axis=0) == 1) & ((together[1:] < 0).sum(axis=0) == 0)
        same = moves & (together == together[:, :1]).all(axis=0)
        if not same.all():
            return d, _run(together, moves, same)
    if not mixed:
        return None
    d = max(mixed, key=lambda k: extent[k])
    return d, extent[d] // 2


def _run(together: np.ndarray, moves: np.ndarray, same: np.ndarray) -> int:
    """How many elements from the first on belong together, of several that do not all. A first one that is followed by a wider
    step than those after it is alone."""
    if not moves[0]:
        return 1
    end = int(np.argmin(same))
    alone = end == 1 and moves[1] and together[:, 0].sum() > together[:, 1].sum()
    return 1 if alone else end + 1


def _piece(name: str, parts: Sequence[np.ndarray], begin: tuple[int, ...], extent: tuple[int, ...]) -> Piece:
    axis, step = [], []
    for d, size in enumerate(extent):
        along = [a for a, part in enumerate(parts[1:]) if size > 1 and part.shape[d] > 1
                 and part.take(1, axis=d).flat[0] != part.take(0, axis=d).flat[0]]
        axis.append(along[0] if along else -1)
        step.append(int(parts[1 + along[0]].take(1, axis=d).flat[0] - parts[1 + along[0]].take(0, axis=d).flat[0]) if along else 1)
    return Piece(name, begin, extent, tuple(int(part.flat[0]) for part in parts[1:]), tuple(axis), tuple(step))


def _clip(piece: Piece, box: Box) -> Iterator[Box]:
    """What lies of `piece` in the part of the model's tensor that `box` is, in the local tensor."""
    begin, extent, at = list(piece.begin), list(piece.extent), list(piece.at)
    for a, (low, size) in enumerate(zip(box.begin, box.extent)):
        along = [d for d, axis in enumerate(piece.axis) if axis == a]
        if not along:
            if not low <= at[a] < low + size:
                return
            continue
        last = at[a] + sum((extent[d] - 1) * piece.step[d] for d in along)
        if low <= at[a] and last < low + size:
            continue
        if len(along) > 1:  # rows of heads, say: one after another along the widest step
            d = max(along, key=lambda k: piece.step[k])
            for i in range(extent[d]):
                yield from _clip(_slice(piece, d, i, at[a] + i * piece.step[d], a), box)
            return
        d, step = along[0], piece.step[along[0]]
        first = max(0, -((at[a] - low) // step))
        end = min(extent[d], -((at[a] - low - size) // step))
        if first >= end:
            return
        begin[d], extent[d], at[a] = begin[d] + first, end - first, at[a] + first * step
    offset = box.offset + sum((at[a] - low) * stride for a, (low, stride) in enumerate(zip(box.begin, box.stride)))
    stride = [box.stride[axis] * step if axis >= 0 else 1 for axis, step in zip(piece.axis, piece.step)]
    yield Box(piece.name, tuple(begin), tuple(extent), offset, tuple(stride))


def _slice(piece: Piece, d: int, i: int, place: int, axis: int) -> Piece:
    return Piece(piece.name, (*piece.begin[:d], piece.begin[d] + i, *piece.begin[d + 1:]),
                 (*piece.extent[:d], 1, *piece.extent[d + 1:]),
                 (*piece.at[:axis], place, *piece.at[axis + 1:]), (*piece.axis[:d], -1, *piece.axis[d + 1:]), piece.step)
