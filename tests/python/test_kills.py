"""SIGKILL to relays and to sources at moments by chance, in a chain or a tree of engines with narrow links. Every version
ends committed or aborted with the bytes right, and who survives reads hardly a byte twice.

`WEIGHTWIRE_KILLS` (default 4) kills; `./dev test long` runs 24 of them. `WEIGHTWIRE_SEED` repeats a run."""

from __future__ import annotations

import os
import random
import threading
import time

import numpy as np
import pytest
from weightwire.v1 import types_pb2

from conftest import BINARIES
from demo import checkpoint
from demo.fleet import Engine, Fleet

KILLS = int(os.environ.get("WEIGHTWIRE_KILLS", "4"))
SEED = int(os.environ.get("WEIGHTWIRE_SEED", "1"))
CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_000}
SLOT = 256 << 10
LINKS = {"slot_bytes": SLOT, "chunk_bytes": 128 << 10, "segment_bytes_max": 32 << 10, "slots_in_pool": 64}
SENT = 'weightwire_transfer_bytes_total{direction="out",transport="tcp"}'
MOVED = 'weightwire_transfer_bytes_total{direction="in",transport="tcp"}'


class Rounds:
    """One fleet through many versions, each of them hit once."""

    def __init__(self, fleet: Fleet, directory, seconds: float, relays: int):
        """`relays`: so many of the first engines pass bytes on."""
        self.fleet, self.directory, self.seconds, self.relays = fleet, str(directory), seconds, relays
        self.random = random.Random(SEED)
        self.version = 0
        self.hit_while_moving = 0

    def load(self) -> None:
        self.version += 1
        checkpoint.write(self.directory, CONFIG, seed=self.version)
        self.fleet.each(self.fleet.trainers, "load", self.directory)

    def verify(self, engines: list[Engine], version: int) -> None:
        for engine in engines:
            count, wrong, serving = engine.ranks[0].ask("verify", version, self.directory)
            assert serving == version and wrong == 0 and count > 0, (
                f"{engine.name} serves version {serving}, {wrong} of {count} elements differ from version {version}")

    def publish_and(self, strike):
        """Publishes the version; `strike` happens at a moment of its transfer by chance. Returns the failure, or None."""
        failures = []

        def publish():
            try:
                self.fleet.publish(self.version)
            except (RuntimeError, EOFError, OSError) as error:  # a rank says why, or is dead
                failures.append(error)

        publisher = threading.Thread(target=publish)
        publisher.start()
        time.sleep(self.random.uniform(0, self.seconds))
        moving = any(e.version == self.version and e.phase == types_pb2.EPOCH_PHASE_TRANSFERRING
                     for e in self.fleet.status().epochs)
        self.hit_while_moving += moving
        strike()
        publisher.join(90)
        assert not publisher.is_alive(), f"version {self.version} was neither released nor given up"
        return failures[0] if failures else None

    def kill_relay(self) -> None:
        victim = self.fleet.engines[self.random.randrange(self.relays)]
        others = [engine for engine in self.fleet.engines if engine is not victim]
        self.load()
        before = [engine.agent.counter(MOVED) for engine in others]

        def strike():
            self.fleet.kill_agent(victim)
            victim.ranks[0].kill()

        assert self.publish_and(strike) is None
        self.fleet.wait_serving(self.version, others)
        self.verify(others, self.version)
        for engine, moved in zip(others, before):
            again = engine.agent.counter(MOVED) - moved - self.planned()
            assert again <= 2 * SLOT, f"{engine.name} read {again:,.0f} bytes twice after {victim.name} was lost"
        self.fleet.start_agent(victim)
        victim.ranks[0].restart()
        victim.ranks[0].wait_ready()
        self.fleet.wait_serving(self.version, [victim])
        self.verify([victim], self.version)

    def kill_source(self) -> None:
        served = self.version
        self.load()
        victim = self.fleet.trainers[self.random.randrange(len(self.fleet.trainers))]
        self.publish_and(victim.kill)
        ended = (types_pb2.EPOCH_PHASE_COMMITTED, types_pb2.EPOCH_PHASE_ABORTED)
        members = 3 + len(self.fleet.engines)
        status = self.fleet.wait(
            "the loss is known and the version has ended", lambda s: len(s.participants) == members
            and all(e.phase in ended for e in s.epochs if e.version == self.version))
        serving = {e.version for e in status.engines}
        assert serving in ({served}, {self.version}), f"engines serve {serving}"
        if serving == {served}:
            checkpoint.write(self.directory, CONFIG, seed=served)
        self.verify(self.fleet.engines, *serving)
        victim.restart()
        victim.wait_ready()
        self.fleet.wait("the trainer is complete again", lambda s: len(s.participants) == members + 1)

    def planned(self) -> int:
        return max(e.bytes for e in self.fleet.status().epochs if e.version == self.version) // 2


@pytest.mark.parametrize("fanout, readers", [("chain", [0, 1, 1]), ("tree", [0, 0, 0, 2, 2])])
def test_relays_and_sources_are_killed_at_any_moment(tmp_path, fanout, readers):
    """`readers`: of each engine, sorted. In a tree hosts are in the order of their namespaces, so that any engine may relay."""
    if fanout == "tree" and os.geteuid() != 0:
        pytest.skip("a tree needs several hosts, and namespaces that make them need root")
    nbytes = sum(2 * int(np.prod(shape)) for shape in checkpoint.hf_shapes(CONFIG).values())
    rate = int(nbytes / 0.8)  # a version takes 0.8 s to each engine
    limits = {"rate_limit": rate, **LINKS}
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=[Engine(f"engine-{i}", 1, "tcp") for i in range(len(readers))],
               options={**limits, "fanout": fanout}, agent_options=limits, own_hosts=fanout == "tree") as fleet:
        rounds = Rounds(fleet, tmp_path, 0.9 if fanout == "chain" else 1.8, 2 if fanout == "chain" else len(readers))
        rounds.load()
        fleet.publish(rounds.version)
        fleet.wait_serving(rounds.version)
        assert sorted(round(engine.agent.counter(SENT) / nbytes) for engine in fleet.engines) == readers
        for kill in range(KILLS):
            (rounds.kill_source if kill % 4 == 3 else rounds.kill_relay)()
        rounds.load()
        fleet.publish(rounds.version)
        fleet.wait_serving(rounds.version)
        rounds.verify(fleet.engines, rounds.version)
    print(f"{KILLS} kills, {rounds.hit_while_moving} while bytes moved")
    assert rounds.hit_while_moving > KILLS // 4
