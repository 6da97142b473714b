"""Folders of safetensors that are not as their index says: what is read is said, what cannot be told apart is refused by name."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from checkpoint_folders import INDEX, change_index, plain, read_folder, shard, write_file, write_shards
from conftest import BINARIES, DATA, read_safetensors
from weightwire import TensorMeta, checkpoint

HF = DATA / "megatron/qwen2/hf"
CONFIG = json.loads((HF / "config.json").read_text())
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"
NORM = "model.norm.weight"


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


@pytest.fixture
def model() -> dict:
    return {n: t for n, t in read_safetensors(HF / "model.safetensors").items() if n not in ("input_ids", "logits")}


def other(tensors: dict) -> dict:
    """The same names with other bytes."""
    return {name: (meta, bits ^ 1) for name, (meta, bits) in tensors.items()}


def buffer() -> tuple:
    return TensorMeta(BUFFER, "F32", (4,)), np.arange(4, dtype=np.uint32)


def converted(folder, target, **options):
    """(report, what was written)"""
    report = checkpoint.convert(folder, target, "hf", **options)
    return report, read_folder(target)


def refused(message: str):
    return pytest.raises(checkpoint.CheckpointError, match=message)


def test_a_tensor_that_the_index_does_not_list_is_one_of_the_checkpoints(tmp_path, model):
    """One that no layout has is refused until it is left out; one that the model needs is taken, and that is said."""
    first, _ = write_shards(tmp_path / "in", CONFIG, model)
    write_file(tmp_path / "in" / shard(1), {**{name: model[name] for name in first}, BUFFER: buffer()})
    with refused(f"tensor_unexpected.*{BUFFER}.*--leave-out"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")
    report, got = converted(tmp_path / "in", tmp_path / "out", leave_out=["*.inv_freq"])
    assert got == plain(model) and report.left_out == [BUFFER]
    change_index(tmp_path / "in", lambda weights: weights.pop(NORM))
    report, got = converted(tmp_path / "in", tmp_path / "again", leave_out=["*.inv_freq"])
    assert got == plain(model) and "does not list 2 of the tensors" in report.notes[0]


def test_a_tensor_in_two_files_is_refused(tmp_path, model):
    first, second = write_shards(tmp_path / "in", CONFIG, model)
    write_file(tmp_path / "in" / shard(2), {**{n: model[n] for n in second}, first[0]: other(model)[first[0]]})
    with refused(f"says {shard(1)}.*tensor {first[0]}.*stale"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")
    (tmp_path / "in" / INDEX).unlink()
    with refused(f"tensor {first[0]}"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")


def test_of_a_single_file_and_an_index_the_single_file_is_read_and_the_choice_is_said(tmp_path, model, caplog):
    write_shards(tmp_path / "in", CONFIG, model)
    write_file(tmp_path / "in/model.safetensors", other(model))
    report, got = converted(tmp_path / "in", tmp_path / "out")
    assert got == plain(other(model))
    said = f"model.safetensors and {INDEX} are both there: model.safetensors is read"
    assert said in report.notes[0] and said in caplog.text and shard(2) in report.notes[1]
    assert said in checkpoint.open_checkpoint(tmp_path / "in").notes[0]
    shown = subprocess.run([sys.executable, "-m", "weightwire.checkpoint", "show", tmp_path / "in"], stdout=subprocess.PIPE, text=True,
                           timeout=60, check=True)
    assert said in shown.stdout
    (tmp_path / "in" / shard(2)).unlink()  # the index is older than the file
    report, got = converted(tmp_path / "in", tmp_path / "stale")
    assert got == plain(other(model)) and f"{shard(2)}, which the index names, is not there" in report.notes[0]


def test_an_index_of_the_single_file_is_no_choice(tmp_path, model):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/config.json").write_text(json.dumps(CONFIG))
    write_file(tmp_path / "in/model.safetensors", model)
    (tmp_path / "in" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(model, "model.safetensors")}))
    report, got = converted(tmp_path / "in", tmp_path / "out")
    assert got == plain(model) and report.notes == []


def test_shards_without_an_index_are_read_when_all_are_there(tmp_path, model):
    write_shards(tmp_path / "in", CONFIG, model, count=3, index=False)
    report, got = converted(tmp_path / "in", tmp_path / "out")
    assert got == plain(model) and "all 3 shards are read" in report.notes[0]
    (tmp_path / "in" / shard(2, 3)).unlink()
    with refused(f"{shard(1, 3)}: one of 3 shards without {INDEX}, and number 2 is not there"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")
    write_file(tmp_path / "in" / shard(2, 4), {})
    with refused("shards"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")


@pytest.mark.parametrize("name", ["consolidated.safetensors", "adapter_model.safetensors", "model-00003-of-00003.safetensors"])
def test_weights_beside_those_that_are_read_are_named(tmp_path, model, name):
    write_shards(tmp_path / "in", CONFIG, model)
    write_file(tmp_path / "in" / name, other(model))
    report, got = converted(tmp_path / "in", tmp_path / "out")
    assert got == plain(model) and report.notes == [f"not read: {name}"]


def test_a_shard_that_the_index_forgot_is_named_with_the_tensor_that_is_missing(tmp_path, model):
    _, second = write_shards(tmp_path / "in", CONFIG, model)
    change_index(tmp_path / "in", lambda weights: [weights.pop(name) for name in second])
    with refused(f"tensor_missing.*found none; not read: {shard(2)}"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")


@pytest.mark.parametrize("name,said", [
    ("pytorch_model.bin", "pickled.*safe_serialization"), ("consolidated.00.pth", "vendor"), ("consolidated.safetensors", "vendor"),
    ("adapter_model.safetensors", "adapter without its model"), ("weights.safetensors", "another name.*model.safetensors"),
    ("model.gguf", "GGUF"), ("diffusion.safetensors.index.json", f"an index of another name.*{INDEX}")])
def test_weights_in_a_form_that_is_not_read_are_refused_by_their_name(tmp_path, name, said):
    (tmp_path / name).write_bytes(b"PK\3\4")
    with refused(f"{name} is .*{said}"):
        checkpoint.open_checkpoint(tmp_path)


def test_a_head_that_config_json_ties_to_the_embedding_is_a_copy_or_refused(tmp_path):
    tied = DATA / "megatron/qwen2_tied/hf"
    tensors = {n: t for n, t in read_safetensors(tied / "model.safetensors").items() if n not in ("input_ids", "logits")}
    config = json.loads((tied / "config.json").read_text())
    embedding = tensors["model.embed_tokens.weight"]
    write_shards(tmp_path / "in", config, {**tensors, "lm_head.weight": embedding})
    report, got = converted(tmp_path / "in", tmp_path / "out")
    assert got == plain(tensors) and report.left_out == ["lm_head.weight"] and "is a copy of" in report.notes[0]
    write_shards(tmp_path / "own", config, {**tensors, "lm_head.weight": (embedding[0], embedding[1] ^ 1)})
    with refused("differs from model.embed_tokens.weight.*tie_word_embeddings.*tensor lm_head.weight"):
        checkpoint.convert(tmp_path / "own", tmp_path / "x", "hf")


#: Opens, then has the file go or change as `change` says, then reads.
READER = """
import os, shutil, sys
from weightwire import checkpoint
from weightwire.checkpoint import conversion

folder, name, change, target = sys.argv[1:]
path, real = os.path.join(folder, name), conversion.find

def found(*args, **kwargs):
    made = real(*args, **kwargs)
    if change == "goes":
        os.unlink(path)
    elif change == "is replaced":
        shutil.copy(path, path + ".new")
        with open(path + ".new", "r+b") as file:
            file.seek(-8, 2)
            file.write(b"otherone")
        os.rename(path + ".new", path)
    else:
        made.opened.files.fd(name)
        with open(path, "r+b") as file:
            file.seek(-8, 2)
            file.write(b"otherone")
            os.utime(path, ns=(1, 1))
    return made
conversion.find = found
try:
    checkpoint.convert(folder, target, "hf")
except checkpoint.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize("change,said", [("goes", "is missing, or was removed"), ("is replaced", "was replaced"),
                                         ("is written to", "changed")])
@pytest.mark.parametrize("files", [1, 2])
def test_a_file_that_changes_under_its_reader_is_an_error_that_names_it(tmp_path, model, change, said, files):
    write_shards(tmp_path / "in", CONFIG, model, count=files)
    if files == 1:
        os.rename(tmp_path / "in" / shard(1, 1), tmp_path / "in/model.safetensors")
        (tmp_path / "in" / INDEX).unlink()
    name = "model.safetensors" if files == 1 else shard(2)
    done = subprocess.run([sys.executable, "-c", READER, str(tmp_path / "in"), name, change, str(tmp_path / "out")],
                          stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 3 and f"{name}: {said}" in done.stdout and "while it was read" in done.stdout, done.stdout
    assert not (tmp_path / "out").exists()
