"""Writers, sites and a collector on a simulated store with faults (store_sim.py), for many seeds; and planted faults, all of which
must be caught. WEIGHTWIRE_SEEDS: how many (default 100); WEIGHTWIRE_FIRST: the first one."""

from __future__ import annotations

import os

import pytest

import store_sim
from weightwire.store import follower, reading, retention, uploading, writer
from weightwire.store.objects import StoreError

SEEDS = int(os.environ.get("WEIGHTWIRE_SEEDS", "100"))
FIRST = int(os.environ.get("WEIGHTWIRE_FIRST", "1"))
#: Within so many seeds each planted fault is caught.
CAUGHT_WITHIN = 400

pytestmark = pytest.mark.usefixtures("store_environment")


def test_no_seed_finds_a_wrong_version_a_lost_one_or_a_standstill():
    wrong = []
    for seed in range(FIRST, FIRST + SEEDS):
        try:
            store_sim.simulate(seed)
        except store_sim.Violation as violation:
            wrong.append(f"WEIGHTWIRE_FIRST={seed} WEIGHTWIRE_SEEDS=1: {violation}")
    assert not wrong, "\n".join(wrong)


def test_a_seed_is_the_same_again():
    assert store_sim.simulate(FIRST) == store_sim.simulate(FIRST)


def _overwrites(patch) -> None:
    """A store that passes over conditions, which the probe of Objects refuses."""
    patch.setattr(store_sim.Store, "keeps_conditions", False)


def _pointer_first(patch) -> None:
    """The pointer is written before the manifest."""
    put_manifest, point_to, late = uploading.Uploader._put_manifest, uploading.Uploader._point_to, {}

    def put(self, manifest):
        if manifest.file == uploading.ANCHOR:
            return put_manifest(self, manifest)
        late[id(self)] = manifest
        return uploading.replace(manifest, digest=uploading.digest(manifest.text() + b"\n"))

    def point(self, manifest):
        point_to(self, manifest)
        put_manifest(self, late.pop(id(self)))
    patch.setattr(uploading.Uploader, "_put_manifest", put)
    patch.setattr(uploading.Uploader, "_point_to", point)


def _manifest_first(patch) -> None:
    """A manifest counts although a part of it was not written."""
    put_parts = uploading.Uploader._put_parts

    def put(self, manifest, now, base, on_progress):
        objects, left = self._objects, [2]

        class Some:
            def put(self, path, data):
                left[0] -= 1
                return objects.put(path, data) if left[0] != 0 else ""
        self._objects = Some()
        try:
            return put_parts(self, manifest, now, base, on_progress)
        finally:
            self._objects = objects
    patch.setattr(uploading.Uploader, "_put_parts", put)


def _nothing_compared(patch) -> None:
    """Neither an object's digest nor that of what it makes is looked at."""
    def read(self, manifest, rank, number):
        return self.objects.get(manifest.object(rank, number))[0]

    def apply(self, manifest, rank, number, data, pieces):
        reading.decode(self._library, data, pieces, whole=manifest.kind == "anchor", where="")
    patch.setattr(reading.Reader, "read_part", read)
    patch.setattr(reading.Reader, "apply", apply)


def _one_folder(patch) -> None:
    """All attempts to store a version write to the same folder."""
    stand_ins = store_sim.Simulation._virtual

    def virtual(self):
        context = stand_ins(self)
        enter = context.__enter__

        class Context:
            def __enter__(self):
                enter()
                uploading.new_folder = lambda version: f"versions/{version:020d}-{0:012x}"

            def __exit__(self, *what):
                return context.__exit__(*what)
        return Context()
    patch.setattr(store_sim.Simulation, "_virtual", virtual)


def _stale_base(patch) -> None:
    """A writer that was overtaken makes its changes against what it holds, and says they are against what there is."""
    store = writer.Writer._store

    def keeps(self, copied):
        before = self._base
        if before is None and self._held is not None:
            self._uploader.head, self._base = self._uploader.adopt(), self._held
        done = store(self, copied)
        self._held = self._base
        return done
    patch.setattr(writer.Writer, "_held", None, raising=False)
    patch.setattr(writer.Writer, "_store", keeps)


def _collects_leased(patch) -> None:
    patch.setattr(retention, "_leases", lambda _objects, _now: {})


def _collects_chains(patch) -> None:
    """What the versions that are kept are made of is not kept."""
    def keep(report, reader, manifests, folders, now, keep, *_more):
        for folder in sorted(manifests, key=lambda f: manifests[f].order, reverse=True)[:keep]:
            report.kept[folder] = "is one of the newest"
    patch.setattr(retention, "_keep", keep)


def _collects_what_is_written(patch) -> None:
    """What has no manifest yet goes at once."""
    collect = store_sim.gc
    patch.setattr(store_sim, "gc", lambda reader, keep, grace_seconds: collect(reader, keep=keep, grace_seconds=-1.0))


def _begins_a_lineage(patch) -> None:
    """A follower that comes after one that was killed takes what that had published for an older lineage (a fault of an earlier release)."""
    lineage_for = follower.Follower._lineage_for

    def begins(self, target):
        last, publisher = self._published, self._publishers[0]
        if not publisher.lineage and last is not None and last.version < target.version <= publisher.committed:
            return publisher._session.lineage + 1
        return lineage_for(self, target)
    patch.setattr(follower.Follower, "_lineage_for", begins)


def _publishes_twice(patch) -> None:
    """A version that was released, and whose commit nobody could tell, is published again (a fault of an earlier release)."""
    release = follower.Follower._release

    def again(self, target, lineage):
        self._released = None
        release(self, target, lineage)
    patch.setattr(follower.Follower, "_release", again)


def _half_applied(patch) -> None:
    """A part that was changed half-way is taken for what it was before."""
    load_part = reading.Reader._load_part

    def load(self, steps, image, place, took):
        rank, number = place
        before = image.contents[rank][number]
        try:
            load_part(self, steps, image, place, took)
        except StoreError:
            image.contents[rank][number] = before
            raise

    def read(self, manifest, rank, number):
        return self.objects.get(manifest.object(rank, number))[0]
    patch.setattr(reading.Reader, "_load_part", load)
    patch.setattr(reading.Reader, "read_part", read)


def _needs_a_named_anchor(patch) -> None:
    """The anchor that the newest version names must be there, though one beside it does as well (a fault of an earlier release)."""
    def anchor_of(self, found):
        return self._reader.manifest(found.anchor) if found.anchor else None
    patch.setattr(uploading.Uploader, "_anchor_of", anchor_of)


def _gives_up(patch) -> None:
    """A writer tries nothing again."""
    store = writer.Writer._store

    def once(self, copied):
        try:
            return store(self, copied)
        except StoreError:
            return True
    patch.setattr(writer.Writer, "_store", once)


PLANTED = {plant.__name__.strip("_"): plant for plant in (
    _overwrites, _pointer_first, _manifest_first, _nothing_compared, _one_folder, _stale_base, _collects_leased, _collects_chains,
    _collects_what_is_written, _begins_a_lineage, _publishes_twice, _half_applied, _needs_a_named_anchor, _gives_up)}


def caught(name: str, patch) -> tuple[int, str]:
    """At which seed of CAUGHT_WITHIN, and what it said; (0, ""): at none."""
    PLANTED[name](patch)
    for seed in range(1, CAUGHT_WITHIN + 1):
        try:
            store_sim.simulate(seed)
        except store_sim.Violation as violation:
            return seed, str(violation)
    return 0, ""


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_caught(name, monkeypatch):
    seed, _ = caught(name, monkeypatch)
    assert seed
