"""The bytes of a version as parts: each is one object of the store, coded by itself, so that all move side by side.

A rank's tensors lie one after another, each cut into blocks of 1 MiB; a part is as many blocks in a row as reach `part_bytes`.
An object is the magic word and for each block a 32-bit word, its low 24 bits the length and its high 8 bits the kind of what
follows. Numbers are little-endian. The kinds:

0  a code (server/delta/coder.h) that makes the block of the same block of the base
1  the block itself
2  the block through zstd, all first bytes of its elements first, then all second ones …
3  a code as of kind 0, of a block of zeros
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from weightwire.checkpoint.library import DELTA_BLOCK_BYTES, Library
from weightwire.checkpoint.stored import Bits, CheckpointError, bits_of, raw
from weightwire.memory import TensorMeta, dtype_bytes
from weightwire.store.objects import StoreError

MAGIC = b"WWSTORE1"
_CODE, _RAW, _ZSTD, _OF_ZEROS = 0, 1, 2, 3
_LENGTH_MAX = (1 << 24) - 1
#: As server/delta/coder.cc: numbers have no repetitions but by chance, so hardly any is looked for, and the Huffman stage does the work.
#: Of normal bf16 that is 2.5 times as fast as level 1 alone, and 2 per cent shorter.
_LEVEL, _HASH_LOG, _MIN_MATCH = 1, 6, 7
#: Where at most one element in so many is not 0, a code of zeros is half as long as what zstd makes, and read eight times as fast (bf16, one in 50).
_SPARSE = 16
_LOOKED_AT = 61  #: one element in so many; odd, so that no stride of a tensor hides the others

#: One block: its dtype and its elements, flat, as bits, in whatever memory they are.
Piece = Tuple[str, Bits]


@dataclass(frozen=True)
class Block:
    tensor: int
    begin: int  #: elements
    end: int


def parts_of(tensors: Sequence[TensorMeta], part_bytes: int) -> List[List[Block]]:
    """The blocks of each part of a rank. A rank without bytes has no part."""
    parts: List[List[Block]] = []
    held = part_bytes
    for number, meta in enumerate(tensors):
        item = dtype_bytes(meta.dtype)
        count, step = meta.nbytes // item, DELTA_BLOCK_BYTES // item
        for begin in range(0, count, step):
            if held >= part_bytes:
                parts.append([])
                held = 0
            end = min(count, begin + step)
            parts[-1].append(Block(number, begin, end))
            held += (end - begin) * item
    return parts


def pieces_of(tensors: Sequence[TensorMeta], flats: Sequence[Bits], part: Sequence[Block]) -> List[Piece]:
    """Views of a part's blocks in the tensors' memory."""
    return [(tensors[block.tensor].dtype, flats[block.tensor][block.begin:block.end]) for block in part]


def empty_pieces(tensors: Sequence[TensorMeta], part: Sequence[Block]) -> List[Piece]:
    """Memory for one part."""
    return [(tensors[block.tensor].dtype, np.empty(block.end - block.begin, bits_of(tensors[block.tensor].dtype))) for block in part]


def digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def content_of(pieces: Sequence[Piece]) -> str:
    """The digest of a part's bytes, whatever they are coded as."""
    sums = hashlib.sha256()
    for _, piece in pieces:
        sums.update(raw(piece))
    return sums.hexdigest()


def encode(library: Library, now: Sequence[Piece], base: Optional[Sequence[Piece]]) -> Tuple[bytearray, str]:
    """The object for a part, and the digest of the part's bytes. Without `base` it says everything."""
    out, sums = bytearray(MAGIC), hashlib.sha256()
    code, planes = np.empty(DELTA_BLOCK_BYTES, np.uint8), np.empty(DELTA_BLOCK_BYTES, np.uint8)  # for each block anew
    shorter = _compressor() if base is None else None
    zeros = np.zeros(DELTA_BLOCK_BYTES, np.uint8)
    for number, (dtype, piece) in enumerate(now):
        data = raw(piece)
        sums.update(data)
        kind, body = _RAW, data
        if base is not None and (size := library.delta_encode(dtype, base[number][1], piece, code)):
            kind, body = _CODE, code[:size].data
        elif base is None and _is_sparse(piece) and (size := library.delta_encode(dtype, zeros[:piece.nbytes].view(piece.dtype), piece, code)):
            kind, body = _OF_ZEROS, code[:size].data
        elif shorter is not None:
            packed = shorter.compress(_to_planes(piece, planes, scratch=code))
            if len(packed) < len(data):
                kind, body = _ZSTD, memoryview(packed)
        out += (len(body) | kind << 24).to_bytes(4, "little")
        out += body
    return out, sums.hexdigest()


def decode(library: Library, data: Any, pieces: Sequence[Piece], *, whole: bool, where: str) -> str:
    """Fills `pieces`, which hold the base unless the object is `whole`, from an object; returns the digest of what they hold then.

    StoreError (damaged): it is no such object; some blocks may have changed."""
    view, sums, beside = memoryview(data), hashlib.sha256(), np.empty(DELTA_BLOCK_BYTES, np.uint8)
    at = len(MAGIC)
    if view[:at] != MAGIC:
        raise _damaged(where, "it does not begin as a part does")
    for dtype, piece in pieces:
        word = int.from_bytes(view[at:at + 4], "little")
        kind, length, at = word >> 24, word & _LENGTH_MAX, at + 4
        if at + length > len(view):
            raise _damaged(where, "it ends too early")
        body = np.frombuffer(view[at:at + length], np.uint8)
        at += length
        into = piece.view(np.uint8)
        if kind == _RAW and length == into.nbytes:
            into[...] = body
        elif kind == _OF_ZEROS:  # made elsewhere: a piece is written once, as what it is to be
            made = beside[:into.nbytes]
            made[...] = 0
            _apply(library, dtype, body, made.view(piece.dtype), where)
            into[...] = made
        elif kind == _CODE and not whole:
            _apply(library, dtype, body, piece, where)
        elif kind == _ZSTD:
            _unpack(body, piece, where)
        else:
            raise _damaged(where, f"a block of kind {kind} and {length} bytes stands for {into.nbytes} bytes")
        sums.update(into.data)
    if at != len(view):
        raise _damaged(where, "something follows its blocks")
    return sums.hexdigest()


def _apply(library: Library, dtype: str, code: Bits, piece: Bits, where: str) -> None:
    try:
        library.delta_apply(dtype, code, piece)
    except CheckpointError as error:
        raise _damaged(where, str(error.args[0])) from error


def _is_sparse(piece: Bits) -> bool:
    some = piece[::_LOOKED_AT]
    return bool(np.count_nonzero(some) * _SPARSE <= len(some))


def _to_planes(piece: Bits, into: Bits, scratch: Bits) -> Bits:
    """All lowest bytes of the elements first, then all next ones. Shifted rather than taken by strides, which is four times slower."""
    planes, shifted = into[:piece.nbytes].reshape(piece.itemsize, -1), scratch[:piece.nbytes].view(piece.dtype)
    np.copyto(planes[0], piece, casting="unsafe")
    for place in range(1, piece.itemsize):
        np.right_shift(piece, 8 * place, out=shifted)
        np.copyto(planes[place], shifted, casting="unsafe")
    return into[:piece.nbytes]


def _from_planes(planes: Bits, piece: Bits) -> None:
    planes = planes.reshape(piece.itemsize, -1)
    if len(planes) == 1:
        return np.copyto(piece, planes[0])
    made = planes[-1].astype(piece.dtype)
    for place in range(piece.itemsize - 2, -1, -1):  # each element of the piece is written once, as what it is to be
        np.left_shift(made, 8, out=made)
        np.bitwise_or(made, planes[place], out=piece if place == 0 else made)


def _unpack(body: Bits, piece: Bits, where: str) -> None:
    zstd = _zstd()
    try:
        if zstd.get_frame_parameters(body).content_size != piece.nbytes:
            raise _damaged(where, f"a block is not of {piece.nbytes} bytes")
        made = np.frombuffer(zstd.ZstdDecompressor().decompress(body), np.uint8)
    except zstd.ZstdError as error:
        raise _damaged(where, str(error)) from error
    if made.nbytes != piece.nbytes:
        raise _damaged(where, f"a block is not of {piece.nbytes} bytes")
    _from_planes(made, piece)


def _damaged(where: str, what: str) -> StoreError:
    return StoreError(f"{where}: {what}", kind="damaged", remedy="`wwctl store verify` finds all that is damaged; the next anchor is whole")


def _compressor() -> Any:
    zstd = _zstd()
    return zstd.ZstdCompressor(compression_params=zstd.ZstdCompressionParameters.from_level(
        _LEVEL, hash_log=_HASH_LOG, min_match=_MIN_MATCH))


def _zstd() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise StoreError(f"stores need the package zstandard: {error}", kind="refused", remedy="pip install 'weightwire[store]'") from None
    return zstandard


