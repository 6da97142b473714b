"""A save from live ranks: each writes its own part into one native checkpoint, at the same time, without a gather.

The ranks share a file system and nothing else. A part is there when its description is (renamed last); rank 0 waits for
all of them and writes the manifest, so that the checkpoint exists when every part is durable, and not before. With a base
each rank codes what changed in its own part, out of memory: a folder is there as changes or not at all, whoever dies.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import numpy as np

from weightwire.checkpoint import disk, layouts, native, native_delta, safetensors
from weightwire.checkpoint.attempts import Attempt, prune
from weightwire.checkpoint.execute import NUMPY, memory_bits
from weightwire.checkpoint.formats import CONFIG, Opened
from weightwire.checkpoint.hf import read_json
from weightwire.checkpoint.layouts import Explicit, Layout
from weightwire.checkpoint.sources import PathLike
from weightwire.checkpoint.stored import Bits, CheckpointError, Files, Stored
from weightwire.checkpoint.writing import check_free
from weightwire.memory import FROM_TORCH, TensorMeta

_NO_BASE = "save without a base; wwctl convert writes a base in another layout"
_DTYPES = {numpy: ours for ours, numpy in reversed(NUMPY.items())}


def save_rank(folder: PathLike, spec: Layout, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
              attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0,
              base: Optional[PathLike] = None) -> None:
    """Writes this rank's part of `folder`; on rank 0, returns when the checkpoint is whole, elsewhere when the part is.

    spec:      words such as "megatron:tp2,pp2", or what this rank holds, box by box (Explicit)
    tensors:   NumPy arrays (uint16 is bf16) or torch tensors, by the local names of `spec`
    config:    the model's config.json, as text; with explicit boxes nobody asks for it
    attempt:   the same on all ranks, a plain name never used before for `folder`, e.g. of the run and its restarts
    keep_last: of folders that differ from this one's name in the number at its end, keeps that many, and those that a folder
               beside them is based on; 0: all
    resume:    this rank was started again while `attempt` goes on, and holds what it held: a part that is whole is
               compared and not written again, and so is the whole checkpoint where it exists already
    base:      a whole checkpoint, the same on all ranks, of the same layout and tensors: what changed since it is kept, and it
               is needed to read this one, until `compact`

    A rank that dies and does not come back leaves no checkpoint: rank 0 raises DeadlineError naming the ranks that are
    missing. CheckpointError: `folder` exists, `attempt` was used, a tensor's dtype is not known; `base` is not complete, of
    another layout or other tensors, `folder` itself or the end of a chain of 64; or, with `resume`, the part that is there
    holds other values or has another base.
    """
    one = Attempt(Path(os.path.abspath(folder)), attempt, rank, time.monotonic() + timeout)
    kept = {name: held(name, t, rank) for name, t in tensors.items()}
    _save(one, spec, world_size, kept, config, resume, keep_last, native.base_at(base, one.final))


def save_rank_later(folder: PathLike, spec: Layout, rank: int, world_size: int, tensors: Mapping[str, Any], *, config: str,
                    attempt: str, keep_last: int = 0, resume: bool = False, timeout: float = 600.0,
                    base: Optional[PathLike] = None) -> "Future[None]":
    """As `save_rank`, of what the tensors hold now: they are copied (once this rank's bytes of host memory) and may
    change as soon as this returns. The future has the result; it must be awaited before the process ends."""
    one = Attempt(Path(os.path.abspath(folder)), attempt, rank, time.monotonic() + timeout)
    kept = {name: copied(held(name, t, rank)) for name, t in tensors.items()}
    return later(_save, one, spec, world_size, kept, config, resume, keep_last, native.base_at(base, one.final))


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


def write_part(one: Attempt, spec: Layout, world_size: int, tensors: Mapping[str, Held], resume: bool,
               base: Optional[Path] = None) -> None:
    """This rank's part of an attempt; when it returns, the part is durable."""
    if resume and _written_before(one, tensors, base):
        return
    check_free(one.final)
    _check_held(spec, one.rank, tensors)
    older = open_base(one, spec, world_size, tensors, base) if base is not None and one.rank == 0 else None
    one.begin(resume)
    if base is not None and one.rank != 0:  # which is complete, for rank 0 has begun
        older = open_base(one, spec, world_size, tensors, base)
    if resume:  # what the earlier process began
        for name in (_file(one.rank), _file(one.rank) + native_delta.SUFFIX):
            (one.partial / name).unlink(missing_ok=True)
    _write_part(one, spec, one.rank, tensors, older)


def open_base(one: Attempt, spec: Layout, world_size: int, tensors: Mapping[str, Held], base: Path) -> Opened:
    """This rank's part of `base`. CheckpointError: what it holds now cannot be stored as what changed since; names what differs."""
    older = native.open_base(base, one.final, one.rank)
    its, words = older.manifest, layouts.words(spec)
    if (its["spec"], len(its["ranks"])) != (words, world_size):
        raise CheckpointError(f"{base} is {len(its['ranks'])} ranks of '{its['spec']}', this is {world_size} of '{words}'",
                              code="FAILED_PRECONDITION", rank=str(one.rank), remedy=_NO_BASE)
    now = Opened("weightwire", words, Files(one.partial), [_stored(one.rank, tensors)[2]])
    native.check_alike(older, now, str(base), str(one.final), one.rank)
    if isinstance(spec, Explicit) and layouts.to_json(spec) != {"canonical": its["canonical"], "boxes": its["ranks"][one.rank]["boxes"]}:
        raise CheckpointError(f"in {base} this rank holds other boxes", code="FAILED_PRECONDITION", rank=str(one.rank), remedy=_NO_BASE)
    return older


def finish(one: Attempt, spec: Layout, world_size: int, config: str, resume: bool) -> None:
    """Rank 0, when it has written its part: waits for the others', then the checkpoint has its name."""
    if not (resume and native.found_at(one.final)):
        _finish(one, spec, world_size, config)


def _save(one: Attempt, spec: Layout, world_size: int, tensors: Mapping[str, Held], config: str, resume: bool,
          keep_last: int, base: Optional[Path]) -> None:
    write_part(one, spec, world_size, tensors, resume, base)
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


def _written_before(one: Attempt, tensors: Mapping[str, Held], base: Optional[Path]) -> bool:
    """Whether an earlier process of this rank has written its part, durably. CheckpointError: it holds something else than
    `tensors`, or is based on something else."""
    # In the order in which they come to be, each before the one in front of it goes: whoever looks in turn finds one.
    for path in (_part(one.partial, one.rank), *(folder / native.MANIFEST for folder in (one.partial, *one.finals))):
        try:
            said: Any = read_json(path) if path.name != native.MANIFEST else native.read_manifest(path.parent)
        except CheckpointError as why:
            if isinstance(why.__cause__, FileNotFoundError):
                continue
            raise
        there = {rank: entry["tensors"] for rank, entry in enumerate(said.get("ranks", []))} or {one.rank: said["tensors"]}
        _, values, stored = _stored(one.rank, tensors)
        other = _first_difference(there.get(one.rank, {}), native.describe(values, stored)["tensors"])
        remedy = "a rank that does not hold what it held cannot resume: choose a new attempt, on all ranks"
        if other:
            raise CheckpointError(f"{path.parent} has a part of this rank with other values", code="FAILED_PRECONDITION",
                                  rank=str(one.rank), tensor=other, remedy=remedy)
        if path.parent == one.partial and (said.get("base") or {}).get("path") != (base and native.path_to(base, one.final)):
            raise CheckpointError(f"{path.parent} has a part of this rank with another base", code="FAILED_PRECONDITION",
                                  rank=str(one.rank), remedy=remedy)
        return True
    return False


def _first_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """The name of a tensor that is not the same in both; "": none."""
    return min((name for name in a.keys() | b.keys() if a.get(name) != b.get(name)), default="")


def _stored(rank: int, tensors: Mapping[str, Held]) -> Tuple[str, native_delta.Values, Dict[str, Stored]]:
    """The header of the rank's file, what reads its tensors out of memory, and how it is going to hold them."""
    text, _ = safetensors.make_header((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    return (text.decode(), lambda tensor, begin, end, _: tensors[tensor.name][2].reshape(-1)[begin:end],
            {tensor.name: tensor for tensor in safetensors.parse_header(_file(rank), text, None)})


def _write_part(one: Attempt, layout: Layout, rank: int, tensors: Mapping[str, Held], older: Optional[Opened]) -> None:
    path = one.partial / _file(rank)
    header, values, stored = _stored(rank, tensors)
    part: Dict[str, Any] = {"spec": layouts.words(layout), **native.describe(values, stored)}
    if isinstance(layout, Explicit):
        part.update(layouts.to_json(layout))
    if older is None:
        safetensors.write_skeleton(path, [(name, dtype, shape) for name, (dtype, shape, _) in tensors.items()])
        opened = native.open_files(one.partial, "", [[path.name]])
        opened.files.writable = True
        for name, (_, _, bits) in tensors.items():
            opened.files.write(opened.ranks[0][name], 0, bits)
        opened.files.close()
    else:
        part["base"] = native.link_to(older, one.final)
        path = path.with_name(path.name + native_delta.SUFFIX)
        native_delta.write(path, header, list(stored.values()), values, older.files.flat, older.ranks[0], native.LEAF_BYTES)
        older.files.close()
    disk.sync_file(path)
    one.put(_part(one.partial, rank), json.dumps(part))


def _file(rank: int) -> str:
    return f"rank{rank:05d}-00000.safetensors"


def _part(partial: Path, rank: int) -> Path:
    return partial / f"rank{rank:05d}.json"


def _finish(one: Attempt, layout: Layout, world_size: int, config: str) -> None:
    """Rank 0: the manifest of all parts, and the checkpoint's name."""
    (one.partial / CONFIG).write_text(config)
    if not native.found_at(one.partial):  # else an earlier process of rank 0 wrote it: descriptions of parts may be gone
        one.wait_for_all(lambda rank: _part(one.partial, rank), world_size)
        parts: List[Dict[str, Any]] = [json.loads(_part(one.partial, rank).read_text()) for rank in range(world_size)]
        spec, canonical, base = layouts.words(layout), parts[0].get("canonical"), parts[0].get("base")
        other = next((rank for rank, part in enumerate(parts) if
                      (part.pop("spec"), part.pop("canonical", None), part.pop("base", None)) != (spec, canonical, base)), None)
        if other is not None:
            raise CheckpointError(f"rank 0 saves '{spec}', {'whole' if base is None else 'since ' + base['path']}, this rank another "
                                  "layout or since another base", rank=str(other))
        if canonical is not None and base is None:  # a base has the same boxes
            opened = native.open_files(one.partial, spec, [part["files"] for part in parts])
            layouts.check_complete(canonical, native.boxes_of(canonical, parts, opened))
        content = native.manifest_of(spec, parts, canonical, base)
        if base is not None:
            where, digest = native_delta.base_of(content, one.partial)
            native_delta.check_link(one.final, where, digest, read_json(where / native.MANIFEST))  # as it was when the ranks read it
        one.put(one.partial / native.MANIFEST, json.dumps(content, indent=1))
    for rank in range(world_size):
        _part(one.partial, rank).unlink(missing_ok=True)
    one.finish()
