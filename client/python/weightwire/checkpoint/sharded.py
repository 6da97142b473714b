"""A save from live ranks: each writes its own part into one native checkpoint, at the same time, without a gather.

The ranks share a file system and nothing else. A part is there when its description is (renamed last); rank 0 waits for
all of them and writes the manifest, so that the checkpoint exists when every part is durable, and not before.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

import numpy as np

from weightwire.checkpoint import disk, layouts, native, safetensors
from weightwire.checkpoint.attempts import Attempt, prune
from weightwire.checkpoint.execute import NUMPY, memory_bits
from weightwire.checkpoint.formats import CONFIG, Opened
from weightwire.checkpoint.layouts import Explicit, Layout
from weightwire.checkpoint.sources import PathLike
from weightwire.checkpoint.stored import Bits, CheckpointError
from weightwire.checkpoint.writing import check_free
from weightwire.memory import FROM_TORCH, TensorMeta

_DTYPES = {numpy: ours for ours, numpy in reversed(NUMPY.items())}


def save_rank(folder: PathLike, spec: Layout, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
              attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0) -> None:
    """Writes this rank's part of `folder`; on rank 0, returns when the checkpoint is whole, elsewhere when the part is.

    spec:      words such as "megatron:tp2,pp2", or what this rank holds, box by box (Explicit)
    tensors:   NumPy arrays (uint16 is bf16) or torch tensors, by the local names of `spec`
    config:    the model's config.json, as text; with explicit boxes nobody asks for it
    attempt:   the same on all ranks, a plain name never used before for `folder`, e.g. of the run and its restarts
    keep_last: of folders that differ from this one's name in the number at its end, keeps that many; 0: all
    resume:    this rank was started again while `attempt` goes on, and holds what it held: a part that is whole is
               compared and not written again, and so is the whole checkpoint where it exists already

    A rank that dies and does not come back leaves no checkpoint: rank 0 raises DeadlineError naming the ranks that are
    missing. CheckpointError: `folder` exists, `attempt` was used, a tensor's dtype is not known, or, with `resume`, the
    part that is there holds other values.
    """
    one = Attempt(Path(os.path.abspath(folder)), attempt, rank, time.monotonic() + timeout)
    _save(one, spec, world_size, {name: held(name, t, rank) for name, t in tensors.items()}, config, resume, keep_last)


def save_rank_later(folder: PathLike, spec: Layout, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
                    attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0) -> "Future[None]":
    """As `save_rank`, of what the tensors hold now: they are copied (once this rank's bytes of host memory) and may
    change as soon as this returns. The future has the result; it must be awaited before the process ends."""
    one = Attempt(Path(os.path.abspath(folder)), attempt, rank, time.monotonic() + timeout)
    kept = {name: copied(held(name, t, rank)) for name, t in tensors.items()}
    return later(_save, one, spec, world_size, kept, config, resume, keep_last)


def later(work: Callable[..., None], *arguments: Any) -> "Future[None]":
    """In a thread of its own."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="weightwire-save")
    future = pool.submit(work, *arguments)
    pool.shutdown(wait=False)
    return future


Held = Tuple[str, Tuple[int, ...], Bits]


def copied(tensor: Held) -> Held:
    dtype, shape, bits = tensor
    return dtype, shape, np.array(bits)


def held(name: str, tensor: Any, rank: int) -> Held:
    """(dtype, shape, elements) of a tensor; a view where it is contiguous in host memory."""
    text, shape = str(tensor.dtype), tuple(tensor.shape)
    dtype = FROM_TORCH.get(text[len("torch."):]) if text.startswith("torch.") else _DTYPES.get(text)
    if dtype is None:
        raise CheckpointError(f"dtype {text} is not known", reason="dtype_mismatch", rank=str(rank), tensor=name)
    usable = tensor.detach().cpu().contiguous() if text.startswith("torch.") else np.require(tensor, requirements=["C", "W"])
    return dtype, shape, memory_bits(usable, TensorMeta(name, dtype, shape), rank)


def write_part(one: Attempt, spec: Layout, tensors: Mapping[str, Held], resume: bool) -> None:
    """This rank's part of an attempt; when it returns, the part is durable."""
    if resume and _written_before((one.partial, one.final), one.rank, tensors):
        return
    check_free(one.final)
    _check_held(spec, one.rank, tensors)
    one.begin(resume)
    if resume:  # what the earlier process began
        (one.partial / _file(one.rank)).unlink(missing_ok=True)
    _write_part(one, spec, one.rank, tensors)


def finish(one: Attempt, spec: Layout, world_size: int, config: str, resume: bool) -> None:
    """Rank 0, when it has written its part: waits for the others', then the checkpoint has its name."""
    if not (resume and native.found_at(one.final)):
        _finish(one, spec, world_size, config)


def _save(one: Attempt, spec: Layout, world_size: int, tensors: Mapping[str, Held], config: str, resume: bool,
          keep_last: int) -> None:
    write_part(one, spec, tensors, resume)
    if one.rank == 0:
        finish(one, spec, world_size, config, resume)
        if keep_last:
            prune(one.final, keep_last, native.MANIFEST)


def _check_held(layout: Layout, rank: int, tensors: Mapping[str, Held]) -> None:
    if isinstance(layout, str):
        return  # what words mean is compared when a plan is made
    described = {held.meta.name: (held.meta.dtype, held.meta.shape) for held in layout.held}
    found = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
    if described != found:
        name = min(name for name in described.keys() | found.keys() if described.get(name) != found.get(name))
        raise CheckpointError(f"its layout says {described.get(name)}, the tensor is {found.get(name)}", rank=str(rank),
                              tensor=name, reason="shape_mismatch", remedy="describe what the rank holds, and hold it")


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
            if (there.dtype, there.shape) != (dtype, shape):
                return name
            flat, step = bits.reshape(-1), max(1, native.LEAF_BYTES // bits.itemsize)
            for begin in range(0, there.count, step):
                if not np.array_equal(files.flat(there, begin, min(there.count, begin + step)), flat[begin:begin + step]):
                    return name
        return ""
    finally:
        files.close()


def _write_part(one: Attempt, layout: Layout, rank: int, tensors: Mapping[str, Held]) -> None:
    file = _file(rank)
    safetensors.write_skeleton(one.partial / file, [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
    opened = native.open_files(one.partial, "", [[file]])
    opened.files.writable = True
    for name, (_, _, bits) in tensors.items():
        opened.files.write(opened.ranks[0][name], 0, bits)
    os.fsync(opened.files.fd(file))
    part = {"spec": layouts.words(layout), **native.describe(opened.files, opened.ranks[0])}
    if isinstance(layout, Explicit):
        part.update(layouts.to_json(layout))
    opened.files.close()
    one.put(_part(one.partial, rank), json.dumps(part))


def _file(rank: int) -> str:
    return f"rank{rank:05d}-00000.safetensors"


def _part(partial: Path, rank: int) -> Path:
    return partial / f"rank{rank:05d}.json"


def _finish(one: Attempt, layout: Layout, world_size: int, config: str) -> None:
    """Rank 0: the manifest of all parts, and the checkpoint's name."""
    (one.partial / CONFIG).write_text(config)
    if not _sealed(one.partial):
        one.wait_for_all(lambda rank: _part(one.partial, rank), world_size)
        parts: List[Dict[str, Any]] = [json.loads(_part(one.partial, rank).read_text()) for rank in range(world_size)]
        spec, canonical = layouts.words(layout), parts[0].get("canonical")
        other = next((rank for rank, part in enumerate(parts)
                      if (part.pop("spec"), part.pop("canonical", None)) != (spec, canonical)), None)
        if other is not None:
            raise CheckpointError(f"rank 0 saves '{spec}', this rank another layout", rank=str(other))
        if canonical is not None:
            opened = native.open_files(one.partial, spec, [part["files"] for part in parts])
            layouts.check_complete(canonical, native.boxes_of(canonical, parts, opened))
        native.write_manifest(one.partial, spec, parts, canonical)
        disk.sync_file(one.partial / native.MANIFEST)
    for rank in range(world_size):
        _part(one.partial, rank).unlink(missing_ok=True)
    one.finish()


def _sealed(partial: Path) -> bool:
    """Whether an earlier process of rank 0 has written the manifest: then descriptions of parts may be gone."""
    try:
        native.open_at(partial)
        return True
    except (CheckpointError, OSError):
        return False
