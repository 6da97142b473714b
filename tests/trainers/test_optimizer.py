"""megatron-core's own distributed optimizer: its checkpoints are read, ours are read by it, and a live one is saved and
loaded under another layout and another data-parallel size, bit for bit, and steps on as if nothing had happened."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import BINARIES, ROOT
from optimizer_ranks import METADATA, go_on, save, save_numbered, save_plain
from weightwire import checkpoint
from weightwire.checkpoint.planner import planner_of
from world import World

FIXTURES = ROOT / "tests/data/megatron"


@pytest.fixture
def model(tmp_path):
    """A fixture's model with a vocabulary that no layout pads: mcore keeps states of padding, weightwire does not."""
    def make(name: str):
        hf = json.loads((FIXTURES / name / "hf/config.json").read_text())
        tensors = load_file(FIXTURES / name / "hf/model.safetensors")
        for table in [t for t in tensors if t.endswith(("embed_tokens.weight", "lm_head.weight"))]:
            tensors[table] = torch.cat([tensors[table], tensors[table][:256 - hf["vocab_size"]] * 2])
        folder = tmp_path / "hf"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**hf, "vocab_size": 256, "padded_vocab": 256}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    return make


@pytest.mark.parametrize("name,saved_by,sizes,loaded_by,other", [
    ("qwen2_tied", 4, dict(tp=2, pp=2), 2, dict(tp=1)),
    ("qwen2", 4, dict(tp=2), 4, dict(tp=1, pp=2)),
    ("qwen3_moe", 4, dict(tp=2, ep=2, etp=2), 2, dict(ep=2, etp=1))])
def test_a_trainer_goes_on_with_every_bit_of_its_optimizer(tmp_path, monkeypatch, model, name, saved_by, sizes, loaded_by, other):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    folder, experts = model(name), ",spec=local" if name == "qwen3_moe" else ""
    (tmp_path / "mcore").mkdir()
    with World(save, saved_by, str(folder), str(tmp_path), sizes, METADATA) as world:
        world.join(180)
    checkpoint.convert(tmp_path / "state", tmp_path / "converted", f"torch_dist:vocab_pad=256{experts}", verify=True)
    with World(go_on, loaded_by, str(folder), str(tmp_path), other, METADATA) as world:
        world.join(180)
    for group in ("exp_avg", "exp_avg_sq", "param"):  # what mcore saved and what we saved are the same tensors
        found = [checkpoint.open_checkpoint(tmp_path / saved, group) for saved in ("mcore", "converted")]
        a, b = ({n: one.files.flat(t, 0, t.count) for n, t in one.ranks[0].items()} for one in found)
        assert len(a) > 20 and a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


def test_states_of_megatrons_plain_optimizer_are_read(tmp_path, monkeypatch, model):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    (tmp_path / "mcore").mkdir()
    with World(save_plain, 4, str(model("qwen2_tied")), str(tmp_path / "mcore"), dict(tp=2, pp=2)) as world:
        world.join(180)


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_states_by_bucket_are_refused_with_what_to_do(tmp_path, model, kind):
    folder = model("qwen2_tied")
    (tmp_path / "mcore").mkdir()
    with World(save, 2, str(folder), str(tmp_path), dict(tp=1), {**METADATA, "distrib_optim_sharding_type": kind}, False) as world:
        world.join(180)
    with pytest.raises(checkpoint.CheckpointError, match=f"an optimizer saved as {kind}, cut.*fully_reshardable"):
        checkpoint.open_checkpoint(tmp_path / "mcore", "exp_avg")


def test_the_stored_optimizer_is_what_megatron_writes(tmp_path):
    """tests/data/checkpoints/torch_dist-optimizer, which tests read without mcore; WEIGHTWIRE_UPDATE=1 writes it anew."""
    hf = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 16, "intermediate_size": 32,
          "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 8, "vocab_size": 64, "padded_vocab": 64, "rms_norm_eps": 1e-6,
          "tie_word_embeddings": False, "max_position_embeddings": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
          "norm_topk_prob": True, "hidden_act": "silu", "torch_dtype": "bfloat16"}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/config.json").write_text(json.dumps(hf))
    held = planner_of(json.dumps(hf), str(BINARIES / "wwctl")).layout("hf")[0]
    save_file({meta.name: torch.zeros(meta.shape, dtype=torch.bfloat16) for meta in held}, tmp_path / "hf/model.safetensors",
              metadata={"format": "pt"})
    (tmp_path / "made").mkdir()
    with World(save_numbered, 4, str(tmp_path / "hf"), str(tmp_path / "made"), dict(tp=2, ep=2, etp=1)) as world:
        world.join(180)
    shutil.copy(tmp_path / "hf/config.json", tmp_path / "made/config.json")
    stored = ROOT / "tests/data/checkpoints/torch_dist-optimizer"
    if os.environ.get("WEIGHTWIRE_UPDATE"):
        shutil.rmtree(stored, ignore_errors=True)
        shutil.copytree(tmp_path / "made", stored)
    assert json.loads((stored / "config.json").read_text()) == hf
    for group in ("exp_avg", "exp_avg_sq", "param"):
        found = [checkpoint.open_checkpoint(folder, group) for folder in (stored, tmp_path / "made")]
        a, b = ({n: one.files.flat(t, 0, t.count) for n, t in one.ranks[0].items()} for one in found)
        assert len(a) > 20 and a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)
