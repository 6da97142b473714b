"""A version does not wait for the slow: real processes, one engine behind a link that is limited, every byte compared."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request

import pytest

from conftest import BINARIES
from demo import checkpoint
from demo.fleet import Engine, Fleet
from weightwire import Client

CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_000}
SIZES = {"slot_bytes": 1 << 20, "segment_bytes_max": 1 << 18, "chunk_bytes": 1 << 18}
QUORUM = {"commit_policy": "quorum", "commit_quorum": 2, "laggard_grace_ms": 200}


@pytest.fixture
def fleet():
    engines = [Engine("engine-a", 2, "shm"), Engine("engine-b", 1, "shm"), Engine("engine-c", 1, "tcp")]
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines, options={**QUORUM, **SIZES},
               agent_options={**SIZES, "rate_limit": 6 << 20}) as fleet:
        yield fleet


SMALL_SLOTS = {"slot_bytes": 1 << 18, "segment_bytes_max": 1 << 16, "chunk_bytes": 1 << 17, "window": 4, "slots_in_pool": 32}


def publish(fleet: Fleet, folder: str, version: int) -> None:
    checkpoint.write(folder, CONFIG, seed=version)
    fleet.each(fleet.trainers, "load", folder)
    fleet.publish(version)


def verify(fleet: Fleet, folder: str, version: int, engines: list[Engine]) -> None:
    for count, wrong, serving in fleet.each(fleet.engine_ranks(engines), "verify", version, folder):
        assert serving == version and wrong == 0 and count > 0


def ready(agent) -> bool:
    try:
        return urllib.request.urlopen(f"http://{agent.http}/readyz", timeout=10).status == 200
    except urllib.error.HTTPError as error:
        assert error.code == 503
        return False


def test_a_version_goes_on_without_a_laggard_which_is_filled_from_a_peer(fleet, tmp_path):
    fast, slow = fleet.engines[:2], fleet.engines[2]
    for version in (1, 2):
        folder = str(tmp_path / f"v{version}")
        publish(fleet, folder, version)
        status = fleet.wait_serving(version, fast)
        epoch = next(e for e in status.epochs if e.version == version and e.left_out)
        assert list(epoch.left_out) == ["engine-c"] and epoch.attempt <= 2  # in the first one where a source noticed it
        assert sorted(epoch.engines) == ["engine-a", "engine-b"]
        verify(fleet, folder, version, fast)
        left = next(e for e in status.engines if e.name == "engine-c")
        assert left.version == version - 1 and not ready(slow.agent)
        shown = subprocess.run([str(BINARIES / "wwctl"), "epochs", "--address", fleet.hub.grpc], capture_output=True,
                               text=True, timeout=30, check=True).stdout
        assert "without engine-c" in shown
        fleet.wait_serving(version)
        verify(fleet, folder, version, [slow])
        assert ready(slow.agent)
    assert fleet.hub.counter("weightwire_engines_left_behind_total") == 2
    with Client(fleet.hub.grpc) as client:
        fills = [e for e in client.status().epochs if e.kind == "fill" and e.phase == "committed"]
    assert [e.engines for e in fills] == [("engine-c",), ("engine-c",)]


def test_who_keeps_slots_that_others_wait_for_is_left_behind(tmp_path):
    """Engines of one layout, whose slots are free when the slowest has read them: alone it would need 20 s, as would they."""
    engines = [Engine(f"engine-{i}", 1, "tcp") for i in range(4)]
    engines[1].options = {"rate_limit": 800_000}
    options = {**QUORUM, "commit_quorum": 3, "fanout": "star", **SMALL_SLOTS}
    with Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines, options=options, agent_options=SMALL_SLOTS) as fleet:
        folder = str(tmp_path / "v1")
        started = time.monotonic()
        publish(fleet, folder, 1)
        status = fleet.wait_serving(1, engines[:1] + engines[2:])
        took = time.monotonic() - started
        epoch = next(e for e in status.epochs if e.version == 1 and e.left_out)
        assert list(epoch.left_out) == ["engine-1"] and took < 12
        assert fleet.hub.counter("weightwire_readers_detached_total") >= 1
        fleet.wait_serving(1)
        verify(fleet, folder, 1, engines)
