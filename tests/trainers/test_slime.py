"""weightwire.slime as slime's actor drives it: real megatron-core ranks, real daemon, SGLang's loader hook; slime's, Ray's
and SGLang's own processes are stood in for (slime_standins.py)."""

import importlib
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml

import weightwire.slime
import weightwire.sglang
from conftest import BINARIES, ROOT, Daemon, read_safetensors
from slime_ranks import arguments, train
from slime_standins import SglangServer
from weightwire import RefusedError
from world import World

CHECKPOINT = ROOT / "tests/data/megatron/qwen2/hf"
JOIN = ["get_url", "update_weights_from_tensor"]
DELTA = dict(update_weight_mode="delta", update_weight_transport="disk")
ROUND = ["pause_generation", "flush_cache", "update_weights_from_tensor", "continue_generation"]


@pytest.fixture
def daemon(tmp_path):
    """An engine that has not loaded what is committed holds the next version up until commit_deadline."""
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                     commit_deadline_ms=5000)
    yield started
    assert started.stop() == 0


@pytest.fixture
def servers(daemon, tmp_path):
    opened = []

    def start(*faults):
        opened.extend(SglangServer(tmp_path / f"s{i}", fault) for i, fault in enumerate(faults))
        return opened

    yield start
    for server in opened:
        server.close()
    for rank in weightwire.sglang._ranks.values():
        rank.close()
    weightwire.sglang._ranks.clear()


def holds(tensors, path) -> bool:
    """Bit for bit; an engine that was never loaded holds nothing."""
    want = read_safetensors(path)
    return tensors.keys() == want.keys() and all(
        tensors[name].view(torch.int16).numpy().view("uint16").tobytes() == bits.tobytes()
        for name, (_, bits) in want.items())


def run(daemon, tmp_path, servers, world_size, sizes, *more):
    with World(train, world_size, daemon.agent_socket, str(CHECKPOINT), str(tmp_path), sizes,
               [server.path for server in servers], *more) as world:
        world.join(120)


def errors(tmp_path, world_size) -> list[str]:
    return [(tmp_path / f"error-{rank}").read_text() for rank in range(world_size)]


def test_every_version_reaches_every_engine_in_slimes_order(daemon, servers, tmp_path):
    engines = servers({}, {})
    run(daemon, tmp_path, engines, 4, dict(tp=2, pp=2), [])
    for engine in engines:
        assert engine.calls == JOIN + ROUND * 2 + ["get_url"] + ROUND  # who has joined need not join again
        assert engine.versions == [None, "1", "2", "3"]
        assert [holds(engine.served[i], tmp_path / f"v{i + 1}.safetensors") for i in range(3)] == [True] * 3
        assert not holds(engine.served[1], tmp_path / "v1.safetensors")


@pytest.mark.parametrize("method,fault,deadline", [("flush_cache", "requests are pending", 60),
                                                   ("pause_generation", "hang", 20)])
def test_failing_before_anything_was_loaded_all_go_on_with_the_old_version(daemon, servers, tmp_path, method, fault,
                                                                           deadline):
    engines = servers({}, {method: {2: fault}})
    run(daemon, tmp_path, engines, 2, dict(pp=2), [2], 0, deadline)
    for error in errors(tmp_path, 2):  # the same on every rank
        assert "version 2" in error and "sglang-127-0-0-1-s1 failed in " + method in error
        assert "nothing was loaded, engines serve on with version 1" in error
    for engine in engines:  # version 2 lies in the memory that version 3 needs: it is loaded first
        assert engine.versions == [None, "1", "2", "3"] and len(engine.served) == 4
        assert [holds(served, tmp_path / f"v{v}.safetensors") for served, v in zip(engine.served, (1, 1, 2, 3))] == [True] * 4


def test_what_no_engine_could_load_is_loaded_before_the_next_version(daemon, servers, tmp_path):
    engines = servers(*[{"update_weights_from_tensor": {3: "lm_head"}}] * 2)
    run(daemon, tmp_path, engines, 2, dict(pp=2), [2])
    for engine in engines:
        assert engine.calls == JOIN + ROUND + ROUND[:3] + ROUND * 2
        assert [holds(served, tmp_path / f"v{v}.safetensors") for served, v in zip(engine.served, (1, 2, 3))] == [True] * 3


def test_a_trainer_that_died_before_its_version_was_loaded_is_followed_by_one_that_goes_on(daemon, servers, tmp_path):
    engines = servers({"flush_cache": {2: "requests are pending"}}, {})
    run(daemon, tmp_path, engines, 2, dict(pp=2), [2], 0, 60, 2)
    assert [engine.versions for engine in engines] == [[None, "1"]] * 2
    run(daemon, tmp_path, engines, 2, dict(pp=2), [], 0, 60, 2, "resume", "again")
    for engine in engines:
        assert engine.versions == [None, "1", None, "2", "2/1", "2/2"]  # of a new lineage
        assert [holds(served, tmp_path / f"{v}.safetensors")
                for served, v in zip(engine.served, ("v1", "v1", "v2", "again1", "again2"))] == [True] * 5


def test_failing_to_publish_no_engine_is_touched(daemon, servers, tmp_path):
    engines = servers({})
    run(daemon, tmp_path, engines, 2, dict(pp=2), [2], 2, 20)
    for error in errors(tmp_path, 2):
        assert "no engine was touched, all serve on with version 1" in error
        assert "training rank 1: RefusedError" in error and "storage is freed" in error
    assert engines[0].calls == JOIN + ROUND * 2
    assert holds(engines[0].served[1], tmp_path / "v3.safetensors")


def test_an_engine_that_could_not_load_stays_paused_until_the_next_update(daemon, servers, tmp_path):
    good, bad = servers({}, {"update_weights_from_tensor": {3: "lm_head"}})
    run(daemon, tmp_path, [good, bad], 2, dict(pp=2), [2])
    for error in errors(tmp_path, 2):
        assert "sglang-127-0-0-1-s1 failed in update_weights_from_tensor" in error and "lm_head" in error
        assert "these stay paused, ['sglang-127-0-0-1-s0'] may serve the new version" in error
    assert good.calls == JOIN + ROUND * 3
    assert bad.calls == JOIN + ROUND + ROUND[:3] + ROUND
    assert holds(good.served[1], tmp_path / "v2.safetensors")
    assert holds(good.served[2], tmp_path / "v3.safetensors") and holds(bad.served[1], tmp_path / "v3.safetensors")


@pytest.mark.parametrize("changes", [dict(colocate=True), dict(update_weight_mode="delta"), DELTA | dict(colocate=True),
                                     dict(update_weight_transport="disk"), dict(sglang_custom_weight_loader=None)])
def test_a_job_that_would_not_use_it_is_refused(changes):
    with pytest.raises(RefusedError):
        weightwire.slime.install(arguments("", str(CHECKPOINT), **changes))


@pytest.fixture
def slime_modules(monkeypatch):
    """slime's actor, and where it imports its updater of changes from."""
    actor, changes = SimpleNamespace(UpdateWeightFromDistributed=None), SimpleNamespace(UpdateWeightFromDiskDelta=None)
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils", SimpleNamespace(actor=actor))
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta", changes)
    return actor, changes


@pytest.mark.parametrize("imported", [False, True])
@pytest.mark.parametrize("more, published", [({}, "always"), (dict(weightwire_delta="auto"), "auto"), (dict(weightwire_delta=False), False)])
def test_slimes_mode_delta_is_served_by_changes(slime_modules, monkeypatch, imported, more, published):
    actor, changes = slime_modules
    if imported:
        actor.UpdateWeightFromDiskDelta = None
    args = arguments("", str(CHECKPOINT), **DELTA, **more)
    weightwire.slime.install(args)
    assert actor.UpdateWeightFromDistributed is None
    chosen = {place.UpdateWeightFromDiskDelta for place in ([actor, changes] if imported else [changes])}
    given = {}
    monkeypatch.setattr(weightwire.slime.megatron, "Publisher", lambda *_, **options: given.update(options) or SimpleNamespace(
        spec="", publish=lambda *_, **__: SimpleNamespace(wait_released=lambda _: None)))
    monkeypatch.setattr(weightwire.slime, "dist", SimpleNamespace(get_rank=lambda: 1))
    assert len(chosen) == 1
    chosen.pop()(args, [])._publish()
    assert given["delta"] == published


def test_a_slime_without_that_mode_is_named(slime_modules, monkeypatch):
    monkeypatch.setitem(sys.modules, "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta", None)
    with pytest.raises(RefusedError, match="no delta mode"):
        weightwire.slime.install(arguments("", str(CHECKPOINT), **DELTA))


def test_a_quantized_rollout_is_refused():
    with pytest.raises(RefusedError, match="quantized"):
        weightwire.slime.WeightUpdater(arguments("", str(CHECKPOINT)), [], quantization_config={"quant_method": "fp8"})


def test_the_documented_arguments_plug_it_in_and_are_read(slime_modules):
    blocks = dict(re.findall(r"```(bash|yaml) slime\n(.*?)```", (ROOT / "docs/frameworks.md").read_text(), re.S))
    options = dict(line.removeprefix("--").split() for line in blocks["bash"].splitlines())
    assert yaml.safe_load(blocks["yaml"]) == dict(weightwire_deadline=300, weightwire_job="", weightwire_agent="")
    args = arguments("/agent.sock", str(CHECKPOINT), sglang_custom_weight_loader=[options["sglang-custom-weight-loader"]],
                     weightwire_deadline=7, weightwire_job="second")
    actor, _ = slime_modules
    module, _, name = options["custom-megatron-init-path"].rpartition(".")
    getattr(importlib.import_module(module), name)(args)
    updater = actor.UpdateWeightFromDistributed(args, [])
    assert (updater._deadline, updater._job, updater._agent) == (7, "second", "/agent.sock")
