"""Names of latent attention, MTP, experts and fp8 scales in every format that has them: what mcore recorded of itself, and
round trips. No torch here."""

import json

import numpy as np
import pytest

from conftest import BINARIES, DATA, read_safetensors
from family_files import MTP, config_of, read, write
from weightwire import checkpoint
from weightwire.checkpoint import torch_dist


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def recorded(folder) -> dict:
    """Key -> whole tensor, put together from real shards at the places that mcore's own description names."""
    made = {}
    for path in sorted(folder.glob("rank*.json")):
        tensors = {name: bits for name, (_, bits) in read_safetensors(path.with_suffix(".safetensors")).items()}
        for name, entry in json.loads(path.read_text())["sharded"].items():
            base, _, segment = name.partition("#")  # gate and up are two segments of one tensor
            rows = entry["local_shape"][0]
            part = tensors[base][int(segment) * rows:(int(segment) + 1) * rows] if segment else tensors[base]
            extent = [1] * entry["prepend_axis_num"] + entry["local_shape"]
            place = tuple(slice(at, at + n) for at, n in zip(entry["global_offset"], extent))
            whole = made.setdefault(entry["key"], np.zeros(entry["global_shape"], part.dtype))
            whole[place] = part.reshape(extent)
    return made


@pytest.mark.parametrize("model,case", [("deepseek_v3", "tp2pp2ep2"), ("deepseek_v3_mtp", "pp2ep2"), ("qwen3_moe", "tp2ep2etp2"),
                                        ("mixtral", "tp2pp2ep2")])
def test_keys_shapes_and_values_of_torch_dist_are_those_that_megatron_recorded(tmp_path, model, case):
    """Experts are stored as mcore stacks them; whether layers are stacked, too, is a setting that both readers take."""
    folder = DATA / "megatron-te" / model
    want, found = recorded(folder / case), set()
    padded = len(want["embedding.word_embeddings.weight"])
    checkpoint.convert(folder / "hf", tmp_path / "n", f"weightwire:megatron:spec=te,experts=sequential,vocab_pad={padded}")
    opened = checkpoint.open_checkpoint(tmp_path / "n")
    have, rows = opened.ranks[0], json.loads((folder / "hf/config.json").read_text())["vocab_size"]
    for key, whole in want.items():
        names, lead = torch_dist._local_names(key, whole.shape)
        found.update(names)
        for name, bits in zip(names, whole.reshape(len(names), *whole.shape[lead:])):
            got = opened.files.flat(have[name], 0, have[name].count).reshape(have[name].shape)
            if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
                got, bits = got[:rows], bits[:rows]  # what is behind is anybody's
            assert got.shape == bits.shape and np.array_equal(got, bits), name
    assert found == have.keys()
    written = {stack.key: (*stack.lead, *stack.shape) for stack in torch_dist.stacked([*have.values()])}
    assert {key: shape for key, shape in written.items() if not key.startswith("decoder.layers.")} == \
        {key: whole.shape for key, whole in want.items() if not key.startswith("decoder.layers.")}


@pytest.mark.parametrize("config,specs", [
    (config_of("deepseek_v3-plain", **MTP), ["hf", "megatron:tp2,spec=te", "megatron:ep2,dp2", "fsdp:dp3"]),
    (config_of("deepseek_v2-plain-q"), ["megatron:tp2", "vllm:tp2,ep"]),
    (config_of("glm4_moe-plain", **MTP), ["hf", "megatron:tp2", "fsdp:dp3"]),
    (config_of("deepseek_v3-fp8", **MTP), ["hf", "fsdp:dp3"]),
    (config_of("qwen3_moe-fp8"), ["hf", "fsdp:dp2"]),
    (json.loads((DATA / "vllm-traces/qwen3-moe-fp8-tp2.json").read_text())["config"], ["vllm:tp2"])])
def test_latent_attention_mtp_and_fp8_scales_come_back_bit_for_bit(tmp_path, config, specs):
    want = write(tmp_path / "hf", config)
    assert any("_scale_inv" in name for name in want) == ("quantization_config" in config)
    for number, spec in enumerate(specs):
        checkpoint.convert(tmp_path / "hf", tmp_path / f"{number}", f"weightwire:{spec}", memory=1 << 16, verify=True)
        checkpoint.convert(tmp_path / f"{number}", tmp_path / f"back{number}", "hf")
        assert read(tmp_path / f"back{number}") == want, spec


@pytest.mark.parametrize("to", ["torch_dist", "megatron:tp2", "weightwire:megatron:tp2"])
def test_fp8_weights_have_no_place_in_megatrons_formats(tmp_path, to):
    write(tmp_path / "hf", config_of("deepseek_v3-fp8"))
    with pytest.raises(checkpoint.CheckpointError, match="holds F8_E4M3.*not dequantized on the way"):
        checkpoint.convert(tmp_path / "hf", tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_without_its_mtp_layers_is_taken_as_one(tmp_path):
    """transformers saves DeepSeek's and GLM's without them, and leaves their number in config.json."""
    config = config_of("deepseek_v3-plain", **MTP)
    want = write(tmp_path / "hf", config)
    at = f"model.layers.{config['num_hidden_layers']}."
    checkpoint.convert(tmp_path / "hf", tmp_path / "short", "hf:mtp=none")
    assert read(tmp_path / "short") == {name: value for name, value in want.items() if not name.startswith(at)}
    report = checkpoint.convert(tmp_path / "short", tmp_path / "native", "weightwire:megatron:tp2,mtp=none")
    checkpoint.convert(tmp_path / "native", tmp_path / "back", "hf:mtp=none")
    assert report.left_out == [] and read(tmp_path / "back") == read(tmp_path / "short")
    with pytest.raises(checkpoint.CheckpointError, match="no source rank holds"):
        checkpoint.convert(tmp_path / "short", tmp_path / "x", "weightwire:megatron:tp2")
