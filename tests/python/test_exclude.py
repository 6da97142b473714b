"""An engine that dies while bytes move costs its own place: the same attempt goes on and commits at the others. Real
processes behind slow links, every byte compared with numpy."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from weightwire.v1 import types_pb2

from conftest import BINARIES
from demo import checkpoint
from demo.fleet import Engine, Fleet

CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_000}
SIZES = {"slot_bytes": 256 << 10, "chunk_bytes": 128 << 10, "segment_bytes_max": 32 << 10, "slots_in_pool": 64}
POLICIES = {"all": {}, "quorum": {"commit_policy": "quorum", "commit_quorum": 2, "laggard_grace_ms": 20_000}}
READ = 'weightwire_transfer_bytes_total{direction="in",transport="tcp"}'
SECONDS = 2.5  # that a version takes to each engine


def verify(fleet: Fleet, folder: str, version: int, engines: list[Engine]) -> None:
    for count, wrong, serving in fleet.each(fleet.engine_ranks(engines), "verify", version, folder):
        assert serving == version and wrong == 0 and count > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dies", ["its process", "its agent too"])
def test_a_version_goes_on_without_an_engine_that_dies_while_bytes_move(tmp_path, policy, dies):
    nbytes = sum(2 * int(np.prod(shape)) for shape in checkpoint.hf_shapes(CONFIG).values())
    engines = [Engine(f"engine-{name}", 1, "tcp") for name in "abc"]
    others, victim = [engines[0], engines[2]], engines[1]
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines, options={**SIZES, **POLICIES[policy], "fanout": "star"},
               agent_options={**SIZES, "rate_limit": int(nbytes / SECONDS)}) as fleet:
        for version in (1, 2):
            folder = str(tmp_path / f"v{version}")
            checkpoint.write(folder, CONFIG, seed=version)
            fleet.each(fleet.trainers, "load", folder)
            if version == 1:
                fleet.publish(version)
                fleet.wait_serving(version)
        before = {engine.name: engine.agent.counter(READ) for engine in engines}
        released: list = []
        publisher = threading.Thread(target=lambda: released.append(fleet.publish(2)))
        publisher.start()
        fleet.wait("bytes move", lambda s: any(e.version == 2 and e.phase == types_pb2.EPOCH_PHASE_TRANSFERRING
                                               for e in s.epochs) and victim.agent.counter(READ) > before[victim.name])
        if dies == "its agent too":
            fleet.kill_agent(victim)
        victim.ranks[0].kill()
        publisher.join(60)
        assert released, "the trainer is released: every byte is verified at the others"
        status = fleet.wait_serving(2, others)
        of_version = [e for e in status.epochs if e.version == 2 and e.kind == types_pb2.EPOCH_KIND_PUBLISH]
        assert [(e.attempt, e.phase) for e in of_version] == [(1, types_pb2.EPOCH_PHASE_COMMITTED)]
        assert list(of_version[0].left_out) == ["engine-b"]
        assert sorted(of_version[0].engines) == ["engine-a", "engine-c"]
        assert of_version[0].bytes == 2 * nbytes, "what the lost engine had read does not count as delivered"
        for engine in others:
            again = engine.agent.counter(READ) - before[engine.name] - nbytes
            assert again <= 0, f"{engine.name} read {again:,.0f} bytes twice"
        verify(fleet, folder, 2, others)
        if dies == "its agent too":
            fleet.start_agent(victim)
        victim.ranks[0].restart()
        victim.ranks[0].wait_ready()
        fleet.wait_serving(2)
        verify(fleet, folder, 2, engines)
        assert fleet.hub.counter('weightwire_publishes_given_up_total{reason="member_lost"}') == 0
