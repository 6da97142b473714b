"""megatron-core's HybridModel, a layer for each mixer, arrives as mcore's own checkpoint description says that it is."""

import importlib.metadata
import json

import pytest

from bridge_job import hybrid, hybrid_less_one
from conftest import ROOT, read_safetensors
from world import World, preload

preload("hybrid_ranks")  # with the stub of Transformer Engine: not for other files' ranks, see conftest.py
FILES = importlib.metadata.files("megatron-core")


pytestmark = pytest.mark.skipif(not any("core/models/hybrid/" in str(file) for file in FILES),
                                reason="this megatron-core has no HybridModel")


@pytest.mark.parametrize("model,world_size,sizes,pattern,spec", [
    ("qwen2", 2, dict(tp=2), "*-*-*-*-", "tp2,pp1,model=hybrid,spec=te,vocab_pad=256"),
    # A stage ends between the attention and the MLP of a layer.
    ("qwen2_tied", 2, dict(pp=2), "*-*|-*-*-", "tp1,pp2,layers=3-5,model=hybrid,spec=te,vocab_pad=256"),
    ("qwen2", 2, dict(pp=2, vpp=2), "*-|*-*|-*|-", "tp1,pp2,vpp2,layers=2-3-2-1,model=hybrid,spec=te,vocab_pad=256"),
    ("qwen3_moe", 2, dict(ep=2), "*E*E*E*E", "tp1,pp1,dp2,ep2,etp1,experts=te,model=hybrid,spec=te,vocab_pad=256"),
])
def test_trained_versions_of_a_hybrid_model_arrive(daemon, hf_engine, tmp_path, model, world_size, sizes, pattern, spec):
    checkpoint = ROOT / "tests/data/megatron" / model / "hf"
    engine = hf_engine(checkpoint)
    options = dict(moe_grouped_gemm=True) if "E" in pattern else {}
    with World(hybrid, world_size, daemon.agent_socket, str(checkpoint), str(tmp_path), sizes, options, pattern,
               f"megatron:{spec}", 2) as world:
        for version in (1, 2):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
    loaded = read_safetensors(checkpoint / "model.safetensors")
    versions = [read_safetensors(tmp_path / f"v{version}.safetensors") for version in (1, 2)]
    for name, (_, bits) in loaded.items():
        assert (versions[0][name][1] == bits).all(), name
        assert (versions[1][name][1] != bits).any(), name


def test_norms_that_a_hybrid_model_holds_less_one_arrive_whole(daemon, hf_engine, tmp_path):
    checkpoint = ROOT / "tests/data/megatron/qwen3/hf"
    engine = hf_engine(checkpoint)
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    with World(hybrid_less_one, 2, daemon.agent_socket, str(checkpoint), str(tmp_path), dict(tp=2), "*-" * layers) as world:
        for version in (1, 2):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
