"""What a trainer asks of its checkpoints: options that cannot work are refused, and its own objects are left as they were."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import BINARIES
from trainer_ranks import CONFIG, HF, WEIGHTS
from weightwire import checkpoint
from weightwire.checkpoint import Contents, Model, Options, State, trees


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


@pytest.mark.parametrize("options,why", [
    ({"save_contents": ["model", "weights"]}, "save_contents has 'weights', known are"),
    ({"save_contents": ["model", "model"], "load_contents": ["model"]}, "'model' twice"),
    ({"save_contents": "model"}, "must be a list"),
    ({"savecontents": ["model"]}, "savecontents not known"),
    ({"save_contents": ["model"]}, "optimizer is to be loaded and never saved"),
    ({"save_contents": ["hf_model"], "load_contents": ["model"]}, "model is to be loaded and never saved"),
    ({"save_contents": ["model", "hf_model"], "load_contents": ["model", "hf_model"]}, "both fill the same parameters"),
    ({"save_contents": ["model", "hf_model"], "load_contents": ["model"], "backends": {"model": "hf"}}, "are the same files"),
    ({"load_contents": ["optimizer"]}, "would belong to other weights"),
    ({"backends": {"optimizer": "hf"}}, "no place for optimizer states"),
    ({"backends": {"model": "torch_dist"}}, "save as weightwire, and convert"),
    ({"backends": {"hf_model": "hf"}}, "backends has hf_model, which is not in save_contents"),
    ({"load_from": {"hf_model": "/x"}}, "load_from has hf_model, which is not in load_contents"),
    ({"load_from": {"extra": "/x"}}, "belongs to the job that saved it"),
    ({"keep_last": -1}, "keep_last must be"), ({"keep_last": True}, "keep_last must be"), ({"async_save": "yes"}, "true or false")])
def test_options_that_cannot_work_are_refused_when_they_are_read(options, why):
    with pytest.raises(checkpoint.CheckpointError, match=why):
        Options.read(options)


def test_options_that_fit_are_taken_and_contents_that_lack_are_named():
    assert Options.read({"save_contents": ["hf_model"], "load_contents": ["hf_model"]}).folder("hf_model") == "hf_model"
    as_hf = Options.read({"save_contents": ["model"], "load_contents": ["model"], "backends": {"model": "hf"}})
    assert as_hf.folder("model") == "hf_model"
    first = Options.read({"save_contents": [], "load_contents": ["hf_model"], "load_from": {"hf_model": str(HF)}})
    with pytest.raises(checkpoint.CheckpointError, match="load_contents has hf_model, and there is none"):
        State(first, Contents(), rank=0, world_size=1)
    into = {name: np.zeros_like(bits) for name, bits in WEIGHTS.items()}
    State(first, Contents(Model("hf", lambda: into, CONFIG)), rank=0, world_size=1).load("nowhere")
    assert all(np.array_equal(into[name], bits) for name, bits in WEIGHTS.items())


class Config(SimpleNamespace):
    def to_dict(self) -> dict:
        return {name: value for name, value in vars(self).items()}


@pytest.mark.parametrize("fails", [False, True])
def test_the_models_config_is_as_it_was_after_a_save_that_succeeds_or_fails(tmp_path, fails):
    config, inner = Config(**{**json.loads(CONFIG), "use_cache": False}), Config(rope=[1, 2])
    config.text = inner
    before = dict(vars(config))

    def tensors() -> dict:
        inner.rope.append(3)  # as what a builder calls may do
        config.torch_dtype = "float32"
        if fails:
            raise MemoryError("no room")
        return {name: bits for name, bits in WEIGHTS.items()}
    Config.to_dict = lambda self: {name: value for name, value in vars(self).items() if name != "text"}
    state = State(Options(("model",), ("model",)), Contents(Model("hf", tensors, config, {"use_cache": True})), rank=0, world_size=1)
    if fails:
        with pytest.raises(MemoryError):
            state.save(tmp_path / "s", attempt="one")
        assert not (tmp_path / "s").exists()
    else:
        state.save(tmp_path / "s", attempt="one").result()
        assert json.loads((tmp_path / "s/model/config.json").read_text())["use_cache"] is True
    assert vars(config) == before and config.text is inner and inner.rope == [1, 2]


@pytest.mark.parametrize("tree", [{"a": object()}, [lambda: 0], {1.5: 0}, {"x": {"y": np.array(["text"])}}])
def test_what_is_no_state_is_refused_by_its_path(tree):
    with pytest.raises(checkpoint.CheckpointError, match="cannot be kept"):
        trees.encode(tree)
