"""The C interface of libweightwire_cuda.so (kernels/cuda.h) through ctypes: what a process needs to use memory that its
agent lends. Untested on hardware."""

from __future__ import annotations

import ctypes
import threading
import uuid as uuids

from weightwire import errors

ABI_VERSION = 4
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
    "copy_bytes": [_INT, _POINTER, _POINTER, _POINTER, _SIZE],
}


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
        with self._lock:
            pointer, users = self._opened.get((device, handle), (0, 0))
            if users == 0:
                opened = _POINTER()
                self.call("ipc_open", device, handle, ctypes.byref(opened))
                pointer = opened.value or 0
            self._opened[device, handle] = pointer, users + 1
            return pointer

    def close(self, device: int, handle: bytes) -> None:
        with self._lock:
            pointer, users = self._opened.pop((device, handle))
            if users > 1:
                self._opened[device, handle] = pointer, users - 1
            else:
                self.call("ipc_close", device, pointer)

    def copy(self, device: int, target: int, source: int, size: int) -> None:
        """Blocks until the bytes are there, on a stream of its own."""
        stream, event = _POINTER(), _POINTER()
        self.call("stream_create", device, ctypes.byref(stream))
        try:
            self.call("event_create", device, ctypes.byref(event))
            try:
                self.call("copy_bytes", device, stream, target, source, size)
                self.call("event_record", device, event, stream)
                self.call("event_wait", device, event)
            finally:
                self.call("event_destroy", device, event)
        finally:
            self.call("stream_destroy", device, stream)


def _unavailable(message: str) -> errors.UnavailableError:
    return errors.UnavailableError(message, code="UNAVAILABLE", reason="io_error", remedy=_REMEDY)
