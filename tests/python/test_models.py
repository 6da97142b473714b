"""Several models of one trainer, published together to engines that each hold one of them. Values come from the oracle of the demo,
which shares no code with the coordinator's schemes."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

import store_reader
from conftest import BINARIES, EngineRanks, read_safetensors
from demo import checkpoint, oracle
from demo.fleet import Daemon
from weightwire import Client, Publisher, RefusedError, Subscriber, TensorMeta, WeightwireError, boxes
from weightwire.checkpoint import convert
from weightwire.v1 import types_pb2

# Odd sizes, and nothing alike but some names.
ACTOR = {**checkpoint.SMALL, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "vocab_size": 251}
REWARD = {**checkpoint.SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 97,
          "tie_word_embeddings": not checkpoint.SMALL["tie_word_embeddings"]}
CONFIGS = {"actor": ACTOR, "reward": REWARD}
SMALL_SLOTS = {"slot_bytes": 16 << 10, "chunk_bytes": 8 << 10, "segment_bytes_max": 5_000}
#: How the two ranks of the trainer hold each model: tensor parallel, pipeline parallel.
PARALLEL = {"actor": (2, 1), "reward": (1, 2)}


def content(model: str, version: int) -> dict[str, np.ndarray]:
    random_bits = np.random.default_rng([version, len(model)])
    return {name: random_bits.integers(0, 1 << 16, shape, dtype=np.uint16)
            for name, shape in checkpoint.hf_shapes(CONFIGS[model]).items()}


class Trainer:
    """Both ranks, each with its part of both models."""

    def __init__(self, agent: str):
        self.publishers, self.params = [], []
        for rank in (0, 1):
            publisher = Publisher(rank=rank, world_size=2, agent=agent)
            self.publishers.append(publisher)
            self.params.append(publisher.bind_boxes(types_pb2.LayoutSubmission(models=types_pb2.LayoutSubmission.Models(
                models=[self.part(model, rank) for model in CONFIGS]))))

    @staticmethod
    def part(model: str, rank: int) -> types_pb2.LayoutSubmission.Model:
        tp, pp = PARALLEL[model]
        held = [TensorMeta(name, "BF16", array.shape) for name, array in Trainer.shards(model, 1, rank)]
        scheme = types_pb2.LayoutSubmission.Scheme(config_json=json.dumps(CONFIGS[model]),
                                                   topology=types_pb2.ParallelTopology(spec=f"megatron:tp{tp},pp{pp}"),
                                                   observed=[meta.to_proto() for meta in held])
        return types_pb2.LayoutSubmission.Model(name=model, rank=rank, world_size=2, layout=types_pb2.LayoutSubmission(scheme=scheme))

    @staticmethod
    def shards(model: str, version: int, rank: int):
        tp, pp = PARALLEL[model]
        return oracle.megatron(CONFIGS[model], content(model, version), tp, pp, rank)

    def publish(self, number: int, **versions: int) -> None:
        """Version `number`, with these versions of models; a model that is not named is not written to."""
        releases = []
        for rank, (publisher, params) in enumerate(zip(self.publishers, self.params)):
            for model, version in versions.items():
                for name, array in self.shards(model, version, rank):
                    params[f"{model}::{name}"][...] = array
            unchanged = [name for name in params if name.split("::")[0] not in versions]
            releases.append(publisher.publish(number, unchanged=unchanged))
        for release in releases:
            release.wait_released(60)

    def close(self) -> None:
        for publisher in self.publishers:
            publisher.close()


class Engine(EngineRanks):
    def __init__(self, agent: str, name: str, model: str, tp: int = 1):
        self._model, self._tp = model, tp
        shapes = [TensorMeta(n, "BF16", s) for n, s in oracle.vllm_shapes(CONFIGS[model], tp).items()]
        super().__init__(agent, name, CONFIGS[model], f"vllm:tp{tp}", [shapes] * tp, model_name=model)

    def serves(self, number: int, version: int) -> None:
        """Version `number` of the job, in which its model is `version`, element by element."""
        self.wait_version(number)
        for rank, subscriber in enumerate(self.ranks):
            for name, want in oracle.vllm(CONFIGS[self._model], content(self._model, version), self._tp, rank):
                assert np.array_equal(subscriber.params[name][:len(want)], want), (name, rank)


@pytest.fixture
def hub(tmp_path):
    """Starts a coordinator with an agent; further agents join it."""
    started: list[Daemon] = []

    def start(name: str = "hub", **options) -> Daemon:
        place = {"role": "agent", "coordinator": started[0].grpc} if started else {"role": "all", "listen": "127.0.0.1:0"}
        started.append(Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, **{**SMALL_SLOTS, **place, **options}))
        return started[-1]
    yield start
    for daemon in reversed(started):
        assert daemon.stop() == 0, daemon.name


@pytest.mark.parametrize("transports", ["[shm]", "[tcp]"])
def test_each_engine_gets_its_own_model_whatever_its_layout(hub, groups, transports):
    first = hub(transports=transports)
    second = hub("engine", transports=transports)
    trainer = Trainer(first.agent_socket)
    groups.append(trainer)
    engines = [Engine(second.agent_socket, "actor-a", "actor", 2), Engine(second.agent_socket, "reward-a", "reward"),
               Engine(first.agent_socket, "actor-b", "actor"), Engine(first.agent_socket, "reward-b", "reward", 2)]
    groups += engines
    for version in (1, 2, 3):
        trainer.publish(version, actor=version, reward=version)
        for engine in engines:
            engine.serves(version, version)
    with Client(first.grpc) as client:
        assert client.wait_version(3, timeout=30).committed_version == 3
        report = client.verify()
        assert report.equal, report


def test_a_model_that_is_not_published_stays_and_its_version_is_that_of_the_job(hub, groups):
    first = hub(transports="[tcp]", delta="off")
    second = hub("engine", transports="[tcp]", delta="off")
    trainer = Trainer(first.agent_socket)
    actor, reward = Engine(second.agent_socket, "actor-a", "actor"), Engine(second.agent_socket, "reward-a", "reward")
    groups += [trainer, actor, reward]
    reward_bytes = 2 * sum(map(np.size, content("reward", 1).values()))
    trainer.publish(1, actor=1, reward=1)
    trainer.publish(2, actor=2)  # of the reward model the buffer that is to take it has nothing yet
    trainer.publish(3, actor=3)
    actor.serves(3, 3)
    reward.serves(3, 1)
    read = lambda: second.counter('weightwire_transfer_bytes_total{direction="in",transport="tcp"}')  # noqa: E731
    before = read()
    trainer.publish(4, actor=4)
    actor.serves(4, 4)
    reward.serves(4, 1)
    moved = read() - before
    actor_bytes = 2 * sum(map(np.size, content("actor", 1).values()))
    assert actor_bytes <= moved < actor_bytes + reward_bytes / 2, (moved, actor_bytes, reward_bytes)
    trainer.publish(5, reward=2)
    actor.serves(5, 4)
    reward.serves(5, 2)


def test_an_engine_that_comes_late_is_filled_by_one_of_its_model(hub, groups):
    daemon = hub()
    trainer = Trainer(daemon.agent_socket)
    engines = [Engine(daemon.agent_socket, "a-actor", "actor"), Engine(daemon.agent_socket, "b-reward", "reward")]
    groups += engines
    trainer.publish(1, actor=1, reward=1)
    for engine in engines:
        engine.serves(1, 1)
    trainer.close()  # nobody but engines has the weights now
    late = [Engine(daemon.agent_socket, "c-reward", "reward", 2), Engine(daemon.agent_socket, "d-actor", "actor", 2)]
    groups += late
    for engine in late:
        engine.serves(1, 1)


def test_a_rollback_takes_both_back_or_neither(hub, groups):
    daemon = hub()
    trainer = Trainer(daemon.agent_socket)
    actor = Engine(daemon.agent_socket, "actor-a", "actor")
    groups += [trainer, actor]
    trainer.publish(1, actor=1, reward=1)
    actor.serves(1, 1)
    reward = Engine(daemon.agent_socket, "reward-a", "reward")
    groups.append(reward)
    trainer.publish(2, actor=2, reward=2)
    actor.serves(2, 2)
    reward.serves(2, 2)
    with Client(daemon.grpc) as client:
        client.wait_version(2, timeout=30)
        with pytest.raises(WeightwireError, match="no engine of reward still holds version 1"):
            client.rollback(1)
        trainer.publish(3, actor=3, reward=3)
        for engine in (actor, reward):
            engine.serves(3, 3)
        client.wait_version(3, timeout=30)
        client.rollback(2)
        actor.serves(2, 2)
        reward.serves(2, 2)


@pytest.fixture
def job(hub, groups, tmp_path):
    """A trainer of both models, an engine of each, and each model's config.json."""
    daemon = hub()
    trainer = Trainer(daemon.agent_socket)
    engines = [Engine(daemon.agent_socket, f"{model}-a", model) for model in CONFIGS]
    groups += [trainer, *engines]
    for model, config in CONFIGS.items():
        (tmp_path / f"{model}.json").write_text(json.dumps(config))
    return daemon, trainer, engines


def same(stored: dict[str, np.ndarray], model: str, version: int) -> bool:
    want = content(model, version)
    return stored.keys() == want.keys() and all(np.array_equal(stored[name].view(np.uint16), want[name]) for name in want)


@pytest.mark.parametrize("to", ["hf", "weightwire:vllm:tp2"])
def test_each_model_is_saved_as_a_checkpoint_of_its_own(job, tmp_path, to):
    daemon, trainer, engines = job
    trainer.publish(1, actor=1, reward=1)
    trainer.publish(2, actor=2)
    for model, version in (("actor", 2), ("reward", 1)):
        done = subprocess.run([sys.executable, "-m", "weightwire.checkpoint", "save", tmp_path / model, "--to", to, "--config",
                               tmp_path / f"{model}.json", "--model-name", model, "--version", "2", "--agent", daemon.agent_socket,
                               "--timeout", "60"], stdout=subprocess.PIPE, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / model}: version 2\n")
        convert(tmp_path / model, tmp_path / f"{model}-hf", "hf")
        assert same({name: bits for name, (_, bits) in read_safetensors(tmp_path / f"{model}-hf/model.safetensors").items()}, model, version)
        for engine in engines:
            assert engine.ranks[0].serving.version == 2


def test_each_model_is_stored_at_an_address_of_its_own(job, tmp_path):
    daemon, trainer, _ = job
    writers = {model: subprocess.Popen([sys.executable, "-m", "weightwire.store", "write", f"file://{tmp_path}/{model}", "--config",
                                        tmp_path / f"{model}.json", "--model-name", model, "--group", f"store-{model}", "--agent",
                                        daemon.agent_socket, "--coordinator", daemon.grpc, "--quiet"], stdout=subprocess.PIPE, text=True)
               for model in CONFIGS}
    try:
        for model, writer in writers.items():
            assert "1 ranks of hf" in writer.stdout.readline(), model
        trainer.publish(1, actor=1, reward=1)
        trainer.publish(2, actor=2)
        trainer.publish(3, actor=3, reward=3)
        with Client(daemon.grpc) as client:
            client.wait_version(3, timeout=60)
        for model, writer in writers.items():
            while "version 3" not in (line := writer.stdout.readline()):
                assert line, "the writer ended"
            ranks = store_reader.read(tmp_path / model, 3)
            assert same({name: np.frombuffer(data, np.uint16).reshape(shape) for name, (_, shape, data) in ranks[0].items()}, model, 3)
    finally:
        for writer in writers.values():
            writer.terminate()
            writer.wait(30)


def test_an_engine_says_which_model_it_holds(hub, groups):
    daemon = hub()
    trainer = Trainer(daemon.agent_socket)
    groups.append(trainer)
    whole = TensorMeta("model.norm.weight", "BF16", (ACTOR["hidden_size"],))
    layout = boxes.submission({whole.name: whole}, [boxes.whole(whole)])
    for name, said in [("", "does not say which it holds: actor, reward"), ("critic", "the trainer publishes actor, reward")]:
        with Subscriber(group="engine-a", rank=0, world_size=1, agent=daemon.agent_socket, model_name=name) as subscriber:
            subscriber.bind_submission(layout)
            with pytest.raises(WeightwireError, match=said):
                trainer.publish(1 if not name else 2, actor=1, reward=1)
    with Subscriber(group="engine-b", rank=0, world_size=1, agent=daemon.agent_socket, model_name="a model") as subscriber:
        with pytest.raises(RefusedError, match="no model can be called"):
            subscriber.bind_submission(layout)
