"""The follower: the trainer of another site, which publishes there what a store has.

The site's coordinator commits it as an epoch of its own, under the same version. So the bytes come over the wide network once,
and everything inside the site is as with any trainer: agents relay, changes alone are sent, an engine that starts is filled by
its neighbours. When the store fails, engines serve what they have.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Callable, List, Optional, Tuple, cast

from weightwire import errors
from weightwire.client import Client
from weightwire.memory import Arrays
from weightwire.publisher import Publisher
from weightwire.store.barrier import Barrier
from weightwire.store.figures import Figures
from weightwire.store.format import FORMAT, NUMBER, Layout, Link, Manifest
from weightwire.store.objects import StoreError
from weightwire.store.reading import Image, OnProgress, Reader, no_progress
from weightwire.store.retention import Lease, plain_name

log = logging.getLogger("weightwire.store")
SITES = "sites"
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.5, 30.0


@dataclass(frozen=True)
class Published:
    """What a site has of a store, as it says there for the next follower of the site and for people."""

    state: str
    version: int
    lineage: int  #: of the store
    site_lineage: int  #: of the site's own coordinator


class Follower:
    """All ranks of the stored layout, in this process, each a Publisher. `run` returns when it is told to stop."""

    def __init__(self, reader: Reader, site: str, *, agent: Optional[str] = None, coordinator: Optional[str] = None, group: str = "trainer",
                 job: str = "", poll_seconds: float = 1.0, deadline_seconds: float = 600.0, barrier: Optional[Barrier] = None,
                 figures: Optional[Figures] = None, on_published: Callable[[str], None] = lambda _: None,
                 on_progress: OnProgress = no_progress):
        """site: its name in the store, for leases and the barrier.
        coordinator: of this site; with it a version counts when every complete engine serves it, else when it is staged everywhere.
        poll_seconds: between two looks at the pointer; deadline_seconds: for one version, in the site.
        Memory: of the model once, shared with the agent, and of the parts under way.
        """
        self._reader, self._site, self._agent, self._coordinator = reader, plain_name(site, "the site"), agent, coordinator
        self._group, self._job = group, job
        self._poll, self._deadline, self._barrier = poll_seconds, deadline_seconds, barrier
        self.figures = figures or Figures()
        self._on_published, self._on_progress = on_published, on_progress
        self._publishers: List[Publisher] = []
        self._image: Optional[Image] = None
        self._layout: Optional[Layout] = None
        self._published: Optional[Published] = None
        self._known = False  # whether `_published` was asked for
        self._released: Optional[str] = None  # path of what the publishers have released, and is not known to be served
        self._passed: Optional[str] = None  # path of a manifest that the barrier decided against
        self._stop = threading.Event()
        self._lease = Lease(reader.objects, f"reader-{site}")

    def stop(self) -> None:
        """From any thread or signal handler."""
        self._stop.set()

    def run(self) -> None:
        """Follows the newest version until `stop`. What fails is tried again, with pauses that grow to 30 s."""
        pause = _PAUSE_SECONDS
        self._on_published(f"site {self._site} follows {self._reader.objects.url}")
        try:
            while not self._stop.is_set():
                try:
                    if (target := self._newest()) is not None:
                        self._publish(target)
                    self._lease.renew()
                    pause = _PAUSE_SECONDS
                    self._stop.wait(self._poll)
                except Exception as error:  # whatever it is, engines serve what they have, and this goes on
                    self.figures.failed(error)
                    log.warning("%s; tried again in %.0f s", error, pause)
                    self._stop.wait(pause * random.uniform(0.7, 1.3))
                    pause = min(2 * pause, _PAUSE_SECONDS_MAX)
        finally:
            self.close()

    def publish_exactly(self, version: int) -> None:
        """Publishes this version and returns when it is served. WeightwireError: it is not."""
        try:
            target = self._reader.version(version)
            self._ask_what_is_published()
            self._publish(target)
        finally:
            self.close()

    def close(self) -> None:
        self._lease.drop()
        self._close_publishers()

    def _newest(self) -> Optional[Manifest]:
        """None: nothing that is newer than what this site has."""
        latest = self._reader.latest()
        if latest is None:
            return None
        self.figures.seen(*latest.order)
        self._ask_what_is_published()
        if self._publishers and all(publisher.attached for publisher in self._publishers) and self._published is not None and \
                latest.order <= (self._published.lineage, self._published.version):
            return None
        if latest.manifest.path == self._passed:
            return None
        return self._reader.manifest(latest.manifest)

    def _ask_what_is_published(self) -> None:
        """Of this site, by its last follower."""
        if self._known:
            return
        try:
            data, _ = self._reader.objects.get(f"{SITES}/{self._site}.json", bytes_max=1 << 16)
            said = json.loads(bytes(data).decode())
            self._published = Published(str(said["state"]), int(said["version"]), int(said["lineage"]), int(said["site_lineage"]))
        except StoreError as error:
            if error.kind != "missing":
                raise
        except (ValueError, KeyError, TypeError):
            pass  # then it is as if there was none
        self._known = True

    def _publish(self, target: Manifest) -> None:
        started = time.monotonic()
        image = self._bound(target)
        self._reclaim()
        held = [image.manifest] if image.manifest is not None else []
        lineage = self._lineage_for(target)
        if lineage == 0:
            self.figures.done(target.lineage, target.version, "same", "read", 0, 0)
            last = self._published
            if last is None or (last.lineage, last.version) < target.order:
                self._published = Published(target.state, target.version, target.lineage, last.site_lineage if last is not None else 0)
            return
        with ThreadPoolExecutor(1) as pool:  # a lease that comes too late is not fatal
            pool.submit(self._lease.hold, [*held, target])
            loaded = self._reader.load(target, image, self._on_progress)
        kind = "anchor" if loaded.manifest.kind == "anchor" or (loaded.steps and not held) else "delta"
        self.figures.moved("read", loaded.bytes, loaded.objects)
        if self._barrier is not None and not self._barrier.pass_(target, self._stop):
            self._passed = target.path
            if not self._stop.is_set():
                error = StoreError(f"{target.name}: not all sites had it in time, so no site publishes it", kind="refused",
                                   remedy="see why the others are late: their followers' metrics and logs")
                self.figures.failed(error, "barrier")
                log.warning("%s", error)
            return
        self._release(target, lineage)
        site_lineage = self._publishers[0].lineage
        self._published = Published(target.state, target.version, target.lineage, site_lineage)
        self._tell(target.link, site_lineage)
        self._lease.hold([target])
        self.figures.done(target.lineage, target.version, kind, "read", 0, 0)
        self._on_published(f"{target.name}: {loaded.bytes} bytes in {loaded.objects} objects, {time.monotonic() - started:.2f} s, "
                           f"{target.folder}")

    def _lineage_for(self, target: Manifest) -> int:
        """In which lineage of this site it is published; 0: this site has it."""
        publisher = self._publishers[0]
        if publisher.lineage:
            return publisher.lineage
        floor, newest = publisher.committed, publisher._session.lineage or 1
        if target.version > floor:
            return newest
        last = self._published
        if last is not None and last.state == target.state and (last.site_lineage, last.version) == (newest, floor):
            return 0
        if last is not None and (last.lineage, last.site_lineage) == (target.lineage, newest) and last.version < target.version:
            return 0  # the last follower ended after it, or a newer one, was committed, and before it said so
        if last is not None and (last.lineage, last.version) < (target.lineage, target.version):
            return newest + 1
        if last is None and target.lineage > newest:
            return newest + 1
        if (target.version, target.lineage) != (floor, newest):
            log.warning("%s is not published: this site has committed %d of lineage %d already", target.name, floor, newest)
        return 0

    def _needs_lineage(self, target: Manifest) -> bool:
        """Its number is not above the last one, so it begins a lineage of this site; a rank has one for as long as it is attached."""
        last = self._published
        return bool(self._publishers[0].lineage) and last is not None and target.version <= last.version

    def _release(self, target: Manifest, lineage: int) -> None:
        """Publishes what the image holds; returns when it may change again. What was released before, and nobody could say whether it
        is served, is not published again: that would be refused."""
        end = time.monotonic() + self._deadline
        if self._released != target.path:
            releases = [publisher.publish(target.version, lineage=lineage, deadline=self._deadline) for publisher in self._publishers]
            for release in releases:
                while True:
                    try:
                        release.wait_released(min(1.0, max(0.01, end - time.monotonic())))
                        break
                    except errors.DeadlineError:
                        if time.monotonic() >= end or self._stop.is_set():
                            raise
            self._released = target.path
        if self._coordinator is not None:
            with Client(self._coordinator) as client:
                client.wait_version(target.version, max(0.0, end - time.monotonic()), lineage=self._publishers[0].lineage)

    def _reclaim(self) -> None:
        """Before bytes change, nobody reads them. WeightwireError: the agent does not say so."""
        for publisher in self._publishers:
            publisher.reclaim()

    def _bound(self, target: Manifest) -> Image:
        """The image of the target's layout, in memory that is shared with the agent."""
        if self._image is not None and self._layout is not None and self._layout.digest == target.layout and all(
                publisher.attached for publisher in self._publishers) and not self._needs_lineage(target):
            return self._image
        layout = self._reader.layout(target.layout)
        old = self._image if self._layout is not None and self._layout.digest == target.layout else None
        self._close_publishers()
        world = len(layout.ranks)
        arrays: List[Arrays] = []
        try:
            for rank in range(world):
                self._publishers.append(Publisher(rank=rank, world_size=world, group=self._group, job=self._job, agent=self._agent))
            for publisher, metas in zip(self._publishers, layout.ranks):
                arrays.append(cast(Arrays, publisher.bind(layout.config, layout.spec, metas)))
            image = Image(layout, arrays)
        except BaseException:
            self._close_publishers()
            raise
        if old is not None:
            image.copy_from(old)  # it was lost with its agent, not its bytes
        self._image, self._layout = image, layout
        return image

    def _close_publishers(self) -> None:
        closing, self._publishers, self._image, self._released = self._publishers, [], None, None
        if closing:
            with ThreadPoolExecutor(len(closing)) as pool:  # together: a rank alone is a lost one
                list(pool.map(Publisher.close, closing))

    def _tell(self, link: Link, site_lineage: int) -> None:
        record = {"format": f"{FORMAT}-site", "number": NUMBER, "site": self._site, "path": link.path, "state": link.state,
                  "version": link.version, "lineage": link.lineage, "site_lineage": site_lineage}
        try:
            self._reader.objects.put(f"{SITES}/{self._site}.json", json.dumps(record).encode())
        except StoreError as error:  # a site that may only read its store is one
            log.info("%s", error)


def sites(reader: Reader) -> List[Tuple[str, int, int]]:
    """Name, version and lineage (of the store) of what each site has published, as it says itself."""
    found = []
    for one in reader.objects.list(SITES):
        try:
            said = json.loads(bytes(reader.objects.get(one.path, bytes_max=1 << 16)[0]).decode())
            found.append((str(said["site"]), int(said["version"]), int(said["lineage"])))
        except (StoreError, ValueError, KeyError, TypeError):
            continue
    return found
