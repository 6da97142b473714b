"""Memory that a process shares with its agent: sealed memfds, seen as numpy arrays."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np

from weightwire import errors
from weightwire.v1 import types_pb2

# safetensors' dtype name -> (bytes of an element, numpy dtype that holds its bits)
DTYPES = {
    "BF16": (2, np.uint16),
    "F16": (2, np.float16),
    "F32": (4, np.float32),
    "F64": (8, np.float64),
    "I8": (1, np.int8),
    "I16": (2, np.int16),
    "I32": (4, np.int32),
    "I64": (8, np.int64),
    "U8": (1, np.uint8),
    "BOOL": (1, np.bool_),
    "F8_E4M3": (1, np.uint8),
    "F8_E5M2": (1, np.uint8),
    "F8_E8M0": (1, np.uint8),
    "U16": (2, np.uint16),
    "U32": (4, np.uint32),
}
# torch's name -> safetensors'
FROM_TORCH = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "uint16": "U16",
    "uint32": "U32",
}
#: What a Publisher or Subscriber that was opened without a device holds, by tensor name.
Arrays = Mapping[str, np.ndarray]
_ALIGNMENT = 64
_MEMFD_NAME_BYTES = 200  # Linux takes 249; the name is for people


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype named as in safetensors ("BF16", "F32", …). RefusedError: there is none of this name."""
    if dtype not in DTYPES:
        raise errors.RefusedError(f"dtype {dtype!r} is not known", code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy=f"one of {', '.join(DTYPES)}")
    return DTYPES[dtype][0]


@dataclass(frozen=True)
class TensorMeta:
    """A tensor's name, dtype (safetensors' spelling) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        size = dtype_bytes(self.dtype)
        for extent in self.shape:
            size *= extent
        return size

    def to_proto(self) -> types_pb2.TensorSpec:
        dtype_bytes(self.dtype)
        with errors.refusing(tensor=str(self.name)[:80]):
            return types_pb2.TensorSpec(name=self.name, dtype=types_pb2.DType.Value(f"DTYPE_{self.dtype}"),
                                        shape=self.shape)

    @staticmethod
    def from_proto(spec: types_pb2.TensorSpec) -> "TensorMeta":
        return TensorMeta(spec.name, types_pb2.DType.Name(spec.dtype)[len("DTYPE_"):], tuple(spec.shape))


def array_at(buffer: mmap.mmap, offset: int, meta: TensorMeta) -> np.ndarray:
    """View of `meta` at `offset` bytes of `buffer`; bf16 and fp8 appear as unsigned integers."""
    size, kind = DTYPES[meta.dtype]
    count = meta.nbytes // size
    return np.frombuffer(buffer, dtype=kind, count=count, offset=offset).reshape(meta.shape)


def arena_map(tensors: Sequence[TensorMeta]) -> tuple[list[int], int]:
    """Where tensors lie that follow one another, each at a multiple of 64 bytes, and the bytes of all, at least 64."""
    offsets = []
    end = 0
    for meta in tensors:
        offsets.append(end)
        end += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(end, _ALIGNMENT)


class Arena:
    """One sealed memfd that holds tensors one after another, each at a multiple of 64 bytes.

    The seals (no shrinking, no growing) are what lets the agent map it without trusting us. One that is dropped without
    `close` gives its fd back by itself.
    """

    def __init__(self, name: str, tensors: Sequence[TensorMeta]):
        self.tensors = list(tensors)
        self.offsets, self.nbytes = arena_map(self.tensors)
        with errors.refusing():
            short = name.encode()[:_MEMFD_NAME_BYTES].decode(errors="ignore")
            self.fd = os.memfd_create(short, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, self.nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        self._map = mmap.mmap(self.fd, self.nbytes)

    @property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """Writable views, by tensor name."""
        return {m.name: array_at(self._map, o, m) for m, o in zip(self.tensors, self.offsets)}

    def close(self) -> None:
        """Gives the fd back; the mapping goes with the last array that refers to it."""
        self._close()  # once
        self.fd = -1
