"""Versions out of a store: which one is the newest, the shortest way to it, and its bytes, each of them checked."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np

from weightwire.checkpoint.execute import memory_bits
from weightwire.checkpoint.library import library_of
from weightwire.checkpoint.stored import Bits, bits_of
from weightwire.store.format import (ANCHOR, LATEST, MANIFEST, VERSIONS, Latest, Layout, Link, Manifest, folder_version)
from weightwire.store.objects import Objects, StoreError
from weightwire.store.parts import Piece, decode, digest, pieces_of
from weightwire.store.signing import TrustedKeys

#: Of manifests between a version and the bytes that it is made of.
CHAIN_MAX = 256
WORKERS = 8
_REMEMBERED_MAX = 4 * CHAIN_MAX
#: Of objects that are much smaller than a part, so many times as many are read at the same time.
_SMALL_ONES = 4

#: What is done, with bytes done and bytes in all.
OnProgress = Callable[[str, int, int], None]


def no_progress(_what: str, _done: int, _total: int) -> None:
    pass


class Image:
    """The bytes of all ranks of a layout, in memory; of each part it is known what it holds.

    A load that fails leaves some parts ahead of others: `manifest` is still the last version that was whole, and the next load
    goes on part by part, from what each holds.
    """

    def __init__(self, layout: Layout, ranks: Sequence[Mapping[str, np.ndarray]]):
        """`ranks`: of each rank the arrays by name, in the layout's shapes, contiguous and writable. CheckpointError: they are not."""
        self.layout = layout
        self.flats: List[List[Bits]] = [[memory_bits(arrays[meta.name], meta, rank) for meta in metas]
                                        for rank, (metas, arrays) in enumerate(zip(layout.ranks, ranks))]
        self.manifest: Optional[Manifest] = None
        self.contents: List[List[Optional[str]]] = [[None] * len(layout.parts(rank)) for rank in range(len(layout.ranks))]

    @classmethod
    def empty(cls, layout: Layout) -> "Image":
        """In memory of its own, which the system gives as it is written."""
        return cls(layout, [{meta.name: np.empty(meta.shape, bits_of(meta.dtype)) for meta in metas} for metas in layout.ranks])

    def pieces(self, rank: int, number: int) -> List[Piece]:
        return pieces_of(self.layout.ranks[rank], self.flats[rank], self.layout.parts(rank)[number])

    def numbers(self) -> List[Tuple[int, int]]:
        """Rank and number of every part, ranks by turns, so that all of them move at the same time."""
        all_of_it = [(number, rank) for rank, parts in enumerate(self.contents) for number in range(len(parts))]
        return [(rank, number) for number, rank in sorted(all_of_it)]

    def copy_from(self, other: "Image") -> None:
        """All bytes and what is known of them, from an image of an equal layout."""
        for mine, theirs in zip(self.flats, other.flats):
            for into, of in zip(mine, theirs):
                np.copyto(into, of)
        self.manifest, self.contents = other.manifest, [list(parts) for parts in other.contents]

    def forget(self) -> None:
        """Somebody else writes its bytes."""
        self.manifest, self.contents = None, [[None] * len(parts) for parts in self.contents]

    @property
    def whole(self) -> bool:
        """Every part holds what its manifest says."""
        return self.manifest is not None and [[part.content for part in parts] for parts in self.manifest.ranks] == self.contents


@dataclass(frozen=True)
class Loaded:
    """What a load took."""

    manifest: Manifest
    bytes: int  #: that were read
    objects: int
    steps: int  #: manifests that were passed


class Reader:
    """Reads a store. Any number of threads, each with an image of its own. All methods raise StoreError."""

    def __init__(self, objects: Objects, *, trusted: Optional[TrustedKeys] = None, workers: int = WORKERS, wwctl: Optional[str] = None):
        """`trusted`: nothing counts that it does not find signed. `workers`: parts that are read at the same time; each takes
        memory of at most a part."""
        self.objects, self._trusted, self._workers = objects, trusted, workers
        self._library = library_of(wwctl)
        self._lock = threading.Lock()
        self._manifests: Dict[str, Manifest] = {}
        self._layouts: Dict[str, Layout] = {}
        #: Manifests whose objects were found damaged or gone, and how: ways around them are taken, if there are any.
        self._avoided: Dict[str, StoreError] = {}

    def latest(self) -> Optional[Latest]:
        """None: nobody has stored a version."""
        try:
            data, found = self.objects.get(LATEST, bytes_max=1 << 20)
        except StoreError as error:
            if error.kind == "missing":
                return None
            raise
        return Latest.parse(bytes(data), found.etag, self.objects.at(LATEST))

    def manifest(self, link: Link) -> Manifest:
        """The manifest that a record names: its digest, state and version must be those that were named."""
        made = self.manifest_at(link.path)
        if made.link != link:
            raise StoreError(f"{self.objects.at(link.path)} is not the manifest that was named", kind="damaged",
                             remedy="objects of a store never change: see who writes to it")
        return made

    def manifest_at(self, path: str) -> Manifest:
        with self._lock:
            known = self._manifests.get(path)
        if known is not None:
            return known
        data, _ = self.objects.get(path)
        where = self.objects.at(path)
        if self._trusted is not None:
            self._trusted.check(bytes(data), where)
        made = Manifest.parse(bytes(data), path, where)
        made.check(self.layout(made.layout))
        with self._lock:
            if len(self._manifests) >= _REMEMBERED_MAX:
                self._manifests.clear()
            self._manifests[path] = made
        return made

    def layout(self, wanted: str) -> Layout:
        with self._lock:
            known = self._layouts.get(wanted)
        if known is not None:
            return known
        path = Layout.path(wanted)
        data, _ = self.objects.get(path)
        if digest(data) != wanted:
            raise StoreError(f"{self.objects.at(path)} is not what its name says", kind="damaged", remedy="see who writes to this store")
        made = Layout.parse(bytes(data), self.objects.at(path))
        with self._lock:
            self._layouts[wanted] = made
        return made

    def versions(self) -> List[str]:
        """Folders of all attempts, oldest version first; some may be torn."""
        return [folder for name in self.objects.folders(VERSIONS) if folder_version(folder := f"{VERSIONS}/{name}")]

    def version(self, number: int) -> Manifest:
        """Exactly this version: of several attempts that of the newest lineage, and of those the one that was written last."""
        found = []
        for folder in self.versions():
            if folder_version(folder) == number and (record := self.objects.find(f"{folder}/{MANIFEST}")) is not None:
                made = self.manifest_at(record.path)
                found.append((made.lineage, record.modified, made.folder, made))
        if not found:
            raise StoreError(f"{self.objects.url} has no version {number}", kind="missing", remedy="`wwctl store ls` says which it has")
        return max(found)[-1]

    def route(self, target: Manifest, image: Optional[Image] = None) -> List[Manifest]:
        """The manifests to apply, in order, to come to `target` with the fewest bytes: from what `image` holds, or from an
        anchor. StoreError: none leads there."""
        held = image.manifest if image is not None and image.layout.digest == target.layout else None
        if held is not None and image is not None and not all(None not in parts for parts in image.contents):
            held = None  # a part was spoilt: only an anchor says all of it
        best: Optional[List[Manifest]] = None
        best_bytes = 0
        chain: List[Manifest] = []
        chain_bytes = 0
        anchors = {link.path: link for link in (target.anchor,) if link is not None}
        if held is None and target.kind == "delta" and (own := self.own_anchor(target)) is not None:
            best, best_bytes = [own], own.nbytes
        at: Manifest = target
        wrong: Optional[StoreError] = None
        is_told = False  # `wrong` names the object that is in the way, and not only a manifest that was collected
        while True:
            if held is not None and at.state == held.state:
                if best is None or chain_bytes < best_bytes:
                    best, best_bytes = chain[::-1], chain_bytes
                break
            anchor = at if at.kind == "anchor" else self._beside(at, anchors)
            if anchor is not None and anchor.path not in self._avoided:
                if best is None or chain_bytes + anchor.nbytes < best_bytes:
                    best, best_bytes = [anchor, *chain[::-1]], chain_bytes + anchor.nbytes
                if held is None:
                    break
            if at.base is None or len(chain) >= CHAIN_MAX or (best is not None and chain_bytes >= best_bytes):
                break
            if (found := self._avoided.get(at.path)) is not None:
                wrong, is_told = found, True
                break
            chain.append(at)
            chain_bytes += at.nbytes
            try:
                at = self.manifest(at.base)
            except StoreError as error:
                if error.kind not in ("missing", "damaged", "signature"):
                    raise
                wrong = error  # it was collected, or is damaged; an anchor after it is as good
                break
        if best is None:
            best = self._by_an_unnamed_anchor([*chain, at])
        if best is None:
            if wrong is None and (found := self._avoided.get(f"{target.folder}/{ANCHOR}")) is not None:
                wrong, is_told = found, True
            self._avoided.clear()  # another time, all is tried again
            if wrong is not None and (is_told or wrong.kind != "missing"):
                raise wrong
            raise StoreError(f"{self.objects.at(target.path)}: no anchor leads to {target.name}", kind="missing",
                             remedy="take a newer version, or wait for the writer's next anchor") from wrong
        return best

    def _by_an_unnamed_anchor(self, chain: Sequence[Manifest]) -> Optional[List[Manifest]]:
        """The way to the first of a chain, newest first, by an anchor that lies beside one of them and that the newest does not name:
        whoever wrote it did not learn that it was written. `gc` takes it for one, too."""
        for place, at in enumerate(chain):
            if at.kind == "delta" and (anchor := self.own_anchor(at)) is not None:
                return [anchor, *chain[:place][::-1]]
        return None

    def _beside(self, at: Manifest, anchors: Mapping[str, Link]) -> Optional[Manifest]:
        """The anchor of the same version, where a newer manifest names it. None: it is not named, or it is damaged or was collected,
        and another way is as good."""
        link = anchors.get(f"{at.folder}/{ANCHOR}")
        if link is None or link.path in self._avoided:
            return None
        try:
            anchor = self.manifest(link)
            if anchor.state != at.state or anchor.layout != at.layout:
                raise StoreError(f"{self.objects.at(link.path)} has other bytes than {at.path}", kind="damaged",
                                 remedy="see who writes to this store")
            return anchor
        except StoreError as error:
            self._avoid(link.path, error)
            return None

    def own_anchor(self, at: Manifest) -> Optional[Manifest]:
        """The anchor that lies beside a version, which newer ones name, and it cannot. None: there is none that is whole."""
        path = f"{at.folder}/{ANCHOR}"
        if path in self._avoided or self.objects.find(path) is None:
            return None
        try:
            return self._beside(at, {path: self.manifest_at(path).link})
        except StoreError as error:
            self._avoid(path, error)
            return None

    def _avoid(self, path: str, error: StoreError) -> None:
        if error.kind not in ("missing", "damaged", "signature"):
            raise error
        self._avoided[path] = error

    def load(self, target: Manifest, image: Image, on_progress: OnProgress = no_progress) -> Loaded:
        """Makes `image` hold `target`; returns when every byte was compared with the digest of what it must be. The layout must
        be the image's."""
        if image.layout.digest != target.layout:
            raise StoreError(f"{target.name} is of another layout or model than what is held here", kind="refused",
                             remedy="start again: a follower takes one layout")
        steps = self.route(target, image)
        total = sum(step.nbytes for step in steps)
        took = _Took(lambda done: on_progress(f"{target.name}", done, total))
        failed: List[BaseException] = []

        def part(place: Tuple[int, int]) -> None:
            if failed:
                return
            try:
                self._load_part(steps, image, place, took)
            except BaseException as error:
                failed.append(error)
        with ThreadPoolExecutor(self._side_by_side(steps, image.layout)) as pool:
            list(pool.map(part, image.numbers()))
        if failed:
            raise failed[0]
        image.manifest = target
        if not image.whole:
            raise StoreError(f"{target.name}: what was loaded is not what its manifest says", kind="damaged", remedy="this is a bug")
        on_progress(f"{target.name}", total, total)
        return Loaded(target, took.bytes, took.objects, len(steps))

    def _side_by_side(self, steps: Sequence[Manifest], layout: Layout) -> int:
        """How many parts are read at the same time: of small objects more, for of those each waits rather for the store's answer
        than for its bytes; of all together no more memory than of as many whole parts as there are workers."""
        most = max((part.bytes for step in steps for parts in step.ranks for part in parts), default=0)
        return max(self._workers, min(_SMALL_ONES * self._workers, self._workers * layout.part_bytes // max(most, 1)))

    def _load_part(self, steps: Sequence[Manifest], image: Image, place: Tuple[int, int], took: "_Took") -> None:
        rank, number = place
        contents = image.contents[rank]
        wanted = [step.ranks[rank][number] for step in steps]
        at = max((index for index, part in enumerate(wanted) if part.content == contents[number]), default=-1)
        if at < 0 and steps and steps[0].kind == "delta":
            held = image.manifest.ranks[rank][number].content if image.manifest is not None else None
            if contents[number] != held or held is None:  # a load was begun on a way that is not taken any more
                contents[number] = None
                raise StoreError(f"rank {rank}, part {number}: it holds bytes of a version that was given up", kind="lost_race",
                                 remedy="the next attempt begins with an anchor")
        pieces = image.pieces(rank, number)
        for index in range(at + 1, len(steps)):
            part, step = wanted[index], steps[index]
            if part.content == contents[number]:
                continue  # nothing of it changed
            try:
                data = self.read_part(step, rank, number)
                contents[number] = None
                self.apply(step, rank, number, data, pieces)
            except StoreError as error:
                if error.kind in ("damaged", "missing"):
                    self._avoided[step.path] = error
                raise
            contents[number] = part.content
            took.one(part.bytes)

    def apply(self, manifest: Manifest, rank: int, number: int, data: Any, pieces: Sequence[Piece]) -> None:
        """Makes `pieces` hold what the manifest says of this part, of an object's bytes."""
        where = self.objects.at(manifest.object(rank, number))
        if decode(self._library, data, pieces, whole=manifest.kind == "anchor", where=where) != manifest.ranks[rank][number].content:
            raise StoreError(f"{where}: what it makes is not what the manifest says", kind="damaged", rank=str(rank),
                             remedy="the next anchor is whole; `wwctl store verify` finds all that is damaged")

    def read_part(self, manifest: Manifest, rank: int, number: int) -> Any:
        """An object's bytes, compared with its digest."""
        part, path = manifest.ranks[rank][number], manifest.object(rank, number)
        data, found = self.objects.get(path, bytes_max=max(part.bytes, 1))
        if found.bytes != part.bytes or len(data) != part.bytes or digest(data) != part.digest:
            raise StoreError(f"{self.objects.at(path)}: {len(data)} bytes that are not those of {manifest.name}: expected {part.bytes} of "
                             f"digest {part.digest[:12]}…", kind="damaged", rank=str(rank),
                             remedy="it was cut short, exchanged or damaged; the next anchor is whole")
        return data


class _Took:
    """Counts, from many threads."""

    def __init__(self, told: Callable[[int], None]):
        self._lock, self._told = threading.Lock(), told
        self.bytes = self.objects = 0

    def one(self, size: int) -> None:
        with self._lock:
            self.bytes += size
            self.objects += 1
            self._told(self.bytes)


