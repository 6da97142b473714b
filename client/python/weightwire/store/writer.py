"""The writer: an engine of its site that keeps every version that it can in a store.

It holds nobody up. A version that is offered is acknowledged at once; then its bytes are copied, and only for as long as that
copy takes does the next version wait. What is coded and written is the copy. As long as one is being written, or the store does
not answer, the fleet goes on, and the next copy is of what is newest then: versions in between are passed over.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, List, Optional, Tuple, cast

import numpy as np

from weightwire import errors
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.stored import bits_of
from weightwire.client import Client
from weightwire.memory import Arrays
from weightwire.store.figures import Figures
from weightwire.store.format import PART_BYTES, Layout
from weightwire.store.objects import StoreError
from weightwire.store.reading import WORKERS, Image, OnProgress, Reader, no_progress
from weightwire.store.retention import Lease
from weightwire.store.signing import Signer
from weightwire.store.uploading import ANCHOR_EVERY, Uploader
from weightwire.subscriber import Offer, Subscriber

log = logging.getLogger("weightwire.store")
_POLL_SECONDS = 0.2
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0
_VERIFY_SECONDS = 60.0


@dataclass(frozen=True)
class Copied:
    """A version whose bytes are in memory of this process."""

    version: int
    lineage: int
    image: Image


class Writer:
    """All ranks of a layout, in this process, each a Subscriber. `run` returns when it is told to stop."""

    def __init__(self, reader: Reader, config: str, spec: str = "hf", *, agent: Optional[str] = None, group: str = "store", job: str = "",
                 coordinator: Optional[str] = None, signer: Optional[Signer] = None, anchor_every: int = ANCHOR_EVERY,
                 part_bytes: int = PART_BYTES, workers: int = WORKERS, wwctl: Optional[str] = None, figures: Optional[Figures] = None,
                 on_stored: Callable[[str], None] = lambda _: None, on_progress: OnProgress = no_progress, model_name: str = ""):
        """config: text of the model's config.json; spec: the layout in which versions are stored, "hf", "fsdp:dp8"; its
        ranks are coded and written side by side.
        coordinator: is asked, as `wwctl verify` does, what the content's root is; None: manifests have none.
        on_stored: a line for people, for each version that was stored. model_name: as for Subscriber.
        Memory: of the agent two buffers of the model, of this process two copies.
        """
        self._reader, self._agent, self._group, self._job, self._coordinator = reader, agent, group, job, coordinator
        self._model_name = model_name
        planner = planner_of(config, wwctl)
        self._layout = Layout(spec, config, tuple(tuple(rank) for rank in planner.layout(spec)), part_bytes)
        self._uploader = Uploader(reader, self._layout, signer=signer, anchor_every=anchor_every, job=job, workers=workers, wwctl=wwctl)
        self.figures = figures or Figures()
        self._on_stored, self._on_progress = on_stored, on_progress
        self._base: Optional[Image] = None
        self._spare: Optional[Image] = None
        self._wake = threading.Condition()
        self._copied: Optional[Copied] = None  # handed over, and being stored
        self._handled: Optional[Offer] = None  # what is stored, or was passed over for a reason that stays
        self._stop = threading.Event()
        self._lease = Lease(reader.objects, f"writer-{group}")

    def stop(self) -> None:
        """From any thread or signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Until `stop`. WeightwireError: it cannot be an engine of this site (a layout that is refused, a place that is taken)."""
        storing = threading.Thread(target=self._store_all, name="weightwire-store", daemon=True)
        with ExitStack() as stack:
            ranks = [stack.enter_context(Subscriber(group=self._group, rank=rank, world_size=len(self._layout.ranks), job=self._job,
                                                    agent=self._agent, model_name=self._model_name)) for rank in range(len(self._layout.ranks))]
            for subscriber, tensors in zip(ranks, self._layout.ranks):
                subscriber.bind(self._layout.config, self._layout.spec, tensors)
            pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
            self._on_stored(f"engine {self._group}: {len(ranks)} ranks of {self._layout.spec}, {self._layout.nbytes} bytes; versions go to "
                            f"{self._reader.objects.url}")
            storing.start()
            try:
                self._follow_fleet(ranks, pool)
            finally:
                self._stop.set()
                with self._wake:
                    self._wake.notify_all()
        storing.join(_POLL_SECONDS)  # a request that is under way is not waited for: what it was part of is no version

    def _follow_fleet(self, ranks: List[Subscriber], pool: ThreadPoolExecutor) -> None:
        serving: Optional[Offer] = None
        while not self._stop.is_set():
            if (offer := ranks[0].wait_offer(_POLL_SECONDS)) is not None:
                if (taken := self._take(ranks, offer)) is not None:
                    if serving is not None and serving is not self._handled and serving.order < taken.order and not self._is_copied(serving):
                        self.figures.add("weightwire_store_versions_total", "skipped")
                    serving = taken
                    self.figures.seen(taken.lineage, taken.version)
            if serving is not None and any(rank.serving is None or rank.serving.epoch != serving.epoch for rank in ranks):
                serving = None  # fenced: what is committed comes again
            if serving is not None and serving is not self._handled:
                self._copy(ranks, pool, serving)

    def _take(self, ranks: List[Subscriber], first: Offer) -> Optional[Offer]:
        """Flips all ranks and acknowledges. None: this engine was fenced meanwhile."""
        try:
            offers = [first]
            for rank in ranks[1:]:
                while (offer := rank.wait_offer(_POLL_SECONDS)) is None:
                    if self._stop.is_set() or not ranks[0].is_current(first):
                        return None
                offers.append(offer)
            for rank, offer in zip(ranks, offers):
                rank.flip(offer)
            ranks[0].acknowledge(offers[0])
            return first
        except errors.WeightwireError as error:  # the next offer comes to another incarnation
            log.warning("version %d was not taken: %s", first.version, error)
            self.figures.failed(error, "fleet")
            return None

    def _is_copied(self, offer: Offer) -> bool:
        with self._wake:
            return self._copied is not None and (self._copied.lineage, self._copied.version) == offer.order

    def _copy(self, ranks: List[Subscriber], pool: ThreadPoolExecutor, serving: Offer) -> None:
        """Copies what is served, if nothing is being stored, and hands it over."""
        with self._wake:
            if self._copied is not None:
                return
        if serving.lineage < 1:
            return self._pass_over(serving, StoreError(f"version {serving.version} has no known lineage, after a rollback", kind="refused",
                                                       remedy="the next version that the trainer publishes is stored"))
        if self._spare is None:
            self._spare = Image.empty(self._layout)
        image = self._spare
        image.forget()

        served = [cast(Arrays, rank.params or {}) for rank in ranks]

        def copy(place: Tuple[int, int]) -> None:
            rank, number = place
            meta = self._layout.ranks[rank][number]
            np.copyto(image.flats[rank][number], served[rank][meta.name].reshape(-1).view(bits_of(meta.dtype)))
        try:
            list(pool.map(copy, [(rank, number) for rank, metas in enumerate(self._layout.ranks) for number in range(len(metas))]))
        except KeyError:
            return  # fenced while it was copied
        if any(rank.serving is None or rank.serving.epoch != serving.epoch for rank in ranks):
            return
        with self._wake:
            self._copied = Copied(serving.version, serving.lineage, image)
            self._handled = serving
            self._wake.notify_all()

    def _pass_over(self, serving: Offer, error: BaseException) -> None:
        self._handled = serving
        log.warning("%s", error)
        self.figures.failed(error)

    def _store_all(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._stop.is_set():
            with self._wake:
                self._wake.wait_for(lambda: self._copied is not None or self._stop.is_set(), timeout=_POLL_SECONDS)
                copied = self._copied
            if copied is None:
                continue
            done = False
            try:
                done = self._store(copied)
                pause = _PAUSE_SECONDS
            except Exception as error:  # whatever it is, the fleet goes on, and so does this
                self.figures.failed(error)
                log.warning("version %d is not stored: %s; the newest version is tried again in %.0f s", copied.version, error, pause)
                if isinstance(error, StoreError) and error.kind in ("lost_race", "damaged", "missing"):
                    self._uploader.head = None  # look again what is there
                    self._base = None
                self._stop.wait(pause * random.uniform(0.7, 1.3))
                pause = min(2 * pause, _PAUSE_SECONDS_MAX)
            with self._wake:
                self._copied = None
                if not done:
                    self._handled = None  # the newest is copied again
        self._lease.drop()

    def _store(self, copied: Copied) -> bool:
        """False: the same again. True: it is stored, or will never be."""
        started = time.monotonic()
        if self._base is None:
            self._find_base()
        if (copied.lineage, copied.version) <= self._uploader.newest:
            self._compare(copied)
            return True
        uploaded = self._uploader.store(copied.version, copied.lineage, copied.image, self._base, content=self._content_of(copied),
                                        on_progress=self._on_progress)
        self._base, self._spare = copied.image, self._base  # nobody writes the spare before this version is done with
        self._lease.hold([uploaded.manifest])
        seconds = time.monotonic() - started
        self.figures.done(copied.lineage, copied.version, uploaded.manifest.kind, "written", uploaded.bytes, uploaded.objects)
        self._on_stored(f"{uploaded.manifest.name}: {uploaded.manifest.kind}, {uploaded.bytes} bytes in {uploaded.objects} objects, "
                        f"{seconds:.2f} s, {uploaded.manifest.folder}")
        if self._uploader.anchor_due:
            anchor = self._uploader.put_anchor(copied.image, self._on_progress)
            self.figures.moved("written", anchor.bytes, anchor.objects)
            self._on_stored(f"{uploaded.manifest.name}: an anchor beside it, {anchor.bytes} bytes in {anchor.objects} objects")
        return True

    def _find_base(self) -> None:
        """What the store has, so that the first version is changes, too. Without it the first version is an anchor."""
        found = self._uploader.adopt()
        if found is None:
            return
        base = Image.empty(self._layout)
        try:
            self._lease.hold([found])
            loaded = self._reader.load(found, base, self._on_progress)
        except StoreError as error:
            if error.kind in ("unavailable", "denied"):
                raise
            log.warning("%s cannot be a base, so the next version is whole: %s", found.path, error)
            self.figures.failed(error)
            return
        self.figures.moved("read", loaded.bytes, loaded.objects)
        self._uploader.head, self._base = found, base

    def _compare(self, copied: Copied) -> None:
        """A version that the store has, or is past: after a restart it is the one that was stored last, and has its bytes."""
        order = copied.lineage, copied.version
        if order == self._uploader.newest and self._base is not None and all(
                np.array_equal(mine, theirs) for rank, other in zip(copied.image.flats, self._base.flats) for mine, theirs in zip(rank, other)):
            with_what = self._uploader.head
            if with_what is not None:
                self.figures.done(*order, "same", "written", 0, 0)
            return
        error = StoreError(f"version {copied.version} of lineage {copied.lineage} is not stored: the store has {self._uploader.newest[1]} of "
                           f"{self._uploader.newest[0]}, and versions of a store only grow", kind="refused",
                           remedy="after a rollback the next version that the trainer publishes is stored; other regions keep what they have")
        log.warning("%s", error)
        self.figures.failed(error, "not_newer")

    def _content_of(self, copied: Copied) -> Callable[[], Tuple[str, str]]:
        """Begins to ask what the content's root is; the answer is wanted when the parts are written."""
        if self._coordinator is None:
            return lambda: ("", "")
        found: List[Tuple[str, str]] = []
        address = self._coordinator

        def ask() -> None:
            try:
                with Client(address) as client:
                    for engine in client.verify(self._group, timeout=_VERIFY_SECONDS).engines:
                        if engine.version == copied.version and engine.why is None and not engine.superseded:
                            found.append((engine.root, engine.content_class))
            except Exception as error:  # the version is stored without
                log.info("version %d: no content root: %s", copied.version, error)
        asking = threading.Thread(target=ask, name="weightwire-root", daemon=True)
        asking.start()

        def answer() -> Tuple[str, str]:
            asking.join(_VERIFY_SECONDS)
            return found[0] if found else ("", "")
        return answer


def read_config(path: Path) -> str:
    """The text of a model's config.json. StoreError: there is none."""
    try:
        return path.read_text()
    except OSError as error:
        raise StoreError(f"--config {path}: {error}", kind="refused", remedy="name the model's config.json") from None


