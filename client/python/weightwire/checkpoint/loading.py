"""A rank's own part of a checkpoint, into memory that is already there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional, Sequence, Tuple

from weightwire.checkpoint.execute import Bound, memory_bits, place, span, split
from weightwire.checkpoint.layouts import Layout, words
from weightwire.checkpoint.planner import Copy
from weightwire.checkpoint.sources import PathLike, find
from weightwire.checkpoint.stored import CheckpointError


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


def load(source: PathLike, spec: Layout, rank: int, into: Mapping[str, Any], *, source_spec: Optional[str] = None,
         config: Optional[PathLike] = None, memory: int = 1 << 28, leave_out: Sequence[str] = (),
         wwctl: Optional[str] = None, group: str = "") -> Report:
    """Fills what rank `rank` of the layout `spec` (words, or this rank's boxes) holds: `into` has its tensors by local
    name, NumPy arrays (bf16 and fp8 as unsigned integers of their size) or contiguous torch tensors on the CPU. Reads
    what the rank needs, no more; bits are copied, never cast. Padding is left as it is. `group`: see `open_checkpoint`.

    CheckpointError: refused before the first byte, with rank, tensor and remedy.
    """
    found = find(source, spec=source_spec, config=config, leave_out=leave_out, wwctl=wwctl, group=group)
    mine, locals_ = found.plan_for(spec, rank)
    unknown = sorted(into.keys() ^ {local.name for local in locals_})
    if unknown:
        raise CheckpointError(f"'{words(spec)}' and the tensors to fill differ", reason="tensor_missing", rank=str(rank),
                              tensor=unknown[0], remedy="compare config.json and the spec with the model")
    filled = {copy.target_tensor for copy in mine.copies}  # others hold nothing but padding
    arrays = {number: memory_bits(into[local.name], local, rank) for number, local in enumerate(locals_) if number in filled}
    quarter = max(memory // 4, 1 << 16)
    ordered = sorted(mine.copies, key=lambda copy: _place(found.bound, copy))  # as it lies in the files, on every rank
    for copy in ordered:
        found.opened.files.announce(found.bound.tensor(copy.source_rank, copy.source_tensor), copy.source_offset,
                                    copy.source_offset + span(copy.extent, copy.source_stride))
    for copy in ordered:
        flat = arrays[copy.target_tensor]
        for part in split(copy, locals_[copy.target_tensor].dtype, quarter, source_only=True):
            place(flat, found.bound, part, quarter)
    found.opened.files.close()
    done = sum(copy.elements * arrays[copy.target_tensor].itemsize for copy in mine.copies)
    return Report(found.opened.format, words(spec), mine.id, done, 0, found.opened.left_out)


def _place(source: Bound, copy: Copy) -> Tuple[str, int, int]:
    region = source.tensor(copy.source_rank, copy.source_tensor).regions[0]
    return region.file, region.offset, copy.source_offset
