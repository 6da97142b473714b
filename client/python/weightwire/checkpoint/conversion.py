"""A checkpoint in one format and layout from one in another: a plan, run between files.

What was interrupted goes on where it was, as long as the plan and the source are the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

from weightwire.checkpoint import megatron_files, native
from weightwire.checkpoint.execute import Bound, by_target, compare, memory_bits, place, run, split
from weightwire.checkpoint.formats import Opened, Wanted, bind
from weightwire.checkpoint.planner import Plan, Planner
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import FORMATS, Writing, check_free, target_layout
from weightwire.memory import TensorMeta

PathLike = Union[str, "os.PathLike[str]"]
#: (what is being done, bytes done, bytes in all)
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """What a conversion did."""

    format: str
    spec: str
    plan: str
    bytes: int
    #: Bytes of `bytes` that an earlier, interrupted run had written.
    resumed: int
    #: Names in the source that are no weights, such as an optimizer's state.
    left_out: Sequence[str]


def open_checkpoint(folder: PathLike) -> Opened:
    """Recognises the format and reads descriptions and headers, no weights.

    CheckpointError: it is no checkpoint, or a damaged one; sizes are always checked.
    """
    path = Path(folder)
    for module in FORMATS.values():
        if module.found_at(path):
            opened: Opened = module.open_at(path)
            return opened
    raise CheckpointError(f"{path}: no checkpoint", code="NOT_FOUND",
                          remedy="expected model.safetensors or its index, .metadata, mp_rank folders or weightwire.json")


def check(folder: PathLike) -> Opened:
    """Reads every byte and compares with the digests or checksums that the format keeps; safetensors keeps none."""
    opened = open_checkpoint(folder)
    if opened.format == "weightwire":
        native.check(opened)
    for tensors in opened.ranks:
        for tensor in tensors.values():
            opened.files.check_crc(tensor)
            opened.files.release()
    return opened


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
    opened, planner, described, have = _source(source, source_spec, config, leave_out, wwctl, verify)
    plan = planner.plan(opened.spec, spec)
    wanted = Wanted(kind, to, spec, _with_dtypes(planner.layout(spec), plan, have), shard_bytes, described)
    return _write(final, opened, have, plan, wanted, memory, verify, on_progress)


def load(source: PathLike, spec: str, rank: int, into: Mapping[str, Any], *, source_spec: Optional[str] = None,
         config: Optional[PathLike] = None, memory: int = 1 << 28, leave_out: Sequence[str] = (),
         wwctl: Optional[str] = None) -> Report:
    """Fills what rank `rank` of the layout `spec` holds: `into` has its tensors by local name, NumPy arrays (bf16 and
    fp8 as unsigned integers of their size) or contiguous torch tensors on the CPU. Reads what the rank needs, no more;
    bits are copied, never cast. Padding is left as it is.

    CheckpointError: refused before the first byte, with rank, tensor and remedy.
    """
    opened, planner, _, have = _source(source, source_spec, config, leave_out, wwctl, False)
    layout = planner.layout(spec)
    if not 0 <= rank < len(layout):
        raise CheckpointError(f"rank {rank} of '{spec}', which has {len(layout)} ranks")
    plan = planner.plan(opened.spec, spec)
    mine = Plan(plan.id, [copy for copy in plan.copies if copy.target_rank == rank])
    locals_ = _with_dtypes(layout, mine, have)[rank]
    unknown = sorted(into.keys() ^ {local.name for local in locals_})
    if unknown:
        raise CheckpointError(f"'{spec}' and the tensors to fill differ", reason="tensor_missing", rank=str(rank),
                              tensor=unknown[0], remedy="compare config.json and the spec with the model")
    arrays = [memory_bits(into[local.name], local, rank) for local in locals_]
    quarter = max(memory // 4, 1 << 16)
    for copy in mine.copies:
        flat = arrays[copy.target_tensor]
        for part in split(copy, locals_[copy.target_tensor].dtype, quarter, source_only=True):
            place(flat, have, part, quarter)
    opened.files.close()
    done = sum(copy.elements * arrays[copy.target_tensor].itemsize for copy in mine.copies)
    return Report(opened.format, spec, plan.id, done, 0, opened.left_out)


def _source(source: PathLike, spec: Optional[str], config: Optional[PathLike], leave_out: Sequence[str],
            wwctl: Optional[str], verify: bool) -> Tuple[Opened, Planner, Path, Bound]:
    """The checkpoint, what plans for it, its config.json, and its tensors by the layout's order."""
    opened = check(source) if verify else open_checkpoint(source)
    opened.spec = spec or opened.spec
    if opened.format == "megatron":
        opened.spec, _ = megatron_files.rank_spec(opened.spec)
    for tensors in opened.ranks:
        for name in [name for name in tensors if any(fnmatchcase(name, glob) for glob in leave_out)]:
            opened.left_out = [*opened.left_out, name]
            del tensors[name]
    described = Path(config) if config else opened.config()
    if described is None:
        raise CheckpointError(f"{source}: no config.json", code="FAILED_PRECONDITION", remedy="pass it with --config")
    planner = Planner(described, wwctl)
    return opened, planner, described, bind(opened, planner.layout(opened.spec), "source")


def _with_dtypes(layout: List[List[TensorMeta]], plan: Plan, source: Bound) -> List[List[TensorMeta]]:
    """The layout's tensors with the dtypes that the source really has."""
    dtypes: Dict[Any, str] = {}
    for copy in plan.copies:
        dtype = source.tensor(copy.source_rank, copy.source_tensor).dtype
        if dtypes.setdefault((copy.target_rank, copy.target_tensor), dtype) != dtype:
            name = layout[copy.target_rank][copy.target_tensor].name
            raise CheckpointError(f"its parts have different dtypes, {dtype} in {copy.canonical}", tensor=name,
                                  reason="dtype_mismatch", remedy="a conversion copies bits and casts nothing")
    return [[replace(local, dtype=dtypes.get((rank, number), local.dtype)) for number, local in enumerate(tensors)]
            for rank, tensors in enumerate(layout)]


def _write(final: Path, opened: Opened, source: Bound, plan: Plan, wanted: Wanted, memory: int, verify: bool,
           on_progress: OnProgress) -> Report:
    steps = by_target(plan)
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
