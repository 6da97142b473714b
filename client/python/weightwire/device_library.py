"""The C interface of libweightwire_cuda.so (kernels/cuda.h) through ctypes: what a process needs to use memory that its
agent lends. Untested on hardware."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import logging
import mmap
import threading
import uuid as uuids
import weakref
from typing import Callable, Sequence

import numpy as np

from weightwire import errors

log = logging.getLogger("weightwire")
ABI_VERSION = 6
_REMEDY = "build the target weightwire_cuda and name the file: library, or WEIGHTWIRE_CUDA"
_INT, _POINTER, _SIZE, _BYTES = ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p
_OUT = ctypes.POINTER(_POINTER)
_SIGNATURES = {
    "device_count": [ctypes.POINTER(_INT)],
    "device_uuid": [_INT, _BYTES],
    "ipc_open": [_INT, _BYTES, _OUT],
    "ipc_close": [_INT, _POINTER],
    "stream_create": [_INT, _OUT],
    "stream_destroy": [_INT, _POINTER],
    "event_create": [_INT, _OUT],
    "event_destroy": [_INT, _POINTER],
    "event_record": [_INT, _POINTER, _POINTER],
    "event_wait": [_INT, _POINTER],
    "stream_wait": [_INT, _POINTER, _POINTER],
    "host_register": [_POINTER, _SIZE],
    "host_unregister": [_POINTER],
    "copy_bytes": [_INT, _POINTER, _POINTER, _POINTER, _SIZE],
    "copy": [_INT, _POINTER, _POINTER, _SIZE],
    "sum": [_INT, _POINTER, _POINTER, _SIZE],
}
DIMS_MAX = 8
_BOX = np.dtype([("ndim", "i4"), ("extent", "i8", DIMS_MAX), ("source_stride", "i8", DIMS_MAX), ("target_stride", "i8", DIMS_MAX)],
                align=True)
#: ww_cuda_copy_job, and ww_cuda_sum_job, whose `sum` is where the other has its `target`.
JOB = np.dtype([("target", "u8"), ("source", "u8"), ("box", _BOX), ("from", "i4"), ("to", "i4")], align=True)
_FLOATS = {"BF16": 4, "F16": 5, "F32": 6}
_OPAQUE = {1: 0, 2: 1, 4: 2, 8: 3}


class LibraryError(errors.UnavailableError):
    """The library cannot be had, or a call of it failed: nothing that an agent or a coordinator said."""


def kinds(source: str, target: str, size: int) -> tuple[int, int] | None:
    """The kinds of element for a copy from dtype `source` of `size` bytes to `target`; None: no cast between them is known."""
    if source == target:
        return _OPAQUE[size], _OPAQUE[size]
    if source in _FLOATS and target in _FLOATS:
        return _FLOATS[source], _FLOATS[target]
    return None


class Library:
    """The library's calls, and the allocations of agents that this process has open: each once, as CUDA wants it.
    Thread-safe."""

    def __init__(self, path: str):
        try:
            self._library = ctypes.CDLL(path)
            version = self._library.ww_cuda_abi_version
            version.restype, version.argtypes = ctypes.c_uint32, []
            self._error = self._library.ww_cuda_error
            self._error.restype, self._error.argtypes = ctypes.c_char_p, []
            for name, arguments in _SIGNATURES.items():
                function = getattr(self._library, "ww_cuda_" + name)
                function.restype, function.argtypes = _INT, arguments
        except (OSError, AttributeError) as error:
            raise _unavailable(f"cannot load {path}: {error}") from None
        if version() != ABI_VERSION:
            raise _unavailable(f"{path} is of another build of weightwire")
        self._lock = threading.Lock()
        self._opened: dict[tuple[int, bytes], tuple[int, int]] = {}  # (device, handle) -> (pointer, users)
        self._given_up: collections.deque[tuple[int, bytes, Callable[[], None]]] = collections.deque()

    def call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, "ww_cuda_" + name)(*arguments) != 0:
            raise _unavailable(self._error().decode(errors="replace"))

    def uuids(self) -> list[str]:
        """The GPUs that this process sees, by index, as nvidia-smi names them."""
        count = _INT()
        self.call("device_count", ctypes.byref(count))
        found = []
        for index in range(count.value):
            raw = ctypes.create_string_buffer(16)
            self.call("device_uuid", index, raw)
            found.append(f"GPU-{uuids.UUID(bytes=raw.raw)}")
        return found

    def open(self, device: int, handle: bytes) -> int:
        """Where the allocation begins in this process; every open needs its close."""
        try:
            with self._lock:
                pointer, users = self._opened.get((device, handle), (0, 0))
                if users == 0:
                    opened = _POINTER()
                    self.call("ipc_open", device, handle, ctypes.byref(opened))
                    pointer = opened.value or 0
                self._opened[device, handle] = pointer, users + 1
                return pointer
        finally:
            self._close_given_up()

    def close(self, device: int, handle: bytes, then: Callable[[], None] = lambda: None) -> None:
        """Gives one open up, and calls `then`, whatever becomes of it. Never waits: a finalizer calls it, which the garbage
        collector may run on a thread that is inside of `open`. Then whoever holds the lock closes it, before it goes on."""
        self._given_up.append((device, handle, then))
        self._close_given_up()

    def _close_given_up(self) -> None:
        # Looks again behind the lock: what is given up while somebody holds it is left to them.
        while self._given_up and self._lock.acquire(blocking=False):
            try:
                while self._given_up:
                    self._close_one(*self._given_up.popleft())
            finally:
                self._lock.release()

    def _close_one(self, device: int, handle: bytes, then: Callable[[], None]) -> None:
        pointer, users = self._opened.pop((device, handle))
        if users > 1:
            self._opened[device, handle] = pointer, users - 1
        try:
            if users == 1:
                self.call("ipc_close", device, pointer)
        except LibraryError as error:  # the context is lost: nobody here can mend that
            log.warning("weightwire: a mapping of GPU memory could not be closed: %s", error)
        finally:
            then()

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        """Blocks until the bytes are there, on a stream of its own."""
        lane = Lane(self, device)
        lane.bytes(target, source, size)
        lane.wait()


class Lane:
    """A stream of one device. What is enqueued runs in order, and is done when `wait` returns. For one thread at a time; errors are
    LibraryError. Untested on hardware."""

    def __init__(self, library: Library, device: int):
        self._library, self._device = library, device
        made: list[tuple[str, ctypes.c_void_p]] = []
        weakref.finalize(self, _destroy, library, device, made).atexit = False  # the driver may be gone by then
        self._stream, self._done, self._before = _POINTER(), _POINTER(), _POINTER()
        for kind, one in (("stream", self._stream), ("event", self._done), ("event", self._before)):
            library.call(f"{kind}_create", device, ctypes.byref(one))
            made.append((f"{kind}_destroy", one))
        self._sums: _Sums | None = None

    def follow(self, stream: int) -> None:
        """What is enqueued here from now on starts when all is done that is on `stream` (a cudaStream_t of this device) now."""
        self._library.call("event_record", self._device, self._before, stream)
        self._library.call("stream_wait", self._device, self._stream, self._before)

    def bytes(self, target: int, source: int, size: int) -> None:
        """Between any two memories."""
        self._library.call("copy_bytes", self._device, self._stream, target, source, size)

    def copies(self, jobs: np.ndarray) -> None:
        """`jobs` (of JOB) in one call. None may touch what another one writes."""
        self._library.call("copy", self._device, self._stream, jobs.ctypes.data, len(jobs))

    def sums(self, jobs: np.ndarray) -> np.ndarray:
        """XXH3 of the packed bytes of each of `jobs` (of JOB; `target` is filled in here). Waits for them."""
        if self._sums is None or len(self._sums.values) < len(jobs):
            self._sums = _Sums(self._library, len(jobs))
        values = self._sums.values[:len(jobs)]
        jobs["target"] = values.ctypes.data + 8 * np.arange(len(jobs), dtype=np.uint64)
        self._library.call("sum", self._device, self._stream, jobs.ctypes.data, len(jobs))
        self.wait()
        return np.array(values)

    def wait(self) -> None:
        """Blocks until all that was enqueued is done."""
        self._library.call("event_record", self._device, self._done, self._stream)
        self._library.call("event_wait", self._device, self._done)


class _Sums:
    """Host memory that kernels write sums to."""

    def __init__(self, library: Library, count: int):
        memory = mmap.mmap(-1, -(-8 * count // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.values = np.frombuffer(memory, np.uint64)
        address = self.values.ctypes.data
        library.call("host_register", address, len(memory))
        # The finalizer holds the memory: it is there for as long as it is registered.
        weakref.finalize(self, _unregister, library, address, memory).atexit = False


def _unregister(library: Library, address: int, memory: mmap.mmap) -> None:
    with contextlib.suppress(LibraryError):
        library.call("host_unregister", address)


def _destroy(library: Library, device: int, made: Sequence[tuple[str, ctypes.c_void_p]]) -> None:
    for name, one in reversed(made):
        with contextlib.suppress(LibraryError):  # the context is lost, and they with it
            library.call(name, device, one)


def _unavailable(message: str) -> LibraryError:
    return LibraryError(message, code="UNAVAILABLE", reason="io_error", remedy=_REMEDY)
