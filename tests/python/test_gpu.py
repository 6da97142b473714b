"""Weights in GPU memory, end to end, with a library that has the interface of libweightwire_cuda.so and no GPU: its device
memory is one that only its own calls reach, so that whoever touches it otherwise dies of a SIGSEGV. The agents see GPUs 0
and 1 in this order, this process in the other one. No hardware has run this."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import test_quantize_four_bits as four_bits
from conftest import BINARIES, EngineRanks, Trainer, until
from demo import checkpoint, oracle
from demo.fleet import Daemon
from quantize_oracle import Quantized
from test_quantize import fsdp_shards
from weightwire import Device, DeviceArray, NotReadyError, Publisher, Subscriber, TensorMeta, WeightwireError, boxes

FAKE = str(BINARIES.parent / "lib/libfake_cuda.so")
os.environ["FAKE_CUDA_DEVICES"] = "1,0"
GPUS = [f"GPU-fafafafa-fafa-fafa-fafa-fafafafafa0{number}" for number in (0, 1)]
# Odd sizes: a vocabulary that no TP divides, an intermediate size whose shards are not a multiple of the slots'.
CONFIG = {**checkpoint.SMALL, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "vocab_size": 251}
SMALL_SLOTS = {"slot_bytes": 16 << 10, "chunk_bytes": 8 << 10, "segment_bytes_max": 5_000}
LENT = 4 << 20


def agent_env(devices: str = "0,1") -> dict:
    return {**os.environ, "FAKE_CUDA_DEVICES": devices}


def without_host_bytes() -> dict:
    """An agent whose GPU breaks at the first byte of a payload that goes between it and the host's memory."""
    return {**agent_env(), "FAKE_CUDA_HOST_BYTES": "forbidden"}


def lending(gpu: str = "required", size: int = LENT) -> dict:
    return {"gpu": gpu, "gpu_slab_bytes": size, "gpu_library": FAKE}


@pytest.fixture
def hub(tmp_path):
    """Starts a coordinator with an agent; further agents join it."""
    started: list[Daemon] = []

    def start(name: str = "hub", env: dict | None = None, **options) -> Daemon:
        place = {"role": "agent", "coordinator": started[0].grpc} if started else {"role": "all", "listen": "127.0.0.1:0"}
        started.append(Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, env=env or agent_env(),
                              **{**SMALL_SLOTS, **place, **options}))
        return started[-1]
    start.started = started
    yield start
    for daemon in reversed(started):
        assert daemon.stop() == 0, daemon.name


def content(version: int, dtype: str = "BF16") -> dict[str, np.ndarray]:
    random_bits = np.random.default_rng(version)
    shapes = checkpoint.hf_shapes(CONFIG)
    if dtype == "F32":
        return {n: random_bits.standard_normal(s, dtype=np.float32) for n, s in shapes.items()}
    return {n: random_bits.integers(0, 1 << 16, s, dtype=np.uint16) for n, s in shapes.items()}


def as_bf16(array: np.ndarray) -> np.ndarray:
    """Rounds to nearest even, as bits; no NaN among the values."""
    if array.dtype == np.uint16:
        return array
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def shards_of(hf: dict, tp: int, dtype: str = "BF16") -> list[dict]:
    return [{n: (TensorMeta(n, dtype, a.shape), np.ascontiguousarray(a)) for n, a in oracle.megatron(CONFIG, hf, tp, 1, r)}
            for r in range(tp)]


def shapes(tp: int) -> list[list[TensorMeta]]:
    return [[TensorMeta(n, "BF16", s) for n, s in oracle.vllm_shapes(CONFIG, tp).items()]] * tp


def bits(array) -> np.ndarray:
    return array.read() if isinstance(array, DeviceArray) else array


def assert_holds(params, hf: dict, tp: int = 1, rank: int = 0) -> None:
    for name, want in oracle.vllm(CONFIG, {n: as_bf16(a) for n, a in hf.items()}, tp, rank):
        assert np.array_equal(bits(params[name])[:len(want)], want), (rank, name)


def assert_serves(engine: EngineRanks, hf: dict) -> None:
    for rank, subscriber in enumerate(engine.ranks):
        assert_holds(subscriber.params, hf, len(engine.ranks), rank)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("way", ["one_agent", "tcp", "cuda_ipc"])
@pytest.mark.parametrize("source, target", [(0, 0), (0, 1), (0, None), (None, 1)])
def test_every_byte_arrives_whatever_memory_it_is_in(hub, groups, source, target, way, dtype):
    first = hub(**lending(), transports="[shm, tcp, cuda_ipc]")
    second = first if way == "one_agent" else hub("engine", **lending(), transports=f"[{way}]")
    devices = [None if gpu is None else Device(GPUS[gpu], FAKE) for gpu in (source, target)]
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1, dtype), 2, dtype), devices[0])
    engine = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=devices[1])
    groups += [trainer, engine]
    for version in (1, 2, 3):
        hf = content(version, dtype)
        trainer.fill(shards_of(hf, 2, dtype))
        trainer.publish(version)
        engine.wait_version(version)
        assert_serves(engine, hf)
    for device, arrays in ((devices[0], trainer.params[0]), (devices[1], engine.ranks[0].params)):
        assert all(isinstance(array, DeviceArray) == (device is not None) for array in arrays.values())


IPC = "[cuda_ipc, shm, tcp]"


def read_over(agent: Daemon, transport: str) -> float:
    return agent.counter(f'weightwire_transfer_bytes_total{{direction="in",transport="{transport}"}}')


@pytest.mark.parametrize("agents", [1, 2])
@pytest.mark.parametrize("source, target", [(0, 0), (0, 1)])
def test_no_byte_goes_through_the_hosts_memory_over_cuda_ipc_and_the_report_says_so(hub, groups, source, target, agents):
    from weightwire import Client
    first = hub(env=without_host_bytes(), **lending(), transports=IPC)
    second = first if agents == 1 else hub("engine", env=without_host_bytes(), **lending(), transports=IPC)
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1, "F32"), 2, "F32"),
                      Device(GPUS[source], FAKE))
    engine = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[target], FAKE))
    groups += [trainer, engine]
    for version in (1, 2, 3):
        hf = content(version, "F32")
        trainer.fill(shards_of(hf, 2, "F32"))
        trainer.publish(version)
        engine.wait_version(version)
        assert_serves(engine, hf)
    with Client(first.grpc) as client:
        epoch = client.status().epochs[0]
    assert epoch.bytes > 0 and epoch.bytes_by_transport == {"cuda_ipc": epoch.bytes - epoch.bytes_kept}
    assert read_over(second, "cuda_ipc") > 0 and read_over(second, "shm") == read_over(second, "tcp") == 0
    assert GPUS[0] in second.status() and "transport cuda_ipc at" in second.status()


def test_the_agent_whose_gpu_memory_goes_by_the_host_breaks_where_that_is_forbidden(hub, groups):
    """That the tests above can fail."""
    agent = hub(env=without_host_bytes(), **lending(), transports="[shm]")
    device = Device(GPUS[0], FAKE)
    trainer = Trainer(agent.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), device)
    groups.append(trainer)
    groups.append(EngineRanks(agent.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=device))
    releases = [publisher.publish(1, deadline=3) for publisher in trainer.publishers]
    with pytest.raises(WeightwireError):
        for release in releases:
            release.wait_released(20)


def test_ranks_in_host_and_gpu_memory_share_a_session(hub, groups):
    first = hub(**lending(), transports="[cuda_ipc]")
    second = hub("engine", **lending(), transports="[cuda_ipc]")
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
    on_host = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1))
    on_gpu = EngineRanks(second.agent_socket, "engine-b", CONFIG, "vllm:tp2", shapes(2), device=Device(GPUS[1], FAKE))
    groups += [trainer, on_host, on_gpu]
    for version in (1, 2):
        trainer.fill(shards_of(content(version), 2))
        trainer.publish(version)
        for engine in (on_host, on_gpu):
            engine.wait_version(version)
            assert_serves(engine, content(version))
    late = EngineRanks(first.agent_socket, "engine-c", CONFIG, "vllm:tp2", shapes(2), device=Device(GPUS[0], FAKE))
    groups.append(late)
    late.wait_version(2)  # filled from the stage of another one
    assert_serves(late, content(2))
    assert read_over(first, "cuda_ipc") > 0


def test_engines_pass_on_what_lies_in_gpu_memory(hub, groups):
    first = hub(env=without_host_bytes(), **lending(), transports="[cuda_ipc]", fanout="chain")
    agents = [hub(f"engine-{i}", env=without_host_bytes(), **lending(), transports="[cuda_ipc]") for i in range(3)]
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
    groups.append(trainer)
    engines = [EngineRanks(agent.agent_socket, f"engine-{i}", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[i % 2], FAKE))
               for i, agent in enumerate(agents)]
    groups += engines
    for version in (1, 2):
        trainer.fill(shards_of(content(version), 2))
        trainer.publish(version)
        for engine in engines:
            engine.wait_version(version)
            assert_serves(engine, content(version))
    sent = [agent.counter('weightwire_transfer_bytes_total{direction="out",transport="cuda_ipc"}') for agent in agents]
    assert sorted(sent)[0] == 0 and sorted(sent)[1] > 0  # two of three pass on, one is the last


def test_agents_that_see_other_gpus_use_the_next_transport(hub, groups):
    from weightwire import Client
    first = hub(env=agent_env("0"), **lending(), transports=IPC)
    second = hub("engine", env=agent_env("1"), **lending(), transports=IPC)
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
    engine = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[1], FAKE))
    groups += [trainer, engine]
    trainer.publish(1)
    engine.wait_version(1)
    assert_serves(engine, content(1))
    with Client(first.grpc) as client:
        assert set(client.status().epochs[0].bytes_by_transport) == {"shm"}


def test_where_nothing_else_is_left_the_failure_says_which_gpu_is_not_seen(hub, groups):
    from weightwire import Client
    first = hub(env=agent_env("0"), **lending(), transports="[cuda_ipc]")
    second = hub("engine", env=agent_env("1"), **lending(), transports="[cuda_ipc]")
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
    groups.append(trainer)
    groups.append(EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[1], FAKE)))
    for publisher in trainer.publishers:
        publisher.publish(1, deadline=3)
    with Client(first.grpc) as client:
        until("an epoch failed", lambda: any(epoch.why for epoch in client.status().epochs))
        why = next(str(epoch.why) for epoch in client.status().epochs if epoch.why)
    assert f"{GPUS[0][-8:]} is not visible here" in why and GPUS[1] in why


def test_an_agent_with_gpu_off_does_not_take_cuda_ipc(hub):
    with pytest.raises(RuntimeError) as failed:
        hub(transports=IPC)
    assert "cuda_ipc" in str(failed.value) and "gpu" in str(failed.value)


def outlive_a_trainers_agent(hub, groups, transport: str, of_engine: dict, of_trainer: dict) -> None:
    """An engine on GPU 1 of its agent, and a trainer on GPU 0 of one that is killed in the middle of a version."""
    first, second = hub(**of_engine), hub("trainer", **of_trainer)
    engine = EngineRanks(first.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[1], FAKE))
    trainer = Trainer(second.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
    groups += [engine, trainer]
    trainer.publish(1)
    engine.wait_version(1)
    trainer.fill(shards_of(content(2), 2))
    for publisher in trainer.publishers:
        publisher.publish(2, deadline=20)
    second.kill()
    hub.started.remove(second)
    groups.remove(trainer)
    assert_holds(engine.ranks[0].params, content(engine.ranks[0].serving.version))
    again = hub("trainer", **of_trainer)
    successor = Trainer(again.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(3), 2), Device(GPUS[0], FAKE))
    groups.append(successor)
    successor.publish(3)
    engine.wait_version(3, 60)
    assert_serves(engine, content(3))
    assert read_over(first, transport) > 0


def test_an_engine_survives_a_trainers_agent_that_is_killed_over_cuda_ipc(hub, groups):
    outlive_a_trainers_agent(hub, groups, "cuda_ipc", {**lending(), "transports": IPC}, {**lending(), "transports": IPC})


@pytest.mark.parametrize("source, target", [(0, 0), (0, 1), (0, None), (None, 1)])
def test_fp8_weights_are_made_whatever_memory_the_floats_are_in(hub, groups, source, target):
    """Rows of two ranks, some of which cut a block: those are gathered, beside the stage, in its kind of memory."""
    first = hub(**lending(), transports="[shm, tcp]")
    devices = [None if gpu is None else Device(GPUS[gpu], FAKE) for gpu in (source, target)]
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [10, 16],
              "modules_to_not_convert": ["lm_head"]}
    random = np.random.default_rng(3)
    weights = {}
    for name, shape in checkpoint.hf_shapes(CONFIG).items():
        values = random.standard_normal(shape, dtype=np.float32)
        weights[name] = TensorMeta(name, "BF16", shape), as_bf16(values)
    quantized = Quantized(weights, (10, 16), []).hf
    trainer = Trainer(first.agent_socket, CONFIG, "fsdp:dp2", fsdp_shards(weights, 2), devices[0])
    engine = EngineRanks(first.agent_socket, "engine-a", {**CONFIG, "quantization_config": method}, "hf",
                         [[meta for meta, _ in quantized.values()]], device=devices[1])
    groups += [trainer, engine]
    for version in (1, 2):
        trainer.publish(version)
        engine.wait_version(version)
        for name, (_, want) in quantized.items():
            assert np.array_equal(bits(engine.ranks[0].params[name]).view(want.dtype), want), (version, name)


@pytest.mark.parametrize("kind, group, intermediate", [("int4", 8, 88), ("mxfp4", 32, 96)])
@pytest.mark.parametrize("source, target", [(0, 0), (0, 1), (0, None), (None, 1)])
def test_four_bits_are_made_whatever_memory_the_floats_are_in(hub, groups, source, target, kind, group, intermediate):
    """down_proj's columns of two ranks cut a group: that is gathered, beside the stage, in its kind of memory."""
    agent = hub(**lending(), transports="[shm, tcp]")
    devices = [None if gpu is None else Device(GPUS[gpu], FAKE) for gpu in (source, target)]
    config = {**CONFIG, "intermediate_size": intermediate}
    random = np.random.default_rng(4)
    weights = {name: as_bf16(random.standard_normal(shape, dtype=np.float32)) for name, shape in checkpoint.hf_shapes(config).items()}
    stored = four_bits.wanted_of({n: (TensorMeta(n, "BF16", a.shape), a) for n, a in weights.items()}, kind, group)
    shards = [{n: (TensorMeta(n, "BF16", a.shape), np.ascontiguousarray(a)) for n, a in oracle.megatron(config, weights, 2, 1, rank)}
              for rank in range(2)]
    trainer = Trainer(agent.agent_socket, config, "megatron:tp2,pp1", shards, devices[0])
    engine = EngineRanks(agent.agent_socket, "engine-a", four_bits.config_of(config, kind, group), four_bits.SPEC.get(kind, "hf"),
                         [[TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in stored.items()]], device=devices[1])
    groups += [trainer, engine]
    for version in (1, 2):
        trainer.publish(version)
        engine.wait_version(version)
        for name, (_, _, want) in four_bits.moved(stored).items():
            assert bits(engine.ranks[0].params[name]).tobytes() == want, (version, name)


def test_a_snapshot_and_a_late_engine_and_the_sums_of_what_is_served(hub, groups):
    from weightwire import Client
    agent = hub(**lending())
    device = Device(1, FAKE)  # GPU 0, as this process sees it second
    assert device.uuid == GPUS[0]
    trainer = Trainer(agent.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), device)
    engine = EngineRanks(agent.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=device)
    groups += [trainer, engine]
    trainer.publish(1, mode="snapshot")
    trainer.fill(shards_of(content(9), 2))
    engine.wait_version(1)
    assert_serves(engine, content(1))
    late = EngineRanks(agent.agent_socket, "engine-b", CONFIG, "vllm:tp2", shapes(2))
    groups.append(late)
    late.wait_version(1)
    assert_serves(late, content(1))
    with Client(agent.grpc) as client:
        assert client.verify().equal  # a GPU's bytes and the host's sum to the same


def test_where_the_agent_has_no_gpu_memory_it_says_why_and_uses_the_hosts(hub, groups):
    cases = {"gpu is off": {}, "no such file": {"gpu": "auto", "gpu_slab_bytes": LENT, "gpu_library": "/nowhere.so"}}
    device = Device(GPUS[0], FAKE)
    for index, (why, options) in enumerate(cases.items()):
        agent = hub(f"agent-{index}", **options)
        with Publisher(rank=0, world_size=1, agent=agent.agent_socket, group=f"trainer-{index}", device=device) as publisher:
            refused = publisher.device_refused
            assert isinstance(refused, NotReadyError) and GPUS[0] in str(refused) and refused.remedy
            assert why in str(refused).lower()
        engine = EngineRanks(agent.agent_socket, f"engine-{index}", CONFIG, "vllm:tp1", shapes(1), device=device)
        groups.append(engine)
        assert engine.ranks[0].device_refused is not None
    trainer = Trainer(hub.started[0].agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), device)
    groups.append(trainer)
    assert not any(isinstance(array, DeviceArray) for array in trainer.params[0].values())
    trainer.publish(1)
    for engine in groups[:-1]:
        engine.wait_version(1)
        assert_serves(engine, content(1))


def test_a_gpu_that_is_required_and_not_there_is_refused_by_name(hub):
    agent = hub(env=agent_env("1"), **lending())
    with pytest.raises(NotReadyError) as refused:
        Publisher(rank=0, world_size=1, agent=agent.agent_socket, device=Device(GPUS[0], FAKE))
    assert GPUS[0] in str(refused.value) and GPUS[1] in str(refused.value) and refused.value.remedy


def test_an_agent_does_not_start_without_the_gpu_memory_that_is_required(hub):
    for options, why in ((lending(size=5 << 30), f"{5 << 30} bytes on {GPUS[0]}"),
                         ({**lending(), "gpu_library": "/nowhere.so"}, "/nowhere.so"),
                         ({"gpu": "required"}, "gpu_slab_bytes")):
        with pytest.raises(RuntimeError) as failed:
            hub(**options)
        assert why in str(failed.value)


def test_a_stage_that_does_not_fit_is_refused_with_what_it_needs(hub):
    agent = hub(**lending(size=100_000))
    with Subscriber(group="engine-a", rank=0, world_size=1, agent=agent.agent_socket, device=Device(GPUS[0], FAKE)) as engine:
        with pytest.raises(WeightwireError) as refused:
            engine.bind(CONFIG, "vllm:tp1", shapes(1)[0])
    assert refused.value.reason == "limit_exceeded" and GPUS[0] in str(refused.value) and "100000" in str(refused.value)


_HOLDER = """
import os, sys
sys.path[:0] = {path!r}
from test_gpu import *
subscriber = Subscriber(group="engine-a", rank=0, world_size=1, agent={agent!r}, device=Device(GPUS[0], FAKE))
subscriber.bind(CONFIG, "vllm:tp1", shapes(1)[0])
print("bound", flush=True)
sys.stdin.read()
"""


def stage_bytes() -> int:
    return sum(-(-meta.nbytes // 64) * 64 for meta in shapes(1)[0])


def test_memory_is_lent_again_when_its_process_is_killed_and_not_before(hub):
    agent = hub(**lending(size=2 * (stage_bytes() // 512 + 1) * 512))  # of one stage

    def holder() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-c", _HOLDER.format(path=sys.path, agent=agent.agent_socket)],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def bind() -> str:
        with Subscriber(group="engine-b", rank=0, world_size=1, agent=agent.agent_socket, device=Device(GPUS[0], FAKE)) as other:
            try:
                other.bind(CONFIG, "vllm:tp1", shapes(1)[0])
                return ""
            except WeightwireError as error:
                return str(error)
    process = holder()
    assert process.stdout.readline() == "bound\n"
    assert "are in use" in bind()
    process.kill()
    process.wait()
    until("the slabs of the process that was killed are lent again", lambda: bind() == "", 30)
    gc.collect()


class _CollectedInside(dict):
    """Of a device library: the garbage collector runs at its worst moment, between its two looks at what is open."""

    def get(self, *arguments):
        found = super().get(*arguments)
        gc.collect()
        return found


def test_a_slab_that_the_collector_gives_up_inside_of_the_library_hangs_nobody_and_closes_what_nobody_uses(hub):
    agent, device = hub(**lending()), Device(GPUS[0], FAKE)
    library, metas = device._library, [TensorMeta("a", "U8", (1000,))]
    layout = boxes.submission({"a": metas[0]}, [boxes.whole(metas[0])])
    gc.collect()
    assert library._opened == {}

    def bind(name: str) -> DeviceArray:
        with Publisher(rank=0, world_size=1, agent=agent.agent_socket, group=name, device=device) as publisher:
            return publisher.bind_boxes(layout)["a"]
    gc.disable()
    try:
        ring = [bind("first")]
        ring.append(ring)
        del ring  # only the collector finds it
        (handle, (_, users)), = library._opened.items()
        assert users == 1
        library._opened = _CollectedInside(library._opened)
        bound: list[DeviceArray] = []
        binder = threading.Thread(target=lambda: bound.append(bind("second")), daemon=True)
        binder.start()
        binder.join(20)
        assert not binder.is_alive(), "the finalizer waits for the lock that its own thread holds"
    finally:
        gc.enable()
    assert [*library._opened] == [handle] and library._opened[handle][1] == 1
    values = np.arange(1000, dtype=np.int64).astype(np.uint8)
    bound[0].write(values)  # its mapping was not closed with the first one's
    assert np.array_equal(bound[0].read(), values)
    bound.clear()
    assert library._opened == {}
    library._opened = {}


def test_what_is_served_survives_an_agent_that_is_killed_in_the_middle(hub, groups):
    slow = {"rate_limit": 400_000, "transports": "[tcp]"}
    first = hub(**lending(), **slow)
    second = hub("engine", **lending(), **slow)
    device = Device(GPUS[0], FAKE)
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), device)
    engine = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=device)
    groups += [trainer, engine]
    trainer.publish(1)
    engine.wait_version(1)
    served = engine.ranks[0].params
    trainer.fill(shards_of(content(2), 2))
    releases = [publisher.publish(2, deadline=20) for publisher in trainer.publishers]
    until("version 2 is on its way",
          lambda: second.counter('weightwire_transfer_bytes_total{direction="in",transport="tcp"}') > 350_000)
    second.kill()
    hub.started.remove(second)
    assert_holds(served, content(1))  # the lease keeps them, whoever else is given GPU memory
    until("the engine serves nothing", lambda: engine.ranks[0].serving is None)
    hub("engine", **lending(), **slow)
    for release in releases:
        release.wait_released(60)
    engine.wait_version(2, 60)
    assert_serves(engine, content(2))
    assert_holds(served, content(1))


def test_a_trainer_that_is_killed_takes_nothing_with_it(hub, groups, tmp_path):
    agent = hub(**lending())
    program = tmp_path / "trainer.py"
    program.write_text(f"""
import sys
sys.path[:0] = {sys.path!r}
from test_gpu import *
trainer = Trainer({agent.agent_socket!r}, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), Device(GPUS[0], FAKE))
trainer.publish(1)
print("published", flush=True)
for publisher in trainer.publishers:
    publisher.publish(2)
print("under way", flush=True)
sys.stdin.read()
""")
    engine = EngineRanks(agent.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=Device(GPUS[1], FAKE))
    groups.append(engine)
    process = subprocess.Popen([sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "published\n" and process.stdout.readline() == "under way\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    engine.wait_version(engine.ranks[0].serving.version)
    assert_serves(engine, content(1))  # version 2 has the same bytes; whichever it serves is whole
    trainer = Trainer(agent.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(3), 2), Device(GPUS[0], FAKE))
    groups.append(trainer)
    trainer.publish(3)
    engine.wait_version(3)
    assert_serves(engine, content(3))
