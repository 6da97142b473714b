"""torch_dist checkpoints of parts of a model, as torch writes them: the text of a vision-language model, value heads, no MTP
layers; and which files an HfReader's tensors are read from."""

import json
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

import family_files
from conftest import ROOT, read_safetensors
from weightwire import checkpoint
from weightwire.hf_tensors import checkpoint_tensors

QWEN = ROOT / "tests/data/megatron/qwen2/hf"


def stored(folder) -> dict:
    """All tensors of a torch_dist checkpoint, as torch reads them."""
    described = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in described.items() if hasattr(one, "size")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def store(folder, state: dict, config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "config.json").write_text(json.dumps(config))


def refused(message: str):
    return pytest.raises(checkpoint.CheckpointError, match=message)


def test_the_text_of_a_vision_model_is_joined_with_the_tower_of_its_original(tmp_path):
    config = family_files.config_of("qwen2_5_vl-nested")
    want = family_files.write(tmp_path / "original", config)
    checkpoint.convert(tmp_path / "original", tmp_path / "whole", "torch_dist")
    text = {key: tensor for key, tensor in stored(tmp_path / "whole").items() if not key.startswith("visual")}
    trained = {key: tensor.view(torch.int16).bitwise_xor(1).view(tensor.dtype) for key, tensor in text.items()}
    store(tmp_path / "text", trained, config)
    with refused("tensor visual.*--missing-from FOLDER"):
        checkpoint.convert(tmp_path / "text", tmp_path / "x", "hf")

    def flipped(data: bytes) -> bytes:
        return bytes(byte ^ (at % 2 == 0) for at, byte in enumerate(data))
    for spec in (None, "megatron:tp1", "skip=visual.*", "megatron:tp1,skip=visual.*"):
        skips = spec is not None and "skip" in spec
        checkpoint.convert(tmp_path / "text", tmp_path / f"{spec}", "hf:skip=visual.*" if skips else "hf", source_spec=spec,
                           missing_from=None if skips else tmp_path / "original", verify=True)
        assert family_files.read(tmp_path / f"{spec}") == {
            name: (dtype, shape, data if name.startswith("visual") else flipped(data))
            for name, (dtype, shape, data) in want.items() if not (skips and name.startswith("visual"))}, spec


def test_a_value_head_in_the_place_of_the_models_or_beside_it_is_named(tmp_path):
    config = json.loads((QWEN / "config.json").read_text())
    checkpoint.convert(QWEN, tmp_path / "whole", "torch_dist")
    whole = stored(tmp_path / "whole")
    head = whole.pop("output_layer.weight")[:1].clone()
    want = {name: bits.tobytes() for name, (_, bits) in read_safetensors(QWEN / "model.safetensors").items()
            if name not in ("lm_head.weight", "input_ids", "logits")}
    for name in ("output_layer.weight", "value_head.weight"):
        store(tmp_path / name, {**whole, name: head}, config)
        with refused(rf"tensor output_layer.weight.*{name} \[1, 64\] is the head of a reward.*skip=lm_head.weight"):
            checkpoint.convert(tmp_path / name, tmp_path / "x", "hf")
        leave = [name] if name == "value_head.weight" else []
        report = checkpoint.convert(tmp_path / name, tmp_path / f"{name}-hf", "hf:skip=lm_head.weight", leave_out=leave,
                                    source_spec="skip=lm_head.weight")
        got = read_safetensors(tmp_path / f"{name}-hf/model.safetensors")
        assert {n: bits.tobytes() for n, (_, bits) in got.items()} == want and name in report.left_out
        checkpoint.convert(tmp_path / name, tmp_path / f"{name}-whole", "hf", leave_out=[name], missing_from=QWEN)
        assert read_safetensors(tmp_path / f"{name}-whole/model.safetensors")["lm_head.weight"][1].tobytes() == \
            read_safetensors(QWEN / "model.safetensors")["lm_head.weight"][1].tobytes()


@pytest.mark.parametrize("to", ["torch_dist:mtp=none", "megatron:tp2,mtp=none"])
def test_megatrons_files_without_mtp_layers_are_taken_as_such(tmp_path, to):
    config = family_files.config_of("deepseek_v3-plain", **family_files.MTP)
    want = family_files.write(tmp_path / "hf", config)
    checkpoint.convert(tmp_path / "hf", tmp_path / "short", to)
    report = checkpoint.convert(tmp_path / "short", tmp_path / "out", "hf:mtp=none")
    at = f"model.layers.{config['num_hidden_layers']}."
    assert family_files.read(tmp_path / "out") == {name: value for name, value in want.items() if not name.startswith(at)}
    assert "no MTP layers in the files" in report.notes[0]
    checkpoint.convert(tmp_path / "short", tmp_path / "again", "hf", missing_from=tmp_path / "hf")
    assert family_files.read(tmp_path / "again") == want


def test_the_tensors_of_a_folder_are_those_of_the_files_that_are_read(tmp_path, caplog):
    shutil.copytree(QWEN, tmp_path / "in")
    want = {(meta.name, meta.dtype, meta.shape) for meta, _ in read_safetensors(QWEN / "model.safetensors").values()}
    shutil.copy(QWEN / "model.safetensors", tmp_path / "in/consolidated.safetensors")  # would be every tensor twice
    found = checkpoint_tensors(tmp_path / "in")
    assert len(found) == len(want) and {(meta.name, meta.dtype, meta.shape) for meta in found} == want
    assert "not read: consolidated.safetensors" in caplog.text
    (tmp_path / "in/model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="consolidated.safetensors"):
        checkpoint_tensors(tmp_path / "in")
    (tmp_path / "in/model.safetensors").write_bytes((QWEN / "model.safetensors").read_bytes()[:-1])
    with refused("model.safetensors: tensors take"):
        checkpoint_tensors(tmp_path / "in")
