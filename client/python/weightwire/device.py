"""Tensors in GPU memory that the agent lends. Untested on hardware."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Mapping, Sequence

import numpy as np

from weightwire import binaries, errors
from weightwire.device_library import Library
from weightwire.memory import DTYPES, TensorMeta

_libraries: dict[str, Library] = {}
_libraries_lock = threading.Lock()


def _library(path: str | None) -> Library:
    path = path or os.environ.get("WEIGHTWIRE_CUDA") or binaries.library("libweightwire_cuda.so")
    with _libraries_lock:
        if path not in _libraries:
            _libraries[path] = Library(path)
        return _libraries[path]


class Device:
    """A GPU for `Publisher` and `Subscriber`: parameters or stage lie in its memory, lent by the agent.

    gpu:     its UUID as `nvidia-smi -L` has it ("GPU-8932f937-…"), or its index in this process
    library: libweightwire_cuda.so; default: $WEIGHTWIRE_CUDA, else the package's or the build's, else the loader's

    Raises UnavailableError when the library cannot be loaded or sees no GPU, RefusedError when it does not see this one.
    Untested on hardware.
    """

    def __init__(self, gpu: str | int, library: str | None = None):
        self._library = _library(library)
        seen = self._library.uuids()
        try:
            self.index = seen.index(gpu) if isinstance(gpu, str) else range(len(seen))[gpu]
        except (ValueError, IndexError):
            raise errors.RefusedError(f"this process does not see {gpu!r}; it sees {', '.join(seen)}",
                                      code="NOT_FOUND", reason="io_error",
                                      remedy="name one of them, or set CUDA_VISIBLE_DEVICES") from None
        #: As nvidia-smi has it.
        self.uuid = seen[self.index]

    def _map(self, handle: bytes, offset: int, lease: int) -> "_Slab":
        return _Slab(self._library, self.index, handle, offset, lease)


def _release(library: Library, device: int, handle: bytes, lease: int) -> None:
    # The mapping first: the agent lends the memory again once the lease is closed.
    library.close(device, handle, lambda: os.close(lease))


class _Slab:
    """A range of the agent's allocation; let go when the last array that lies in it has gone."""

    def __init__(self, library: Library, device: int, handle: bytes, offset: int, lease: int):
        try:
            self.pointer = library.open(device, handle) + offset
        except BaseException:
            os.close(lease)
            raise
        self.library, self.device = library, device
        weakref.finalize(self, _release, library, device, handle, lease).atexit = False

    def arrays(self, tensors: Sequence[TensorMeta], offsets: Sequence[int]) -> Mapping[str, "DeviceArray"]:
        return {meta.name: DeviceArray(meta, self, offset) for meta, offset in zip(tensors, offsets)}


class DeviceArray:
    """One tensor in GPU memory. The GPU reads and writes it at `pointer`; as a `__cuda_array_interface__`, torch and CuPy
    take it without a copy (bf16 and fp8 as unsigned integers). Synchronise your stream before `publish`: the agent reads
    on streams of its own.

    The memory stays lent while one of its arrays is alive: drop them all to give it back.
    """

    def __init__(self, meta: TensorMeta, slab: _Slab, offset: int):
        self.meta = meta
        self._slab = slab
        #: Address on the GPU. The host must not follow it.
        self.pointer = slab.pointer + offset

    @property
    def nbytes(self) -> int:
        return self.meta.nbytes

    @property
    def gpu(self) -> int:
        """The index of its GPU in this process."""
        return self._slab.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": self.meta.shape, "typestr": np.dtype(DTYPES[self.meta.dtype][1]).str,
                "data": (self.pointer, False), "version": 3}

    def read(self) -> np.ndarray:
        """A copy in host memory."""
        out: np.ndarray = np.empty(self.meta.shape, DTYPES[self.meta.dtype][1])
        self._slab.library.copy(self._slab.device, out.ctypes.data, self.pointer, self.nbytes)
        return out

    def write(self, values: np.ndarray) -> None:
        """Copies `values`, of this shape and as many bytes, from host memory; returns when they are there."""
        if values.shape != self.meta.shape or values.nbytes != self.nbytes:
            raise errors.RefusedError(f"{values.shape} of {values.nbytes} bytes do not fit {self.meta.shape} of "
                                      f"{self.nbytes}", code="INVALID_ARGUMENT", reason="shape_mismatch",
                                      tensor=self.meta.name)
        values = np.ascontiguousarray(values)
        self._slab.library.copy(self._slab.device, self.pointer, values.ctypes.data, self.nbytes)
