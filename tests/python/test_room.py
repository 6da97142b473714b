"""Subscribers with one buffer, on a real agent: versions are moved over what was served, with the application's consent."""

import time

import pytest

from conftest import BINARIES, until
from demo import oracle
from demo.fleet import Daemon
from test_client import CONFIG, assert_serves, load, trainer
from weightwire import Client, Offer, RefusedError, RoomWanted, StaleError, Subscriber, TensorMeta

ROOM_SECONDS = 1.0


@pytest.fixture
def daemon(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                     room_deadline_ms=int(1000 * ROOM_SECONDS))
    yield started
    assert started.stop() == 0


class Ranks:
    """Two ranks that serve from one buffer each; nothing happens unless a test says so."""

    def __init__(self, daemon):
        observed = [TensorMeta(n, "BF16", s) for n, s in oracle.vllm_shapes(CONFIG, 2).items()]
        self.ranks = [Subscriber(group="engine", rank=rank, world_size=2, agent=daemon.agent_socket, buffers=1)
                      for rank in range(2)]
        for rank in self.ranks:
            rank.bind(CONFIG, "vllm:tp2", observed)

    def events(self, kind):
        found = [rank.wait_event(20) for rank in self.ranks]
        assert all(isinstance(event, kind) for event in found), found
        return found

    def make_room(self):
        for rank, wanted in zip(self.ranks, self.events(RoomWanted)):
            rank.make_room(wanted)
            assert rank.serving is None and rank.params is None

    def flip(self):
        offers = self.events(Offer)
        for rank, offer in zip(self.ranks, offers):
            rank.flip(offer)
        self.ranks[0].acknowledge(offers[0])
        return offers[0].version

    def close(self):
        for rank in self.ranks:
            rank.close()


@pytest.fixture
def job(daemon, groups):
    """(trainer, ranks, client); version 1 is served."""
    with Client(daemon.grpc) as client:
        groups += [trainer(daemon), Ranks(daemon)]
        releases = [p.publish(1) for p in groups[0].publishers]
        assert groups[1].flip() == 1
        [release.wait_released(20) for release in releases]
        yield groups[0], groups[1], client


def publish(source, version, seed, **options):
    hf = load(source, seed)
    return hf, [publisher.publish(version, **options) for publisher in source.publishers]


def test_each_version_overwrites_the_one_before(job):
    source, engine, _ = job
    addresses = [array.__array_interface__["data"][0] for rank in engine.ranks for array in rank.params.values()]
    for version in (2, 3, 9):
        hf, releases = publish(source, version, seed=version)
        engine.make_room()
        assert engine.flip() == version
        assert_serves(engine, hf)
        [release.wait_released(20) for release in releases]
        assert addresses == [array.__array_interface__["data"][0] for rank in engine.ranks
                             for array in rank.params.values()]


def test_nothing_moves_before_every_rank_has_made_room(job):
    source, engine, client = job
    publish(source, 2, seed=2)
    wanted = engine.events(RoomWanted)
    engine.ranks[0].make_room(wanted[0])
    assert engine.ranks[1].wait_event(0.2) is None
    before = {name: array.copy() for name, array in engine.ranks[1].params.items()}
    assert next(e for e in client.status().epochs if e.version == 2).phase == "preparing"
    assert all((engine.ranks[1].params[name] == array).all() for name, array in before.items())
    engine.ranks[1].make_room(wanted[1])
    assert engine.flip() == 2


def test_a_version_that_is_aborted_fences_the_ranks_and_the_next_one_finds_them(job):
    source, engine, client = job
    publish(source, 2, seed=2, manual_commit=True)
    engine.make_room()
    client.abort(client.wait_staged(2, 20).epoch)
    end = time.monotonic() + 20
    while any(rank.last_fence is None for rank in engine.ranks):
        assert time.monotonic() < end, "an empty rank was not fenced"
        time.sleep(0.02)
    assert "given up for an epoch that failed" in str(engine.ranks[0].last_fence)
    # Version 1 is gone, and nobody else has it: the next version is the first one of the new incarnations.
    hf, releases = publish(source, 3, seed=3)
    assert engine.flip() == 3
    assert_serves(engine, hf)


def test_a_wish_that_was_taken_back_leaves_what_is_served(job):
    source, engine, client = job
    publish(source, 2, seed=2)
    wanted = engine.events(RoomWanted)
    epoch = next(e.epoch for e in client.status().epochs if e.version == 2)
    client.abort(epoch)
    until("every rank has heard of it", lambda: any(
        e.epoch == epoch and e.phase == "aborted" for e in client.status().epochs))
    for rank, wish in zip(engine.ranks, wanted):
        with pytest.raises(StaleError, match="no room is wanted"):
            rank.make_room(wish)
        assert rank.serving.version == 1 and rank.params is not None


def test_who_waits_for_offers_alone_is_told(job):
    source, engine, _ = job
    publish(source, 2, seed=2)
    with pytest.raises(RefusedError, match="room must be made"):
        engine.ranks[0].wait_offer(20)


def test_more_buffers_than_there_may_be_are_refused(daemon):
    with pytest.raises(RefusedError, match="is more than 8"):
        Subscriber(group="engine", rank=0, world_size=1, agent=daemon.agent_socket, buffers=9)
