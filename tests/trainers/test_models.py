"""Several models in one process group, published together, arrive as megatron-core's own description says that they are."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import BINARIES, ROOT, HfEngine, read_safetensors
from demo.fleet import Daemon
from models_engine import digest
from models_ranks import disagree, publish_on_disjoint_ranks, train_apart, train_through_kills, train_two, train_verified
from weightwire import Client, Subscriber, boxes
from world import World

FIXTURES = ROOT / "tests/data/megatron"
CHECKPOINTS = {"actor": str(FIXTURES / "qwen2" / "hf"), "reward": str(FIXTURES / "qwen3_moe" / "hf")}
SEED = int(os.environ.get("WEIGHTWIRE_SEED", "1"))


@pytest.fixture
def engines(daemon):
    opened = {model: HfEngine(daemon.agent_socket, pathlib.Path(checkpoint), f"{model}-a", model_name=model)
              for model, checkpoint in CHECKPOINTS.items()}
    yield opened
    for engine in opened.values():
        engine.close()


def test_two_megatron_models_of_one_process_group_arrive_together(daemon, engines, tmp_path):
    with World(train_two, 4, daemon.agent_socket, CHECKPOINTS, str(tmp_path), 1, 3) as world:
        for version in (1, 2, 3):
            for model, engine in engines.items():
                engine.expect(version, tmp_path / f"{model}-v{version}.safetensors", world)
        world.join()
    for model in CHECKPOINTS:
        first, last = (read_safetensors(tmp_path / f"{model}-v{version}.safetensors") for version in (1, 3))
        assert any((first[name][1] != last[name][1]).any() for name in first), model


def test_what_is_not_published_stays_as_it_was_published(daemon, engines, tmp_path):
    with World(train_apart, 4, daemon.agent_socket, CHECKPOINTS, str(tmp_path)) as world:
        for version, of in ((1, {"actor": 1, "reward": 1}), (2, {"actor": 2, "reward": 1}), (3, {"actor": 2, "reward": 3})):
            for model, engine in engines.items():
                engine.expect(version, tmp_path / f"{model}-v{of[model]}.safetensors", world)
        world.join()


def test_each_model_is_compared_with_its_own_export(daemon, engines, tmp_path):
    with World(train_verified, 4, daemon.agent_socket, CHECKPOINTS, str(tmp_path)) as world:
        for version, of in ((1, {"actor": 1, "reward": 1}), (2, {"actor": 2, "reward": 2}), (5, {"actor": 5, "reward": 5}),
                            (6, {"actor": 6, "reward": 5})):
            for model, engine in engines.items():
                engine.expect(version, tmp_path / f"{model}-v{of[model]}.safetensors", world)
        world.join()


def test_models_on_disjoint_ranks_arrive_together(daemon, tmp_path):
    shapes = {"actor": {"embed.weight": (37, 12), "layers.0.weight": (20, 12), "layers.1.weight": (12, 12), "layers.1.bias": (12,)},
              "critic": {"weight": (3, 7), "bias": (3,)}, "draft": {"weight": (5, 5)}}
    from weightwire import TensorMeta
    with World(publish_on_disjoint_ranks, 4, daemon.agent_socket, str(tmp_path)) as world:
        subscribers = {}
        try:
            for model, its in shapes.items():
                metas = [TensorMeta(name, "F32", shape) for name, shape in its.items()]
                subscribers[model] = Subscriber(group=f"{model}-a", rank=0, world_size=1, agent=daemon.agent_socket, model_name=model)
                subscribers[model].bind_submission(boxes.submission({m.name: m for m in metas}, [boxes.whole(m) for m in metas]))
            for version in (1, 2, 3):
                for model, subscriber in subscribers.items():
                    offer = world.next_offer(subscriber)
                    assert offer.version == version
                    got = subscriber.flip(offer)
                    for name, (_, bits) in read_safetensors(tmp_path / f"{model}-v{version}.safetensors").items():
                        assert np.array_equal(got[name].view(bits.dtype), bits), (model, name, version)
                    subscriber.acknowledge(offer)
            world.join()
        finally:
            for subscriber in subscribers.values():
                subscriber.close()


def test_ranks_that_describe_no_one_model_are_refused_on_all_of_them(daemon):
    with World(disagree, 2, daemon.agent_socket) as world:
        world.join()


class Engine:
    """A process of models_engine.py, which the test kills and starts again."""

    def __init__(self, agent: str, name: str, model: str, flips: list[dict]):
        self.name, self.model, self._agent, self._flips = name, model, agent, flips
        self.lives = 0
        self.start()

    def start(self) -> None:
        self.lives += 1
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "client/python"), str(ROOT / "tests/trainers")])}
        self.process = subprocess.Popen([sys.executable, str(ROOT / "tests/trainers/models_engine.py"), self._agent, self.name, self.model,
                                         CHECKPOINTS[self.model]], stdout=subprocess.PIPE, text=True, env=environment)
        threading.Thread(target=self._read, args=(self.process, self.lives), daemon=True).start()

    def _read(self, process: subprocess.Popen, life: int) -> None:
        for line in process.stdout:
            self._flips.append({**json.loads(line), "life": life})

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def served(self) -> list[dict]:
        """What it flipped to since it was started last."""
        return [flip for flip in self._flips if flip["engine"] == self.name and flip["life"] == self.lives and flip["version"] > 0]


def test_twenty_versions_with_kills_are_served_of_both_models_or_of_neither(tmp_path):
    """In every version something is killed while it moves: an engine of either model, the coordinator, or a rank of the trainer. Then
    all engines serve it, each its own model to the byte, or none does; and nobody takes a version before all have left the one before
    the last."""
    dice, flips = random.Random(SEED), []
    rate = 4_000_000  # bytes a second: a version is long enough to be hit
    coordinator = dict(role="coordinator", state_dir=str(tmp_path / "coordinator"), lease_ms=2_000, heartbeat_ms=200)
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "coordinator"), "coordinator", listen="127.0.0.1:0", **coordinator)
    address = hub.grpc
    agents = [Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, role="agent", coordinator=address, transports="[tcp]",
                     rate_limit=rate, slot_bytes=256 << 10, chunk_bytes=128 << 10, segment_bytes_max=32 << 10)
              for name in ("trainer", "rollout")]
    engines = [Engine(agents[1].agent_socket, f"{model}-{i}", model, flips) for i in (0, 1) for model in CHECKPOINTS]
    world = World(train_through_kills, 4, agents[0].agent_socket, CHECKPOINTS, str(tmp_path), 1)
    committed, hit = 0, {"nothing": 0, "engine": 0, "coordinator": 0, "trainer": 0}

    def told_now() -> str:
        with Client(address) as client:
            status = client.status()
        lines = [f"kills {hit}, version {status.committed_version} is committed; waits for {status.waiting_for!r}"]
        lines += [f"{one.name}: {one.state}, version {one.version}, {one.last_error}" for one in status.engines]
        lines += [f"epoch {one.epoch}: {one.kind} of {one.version}, {one.phase}, {one.engines}, without {one.left_out}, {one.why}" for one in status.epochs[:4]]
        return "\n".join([*lines, *(f"{e.name} took {[flip['version'] for flip in e.served()]}" for e in engines)])

    def until(what: str, condition, seconds: float = 60):
        end = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < end, f"{what}: not within {seconds} s: {told_now()}\n{world.logs()}"
            time.sleep(0.01)
        return answer

    def wanted(version: int) -> dict[str, str]:
        return {model: digest({name: bits for name, (_, bits) in read_safetensors(tmp_path / f"{model}-v{version}.safetensors").items()})
                for model in CHECKPOINTS}

    def attempt(version: int):
        with Client(address) as client:
            return client.status().epoch_of(version)

    def told(version: int) -> bool:
        return all((tmp_path / f"told-{version}-{rank}").exists() for rank in range(4))

    def agreed(version: int, alive: list[Engine]) -> int | None:
        """The version that is committed, once nothing of `version` goes on and all serve it."""
        with Client(address) as client:
            status = client.status()
        last = status.epoch_of(version)
        ended = last is None or last.phase in ("committed", "aborted")
        same = all(engine.served() and engine.served()[-1]["version"] == status.committed_version for engine in alive)
        return status.committed_version if ended and same else None

    try:
        until("engines are there", lambda: {flip["engine"] for flip in flips} == {engine.name for engine in engines})
        for version in range(1, 21):
            what = "nothing" if version == 1 else dice.choice(["engine", "engine", "coordinator", "trainer"])
            (tmp_path / f"go-{version}").touch()
            until("it moves", lambda: (now := attempt(version)) is not None and now.phase != "preparing")
            time.sleep(dice.random() * 0.4)  # any moment
            hurt: Engine | None = None
            if what == "engine":
                hurt = dice.choice(engines)
                hurt.kill()
            elif what == "coordinator":
                hub.kill()
                hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "coordinator"), "coordinator", listen=address, **coordinator)
            elif what == "trainer":
                world.kill(dice.randrange(4))
            if what == "trainer":
                world.__exit__()
            else:
                until("its ranks are told", lambda: told(version))
            alive = [engine for engine in engines if engine is not hurt]
            now = until("all serve what is committed", lambda: agreed(version, alive))
            assert now in (committed, version), (version, what, now)
            hit[what] += 1
            committed, digests = now, wanted(now)
            for engine in alive:
                assert engine.served()[-1]["digest"] == digests[engine.model], (engine.name, version, what)
            if hurt is not None:
                hurt.start()
                last = until(f"{hurt.name} is filled with version {committed}", lambda: hurt.served() and hurt.served()[-1])
                assert (last["version"], last["digest"]) == (committed, digests[hurt.model]), (hurt.name, version)
            if what == "trainer":
                world = World(train_through_kills, 4, agents[0].agent_socket, CHECKPOINTS, str(tmp_path), version + 1)
        assert committed >= 10 and all(hit.values()), (committed, hit)
    finally:
        world.__exit__()
        for engine in engines:
            engine.kill()
        for daemon in [*agents, hub]:
            daemon.kill()
    # Over all that engines have said: between two versions there is a moment when all alive serve the same one.
    firsts, lasts = {}, {}
    for flip in flips:
        if flip["version"] > 0:
            firsts[flip["version"]] = min(flip["at"], firsts.get(flip["version"], flip["at"]))
    for flip in flips:
        lasts.setdefault((flip["engine"], flip["life"]), []).append((flip["at"], flip["version"]))
    order = sorted(firsts, key=lambda version: firsts[version])
    assert order == sorted(order), "versions begin in order"
    for (engine, life), its in lasts.items():
        taken = [version for _, version in its if version > 0]
        assert taken == sorted(set(taken)), (engine, life, taken)
        begun = [version for version in order if taken and taken[0] <= version <= taken[-1]]
        assert taken == begun, f"{engine} in its life {life} took {taken}, where others took {begun}"
