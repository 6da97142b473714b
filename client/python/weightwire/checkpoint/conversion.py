"""A checkpoint in one format and layout from one in another: a plan, run between files.

What was interrupted goes on where it was, as long as the plan and the source are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence

from weightwire.checkpoint.execute import by_target, compare, run
from weightwire.checkpoint.formats import Opened, Wanted
from weightwire.checkpoint.loading import Report
from weightwire.checkpoint.planner import Plan
from weightwire.checkpoint.sources import PathLike, Source, find
from weightwire.checkpoint.writing import Writing, check_free, target_layout

#: (what is being done, bytes done, bytes in all)
OnProgress = Callable[[str, int, int], None]


def convert(source: PathLike, target: PathLike, to: str, *, source_spec: Optional[str] = None,
            config: Optional[PathLike] = None, memory: int = 1 << 28, shard_bytes: int = 5_000_000_000,
            verify: bool = False, leave_out: Sequence[str] = (), wwctl: Optional[str] = None,
            on_progress: OnProgress = lambda what, done, total: None) -> Report:
    """Writes `target`, which must not exist, as `to` says: hf, torch_dist, megatron:tp4,pp1, weightwire[:SPEC].

    Bits are copied, never cast. `memory` bounds what is held of the weights, `verify` checks the source's own digests
    first and reads back and compares everything at the end.
    CheckpointError: refused, with rank, tensor and remedy; OSError: a disk failed or is full. Run again to go on.
    """
    final = Path(os.path.abspath(target))
    check_free(final)
    kind, spec = target_layout(to)
    found = find(source, spec=source_spec, config=config, leave_out=leave_out, wwctl=wwctl, verify=verify)
    plan, ranks = found.plan(spec)
    wanted = Wanted(kind, to, spec, ranks, shard_bytes, found.described())
    return _write(final, found, plan, wanted, memory, verify, on_progress)


def _write(final: Path, found: Source, plan: Plan, wanted: Wanted, memory: int, verify: bool,
           on_progress: OnProgress) -> Report:
    opened, source, steps = found.opened, found.bound, by_target(plan)
    key = {"plan": plan.id, "to": wanted.to, "shard_bytes": wanted.shard_bytes, "source": _identity(opened)}
    with Writing(final, wanted, key) as writing:
        target = writing.target
        sizes = [target.tensor(*where).bytes for where, _ in steps]
        total = sum(tensor.bytes for rank in target.ranks for tensor in rank)
        written = resumed = sum(sizes[:writing.done])

        def wrote(step: int, size: int) -> None:
            nonlocal written
            written += size
            writing.wrote(size)
            on_progress("write", written, total)
        run(steps[writing.done:], source, target, memory, wrote)
        writing.seal()
        if verify:
            read = 0

            def compared(_: int, size: int) -> None:
                nonlocal read
                read += size
                on_progress("verify", read, total)
            compare(steps, source, writing.reopened(), memory, compared)
        writing.finish()
    return Report(wanted.format, wanted.spec, plan.id, total, resumed, opened.left_out)


def _identity(opened: Opened) -> List[Any]:
    files = sorted({region.file for tensors in opened.ranks for t in tensors.values() for region in t.regions})
    stats = [(file, os.stat(opened.files.folder / file)) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
