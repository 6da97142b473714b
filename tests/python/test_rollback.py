"""Going back to a version that engines still hold, with every byte of every rank compared: real processes, one of
them killed between the versions."""

from __future__ import annotations

import subprocess

import pytest

import test_client
from conftest import BINARIES, EngineRanks, until
from demo import checkpoint, oracle
from demo.fleet import Engine, Fleet
from weightwire import Client, StaleError, TensorMeta

CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_000}


class Rollbacks:
    def __init__(self, fleet: Fleet, directory):
        self.fleet, self.directory = fleet, directory
        self.client = Client(fleet.hub.grpc)

    def publish(self, version: int) -> None:
        checkpoint.write(str(self.directory / f"v{version}"), CONFIG, seed=version)
        self.fleet.each(self.fleet.trainers, "load", str(self.directory / f"v{version}"))
        self.fleet.publish(version)
        self.fleet.wait_serving(version)
        self.verify(version)

    def verify(self, version: int, engines: list[Engine] | None = None) -> None:
        for engine in engines or self.fleet.engines:
            for count, wrong, serving in self.fleet.each(engine.ranks, "verify", version,
                                                         str(self.directory / f"v{version}")):
                assert serving == version and wrong == 0 and count > 0, (
                    f"{engine.name} serves version {serving}; {wrong} of {count} elements are not version {version}'s")

    def back_to(self, version: int, engines: tuple[str, ...], filling: tuple[str, ...] = ()):
        before = self.client.status()
        result = self.client.rollback(version, timeout=30)
        assert (result.version, result.engines, result.filling) == (version, engines, filling)
        assert result.epoch > before.committed_epoch > result.held_epoch > 0
        holders = [e for e in self.fleet.engines if e.name in engines]
        self.verify(version, holders)
        status = self.client.wait_epoch(result, timeout=30)
        assert status.committed_version == version and {e.lag_versions for e in status.engines} == {0}
        self.verify(version)
        epoch = next(e for e in status.epochs if e.epoch == result.epoch)
        assert (epoch.kind, epoch.bytes, epoch.bytes_kept) == ("rollback", 0, 0)


@pytest.fixture
def rollbacks(tmp_path):
    engines = [Engine("engine-a", 2, "shm"), Engine("engine-b", 1, "tcp")]
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines) as fleet:
        yield Rollbacks(fleet, tmp_path)


def test_engines_serve_the_version_before_again_and_the_trainer_goes_on(rollbacks):
    for version in (1, 2):
        rollbacks.publish(version)
    assert {e.held_version for e in rollbacks.client.status().engines} == {1}
    rollbacks.back_to(1, ("engine-a", "engine-b"))
    rollbacks.back_to(2, ("engine-a", "engine-b"))
    rollbacks.back_to(1, ("engine-a", "engine-b"))
    again = rollbacks.client.rollback(1)
    assert again.held_epoch == 0 and again.epoch == rollbacks.client.status().committed_epoch, "it is committed"
    rollbacks.publish(3)


@pytest.fixture
def retaining(tmp_path):
    """engine-a holds three versions beside the one it serves, engine-b one."""
    engines = [Engine("engine-a", 2, "shm"), Engine("engine-b", 1, "tcp")]  # the first one's agent is the hub's
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines, options={"retain_versions": 3}) as fleet:
        yield Rollbacks(fleet, tmp_path)


def test_every_version_that_is_retained_can_be_gone_back_to(retaining):
    for version in (1, 2, 3, 4, 5):
        retaining.publish(version)
    held = {e.name: (e.held_version, *e.held_beyond) for e in retaining.client.status().engines}
    assert held == {"engine-a": (4, 3, 2), "engine-b": (4,)}
    table = subprocess.run([BINARIES / "wwctl", "engines", "-o", "wide", "--address", retaining.fleet.hub.grpc], text=True,
                           capture_output=True, check=True).stdout
    assert "4, 3, 2" in table
    with pytest.raises(StaleError, match=r"holds version 4 \(epoch \d+\), version 3 \(epoch \d+\), version 2 "):
        retaining.client.rollback(1)
    retaining.back_to(2, ("engine-a",), ("engine-b",))
    retaining.back_to(5, ("engine-a", "engine-b"))
    retaining.back_to(3, ("engine-a",), ("engine-b",))
    retaining.publish(6)
    retaining.back_to(5, ("engine-a",), ("engine-b",))


class Picky(EngineRanks):
    """Refuses version 2, once."""

    def _follow(self):
        refused = 0
        while not self._stop.is_set():
            offer = self.ranks[0].wait_offer(0.2)
            if offer is None:
                continue
            if offer.version == 2 and not refused:
                refused = 1
                self.ranks[0].refuse(offer, "a canary sang")
                continue
            self.ranks[0].flip(offer)
            self.ranks[0].acknowledge(offer)
            with self.flipped:
                self.flipped.notify_all()


def test_a_version_that_an_engine_refuses_is_taken_back_everywhere(daemon, groups):
    observed = [TensorMeta(n, "BF16", s) for n, s in oracle.vllm_shapes(test_client.CONFIG, 1).items()]
    groups += [test_client.trainer(daemon), test_client.engine(daemon, "engine-a", 2),
               Picky(daemon.agent_socket, "picky", test_client.CONFIG, "vllm:tp1", [observed])]
    first = test_client.load(groups[0], 1)
    groups[0].publish(1)
    with Client(daemon.grpc) as client:
        client.wait_version(1, timeout=30)
        test_client.load(groups[0], 2)
        assert {r.epoch for r in groups[0].publish(2)}, "released: the trainer is not held up"
        # Released is staged: version 2 may not be committed yet, and everyone still be on version 1.
        until("everyone is back on version 1", lambda: groups[2].ranks[0].last_fence and (s := client.status()).committed_version == 1 and
              [(e.name, e.version, e.ready) for e in s.engines] == [("engine-a", 1, True), ("picky", 1, True)], 30)
        for e in groups[1:]:
            test_client.assert_serves(e, first)
        assert "a canary sang" in str(groups[2].ranks[0].last_fence)
        assert daemon.counter('weightwire_versions_refused_total{outcome="rolled_back"}') == 1
        third = test_client.load(groups[0], 3)
        groups[0].publish(3)
        client.wait_version(3, timeout=30)
    for e in groups[1:]:
        test_client.assert_serves(e, third)


def test_an_engine_killed_in_between_is_filled_and_what_nobody_holds_is_refused(rollbacks):
    for version in (1, 2):
        rollbacks.publish(version)
    victim = rollbacks.fleet.engines[0]
    victim.ranks[1].kill()
    rollbacks.fleet.wait("engine-a is gone", lambda s: all(e.version == 0 for e in s.engines if e.name == "engine-a"))
    victim.ranks[1].restart()
    victim.ranks[1].wait_ready()
    rollbacks.fleet.wait_serving(2)
    rollbacks.verify(2)
    rollbacks.back_to(1, ("engine-b",), filling=("engine-a",))
    rollbacks.publish(3)
    with pytest.raises(StaleError) as refused:
        rollbacks.client.rollback(2)
    text = str(refused.value)
    assert refused.value.reason == "stale_version" and "no engine still holds version 2" in text
    assert "engine-b serves version 3" in text and "holds version 1" in text
    assert "weightwire.checkpoint push" in refused.value.remedy
    rollbacks.verify(3)
    said = subprocess.run([BINARIES / "wwctl", "rollback", "--address", rollbacks.fleet.hub.grpc, "1"], timeout=60,
                          capture_output=True, text=True, check=True)
    assert said.stdout.startswith("rolled back to version 1 (epoch ") and "served by engine-a, engine-b" in said.stdout
    rollbacks.verify(1)
