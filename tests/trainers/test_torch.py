"""Modules that hold whole tensors: publishing, receiving, and what may happen to parameters between versions."""

import os
import signal
import time

import pytest
import torch

import weightwire.torch
from conftest import BINARIES, Daemon
from torch_ranks import make_checkpoint, train_replicated
from weightwire import RefusedError, UnavailableError
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
