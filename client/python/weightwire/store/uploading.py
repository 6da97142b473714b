"""A version into a store: its parts, then its manifest, then the pointer to it. Until the pointer is written nobody sees it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Callable, List, Optional, Tuple

from weightwire.checkpoint.library import library_of
from weightwire.store.format import ANCHOR, LATEST, Latest, Layout, Manifest, Part, new_folder
from weightwire.store.objects import StoreError
from weightwire.store.parts import digest, encode
from weightwire.store.reading import WORKERS, Image, OnProgress, Reader, no_progress
from weightwire.store.signing import Signer

ANCHOR_EVERY = 16
#: Times that the pointer is read anew because an older one was written between reading and writing it.
_POINTS_MAX = 16


@dataclass(frozen=True)
class Uploaded:
    """What a version took."""

    manifest: Manifest
    bytes: int  #: that were written, records not counted
    objects: int
    #: An anchor was put beside it.
    anchor: bool


class Uploader:
    """Stores versions of one layout, one after another. Not for several threads at once.

    It remembers the manifest of what it stored last; the caller has the bytes. Another writer of the same store is noticed when
    the pointer is written: StoreError `lost_race`, after which `adopt` says what is there now.
    """

    def __init__(self, reader: Reader, layout: Layout, *, signer: Optional[Signer] = None, anchor_every: int = ANCHOR_EVERY, job: str = "",
                 workers: int = WORKERS, wwctl: Optional[str] = None):
        """`anchor_every`: versions; an anchor comes earlier when the objects of the chain have more bytes than the anchor's.
        `workers`: parts that are coded and written at the same time; each takes memory of at most a part."""
        if not 1 <= anchor_every <= 64:
            raise StoreError(f"an anchor every {anchor_every} versions", kind="refused", remedy="a number from 1 to 64")
        self._reader, self._objects, self._layout = reader, reader.objects, layout
        self._signer, self._anchor_every, self._job, self._workers = signer, anchor_every, job, workers
        self._library = library_of(wwctl)
        self._latest: Optional[Latest] = None
        self._layout_stored = False
        #: What deltas are made against; None: the next version is an anchor.
        self.head: Optional[Manifest] = None
        self._anchor: Optional[Manifest] = None

    def adopt(self) -> Optional[Manifest]:
        """Asks what the newest version is, which the next one will be based on if the caller gets its bytes; None: there is none
        of this layout."""
        self.head = self._anchor = None
        self._latest = self._reader.latest()
        if self._latest is None:
            return None
        found = self._reader.manifest(self._latest.manifest)
        if found.layout != self._layout.digest:
            return None
        self._anchor = found if found.kind == "anchor" else self._anchor_of(found)
        return found if self._anchor is not None else None

    def _anchor_of(self, found: Manifest) -> Optional[Manifest]:
        """The newest one that leads to it. With one beside it, what it names may have been collected. None: there is none any more,
        so that the next version must be whole."""
        if (own := self._reader.own_anchor(found)) is not None or found.anchor is None:
            return own
        try:
            return self._reader.manifest(found.anchor)
        except StoreError as error:
            if error.kind not in ("missing", "damaged", "signature"):
                raise
            return None

    @property
    def newest(self) -> Tuple[int, int]:
        """The order of what the pointer says, as far as this writer knows; (0, 0): nothing."""
        return self._latest.order if self._latest is not None else (0, 0)

    def store(self, version: int, lineage: int, now: Image, base: Optional[Image], *, content: Callable[[], Tuple[str, str]] = lambda: ("", ""),
              on_progress: OnProgress = no_progress) -> Uploaded:
        """Stores what `now` holds, as changes since `base`, which holds `head`, or, without, whole; returns when the pointer says
        it. `content`: asked when the parts are written for root and class of
        `wwctl verify`. `now.contents` is filled. `anchor_due` says what is left to do.

        StoreError: it is not stored, and nobody sees anything of it."""
        if (lineage, version) <= self.newest:
            raise StoreError(f"version {version} of lineage {lineage} is not newer than {self.newest[1]} of {self.newest[0]}, which "
                             f"{self._objects.url} has", kind="refused", remedy="versions of a store only grow")
        self._objects.check_conditions()  # before bytes move
        if not self._layout_stored:
            self._objects.put(Layout.path(self._layout.digest), self._layout.text())
        self._layout_stored = False  # until a version needs it `gc` may collect it, so that it is written anew for the next attempt
        head = self.head if base is not None else None
        manifest = Manifest(folder=new_folder(version), kind="delta" if head is not None else "anchor", version=version, lineage=lineage,
                            layout=self._layout.digest, ranks=(), job=self._job,
                            created=datetime.now(timezone.utc).isoformat(timespec="seconds"))
        manifest = self._put_parts(manifest, now, base if head is not None else None, on_progress)
        if head is not None:
            anchor = self._anchor or head
            manifest = replace(manifest, base=head.link, anchor=anchor.link, chain=head.chain + 1, chain_bytes=head.chain_bytes + manifest.nbytes)
            if anchor.order == head.order and anchor.folder == head.folder:  # deltas count from the anchor beside the head
                manifest = replace(manifest, chain=1, chain_bytes=manifest.nbytes)
        root, kind = content()
        manifest = self._put_manifest(replace(manifest, content_root=root, content_class=kind))
        self._point_to(manifest)
        self.head, self._layout_stored = manifest, True
        if manifest.kind == "anchor":
            self._anchor = manifest
        now.manifest, now.contents = manifest, [[part.content for part in parts] for parts in manifest.ranks]
        return Uploaded(manifest, manifest.nbytes, sum(map(len, manifest.ranks)), False)

    @property
    def anchor_due(self) -> bool:
        """The version that was stored last should have an anchor beside it."""
        if self.head is None or self.head.kind == "anchor":
            return False
        least = self._anchor.nbytes if self._anchor is not None else 0
        return self.head.chain >= self._anchor_every or self.head.chain_bytes > least

    def put_anchor(self, now: Image, on_progress: OnProgress = no_progress) -> Uploaded:
        """Puts an anchor beside the version that was stored last, which `now` holds."""
        head = self.head
        if head is None:
            raise StoreError("there is no version for an anchor", kind="refused")
        manifest = replace(head, kind="anchor", file=ANCHOR, base=None, anchor=None, chain=0, chain_bytes=0, ranks=(), digest="")
        manifest = self._put_parts(manifest, now, None, on_progress)
        if manifest.state != head.state:
            raise StoreError(f"{head.name}: the anchor would hold other bytes", kind="damaged", remedy="this is a bug, or bad memory")
        self._anchor = self._put_manifest(manifest)
        return Uploaded(self._anchor, manifest.nbytes, sum(map(len, manifest.ranks)), True)

    def _put_parts(self, manifest: Manifest, now: Image, base: Optional[Image], on_progress: OnProgress) -> Manifest:
        """Codes and writes all parts, several at a time, the ranks by turns."""
        places, lock, done = now.numbers(), threading.Lock(), 0
        failed: List[BaseException] = []
        ranks: List[List[Optional[Part]]] = [[None] * len(parts) for parts in now.contents]

        def put(place: Tuple[int, int]) -> None:
            nonlocal done
            if failed:
                return
            rank, number = place
            try:
                pieces = now.pieces(rank, number)
                data, content = encode(self._library, pieces, base.pieces(rank, number) if base is not None else None)
                self._objects.put(manifest.object(rank, number), memoryview(data))
                ranks[rank][number] = Part(len(data), digest(data), content)
                with lock:
                    done += sum(piece.nbytes for _, piece in pieces)
                    on_progress(f"{manifest.kind} of {manifest.name}", done, self._layout.nbytes)
            except BaseException as error:
                failed.append(error)
        with ThreadPoolExecutor(self._workers) as pool:
            list(pool.map(put, places))
        if failed:
            raise failed[0]
        return replace(manifest, ranks=tuple(tuple(part for part in parts if part is not None) for parts in ranks))

    def _put_manifest(self, manifest: Manifest) -> Manifest:
        line = manifest.text()
        record = self._signer.sign(line) if self._signer is not None else line + b"\n"
        self._objects.put(manifest.path, record)
        return replace(manifest, digest=digest(record))

    def _point_to(self, manifest: Manifest) -> None:
        for _ in range(_POINTS_MAX):
            wanted = Latest(manifest.link)
            try:
                etag = self._objects.put_if(LATEST, wanted.text(), self._latest.etag if self._latest is not None else None)
                self._latest = Latest(manifest.link, etag)
                return
            except StoreError as error:
                if error.kind != "lost_race":
                    raise
                now = self._reader.latest()  # a request that was repeated may have been ours
                base, self._latest = manifest.base, now
                if now is not None and now.manifest == manifest.link:
                    return
                # Of an older one that somebody wrote meanwhile a whole version is the next. Changes are only of what the pointer says:
                # `gc` keeps that for whoever comes next.
                if now is None or now.order < manifest.order and (base is None or base.path == now.manifest.path):
                    continue
                raise StoreError(f"{self._objects.url} has {now.manifest.path} now, and not {manifest.path}: another writer was faster",
                                 kind="lost_race", remedy="one writer for each store, or each with a prefix of its own") from error
        raise StoreError(f"{self._objects.at(LATEST)} cannot be written: each time it was another one than was read just before",
                         kind="unavailable", remedy="see who else writes to this store")


