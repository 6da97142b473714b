"""Real megatron-core models arrive as mcore's own checkpoint description says that they are, bit for bit."""

import pytest

from conftest import ROOT, read_safetensors
from mcore_ranks import read_back, train, train_offloaded
from world import World

FIXTURES = ROOT / "tests/data/megatron"


@pytest.mark.parametrize("model,world_size,sizes,options,spec", [
    ("qwen2", 4, dict(tp=2, pp=2), {}, "tp2,pp2,vocab_pad=256"),
    ("qwen2_tied", 4, dict(tp=2, pp=2), {}, "tp2,pp2,vocab_pad=256"),
    ("qwen2", 2, dict(pp=2, vpp=2), {}, "tp1,pp2,vpp2,vocab_pad=256"),
    ("qwen2", 2, dict(pp=2), dict(num_layers_in_first_pipeline_stage=1), "tp1,pp2,layers=1-3,vocab_pad=256"),
    ("qwen2", 4, dict(tp=1, pp=2, order="tp-cp-ep-pp-dp"), {},
     "tp1,pp2,dp2,order=tp-cp-ep-pp-dp,vocab_pad=256"),
    ("qwen3_moe", 2, dict(ep=2), {}, "tp1,pp1,dp2,ep2,etp1,experts=sequential,vocab_pad=256"),
    ("qwen3_moe", 4, dict(tp=2, ep=2, etp=1, pp=2), {}, "tp2,pp2,ep2,etp1,experts=sequential,vocab_pad=256"),
    ("qwen3", 2, dict(cp=2), {}, "tp1,pp1,cp2,vocab_pad=256"),
])
def test_trained_versions_arrive(daemon, hf_engine, tmp_path, model, world_size, sizes, options, spec):
    checkpoint = FIXTURES / model / "hf"
    engine = hf_engine(checkpoint)
    with World(train, world_size, daemon.agent_socket, str(checkpoint), str(tmp_path), sizes, options,
               f"megatron:{spec}", 3) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
    loaded = read_safetensors(checkpoint / "model.safetensors")
    versions = [read_safetensors(tmp_path / f"v{version}.safetensors") for version in (1, 2, 3)]
    for name, (_, bits) in loaded.items():
        assert (versions[0][name][1] == bits).all(), name
        assert (versions[1][name][1] != bits).any() and (versions[2][name][1] != versions[1][name][1]).any(), name


def test_parameters_that_are_offloaded_when_published_arrive(daemon, hf_engine, tmp_path):
    checkpoint = FIXTURES / "qwen3_moe" / "hf"
    engine = hf_engine(checkpoint)
    with World(train_offloaded, 2, daemon.agent_socket, str(checkpoint), str(tmp_path)) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


def test_whole_tensors_come_one_at_a_time_without_a_gather(daemon, tmp_path):
    with World(read_back, 2, daemon.agent_socket, str(FIXTURES / "qwen2" / "hf"), str(tmp_path)) as world:
        world.join()
