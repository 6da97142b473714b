"""Models that mbridge 0.15.1 and Megatron-Bridge 0.3.1 built, at Transformer Engine's names."""

import pytest

from conftest import ROOT, read_safetensors
from bridge_job import adapted, added, computing, delayed, fused_experts, interleaved, mappings, train
from world import World, preload

preload("bridge_ranks")  # with the stub of Transformer Engine: not for other files' ranks, see conftest.py
FIXTURES = ROOT / "tests/data/megatron"


@pytest.mark.parametrize("kind,by,model,world_size,sizes", [
    ("mbridge", "scheme", "qwen2", 4, dict(tp=2, pp=2)),
    ("mbridge", "scheme", "qwen3_moe", 2, dict(ep=2)),
    ("mbridge", "export", "qwen2_tied", 4, dict(tp=2, pp=2)),
    ("mbridge", "export", "qwen3_moe", 4, dict(tp=2, ep=2, etp=1, pp=2)),
    ("mbridge", "unverified", "qwen3_moe", 2, dict(tp=2, etp=1)),  # of which mbridge's export fails
    ("megatron-bridge", "scheme", "qwen2_tied", 2, dict(pp=2)),
    ("megatron-bridge", "tasks", "qwen2_tied", 4, dict(tp=2, pp=2)),
    ("megatron-bridge", "tasks", "qwen2_kv2", 4, dict(tp=4)),
    ("megatron-bridge", "tasks", "qwen3_moe", 4, dict(tp=2, ep=2, etp=1, pp=2)),
])
def test_versions_arrive(daemon, hf_engine, tmp_path, kind, by, model, world_size, sizes):
    checkpoint = FIXTURES / model / "hf"
    engine = hf_engine(checkpoint)
    with World(train, world_size, kind, by, daemon.agent_socket, str(checkpoint), str(tmp_path), sizes) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
    loaded = read_safetensors(checkpoint / "model.safetensors")
    first, last = (read_safetensors(tmp_path / f"v{version}.safetensors") for version in (1, 3))
    assert not [name for name, (_, bits) in loaded.items() if (first[name][1] != bits).any()], "not as loaded"
    assert not [name for name, (_, bits) in loaded.items() if (last[name][1] == bits).all()], "not trained"


def test_parameters_of_mbridges_models_are_gathered_where_they_wait_for_the_next_forward_pass(daemon, hf_engine, tmp_path):
    folder = FIXTURES / "qwen2" / "hf"
    engine = hf_engine(folder)
    with World(delayed, 2, daemon.agent_socket, str(folder), str(tmp_path)) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


@pytest.mark.parametrize("by", ["tasks", "scheme", "mbridge"])
def test_gate_and_up_in_alternating_blocks_arrive_one_behind_the_other(daemon, hf_engine, tmp_path, by):
    folder = FIXTURES / "qwen3_moe" / "hf"
    engine = hf_engine(folder)
    with World(interleaved, 2, by, daemon.agent_socket, str(folder), str(tmp_path), 8) as world:
        for version in (1, 2):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_kind_of_mapping_is_recorded_as_it_gathers(tp):
    with World(mappings, tp, tp) as world:
        world.join()


@pytest.mark.parametrize("tp", [1, 2])
def test_experts_that_the_checkpoint_has_in_one_tensor_lie_where_the_bridge_stacks_them(tp):
    with World(fused_experts, tp, tp) as world:
        world.join()


def test_a_mapping_that_computes_or_collects_is_refused():
    with World(computing, 1) as world:
        world.join()


def test_adapters_of_megatron_bridge_are_refused(daemon):
    with World(adapted, 1, daemon.agent_socket, str(FIXTURES / "qwen3" / "hf")) as world:
        world.join()


def test_what_a_mapping_adds_is_added(daemon, hf_engine, tmp_path):
    folder = FIXTURES / "qwen3" / "hf"
    engine = hf_engine(folder)
    with World(added, 2, daemon.agent_socket, str(folder), str(tmp_path)) as world:
        for version in (1, 2):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
