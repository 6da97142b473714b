"""A rank's own part of a checkpoint, into memory that is already there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Iterator, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightwire.checkpoint.execute import Bound, memory_bits, place, split
from weightwire.checkpoint.layouts import Layout, words
from weightwire.checkpoint.library import library_of
from weightwire.checkpoint.planner import Copy
from weightwire.checkpoint.sources import PathLike, Source, find
from weightwire.checkpoint.stored import CheckpointError, bits_of
from weightwire.memory import TensorMeta


_STEP_BYTES = 64 << 20


@dataclass(frozen=True)
class Report:
    """What a conversion or a load did."""

    format: str
    spec: str
    plan: str
    bytes: int
    #: Bytes of `bytes` that an earlier, interrupted run had written.
    resumed: int
    #: Names in the source that are no weights, such as an optimizer's state.
    left_out: Sequence[str]
    #: What was chosen where there was a choice, or taken or left in a way that somebody should know.
    notes: Sequence[str] = ()


def load(source: PathLike, spec: Layout, rank: int, into: Mapping[str, Any], *, source_spec: Optional[str] = None,
         config: Optional[PathLike] = None, memory: int = 1 << 28, leave_out: Sequence[str] = (),
         wwctl: Optional[str] = None, group: str = "", missing_from: Optional[PathLike] = None) -> Report:
    """Fills what rank `rank` of the layout `spec` (words, or this rank's boxes) holds: `into` has its tensors by local
    name, NumPy arrays (bf16 and fp8 as unsigned integers of their size) or contiguous torch tensors on the CPU. Reads
    what the rank needs, no more; bits are copied, never cast. Padding is left as it is, and so is what
    the layout leaves out, which `into` need not have. `group`: see `open_checkpoint`; `missing_from`: see `convert`.

    CheckpointError: refused before the first byte, with rank, tensor and remedy.
    """
    found = find(source, spec=source_spec, config=config, leave_out=leave_out, wwctl=wwctl, group=group,
                 missing_from=missing_from)
    try:
        return _fill(found, spec, rank, into, memory)
    finally:
        found.opened.files.close()


@dataclass(frozen=True)
class Trial:
    """What one rank would load."""

    rank: int
    tensors: int
    bytes: int
    seconds: float


def try_load(source: PathLike, spec: str, ranks: Sequence[int] = (), *, source_spec: Optional[str] = None,
             config: Optional[PathLike] = None, memory: int = 1 << 28, leave_out: Sequence[str] = (), verify: bool = False,
             wwctl: Optional[str] = None, missing_from: Optional[PathLike] = None) -> Iterator[Trial]:
    """Loads what ranks of `spec` (none named: all of them) would, one after another, into memory that is given back; holds
    one rank's part at a time. Afterwards this host's page cache has the files, as far as it has room.

    verify: compare every byte with the digests or checksums that the format keeps first
    CheckpointError: a rank would not find its part; names rank and tensor.
    """
    found = find(source, spec=source_spec, config=config, leave_out=leave_out, wwctl=wwctl, verify=verify,
                 missing_from=missing_from)
    count = len(found.planner().layout(spec))
    wrong = [rank for rank in ranks if not 0 <= rank < count]
    if wrong:
        raise CheckpointError(f"'{spec}' has ranks 0 to {count - 1}", rank=str(wrong[0]))
    try:
        for rank in ranks or range(count):
            begin = time.monotonic()
            _, locals_ = found.plan_for(spec, rank)
            into = {local.name: np.zeros(local.shape, bits_of(local.dtype)) for local in locals_}
            report = _fill(found, spec, rank, into, memory)
            yield Trial(rank, len(into), report.bytes, time.monotonic() - begin)
    finally:
        found.opened.files.close()


def fill_rest(found: Source, rank: int, metas: Sequence[TensorMeta], params: Mapping[str, Any]) -> None:
    """Of a rank of the source's own layout, what the source lacks and `missing_from` has."""
    assert found.rest
    plan, _ = found.plan_for(found.opened.spec, rank)
    library = library_of(found.wwctl)
    for copy in (copy for copy in plan.copies if copy.source_rank >= found.rest.first):
        meta = metas[copy.target_tensor]
        for part in split(copy, meta.dtype, _STEP_BYTES, source_only=True):
            place(library, memory_bits(params[meta.name], meta, rank), found.bound, part)


def _fill(found: Source, spec: Layout, rank: int, into: Mapping[str, Any], memory: int) -> Report:
    mine, locals_ = found.plan_for(spec, rank)
    skipped = found.skipped(spec, rank)
    unknown = sorted(name for name in into.keys() ^ {local.name for local in locals_} if name not in skipped)
    if unknown:
        raise CheckpointError(f"'{words(spec)}' and the tensors to fill differ", reason="tensor_missing", rank=str(rank),
                              tensor=unknown[0], remedy="compare config.json and the spec with the model")
    filled = {copy.target_tensor for copy in mine.copies}  # others hold nothing but padding
    arrays = {number: memory_bits(into[local.name], local, rank) for number, local in enumerate(locals_) if number in filled}
    quarter = max(memory // 4, 1 << 16)
    # As it lies in the files, on every rank: reading ahead is left to the kernel, whose own guess fills the page cache in
    # larger pieces than being told (POSIX_FADV_WILLNEED) does.
    library = library_of(found.wwctl)
    for copy in sorted(mine.copies, key=lambda copy: _place(found.bound, copy)):
        flat = arrays[copy.target_tensor]
        for part in split(copy, locals_[copy.target_tensor].dtype, quarter, source_only=True):
            place(library, flat, found.bound, part)
    found.opened.files.check_unchanged()
    done = sum(copy.elements * arrays[copy.target_tensor].itemsize for copy in mine.copies)
    return Report(found.opened.format, words(spec), mine.id, done, 0, found.opened.left_out, found.opened.notes)


def _place(source: Bound, copy: Copy) -> Tuple[str, int, int]:
    region = source.tensor(copy.source_rank, copy.source_tensor).regions[0]
    return region.file, region.offset, copy.source_offset
