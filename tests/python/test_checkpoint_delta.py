"""wwctl delta inspect: counts of NumPy, codes that are shorter than what they code, refusals that name the tensor."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from checkpoint_folders import write_file, write_shards
from conftest import BINARIES, DATA
from weightwire import checkpoint
from weightwire.checkpoint import delta
from weightwire.memory import TensorMeta

CONFIG = {"model_type": "llama"}
BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "I64": np.uint64}
#: Odd sizes, a scalar, an empty tensor, and one of several blocks of 1 MiB.
SHAPES = {"a": ("BF16", (1201, 1003)), "b": ("F32", (77, 3)), "c": ("F8_E4M3", (1_050_001,)), "d": ("F16", ()), "e": ("I64", (5, 7)),
          "empty": ("BF16", (0, 4))}


@pytest.fixture(autouse=True)
def planner(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def values(random) -> dict:
    return {name: (TensorMeta(name, dtype, shape),
                   random.integers(0, 1 << 8 * np.dtype(BITS[dtype]).itemsize, shape, BITS[dtype], endpoint=False))
            for name, (dtype, shape) in SHAPES.items()}


def step(random, tensors: dict, share: float) -> dict:
    """Of each tensor about this share of the elements by one in the last place."""
    return {name: (meta, np.where(random.random(bits.shape) < share, bits + bits.dtype.type(1), bits))
            for name, (meta, bits) in tensors.items()}


@pytest.mark.parametrize("share", [0.0, 0.004, 0.03, 1.0])
def test_counts_are_numpys_and_codes_are_shorter(tmp_path, share):
    random = np.random.default_rng(int(share * 1000))
    old = values(random)
    new = step(random, old, share)
    write_shards(tmp_path / "old", CONFIG, old, 2)
    write_shards(tmp_path / "new", CONFIG, new, 3)
    found = {one.name: one for one in delta.inspect(tmp_path / "old", tmp_path / "new")}
    assert found.keys() == SHAPES.keys()
    for name, (meta, bits) in new.items():
        one = found[name]
        assert one.changed == np.count_nonzero(bits != old[name][1]), name
        assert (one.elements, one.bytes, one.dtype, one.rank) == (math.prod(meta.shape), bits.nbytes, meta.dtype, 0)
        assert one.coded <= one.bytes
        assert one.density == (one.changed / one.elements if one.elements else 0)
    # A step of one place is a bit and its sign; where it is takes the entropy of the positions.
    big = found["a"]
    places = 0 if share in (0, 1) else -big.elements * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert big.coded <= 1.1 * (places + 1.2 * big.changed) / 8 + 3 * 200


def test_what_has_no_shorter_code_counts_as_it_is_in_pieces_too(tmp_path, monkeypatch):
    monkeypatch.setattr(delta, "_PIECE_BYTES", 1 << 10)
    old, new = values(np.random.default_rng(5)), values(np.random.default_rng(6))
    for name, tensors in (("old", old), ("new", new)):
        write_shards(tmp_path / name, CONFIG, tensors)
    found = {one.name: one for one in delta.inspect(tmp_path / "old", tmp_path / "new")}
    assert {name: found[name].coded for name in SHAPES} == {name: bits.nbytes for name, (_, bits) in new.items()}
    assert all(found[name].changed == np.count_nonzero(bits != old[name][1]) for name, (_, bits) in new.items())


def test_text_and_json_add_up(tmp_path):
    random = np.random.default_rng(7)
    old = {f"t{i:02}": (TensorMeta(f"t{i:02}", "BF16", (50, 31)), random.integers(0, 1 << 16, (50, 31), np.uint16)) for i in range(25)}
    new = step(random, old, 0.1)
    write_shards(tmp_path / "old", CONFIG, old)
    write_shards(tmp_path / "new", CONFIG, new)

    def run(*arguments):
        done = subprocess.run([BINARIES / "wwctl", "delta", "inspect", tmp_path / "old", tmp_path / "new", *arguments], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=60,
                              env={**os.environ, "WEIGHTWIRE_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert done.returncode == 0, done.stderr
        return done.stdout
    said = json.loads(run("--json", "--quiet"))
    changed = sum(int(np.count_nonzero(new[name][1] != old[name][1])) for name in old)
    assert (said["elements"], said["changed"], said["bytes_dense"]) == (25 * 1550, changed, 25 * 3100)
    assert said["density"] == changed / (25 * 1550)
    assert said["bytes_coded"] == sum(one["bytes_coded"] for one in said["tensors"]) < said["bytes_dense"] / 4
    lines = run().splitlines()
    assert len(lines) == 1 + 20 + 2 and lines[-2] == "… and 5 more (--all)"
    assert lines[-1].startswith(f"25 tensors, {100 * changed / 38750:.2f}% of 38,750 elements changed: ")
    assert sorted(line.split()[0] for line in run("--all").splitlines()[1:-1]) == sorted(old)


def test_every_rank_of_a_checkpoint_in_parts(tmp_path):
    source = DATA / "megatron/qwen2/hf"
    for name in ("old", "new"):
        checkpoint.convert(source, tmp_path / name, "weightwire:megatron:tp2,pp2")
    assert {one.rank for one in delta.inspect(tmp_path / "old", tmp_path / "new")} == {0, 1, 2, 3}
    assert sum(one.changed for one in delta.inspect(tmp_path / "old", tmp_path / "new")) == 0


def test_what_cannot_be_compared_is_named(tmp_path):
    random = np.random.default_rng(8)
    old = values(random)
    write_shards(tmp_path / "old", CONFIG, old)
    for case, change, words in [
        ("less", lambda t: t.pop("b"), ["only in ", "old", "tensor=b", "rank=0"]),
        ("dtype", lambda t: t.update(b=(TensorMeta("b", "I64", (77, 3)), np.zeros((77, 3), np.uint64))), ["F32 [77, 3]", "I64", "tensor=b"]),
        ("shape", lambda t: t.update(b=(TensorMeta("b", "F32", (3, 77)), np.zeros((3, 77), np.uint32))), ["[77, 3]", "[3, 77]"]),
    ]:
        new = dict(old)
        change(new)
        write_shards(tmp_path / case, CONFIG, new)
        with pytest.raises(checkpoint.CheckpointError) as refused:
            delta.inspect(tmp_path / "old", tmp_path / case)
        told = f"{refused.value} tensor={refused.value.tensor} rank={refused.value.rank}"
        assert all(word in told for word in words) and "one layout" in refused.value.remedy, told
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint"):
        delta.inspect(tmp_path / "old", tmp_path)
    parts = tmp_path / "parts"
    checkpoint.convert(DATA / "megatron/qwen2/hf", parts, "weightwire:megatron:tp2")
    with pytest.raises(checkpoint.CheckpointError, match="1 ranks .* 2 "):
        delta.inspect(tmp_path / "old", parts)


def test_a_file_that_is_cut_while_it_is_read(tmp_path, monkeypatch):
    old = values(np.random.default_rng(9))
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
        write_file(tmp_path / name / "model.safetensors", old)
    check = delta.check_alike

    def cut(*arguments):
        check(*arguments)
        os.truncate(tmp_path / "new/model.safetensors", 1000)
    monkeypatch.setattr(delta, "check_alike", cut)
    with pytest.raises(checkpoint.CheckpointError) as refused:
        delta.inspect(tmp_path / "old", tmp_path / "new")
    assert refused.value.code == "DATA_LOSS" and "model.safetensors" in str(refused.value)
