"""A checkpoint in one format and layout from one in another: a plan, run between files.

The target is laid out empty under `.NAME.partial` beside it, filled, sealed (checksums, the manifest last), synced and
renamed: under its own name it exists whole or not at all. What was interrupted goes on where it was.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

from weightwire.checkpoint import disk, hf, megatron_files, native, torch_dist
from weightwire.checkpoint.execute import Bound, by_target, compare, run
from weightwire.checkpoint.formats import CONFIG, Opened, Wanted, bind, parse_target
from weightwire.checkpoint.planner import Local, Plan, Planner
from weightwire.checkpoint.stored import CheckpointError

FORMATS: Dict[str, ModuleType] = {"weightwire": native, "torch_dist": torch_dist, "megatron": megatron_files, "hf": hf}
#: Small files that make a folder usable; they go along.
_COMPANIONS = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
               "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
_PROGRESS = "progress.json"
_SYNC_BYTES = 512 << 20
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
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise CheckpointError(f"{final} exists", code="ALREADY_EXISTS", remedy="choose another name, or remove it")
    kind, spec = parse_target(to)
    opened = check(source) if verify else open_checkpoint(source)
    opened.spec = source_spec or opened.spec
    if opened.format == "megatron":
        opened.spec, _ = megatron_files.rank_spec(opened.spec)
    if kind == "megatron":
        spec, _ = megatron_files.rank_spec(spec)
    for tensors in opened.ranks:
        for name in [name for name in tensors if any(fnmatchcase(name, glob) for glob in leave_out)]:
            opened.left_out = [*opened.left_out, name]
            del tensors[name]
    described = Path(config) if config else opened.config()
    if described is None:
        raise CheckpointError(f"{source}: no config.json", code="FAILED_PRECONDITION", remedy="pass it with --config")
    planner = Planner(described, wwctl)
    have = bind(opened, planner.layout(opened.spec), "source")
    plan = planner.plan(opened.spec, spec)
    wanted = Wanted(kind, to, spec, _with_dtypes(planner.layout(spec), plan, have), shard_bytes, described)
    return _write(final, opened, have, plan, wanted, memory, verify, on_progress)


def _with_dtypes(layout: List[List[Local]], plan: Plan, source: Bound) -> List[List[Local]]:
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
    module = FORMATS[wanted.format]
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    lock = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"{partial} is being written by another process", code="UNAVAILABLE") from error
        steps = by_target(plan)
        key = {"plan": plan.id, "to": wanted.to, "shard_bytes": wanted.shard_bytes,
               "source": _identity(opened)}
        done = _resumable(partial, key)
        if done is None:
            for path in partial.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            module.lay_out(partial, wanted)
            disk.allocate(partial)
            done = 0
            _save_progress(partial, key, done)
        laid_out = module.open_unsealed(partial, wanted) if wanted.format == "weightwire" else module.open_at(partial)
        target = bind(laid_out, wanted.ranks, "target")
        target.files.writable = True
        target.files.close()  # what was opened to be read
        total = sum(tensor.bytes for rank in target.ranks for tensor in rank)
        resumed = sum(target.tensor(*where).bytes for where, _ in steps[:done])
        counter = _Counter(partial, key, done, resumed, total, on_progress, target)
        run(steps[done:], source, target, memory, counter.wrote)
        _sync(target)
        module.seal(laid_out, wanted)
        _finish(partial, wanted)
        if verify:
            _verify(partial, module, steps, source, wanted, memory, total, on_progress)
        disk.sync_tree(partial)
        (partial / _PROGRESS).unlink()
        disk.sync_folder(partial)
        os.rename(partial, final)
        disk.sync_folder(final.parent)
        return Report(wanted.format, wanted.spec, plan.id, total, resumed, opened.left_out)
    finally:
        os.close(lock)


def _identity(opened: Opened) -> List[Any]:
    files = sorted({region.file for tensors in opened.ranks for t in tensors.values() for region in t.regions})
    stats = [(file, os.stat(opened.files.folder / file)) for file in files]
    return [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _resumable(partial: Path, key: Dict[str, Any]) -> Optional[int]:
    """How many steps an earlier run has done of the same plan on the same source; None: begin anew."""
    try:
        progress = json.loads((partial / _PROGRESS).read_text())
        return int(progress["done"]) if progress["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _save_progress(partial: Path, key: Dict[str, Any], done: int) -> None:
    temporary = partial / (_PROGRESS + ".new")
    with open(temporary, "w") as out:
        json.dump({"key": key, "done": done}, out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, partial / _PROGRESS)


class _Counter:
    """Tells progress, and makes it durable now and then."""

    def __init__(self, partial: Path, key: Dict[str, Any], done: int, written: int, total: int,
                 on_progress: OnProgress, target: Bound):
        self._partial, self._key, self._first, self._written = partial, key, done, written
        self._total, self._tell, self._target, self._unsynced = total, on_progress, target, 0

    def wrote(self, step: int, size: int) -> None:
        self._written += size
        self._unsynced += size
        if self._unsynced >= _SYNC_BYTES:
            _sync(self._target)
            _save_progress(self._partial, self._key, self._first + step + 1)
            self._unsynced = 0
        self._tell("write", self._written, self._total)


def _verify(partial: Path, module: ModuleType, steps: Sequence[Any], source: Bound, wanted: Wanted, memory: int,
            total: int, on_progress: OnProgress) -> None:
    """Opens what was written as any reader would, and compares it with the source."""
    again = bind(module.open_at(partial), wanted.ranks, "target")
    read = 0

    def tell(_: int, size: int) -> None:
        nonlocal read
        read += size
        on_progress("verify", read, total)
    compare(steps, source, again, memory, tell)
    again.files.close()


def _finish(partial: Path, wanted: Wanted) -> None:
    shutil.copyfile(wanted.config, partial / CONFIG)
    for name in _COMPANIONS:
        if (wanted.config.parent / name).is_file():
            shutil.copyfile(wanted.config.parent / name, partial / name)


def _sync(target: Bound) -> None:
    for file in {region.file for rank in target.ranks for t in rank for region in t.regions}:
        os.fsync(target.files.fd(file))
