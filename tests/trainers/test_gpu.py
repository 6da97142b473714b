"""Parameters on a GPU, by every adapter, over the fake library (tests/support/fake_cuda): tensors of the host stand for those of a
GPU. Its kernels reach no other memory of the host, it runs what is enqueued only when somebody waits for it, and it counts every
byte that goes between a GPU and the host. No hardware has run this."""

from __future__ import annotations

import gc
import logging
import os
import signal
import time

import numpy as np
import pytest
import torch

import weightwire.torch
import weightwire.torch_cuda
from conftest import BINARIES, Daemon
from gpu_ranks import fsdp_on_gpus
from gpu_standin import FAKE, GPUS, REPLACED, FakeTorchCuda
from weightwire import Device, RefusedError, Subscriber, TensorMeta, WeightwireError, boxes
from weightwire.adapter import Live
from weightwire.hf_tensors import HfReader
from weightwire.torch_dtypes import NAMES
from world import World

LENT = 8 << 20


@pytest.fixture(scope="module")
def cuda():
    before = {name: getattr(weightwire.torch_cuda, name) for name in REPLACED}
    yield FakeTorchCuda().install()
    for name, function in before.items():
        setattr(weightwire.torch_cuda, name, function)


@pytest.fixture(autouse=True)
def back_to_the_host(cuda):
    gc.collect()  # what earlier tests had page-locked goes with its owners
    yield
    cuda.back()


@pytest.fixture
def hub(tmp_path):
    started: list[Daemon] = []

    def start(forbidden: bool = True, place: str = "hub", **options) -> Daemon:
        env = {**os.environ, "FAKE_CUDA_DEVICES": "0,1", **({"FAKE_CUDA_HOST_BYTES": "forbidden"} if forbidden else {})}
        settings = {"gpu": "required", "gpu_slab_bytes": LENT, "gpu_library": FAKE, "transports": "[cuda_ipc, shm, tcp]", **options}
        started.append(Daemon(str(BINARIES / "weightwired"), str(tmp_path / place), "hub", env=env, role="all",
                              listen="127.0.0.1:0", slot_bytes=16 << 10, chunk_bytes=8 << 10, segment_bytes_max=5_000,
                              **{key: value for key, value in settings.items() if value is not None}))
        return started[-1]
    start.started = started
    yield start
    for daemon in started:
        assert daemon.stop() == 0


def until(what: str, done, timeout: float = 20) -> None:
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, f"not within {timeout} s: {what}"
        time.sleep(0.01)


class Net(torch.nn.Module):
    """Floats of four kinds, an integer, a flag, a scalar, a transposed one, and one of many dimensions."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(251, 33)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(130, 67, dtype=torch.bfloat16)
        self.halves = torch.nn.Parameter(torch.randn(7, 9).half())
        self.turned = torch.nn.Parameter(torch.randn(40, 24).t())
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.deep = torch.nn.Parameter(torch.randn(2, 1, 2, 1, 2, 3, 2, 5).transpose(0, 7))
        self.register_buffer("flags", torch.rand(19) > 0.5)
        self.register_buffer("codes", torch.randint(0, 100, (5, 3), dtype=torch.uint8).view(torch.float8_e4m3fn))


def randomise(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.dtype is torch.float8_e4m3fn:
                tensor.view(torch.uint8).copy_(torch.randint(0, 100, tensor.shape))
            else:
                tensor.copy_(torch.randn(tensor.shape) if tensor.is_floating_point() else torch.randint(2, tensor.shape))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def content(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: bits(tensor) for name, tensor in module.state_dict().items()}


class Engine:
    """Holds tensors whole, in its GPU's memory or in the host's."""

    def __init__(self, daemon: Daemon, metas: list[TensorMeta], device: Device | None = None, group: str = "engine"):
        self._subscriber = Subscriber(group=group, rank=0, world_size=1, agent=daemon.agent_socket, device=device)
        assert self._subscriber.device_refused is None
        self._subscriber.bind_submission(boxes.submission({m.name: m for m in metas}, [boxes.whole(m) for m in metas]))

    def take(self, version: int) -> dict:
        offer = self._subscriber.wait_offer(30)
        assert offer is not None and offer.version == version, (offer, self._subscriber.last_fence)
        return self.flip(offer)

    def flip(self, offer) -> dict:
        held = self._subscriber.flip(offer)
        self._subscriber.acknowledge(offer)
        return held

    def close(self) -> None:
        self._subscriber.close()


def bytes_of(array) -> bytes:
    return (array.read() if hasattr(array, "read") else np.ascontiguousarray(array)).tobytes()


def metas_of(module: torch.nn.Module) -> list[TensorMeta]:
    return [TensorMeta(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in module.state_dict().items()]


@pytest.fixture
def engine(request):
    opened: list[Engine] = []

    def start(*arguments, **more) -> Engine:
        opened.append(Engine(*arguments, **more))
        return opened[-1]
    yield start
    for one in opened:
        one.close()


@pytest.mark.parametrize("gpu", [0, 1])
def test_a_version_goes_from_gpu_to_gpu_in_one_launch_and_no_byte_by_the_host(hub, cuda, engine, gpu):
    daemon, module = hub(), cuda.move_all(Net(), gpu)
    serves = engine(daemon, metas_of(module), Device(GPUS[1], FAKE))
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        assert publisher.device == GPUS[gpu]
        for version in (1, 2, 3):
            randomise(module)
            want, before = content(module), (cuda.count("host_bytes"), cuda.count("launches"))
            release = publisher.publish(version)
            assert (cuda.count("host_bytes"), cuda.count("launches")) == (before[0], before[1] + 1)
            randomise(module)  # the trainer goes on at once
            held = serves.take(version)
            assert cuda.count("host_bytes") == before[0]
            release.wait_released(30)
            assert {name: bytes_of(array) for name, array in held.items()} == want


def test_what_the_stream_was_told_before_is_in_the_version(hub, cuda, engine):
    daemon, module = hub(), cuda.move_all(torch.nn.Linear(64, 32, bias=False))
    serves = engine(daemon, metas_of(module), Device(GPUS[0], FAKE))
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        step = cuda.move(torch.randn(32, 64))
        cuda.enqueue(0, module.weight.data, step)  # an optimizer's step that has not run yet
        publisher.publish(1)
        assert bytes_of(serves.take(1)["weight"]) == bits(step)


class Masked(torch.Tensor):
    """Some quantized parameter: what lies in its memory is not its elements."""

    @staticmethod
    def __new__(cls, stored):
        return torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=stored.dtype)

    def __init__(self, stored):
        self.stored = stored

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return function(*(one.stored * 2 if isinstance(one, cls) else one for one in arguments), **(options or {}))


def test_what_is_computed_and_what_is_cast_is_made_on_the_gpu(hub, cuda, engine):
    daemon = hub()
    shifted, narrow, exact = (cuda.move(torch.randn(33, 20)) for _ in range(3))
    bias = cuda.move(torch.randn(90).bfloat16())
    wide = cuda.move(torch.randn(50, 6, dtype=torch.float64))
    metas = [TensorMeta("shifted", "F32", (33, 20)), TensorMeta("narrow", "BF16", (33, 20)), TensorMeta("bias", "F32", (90,)),
             TensorMeta("wide", "F32", (50, 6)), TensorMeta("exact", "F32", (33, 20))]
    writes = {"shifted": lambda into, tensor: into.copy_(tensor + 1)}
    lives = [Live(boxes.whole(meta), tensor, writes.get(meta.name))
             for meta, tensor in zip(metas, (shifted, narrow, bias, wide, exact))]
    serves = engine(daemon, metas, Device(GPUS[1], FAKE))
    with weightwire.torch.BoxPublisher(lambda: ({m.name: m for m in metas}, lives), rank=0, world_size=1, group="trainer", job="",
                                       agent=daemon.agent_socket, timeout=30) as publisher:
        for version in (1, 2):
            for tensor in (shifted, narrow, exact):
                tensor.copy_(torch.randn(33, 20))
            before = cuda.count("host_bytes")
            publisher.publish(version)
            assert cuda.count("host_bytes") == before
            held = {name: bytes_of(array) for name, array in serves.take(version).items()}
            assert held == {"shifted": bits(shifted + 1), "narrow": bits(narrow.bfloat16()), "bias": bits(bias.float()),
                            "wide": bits(wide.float()), "exact": bits(exact)}


def test_a_frozen_part_is_neither_copied_again_nor_left_out_when_it_changes(hub, cuda, engine):
    daemon = hub()
    module = torch.nn.ModuleDict({"trained": torch.nn.Linear(40, 30), "frozen": torch.nn.Linear(300, 500)})
    module["frozen"].weight.data = torch.randn(300, 500).t()  # strides that are not those of the copy
    module["frozen"].requires_grad_(False)
    cuda.move_all(module)
    serves = engine(daemon, metas_of(module), Device(GPUS[0], FAKE))
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        def publish(version):
            want = content(module)
            publisher.publish(version)
            assert {name: bytes_of(array) for name, array in serves.take(version).items()} == want
        publish(1)
        packed = []
        whole = publisher._place._copies.pack
        publisher._place._copies.pack = lambda pieces: whole(packed.append(one.into.meta.name) or one for one in pieces)
        module["trained"].weight.data.add_(1)
        publish(2)
        assert sorted(packed) == ["trained.bias", "trained.weight"]
        with torch.no_grad():
            module["frozen"].bias.add_(1)  # torch knows
        packed.clear()
        publish(3)
        assert "frozen.bias" in packed and "frozen.weight" not in packed
        module["frozen"].weight.data[499, 299] += 1  # torch does not; the last element of the last part
        with pytest.raises(RefusedError) as refused:
            publisher.publish(4, verify=True)
        assert refused.value.tensor == "frozen.weight"
        publish(5)
    assert cuda.count("registered") >= 1  # where kernels write their sums


def test_parameters_that_are_offloaded_or_on_another_gpu_arrive_as_well(hub, cuda, engine):
    daemon = hub(forbidden=False)
    here, there = cuda.move(torch.randn(90, 30), 0), cuda.move(torch.randn(60, 50).t(), 1)
    source = {"here": here, "there": there}
    metas = [TensorMeta(name, "F32", tuple(tensor.shape)) for name, tensor in source.items()]
    serves = engine(daemon, metas)
    with weightwire.torch.Publisher(source, agent=daemon.agent_socket, device="cuda:0") as publisher:
        assert publisher.device == GPUS[0]
        for version in (1, 2, 3):
            source["here"] = torch.randn(30, 90).t() if version == 2 else here.copy_(torch.randn(90, 30))
            there.copy_(torch.randn(50, 60))
            want = {name: bits(tensor) for name, tensor in source.items()}
            publisher.publish(version)
            assert {name: bytes_of(array) for name, array in serves.take(version).items()} == want


REFUSALS = {
    "gpu is off": dict(gpu=None, gpu_slab_bytes=None, gpu_library=None, transports="[shm, tcp]"),
    "limit_exceeded": dict(gpu_slab_bytes=16 << 10, transports="[shm, tcp]"),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_where_the_agent_lends_nothing_auto_says_why_once_and_pins_the_hosts_memory(hub, cuda, engine, caplog, why):
    daemon, module = hub(forbidden=False, **REFUSALS[why]), cuda.move_all(Net())
    serves = engine(daemon, metas_of(module))
    pinned = cuda.count("registered")
    with caplog.at_level(logging.WARNING, logger="weightwire"), \
            weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        assert publisher.device == "cpu"
        for version in (1, 2, 3):
            randomise(module)
            want = content(module)
            publisher.publish(version)
            assert {name: bytes_of(array) for name, array in serves.take(version).items()} == want
            assert cuda.count("registered") == pinned + 1
    assert cuda.count("registered") == pinned
    said = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    assert len(said) == 1 and why in said[0].lower() and 'device="cpu"' in said[0]
    with pytest.raises(WeightwireError) as refused:
        weightwire.torch.Publisher(module, agent=daemon.agent_socket, device="cuda")
    assert why in str(refused.value).lower() and refused.value.remedy
    assert cuda.count("registered") == pinned


def test_without_the_library_auto_goes_by_the_host_and_cuda_is_an_error(hub, cuda, caplog, monkeypatch):
    daemon, module = hub(), cuda.move_all(torch.nn.Linear(4, 4))
    monkeypatch.setenv("WEIGHTWIRE_CUDA", "/nowhere.so")
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        assert publisher.device == "cpu"
    assert "/nowhere.so" in caplog.text
    with pytest.raises(WeightwireError, match="/nowhere.so"):
        weightwire.torch.Publisher(module, agent=daemon.agent_socket, device="cuda:0")


def test_a_gpu_that_is_not_there_is_refused_by_name(hub, cuda):
    daemon = hub()
    with pytest.raises(RefusedError, match="it sees.*" + GPUS[0]):
        weightwire.torch.Publisher(torch.nn.Linear(4, 4), agent=daemon.agent_socket, device="cuda:7")


def test_the_argument_beats_the_environment_and_what_is_no_device_is_refused(hub, cuda, monkeypatch):
    daemon, module = hub(), cuda.move_all(torch.nn.Linear(4, 4), 1)

    def place(**where):
        with weightwire.torch.Publisher(module, agent=daemon.agent_socket, **where) as publisher:
            return publisher.device
    assert place() == place(device="auto") == place(device="cuda") == GPUS[1]
    assert place(device="cuda:0") == place(device=Device(GPUS[0], FAKE)) == GPUS[0]
    monkeypatch.setenv("WEIGHTWIRE_DEVICE", "cpu")
    assert place() == "cpu" and place(device="auto") == GPUS[1]
    monkeypatch.setenv("WEIGHTWIRE_DEVICE", "cuda:0")
    assert place() == GPUS[0] and place(device="cpu") == "cpu"
    for wrong in ("gpu", "cuda:", "cuda:x", "cuda:-1", "cpu:0"):
        with pytest.raises(RefusedError, match="no place for parameters"):
            place(device=wrong)


def test_parameters_of_the_host_stay_there_without_a_word(hub, cuda, caplog):
    daemon = hub()
    with weightwire.torch.Publisher(torch.nn.Linear(4, 4), agent=daemon.agent_socket) as publisher:
        assert publisher.device == "cpu"
        publisher.publish(1)
    assert not [record for record in caplog.records if record.name == "weightwire"]


def test_a_trainer_comes_back_to_the_gpu_when_its_agent_was_restarted(hub, cuda, engine):
    daemon, module = hub(), cuda.move_all(Net())
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        publisher.publish(1)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()
        hub.started.remove(daemon)
        until("the publisher notices", lambda: not publisher.attached)
        daemon = hub()
        serves = engine(daemon, metas_of(module), Device(GPUS[1], FAKE))
        randomise(module)
        want = content(module)
        publisher.publish(2, deadline=30)
        assert publisher.device == GPUS[0]
        assert {name: bytes_of(array) for name, array in serves.take(2).items()} == want


def test_every_version_may_be_compared_with_the_trainers_export(hub, cuda, engine):
    daemon, module = hub(forbidden=False), cuda.move_all(torch.nn.Linear(30, 20))
    serves = engine(daemon, metas_of(module))
    exported = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with weightwire.torch.Publisher(module, agent=daemon.agent_socket, verify=lambda: exported.items()) as publisher:
        publisher.publish(1)
        serves.take(1)
        exported["weight"][3, 4] += 1
        with pytest.raises(RefusedError) as refused:
            publisher.publish(2, verify=True)
        assert refused.value.tensor == "weight"


def test_ranks_of_fsdp_publish_their_shards_from_the_gpu(hub, engine, tmp_path):
    daemon = hub()
    with World(fsdp_on_gpus, 2, daemon.agent_socket, str(tmp_path)) as world:
        meta = [TensorMeta("weight", "F32", (13, 24)), TensorMeta("bias", "F32", (13,))]
        serves = engine(daemon, meta, Device(GPUS[1], FAKE))
        for version in (1, 2):
            offer = world.next_offer(serves._subscriber)
            held = serves.flip(offer)
            want = torch.load(tmp_path / f"{version}.pt")
            assert {name: bytes_of(array) for name, array in held.items()} == {name: bits(tensor) for name, tensor in want.items()}
        world.join()


# ---- the other side: modules that receive


@pytest.mark.parametrize("gpu", [0, 1])
def test_a_module_receives_on_its_gpu_and_no_byte_goes_by_the_host(hub, cuda, gpu):
    daemon, module, follower = hub(), cuda.move_all(Net(), 0), cuda.move_all(Net(), gpu)
    with weightwire.torch.Receiver(follower, group="follower", agent=daemon.agent_socket) as receiver, \
            weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        assert receiver.device == GPUS[gpu]
        for version in (1, 2, 3):  # the third lies where the first one was
            randomise(module)
            want, before = content(module), cuda.count("host_bytes")
            release = publisher.publish(version)
            randomise(module)
            assert receiver.receive(30).version == version
            release.wait_released(30)
            assert content(follower) == want and cuda.count("host_bytes") == before


def test_a_version_is_acknowledged_when_it_has_left_the_stage_and_not_before(hub, cuda, monkeypatch):
    """torch's copies within a GPU run later: what they read must not be overwritten."""
    daemon, follower, said = hub(), cuda.move_all(torch.nn.Linear(9, 7)), []
    source = cuda.move_all(torch.nn.Linear(9, 7))
    with weightwire.torch.Receiver(follower, group="follower", agent=daemon.agent_socket) as receiver, \
            weightwire.torch.Publisher(source, agent=daemon.agent_socket) as publisher:
        acknowledge = receiver._subscriber.acknowledge
        monkeypatch.setattr(weightwire.torch_cuda, "wait_for_copies", lambda tensors: said.append({cuda.gpu_of(one) for one in tensors}))
        monkeypatch.setattr(receiver._subscriber, "acknowledge", lambda offer: (said.append("acknowledged"), acknowledge(offer)))
        publisher.publish(1)
        assert receiver.receive(30).version == 1
    assert said == [{0}, "acknowledged"]


def test_whole_tensors_are_acknowledged_when_they_have_left_the_stage_and_not_before(hub, cuda, monkeypatch):
    daemon, module, said = hub(), cuda.move_all(Net()), []
    with HfReader(metas_of(module), agent=daemon.agent_socket, device="cuda:0") as reader, \
            weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        acknowledge = reader._subscriber.acknowledge
        monkeypatch.setattr(weightwire.torch_cuda, "wait_for_copies", lambda tensors: said.append(f"waited for {[one.device.type for one in tensors]}"))
        monkeypatch.setattr(reader._subscriber, "acknowledge", lambda offer: (said.append("acknowledged"), acknowledge(offer)))
        publisher.publish(1)
        for name, _ in reader.tensors(1, timeout=30):
            said.append(name)
    assert said == [*module.state_dict(), "waited for ['cpu']", "acknowledged"]


@pytest.mark.parametrize("why", REFUSALS)
def test_where_the_agent_lends_nothing_a_receiver_says_why_once_and_takes_the_hosts_memory(hub, cuda, caplog, why):
    daemon, module, follower = hub(forbidden=False, **REFUSALS[why]), Net(), cuda.move_all(Net())
    with caplog.at_level(logging.WARNING, logger="weightwire"), \
            weightwire.torch.Receiver(follower, group="follower", agent=daemon.agent_socket) as receiver, \
            weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        assert receiver.device == "cpu"
        for version in (1, 2, 3):
            randomise(module)
            publisher.publish(version)
            assert receiver.receive(30).version == version
            assert content(follower) == content(module)
    said = [record.getMessage() for record in caplog.records if "host memory" in record.getMessage()]
    assert len(said) == 1 and why in said[0].lower() and 'device="cpu"' in said[0]
    with pytest.raises(RefusedError) as refused:
        weightwire.torch.Receiver(follower, group="another", agent=daemon.agent_socket, device="cuda")
    assert why in str(refused.value).lower() and refused.value.remedy
    with weightwire.torch.Receiver(follower, group="third", agent=daemon.agent_socket, device="cpu") as receiver:
        assert receiver.device == "cpu"
    with weightwire.Client(daemon.grpc) as client:
        until("nobody is left behind, not of what was refused either", lambda: not client.status().participants)


def test_a_receiver_comes_back_to_its_gpu_when_the_agent_was_restarted(hub, cuda):
    """What lies in memory of an agent that is gone is never read again."""
    daemon, module, follower = hub(), cuda.move_all(Net()), cuda.move_all(Net(), 1)
    with weightwire.torch.Receiver(follower, group="follower", agent=daemon.agent_socket) as receiver:
        with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
            publisher.publish(1)
            assert receiver.receive(30).version == 1
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()
        hub.started.remove(daemon)
        daemon = hub()
        until("nothing of the agent that is gone is mapped", lambda: cuda.count("bytes_opened") == LENT)
        with weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
            randomise(module)
            want = content(module)
            publisher.publish(2)
            assert receiver.receive(30).version == 2
            assert content(follower) == want


def test_whole_tensors_are_read_from_a_gpu(hub, cuda):
    daemon, module = hub(), cuda.move_all(Net())
    with HfReader(metas_of(module), agent=daemon.agent_socket, device="cuda:1") as reader, \
            weightwire.torch.Publisher(module, agent=daemon.agent_socket) as publisher:
        for version in (1, 2, 3):
            randomise(module)
            before = cuda.count("host_bytes")
            publisher.publish(version)
            got = {name: bits(tensor) for name, tensor in reader.tensors(version, timeout=30)}
            assert got == content(module) and cuda.count("host_bytes") == before
