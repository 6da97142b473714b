"""The safetensors format: headers in and out. A header is data from outside: every number in it is checked."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from weightwire.checkpoint.stored import Identity, Stored, damaged, identity, whole
from weightwire.memory import DTYPES, dtype_bytes

HEADER_BYTES_MAX = 100_000_000  # the reference implementation's bound
TENSORS_MAX = 1_000_000
NAME_BYTES_MAX = 1024
DIMS_MAX = 8


def read_header(folder: Path, file: str, seen: Optional[Dict[str, Identity]] = None) -> List[Stored]:
    """The tensors of one file, in the order of their bytes. Reads the header only; `seen` (Files.seen) is told which file it was.

    CheckpointError (DATA_LOSS): the header is malformed, or the tensors do not cover the rest of the file exactly.
    """
    try:
        with open(folder / file, "rb") as source:
            size = os.fstat(source.fileno()).st_size
            if seen is not None:
                seen[file] = identity(source.fileno())
            length = int.from_bytes(source.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, HEADER_BYTES_MAX):
                raise damaged(file, f"a header of {length} bytes in a file of {size}")
            text = source.read(length)
    except OSError as error:
        raise damaged(file, str(error)) from error
    return parse_header(file, text, size)


def parse_header(file: str, text: bytes, size: Optional[int]) -> List[Stored]:
    """The tensors that a header describes; `size`: of the whole file, where there is one."""
    length = len(text)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"the header is no JSON: {error}") from error
    if not isinstance(header, dict) or len(header) > TENSORS_MAX:
        raise damaged(file, "the header is no object, or too large a one")
    header.pop("__metadata__", None)
    found = sorted([_tensor(file, name, entry) for name, entry in header.items()], key=lambda one: one[:2])
    at = 0
    for begin, end, name, _, _ in found:
        if begin != at:
            raise damaged(file, f"bytes {at} to {begin} belong to no tensor, or to two", tensor=name)
        at = end
    if size is not None and at != size - 8 - length:
        raise damaged(file, f"tensors take {at} bytes, the file has {size - 8 - length}")
    return [whole(name, dtype, shape, file, 8 + length + begin) for begin, _, name, dtype, shape in found]


def _unique(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name appears twice")
    return made


def _naturals(values: List[Any]) -> bool:
    for one in values:
        if type(one) is not int or not 0 <= one < 1 << 62:  # a bool is an int
            return False
    return True


def _tensor(file: str, name: str, entry: object) -> Tuple[int, int, str, str, List[int]]:
    """Begin and end in the file's data, name, dtype, shape."""
    if not isinstance(entry, dict) or len(name.encode(errors="replace")) > NAME_BYTES_MAX or not name:
        raise damaged(file, "an entry is no tensor", tensor=name[:80])
    dtype, shape, place = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise damaged(file, f"dtype {str(dtype)[:40]!r} is not known", tensor=name)
    if not isinstance(shape, list) or len(shape) > DIMS_MAX or not _naturals(shape):
        raise damaged(file, "the shape is none", tensor=name)
    if not isinstance(place, list) or len(place) != 2 or not _naturals(place):
        raise damaged(file, "data_offsets are none", tensor=name)
    if place[1] - place[0] != math.prod(shape) * dtype_bytes(dtype):
        raise damaged(file, f"{place[1] - place[0]} bytes do not hold {dtype} {shape}", tensor=name)
    return place[0], place[1], name, dtype, shape


def make_header(tensors: Iterable[Tuple[str, str, Sequence[int]]]) -> Tuple[bytes, int]:
    """The text of a header, and the bytes that follow it."""
    header: Dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * dtype_bytes(dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), end


def write_skeleton(path: Path, tensors: Iterable[Tuple[str, str, Sequence[int]]]) -> None:
    """A file with its header, the tensors' bytes still holes."""
    text, size = make_header(tensors)
    with open(path, "xb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + size)
