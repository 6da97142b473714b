"""Checkpoints into a store and out of it, and a look at every byte that a store has."""

from __future__ import annotations

import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Set, Tuple

from weightwire.checkpoint.conversion import convert
from weightwire.checkpoint.formats import CONFIG, Wanted
from weightwire.checkpoint.sources import PathLike, find, open_checkpoint
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import Writing, check_free, target_layout
from weightwire.store.format import ANCHOR, MANIFEST, PART_BYTES, Layout, Manifest, folder_version
from weightwire.store.objects import StoreError
from weightwire.store.parts import Piece, empty_pieces
from weightwire.store.reading import WORKERS, Image, OnProgress, Reader, no_progress
from weightwire.store.signing import Signer
from weightwire.store.uploading import ANCHOR_EVERY, Uploaded, Uploader

_STEP_BYTES = 64 << 20


def push(reader: Reader, folder: PathLike, version: int, *, lineage: int = 1, source_spec: Optional[str] = None, config: Optional[PathLike] = None,
         whole: bool = False, signer: Optional[Signer] = None, anchor_every: int = ANCHOR_EVERY, part_bytes: int = PART_BYTES,
         workers: int = WORKERS, on_progress: OnProgress = no_progress) -> Uploaded:
    """Stores a checkpoint as a version, in its own layout: as changes since the newest version, if that has the same layout, which
    is read for it; else, or when `whole` is said, as an anchor. Memory: of one model, or of two.

    CheckpointError: the checkpoint. StoreError: it is not stored."""
    opened = open_checkpoint(folder)
    if opened.boxes:
        raise CheckpointError(f"{folder} has a layout of boxes, not of words", code="FAILED_PRECONDITION",
                              remedy="convert it first, for example with --to hf")
    found = find(folder, spec=source_spec, config=config, opened=opened)
    try:
        ranks = [tuple(replace(meta, dtype=tensor.dtype) for meta, tensor in zip(metas, tensors))
                 for metas, tensors in zip(found.planner().layout(opened.spec), found.bound.ranks)]
        layout = Layout(opened.spec, found.described().read_text(), tuple(ranks), part_bytes)
        image = Image.empty(layout)
        for flats, tensors in zip(image.flats, found.bound.ranks):
            for into, tensor in zip(flats, tensors):
                step = max(1, _STEP_BYTES // into.itemsize)
                for begin in range(0, tensor.count, step):
                    last = min(tensor.count, begin + step)
                    opened.files.flat(tensor, begin, last, into[begin:last])
        opened.files.check_unchanged()
    finally:
        opened.files.close()
    uploader = Uploader(reader, layout, signer=signer, anchor_every=anchor_every, workers=workers)
    head, base = uploader.adopt(), None
    if head is not None and not whole:
        base = Image.empty(layout)
        reader.load(head, base, on_progress)
        uploader.head = head
    stored = uploader.store(version, lineage, image, base, on_progress=on_progress)
    if uploader.anchor_due:
        uploader.put_anchor(image, on_progress)
    return stored


def pull(reader: Reader, manifest: Manifest, target: PathLike, to: str = "weightwire", *, shard_bytes: int = 5_000_000_000,
         wwctl: Optional[str] = None, on_progress: OnProgress = no_progress) -> int:
    """Writes a version as a checkpoint: "weightwire" (in the stored layout), or any format and layout that `convert` knows. Returns
    the bytes that were read. Memory: of one model.

    CheckpointError: something has the target's name, or there is no such format. StoreError: the version."""
    final = Path(os.path.abspath(target))
    check_free(final)
    layout = reader.layout(manifest.layout)
    asked = f"weightwire:{layout.spec}" if to == "weightwire" else to
    kind, spec = target_layout(asked)
    if kind not in ("weightwire", "hf") or spec != layout.spec:
        with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as folder:
            read = pull(reader, manifest, Path(folder) / "stored", on_progress=on_progress)
            convert(Path(folder) / "stored", final, asked, shard_bytes=shard_bytes, wwctl=wwctl)
        return read
    image = Image.empty(layout)
    loaded = reader.load(manifest, image, on_progress)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / CONFIG
        config.write_text(layout.config)
        final.parent.mkdir(parents=True, exist_ok=True)
        with Writing(final, Wanted(kind, asked, spec, layout.ranks, shard_bytes, config), None) as writing:
            for rank, flats in enumerate(image.flats):
                for number, bits in enumerate(flats):
                    stored = writing.target.tensor(rank, number)
                    writing.target.files.write(stored, 0, bits)
                    writing.wrote(stored.bytes)
            writing.seal()
            writing.finish()
    return loaded.bytes


@dataclass(frozen=True)
class Checked:
    """What `verify` found of one manifest."""

    path: str
    version: int
    lineage: int
    kind: str
    bytes: int
    error: str  #: empty: every byte is what it should be


def verify(reader: Reader, version: Optional[int] = None, *, workers: int = WORKERS, on_progress: OnProgress = no_progress) -> List[Checked]:
    """Reads every object of every version (or of one, and what it is made of), makes its bytes, and compares all with their digests.
    Signatures too, where the reader has keys. Memory: of some parts.

    What cannot be read is in the answer. StoreError: the store itself cannot be read."""
    wrong: Dict[str, str] = {}
    unread: List[str] = []
    manifests: Dict[str, Manifest] = {}
    for path in _records(reader, version):
        try:
            manifests[path] = reader.manifest_at(path)
        except StoreError as error:
            if error.kind in ("unavailable", "denied"):
                raise
            unread.append(path)
            wrong[path] = str(error)
    latest = reader.latest()
    for link in [link for made in manifests.values() for link in (made.base, made.anchor) if link] + ([latest.manifest] if latest else []):
        if link.path in manifests and manifests[link.path].link != link:
            wrong[link.path] = f"{link.path} is not the record that others name"
    check = _Verification(reader, list(manifests.values()), on_progress)
    places = [(layout, rank, number) for layout in sorted({made.layout for made in manifests.values()})
              for rank in range(len(reader.layout(layout).ranks)) for number in range(len(reader.layout(layout).parts(rank)))]
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(check.part, places))
    wrong = {**check.wrong, **wrong}
    return sorted([Checked(path, folder_version(path.rsplit("/", 1)[0]), 0, "?", 0, wrong[path]) for path in unread]
                  + [Checked(path, made.version, made.lineage, made.kind, made.nbytes, wrong.get(path, "")) for path, made in manifests.items()],
                  key=lambda one: (one.lineage, one.version, one.path))


class _Verification:
    """One part of all versions at a time, from each anchor along all that is made of it."""

    def __init__(self, reader: Reader, manifests: List[Manifest], on_progress: OnProgress):
        self._reader, self._on_progress = reader, on_progress
        self._manifests = sorted(manifests, key=lambda made: (made.order, made.path))
        self._lock = threading.Lock()
        self._done, self._total = 0, sum(made.nbytes for made in manifests)
        self.wrong: Dict[str, str] = {}

    def part(self, place: Tuple[str, int, int]) -> None:
        layout, rank, number = place
        mine = [made for made in self._manifests if made.layout == layout]
        made_of: Dict[str, List[Manifest]] = {}
        for made in mine:
            if made.base is not None:
                made_of.setdefault(made.base.state, []).append(made)
        good: Set[str] = set()
        shape = self._reader.layout(layout)
        for anchor in (made for made in mine if made.kind == "anchor"):
            todo = [(anchor, empty_pieces(shape.ranks[rank], shape.parts(rank)[number]))]
            while todo:
                made, pieces = todo.pop()
                if not self._apply(made, rank, number, pieces):
                    continue
                good.add(made.path)
                next_ones = [one for one in made_of.get(made.state, ()) if one.path not in good]
                todo += [(one, pieces if last else [(dtype, piece.copy()) for dtype, piece in pieces])
                         for one, last in ((one, one is next_ones[-1]) for one in next_ones)]
        good_states = {made.state for made in mine if made.path in good}
        for made in mine:
            if made.path not in good and made.state in good_states:
                self._read(made, rank, number)  # an anchor stands in for what it was made of
            elif made.path not in good:
                self._found(made, f"{made.path}: what it is made of is damaged, or not there")

    def _apply(self, made: Manifest, rank: int, number: int, pieces: Sequence[Piece]) -> bool:
        data = self._read(made, rank, number)
        if data is None:
            return False
        try:
            self._reader.apply(made, rank, number, data, pieces)
            return True
        except StoreError as error:
            self._found(made, str(error))
            return False

    def _read(self, made: Manifest, rank: int, number: int) -> Any:
        try:
            data = self._reader.read_part(made, rank, number)
        except StoreError as error:
            if error.kind in ("unavailable", "denied"):
                raise
            self._found(made, str(error))
            return None
        with self._lock:
            self._done += made.ranks[rank][number].bytes
            self._on_progress("verify", self._done, self._total)
        return data

    def _found(self, made: Manifest, what: str) -> None:
        with self._lock:
            self.wrong.setdefault(made.path, what)


def _records(reader: Reader, version: Optional[int]) -> List[str]:
    """Paths of the manifests to look at: all of them, or those of the way to a version."""
    if version is not None:
        return [step.path for step in reader.route(reader.version(version))]
    return [f"{folder}/{name}" for folder in reader.versions() for name in (MANIFEST, ANCHOR)
            if reader.objects.find(f"{folder}/{name}") is not None]
