"""A checkpoint in one format and layout from one in another: a plan, run between files.

What was interrupted goes on where it was, as long as the plan and the source are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

from weightwire.checkpoint import composed, trainer_state
from weightwire.checkpoint.execute import by_target, compare, run
from weightwire.checkpoint.formats import Wanted
from weightwire.checkpoint.library import library_of
from weightwire.checkpoint.loading import Report
from weightwire.checkpoint.planner import Plan
from weightwire.checkpoint.sources import PathLike, Source, find
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import Writing, base_folder, check_free, target_layout

#: (what is being done, bytes done, bytes in all)
OnProgress = Callable[[str, int, int], None]


def convert(source: PathLike, target: PathLike, to: str, *, source_spec: Optional[str] = None,
            config: Optional[PathLike] = None, memory: int = 1 << 28, shard_bytes: int = 5_000_000_000,
            verify: bool = False, leave_out: Sequence[str] = (), wwctl: Optional[str] = None,
            missing_from: Optional[PathLike] = None, base: Optional[PathLike] = None, on_progress: OnProgress = lambda what, done, total: None) -> Report:
    """Writes `target`, which must not exist, as `to` says: hf, torch_dist, megatron:tp4,pp1, weightwire[:SPEC].

    Bits are copied, never cast. `memory` bounds what is held of the weights, `verify` checks the source's own digests
    first and reads back and compares everything at the end. `missing_from`: a checkpoint of the whole model (any format), from
    which all tensors are taken that the source lacks; `Report.notes` says which. `base`: a native checkpoint of the same model and
    layout; `target` (weightwire[:SPEC]) keeps what changed since it, and needs it to be read. A composed checkpoint of a Megatron trainer becomes one
    torch_dist with its optimizer; of any other, name the part.
    CheckpointError: refused, with rank, tensor and remedy; OSError: a disk failed or is full. Run again to go on.
    """
    final = Path(os.path.abspath(target))
    check_free(final)
    kind, spec = target_layout(to)
    older = base_folder(base, kind, final)
    if composed.found_at(Path(source)):
        if missing_from:
            raise CheckpointError(f"{source} is composed; --missing-from completes one of its parts", remedy=f"convert {source}/model")
        return _write(final, *trainer_state.pieces(Path(source), to, config, leave_out, wwctl, verify), memory,
                      verify, older, on_progress)
    found = find(source, spec=source_spec, config=config, leave_out=leave_out, wwctl=wwctl, verify=verify,
                 missing_from=missing_from)
    plan, ranks = found.plan(spec)
    wanted = Wanted(kind, to, spec, ranks, shard_bytes, found.described())
    return _write(final, [(found, plan)], wanted, memory, verify, older, on_progress)


def _write(final: Path, pieces: Sequence[Tuple[Source, Plan]], wanted: Wanted, memory: int, verify: bool,
           base: Optional[Path], on_progress: OnProgress) -> Report:
    """One target out of one source or several, one after the other; their plans number the target's tensors."""
    steps = [by_target(plan) for _, plan in pieces]
    plan_id = "+".join(plan.id for _, plan in pieces)
    key = {"plan": plan_id, "to": wanted.to, "shard_bytes": wanted.shard_bytes,
           "source": [entry for found, _ in pieces for entry in identity_of(found)]}
    with Writing(final, wanted, key, base) as writing:
        target = writing.target
        sizes = [target.tensor(*where).bytes for own in steps for where, _ in own]
        total = sum(tensor.bytes for rank in target.ranks for tensor in rank)
        written = resumed = sum(sizes[:writing.done])

        def wrote(step: int, size: int) -> None:
            nonlocal written
            written += size
            writing.wrote(size)
            on_progress("write", written, total)
        left = writing.done
        for (found, _), own in zip(pieces, steps):
            run(own[left:], found.bound, target, memory, wrote, library_of(found.wwctl))
            left = max(0, left - len(own))
        writing.seal()
        if verify:
            read = 0

            def compared(_: int, size: int) -> None:
                nonlocal read
                read += size
                on_progress("verify", read, total)
            made = writing.reopened()
            for (found, _), own in zip(pieces, steps):
                compare(own, found.bound, made, memory, compared)
        for found, _ in pieces:
            found.opened.files.check_unchanged()
        writing.finish()
    return Report(wanted.format, wanted.spec, plan_id, total, resumed,
                  [name for found, _ in pieces for name in found.opened.left_out],
                  [note for found, _ in pieces for note in found.opened.notes])


def identity_of(found: Source) -> List[Any]:
    """What tells the source's files from others, or from what they were before."""
    files = sorted({region.file for tensors in found.bound.ranks for t in tensors for region in t.regions})
    stats = [(file, os.fstat(found.opened.files.fd(file))) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
