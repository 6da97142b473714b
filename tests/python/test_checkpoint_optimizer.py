"""An optimizer that megatron-core 0.16.1 saved (`fully_reshardable`, TP2, DP2, EP2, ETP1) is read without torch and without mcore.

tests/trainers/test_optimizer.py wrote it: every element of every state is a number that its Hugging Face name and place
determine, put there by mcore's own description of its parameters.
"""

import json
import pathlib
import pickle
import shutil
import subprocess
import sys
import zipfile

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


class Adopts:
    """An optimizer of this layout that counts what it is given."""

    def __init__(self, spec: str, kind: str = "megatron"):
        shapes = {one.meta.name: one.meta.shape for one in planner_of(CONFIG).boxes(spec)[0]}
        self.groups = {group: {name: np.zeros(shape, np.float32) for name, shape in shapes.items()} for group in VALUES}
        self.adopted = []
        weights = {name: np.zeros(shape, np.uint16) for name, shape in shapes.items()}
        model = checkpoint.Model(spec, lambda: weights, CONFIG)
        optimizer = checkpoint.Optimizer(spec, lambda: self.groups, adopt=self.adopted.append if kind == "megatron" else None)
        self.contents = checkpoint.Contents(model, optimizer)

    def load(self, folder):
        both = ("model", "optimizer")
        options = checkpoint.Options(both, both, load_from=dict.fromkeys(both, str(folder)))
        return checkpoint.State(options, self.contents, rank=0, world_size=1).load(folder / "none")


def test_step_and_hyperparameters_come_along():
    trainer = Adopts("megatron:tp1,spec=te")
    report = trainer.load(STORED)
    assert (report.left, report.iteration) == ({}, None)
    ((dense, experts),) = trainer.adopted
    assert [group["step"] for one in (dense, experts) for group in one["optimizer"]["param_groups"]] == [1.0, 1.0, 1.0]
    assert [group["is_expert_parallel"] for group in experts["optimizer"]["param_groups"]] == [True]
    assert dense["optimizer"]["param_groups"][1]["betas"] == (0.9, 0.999)
    assert all(tensor.any() for tensors in trainer.groups.values() for tensor in tensors.values())
    other = Adopts("megatron:tp1,spec=te", kind="torch")
    assert "this optimizer is another one" in other.load(STORED).left["optimizer/state"] and not other.adopted


def stored_with(tmp_path, change):
    """The same checkpoint with another common.pt: `change` of the zip's pickle."""
    folder = tmp_path / "changed"
    shutil.copytree(STORED, folder)
    with zipfile.ZipFile(STORED / "common.pt") as old, zipfile.ZipFile(folder / "common.pt", "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, change(data) if info.filename.endswith("/data.pkl") else data)
    return folder


def test_what_is_no_plain_value_is_left_and_said_so(tmp_path):
    def with_object(pickled: bytes) -> bytes:
        content = pickle.loads(pickled)
        content["optimizer"][0]["grad_scaler"] = {"scale": pathlib.PurePosixPath("of a class")}
        return pickle.dumps({**content, "iteration": 12}, 2)
    trainer = Adopts("megatron:tp1,spec=te")
    report = trainer.load(stored_with(tmp_path, with_object))
    assert "has none that is known" in report.left["optimizer/state"] and not trainer.adopted
    assert report.iteration == 12


@pytest.mark.parametrize("pickled,said", [(pickle.dumps([1], 2), "common.pt: no mapping"), (b"\x80\x02}", "cannot be read")])
def test_a_common_file_that_is_none_is_refused_before_anything_is_restored(tmp_path, pickled, said):
    trainer = Adopts("megatron:tp1,spec=te")
    with pytest.raises(checkpoint.CheckpointError, match=said):
        trainer.load(stored_with(tmp_path, lambda _: pickled))
    assert not trainer.adopted


def test_what_megatron_core_0_19_keeps_among_the_tensors_comes_along():
    """Without a common.pt: the bytes, step and iteration are those that 0.19.2 itself was given (tests/trainers/common_state.py
    wrote it)."""
    later = DATA / "checkpoints/torch_dist-common_state"
    assert not (later / "common.pt").exists()
    trainer = Adopts("megatron:tp1,spec=te")
    report = trainer.load(later)
    assert (report.left, report.iteration) == ({}, 1234)
    ((dense, experts),) = trainer.adopted
    assert [group["step"] for one in (dense, experts) for group in one["optimizer"]["param_groups"]] == [1.0, 1.0, 1.0]
    want = numbered()
    for group, value in VALUES.items():
        expected = shard(planner_of(CONFIG).boxes("megatron:tp1,spec=te")[0], {n: value(bits) for n, bits in want.items()})
        assert all(np.array_equal(trainer.groups[group][name], bits) for name, bits in expected.items())
    assert "iteration 1234" in checkpoint.open_checkpoint(later).left_out


def test_what_a_conversion_leaves_behind_is_named(tmp_path):
    done = subprocess.run([sys.executable, "-m", "weightwire.checkpoint", "convert", DATA / "checkpoints/torch_dist-common_state",
                           tmp_path / "out", "--to", "hf"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and "36 of an optimizer" in done.stderr and "iteration 1234" in done.stderr, done.stderr


def test_an_optimizer_without_its_step_is_refused_before_anything_is_restored(tmp_path):
    shutil.copytree(STORED, tmp_path / "cut")
    (tmp_path / "cut/common.pt").unlink()
    trainer = Adopts("megatron:tp1,spec=te")
    with pytest.raises(checkpoint.CheckpointError, match="neither common.pt nor common_state.*no step and no iteration"):
        trainer.load(tmp_path / "cut")
    assert not trainer.adopted and not any(tensor.any() for tensors in trainer.groups.values() for tensor in tensors.values())
    assert checkpoint.convert(tmp_path / "cut", tmp_path / "weights", "hf").left_out  # the weights alone are whole


def test_a_trainers_save_is_converted_in_parts_but_for_megatrons(tmp_path):
    save_all(ranks("megatron:tp2", filled=True), tmp_path / "step_1")
    with pytest.raises(checkpoint.CheckpointError, match="hf holds one of them.*step_1/model, or .*torch_dist"):
        checkpoint.convert(tmp_path / "step_1", tmp_path / "x", "hf")
    with pytest.raises(checkpoint.CheckpointError, match="not the state of megatron-core's.*megatron_optimizer.distributed"):
        checkpoint.convert(tmp_path / "step_1", tmp_path / "x", "torch_dist")
    assert not (tmp_path / "x").exists()
    checkpoint.convert(tmp_path / "step_1/optimizer/master", tmp_path / "hf", "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["model_type"] == "qwen2"
