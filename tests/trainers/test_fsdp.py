"""FSDP2, HSDP, FSDP2 over tensor parallelism and FSDP1 arrive as torch itself gathers them, bit for bit."""

import pytest
import torch

from torch_ranks import make_checkpoint, train_sharded
from world import World


@pytest.mark.parametrize("kind,world_size,dtype,model", [
    ("fsdp2", 2, torch.float32, {}),
    ("fsdp2", 4, torch.bfloat16, {"tie_word_embeddings": True}),
    ("hsdp", 4, torch.float32, {"model_type": "qwen3"}),
    ("fsdp2-dim1", 4, torch.float32, {}),
    ("fsdp2-tp", 4, torch.float32, {"intermediate_size": 54}),
    ("fsdp1", 3, torch.float32, {}),
    ("fsdp1-orig", 2, torch.float32, {"tie_word_embeddings": True}),
    ("hsdp1", 4, torch.float32, {}),
])
def test_shards_arrive_as_torch_gathers_them(daemon, hf_engine, tmp_path, kind, world_size, dtype, model):
    checkpoint = make_checkpoint(tmp_path / "hf", dtype=dtype, **model)
    engine = hf_engine(checkpoint)
    with World(train_sharded, world_size, daemon.agent_socket, str(checkpoint), str(tmp_path), kind, dtype, 3) as world:
        for version in (1, 2, 3):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
    versions = [(tmp_path / f"v{version}.safetensors").read_bytes() for version in (1, 2, 3)]
    assert len(set(versions)) == 3
    if dtype == torch.float32:
        from conftest import read_safetensors
        first, loaded = read_safetensors(tmp_path / "v1.safetensors"), read_safetensors(checkpoint / "model.safetensors")
        assert all((first[name][1] == bits).all() for name, (_, bits) in loaded.items())
