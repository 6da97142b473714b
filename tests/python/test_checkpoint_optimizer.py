"""An optimizer that megatron-core 0.16.1 saved (`fully_reshardable`, TP2, DP2, EP2, ETP1) is read without torch and without mcore.

tests/trainers/test_optimizer.py wrote it: every element of every state is a number that its Hugging Face name and place
determine, put there by mcore's own description of its parameters.
"""

import json
import sys

import numpy as np
import pytest

from conftest import BINARIES, DATA
from trainer_ranks import ranks, save_all, shard
from weightwire import checkpoint
from weightwire.checkpoint.planner import planner_of

STORED = DATA / "checkpoints/torch_dist-optimizer"
CONFIG = (STORED / "config.json").read_text()
VALUES = {"exp_avg": lambda n: n, "exp_avg_sq": lambda n: -n, "param": lambda n: n + np.float32(0.5)}


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def numbered() -> dict:
    made, first = {}, 1
    for meta in sorted(planner_of(CONFIG).layout("hf")[0], key=lambda meta: meta.name):
        count = int(np.prod(meta.shape))
        made[meta.name] = np.arange(first, first + count, dtype=np.float32).reshape(meta.shape)
        first += count
    return made


@pytest.mark.parametrize("spec", ["megatron:tp2,pp2", "megatron:ep4,dp4", "megatron:tp1,spec=te", "fsdp:dp3"])
def test_every_rank_of_another_layout_gets_every_bit_of_its_states(spec):
    whole = numbered()
    for group, value in VALUES.items():
        want = {name: value(bits) for name, bits in whole.items()}
        for rank, held in enumerate(planner_of(CONFIG).boxes(spec)):
            expected = shard(held, want)
            into = {name: np.zeros_like(bits) for name, bits in expected.items()}
            report = checkpoint.load(STORED, spec, rank, into, group=group)
            assert report.format == "torch_dist"
            assert all(np.array_equal(into[name], bits) for name, bits in expected.items())
    assert "torch" not in sys.modules


def test_a_state_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(checkpoint.CheckpointError, match="no states 'master' by parameter, but exp_avg, exp_avg_sq, param"):
        checkpoint.open_checkpoint(STORED, "master")
    weights = checkpoint.open_checkpoint(STORED)
    assert all(tensor.dtype == "BF16" for tensor in weights.ranks[0].values())
    assert any(name.startswith("optimizer.") for name in weights.left_out)


def test_a_trainers_save_is_converted_in_parts_but_for_megatrons(tmp_path):
    save_all(ranks("megatron:tp2", filled=True), tmp_path / "step_1")
    with pytest.raises(checkpoint.CheckpointError, match="hf holds one of them.*step_1/model, or .*torch_dist"):
        checkpoint.convert(tmp_path / "step_1", tmp_path / "x", "hf")
    with pytest.raises(checkpoint.CheckpointError, match="not the state of megatron-core's.*megatron_optimizer.distributed"):
        checkpoint.convert(tmp_path / "step_1", tmp_path / "x", "torch_dist")
    assert not (tmp_path / "x").exists()
    checkpoint.convert(tmp_path / "step_1/optimizer/master", tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "qwen2"
