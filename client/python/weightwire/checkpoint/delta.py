"""What changed between two checkpoints of one model, tensor by tensor, and what sending or storing just that would take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Dict, Iterator, List, Optional, Union

import numpy as np

from weightwire.checkpoint import composed
from weightwire.checkpoint.formats import Opened
from weightwire.checkpoint.library import Library, library_of
from weightwire.checkpoint.native import check_alike
from weightwire.checkpoint.sources import open_checkpoint
from weightwire.checkpoint.stored import CheckpointError, Stored, bits_of
from weightwire.memory import dtype_bytes

#: Elements are read and compared in pieces of whole blocks of the code.
_PIECE_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorDelta:
    """One tensor of one rank in both checkpoints."""

    rank: int
    name: str
    dtype: str
    elements: int
    changed: int  #: elements that differ
    bytes: int  #: of the tensor
    #: Of the code of its changes, in blocks of 1 MiB; a block that is shorter than its code counts as it is.
    coded: int

    @property
    def density(self) -> float:
        """Share of the elements that differ, 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0


def inspect(base: Union[str, Path], now: Union[str, Path], *, wwctl: Optional[str] = None,
            on_progress: Callable[[str, int, int], None] = lambda *_: None) -> List[TensorDelta]:
    """Reads both checkpoints once, in memory of 32 MiB. Each code is applied to `base` and compared with `now`.

    CheckpointError: one is no checkpoint; they do not hold the same tensors by rank, name, dtype and shape (names the first
    that differs and the remedy).
    """
    library, older, newer = library_of(wwctl), _open(base), _open(now)
    check_alike(older, newer, str(base), str(now))
    found: List[TensorDelta] = []
    done, total = 0, sum(tensor.bytes for tensors in newer.ranks for tensor in tensors.values())
    for rank, tensors in enumerate(newer.ranks):
        for name, tensor in tensors.items():
            found.append(_compare(library, rank, older, older.ranks[rank][name], newer, tensor))
            done += tensor.bytes
            on_progress("compare", done, total)
    for opened in (older, newer):
        opened.files.check_unchanged()
    return found


def _open(folder: Union[str, Path]) -> Opened:
    path = Path(folder)
    if composed.found_at(path):
        raise CheckpointError(f"{path}: holds several checkpoints: {', '.join(composed.read(path)[0])}",
                              remedy="name one of them, such as the folder of the weights")
    return open_checkpoint(path)


def _compare(library: Library, rank: int, older: Opened, was: Stored, newer: Opened, tensor: Stored) -> TensorDelta:
    step = _PIECE_BYTES // dtype_bytes(tensor.dtype)
    buffers = [np.empty(min(step, tensor.count), bits_of(tensor.dtype)) for _ in range(2)]
    changed = coded = 0
    for begin in range(0, tensor.count, step):
        end = min(tensor.count, begin + step)
        differing, size = library.delta_size(tensor.dtype, older.files.flat(was, begin, end, buffers[0]),
                                             newer.files.flat(tensor, begin, end, buffers[1]))
        changed, coded = changed + differing, coded + size
    return TensorDelta(rank, tensor.name, tensor.dtype, tensor.count, changed, tensor.bytes, coded)


def as_json(found: List[TensorDelta]) -> Dict[str, object]:
    """What `wwctl delta inspect --json` prints."""
    elements, changed = sum(one.elements for one in found), sum(one.changed for one in found)
    return {"elements": elements, "changed": changed, "density": changed / elements if elements else 0.0,
            "bytes_dense": sum(one.bytes for one in found), "bytes_coded": sum(one.coded for one in found),
            "tensors": [{"rank": one.rank, "name": one.name, "dtype": one.dtype, "elements": one.elements, "changed": one.changed,
                         "density": one.density, "bytes_dense": one.bytes, "bytes_coded": one.coded} for one in found]}


def as_text(found: List[TensorDelta], most: Optional[int] = None) -> Iterator[str]:
    """A line for each tensor, those that take most first; `most`: only so many, and how many more there are."""
    shown = sorted(found, key=lambda one: -one.coded)[:most]
    width = max([len(one.name) for one in shown] + [6])
    yield f"{'TENSOR':{width}}  RANK  DTYPE    CHANGED     DENSE BYTES     CODED BYTES    RATIO"
    for one in shown:
        yield (f"{one.name:{width}}  {one.rank:4}  {one.dtype:8} {100 * one.density:6.2f}%  {one.bytes:14,}  {one.coded:14,}  "
               f"{_ratio(one.bytes, one.coded)}")
    if len(shown) < len(found):
        yield f"… and {len(found) - len(shown)} more (--all)"
    all_of_it = as_json(found)
    dense, coded = sum(one.bytes for one in found), sum(one.coded for one in found)
    yield (f"{len(found)} tensors, {100 * float(str(all_of_it['density'])):.2f}% of {all_of_it['elements']:,} elements changed: "
           f"{coded:,} of {dense:,} bytes ({_ratio(dense, coded).strip()})")


def _ratio(dense: int, coded: int) -> str:
    return f"{dense / coded:6.1f}x" if coded else "     -"
