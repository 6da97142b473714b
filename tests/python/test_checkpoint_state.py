"""Composed checkpoints: contents saved by every rank, loaded under other layouts, whole or not there."""

import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import BINARIES, read_safetensors
from trainer_ranks import GROUPS, MAKERS, WEIGHTS, on_all, ranks, same, save_all, states
from weightwire import DeadlineError, boxes, checkpoint
from weightwire.checkpoint import Explicit, attempts, composed, export, sharded, state
from weightwire.checkpoint.__main__ import main as command
from weightwire.checkpoint.layouts import plan_boxes
from weightwire.memory import TensorMeta


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


@pytest.fixture
def tmp_path():
    """In memory where there is such a place: a save is mostly fsync, and a killed process loses no pages."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield pathlib.Path(folder)


@pytest.mark.parametrize("saved,loaded", [("tp2pp2", "tp4pp1"), ("tp4pp1", "tp2pp2"), ("tp2pp2", "fsdp4"), ("fsdp4", "tp2pp2"),
                                          ("flat3", "tp4pp1"), ("tp2pp2", "flat3"), ("flat3", "fsdp4")])
def test_a_trainer_goes_on_under_another_layout_with_every_bit_of_its_optimizer(tmp_path, saved, loaded):
    save_all(MAKERS[saved](filled=True), tmp_path / "step_7")
    into = MAKERS[loaded](filled=False, verify=True)
    reports = on_all([lambda r=r: r.state.load(tmp_path / "step_7") for r in into])
    same(into, MAKERS[loaded](filled=True))
    same_size = len(into) == len(MAKERS[saved](filled=False))
    for rank, (one, report) in enumerate(zip(into, reports)):
        assert 0 < report.bytes["optimizer"] <= sum(bits.nbytes for g in GROUPS for bits in one.states[g].values())
        assert ("extra/own" in report.left) == (not same_size) == (one.random is None)
        if same_size:
            assert one.random["python"] == random.Random(rank).getstate() and one.random["buffer"].tolist()[0] == rank
            assert one.random["numpy"] == np.random.default_rng(rank).bit_generator.state
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_7"]


def test_each_part_is_a_checkpoint_of_its_own(tmp_path, capsys):
    save_all(ranks("megatron:tp2,pp2", filled=True), tmp_path / "step_7")
    assert command(["check", str(tmp_path / "step_7")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["model", "optimizer/exp_avg", "optimizer/master", "optimizer/state",
                                                      "extra/shared", "extra/own"]
    assert "layout megatron:tp2,pp2" in lines[1] and "4 ranks" in lines[5]
    checkpoint.convert(tmp_path / "step_7/optimizer/exp_avg", tmp_path / "hf", "hf", verify=True)
    got = {name: bits for name, (_, bits) in read_safetensors(tmp_path / "hf/model.safetensors").items()}
    want = states()["exp_avg"]
    assert got.keys() == want.keys() and all(np.array_equal(got[name], want[name].view(np.uint32)) for name in want)


@pytest.mark.parametrize("maker", ["tp2pp2", "tp4pp1", "flat3"])
def test_ranks_write_one_hugging_face_checkpoint_without_a_gather(tmp_path, maker):
    options = {"save_contents": ["hf_model", "extra"], "load_contents": ["hf_model"]}
    trainer = MAKERS[maker](filled=True, **options)
    for one in trainer:
        one.state._shard_bytes = 150_000
    save_all(trainer, tmp_path / "step_1")
    folder = tmp_path / "step_1/hf_model"
    files = sorted(folder.glob("*.safetensors"))
    got = {name: bits for path in files for name, (_, bits) in read_safetensors(path).items()}
    assert len(files) > 1 and got.keys() == WEIGHTS.keys()
    assert all(np.array_equal(got[name], bits) for name, bits in WEIGHTS.items())
    assert sorted(p.name for p in folder.iterdir() if p not in files) == ["config.json", "model.safetensors.index.json"]
    into = MAKERS["tp2pp2"](filled=False, **options)
    on_all([lambda r=r: r.state.load(tmp_path / "step_1") for r in into])
    for a, b in zip(into, MAKERS["tp2pp2"](filled=True)):
        assert all(np.array_equal(a.weights[name], bits) for name, bits in b.weights.items())


def test_what_an_asynchronous_save_has_is_what_there_was_when_it_was_asked_for(tmp_path):
    trainer = ranks("megatron:tp2,pp2", filled=True, async_save=True, keep_last=1)
    (tmp_path / "step_6").mkdir()
    save_all(ranks("megatron:tp2,pp2", filled=True), tmp_path / "step_5")
    futures = []
    for one in reversed(trainer):
        futures.append(one.state.save(tmp_path / "step_7", attempt="one"))
        for array in [*one.weights.values(), *(a for group in one.states.values() for a in group.values())]:
            array.fill(9)
        one.schedule["step"] = 8
    for future in futures:
        future.result(60)
    into = ranks("megatron:tp4", filled=False)
    on_all([lambda r=r: r.state.load(tmp_path / "step_7") for r in into])
    same(into, ranks("megatron:tp4", filled=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_6", "step_7"]  # step_6 is no checkpoint


@pytest.mark.parametrize("change,why", [
    (lambda folder: (folder / composed.MANIFEST).unlink(), "no JSON"),
    (lambda folder: (folder / composed.MANIFEST).write_text((folder / composed.MANIFEST).read_text().replace(": 2", ": 3")), "digest"),
    (lambda folder: (folder / composed.MANIFEST).write_text('{"parts": {"../x": ""}, "world_size": 4}'), "digest"),
    (lambda folder: shutil.rmtree(folder / "optimizer/exp_avg"), "is missing"),
    (lambda folder: shutil.copytree(folder / "optimizer/exp_avg", folder / "optimizer/master", dirs_exist_ok=True),
     "optimizer/master.*not saved with the others"),
    (lambda folder: flip(folder / "optimizer/master/rank00001-00000.safetensors"), "not those of the digest"),
    (lambda folder: flip(folder / "extra/own/rank00000-00000.safetensors"), "not those of the digest")])
def test_a_damaged_or_mixed_checkpoint_is_refused(tmp_path, change, why):
    save_all(ranks("megatron:tp2", filled=True), tmp_path / "s")
    change(tmp_path / "s")
    one = ranks("megatron:tp2", filled=False, verify=True)[0]
    with pytest.raises(checkpoint.CheckpointError, match=why):
        one.state.load(tmp_path / "s")
    assert (one.schedule, one.hyper, one.random) == (None, None, None)


def flip(path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _killed(rank: int, folder: str, module, name: str, passes: int) -> None:
    """Saves a rank and dies when `module.name` is called for the `passes`-th time."""
    owner = {"attempts": attempts.Attempt, "export": export, "disk": attempts.disk, "composed": composed, "sharded": sharded}[module]
    original, called = getattr(owner, name), []

    def stop(*arguments):
        called.append(1)
        if len(called) == passes:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)
    setattr(owner, name, stop)
    kill_ranks()[rank].state.save(folder, attempt="one").result(60)


def kill_ranks() -> list:
    return ranks("megatron:tp2", filled=True, save_contents=["model", "hf_model", "optimizer", "extra"])


@pytest.mark.parametrize("rank,module,name,passes", [
    (1, "export", "write_block", 3), (1, "attempts", "put", 3), (1, "attempts", "put", 6), (0, "export", "write_block", 3),
    (0, "attempts", "put", 2), (0, "attempts", "finish", 1), (0, "attempts", "finish", 4), (0, "composed", "manifest", 1)])
def test_a_rank_killed_at_any_step_leaves_no_checkpoint_and_goes_on(tmp_path, rank, module, name, passes):
    folder = tmp_path / "step_1"
    child = multiprocessing.get_context("spawn").Process(target=_killed, args=(rank, str(folder), module, name, passes))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: kill_ranks()[1 - rank].state.save(folder, attempt="one").result(60))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        assert not composed.found_at(folder)
        kill_ranks()[rank].state.save(folder, attempt="one", resume=True).result(60)
        other.result(60)
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    into = ranks("megatron:tp4", filled=False, verify=True)
    on_all([lambda r=r: r.state.load(folder) for r in into])
    same(into, ranks("megatron:tp4", filled=True))
    got = {name: bits for name, (_, bits) in read_safetensors(folder / "hf_model/model.safetensors").items()}
    assert all(np.array_equal(got[name], bits) for name, bits in WEIGHTS.items())


@pytest.mark.parametrize("module,looks", [(sharded, "read_json"), (state, "check_free")])
def test_a_rank_that_resumes_while_rank_0_names_the_checkpoint_finds_its_parts(tmp_path, monkeypatch, module, looks):
    save_all(kill_ranks(), tmp_path / "step_1")
    partial, read = tmp_path / ".step_1.one.partial", getattr(module, looks)
    os.rename(tmp_path / "step_1", partial)

    def named(path):
        if partial.exists():
            os.rename(partial, tmp_path / "step_1")
        return read(path)
    monkeypatch.setattr(module, looks, named)
    one = kill_ranks()[1]
    one.state._timeout = 3
    one.state.save(tmp_path / "step_1", attempt="one", resume=True)


def test_a_rank_that_resumes_while_rank_0_names_the_export_has_its_blocks_there(tmp_path, monkeypatch):
    save_all(kill_ranks(), tmp_path / "step_1")
    partial, found, looked = tmp_path / ".step_1.one.partial", export.hf.found_at, []
    os.rename(tmp_path / "step_1", partial)
    os.rename(partial / "hf_model", partial / ".hf_model.one.partial")
    (partial / ".hf_model.one.partial/rank00001.done.json").write_text("{}")

    def named(folder):
        """Once both names of the export have been looked at, it has the last one."""
        there = found(folder)
        looked.append(folder)
        if len(looked) == 2:
            os.rename(partial / ".hf_model.one.partial", partial / "hf_model")
            os.rename(partial, tmp_path / "step_1")
        return there
    monkeypatch.setattr(export.hf, "found_at", named)
    one = kill_ranks()[1]
    one.state._timeout = 3
    one.state.save(tmp_path / "step_1", attempt="one", resume=True)


def test_a_full_disk_and_a_missing_rank_leave_the_previous_checkpoint(tmp_path, monkeypatch):
    save_all(kill_ranks(), tmp_path / "step_1")
    trainer = kill_ranks()
    for one in trainer:
        one.state._timeout = 2

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(export.disk, "allocate", full)
    with ThreadPoolExecutor(2) as pool:
        first, second = [pool.submit(one.state.save, tmp_path / "step_2", attempt="one") for one in trainer]
        with pytest.raises(OSError, match="No space left"):
            first.result(60)
        with pytest.raises(DeadlineError, match="did not lay the files out"):
            second.result(60)
    assert not (tmp_path / "step_2").exists()
    with pytest.raises(DeadlineError, match="parts are missing 1"):
        trainer[0].state.save(tmp_path / "step_3", attempt="one")
    assert not (tmp_path / "step_3").exists()
    ranks("megatron:tp2", filled=False, verify=True)[0].state.load(tmp_path / "step_1")


def test_a_plan_of_boxes_names_what_nobody_holds(tmp_path):
    w = TensorMeta("w", "F32", (4, 6))
    have = [[boxes.block("w", "F32", (0, 0), (2, 6))], [boxes.block("w", "F32", (2, 0), (2, 5))]]
    with pytest.raises(checkpoint.CheckpointError, match=r"\[2, 5\] to \[4, 6\] of w are held by no rank"):
        plan_boxes(have, {0: [boxes.whole(w)]})
    layout = [Explicit({"w": w}, held) for held in have]
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(checkpoint.save_rank, tmp_path / "s", layout[r], r, 2, {"w": np.zeros(have[r][0].meta.shape, np.float32)},
                             config="{}", attempt="one", timeout=30) for r in range(2)]
        with pytest.raises(checkpoint.CheckpointError, match="held by no rank"):
            saves[0].result()
    assert not (tmp_path / "s").exists()
