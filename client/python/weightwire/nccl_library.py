"""The C interface of libweightwire_nccl.so (client/collective/weightwire_nccl.h) through ctypes."""

from __future__ import annotations

import ctypes
from typing import Any

import grpc

from weightwire import errors
from weightwire.v1 import types_pb2

ABI_VERSION = 2
UNIQUE_ID_BYTES = 128
STATES = ("unformed", "forming", "ready", "running", "aborting", "stuck", "closed")
HANDLE = ctypes.c_void_p


class Options(ctypes.Structure):
    _fields_ = [("nccl_library", ctypes.c_char_p), ("cuda_library", ctypes.c_char_p), ("device", ctypes.c_int32),
                ("release_grace_ms", ctypes.c_uint32)]


class Piece(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("peer", ctypes.c_uint32)]


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("reason", ctypes.c_int32), ("message", ctypes.c_char_p),
                ("rank", ctypes.c_char_p), ("remedy", ctypes.c_char_p)]


_PIECES = ctypes.POINTER(Piece)
_SIZE, _U32, _U64 = ctypes.c_size_t, ctypes.c_uint32, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "abi_version": (_U32, []),
    "last": (_Status, []),
    "open": (ctypes.c_int32, [ctypes.POINTER(Options), ctypes.POINTER(HANDLE)]),
    "free": (None, [HANDLE]),
    "unique_id": (ctypes.c_int32, [HANDLE, ctypes.c_char_p]),
    "form": (ctypes.c_int32, [HANDLE, ctypes.c_char_p, _U32, _U32, _U64, _U32]),
    "broadcast": (ctypes.c_int32, [HANDLE, ctypes.c_void_p, _SIZE, _U32, ctypes.c_void_p, _U32]),
    "exchange": (ctypes.c_int32, [HANDLE, _PIECES, _SIZE, _PIECES, _SIZE, ctypes.c_void_p, _U32]),
    "abort": (ctypes.c_int32, [HANDLE, ctypes.c_char_p]),
    "close": (ctypes.c_int32, [HANDLE, _U32]),
    "state": (ctypes.c_int32, [HANDLE]),
    "epoch": (_U64, [HANDLE]),
}


class Library:
    """libweightwire_nccl.so. Its errors are of the thread that calls, so a call and its error are one thing."""

    def __init__(self, path: str):
        remedy = "build the target weightwire_nccl and name the file: library, or WEIGHTWIRE_NCCL"
        try:
            self._library = ctypes.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, "ww_nccl_" + name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise errors.UnavailableError(f"cannot load {path}: {error}", code="UNAVAILABLE",
                                          reason="transport_failed", remedy=remedy) from None
        if self.get("abi_version") != ABI_VERSION:
            raise errors.UnavailableError(f"{path} is of another build of weightwire", code="UNAVAILABLE",
                                          reason="transport_failed", remedy=remedy)

    def get(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, "ww_nccl_" + name)(*arguments)

    def call(self, name: str, *arguments: Any) -> None:
        if self.get(name, *arguments) == 0:
            return
        last = self.get("last")
        code = next((c.name for c in grpc.StatusCode if c.value[0] == last.code), "UNKNOWN")
        raise errors.make_error(code, last.message.decode(errors="replace"), types_pb2.ErrorDetail(
            reason=last.reason, rank=last.rank.decode(errors="replace"),
            remedy=last.remedy.decode(errors="replace")))
