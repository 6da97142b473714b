"""A conversion that is killed at any step leaves no checkpoint, and goes on afterwards."""

import multiprocessing
import os
import signal

import pytest

from conftest import BINARIES, DATA, read_safetensors
from weightwire import checkpoint
from weightwire.checkpoint import disk, native, writing

HF = DATA / "megatron/qwen2/hf"


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def _convert(target: str, stop: str, at: int) -> None:
    """Converts and kills itself at the `at`-th passing of a step."""
    passed = 0

    def step(*_: object) -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)
    writing._SYNC_BYTES = 50_000
    if stop == "tensor":
        checkpoint.convert(HF, target, "weightwire:megatron:tp2", on_progress=step)
        return
    module, name = {"seal": (native, "seal"), "sync": (disk, "sync_tree"),
                    "rename": (writing.os, "rename"), "progress": (writing.os, "replace"),
                    "allocate": (disk, "allocate"), "folder": (disk, "sync_folder")}[stop]
    original = getattr(module, name)

    def stopping(*arguments: object) -> object:
        step()
        return original(*arguments)
    setattr(module, name, stopping)
    checkpoint.convert(HF, target, "weightwire:megatron:tp2")


@pytest.mark.parametrize("stop,at", [("allocate", 1), ("progress", 1), ("tensor", 1), ("progress", 3), ("tensor", 40),
                                     ("seal", 1), ("sync", 1), ("folder", 1), ("rename", 1)])
def test_a_killed_conversion_leaves_no_checkpoint_and_goes_on(tmp_path, stop, at):
    child = multiprocessing.get_context("spawn").Process(target=_convert, args=(str(tmp_path / "out"), stop, at))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    report = checkpoint.convert(HF, tmp_path / "out", "weightwire:megatron:tp2")
    assert (report.resumed > 0) == (stop in ("seal", "sync", "folder") or at >= 3), report.resumed
    checkpoint.check(tmp_path / "out")
    checkpoint.convert(tmp_path / "out", tmp_path / "hf", "hf", verify=True)
    assert {n: b.tobytes() for n, (_, b) in read_safetensors(tmp_path / "hf/model.safetensors").items()} == \
        {n: b.tobytes() for n, (_, b) in read_safetensors(HF / "model.safetensors").items()}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "out"]


def test_an_interrupted_conversion_of_another_source_begins_anew(tmp_path):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(HF, tmp_path / "out", "weightwire:megatron:tp2", on_progress=interrupt)
    assert (tmp_path / ".out.partial").is_dir()
    assert checkpoint.convert(DATA / "megatron/qwen3/hf", tmp_path / "out", "weightwire").resumed == 0
    assert checkpoint.check(tmp_path / "out").spec == "hf" and not (tmp_path / ".out.partial").exists()


def test_two_conversions_to_one_name_do_not_mix(tmp_path):
    tried = []

    def inside(*_: object) -> None:
        if not tried:
            with pytest.raises(checkpoint.CheckpointError, match="another process") as caught:
                checkpoint.convert(HF, tmp_path / "out", "hf")
            tried.append(caught)
    checkpoint.convert(HF, tmp_path / "out", "weightwire", on_progress=inside)
    checkpoint.check(tmp_path / "out")
    assert tried
