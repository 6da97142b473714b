"""The transport nccl between real agents: fake GPUs, and a fake NCCL whose bytes go from process to process. The agents see
one GPU each, or two. No hardware has run this."""

from __future__ import annotations

import pathlib
import time

import pytest

import test_gpu
from conftest import BINARIES, EngineRanks, Trainer
from test_gpu import CONFIG, FAKE, assert_serves, content, hub, lending, read_over, shapes, shards_of  # noqa: F401
from weightwire import Client, Device

NCCL = str(BINARIES.parent / "lib/libfake_nccl_pair.so")
HANG_INIT, HANG_OPERATION = "1", "2"


def seeing(devices: str, **more: str) -> dict:
    return {**test_gpu.agent_env(devices), "FAKE_NCCL_EVENTS_ELSEWHERE": "1", **more}


def nccl(transports: str = "[nccl, tcp]", **more) -> dict:
    return {**lending(), "transports": transports, "nccl_library": NCCL, **more}


def gpu(number: int) -> Device:
    return Device(f"GPU-fafafafa-fafa-fafa-fafa-fafafafafa0{number}", FAKE)


def fleet(hub, groups, *, source: dict, target: dict, of_source: dict | None = None, of_target: dict | None = None):  # noqa: F811
    """Two agents; a trainer on GPU 0 of the first, an engine on GPU 1 of the second."""
    first, second = hub(env=source, **nccl(**of_source or {})), hub("engine", env=target, **nccl(**of_target or {}))
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), gpu(0))
    engine = EngineRanks(second.agent_socket, "engine-a", CONFIG, "vllm:tp1", shapes(1), device=gpu(1))
    groups += [trainer, engine]
    return first, second, trainer, engine


def publish(trainer, engines, version: int, timeout: float = 20) -> None:
    """One engine, or several."""
    trainer.fill(shards_of(content(version), 2))
    trainer.publish(version)
    for engine in engines if isinstance(engines, list) else [engines]:
        engine.wait_version(version, timeout)
        assert_serves(engine, content(version))


def transports_of(agent, version: int) -> dict:
    with Client(agent.grpc) as client:
        return next(dict(e.bytes_by_transport) for e in client.status().epochs if e.version == version)


def test_weights_go_from_gpu_to_gpu_and_the_report_says_so(hub, groups):  # noqa: F811
    """Each agent's GPU breaks when more than a twentieth of the weights goes between it and the host: sums do, and what a
    lane carries first."""
    versions = 3
    weights = sum(array.nbytes for array in content(1).values()) * versions
    few = {"FAKE_CUDA_HOST_BYTES": str(weights // 20)}
    first, second, trainer, engine = fleet(hub, groups, source=seeing("0", **few), target=seeing("1", **few))
    for version in range(1, versions + 1):
        publish(trainer, engine, version)
        assert set(transports_of(first, version)) == {"nccl-gpu"}
    assert read_over(second, "nccl") >= weights and read_over(second, "tcp") == 0
    assert second.counter('weightwire_gpu_transfer_bytes_total{direction="in",path="direct",transport="nccl"}') >= weights
    assert "transport nccl at" in second.status()


def test_engines_on_several_gpus_and_in_host_memory_are_read_for_over_one_session(hub, groups):  # noqa: F811
    first = hub(env=seeing("0,2"), **nccl("[nccl]"))
    second = hub("engine", env=seeing("1,3"), **nccl("[nccl]"))
    trainer = Trainer(first.agent_socket, CONFIG, "megatron:tp2,pp1", shards_of(content(1), 2), gpu(0))
    engines = [EngineRanks(second.agent_socket, f"engine-{i}", CONFIG, "vllm:tp2", shapes(2), device=device)
               for i, device in enumerate((gpu(1), None))]
    groups += [trainer, *engines]
    for version in (1, 2):
        publish(trainer, engines, version)
    assert read_over(second, "nccl") > 0


@pytest.mark.parametrize("fault", [HANG_INIT, HANG_OPERATION])
def test_an_nccl_that_hangs_delays_the_first_version_and_the_next_transport_moves_it(hub, groups, fault):  # noqa: F811
    first, second, trainer, engine = fleet(hub, groups, source=seeing("0"), target=seeing("1", FAKE_NCCL_FAULT=fault),
                                           of_target={"nccl_form_timeout_ms": 1500})
    publish(trainer, engine, 1, 40)
    assert set(transports_of(first, 1)) == {"tcp"}
    began = time.monotonic()
    publish(trainer, engine, 2)  # within the minute in which nccl is avoided
    assert time.monotonic() - began < 5
    assert second.counter('weightwire_transport_failovers_total{from="nccl",to="tcp"}') > 0


def test_agents_with_different_nccls_use_the_next_transport_at_once(hub, groups):  # noqa: F811
    first, second, trainer, engine = fleet(hub, groups, source=seeing("0"), target=seeing("1", FAKE_NCCL_VERSION="22105"))
    publish(trainer, engine, 1)
    assert set(transports_of(first, 1)) == {"tcp"}
    assert second.counter('weightwire_transport_failovers_total{from="nccl",to="tcp"}') == 0


def test_an_agent_without_nccl_says_so_and_runs(hub, groups):  # noqa: F811
    first, second, trainer, engine = fleet(hub, groups, source=seeing("0"), target=seeing("1"),
                                           of_target={"nccl_library": "/nowhere/libnccl.so.2"})
    publish(trainer, engine, 1)
    assert set(transports_of(first, 1)) == {"tcp"}
    log = pathlib.Path(second.agent_socket).with_name("engine.log").read_text()
    assert "transport nccl cannot run here" in log and "/nowhere/libnccl.so.2" in log


def test_an_engine_survives_a_trainers_agent_that_is_killed_over_nccl(hub, groups):  # noqa: F811
    test_gpu.outlive_a_trainers_agent(hub, groups, "nccl", {"env": seeing("1"), **nccl("[nccl]")}, {"env": seeing("0"), **nccl("[nccl]")})


@pytest.mark.parametrize("settings, words", [
    ({"gpu": "off"}, ["transports names nccl", "gpu is off"]),
    ({**lending(), "integrity": "mac", "insecure": "true"}, ["nccl", "carries no MAC"])])
def test_settings_that_nccl_cannot_keep_are_refused(hub, settings, words):  # noqa: F811
    with pytest.raises(RuntimeError) as failed:
        hub(transports="[nccl]", **settings)
    assert all(word in str(failed.value) for word in words), failed.value
