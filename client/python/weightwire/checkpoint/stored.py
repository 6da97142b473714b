"""What every format comes down to: tensors as blocks of bytes at known places of known files.

A reader of a format finds those places; from there on formats do not differ. File names found in a checkpoint are ids:
one component, no separator, looked up in the checkpoint's own folder.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from weightwire import errors
from weightwire.memory import dtype_bytes

#: Values are moved as bits: no dtype is ever interpreted.
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
Bits = NDArray[Any]
_PIECE_BYTES = 1 << 20  # of what is only looked at: it stays in a cache
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


class CheckpointError(errors.WeightwireError):
    """A checkpoint cannot be read, or not be written as asked. Nothing is left under the target's name."""

    def __init__(self, message: str, *, code: str = "INVALID_ARGUMENT", reason: str = "invalid_request",
                 rank: str = "", tensor: str = "", remedy: str = ""):
        super().__init__(message, code=code, reason=reason, rank=rank, tensor=tensor, remedy=remedy)


def damaged(where: str, what: str, *, tensor: str = "") -> CheckpointError:
    """A file that is not what its format says."""
    return CheckpointError(f"{where}: {what}", code="DATA_LOSS", reason="io_error", tensor=tensor,
                           remedy="the file is damaged, cut short or not of this format: fetch it again")


def cut_short(where: str, wanted: int, found: int) -> CheckpointError:
    """A file that was long enough when it was opened. In client/checkpoint/file_read.cc's words."""
    return CheckpointError(f"{where}: cut short while it was read: expected at least {wanted} bytes, found {found}",
                           code="DATA_LOSS", reason="io_error",
                           remedy="the file must not change while it is read: fetch it again")


def changed(where: str, what: str) -> CheckpointError:
    """A file that is another one than it was when its header was read."""
    return CheckpointError(f"{where}: {what} while it was read", code="DATA_LOSS", reason="io_error",
                           remedy="a checkpoint must not change while it is read: begin again when nobody writes it")


def plain(name: object, where: str) -> str:
    """`name` if it is a plain file name, as every name in a checkpoint must be."""
    if not isinstance(name, str) or not _PLAIN.fullmatch(name):
        raise damaged(where, f"{str(name)[:80]!r} is no plain file name")
    return name


def bits_of(dtype: str) -> Any:
    return np.dtype(_BITS[dtype_bytes(dtype)])


def raw(values: Bits) -> memoryview:
    """The bytes of an array."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


@dataclass(frozen=True)
class Region:
    """A block of a tensor, row-major and contiguous at `offset` of a file; `begin` is its place in the tensor."""

    file: str
    offset: int
    begin: tuple[int, ...]
    shape: tuple[int, ...]
    #: Of the block's bytes, where the format keeps one.
    crc: Optional[int] = None


@dataclass(frozen=True)
class Stored:
    """A tensor of one rank; its regions cover it once."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * dtype_bytes(self.dtype)


def whole(name: str, dtype: str, shape: Sequence[int], file: str, offset: int, crc: Optional[int] = None) -> Stored:
    """A tensor in one piece."""
    dims = tuple(shape)
    return Stored(name, dtype, dims, (Region(file, offset, (0,) * len(dims), dims, crc),))


def check_cover(tensor: Stored) -> None:
    """Refuses regions that leave the tensor, overlap, or leave elements of it out."""
    if len(tensor.regions) == 1 and tensor.regions[0].shape == tensor.shape and not any(tensor.regions[0].begin):
        return
    for r in tensor.regions:
        if len(r.begin) != len(tensor.shape) or any(b < 0 or b + n > s for b, n, s in
                                                    zip(r.begin, r.shape, tensor.shape)):
            raise damaged(r.file, f"a block leaves the shape {list(tensor.shape)}", tensor=tensor.name)
    if sum(math.prod(r.shape) for r in tensor.regions) != tensor.count:
        raise damaged(tensor.regions[0].file if tensor.regions else "index", "blocks do not add up to the tensor",
                      tensor=tensor.name)
    for i, a in enumerate(tensor.regions):
        for b in tensor.regions[:i]:
            if all(x < y + m and y < x + n for x, n, y, m in zip(a.begin, a.shape, b.begin, b.shape)):
                raise damaged(a.file, "blocks overlap", tensor=tensor.name)


#: What tells one state of a file from another: its inode, size and time of change (ns).
Identity = Tuple[int, int, int]


def identity(fd: int) -> Identity:
    stat = os.fstat(fd)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@dataclass
class Files:
    """The files of one checkpoint. Nothing is mapped: a file that shrinks, goes or is replaced under its reader is a
    CheckpointError that names it, a full disk an OSError, neither a signal."""

    folder: Path
    writable: bool = False
    #: Each file as it was when it was first looked at.
    seen: Dict[str, Identity] = field(default_factory=dict)
    #: Files that do not lie in the folder: each is made when it is first wanted, and its descriptor given.
    made: Dict[str, Callable[[], int]] = field(default_factory=dict)
    _open: Dict[str, int] = field(default_factory=dict)

    def fd(self, name: str) -> int:
        if name not in self._open and name in self.made:
            self._open[name] = self.made[name]()
            self.seen[name] = identity(self._open[name])
        if name not in self._open:
            flags = os.O_RDWR if self.writable else os.O_RDONLY
            try:
                self._open[name] = os.open(self.folder / name, flags | os.O_CLOEXEC)
            except FileNotFoundError:
                raise changed(name, "is missing, or was removed") from None
            if not self.writable:
                self._check_same(name)
        return self._open[name]

    def check_unchanged(self) -> None:
        """To be called when everything was read. CheckpointError (DATA_LOSS): somebody wrote one of the files meanwhile."""
        for name in self._open:
            self._check_same(name)

    def _check_same(self, name: str) -> None:
        now = identity(self._open[name])
        before = self.seen.setdefault(name, now)
        if now != before:
            what = "was replaced" if now[0] != before[0] else f"changed, from {before[1]} to {now[1]} bytes,"
            raise changed(name, what if now[1] != before[1] else what.split(",")[0])

    def size(self, name: str) -> int:
        return os.fstat(self.fd(name)).st_size

    def read(self, name: str, offset: int, out: Bits) -> Bits:
        """Fills `out`, contiguous, with the bytes of a file from `offset` on."""
        left, fd = out.reshape(-1).view(np.uint8).data, self.fd(name)
        while left:
            done = os.preadv(fd, [left], offset)
            if not done:
                raise cut_short(name, offset + len(left), os.fstat(fd).st_size)
            left, offset = left[done:], offset + done
        return out

    def place(self, tensor: Stored, begin: int, end: int) -> Optional[Tuple[str, int]]:
        """File and offset of the elements [begin, end) of the row-major tensor, where they lie one after another."""
        for region, first, last in _row_ranges(tensor):
            if first <= begin and end <= last:
                return region.file, region.offset + (begin - first) * dtype_bytes(tensor.dtype)
        return None

    def flat(self, tensor: Stored, begin: int, end: int, out: Optional[Bits] = None) -> Bits:
        """Elements [begin, end) of the row-major tensor, read into `out` where that is given."""
        if not 0 <= begin <= end <= tensor.count or (begin < end and not tensor.regions):
            raise CheckpointError(f"elements {begin} to {end} of {tensor.count}", reason="internal", tensor=tensor.name)
        bits = bits_of(tensor.dtype)
        if begin == end:
            return np.empty(0, bits)
        if (place := self.place(tensor, begin, end)) is not None:
            return self.read(*place, np.empty(end - begin, bits) if out is None else out[:end - begin])
        row = math.prod(tensor.shape[1:])
        top, bottom = begin // row, -(-end // row)
        rows = np.empty((bottom - top, *tensor.shape[1:]), bits)
        for region in tensor.regions:
            self._read_rows(region, top, bottom, rows)
        values = rows.reshape(-1)[begin - top * row:end - top * row]
        if out is None:
            return values
        np.copyto(out[:end - begin], values)
        return out[:end - begin]

    def _read_rows(self, region: Region, top: int, bottom: int, rows: Bits) -> None:
        """What a region holds of a tensor's rows [top, bottom), to its place in `rows`."""
        low, high = max(top, region.begin[0]), min(bottom, region.begin[0] + region.shape[0])
        inner = tuple(slice(b, b + n) for b, n in zip(region.begin[1:], region.shape[1:]))
        row_bytes = math.prod(region.shape[1:]) * rows.itemsize
        step = max(1, _PIECE_BYTES // max(1, row_bytes))
        for first in range(low, high, step):
            last = min(high, first + step)
            piece = np.empty((last - first, *region.shape[1:]), rows.dtype)
            where = (slice(first - top, last - top), *inner)
            rows[where] = self.read(
                region.file, region.offset + (first - region.begin[0]) * row_bytes, piece)

    def write(self, tensor: Stored, begin: int, values: Bits) -> None:
        """Elements from `begin` on. Only for regions of whole rows, as every writer here lays them out."""
        item, data, written = dtype_bytes(tensor.dtype), raw(values), 0
        for region, first, last in _row_ranges(tensor):
            low, high = max(first, begin), min(last, begin + len(values))
            while low < high:
                part = data[(low - begin) * item:(high - begin) * item]
                done = os.pwrite(self.fd(region.file), part, region.offset + (low - first) * item)
                if done % item:  # a signal cut an element: write it again
                    done -= done % item
                low, written = low + done // item, written + done
        assert written == len(data), tensor.name

    def check_crc(self, tensor: Stored) -> None:
        """Compares with the sums that the format keeps; 0 means that none was kept."""
        for region in tensor.regions:
            if not region.crc:
                continue
            size, crc = math.prod(region.shape) * dtype_bytes(tensor.dtype), 0
            piece = np.empty(min(size, _PIECE_BYTES), np.uint8)
            for begin in range(0, size, _PIECE_BYTES):
                crc = zlib.crc32(self.read(region.file, region.offset + begin, piece[:size - begin]).data, crc)
            if crc != region.crc:
                raise damaged(region.file, "the bytes do not match their checksum", tensor=tensor.name)

    def close(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()


def _row_ranges(tensor: Stored) -> Iterator[tuple[Region, int, int]]:
    """Regions of whole rows, and the flat range of elements that each holds."""
    row = math.prod(tensor.shape[1:])
    for region in tensor.regions:
        if region.shape[1:] == tensor.shape[1:]:
            first = region.begin[0] * row if region.begin else 0
            yield region, first, first + math.prod(region.shape)
