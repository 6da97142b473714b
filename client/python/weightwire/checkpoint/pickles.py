"""Reads what torch pickles without importing a thing: every class and function that a pickle names becomes an inert
record of its arguments, so a malicious file can at most be refused. No torch; tensors are located, never loaded.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import pickletools
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

from weightwire.checkpoint.stored import Files, Stored, damaged, whole
from weightwire.memory import FROM_TORCH, dtype_bytes

PICKLE_BYTES_MAX = 256 << 20
_MEMO = {"PUT", "BINPUT", "LONG_BINPUT"}
#: Opcodes that reserve what they claim, or reach outside the file.
_REFUSED = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4", "PERSID"}
_STORAGES = {"BFloat16": "BF16", "Half": "F16", "Float": "F32", "Double": "F64", "Char": "I8", "Short": "I16",
             "Int": "I32", "Long": "I64", "Byte": "U8", "Bool": "BOOL"}


class Inert:
    """An object of a class that was not imported: `path` names it, `args` and `state` are what the pickle gave."""

    path = ""

    def __init__(self, *args: Any, **kwargs: Any):
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        """A list's subclass: what it holds is of no interest."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """A dict's subclass: what it holds is of no interest."""

    def field(self, name: str) -> Any:
        """An attribute as the pickle sets it; None when it does not."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Mapping(Dict[Any, Any]):
    """An OrderedDict; torch hangs `_metadata` on those of modules."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _Mapping
        return type("Inert", (Inert,), {"path": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return pid


def load(data: bytes, where: str) -> Any:
    """What a pickle holds, in inert objects. CheckpointError (DATA_LOSS) when it is malformed or too large."""
    if len(data) > PICKLE_BYTES_MAX:
        raise damaged(where, f"a pickle of {len(data)} bytes")
    try:
        argument: Any
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name in _REFUSED or (opcode.name in _MEMO and argument > len(data)):
                raise damaged(where, f"its pickle uses {opcode.name} as no checkpoint does")
        return _Reader(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, ValueError, EOFError, IndexError, KeyError, AttributeError, TypeError,
            RecursionError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise damaged(where, f"its pickle cannot be read: {error}") from error


class _Window(io.RawIOBase):
    """`size` bytes of an open file from `start` on, as a file."""

    def __init__(self, fd: int, start: int, size: int):
        self._fd, self._start, self._size, self._at = fd, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, min(len(buffer), max(0, self._size - self._at)), self._start + self._at)
        buffer[:len(data)] = data
        self._at += len(data)
        return len(data)


@dataclass(frozen=True)
class Record:
    """A member of a torch zip: uncompressed bytes at `offset` of the file."""

    offset: int
    size: int
    crc: int
    header: int  # of the member, in the file
    entry: int  # its number in the central directory


class TorchZip:
    """One `torch.save` file, or an item of a .distcp file, whose tensors are located without reading them."""

    def __init__(self, files: Files, file: str, start: int = 0, size: Optional[int] = None):
        self._files, self.file, self.start = files, file, start
        self.size = files.size(file) - start if size is None else size
        if start < 0 or self.size < 0 or start + self.size > files.size(file):
            raise damaged(file, f"an item at {start} + {self.size} lies beyond its end")
        self._records: Dict[str, Record] = {}
        pickled = b""
        try:
            with zipfile.ZipFile(io.BufferedReader(_Window(files.fd(file), start, self.size))) as archive:
                for number, info in enumerate(archive.infolist()):
                    self._add(number, info)
                    if info.filename.endswith("/data.pkl"):
                        if info.file_size > PICKLE_BYTES_MAX:
                            raise damaged(file, f"a pickle of {info.file_size} bytes")
                        pickled = archive.read(info)
        except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError, EOFError, OverflowError, RuntimeError) as error:
            raise damaged(file, f"no torch zip: {error}") from error
        if "data.pkl" not in self._records:
            raise damaged(file, "no torch zip: no data.pkl in it")
        self.content = load(pickled, file)

    def _add(self, number: int, info: zipfile.ZipInfo) -> None:
        head = os.pread(self._files.fd(self.file), 30, self.start + info.header_offset)
        offset = info.header_offset + 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        if info.compress_type != zipfile.ZIP_STORED or head[:4] != b"PK\3\4" or offset + info.file_size > self.size:
            raise damaged(self.file, f"record {info.filename[:80]!r} is compressed or lies beyond the end")
        self._records[info.filename.split("/", 1)[-1]] = Record(self.start + offset, info.file_size, info.CRC,
                                                               self.start + info.header_offset, number)

    def storages(self) -> Iterator[Record]:
        return (record for name, record in self._records.items() if name.startswith("data/"))

    def tensor(self, value: Any, name: str) -> Optional[Stored]:
        """Where the tensor lies that `value`, a part of `content`, stands for; None when it is no tensor.

        CheckpointError: it is not contiguous, or its storage is not in the file as it says.
        """
        while isinstance(value, Inert) and value.path == "torch._utils._rebuild_parameter" and value.args:
            value = value.args[0]
        if not isinstance(value, Inert) or value.path not in ("torch._utils._rebuild_tensor_v2",
                                                              "torch._utils._rebuild_tensor_v3"):
            return None
        try:
            (kind, storage, key, _, count), offset, shape, stride = value.args[:4]
            dtype = _dtype(storage.path, value.args[6].path if len(value.args) > 6 else "")
            record = self._records[f"data/{key}"]
            numbers = [offset, count, *shape, *stride]
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise damaged(self.file, f"a tensor of an unknown form: {error}", tensor=name) from error
        if kind != "storage" or len(shape) > 8 or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers):
            raise damaged(self.file, "a tensor of an unknown form", tensor=name)
        item = dtype_bytes(dtype)
        if list(stride) != _row_major(shape) and math.prod(shape) > 1:
            raise damaged(self.file, f"strides {stride} of {shape}: not contiguous", tensor=name)
        if (offset + math.prod(shape)) * item > record.size:
            raise damaged(self.file, "a tensor is larger than its storage", tensor=name)
        all_of_it = offset == 0 and math.prod(shape) * item == record.size
        return whole(name, dtype, shape, self.file, record.offset + offset * item, record.crc if all_of_it else None)

    def write_sums(self) -> None:
        """Puts the checksums of storages that were filled after the zip was made where a zip keeps them."""
        fd = self._files.fd(self.file)
        tail = os.pread(fd, min(self.size, 1 << 16), self.start + self.size - min(self.size, 1 << 16))
        entries = _central(fd, self.start, self.size, tail)
        for record in self.storages():
            crc = self._sum(record).to_bytes(4, "little")
            signature = os.pread(fd, 4, record.offset + record.size)
            if signature == b"PK\7\x08":  # the data descriptor that torch writes
                os.pwrite(fd, crc, record.offset + record.size + 4)
            os.pwrite(fd, crc, entries[record.entry] + 16)

    def _sum(self, record: Record) -> int:
        crc, fd = 0, self._files.fd(self.file)
        for at in range(0, record.size, 1 << 22):
            crc = zlib.crc32(os.pread(fd, min(1 << 22, record.size - at), record.offset + at), crc)
        return crc


def _central(fd: int, start: int, size: int, tail: bytes) -> List[int]:
    """Where each entry of the central directory begins, in the file."""
    end = tail.rindex(b"PK\5\6")
    count, offset = int.from_bytes(tail[end + 10:end + 12], "little"), int.from_bytes(tail[end + 16:end + 20], "little")
    far = tail.rfind(b"PK\6\6", 0, end)
    if far >= 0:
        count = int.from_bytes(tail[far + 32:far + 40], "little")
        offset = int.from_bytes(tail[far + 48:far + 56], "little")
    places, at = [], start + offset
    for _ in range(count):
        places.append(at)
        head = os.pread(fd, 46, at)
        assert head[:4] == b"PK\1\2", "torch's zip has another form than its reader knows"
        at += 46 + sum(int.from_bytes(head[k:k + 2], "little") for k in (28, 30, 32))
    return places


def _dtype(storage: str, extra: str) -> str:
    if extra:  # _rebuild_tensor_v3 names it
        return FROM_TORCH[extra.rsplit(".", 1)[-1]]
    kind = storage.rsplit(".", 1)[-1]
    return _STORAGES[kind[:-len("Storage")]]


def _row_major(shape: Sequence[int]) -> List[int]:
    stride, out = 1, []
    for size in reversed(shape):
        out.append(stride)
        stride *= max(1, size)
    return out[::-1]


def tensors(archive: TorchZip, mapping: Any) -> Iterator[Tuple[str, Stored]]:
    """The tensors of a state dict in the file."""
    if not isinstance(mapping, dict):
        raise damaged(archive.file, "no state dict")
    for name, value in mapping.items():
        found = archive.tensor(value, name) if isinstance(name, str) else None
        if found is not None:
            yield name, found
