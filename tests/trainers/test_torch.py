"""Modules that hold whole tensors: publishing, receiving, and what may happen to parameters between versions."""

import json
import os
import signal
import time

import numpy as np
import pytest
import torch

import weightwire.fsdp
import weightwire.publisher
import weightwire.torch
from conftest import BINARIES, Daemon, read_safetensors
from torch_ranks import (make_checkpoint, one_cannot_read, parts_under_one_name, receive_alone, receive_apart, receive_freed,
                         train_replicated, wrapped_parameter)
from weightwire import Client, RefusedError, StaleError, Subscriber, TensorMeta, UnavailableError, boxes
from weightwire.hf_tensors import HfReader
from world import World


class Net(torch.nn.Module):
    """bf16 and fp32 parameters, a persistent buffer, a cache that is none, a tied parameter and a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=True, dtype=torch.bfloat16)
        self.out = torch.nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.register_buffer("cache", torch.randn(5), persistent=False)


def randomise(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.randint(9, tensor.shape))
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def same(module: torch.nn.Module, want: dict[str, torch.Tensor]) -> bool:
    state = module.state_dict()
    return state.keys() == want.keys() and all(torch.equal(state[n], want[n]) for n in want)


@pytest.fixture
def pair(daemon):
    """(trainer's module, its publisher, follower's module, its receiver)."""
    source, target = Net(), Net()
    with weightwire.torch.Publisher(source, agent=daemon.agent_socket) as publisher, \
            weightwire.torch.Receiver(target, group="follower", agent=daemon.agent_socket) as receiver:
        yield source, publisher, target, receiver


def test_parameters_and_persistent_buffers_arrive_in_place(pair):
    source, publisher, target, receiver = pair
    kept, cache = target.head.weight, target.cache.clone()
    for version in (1, 2, 5):
        want = randomise(source)
        release = publisher.publish(version)
        randomise(source)  # the trainer goes on at once: what was published is a copy
        assert receiver.receive(timeout=30).version == version
        assert same(target, want)
        release.wait_released(30)
    assert target.head.weight is kept and target.out.weight is target.embed.weight
    assert torch.equal(target.cache, cache)


@pytest.mark.parametrize("adapter", [weightwire.torch, weightwire.fsdp])
def test_what_is_said_of_changes_reaches_the_publisher(adapter):
    """Which refuses it before it looks for an agent."""
    with pytest.raises(RefusedError, match='delta is "sometimes"'):
        adapter.Publisher(Net(), agent="/none", delta="sometimes")


def test_parameters_may_be_replaced_and_moved_between_versions(pair):
    source, publisher, target, receiver = pair
    randomise(source)
    publisher.publish(1)
    assert receiver.receive(30).version == 1
    source.head.weight = torch.nn.Parameter(torch.randn(11, 6, dtype=torch.bfloat16))
    source.embed.weight.data = torch.randn(6, 11).t()  # other storage, other strides
    want = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    publisher.publish(2)
    assert receiver.receive(30).version == 2
    assert same(target, want)


def test_a_freed_parameter_is_refused_by_name_and_published_once_it_is_back(pair):
    source, publisher, target, receiver = pair
    want = randomise(source)
    storage = source.head.weight.untyped_storage()
    size, offloaded = storage.nbytes(), source.head.weight.detach().clone()
    storage.resize_(0)
    with pytest.raises(RefusedError) as refused:
        publisher.publish(1)
    assert refused.value.tensor == "head.weight" and "freed" in str(refused.value)
    storage.resize_(size)
    source.head.weight.data.copy_(offloaded)
    publisher.publish(1)
    assert receiver.receive(30).version == 1
    assert same(target, want)


def test_a_tensor_of_another_shape_is_refused_by_name(pair):
    source, publisher, _, _ = pair
    source.head = torch.nn.Linear(6, 12, dtype=torch.bfloat16)
    with pytest.raises(RefusedError) as refused:
        publisher.publish(1)
    assert refused.value.tensor in ("head.weight", "head.bias")
    assert "11" in str(refused.value) and "12" in str(refused.value)


def test_names_translate_and_leave_out(daemon):
    source = {"a.w": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    target = {"x.w": torch.zeros(2, 3)}
    with weightwire.torch.Publisher(source, agent=daemon.agent_socket,
                                    names=lambda name: None if name == "b" else f"x.{name[2:]}") as publisher, \
            weightwire.torch.Receiver(target, group="follower", agent=daemon.agent_socket) as receiver:
        publisher.publish(1)
        assert receiver.receive(30).version == 1
    assert torch.equal(target["x.w"], source["a.w"])


def test_an_export_by_a_name_that_is_not_known_is_refused_when_it_is_opened(daemon):
    with pytest.raises(RefusedError, match="verify='exprot'"):
        weightwire.torch.Publisher({"w": torch.ones(4)}, agent=daemon.agent_socket, verify="exprot")


def test_two_tensors_of_one_name_are_refused(daemon):
    with pytest.raises(RefusedError, match="two tensors"):
        weightwire.torch.Publisher({"a": torch.ones(1), "b": torch.ones(1)}, agent=daemon.agent_socket,
                                   names=lambda _: "same")


def test_data_parallel_replicas_publish_together(daemon, hf_engine, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "hf")
    engine = hf_engine(checkpoint)
    with World(train_replicated, 2, daemon.agent_socket, str(checkpoint), str(tmp_path), 3) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


def test_after_a_restart_of_the_sidecar_the_next_version_goes_out(tmp_path):
    """Both sides attach again by themselves; versions go on above those that the old one knew."""
    place = dict(role="all", listen="127.0.0.1:0")
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", **place)
    source, target = Net(), Net()
    try:
        with weightwire.torch.Publisher(source, agent=daemon.agent_socket) as publisher, \
                weightwire.torch.Receiver(target, group="follower", agent=daemon.agent_socket) as receiver:
            randomise(source)
            publisher.publish(1)
            assert receiver.receive(timeout=30).version == 1
            os.kill(daemon.pid, signal.SIGKILL)
            daemon.stop()
            deadline = time.monotonic() + 10
            while publisher.attached:
                assert time.monotonic() < deadline, "the publisher did not notice"
                time.sleep(0.01)
            with pytest.raises(UnavailableError):
                publisher.publish(2, deadline=0.5)
            daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", **place)
            want = randomise(source)
            publisher.publish(2, deadline=30)
            assert receiver.receive(timeout=30).version == 2 and same(target, want)
    finally:
        daemon.stop()


@pytest.fixture
def published(daemon):
    """Publishes version 1, all sevens; what receives it is for the test."""
    with weightwire.torch.Publisher({"a": torch.full((4,), 7.0)}, agent=daemon.agent_socket) as publisher:
        publisher.publish(1, deadline=120)
        yield daemon


def of_ranks(tmp_path) -> list:
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def test_a_rank_that_times_out_leaves_no_other_rank_in_a_barrier(published, tmp_path):
    with World(receive_apart, 2, published.agent_socket, str(tmp_path)) as world:
        world.join(120)
    assert of_ranks(tmp_path) == [{"versions": [None, 1], "values": [7.0] * 4}] * 2


def test_a_rank_that_does_not_call_receive_is_named_in_time(daemon, tmp_path):
    with World(receive_alone, 2, daemon.agent_socket, str(tmp_path)) as world:
        world.join(120)
    assert "did not all come" in (said := (tmp_path / "error").read_text()) and "1" in said and "receive()" in said


def test_a_rank_that_fails_fails_all_ranks_before_any_has_written(published, tmp_path):
    with World(receive_freed, 2, published.agent_socket, str(tmp_path)) as world:
        world.join(120)
    (first, *one), (second, *two) = of_ranks(tmp_path)
    assert "AbortedError" in first and "rank 1: RefusedError" in first and "freed" in second
    assert one == two == [1, [7.0] * 4]


@pytest.fixture
def reader(daemon):
    """(publisher of two tensors, reader of them)."""
    source = {"a": torch.full((4,), 7.0), "b": torch.full((3,), 8.0)}
    with weightwire.torch.Publisher(source, agent=daemon.agent_socket) as publisher, \
            HfReader([TensorMeta("a", "F32", (4,)), TensorMeta("b", "F32", (3,))], agent=daemon.agent_socket) as made:
        yield publisher, made


def served(daemon) -> int:
    with Client(daemon.grpc) as client:
        return max((e.version for e in client.status().engines if e.epoch), default=0)


def test_a_reader_acknowledges_only_what_its_consumer_took(daemon, reader):
    publisher, one = reader
    publisher.publish(1)
    with pytest.raises(ZeroDivisionError):
        for name, _ in one.tensors(1, timeout=60):
            assert name == "a"
            raise ZeroDivisionError
    assert served(daemon) == 0
    got = dict(one.tensors(1, timeout=60))
    assert got["a"].tolist() == [7.0] * 4 and got["b"].tolist() == [8.0] * 3
    with Client(daemon.grpc) as client:
        client.wait_version(1, 60)
    publisher.publish(2)
    for _ in one.tensors(2, timeout=60):
        break
    publisher.publish(3)  # who stops early holds up nothing that follows
    assert len(list(one.tensors(3, timeout=60))) == 2


def test_a_write_through_from_numpy_is_found_out_and_then_what_was_published_is_served(daemon, caplog):
    source = {"a": torch.full((5_000,), 7.0), "b": torch.full((5_000,), 8.0)}
    with weightwire.torch.Publisher(source, agent=daemon.agent_socket) as publisher, \
            HfReader([TensorMeta(name, "F32", (5_000,)) for name in source], agent=daemon.agent_socket) as one:
        def read(version: int) -> bool:
            publisher.publish(version)
            return all(torch.equal(tensor, source[name]) for name, tensor in one.tensors(version, timeout=60))

        assert read(1)
        torch.from_numpy(one._subscriber.params["a"]).fill_(1)
        assert one._subscriber.params["a"][0] == 1.0
        assert read(2)
        assert "wrote into its stage" not in caplog.text
        assert read(3)  # in the buffer that was written
        assert "wrote into its stage (a" in caplog.text


def test_a_reader_that_was_asked_for_an_older_version_has_the_newer_one_still(daemon, reader):
    publisher, one = reader
    publisher.publish(5)
    with pytest.raises(StaleError, match="version 5 is committed, 3 was asked for"):
        list(one.tensors(3, timeout=60))
    assert served(daemon) == 0
    assert [name for name, _ in one.tensors(5, timeout=60)] == ["a", "b"]


@pytest.mark.parametrize("how,adapter", [("stack", "fsdp"), ("names", "fsdp"), ("stack", "torch"), ("alike", "torch")])
def test_ranks_with_different_bytes_under_one_name_are_refused(daemon, how, adapter):
    with World(parts_under_one_name, 2, daemon.agent_socket, how, adapter) as world, \
            Subscriber(group="boxes", rank=0, world_size=1, agent=daemon.agent_socket) as engine:
        shapes = {"norm": (3,), **({"experts": (2, 2, 3)} if how == "stack" else {f"experts_{i}": (2, 3) for i in range(2)})}
        metas = {name: TensorMeta(name, "F32", shape) for name, shape in shapes.items()}
        engine.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
        world.join()
        offer = engine.wait_offer(0.0)
        assert (offer is None) == (how != "alike")  # version 1, whose parts were alike
        assert offer is None or (offer.version == 1 and engine.wait_offer(0.5) is None)


def test_what_one_rank_cannot_read_is_told_on_all(daemon):
    with World(one_cannot_read, 2, daemon.agent_socket) as world:
        world.join()


@pytest.mark.parametrize("plain", [True, False])
def test_a_wrapped_parameter_is_read_or_named(daemon, tmp_path, plain):
    with World(wrapped_parameter, 1, daemon.agent_socket, str(tmp_path), plain) as world, \
            Subscriber(group="boxes", rank=0, world_size=1, agent=daemon.agent_socket) as engine:
        meta = TensorMeta("w", "BF16", (3, 4))
        engine.bind_submission(boxes.submission({"w": meta}, [boxes.whole(meta)]))
        if plain:
            offer = engine.wait_offer(60)
            want = read_safetensors(tmp_path / "v1.safetensors")["w"][1]
            assert np.array_equal(engine.flip(offer)["w"].view(np.uint16), want)
            engine.acknowledge(offer)
        world.join()
        assert plain or engine.wait_offer(0.0) is None


class Adapted(torch.nn.Linear):
    """A layer with its adapter beside the weight: parameters (loralib) or layers (NeMo AutoModel, torchtune)."""

    def __init__(self, name: str, layers: bool):
        super().__init__(4, 4, bias=False)
        if layers:
            self.add_module(name, torch.nn.Linear(4, 2, bias=False))
        else:
            self.register_parameter(name, torch.nn.Parameter(torch.ones(2, 4)))


@pytest.mark.parametrize("read", [weightwire.torch.read_whole, weightwire.fsdp.read_sharded])
@pytest.mark.parametrize("name,layers", [("lora_A", False), ("lora_A", True), ("lora_b", True), ("lora_embedding_A", False)])
def test_an_adapter_beside_its_weight_is_refused_or_left_out_by_name(read, name, layers):
    model = torch.nn.ModuleDict({"q_proj": Adapted(name, layers)})
    with pytest.raises(RefusedError, match="it is an adapter's") as refused:
        read(model)
    assert refused.value.tensor == f"q_proj.{name}" + (".weight" if layers else "")
    canonical, _ = read(model, lambda own: None if "lora" in own else own)
    assert list(canonical) == ["q_proj.weight"]


@pytest.mark.parametrize("read", [weightwire.torch.read_whole, weightwire.fsdp.read_sharded])
def test_pefts_names_are_refused_unless_they_are_translated(read):
    layer = torch.nn.ModuleDict({"base_layer": torch.nn.Linear(4, 4, bias=False)})
    model = torch.nn.ModuleDict({"base_model": torch.nn.ModuleDict({"model": torch.nn.ModuleDict({"q_proj": layer})})})
    with pytest.raises(RefusedError, match="PEFT"):
        read(model)
    canonical, _ = read(model, lambda own: own.removeprefix("base_model.model.").replace(".base_layer.", "."))
    assert list(canonical) == ["q_proj.weight"]


class TestFrozenParts:
    @pytest.fixture
    def pair(self, pair):
        """Its embedding (tied) and its scale are frozen after the publisher was opened, as a callback does it."""
        source, publisher, target, receiver = pair
        source.embed.weight.requires_grad_(False)
        source.scale.requires_grad_(False)
        return pair

    @staticmethod
    def reads(monkeypatch):
        """Names of what is copied out of the trainer's memory, or compared with it, in the order in which that happens."""
        from weightwire import adapter
        names, write, holds = [], adapter._InHost.write, adapter._InHost.holds
        monkeypatch.setattr(adapter._InHost, "write", lambda place, lives: (
            names.extend(live.held.meta.name for live in lives), write(place, lives))[1])
        monkeypatch.setattr(adapter._InHost, "holds", lambda place, live: (names.append(live.held.meta.name), holds(place, live))[1])
        return names

    @staticmethod
    def train(module):
        with torch.no_grad():
            for tensor in [*(p for p in module.parameters() if p.requires_grad), *module.buffers()]:
                tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.randint(9, tensor.shape))
        return {name: tensor.clone() for name, tensor in module.state_dict().items()}

    def test_they_are_read_once_and_one_in_turn_is_looked_at(self, pair, monkeypatch):
        source, publisher, target, receiver = pair
        names = self.reads(monkeypatch)
        for version in (1, 2, 3):
            names.clear()
            want = self.train(source)
            publisher.publish(version).wait_released(30)
            assert receiver.receive(30).version == version and same(target, want)
            frozen = sorted(name for name in names if name in ("embed.weight", "scale"))
            assert frozen == {1: ["embed.weight", "scale"], 2: ["embed.weight"], 3: ["scale"]}[version]
            assert {"head.weight", "norm.running_mean"} <= set(names), "buffers have no gradient, and change"

    def test_the_agent_is_told(self, pair, monkeypatch):
        source, publisher, target, receiver = pair
        told, publish = [], weightwire.publisher.Publisher.publish
        monkeypatch.setattr(weightwire.publisher.Publisher, "publish", lambda self, version, **options: (
            told.append(sorted(options["unchanged"])), publish(self, version, **options))[1])
        for version in (1, 2, 3, 4):
            want = self.train(source)
            if version == 3:
                with torch.no_grad():
                    source.scale.add_(1)
                want["scale"] = source.scale.clone()
                with pytest.raises(StaleError):
                    publisher.publish(1)
            publisher.publish(version).wait_released(30)
            assert receiver.receive(30).version == version and same(target, want)
        frozen = ["embed.weight", "scale"]
        assert told == [[], frozen, ["embed.weight"], ["embed.weight"], frozen]

    def test_a_write_that_torch_sees_is_published(self, pair):
        source, publisher, target, receiver = pair
        for version in (1, 2, 3):
            with torch.no_grad():
                source.embed.weight.add_(1)
            if version == 3:
                source.scale.data = torch.randn(())  # other memory
            want = self.train(source)
            publisher.publish(version).wait_released(30)
            assert receiver.receive(30).version == version and same(target, want)

    @pytest.mark.parametrize("asked", [True, False])
    def test_one_that_changed_unseen_is_named_and_published_from_then_on(self, pair, asked):
        source, publisher, target, receiver = pair
        publisher.publish(1).wait_released(30)
        assert receiver.receive(30).version == 1
        source.scale.data.add_(1)
        version = 2
        with pytest.raises(RefusedError, match="changed although they require no gradient.*scale"):
            if asked:
                publisher.publish(version, verify=True)
            for _ in range(3):  # the other frozen parameter comes first
                publisher.publish(version).wait_released(30)
                assert receiver.receive(30).version == version
                version += 1
        assert version == (2 if asked else 3)
        for more in (1, 2):
            source.scale.data.add_(more)
            want = self.train(source)
            publisher.publish(version + more, verify=True).wait_released(30)
            assert receiver.receive(30).version == version + more and same(target, want)

    def test_nothing_is_frozen_where_nothing_is_trained(self, pair):
        source, publisher, target, receiver = pair
        source.requires_grad_(False)  # a moving average of a model, say
        for version in (1, 2):
            for parameter in source.parameters():
                parameter.data.add_(1)
            want = {name: tensor.clone() for name, tensor in source.state_dict().items()}
            publisher.publish(version).wait_released(30)
            assert receiver.receive(30).version == version and same(target, want)

    def test_after_the_agent_was_lost_all_is_read_again(self, pair, monkeypatch):
        source, publisher, target, receiver = pair
        publisher.publish(1).wait_released(30)
        assert receiver.receive(30).version == 1
        publisher._publisher.close()
        names = self.reads(monkeypatch)
        want = self.train(source)
        publisher.publish(2).wait_released(30)
        assert {"embed.weight", "scale"} <= set(names)
        assert receiver.receive(30).version == 2 and same(target, want)
