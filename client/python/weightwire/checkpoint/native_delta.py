"""A native checkpoint that is stored as what changed since another one: files of codes (server/delta/coder.h), and the same
manifest with the digests of the whole tensors.

`FILE.delta` stands for `FILE`: the magic word; for each tensor its blocks of 1 MiB, each a 32-bit length and that many bytes, a
code or, with the top bit set, the block itself; a JSON with FILE's own header and where each tensor's blocks lie; the length of
that JSON (64 bits) and the magic word again. Numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, Tuple

import numpy as np

from weightwire.checkpoint import safetensors
from weightwire.checkpoint.library import DELTA_BLOCK_BYTES, Library, library_of
from weightwire.checkpoint.stored import Bits, CheckpointError, Files, Stored, bits_of, damaged, plain, raw
from weightwire.memory import dtype_bytes

#: Elements of a tensor from one to another; the array at the end may be filled with them. `Files.flat` is one.
Values = Callable[[Stored, int, int, Bits], Bits]
SUFFIX = ".delta"
#: Of checkpoints that are based on one another.
CHAIN_MAX = 64
_MAGIC = b"WWDELTA1"
_WHOLE = 1 << 31


def write(path: Path, header: str, tensors: List[Stored], now: Values, base: Values, bases: Dict[str, Stored], step_bytes: int) -> None:
    """`path`: the changes of a file with this header, which holds these tensors; `bases` are the same in `base`."""
    library = library_of(None)
    places: Dict[str, Tuple[int, int]] = {}
    with open(path, "xb") as out:
        out.write(_MAGIC)
        for tensor in tensors:
            begin = out.tell()
            _write_tensor(out, library, tensor, now, base, bases[tensor.name], step_bytes)
            places[tensor.name] = (begin, out.tell() - begin)
        footer = json.dumps({"header": header, "tensors": places}, separators=(",", ":")).encode()
        out.write(footer + len(footer).to_bytes(8, "little") + _MAGIC)


def header_text(files: Files, name: str) -> str:
    length = int.from_bytes(files.read(name, 0, np.empty(8, np.uint8)).tobytes(), "little")
    return files.read(name, 8, np.empty(length, np.uint8)).tobytes().decode()


def _write_tensor(out: BinaryIO, library: Library, tensor: Stored, now: Values, base: Values, older: Stored, step_bytes: int) -> None:
    step = step_bytes // dtype_bytes(tensor.dtype)
    buffers = [np.empty(min(step, tensor.count), bits_of(tensor.dtype)) for _ in range(2)]
    code = np.empty(DELTA_BLOCK_BYTES, np.uint8)
    for begin in range(0, tensor.count, step):
        end = min(tensor.count, begin + step)
        was, values = base(older, begin, end, buffers[0]), now(tensor, begin, end, buffers[1])
        block = DELTA_BLOCK_BYTES // values.itemsize
        for at in range(0, len(values), block):
            piece = values[at:at + block]
            size = library.delta_encode(tensor.dtype, was[at:at + block], piece, code)
            data = code[:size].data if size else raw(piece)
            out.write((size or len(data) | _WHOLE).to_bytes(4, "little"))
            out.write(data)


class DeltaFile:
    """A file of codes that was opened: the header that it stands for is checked, its codes are read when somebody wants the file."""

    def __init__(self, folder: Path, name: str, files: Files):
        self._files, self.name = files, plain(name, "manifest")
        self._file = self.name + SUFFIX
        size = self._files.size(self._file)
        if size < 3 * len(_MAGIC) or self._bytes(0, 8) != _MAGIC or self._bytes(size - 8, 8) != _MAGIC:
            raise damaged(self._file, "no file of changes")
        length = int.from_bytes(self._bytes(size - 16, 8), "little")
        if not 0 < length <= min(size - 3 * len(_MAGIC), 2 * safetensors.HEADER_BYTES_MAX):
            raise damaged(self._file, f"a description of {length} bytes in a file of {size}")
        try:
            said: Any = json.loads(self._bytes(size - 16 - length, length).decode())
            self._header: str = said["header"]
            places = {str(name): (int(begin), int(count)) for name, (begin, count) in said["tensors"].items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(self._file, f"the description is malformed: {error}") from error
        self.tensors = safetensors.parse_header(self.name, self._header.encode(), None)
        if places.keys() != {tensor.name for tensor in self.tensors}:
            raise damaged(self._file, "the description and the header name different tensors")
        for name, (begin, count) in places.items():
            if not len(_MAGIC) <= begin <= begin + count <= size - 16 - length:
                raise damaged(self._file, "its blocks lie outside of the file", tensor=name)
        self._places = places

    def expand(self, bases: Dict[str, Stored], base: Files, leaves: Dict[str, List[str]], leaf_bytes: int) -> int:
        """The file that this one stands for: a descriptor of a file without a name in the folder for temporary files. CheckpointError
        (DATA_LOSS): the codes are damaged, or were made of another base: the digests tell."""
        library = library_of(None)
        with tempfile.TemporaryFile() as out:
            text = self._header.encode()
            out.write(len(text).to_bytes(8, "little") + text)
            for tensor in self.tensors:
                self._expand_tensor(out, library, tensor, bases[tensor.name], base, leaves[tensor.name], leaf_bytes)
            base.close()  # what was made of a chain for this file takes room
            out.flush()
            return os.dup(out.fileno())

    def _expand_tensor(self, out: BinaryIO, library: Library, tensor: Stored, older: Stored, base: Files, leaves: List[str],
                       leaf_bytes: int) -> None:
        at, left = self._places[tensor.name]
        step = leaf_bytes // dtype_bytes(tensor.dtype)
        buffer = np.empty(min(step, tensor.count), bits_of(tensor.dtype))
        for number, begin in enumerate(range(0, tensor.count, step)):
            values = base.flat(older, begin, min(tensor.count, begin + step), buffer)
            block = DELTA_BLOCK_BYTES // values.itemsize
            for first in range(0, len(values), block):
                piece = values[first:first + block]
                if left < 4:
                    raise damaged(self._file, "its blocks end too early", tensor=tensor.name)
                length = int.from_bytes(self._bytes(at, 4), "little")
                at, left, size = at + 4, left - 4, length & ~_WHOLE
                if size > left or size > DELTA_BLOCK_BYTES or (length & _WHOLE and size != piece.nbytes):
                    raise damaged(self._file, "a block is not as long as it says", tensor=tensor.name)
                if length & _WHOLE:
                    self._files.read(self._file, at, piece)
                else:
                    library.delta_apply(tensor.dtype, self._files.read(self._file, at, np.empty(size, np.uint8)), piece)
                at, left = at + size, left - size
            if number >= len(leaves) or hashlib.sha256(raw(values)).hexdigest() != leaves[number]:
                raise damaged(self._file, "what its changes make of the base is not what the manifest's digest says", tensor=tensor.name)
            out.write(raw(values))
        if left:
            raise damaged(self._file, "something follows its blocks", tensor=tensor.name)

    def _bytes(self, offset: int, count: int) -> bytes:
        return self._files.read(self._file, offset, np.empty(count, np.uint8)).tobytes()


def base_of(manifest: Any, folder: Path) -> Tuple[Path, str]:
    """The folder of the checkpoint that this one is based on, and the digest that it must have."""
    said = manifest.get("base")
    if not isinstance(said, dict) or not isinstance(said.get("path"), str) or not isinstance(said.get("digest"), str):
        raise damaged("weightwire.json", "it names no base")
    return Path(os.path.realpath(folder.parent / said["path"])), said["digest"]


class ChainError(CheckpointError):
    """What `folder` is based on has no end, or a far one."""

    def __init__(self, folder: Path):
        super().__init__(f"{folder} is based on a chain of more than {CHAIN_MAX} checkpoints, or on a ring of them",
                         code="FAILED_PRECONDITION", remedy="save without a base, or store one of them whole first (wwctl compact)")


def check_link(folder: Path, base: Path, digest: str, manifest: Any) -> None:
    """CheckpointError: the manifest of the base is not that of what `folder` was based on."""
    if manifest.get("digest") != digest:
        raise CheckpointError(f"{folder} holds what changed since {base}, which is another checkpoint now", code="FAILED_PRECONDITION",
                              reason="digest_mismatch", remedy="put the one that it was based on back there")


def missing_base(folder: Path, base: Path, why: CheckpointError) -> CheckpointError:
    return CheckpointError(f"{folder} holds what changed since {base}, which cannot be read: {why}", code="FAILED_PRECONDITION",
                           remedy="put that checkpoint back where it was: both were moved together, or none")
