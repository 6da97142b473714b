"""A save from live ranks: each writes its own part into one native checkpoint, at the same time, without a gather.

The ranks share a file system and nothing else. A part is there when its description is (renamed last); rank 0 waits for
all of them and writes the manifest, so that the checkpoint exists when every part is durable, and not before.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Mapping, Tuple

import numpy as np

from weightwire import errors
from weightwire.checkpoint import disk, native, safetensors
from weightwire.checkpoint.conversion import PathLike
from weightwire.checkpoint.execute import NUMPY, memory_bits
from weightwire.checkpoint.formats import CONFIG, Opened
from weightwire.checkpoint.stored import Bits, CheckpointError, plain
from weightwire.checkpoint.writing import check_free
from weightwire.memory import FROM_TORCH, TensorMeta

_POLL_SECONDS = 0.05
_DTYPES = {numpy: ours for ours, numpy in reversed(NUMPY.items())}


def save_rank(folder: PathLike, spec: str, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
              attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0) -> None:
    """Writes this rank's part of `folder`; on rank 0, returns when the checkpoint is whole, elsewhere when the part is.

    tensors:   NumPy arrays (uint16 is bf16) or torch tensors, by the local names of `spec`
    config:    the model's config.json, as text
    attempt:   the same on all ranks, a plain name never used before for `folder`, e.g. of the run and its restarts
    keep_last: of folders that differ from this one's name in the number at its end, keeps that many; 0: all
    resume:    this rank was started again while `attempt` goes on, and holds what it held: a part that is whole is
               compared and not written again, and so is the whole checkpoint where it exists already

    A rank that dies and does not come back leaves no checkpoint: rank 0 raises DeadlineError naming the ranks that are
    missing. CheckpointError: `folder` exists, `attempt` was used, a tensor's dtype is not known, or, with `resume`, the
    part that is there holds other values.
    """
    _write(folder, spec, rank, world_size, {name: _bits(name, t, rank) for name, t in tensors.items()}, config, attempt,
           keep_last, resume, timeout)


def save_rank_later(folder: PathLike, spec: str, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
                    attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0) -> "Future[None]":
    """As `save_rank`, of what the tensors hold now: they are copied (once this rank's bytes of host memory) and may
    change as soon as this returns. The future has the result; it must be awaited before the process ends."""
    copied = {name: (dtype, shape, np.array(bits)) for name, (dtype, shape, bits) in
              ((name, _bits(name, t, rank)) for name, t in tensors.items())}
    pool = ThreadPoolExecutor(1, thread_name_prefix="weightwire-save")
    future = pool.submit(_write, folder, spec, rank, world_size, copied, config, attempt, keep_last, resume, timeout)
    pool.shutdown(wait=False)
    return future


Held = Tuple[str, Tuple[int, ...], Bits]


def _bits(name: str, tensor: Any, rank: int) -> Held:
    """(dtype, shape, elements) of a tensor; a view where it is contiguous in host memory."""
    text, shape = str(tensor.dtype), tuple(tensor.shape)
    dtype = FROM_TORCH.get(text[len("torch."):]) if text.startswith("torch.") else _DTYPES.get(text)
    if dtype is None:
        raise CheckpointError(f"dtype {text} is not known", reason="dtype_mismatch", rank=str(rank), tensor=name)
    usable = tensor.detach().cpu().contiguous() if text.startswith("torch.") else np.require(tensor, requirements=["C", "W"])
    return dtype, shape, memory_bits(usable, TensorMeta(name, dtype, shape), rank)


def _write(folder: PathLike, spec: str, rank: int, world_size: int, tensors: Mapping[str, Held], config: str, attempt: str,
           keep_last: int, resume: bool, timeout: float) -> None:
    final, end = Path(os.path.abspath(folder)), time.monotonic() + timeout
    partial = final.with_name(f".{final.name}.{plain(attempt, 'attempt')}.partial")
    if not resume or not _written_before((partial, final), rank, tensors):
        check_free(final)
        _begin(final, partial, rank, attempt, resume, end)
        if resume:  # what the earlier process began
            (partial / _file(rank)).unlink(missing_ok=True)
        _write_part(partial, spec, rank, tensors)
    if rank == 0:
        if not (resume and native.found_at(final)):
            _finish(final, partial, spec, world_size, config, end)
        if keep_last:
            _prune(final, keep_last)


def _begin(final: Path, partial: Path, rank: int, attempt: str, resume: bool, end: float) -> None:
    """The attempt's folder: rank 0 makes it."""
    if rank != 0:
        return _wait(partial.is_dir, end, f"rank 0 did not begin attempt '{attempt}'", rank)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.mkdir(exist_ok=resume)
    except FileExistsError as error:
        raise CheckpointError(f"attempt '{attempt}' at {final} was made before", code="ALREADY_EXISTS",
                              remedy="choose a new one for each attempt, the same on every rank; resume=True for a rank "
                                     "that was started again while it goes on") from error


def _written_before(folders: Iterable[Path], rank: int, tensors: Mapping[str, Held]) -> bool:
    """Whether an earlier process of this rank has written its part, durably, into one of `folders`, which one becomes the
    next while this looks. CheckpointError: it holds something else than `tensors`."""
    for folder in folders:
        if not _part(folder, rank).exists() and not native.found_at(folder):
            continue
        try:
            other = _first_difference(native.open_files(folder, "", [[_file(rank)]]), tensors)
        except (CheckpointError, OSError):
            if (folder / _file(rank)).exists():
                raise
            continue  # it has just got its other name
        if other:
            raise CheckpointError(f"{folder} has a part of this rank with other values", code="FAILED_PRECONDITION",
                                  rank=str(rank), tensor=other, remedy="a rank that does not hold what it held cannot "
                                                                       "resume: choose a new attempt, on all ranks")
        return True
    return False


def _first_difference(opened: Opened, tensors: Mapping[str, Held]) -> str:
    """The name of a tensor that is not the same in both; "": none. Closes the files."""
    files, found = opened.files, opened.ranks[0]
    try:
        if found.keys() != tensors.keys():
            return min(found.keys() ^ tensors.keys())
        for name, (dtype, shape, bits) in tensors.items():
            there = found[name]
            if (there.dtype, there.shape) != (dtype, shape) or not np.array_equal(files.flat(there, 0, there.count), bits):
                return name
            files.release()
        return ""
    finally:
        files.close()


def _write_part(partial: Path, spec: str, rank: int, tensors: Mapping[str, Held]) -> None:
    file = _file(rank)
    safetensors.write_skeleton(partial / file, [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
    opened = native.open_files(partial, spec, [[file]])
    opened.files.writable = True
    for name, (_, _, bits) in tensors.items():
        opened.files.write(opened.ranks[0][name], 0, bits)
    os.fsync(opened.files.fd(file))
    part = json.dumps({"spec": spec, **native.describe(opened.files, opened.ranks[0])})
    opened.files.close()
    temporary = partial / f"rank{rank:05d}.new"
    temporary.write_text(part)
    disk.sync_file(temporary)
    os.rename(temporary, _part(partial, rank))
    disk.sync_folder(partial)


def _file(rank: int) -> str:
    return f"rank{rank:05d}-00000.safetensors"


def _part(partial: Path, rank: int) -> Path:
    return partial / f"rank{rank:05d}.json"


def _finish(final: Path, partial: Path, spec: str, world_size: int, config: str, end: float) -> None:
    """Rank 0: the manifest of all parts, and the checkpoint's name."""
    def missing() -> str:
        return ", ".join(str(rank) for rank in range(world_size) if not _part(partial, rank).exists())
    (partial / CONFIG).write_text(config)
    if not _sealed(partial):
        _wait(lambda: not missing(), end, "parts are missing", 0, missing)
        parts = [json.loads(_part(partial, rank).read_text()) for rank in range(world_size)]
        other = next((rank for rank, part in enumerate(parts) if part.pop("spec") != spec), None)
        if other is not None:
            raise CheckpointError(f"rank 0 saves '{spec}', this rank another layout", rank=str(other))
        native.write_manifest(partial, spec, parts)
        disk.sync_file(partial / native.MANIFEST)
    for rank in range(world_size):
        _part(partial, rank).unlink(missing_ok=True)
    disk.sync_tree(partial)
    os.rename(partial, final)
    disk.sync_folder(final.parent)
    for path in final.parent.iterdir():  # attempts that were given up
        if path.name.startswith(f".{final.name}.") and path.name.endswith(".partial"):
            shutil.rmtree(path)


def _sealed(partial: Path) -> bool:
    """Whether an earlier process of rank 0 has written the manifest: then descriptions of parts may be gone."""
    try:
        native.open_at(partial)
        return True
    except (CheckpointError, OSError):
        return False


def _wait(ready: Callable[[], bool], end: float, what: str, rank: int, who: Callable[[], str] = str) -> None:
    while not ready():
        if time.monotonic() > end:
            raise errors.DeadlineError(f"{what} {who()}".strip(), code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                       rank=str(rank), remedy="see why that rank failed; nothing was saved")
        time.sleep(_POLL_SECONDS)


def _prune(final: Path, keep: int) -> None:
    """Removes older checkpoints, their manifest first: what is half removed is none."""
    match = re.fullmatch(r"(.*?)(\d+)", final.name)
    if not match:
        return
    older: Dict[int, Path] = {}
    for path in final.parent.iterdir():
        found = re.fullmatch(re.escape(match.group(1)) + r"(\d+)", path.name)
        if found and int(found.group(1)) <= int(match.group(2)) and native.found_at(path):
            older[int(found.group(1))] = path
    for number in sorted(older)[:-keep]:
        (older[number] / native.MANIFEST).unlink()
        disk.sync_folder(older[number])
        shutil.rmtree(older[number])
