"""The C interface of libweightwire_checkpoint.so (client/checkpoint/weightwire_checkpoint.h) through ctypes: layouts, plans,
the copies of a load and the size of what changed, in this process and without its interpreter lock."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import grpc

from weightwire import binaries
from weightwire.checkpoint.stored import Bits, CheckpointError
from weightwire.errors import reason_name

FILE = "libweightwire_checkpoint.so"
ABI_VERSION = 6
ALL_RANKS = 2**32 - 1
_DIMS_MAX = 8
#: layout::ScaleRule from here on are of elements of four bits.
FOUR_BITS = 4
NVFP4_MODELOPT = 8  # the last one
#: The most that one code stands for (WW_CHECKPOINT_DELTA_BLOCK).
DELTA_BLOCK_BYTES = 1 << 20
_REMEDY = "build it with ./dev build, or install it with the wwctl of this release"


class _Status(ctypes.Structure):
    _fields_ = [("code", ctypes.c_int32), ("reason", ctypes.c_int32), ("message", ctypes.c_char_p),
                ("rank", ctypes.c_char_p), ("tensor", ctypes.c_char_p), ("remedy", ctypes.c_char_p)]


class _Answer(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


_Numbers = ctypes.c_int64 * _DIMS_MAX


class _Block(ctypes.Structure):
    _fields_ = [("element_bytes", ctypes.c_uint32), ("dims", ctypes.c_uint32), ("extent", _Numbers),
                ("source_stride", _Numbers), ("target_stride", _Numbers)]


class _Matrix(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("block_rows", ctypes.c_int64),
                ("block_columns", ctypes.c_int64), ("rule", ctypes.c_int32), ("scale_bytes", ctypes.c_int32),
                ("global_scale", ctypes.c_float)]


class _Delta(ctypes.Structure):
    _fields_ = [("changed", ctypes.c_uint64), ("coded_bytes", ctypes.c_uint64)]


_TEXT, _ANSWER = ctypes.c_char_p, ctypes.POINTER(_Answer)
_SIGNATURES: Dict[str, Tuple[Any, List[Any]]] = {
    "abi_version": (ctypes.c_uint32, []),
    "last": (_Status, []),
    "layout": (ctypes.c_int32, [_TEXT, _TEXT, ctypes.c_uint32, ctypes.c_uint32, _ANSWER]),
    "plan": (ctypes.c_int32, [_TEXT, _TEXT, _TEXT, ctypes.c_uint32, _ANSWER]),
    "quantized": (ctypes.c_int32, [_TEXT, _TEXT, _ANSWER]),
    "quantize": (ctypes.c_int32, [_TEXT, ctypes.POINTER(_Matrix), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "global": (ctypes.c_int32, [_TEXT, ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_float), ctypes.POINTER(ctypes.c_float)]),
    "copy": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(_Block)]),
    "delta_size": (ctypes.c_int32, [_TEXT, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(_Delta)]),
    "delta_encode": (ctypes.c_int32, [_TEXT, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p,
                                      ctypes.POINTER(ctypes.c_uint64)]),
    "delta_apply": (ctypes.c_int32, [_TEXT, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64]),
    "read": (ctypes.c_int32, [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, _TEXT, ctypes.POINTER(_Block)]),
}


class Library:
    """The file at `path`. Errors are of the thread that calls, so a call and its error are one thing."""

    def __init__(self, path: str):
        try:
            self._library = ctypes.CDLL(path)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self._library, "ww_checkpoint_" + name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise CheckpointError(f"cannot load the planner, which lies beside wwctl: {error}", code="FAILED_PRECONDITION",
                                  remedy=_REMEDY) from None
        if self._get("abi_version") != ABI_VERSION:
            raise CheckpointError(f"{path} is of another build of weightwire", code="FAILED_PRECONDITION", remedy=_REMEDY)

    def layout(self, config: str, spec: str, rank: int = ALL_RANKS, *, pieces: bool = False) -> bytes:
        """JSON of what the ranks hold. CheckpointError: what the layout's scheme says."""
        return self._ask("layout", config, spec, rank, pieces)

    def plan(self, config: str, source: str, target: str, rank: int = ALL_RANKS) -> bytes:
        """A plan, proved, in the form of server/plan/plan_bytes.h. CheckpointError: no such plan; names rank and tensor."""
        return self._ask("plan", config, source, target, rank)

    def quantized(self, config: str, format: str) -> bytes:
        """JSON of what a checkpoint in this format holds. CheckpointError: no such format, or the model is quantized already."""
        return self._ask("quantized", config, format)

    def quantize(self, dtype: str, source: Bits, columns: int, block: Sequence[int], rule: int, codes: Bits, scales: Bits,
                 global_scale: float = 1.0) -> None:
        """Writes codes and scales of a matrix of whole blocks, all of them flat arrays. CheckpointError: not of such a dtype."""
        rows = len(source) // columns
        blocks = -(-rows // block[0]) * -(-columns // block[1])
        if rows * columns != len(source) or codes.nbytes * (2 if FOUR_BITS <= rule <= NVFP4_MODELOPT else 1) != len(source) or len(scales) != blocks:
            raise CheckpointError(f"{len(source)} elements, {codes.nbytes} bytes of codes, {len(scales)} scales", reason="internal")
        matrix = _Matrix(rows, columns, block[0], block[1], rule, scales.itemsize, global_scale)
        self._call("quantize", _text(dtype), ctypes.byref(matrix), _address(source, 0), _address(codes, 0), _address(scales, 0))

    def global_scale(self, dtype: str, rule: int, source: Bits, amax: float) -> Tuple[float, float]:
        """NVFP4's of what is given in parts: the largest magnitude with this part, and the scale by that."""
        known, made = ctypes.c_float(amax), ctypes.c_float()
        self._call("global", _text(dtype), rule, _address(source, 0), len(source), ctypes.byref(known), ctypes.byref(made))
        return known.value, made.value

    def copy(self, target: Bits, target_offset: int, target_stride: Sequence[int], source: Bits,
             source_stride: Sequence[int], extent: Sequence[int]) -> None:
        """Copies a block of elements between flat arrays; the source's begins at its first element. It is not checked here
        that the block stays inside of them."""
        self.copy_at(_address(target, target_offset), _address(source, 0), target.itemsize, extent, source_stride, target_stride)

    def copy_at(self, target: int, source: int, itemsize: int, extent: Sequence[int], source_stride: Sequence[int],
                target_stride: Sequence[int]) -> None:
        """The same between addresses of elements of `itemsize` bytes."""
        block = _Block(itemsize, len(extent), _Numbers(*extent), _Numbers(*source_stride), _Numbers(*target_stride))
        self._call("copy", target, source, ctypes.byref(block))

    def read(self, target: Bits, target_offset: int, target_stride: Sequence[int], fd: int, offset: int, name: str,
             source_stride: Sequence[int], extent: Sequence[int]) -> None:
        """The same from the bytes of a file that begin at `offset`. CheckpointError (DATA_LOSS): it ends before the block does."""
        block = _Block(target.itemsize, len(extent), _Numbers(*extent), _Numbers(*source_stride), _Numbers(*target_stride))
        self._call("read", _address(target, target_offset), fd, offset, _text(name), ctypes.byref(block))

    def delta_size(self, dtype: str, base: Bits, now: Bits) -> Tuple[int, int]:
        """How many elements of two flat arrays differ, and the bytes of the code of what differs, which is tried. CheckpointError
        (INTERNAL): the code does not give `now`."""
        if base.nbytes != now.nbytes:
            raise CheckpointError(f"{base.nbytes} and {now.nbytes} bytes cannot be compared")
        sums = _Delta()
        self._call("delta_size", _text(dtype), _address(base, 0), _address(now, 0), now.nbytes, ctypes.byref(sums))
        return sums.changed, sums.coded_bytes

    def delta_encode(self, dtype: str, base: Bits, now: Bits, code: Bits) -> int:
        """Writes into `code` (bytes, as many as `now` has at least) what makes `now` of `base`, flat arrays of at most
        DELTA_BLOCK_BYTES; returns its length, 0 where `now` itself is shorter."""
        if not base.nbytes == now.nbytes <= min(code.nbytes, DELTA_BLOCK_BYTES):
            raise CheckpointError(f"no block: {base.nbytes} and {now.nbytes} bytes, a code of {code.nbytes}", reason="internal")
        size = ctypes.c_uint64()
        self._call("delta_encode", _text(dtype), _address(base, 0), _address(now, 0), now.nbytes, _address(code, 0), ctypes.byref(size))
        return size.value

    def delta_apply(self, dtype: str, code: Bits, target: Bits) -> None:
        """Makes the newer version of the older one in place. CheckpointError (DATA_LOSS): it is not the code of such a block."""
        if target.nbytes > DELTA_BLOCK_BYTES:
            raise CheckpointError(f"no block: {target.nbytes} bytes", reason="internal")
        self._call("delta_apply", _text(dtype), _address(code, 0), code.nbytes, _address(target, 0), target.nbytes)

    def _ask(self, name: str, *arguments: Any) -> bytes:
        answer = _Answer()
        self._call(name, *(_text(one) if isinstance(one, str) else one for one in arguments), ctypes.byref(answer))
        return ctypes.string_at(answer.data, answer.bytes)

    def _get(self, name: str, *arguments: Any) -> Any:
        return getattr(self._library, "ww_checkpoint_" + name)(*arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        if self._get(name, *arguments) == 0:
            return
        last = self._get("last")
        said = {key: getattr(last, key).decode(errors="replace") for key in ("message", "rank", "tensor", "remedy")}
        raise CheckpointError(said.pop("message"), reason=reason_name(last.reason),
                              code=next((c.name for c in grpc.StatusCode if c.value[0] == last.code), "UNKNOWN"), **said)


def _address(flat: Bits, offset: int) -> int:
    return int(flat.__array_interface__["data"][0]) + offset * flat.itemsize


def _text(value: str) -> bytes:
    if "\0" in value:
        raise CheckpointError("a text with a zero byte where a layout or a config.json was expected")
    return value.encode(errors="replace")


def library_of(wwctl: Optional[str]) -> Library:
    """The one beside `wwctl`: by default $WEIGHTWIRE_BIN_DIR/wwctl, else the one on PATH. CheckpointError: there is none."""
    found = wwctl or binaries.find("wwctl")
    if not found:
        raise CheckpointError("wwctl, beside which the planner lies, was not found", code="FAILED_PRECONDITION",
                              remedy="put it on PATH, name its folder in WEIGHTWIRE_BIN_DIR, or pass --wwctl")
    return _at(str(Path(found).resolve().parent / FILE))


_at = lru_cache(maxsize=4)(Library)
