"""`weightwire`: safetensors files of each rank of any layout, and a manifest with digests, written last.

Digests are SHA-256 in a tree: of pieces of 16 MiB, of a tensor (its dtype, shape and pieces), of all tensors. So a
reader of a part of a tensor can check that part, and equal roots mean equal checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, Optional, Tuple

import numpy as np

from weightwire.boxes import Held
from weightwire.checkpoint import disk, layouts, native_delta, safetensors
from weightwire.checkpoint.formats import Opened, Wanted
from weightwire.checkpoint.hf import read_json, shards
from weightwire.checkpoint.stored import CheckpointError, Files, Stored, bits_of, damaged, plain, raw
from weightwire.memory import TensorMeta, dtype_bytes

MANIFEST = "weightwire.json"
LEAF_BYTES = 16 << 20
_RANKS_MAX = 16_384


def found_at(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def open_at(folder: Path, above: Tuple[Path, ...] = (), only: Optional[int] = None) -> Opened:
    """`above`: the checkpoints that are based on this one. `only`: opens this rank alone, as the first."""
    manifest = read_manifest(folder)
    spec, ranks = manifest["spec"], manifest["ranks"] if only is None else manifest["ranks"][only:only + 1]
    opened = (open_files(folder, spec, [entry["files"] for entry in ranks]) if manifest["version"] == 1 else
              _open_changes(folder, manifest, ranks, above, only))
    opened.manifest = manifest
    for rank, (entry, tensors) in enumerate(zip(ranks, opened.ranks), only or 0):
        if entry["tensors"].keys() != tensors.keys():
            name = min(entry["tensors"].keys() ^ tensors.keys())
            raise damaged(MANIFEST, f"rank {rank}: in the manifest or in the files, not in both", tensor=name)
    if spec == layouts.BOXES:
        opened.boxes = boxes_of(manifest.get("canonical"), ranks, opened)
    return opened


def read_manifest(folder: Path) -> Dict[str, Any]:
    manifest: Dict[str, Any] = read_json(folder / MANIFEST)
    spec, ranks = manifest.get("spec"), manifest.get("ranks")
    if manifest.get("format") != "weightwire" or manifest.get("version") not in (1, 2) or not isinstance(spec, str):
        raise damaged(MANIFEST, "not a manifest of version 1 or 2")
    if not isinstance(ranks, list) or not 0 < len(ranks) <= _RANKS_MAX or \
            manifest.get("digest") != root(spec, ranks, manifest.get("canonical")):
        raise damaged(MANIFEST, "its digest is not that of its tensors")
    return manifest


def boxes_of(canonical: Any, ranks: List[Any], opened: Opened) -> List[List[Held]]:
    """Of each rank, as the manifest or the descriptions of its parts say."""
    return [layouts.from_json(canonical, entry.get("boxes"), {t.name: TensorMeta(t.name, t.dtype, t.shape)
                                                              for t in tensors.values()}, MANIFEST)
            for entry, tensors in zip(ranks, opened.ranks)]


def open_files(folder: Path, spec: str, files: List[List[str]]) -> Opened:
    """The tensors in these files of each rank, without a manifest."""
    ranks: List[Dict[str, Stored]] = []
    opened = Files(folder)
    for names in files:
        ranks.append({})
        for file in names:
            for tensor in safetensors.read_header(folder, plain(file, MANIFEST), opened.seen):
                if ranks[-1].setdefault(tensor.name, tensor) is not tensor:
                    raise damaged(file, "held by two files", tensor=tensor.name)
    return Opened("weightwire", spec, opened, ranks)


def lay_out(folder: Path, wanted: Wanted) -> None:
    for rank, tensors in enumerate(wanted.ranks):
        for number, part in enumerate(shards(tensors, wanted.shard_bytes)):
            safetensors.write_skeleton(folder / f"rank{rank:05d}-{number:05d}.safetensors",
                                       [(t.name, t.dtype, t.shape) for t in part])


def base_at(base: Optional[os.PathLike[str] | str], final: Path) -> Optional[Path]:
    """The folder of a base, if there is to be one. CheckpointError: it is the one that is going to be written."""
    folder = None if base is None else Path(os.path.abspath(base))
    if folder == final:
        raise CheckpointError(f"{final} cannot be its own base")
    return folder


def open_base(base: Path, final: Path, only: Optional[int] = None) -> Opened:
    """What a checkpoint that is going to be called `final` is based on. CheckpointError: it cannot be."""
    if not found_at(base):
        raise CheckpointError(f"{base} has no {MANIFEST}: it is not a native checkpoint, or not complete", code="FAILED_PRECONDITION",
                              remedy="a base is complete before a save that names it begins: wait for its own save on rank 0")
    return open_at(base, (final,), only)


def _open_changes(folder: Path, manifest: Any, entries: List[Any], above: Tuple[Path, ...], only: Optional[int]) -> Opened:
    """A checkpoint that is stored as what changed since another one. Each of its files is made, and compared with the digests, when
    it is first read."""
    where, digest = native_delta.base_of(manifest, folder)
    if where in above or len(above) >= native_delta.CHAIN_MAX:
        raise native_delta.ChainError((*above, folder)[0])
    try:
        base = open_at(where, (*above, folder), only)
    except native_delta.ChainError:
        raise
    except CheckpointError as why:
        raise native_delta.missing_base(folder, where, why) from why
    native_delta.check_link(folder, where, digest, base.manifest)
    opened = Files(folder)
    ranks: List[Dict[str, Stored]] = []
    for entry, bases in zip(entries, base.ranks):
        ranks.append({})
        for name in entry["files"]:
            file = native_delta.DeltaFile(folder, name, opened)
            for tensor in file.tensors:
                if ranks[-1].setdefault(tensor.name, tensor) is not tensor:
                    raise damaged(file.name, "held by two files", tensor=tensor.name)
                if (older := bases.get(tensor.name)) is None or (older.dtype, older.shape) != (tensor.dtype, tensor.shape):
                    raise damaged(file.name, "its base has no such tensor", tensor=tensor.name)
            leaves = {tensor.name: entry["tensors"].get(tensor.name, {}).get("leaves", []) for tensor in file.tensors}
            opened.made[file.name] = partial(file.expand, bases, base.files, leaves, LEAF_BYTES)
    opened.close()  # until something is read
    made = Opened("weightwire", manifest["spec"], opened, ranks)
    made.notes += [f"stored as what changed since {where}", *base.notes]
    return made


def keep_changes(folder: Path, base: Path, final: Path) -> None:
    """Turns a sealed checkpoint into what changed since `base`; it is going to be called `final`."""
    older, newer = open_at(base), open_at(folder)
    manifest: Any = read_json(folder / MANIFEST)
    check_alike(older, newer, str(base), str(final))
    for rank, entry in enumerate(manifest["ranks"]):
        for name in entry["files"]:
            tensors = safetensors.read_header(folder, name)
            native_delta.write(folder / (name + native_delta.SUFFIX), native_delta.header_text(newer.files, name), tensors,
                               newer.files.flat, older.files.flat, older.ranks[rank], LEAF_BYTES)
            (folder / name).unlink()
    newer.files.close()
    older.files.close()
    manifest.update(version=2, base=link_to(older, final))
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def link_to(base: Opened, final: Path) -> Dict[str, Any]:
    """What the manifest of `final` says of its base."""
    return {"path": path_to(base.files.folder, final), "digest": base.manifest["digest"]}


def path_to(base: Path, final: Path) -> str:
    """From there, symbolic links followed."""
    return os.path.relpath(os.path.realpath(base), os.path.realpath(final.parent))


def make_whole(folder: Path) -> bool:
    """Stores a checkpoint whole that was stored as what changed; False: it was whole. Killed at any moment it is one or the other, and
    the next call goes on. Checkpoints that are based on it stay as they are: its digest is the same."""
    manifest: Any = read_json(folder / MANIFEST)
    names = [name for entry in manifest.get("ranks", []) for name in entry["files"]]
    changes: bool = manifest.get("version") == 2
    if changes:
        opened = open_at(folder)
        for name in names:
            try:
                _put(folder / plain(name, MANIFEST), partial(_copy, opened.files.fd(name)))
            finally:
                opened.files.close()  # one file at a time takes room elsewhere
        manifest.pop("base")
        manifest["version"] = 1
        _put(folder / MANIFEST, lambda out: out.write(json.dumps(manifest, indent=1).encode()))
    for name in names:
        (folder / (plain(name, MANIFEST) + native_delta.SUFFIX)).unlink(missing_ok=True)
    return changes


def _put(path: Path, write: Callable[[BinaryIO], object]) -> None:
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as out:
        write(out)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)
    disk.sync_folder(path.parent)


def _copy(fd: int, out: BinaryIO) -> None:
    os.lseek(fd, 0, os.SEEK_SET)
    with open(os.dup(fd), "rb") as source:
        shutil.copyfileobj(source, out, LEAF_BYTES)


def check_alike(older: Opened, newer: Opened, base: str, now: str, first: int = 0) -> None:
    """CheckpointError: they do not hold the same tensors by rank (from `first` on), name, dtype and shape; names the first that differs."""
    remedy = "two checkpoints of one model in one layout are needed; wwctl convert writes one in the layout of the other"
    if len(older.ranks) != len(newer.ranks):
        raise CheckpointError(f"{base} has {len(older.ranks)} ranks ({older.spec}), {now} has {len(newer.ranks)} ({newer.spec})",
                              code="FAILED_PRECONDITION", remedy=remedy)
    for rank, (mine, theirs) in enumerate(zip(older.ranks, newer.ranks), first):
        for name in sorted(mine.keys() ^ theirs.keys()):
            raise CheckpointError(f"only in {base if name in mine else now}", code="FAILED_PRECONDITION", reason="tensor_missing",
                                  rank=str(rank), tensor=name, remedy=remedy)
        for name, tensor in theirs.items():
            if (mine[name].dtype, mine[name].shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(f"{mine[name].dtype} {list(mine[name].shape)} in {base}, {tensor.dtype} {list(tensor.shape)} in "
                                      f"{now}", code="FAILED_PRECONDITION", reason="shape_mismatch", rank=str(rank), tensor=name,
                                      remedy=remedy)


def open_unsealed(folder: Path, wanted: Wanted) -> Opened:
    """What `lay_out` made, before there is a manifest."""
    return open_files(folder, wanted.spec, [sorted(path.name for path in folder.glob(f"rank{rank:05d}-*.safetensors"))
                                             for rank in range(len(wanted.ranks))])


def seal(opened: Opened, wanted: Wanted) -> None:
    made = manifest_of(wanted.spec, [describe(opened.files.flat, tensors) for tensors in opened.ranks])
    (opened.files.folder / MANIFEST).write_text(json.dumps(made, indent=1))


def describe(values: native_delta.Values, tensors: Dict[str, Stored]) -> Dict[str, Any]:
    """A rank's entry in the manifest: its files and the digests of what they hold."""
    names = sorted({region.file for tensor in tensors.values() for region in tensor.regions})
    return {"files": names, "tensors": {name: _entry(values, t) for name, t in tensors.items()}}


def manifest_of(spec: str, ranks: List[Dict[str, Any]], canonical: Optional[Dict[str, Any]] = None,
                base: Optional[Dict[str, Any]] = None) -> Dict[str, Any]:
    """`canonical` (whole shapes by name) and `boxes` of each rank: where the layout has no words. `base`: see `link_to`."""
    content = {"format": "weightwire", "version": 2 if base else 1, "spec": spec, "leaf_bytes": LEAF_BYTES,
               "digest": root(spec, ranks, canonical), "ranks": ranks}
    return {**content, **({} if canonical is None else {"canonical": canonical}), **({"base": base} if base else {})}


def check(opened: Opened) -> None:
    """Reads every byte and compares with the digests. CheckpointError (DATA_LOSS) names rank and tensor."""
    ranks: Any = read_json(opened.files.folder / MANIFEST)["ranks"]
    for rank, (entry, tensors) in enumerate(zip(ranks, opened.ranks)):
        for name, tensor in tensors.items():
            if entry["tensors"][name] != _entry(opened.files.flat, tensor):
                raise damaged(tensor.regions[0].file, f"rank {rank}: the bytes are not those of the digest", tensor=name)


def root(spec: str, ranks: Any, canonical: Any = None) -> str:
    """The digest of a manifest's tensors; one that is malformed has none that any manifest would give."""
    try:
        content = [spec, [[entry["files"], sorted((name, t["digest"], t["leaves"]) for name, t in entry["tensors"].items())]
                          for entry in ranks]]
        if canonical is not None:
            content += [sorted(canonical.items()), [sorted(entry["boxes"].items()) for entry in ranks]]
        return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    except (TypeError, KeyError, AttributeError, ValueError):
        return ""


def _entry(values: native_delta.Values, tensor: Stored) -> Dict[str, Any]:
    step = LEAF_BYTES // dtype_bytes(tensor.dtype)
    leaves = []
    leaf = np.empty(min(step, tensor.count), bits_of(tensor.dtype))
    for begin in range(0, tensor.count, step):
        leaves.append(hashlib.sha256(raw(values(tensor, begin, min(tensor.count, begin + step), leaf))).hexdigest())
    whole = hashlib.sha256(json.dumps([tensor.dtype, list(tensor.shape), leaves]).encode()).hexdigest()
    return {"digest": whole, "leaves": leaves}
