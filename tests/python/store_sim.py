"""A simulated store with writers, sites and a collector: the real Writer, Follower and gc, on virtual time, one call at a time.

Who goes on after each call is drawn from a seed, and so is what becomes of the call: it fails before or after it was done, its
answer is lost, its bytes are cut short or changed on the way, a pointer or a site's record that was read is some seconds old; its
caller is killed before it or after it. The agents around it are fakes too: engines that a writer reads, and a publisher that looks at
every byte. `simulate(seed)` raises Violation, which says what went wrong. All parts of a load move one after another here; the suites
with real processes move them side by side.

What must hold:
  bytes      what a site publishes under a version is what the trainer had under it, and its versions only grow, in one lineage
  pointer    latest.json never goes back, and what it names can be read to the last byte by a reader of this file's own
  retention  what a lease names, that lived when a collection began and still does, can be read when it ends
  recovery   when faults end, the newest version is stored and published everywhere, and the store is whole
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from functools import partial
from types import SimpleNamespace

import numpy as np

from weightwire import errors
from weightwire.checkpoint.library import library_of
from weightwire.memory import TensorMeta
from weightwire.store import Layout, Reader, StoreError, gc, verify
from weightwire.store import follower as follower_module
from weightwire.store import reading, retention, uploading
from weightwire.store import writer as writer_module
from weightwire.store.objects import Found

LAYOUT = Layout("hf", "{}", ((TensorMeta("a", "BF16", (70, 5)), TensorMeta("b", "F32", (90,)), TensorMeta("still", "BF16", (64,))),), 400)
FAULTS_END = 120.0  # virtual seconds
_RECOVERED_WITHIN = 240.0
_CALLS_MAX = 200_000
_SITES = ("east", "west")


class Violation(AssertionError):
    pass


class Killed(BaseException):
    """An actor's process is gone: nothing of it runs any more."""


class World:
    """Virtual time, and actors, each on a thread, of which one runs."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.now = 0.0
        self.actors: list[Actor] = []
        self._back = threading.Semaphore(0)
        self.wrong: BaseException | None = None
        self.calls = 0

    @property
    def calm(self) -> bool:
        return self.now >= FAULTS_END

    def spawn(self, name: str, run, again: bool = False) -> "Actor":
        """again: when it ends, it is started again some seconds later."""
        self.actors.append(Actor(self, name, run, again))
        return self.actors[-1]

    def run(self, end: float, done) -> bool:
        """Until `done()`, which is asked between two calls, or virtual time is over."""
        while self.now < end and not done():
            ready = [actor for actor in self.actors if actor.wakes <= self.now]
            if not ready:
                self.now = min(actor.wakes for actor in self.actors)
                continue
            self.calls += 1
            if self.calls > _CALLS_MAX:
                raise Violation(f"{_CALLS_MAX} calls and no end: somebody asks without a pause")
            actor = self.random.choice(ready)
            actor.turn.release()
            self._back.acquire()
            if actor.ended:
                actor.thread.join()
                self.actors.remove(actor)
                if actor.again:
                    self.spawn(actor.name, actor.run, True).wakes = self.now + self.random.uniform(0.5, 8)
            if self.wrong is not None:
                raise self.wrong
        return done()

    def violated(self, what: str) -> None:
        """Ends the simulation, whatever the caller of an actor's call would make of an exception."""
        self.wrong = self.wrong or Violation(what)
        raise Killed

    def hand_over(self) -> None:
        self._back.release()

    def stop(self) -> None:
        for actor in self.actors:
            actor.dead = True
            actor.turn.release()
            actor.thread.join()


class Actor:
    def __init__(self, world: World, name: str, run, again: bool):
        self.world, self.name, self.run, self.again = world, name, run, again
        self.wakes, self.dead, self.ended = world.now, False, False
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.dead:
                self.run(self)
        except Killed:
            pass
        except BaseException as error:
            if not self.dead:
                self.world.wrong = error
        self.ended = True
        self.world.hand_over()

    def pause(self, seconds: float) -> None:
        """Others run, for so long at least. Killed: this one was."""
        if self.dead:
            raise Killed
        self.wakes = self.world.now + seconds
        self.world.hand_over()
        self.turn.acquire()
        if self.dead:
            raise Killed


class Kept:
    """An object, and what it was before."""

    def __init__(self, data: bytes, etag: str, modified: datetime, before: "Kept | None"):
        self.data, self.etag, self.modified, self.before = data, etag, modified, before
        if before is not None:
            before.before = None


class Store:
    """What a store holds, without faults."""

    #: As S3 does; a planted fault is a store that does not.
    keeps_conditions = True

    def __init__(self, world: World):
        self.world, self.objects, self._writes = world, {}, 0
        self.latest = (0, 0)

    @property
    def time(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=self.world.now)

    def write(self, path: str, data: bytes) -> str:
        self._writes += 1
        self.objects[path] = Kept(bytes(data), f'"{self._writes}"', self.time, self.objects.get(path))
        if path == "latest.json":
            order = self._order()
            if order <= self.latest:
                self.world.violated(f"the pointer went from {self.latest} to {order}")
            self.latest = order
            self.check_newest("the pointer was written")
        return self.objects[path].etag

    def remove(self, path: str) -> None:
        if self.objects.pop(path, None) is not None:
            self.check_newest(f"{path} was deleted")

    def _order(self) -> tuple[int, int]:
        said = json.loads(self.objects["latest.json"].data)["manifest"]
        return said["lineage"], said["version"]

    def check_newest(self, why: str) -> None:
        if "latest.json" in self.objects:
            said = json.loads(self.objects["latest.json"].data)["manifest"]
            if wrong := self.unreadable(said["path"], said["digest"]):
                self.world.violated(f"{why}, and the newest version cannot be read: {wrong}")

    def unreadable(self, path: str, digest: str | None = None) -> str:
        """Why not all bytes of a version can be had, by records alone; empty: they can. Shares no code with the reader."""
        while True:
            if path not in self.objects:
                return f"{path} is not there"
            record = self.objects[path].data
            if digest not in (None, hashlib.sha256(record).hexdigest()):
                return f"{path} is another one than was named"
            said = json.loads(record.split(b"\n")[0])
            beside = f"{said['folder']}/anchor.json"
            if said["kind"] == "delta" and beside in self.objects:
                said = json.loads(self.objects[beside].data.split(b"\n")[0])
            for rank, parts in enumerate(said["ranks"]):
                for number, (size, summed, _) in enumerate(parts):
                    part = self.objects.get(f"{said['folder']}/{said['kind']}-{rank:05d}-{number:05d}")
                    if part is None or len(part.data) != size or hashlib.sha256(part.data).hexdigest() != summed:
                        return f"{said['folder']}/{said['kind']}-{rank:05d}-{number:05d} is not there, or another one"
            if said["kind"] == "anchor":
                return ""
            path, digest = said["base"]["path"], said["base"]["digest"]

    def leases(self) -> dict[str, list[str]]:
        """Of those that live, the folders."""
        found = {}
        for path, kept in self.objects.items():
            if path.startswith("leases/") and path.endswith(".json"):
                said = json.loads(kept.data)
                if self.time - kept.modified < timedelta(seconds=said["seconds"]):
                    found[path] = said["holds"]
        return found


class Client:
    """The store as one actor has it, with the faults of a bad day. Has the methods of weightwire.store.Objects."""

    url = "sim://store"

    def __init__(self, store: Store, actor: Actor, faults: float, kills: float, slow: float = 1.0):
        """Shares of calls that fail, and at which the actor is killed; by how much its calls are slower than those of others."""
        self._store, self._actor, self._faults, self._kills = store, actor, faults, kills
        self._random, self._slow = store.world.random, slow

    def at(self, path: str) -> str:
        return f"{self.url}/{path}"

    @contextmanager
    def _call(self, path: str):
        """Yields whether the answer is lost; the call itself happens inside. Raises instead of it, or after it."""
        world, draw = self._store.world, self._random
        self._actor.pause(self._slow * draw.uniform(0.001, 0.2))
        chance, kill = (1.0, 1.0) if world.calm else (draw.random(), draw.random())
        if kill < self._kills / 2:
            self._die()
        if chance < self._faults / 2:
            self._actor.pause(draw.uniform(0, 8))  # it was tried again and again
            raise StoreError(f"{path}: 503", kind="unavailable")
        yield
        if kill < self._kills:
            self._die()
        if chance < self._faults:
            raise StoreError(f"{path}: no answer", kind="unavailable")

    def _die(self) -> None:
        self._actor.dead = True
        raise Killed

    def get(self, path: str, bytes_max: int = 1 << 30):
        with self._call(path):
            kept = self._store.objects.get(path)
            if kept is None:
                raise StoreError(f"{path}: not there", kind="missing")
            data, draw = kept.data, self._random
            if not self._store.world.calm:
                if path == "latest.json" and kept.before is not None and draw.random() < 0.1 and \
                        self._store.time - kept.modified < timedelta(seconds=5):
                    kept = kept.before
                    data = kept.data
                if "/delta-" in path or "/anchor-" in path:
                    what = draw.random()
                    if what < self._faults / 4:
                        data = data[:draw.randrange(len(data))]
                    elif what < self._faults / 2:
                        at = draw.randrange(len(data))
                        data = data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1:]
            return data, Found(path, len(kept.data), kept.modified, kept.etag)

    def find(self, path: str):
        with self._call(path):
            kept = self._store.objects.get(path)
            return kept and Found(path, len(kept.data), kept.modified, kept.etag)

    def put(self, path: str, data) -> str:
        with self._call(path):
            return self._store.write(path, data)

    def check_conditions(self) -> None:
        pass

    def put_if(self, path: str, data: bytes, etag: str | None) -> str:
        with self._call(path):
            kept = self._store.objects.get(path)
            if self._store.keeps_conditions and etag != (kept and kept.etag):
                raise StoreError(f"{path} was written by somebody else", kind="lost_race")
            written = self._store.write(path, data)
            if not self._store.world.calm and self._random.random() < self._faults:
                raise StoreError(f"{path}: repeated, after it had been done", kind="lost_race")
            return written

    def list(self, folder: str):
        with self._call(folder):
            found = [Found(path, len(kept.data), kept.modified, kept.etag) for path, kept in sorted(self._store.objects.items())
                     if path.startswith(folder.rstrip("/") + "/")]
        return iter(found)

    def folders(self, folder: str) -> list[str]:
        with self._call(folder):
            return sorted({path.split("/")[1] for path in self._store.objects if path.startswith(folder + "/")})

    def delete(self, paths) -> None:
        """One after another: a store has no transaction."""
        for path in paths:
            with self._call(path):
                self._store.remove(path)


class Waits:
    """Stands in for an Event, or a Condition, of an actor: to wait is to let virtual time pass."""

    def __init__(self, actor: Actor):
        self._actor = actor

    def is_set(self) -> bool:
        return self._actor.dead

    def wait(self, seconds: float) -> bool:
        self._actor.pause(seconds)
        return False

    def wait_for(self, condition, timeout: float) -> bool:
        if not condition():
            self._actor.pause(timeout)
        return condition()

    def set(self) -> None:
        pass

    def notify_all(self) -> None:
        pass

    def __enter__(self) -> "Waits":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Inline:
    """A pool of one, which is the caller; what is submitted runs at once, or as late as it can."""

    def __init__(self, random: random.Random, _workers: int):
        self._random, self._submitted = random, []

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        for function, arguments in self._submitted:
            function(*arguments)

    def map(self, function, *over):
        return [function(*one) for one in zip(*over)]

    def submit(self, function, *arguments) -> None:
        if self._random.random() < 0.5:
            return function(*arguments)
        self._submitted.append((function, arguments))


class Trainer:
    """What each version is, and its newest one as an engine serves it."""

    def __init__(self, world: World):
        self.world, self.version = world, 0
        self.bits = np.random.default_rng(world.random.randrange(2**32))
        self.params = {meta.name: self.bits.integers(0, 2**16, meta.shape).astype(np.uint16 if meta.dtype == "BF16" else np.uint32) for meta in LAYOUT.ranks[0]}
        self.truth: dict[int, dict[str, bytes]] = {}
        self.serving = None

    def run(self, actor: Actor) -> None:
        while not self.world.calm:
            self.version += self.world.random.choice((1, 1, 1, 3))
            self.params = dict(self.params)
            for name in ("a", "b"):
                if self.world.random.random() < 0.8:
                    moved = self.params[name].copy()
                    moved[self.bits.random(moved.shape) < 0.05] += 1
                    self.params[name] = moved
            self.truth[self.version] = {name: array.tobytes() for name, array in self.params.items()}
            self.serving = SimpleNamespace(version=self.version, lineage=1, epoch=self.version, order=(1, self.version))
            actor.pause(self.world.random.expovariate(1 / 6))


class Site:
    """The fleet around a follower: which versions it has committed."""

    def __init__(self, world: World, trainer: Trainer, name: str):
        self.world, self.trainer, self.name, self.committed, self.follower = world, trainer, name, 0, None


class Publishing:
    """The publisher of a follower; looks at every byte when it is published, and once more when its release has come."""

    def __init__(self, site: Site, actor: Actor):
        self._site, self._actor = site, actor
        self.attached, self.lineage, self.committed, self._accepted = True, 0, site.committed, 0
        self._session = SimpleNamespace(lineage=1)

    def bind(self, _config, _spec, metas):
        self._arrays = {meta.name: np.zeros(meta.shape, np.uint16 if meta.dtype == "BF16" else np.uint32) for meta in metas}
        return self._arrays

    def reclaim(self) -> None:
        pass

    def close(self) -> None:
        pass

    def publish(self, version: int, *, lineage: int, deadline: float):
        self._look(version)
        if lineage != 1:
            self._site.world.violated(f"site {self._site.name} begins lineage {lineage} with version {version}, and the trainer has one")
        if version <= max(self._accepted, self._site.committed):
            raise errors.StaleError(f"{version} is not newer", code="FAILED_PRECONDITION", reason="stale_version")
        draw, world = self._site.world.random.random(), self._site.world
        if draw < 0.05 and not world.calm:
            raise errors.WeightwireError("the fleet refuses it", code="ABORTED", reason="aborted")
        self.lineage = lineage
        self._actor.pause(world.random.uniform(0.1, 2.0))
        self._look(version)
        self._site.committed = self._accepted = version
        self._actor.pause(world.random.uniform(0.0, 0.2))
        return SimpleNamespace(wait_released=lambda _timeout: None)

    def _look(self, version: int) -> None:
        want = self._site.trainer.truth.get(version)
        if want is None or {name: array.tobytes() for name, array in self._arrays.items()} != want:
            self._site.world.violated(f"site {self._site.name} publishes bytes as version {version} that are not the trainer's")


class Simulation:
    def __init__(self, seed: int):
        self.world = World(seed)
        draw = self.world.random
        self.store, self.trainer = Store(self.world), Trainer(self.world)
        self.sites = [Site(self.world, self.trainer, name) for name in _SITES]
        self.faults = draw.choice((0.0, 0.03, 0.1, 0.3))
        self.kills = draw.choice((0.0, 0.005, 0.02))
        self.anchor_every = draw.choice((1, 2, 4, 16))
        self.keep = draw.choice((1, 1, 2, 4))
        self.writers = draw.choice((1, 1, 2))

    def client(self, actor: Actor) -> Client:
        return Client(self.store, actor, self.faults, self.kills, self.world.random.choice((1, 1, 1, 30)))

    def run(self) -> int:
        """The calls that it took."""
        world = self.world
        with self._virtual():
            try:
                world.spawn("trainer", self.trainer.run)
                for number in range(self.writers):
                    world.spawn(f"writer-{number}", self._writer, True)
                for site in self.sites:
                    world.spawn(f"follower-{site.name}", lambda actor, site=site: self._follower(actor, site), True)
                world.spawn("collector", self._collector, True)
                world.run(FAULTS_END, lambda: False)
                if not world.run(FAULTS_END + _RECOVERED_WITHIN, self._is_recovered):
                    raise Violation(f"{_RECOVERED_WITHIN:g} s after the last fault the store has {self.store.latest[1]}, sites have "
                                    f"{[site.committed for site in self.sites]}, and the trainer {self.trainer.version}")
            finally:
                world.stop()
            self._check_store()
        return world.calls

    def _writer(self, actor: Actor) -> None:
        made = writer_module.Writer(Reader(self.client(actor), workers=1), "{}", group=actor.name, anchor_every=self.anchor_every, part_bytes=400, workers=1)
        made._stop = made._wake = Waits(actor)
        rank, pool = SimpleNamespace(params=None, serving=None), Inline(self.world.random, 1)

        def serve(engine: Actor) -> None:
            """As _follow_fleet does, with one engine."""
            while not actor.dead and not actor.ended:
                rank.serving, rank.params = self.trainer.serving, self.trainer.params
                if rank.serving is not None and rank.serving is not made._handled:
                    made._copy([rank], pool, rank.serving)
                engine.pause(0.5)
        self.world.spawn(f"engine of {actor.name}", serve)
        made._store_all()

    def _follower(self, actor: Actor, site: Site) -> None:
        made = follower_module.Follower(Reader(self.client(actor), workers=1), site.name, coordinator=site.name, poll_seconds=1.0)
        made._stop = Waits(actor)
        site.follower = made
        made._publisher_of_sim = lambda: Publishing(site, actor)
        _CURRENT[actor.thread] = made
        made.run()

    @contextmanager
    def _coordinator(self, name: str):
        """Of a site; a follower asks it when its version was released. Now and then it does not answer."""
        site = next(one for one in self.sites if one.name == name)

        def wait_version(version: int, _timeout: float, lineage: int) -> None:
            if self.world.random.random() < 0.05 and not self.world.calm:
                raise errors.UnavailableError("the coordinator does not answer", code="UNAVAILABLE", reason="unavailable")
            if site.committed < version:
                self.world.violated(f"site {name} waits for {version}, which it has not committed")
        yield SimpleNamespace(wait_version=wait_version)

    def _collector(self, actor: Actor) -> None:
        while True:
            actor.pause(self.world.random.uniform(2, 30))
            before = {folder: path for path, holds in self.store.leases().items() for folder in holds
                      if not self.store.unreadable(f"{folder}/manifest.json")}
            try:
                gc(Reader(self.client(actor), workers=1), keep=self.keep, grace_seconds=60.0)
            except StoreError:
                continue
            still = self.store.leases()
            for folder, path in before.items():
                if folder in still.get(path, ()) and (wrong := self.store.unreadable(f"{folder}/manifest.json")):
                    raise Violation(f"{path} names {folder}, which was collected: {wrong}")

    def _is_recovered(self) -> bool:
        newest = self.trainer.version
        return self.world.calm and self.store.latest[1] == newest and all(
            site.committed == newest and site.follower._published is not None and site.follower._published.version == newest for site in self.sites)

    def _check_store(self) -> None:
        actor = SimpleNamespace(pause=lambda _seconds: None, dead=False)
        reader = Reader(Client(self.store, actor, 0, 0), workers=1)
        if bad := [one for one in verify(reader, workers=1) if one.error and one.path == reader.latest().manifest.path]:
            raise Violation(f"verify: {bad[0].path}: {bad[0].error}")

    @contextmanager
    def _virtual(self):
        """Clocks, pools and publishers of the modules are those of this simulation."""
        clock = SimpleNamespace(monotonic=lambda: self.world.now)
        draw = SimpleNamespace(uniform=self.world.random.uniform)
        stand_ins = [(module, "time", clock) for module in (retention, writer_module, follower_module)]
        stand_ins += [(module, "random", draw) for module in (writer_module, follower_module)]
        stand_ins += [(module, "ThreadPoolExecutor", partial(Inline, self.world.random)) for module in (reading, uploading, follower_module)]
        stand_ins += [(writer_module, "planner_of", lambda _config, _wwctl: SimpleNamespace(layout=lambda _spec: LAYOUT.ranks)),
                      (uploading, "new_folder", lambda version: f"versions/{version:020d}-{self.world.random.randrange(16**12):012x}"),
                      (follower_module, "Client", self._coordinator),
                      (follower_module, "Publisher", lambda **_: _CURRENT[threading.current_thread()]._publisher_of_sim())]
        before = [(module, name, getattr(module, name)) for module, name, _ in stand_ins]
        for module, name, value in stand_ins:
            setattr(module, name, value)
        try:
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)
            _CURRENT.clear()


_CURRENT: dict[threading.Thread, follower_module.Follower] = {}


def simulate(seed: int) -> int:
    library_of(None)
    return Simulation(seed).run()
