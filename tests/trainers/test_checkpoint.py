"""Checkpoints that real megatron-core, torch.distributed.checkpoint and safetensors wrote are read, and they read ours."""

import json
import warnings

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import family_files
import mcore
from checkpoint_ranks import load, save
from conftest import ROOT, read_safetensors
from weightwire import checkpoint
from world import World

FIXTURES = ROOT / "tests/data/megatron"


def same(folder_or_file, model: str) -> None:
    """Bit for bit what the model's Hugging Face checkpoint holds."""
    path = folder_or_file if folder_or_file.is_file() else folder_or_file / "model.safetensors"
    got, want = read_safetensors(path), read_safetensors(FIXTURES / model / "hf/model.safetensors")
    want = {name: value for name, value in want.items() if name in got or name != "lm_head.weight"}
    assert got.keys() == want.keys()
    for name, (meta, bits) in want.items():
        assert got[name][0].dtype == meta.dtype and (got[name][1] == bits).all(), name


def config_of(model: str):
    return FIXTURES / model / "hf/config.json"


@pytest.mark.parametrize("model,world_size,sizes,options,words", [
    ("qwen2_tied", 4, dict(tp=2, pp=2), {}, "tp2,pp2"),
    ("qwen2", 2, dict(pp=2, vpp=2), {}, "pp2,vpp2"),
    ("qwen2", 2, dict(pp=2), dict(num_layers_in_first_pipeline_stage=1), "pp2,first=1"),
    ("qwen3_moe", 4, dict(tp=2, ep=2, etp=2), {}, "tp2,ep2,dp2"),
])
def test_what_megatron_saved_becomes_the_hugging_face_checkpoint(tmp_path, model, world_size, sizes, options, words):
    (tmp_path / "torch_dist").mkdir()
    spec = f"megatron:{words},vocab_pad=256"
    with World(save, world_size, str(FIXTURES / model / "hf"), str(tmp_path), sizes, options, spec) as world:
        world.join(120)
    left_out = {}
    for name in ("torch_dist", "megatron", "weightwire"):
        told = spec if name == "megatron" and "first" in words else None  # else its files tell
        report = checkpoint.convert(tmp_path / name, tmp_path / f"{name}-hf", "hf", config=config_of(model),
                                    source_spec=told, verify=True)
        same(tmp_path / f"{name}-hf", model)
        left_out[name] = set(report.left_out)
    assert left_out["megatron"] == {"args", "iteration", "optimizer"} and not left_out["weightwire"]
    assert list((tmp_path / "changed").glob("*.delta")) and not list((tmp_path / "changed").glob("*.safetensors"))
    checkpoint.compact(tmp_path / "changed")
    for rank in range(world_size):
        want = torch.load(tmp_path / f"changed.{rank}")
        was, now = (safetensors.torch.load_file(tmp_path / name / f"rank{rank:05d}-00000.safetensors")
                    for name in ("weightwire", "changed"))
        assert was.keys() == now.keys() == want.keys() and all(torch.equal(now[name], tensor) for name, tensor in want.items())
        assert any(not torch.equal(was[name], tensor) for name, tensor in want.items())


@pytest.mark.parametrize("model,world_size,sizes,words", [
    ("qwen2", 4, dict(tp=4), "tp4,pp1,vocab_pad=512"),
    ("qwen2_tied", 4, dict(tp=2, pp=2), "tp2,pp2,vocab_pad=256"),
    ("qwen3_moe", 2, dict(ep=2, etp=1), "ep2,dp2,vocab_pad=256"),
])
def test_megatron_loads_what_was_converted(tmp_path, model, world_size, sizes, words):
    padded = words.rsplit("=", 1)[1]
    checkpoint.convert(FIXTURES / model / "hf", tmp_path / "td", f"torch_dist:spec=local,vocab_pad={padded}", verify=True)
    checkpoint.convert(FIXTURES / model / "hf", tmp_path / "legacy", f"megatron:{words}", verify=True)
    with World(load, world_size, str(FIXTURES / model / "hf"), str(tmp_path / "td"), str(tmp_path / "legacy"),
               str(tmp_path), sizes, f"megatron:{words}") as world:
        world.join(120)
    same(tmp_path / "torch_dist.safetensors", model)
    same(tmp_path / "legacy.safetensors", model)
    same(tmp_path / "loaded.safetensors", model)


@pytest.mark.parametrize("model,megatrons", [("qwen2_tied", ("tp2,pp2", "tp4,pp1")),
                                             ("qwen3_moe", ("tp2,pp2,ep2", "ep2"))])
def test_round_trips_among_all_pairs_are_bit_exact(tmp_path, model, megatrons):
    formats = ["hf", "torch_dist", *(f"megatron:{words}" for words in megatrons), f"weightwire:megatron:{megatrons[0]},dp2"]
    for a, source in enumerate(formats):
        checkpoint.convert(FIXTURES / model / "hf", tmp_path / f"{a}", source)
        for b, target in enumerate(formats):
            checkpoint.convert(tmp_path / f"{a}", tmp_path / f"{a}-{b}", target, memory=1 << 18, verify=a == b)
            checkpoint.convert(tmp_path / f"{a}-{b}", tmp_path / f"{a}-{b}-hf", "hf")
            same(tmp_path / f"{a}-{b}-hf", model)


@pytest.mark.parametrize("config,megatrons", [
    (family_files.config_of("deepseek_v3-plain", **family_files.MTP), ("tp2,ep2,spec=te", "pp2,first=2")),
    (family_files.config_of("deepseek_v2-plain-q"), ("tp2", "ep2,dp2")),
    (family_files.config_of("glm4_moe-plain", **family_files.MTP), ("tp2", "ep2,dp2"))])
def test_round_trips_of_latent_attention_and_mtp_are_bit_exact(tmp_path, config, megatrons):
    want = family_files.write(tmp_path / "hf", config)
    formats = ["torch_dist", "torch_dist:spec=local", *(f"megatron:{words}" for words in megatrons)]
    for a, source in enumerate(formats):
        checkpoint.convert(tmp_path / "hf", tmp_path / f"{a}", source, verify=True)
        for b, target in enumerate(formats):
            told = f"megatron:{megatrons[1]}" if "first" in source else None
            checkpoint.convert(tmp_path / f"{a}", tmp_path / f"{a}-{b}", target, source_spec=told)
            told = f"megatron:{megatrons[1]}" if "first" in target else None
            checkpoint.convert(tmp_path / f"{a}-{b}", tmp_path / f"{a}-{b}-hf", "hf", source_spec=told)
            assert family_files.read(tmp_path / f"{a}-{b}-hf") == want, (source, target)


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe"])
def test_torch_distributed_checkpoint_and_safetensors_read_ours(tmp_path, model):
    hf = json.loads(config_of(model).read_text())
    want = safetensors.torch.load_file(FIXTURES / model / "hf/model.safetensors")
    checkpoint.convert(FIXTURES / model / "hf", tmp_path / "td", "torch_dist:vocab_pad=256")
    stacked = {key: tensor for key, tensor in mcore.from_hf({**hf, "padded_vocab": 256}, want).items()
               if not key.endswith("linear_fc1.layer_norm_weight" if mcore.expert_count(hf) else "pre_mlp_layernorm.weight")}
    state = {key: torch.full_like(tensor, 3) for key, tensor in stacked.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "td"), no_dist=True)
    for key, tensor in stacked.items():
        assert torch.equal(state[key], tensor), key
    checkpoint.convert(tmp_path / "td", tmp_path / "hf", "hf", shard_bytes=100_000)
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    got = {}
    for file in set(index["weight_map"].values()):
        got.update(safetensors.torch.load_file(tmp_path / "hf" / file))
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in want.values())


def test_states_of_an_optimizer_that_are_stored_by_parameter_are_a_checkpoint_of_their_own(tmp_path):
    """The names are megatron-core's, the writer is torch's: mcore's own optimizers were not run."""
    state = "optimizer.state.exp_avg.decoder."
    dcp.save({"decoder.final_layernorm.weight": torch.ones(4), f"{state}final_layernorm.weight": torch.arange(4.0),
              f"{state}layers.mlp.linear_fc2.weight": torch.arange(12.0).reshape(2, 2, 3)}, checkpoint_id=tmp_path, no_dist=True)
    opened = checkpoint.open_checkpoint(tmp_path, "exp_avg")
    found = {name: opened.files.flat(t, 0, t.count).view("float32").tolist() for name, t in opened.ranks[0].items()}
    assert found == {"decoder.final_layernorm.weight": [0, 1, 2, 3], "decoder.layers.0.mlp.linear_fc2.weight": [0, 1, 2, 3, 4, 5],
                     "decoder.layers.1.mlp.linear_fc2.weight": [6, 7, 8, 9, 10, 11]}
    with pytest.raises(checkpoint.CheckpointError, match="no states 'exp_avg_sq' by parameter, but exp_avg"):
        checkpoint.open_checkpoint(tmp_path, "exp_avg_sq")
    flat = {"decoder.final_layernorm.weight": torch.ones(2, 2), f"{state}final_layernorm.weight": torch.arange(4.0)}
    dcp.save(flat, checkpoint_id=tmp_path / "flat", no_dist=True)  # as older releases of mcore stored what ranks own
    with pytest.raises(checkpoint.CheckpointError, match="fully_sharded_model_space.*fully_reshardable"):
        checkpoint.open_checkpoint(tmp_path / "flat", "exp_avg")
