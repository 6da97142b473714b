"""libweightwire_checkpoint.so: it says what wwctl says, copies what NumPy copies, and is refused with a reason where it is not
the one of this release."""

import json
import math
import os
import shutil
import subprocess

import numpy as np
import pytest

from conftest import BINARIES, DATA
from weightwire.checkpoint.library import FILE, library_of
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.stored import CheckpointError

MOE = DATA / "megatron/qwen3_moe/hf/config.json"
SPEC = "megatron:tp2,ep2,etp1"


@pytest.fixture
def library():
    return library_of(str(BINARIES / "wwctl"))


def wwctl(*arguments):
    return subprocess.run([BINARIES / "wwctl", *map(str, arguments), "--config", MOE], stdout=subprocess.PIPE, check=True,
                          timeout=60).stdout


def test_layouts_and_plans_are_those_of_wwctl(library, tmp_path):
    config = MOE.read_text()
    said = json.loads(wwctl("layout", "show", "--spec", SPEC, "--tensor", "*", "--json"))
    shown = json.loads(library.layout(config, SPEC, pieces=True))
    assert shown == {"ranks": said["ranks"], "tensors": said["tensors"]}
    for rank in range(said["ranks"]):
        mine = [tensor for tensor in said["tensors"] if tensor["rank"] == rank]
        assert json.loads(library.layout(config, SPEC, rank, pieces=True))["tensors"] == mine
        for tensor in mine:
            del tensor["pieces"]
        assert json.loads(library.layout(config, SPEC, rank))["tensors"] == mine
    wwctl("plan", "--from", "hf", "--to", SPEC, "--per", "rank", "--out", tmp_path / "plan")
    assert library.plan(config, "hf", SPEC) == (tmp_path / "plan").read_bytes()


def test_a_ranks_plan_fills_that_rank_and_no_other(library):
    planner = planner_of(MOE.read_text(), str(BINARIES / "wwctl"))
    for rank, held in enumerate(planner.boxes(SPEC)):
        copies = planner.plan("megatron:tp4", SPEC, rank).copies
        assert {copy.target_rank for copy in copies} == {rank}
        assert sum(copy.elements for copy in copies) == sum(math.prod(box.extent) for one in held for box in one.boxes)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
def test_copies_and_reads_are_numpys(library, dtype, tmp_path):
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    random = np.random.default_rng(seed)
    for _ in range(200):
        extent = random.integers(1, 9, random.integers(0, 4))
        if len(extent) and not random.integers(4):
            extent[-1] = 700  # rows that are worth the way past the caches
        if len(extent) and not random.integers(8):
            extent[0] = 50_000 // math.prod(extent[1:])  # larger than what is read in one call
        order = [random.permutation(len(extent)) for _ in range(2)]
        strides = [np.ones(len(extent), np.int64) for _ in range(2)]
        for stride, places in zip(strides, order):
            following = 1
            for d in places:
                stride[d] = following
                following = following * extent[d] + random.integers(0, 3) + (4500 if not random.integers(9) else 0)
        last = [int(sum((n - 1) * s for n, s in zip(extent, stride))) for stride in strides]
        source = random.integers(0, 255, last[0] + 1).astype(dtype)
        offset = int(random.integers(0, 5))
        target = random.integers(0, 255, offset + last[1] + 3).astype(dtype)
        want = target.copy()
        views = [np.lib.stride_tricks.as_strided(flat, extent, stride * flat.itemsize)
                 for flat, stride in ((source, strides[0]), (want[offset:], strides[1]))]
        np.copyto(views[1], views[0])
        before, place = target.copy(), int(random.integers(0, 50))
        library.copy(target, offset, strides[1].tolist(), source, strides[0].tolist(), extent.tolist())
        assert np.array_equal(target, want), (seed, extent, strides)
        path = tmp_path / "source"
        path.write_bytes(bytes(place) + source.tobytes())
        with open(path, "rb") as file:
            read = before.copy()
            library.read(read, offset, strides[1].tolist(), file.fileno(), place, "source", strides[0].tolist(), extent.tolist())
            assert np.array_equal(read, want), (seed, extent, strides)
            os.truncate(path, path.stat().st_size - 1)
            with pytest.raises(CheckpointError, match=f"source: cut short.* found {path.stat().st_size};"):
                library.read(before, offset, strides[1].tolist(), file.fileno(), place, "source", strides[0].tolist(),
                             extent.tolist())


def test_a_disk_that_fails_is_no_damage(library, tmp_path):
    with open(tmp_path / "other", "wb") as file, pytest.raises(CheckpointError, match="other: Bad file descriptor") as failed:
        library.read(np.zeros(4, np.uint8), 0, [1], file.fileno(), 0, "other", [1], [4])
    assert failed.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("spec,rank,reason,said", [
    ("megatron:tp3", 0, "shape_mismatch", "tp"), ("nonsense:tp2", 0, "unknown_scheme", "nonsense"),
    ("hf", 1, "invalid_request", "hf has ranks 0 to 0.*rank 1"), ("hf\0", 0, "invalid_request", "zero byte")])
def test_what_is_refused_says_why(library, spec, rank, reason, said):
    with pytest.raises(CheckpointError, match=said) as refused:
        library.layout(MOE.read_text(), spec, rank)
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", reason)


def test_a_model_that_is_none_is_refused(library):
    with pytest.raises(CheckpointError, match="JSON"):
        library.plan("{", "hf", "hf")


def test_a_library_that_is_missing_or_another_one_says_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=f"{FILE}.*./dev build"):
        library_of(str(tmp_path / "wwctl"))
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(next(BINARIES.glob("libweightwire_ucx.so"), BINARIES / "wwctl"), other / FILE)
    with pytest.raises(CheckpointError, match="cannot load the planner, which lies beside wwctl"):
        library_of(str(other / "wwctl"))
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(tmp_path))
    with pytest.raises(CheckpointError, match="wwctl, beside which the planner lies, was not found"):
        library_of(None)
    link = tmp_path / "wwctl"  # as package managers make them
    link.symlink_to(BINARIES / "wwctl")
    assert json.loads(library_of(None).layout(MOE.read_text(), "hf"))["ranks"] == 1
