"""Checkpoints of a part of a model: without its head, its MTP layers or its vision tower; what is left out on either side, and
what is taken from the model that it was made of. The bytes to expect are the test's own."""

import json
import subprocess
import sys

import numpy as np
import pytest

from checkpoint_folders import plain, read_folder, write_file, write_shards
from conftest import BINARIES, DATA, EngineRanks, read_safetensors
from family_files import MTP, config_of
from weightwire import TensorMeta, checkpoint
from weightwire.checkpoint import planner
from weightwire.checkpoint.__main__ import main
from weightwire.checkpoint.planner import planner_of

HEAD, NORM = "lm_head.weight", "model.norm.weight"
QWEN = DATA / "megatron/qwen2/hf"


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    planner.forget()


def qwen() -> dict:
    return {n: t for n, t in read_safetensors(QWEN / "model.safetensors").items() if n not in ("input_ids", "logits")}


def random_model(config: dict, seed: int) -> dict:
    """Random bits for every tensor; what MTP layers repeat of embedding and head is equal."""
    rng, made = np.random.default_rng(seed), {}
    for meta in planner_of(json.dumps(config)).layout("hf")[0]:
        bits = rng.integers(0, 1 << 16, meta.shape, np.uint16) if meta.dtype == "BF16" else \
            rng.integers(0, 1 << 32, meta.shape, np.uint32)
        made[meta.name] = (meta, bits)
    for name in list(made):
        main = "model.embed_tokens.weight" if name.endswith(".embed_tokens.weight") else HEAD
        if name.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
            made[name] = (made[name][0], made[main][1])
    return made


def folder(path, config: dict, tensors: dict):
    write_shards(path, config, tensors)
    return path


def refused(message: str):
    return pytest.raises(checkpoint.CheckpointError, match=message)


def without(tensors: dict, *starts: str) -> dict:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(starts)}


# --- skip= and --leave-out ---

@pytest.mark.parametrize("to,back", [("hf:skip=lm_head.weight", "hf:skip=lm_head.weight"),
                                     ("weightwire:megatron:tp2,pp2,skip=lm_head.weight", "hf:skip=lm_head.weight"),
                                     ("weightwire:megatron:tp2,vocab_pad=512,skip=lm_head.weight", "hf:skip=lm_head.weight"),
                                     ("weightwire:fsdp:dp3,skip=lm_head.weight", "hf:skip=lm_head.weight"),
                                     ("weightwire:hf:skip=model.layers.*", "hf:only=model.embed*|model.norm.weight|lm_head.weight")])
def test_what_the_target_leaves_out_is_not_written(tmp_path, to, back):
    """Not as zeros either; and what was left out need not be there when it is read."""
    want = {name: tensor for name, tensor in qwen().items()
            if (not name.startswith("model.layers.") if "layers" in to else name != HEAD)}
    checkpoint.convert(QWEN, tmp_path / "out", to, verify=True)
    names = {name for path in (tmp_path / "out").glob("*.safetensors") for name in read_safetensors(path)}
    assert not any("lm_head" in name or "output_layer" in name for name in names) or "layers" in to
    source = {} if "weightwire" in to else {"source_spec": "skip=lm_head.weight"}
    checkpoint.convert(tmp_path / "out", tmp_path / "back", back, **source)
    assert read_folder(tmp_path / "back") == plain(want)


def test_what_the_source_leaves_out_may_be_there_in_any_shape_or_not_at_all(tmp_path):
    want = without(qwen(), HEAD)
    value = (TensorMeta(HEAD, "BF16", (1, 64)), np.arange(64, dtype=np.uint16).reshape(1, 64))
    for number, tensors in enumerate((want, {**want, HEAD: value}, qwen())):
        where = folder(tmp_path / f"in{number}", json.loads((QWEN / "config.json").read_text()), tensors)
        report = checkpoint.convert(where, tmp_path / f"out{number}", "hf:skip=lm_head.weight", source_spec="hf:skip=lm_head.weight")
        assert read_folder(tmp_path / f"out{number}") == plain(want) and report.left_out == [HEAD] * (HEAD in tensors)
    with refused("tensor lm_head.weight.*leave the same out of the target.*--missing-from"):
        checkpoint.convert(tmp_path / "in0", tmp_path / "x", "hf", source_spec="skip=lm_head.weight")


def test_a_tensor_of_which_only_a_part_is_left_out_is_not_written(tmp_path):
    with refused("leaves model.layers.*q_proj.weight out of it, and keeps the rest.*linear_qkv.weight"):
        checkpoint.convert(QWEN, tmp_path / "x", "weightwire:megatron:tp2,skip=*.q_proj.weight")
    assert not (tmp_path / "x").exists()


def test_a_rank_loads_all_but_what_its_layout_leaves_out():
    config = (QWEN / "config.json").read_text()
    (layout,) = planner_of(config).layout("megatron:tp1")
    into = {meta.name: np.full(meta.shape, 7, np.uint16) for meta in layout}
    checkpoint.load(QWEN, "megatron:tp1,skip=lm_head.weight", 0, into)
    assert (into["output_layer.weight"] == 7).all() and np.array_equal(into["decoder.final_layernorm.weight"], qwen()[NORM][1])
    into.pop("output_layer.weight")
    checkpoint.load(QWEN, "megatron:tp1,skip=lm_head.weight", 0, into)


def test_engines_and_a_save_go_without_what_their_layouts_leave_out(tmp_path, daemon):
    """A model without a head, pushed to engines that keep theirs, and saved again without one."""
    config, want = json.loads((QWEN / "config.json").read_text()), without(qwen(), HEAD)
    reward = (TensorMeta("score.weight", "BF16", (1, 64)), np.zeros((1, 64), np.uint16))
    where = folder(tmp_path / "in", config, {**want, "score.weight": reward})
    spec = "hf:skip=lm_head.weight"
    engine = EngineRanks(daemon.agent_socket, "engine", config, spec, [[meta for meta, _ in qwen().values()]])
    try:
        for command in (["load", str(where), "--version", "1"], ["push", str(where), "--version", "2"]):
            assert main([*command, "--from", spec, "--leave-out", "score.*", "--agent", daemon.agent_socket, "--coordinator",
                         daemon.grpc, "--timeout", "60"]) == 0
        engine.wait_version(2)
        assert all(np.array_equal(engine.ranks[0].params[name].view(bits.dtype), bits) for name, (_, bits) in want.items())
        checkpoint.save(tmp_path / "out", spec, QWEN / "config.json", agent=daemon.agent_socket, timeout=60)
        assert read_folder(tmp_path / "out") == plain(want)
    finally:
        engine.close()


# --- heads ---

@pytest.mark.parametrize("head", ["score.weight", "v_head.summary.weight", "value_head.weight", "model.classifier.weight"])
def test_the_head_of_a_reward_or_value_model_is_named_with_the_way_out(tmp_path, head):
    tensors = without(qwen(), HEAD)
    where = folder(tmp_path / "in", json.loads((QWEN / "config.json").read_text()),
                   {**tensors, head: (TensorMeta(head, "BF16", (1, 64)), np.arange(64, dtype=np.uint16).reshape(1, 64))})
    with refused(rf"tensor lm_head.weight.*{head} \[1, 64\] is the head of a reward.*--leave-out '{head}'"):
        checkpoint.convert(where, tmp_path / "x", "hf")
    report = checkpoint.convert(where, tmp_path / "out", "hf:skip=lm_head.weight", source_spec="skip=lm_head.weight", leave_out=[head])
    assert read_folder(tmp_path / "out") == plain(tensors) and report.left_out == [head]
    write_file(where / "model.safetensors", {**qwen(), head: (TensorMeta(head, "BF16", (1,)), np.zeros(1, np.uint16))})
    with refused(f"tensor {head}.*the head of a reward"):
        checkpoint.convert(where, tmp_path / "x", "hf")


@pytest.mark.parametrize("wrap", [lambda name: f"pretrained_model.{name}", lambda name: f"module.{name}",
                                  lambda name: name.replace("model.", "", 1),
                                  lambda name: name.replace("model.", "model.language_model.", 1)])
def test_names_with_another_prefix_are_said_to_be_so(tmp_path, wrap):
    where = folder(tmp_path / "in", json.loads((QWEN / "config.json").read_text()),
                   {wrap(name): tensor for name, tensor in qwen().items()})
    with refused("the checkpoint's names begin otherwise: .* for "):
        checkpoint.convert(where, tmp_path / "x", "hf")


# --- MTP layers ---

def mtp_model(seed: int = 3) -> tuple:
    config = config_of("deepseek_v3-plain", **MTP)
    return config, random_model(config, seed), f"model.layers.{config['num_hidden_layers']}."


@pytest.mark.parametrize("copy", ["embed_tokens.weight", "shared_head.head.weight"])
def test_mtp_copies_that_differ_are_refused_and_one_may_be_chosen(tmp_path, copy):
    config, tensors, layer = mtp_model()
    name = layer + copy
    changed = {**tensors, name: (tensors[name][0], tensors[name][1].copy())}
    changed[name][1][-1, -1] ^= 1
    where = folder(tmp_path / "in", config, changed)
    for to in ("hf", "weightwire:megatron:tp2"):
        with refused(f"differs from .*tensor {name}.*--leave-out '{name}'"):
            checkpoint.convert(where, tmp_path / "x", to)
    report = checkpoint.convert(where, tmp_path / "out", "hf", leave_out=[name])
    assert read_folder(tmp_path / "out") == plain(tensors) and report.left_out == [name]


def test_mtp_layers_without_copies_of_embedding_and_head_share_the_models(tmp_path):
    config, tensors, layer = mtp_model()
    short = without(tensors, layer + "embed_tokens", layer + "shared_head.head")
    report = checkpoint.convert(folder(tmp_path / "in", config, short), tmp_path / "out", "hf")
    assert read_folder(tmp_path / "out") == plain(tensors) and len(report.notes) == 2


def test_files_without_mtp_layers_are_taken_as_such_whatever_key_counts_them(tmp_path, caplog):
    config, tensors, layer = mtp_model()
    short = without(tensors, layer)
    report = checkpoint.convert(folder(tmp_path / "in", config, short), tmp_path / "out", "hf:mtp=none")
    said = "num_nextn_predict_layers: 1 in config.json, and no MTP layers in the files: taken without them"
    assert read_folder(tmp_path / "out") == plain(short) and report.notes == [said] and said in caplog.text
    with refused(f"tensor {layer}.*mtp=none.*--missing-from"):
        checkpoint.convert(tmp_path / "in", tmp_path / "x", "hf")
    some = folder(tmp_path / "some", config, {**short, layer + "enorm.weight": tensors[layer + "enorm.weight"]})
    with refused(f"tensor_missing.*tensor {layer}"):
        checkpoint.convert(some, tmp_path / "x", "hf:mtp=none")


def test_mtp_layers_are_taken_from_the_original(tmp_path):
    config, trained, layer = mtp_model()
    _, original, _ = mtp_model(seed=4)
    report = checkpoint.convert(folder(tmp_path / "in", config, without(trained, layer)), tmp_path / "out", "hf", verify=True,
                                missing_from=folder(tmp_path / "original", config, original))
    own = {name: tensor for name, tensor in original.items() if name.startswith(layer)}
    own.update({name: trained[main] for name, main in ((layer + "embed_tokens.weight", "model.embed_tokens.weight"),
                                                       (layer + "shared_head.head.weight", HEAD))})
    assert read_folder(tmp_path / "out") == plain({**trained, **own})
    assert any("taken from" in note and f"{layer}* (" in note for note in report.notes)


# --- the text of a vision-language model ---

def vision_model(seed: int) -> tuple:
    config = config_of("qwen2_5_vl-nested")
    return config, random_model(config, seed)


@pytest.mark.parametrize("spec,to", [("hf", "hf"), ("hf", "weightwire:megatron:tp2"), ("megatron:tp2", "hf"), ("fsdp:dp2", "hf")])
@pytest.mark.parametrize("kept", ["hf", "weightwire:megatron:tp2"])
def test_the_text_comes_from_the_checkpoint_and_the_rest_from_the_original(tmp_path, spec, to, kept):
    """Whatever the layouts of the two are."""
    config, trained = vision_model(5)
    _, original = vision_model(6)
    folder(tmp_path / "whole", config, trained)
    checkpoint.convert(tmp_path / "whole", tmp_path / "text", f"weightwire:{spec}{',' if ':' in spec else ':'}skip=visual.*")
    manifest = json.loads((tmp_path / "text/weightwire.json").read_text())
    assert not any("visual" in name for rank in manifest["ranks"] for name in rank["tensors"])
    checkpoint.convert(folder(tmp_path / "base", config, original), tmp_path / "original", kept)
    with refused("--missing-from FOLDER|leave the same out of the target"):
        checkpoint.convert(tmp_path / "text", tmp_path / "x", to)
    report = checkpoint.convert(tmp_path / "text", tmp_path / "out", to, source_spec=spec, missing_from=tmp_path / "original",
                                memory=1, verify=True)
    if to != "hf":
        checkpoint.convert(tmp_path / "out", tmp_path / "back", "hf")
    want = {name: (original if name.startswith("visual") else trained)[name] for name in trained}
    assert read_folder(tmp_path / ("out" if to == "hf" else "back")) == plain(want)
    count = sum(name.startswith("visual") for name in trained)
    assert report.notes[-1].endswith(f"taken from {tmp_path / 'original'}: {count} tensors, visual.* ({count})")


def test_a_rank_and_engines_get_the_rest_from_the_original(tmp_path, daemon):
    config, trained = vision_model(5)
    _, original = vision_model(6)
    text = folder(tmp_path / "text", config, without(trained, "visual"))
    base = folder(tmp_path / "base", config, original)
    want = {name: (original if name.startswith("visual") else trained)[name][1] for name in trained}
    into = {name: np.zeros_like(bits) for name, bits in want.items()}
    checkpoint.load(text, "hf", 0, into, missing_from=base)
    assert all(np.array_equal(into[name], bits) for name, bits in want.items())
    engine = EngineRanks(daemon.agent_socket, "engine", config, "hf", [[meta for meta, _ in trained.values()]])
    try:
        checkpoint.push(text, 1, agent=daemon.agent_socket, coordinator=daemon.grpc, missing_from=base, timeout=60)
        engine.wait_version(1)
        got = engine.ranks[0].params
        assert all(np.array_equal(got[name].view(bits.dtype), bits) for name, bits in want.items())
    finally:
        engine.close()


def test_a_checkpoint_that_was_cut_short_is_not_filled_up(tmp_path):
    """A layer, or a part of one, that is missing while others are there is no other part of the model."""
    config, trained = vision_model(5)
    base = folder(tmp_path / "base", config, trained)
    for number, name in enumerate(("model.layers.1.", "model.layers.2.mlp.up_proj.weight", "visual.blocks.1.")):
        where = folder(tmp_path / f"in{number}", config, without(trained, name))
        with refused(f"cut short.*tensor {name}"):
            checkpoint.convert(where, tmp_path / "x", "hf", missing_from=base)
    where = folder(tmp_path / "embedding", config, without(trained, HEAD))
    with refused(f"does not hold it either.*tensor {HEAD}"):
        checkpoint.convert(where, tmp_path / "x", "hf", missing_from=folder(tmp_path / "no_head", config, without(trained, HEAD)))
    assert not (tmp_path / "x").exists()


def test_what_the_source_leaves_out_is_taken_from_the_original_although_it_is_there(tmp_path):
    config, trained = vision_model(5)
    _, original = vision_model(6)
    where, base = folder(tmp_path / "in", config, trained), folder(tmp_path / "base", config, original)
    for spec, starts in (("skip=visual.*", "visual"), ("hf:skip=model.layers.1.*", "model.layers.1."), ("only=model.*|lm_head.*", "visual")):
        report = checkpoint.convert(where, tmp_path / spec[:9], "hf", source_spec=spec, missing_from=base)
        assert read_folder(tmp_path / spec[:9]) == plain({n: (original if n.startswith(starts) else trained)[n] for n in trained})
        assert len(report.left_out) == sum(name.startswith(starts) for name in trained)
    checkpoint.convert(where, tmp_path / "native", "weightwire:megatron:tp2")
    with refused("leaves model.layers.*q_proj.weight out of it"):
        checkpoint.convert(tmp_path / "native", tmp_path / "x", "hf", source_spec="skip=*.q_proj.weight", missing_from=base)


def test_an_original_of_another_model_than_config_json_says_is_refused(tmp_path):
    config, trained = vision_model(5)
    text = {**config["text_config"], "model_type": "qwen2"}
    where, base = folder(tmp_path / "in", text, without(trained, "visual")), folder(tmp_path / "base", config, trained)
    with refused("nothing is missing .*qwen2.*holds another one .qwen2_5_vl.*--config"):
        checkpoint.convert(where, tmp_path / "x", "hf", missing_from=base)
    checkpoint.convert(where, tmp_path / "out", "hf", missing_from=base, config=base / "config.json")
    assert read_folder(tmp_path / "out") == plain(trained)
    report = checkpoint.convert(base, tmp_path / "same", "hf", missing_from=base)
    assert report.notes == [f"nothing is missing: {base} is not read"]


def test_the_original_of_another_shape_is_refused(tmp_path):
    config, trained = vision_model(5)
    other = json.loads(json.dumps(config))
    other["vision_config"]["intermediate_size"] *= 2
    base = folder(tmp_path / "base", other, random_model(other, 6))
    with refused("shape_mismatch.*tensor visual"):
        checkpoint.convert(folder(tmp_path / "in", config, without(trained, "visual")), tmp_path / "x", "hf", missing_from=base)


def test_the_command_line_says_what_it_took(tmp_path):
    config, trained = vision_model(5)
    folder(tmp_path / "text", config, without(trained, "visual"))
    folder(tmp_path / "base", config, trained)
    done = subprocess.run([sys.executable, "-m", "weightwire.checkpoint", "convert", tmp_path / "text", tmp_path / "out", "--to", "hf",
                           "--missing-from", tmp_path / "base"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and f"taken from {tmp_path / 'base'}: 30 tensors, visual.* (30)" in done.stderr, done.stderr
    assert read_folder(tmp_path / "out") == plain(trained)
