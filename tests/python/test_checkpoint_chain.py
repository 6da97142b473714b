"""Native checkpoints that are stored as what changed since another one: every reader sees the whole one, bit for bit, and a base
that is not the right one is named."""

import json
import os
import shutil

import numpy as np
import pytest

from checkpoint_folders import plain, read_folder, write_file
from conftest import BINARIES, DATA, read_safetensors
from weightwire import checkpoint
from weightwire.checkpoint import native, native_delta
from weightwire.checkpoint.__main__ import main

QWEN2 = DATA / "megatron/qwen2/hf"
SPEC = "weightwire:megatron:tp2,pp2"
MANIFEST = "weightwire.json"


@pytest.fixture(autouse=True)
def planner(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def versions(folder, count, share=0.03):
    """Exports of `count` steps of a trainer: hf folders 0, 1 …, and the tensors of each."""
    random = np.random.default_rng(count)
    tensors = read_safetensors(QWEN2 / "model.safetensors")
    made = []
    for number in range(count):
        if number:
            tensors = {name: (meta, np.where(random.random(bits.shape) < share, bits + bits.dtype.type(1), bits))
                       for name, (meta, bits) in tensors.items()}
        hf = folder / f"hf{number}"
        hf.mkdir()
        shutil.copy(QWEN2 / "config.json", hf)
        write_file(hf / "model.safetensors", tensors)
        made.append(tensors)
    return made


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".delta"))


@pytest.fixture
def chain(tmp_path):
    """v0 is whole, v1 what changed since v0, v2 since v1."""
    made = versions(tmp_path, 3)
    checkpoint.convert(tmp_path / "hf0", tmp_path / "v0", SPEC)
    for number in (1, 2):
        checkpoint.convert(tmp_path / f"hf{number}", tmp_path / f"v{number}", SPEC, base=tmp_path / f"v{number - 1}")
    return tmp_path, made


def test_every_reader_sees_each_version_whole(chain):
    folder, made = chain
    for number, tensors in enumerate(made):
        checkpoint.convert(folder / f"v{number}", folder / f"back{number}", "hf", verify=True)
        assert read_folder(folder / f"back{number}") == plain(tensors)
        checkpoint.check(folder / f"v{number}")
    # By ranks of another layout, each its own part, and without a chain again: the same digest as if it never was one.
    got = {}
    for rank in range(4):
        wanted = {tensor.name: np.zeros(tensor.shape, np.uint16) for tensor in checkpoint.open_checkpoint(folder / "v2").ranks[rank].values()}
        checkpoint.load(folder / "v2", "megatron:tp2,pp2", rank, wanted)
        got[rank] = wanted
    checkpoint.convert(folder / "v2", folder / "compact", SPEC)
    checkpoint.convert(folder / "hf2", folder / "whole", SPEC)
    digests = [json.loads((folder / one / MANIFEST).read_text())["digest"] for one in ("v2", "compact", "whole")]
    assert digests[0] == digests[1] == digests[2]
    for rank, tensors in got.items():
        files = sorted((folder / "whole").glob(f"rank{rank:05d}-*.safetensors"))
        want = {name: bits for file in files for name, (_, bits) in read_safetensors(file).items()}
        assert tensors.keys() == want.keys() and all((tensors[name] == want[name]).all() for name in want)


def test_made_whole_it_needs_no_base_and_is_one_for_others_still(chain, capsys):
    folder, made = chain
    assert checkpoint.compact(folder / "v1") and not checkpoint.compact(folder / "v1")
    assert not list((folder / "v1").glob("*.delta"))
    shutil.rmtree(folder / "v0")
    for number in (1, 2):  # v2 is what changed since v1
        checkpoint.convert(folder / f"v{number}", folder / f"back{number}", "hf", verify=True)
        assert read_folder(folder / f"back{number}") == plain(made[number])
    assert main(["compact", str(folder / "v2")]) == 0
    assert "stored whole now" in capsys.readouterr().out
    shutil.rmtree(folder / "v1")
    checkpoint.check(folder / "v2")


@pytest.mark.parametrize("failing", range(8))
def test_killed_while_it_is_made_whole_it_is_one_or_the_other(chain, monkeypatch, failing):
    folder, made = chain
    calls = iter(range(100))

    def replace(old, new, real=os.replace):
        if next(calls) == failing:
            raise KeyboardInterrupt
        real(old, new)
    cut = False
    with monkeypatch.context() as planted:
        planted.setattr(os, "replace", replace)
        try:
            checkpoint.compact(folder / "v2")
        except KeyboardInterrupt:
            cut = True
    assert cut == (failing < 5)  # the files of four ranks, and the manifest
    checkpoint.convert(folder / "v2", folder / "back", "hf", verify=True)
    assert read_folder(folder / "back") == plain(made[2])
    assert checkpoint.compact(folder / "v2") == cut
    assert not [path for path in (folder / "v2").iterdir() if path.suffix in (".delta", ".new")]


def test_a_damaged_chain_is_not_made_whole(chain):
    folder, _ = chain
    file = next((folder / "v1").glob("*.delta"))
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.compact(folder / "v2")
    assert json.loads((folder / "v2" / MANIFEST).read_text())["version"] == 2
    with pytest.raises(checkpoint.CheckpointError, match="not a native checkpoint"):
        checkpoint.compact(folder / "hf0")


def test_it_is_much_smaller(chain):
    folder, made = chain
    whole = size_of(folder / "v0")
    assert not list((folder / "v1").glob("*.safetensors"))
    # 3 % of elements by a bit: a code near the content of 0.2 + 0.06 bits for 16; small tensors pay for headers.
    assert size_of(folder / "v1") < whole / 4 and size_of(folder / "v2") < whole / 4


def test_show_names_the_chain_and_the_command_line_writes_it(chain, capsys):
    folder, _ = chain
    assert main(["convert", str(folder / "hf2"), str(folder / "again"), "--to", SPEC, "--base", str(folder / "v0"), "--quiet"]) == 0
    assert main(["show", str(folder / "v2")]) == 0
    said = capsys.readouterr().out
    assert f"what changed since {folder}/v1" in said and f"what changed since {folder}/v0" in said
    assert main(["check", str(folder / "again")]) == 0


def test_moved_together_it_is_still_found(chain, tmp_path_factory):
    folder, made = chain
    elsewhere = tmp_path_factory.mktemp("moved") / "run"
    shutil.move(str(folder), str(elsewhere))
    checkpoint.convert(elsewhere / "v2", elsewhere / "out", "hf")
    assert read_folder(elsewhere / "out") == plain(made[2])


def refused(folder, match, code):
    with pytest.raises(checkpoint.CheckpointError, match=match) as why:
        checkpoint.check(folder)
    assert why.value.code == code
    return str(why.value)


def test_a_base_that_is_gone_or_another_one_is_named(chain):
    folder, _ = chain
    os.rename(folder / "v0", folder / "away")
    assert str(folder / "v0") in refused(folder / "v2", "cannot be read", "FAILED_PRECONDITION")
    checkpoint.convert(folder / "hf2", folder / "v0", SPEC)
    refused(folder / "v1", "which is another checkpoint now", "FAILED_PRECONDITION")


def test_bytes_of_a_base_that_changed_under_its_manifest_are_noticed(chain):
    folder, _ = chain
    file = sorted((folder / "v0").glob("*.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match="digest says") as why:
        checkpoint.convert(folder / "v2", folder / "out", "hf")
    assert why.value.code == "DATA_LOSS" and why.value.tensor


def test_damaged_files_of_changes_are_refused_never_wrong(chain):
    """A flipped or cut byte anywhere: an error, or the right tensors (a flip in words that nobody reads)."""
    folder, made = chain
    file = sorted((folder / "v1").glob("*.delta"))[0]
    data = file.read_bytes()
    random = np.random.default_rng(3)
    for number, at in enumerate([0, 8, 9, 10, 11, len(data) - 1, len(data) - 9, len(data) - 20, *random.integers(0, len(data), 60)]):
        broken = bytearray(data)
        broken[at] ^= 1 << int(random.integers(0, 8))
        file.write_bytes(broken if number % 4 else broken[:at])
        out = folder / f"out{number}"
        try:
            checkpoint.convert(folder / "v1", out, "hf")
        except checkpoint.CheckpointError as error:
            assert error.code in ("DATA_LOSS", "INVALID_ARGUMENT"), error
        else:
            assert read_folder(out) == plain(made[1]), at


def test_a_ring_and_a_chain_without_an_end_are_refused(chain):
    folder, _ = chain
    manifest = folder / "v1" / MANIFEST
    said = json.loads(manifest.read_text())
    said["base"]["path"] = "v2"
    manifest.write_text(json.dumps(said))
    refused(folder / "v2", "a ring of them", "FAILED_PRECONDITION")


def test_what_cannot_be_based_on_it_is_refused_before_anything_is_written(chain):
    folder, _ = chain
    for to, base, match in [("hf", "v0", "kept whole"), (SPEC, "hf0", "weightwire.json"), (SPEC, "nowhere", "weightwire.json"),
                            (SPEC, "new", "own base")]:
        with pytest.raises((checkpoint.CheckpointError, OSError), match=match):
            checkpoint.convert(folder / "hf1", folder / "new", to, base=folder / base)
        assert not (folder / "new").exists() and not (folder / ".new.partial").exists()
    checkpoint.convert(folder / "hf0", folder / "tp4", "weightwire:megatron:tp4")
    with pytest.raises(checkpoint.CheckpointError, match="only in|F16|BF16"):
        checkpoint.convert(folder / "hf1", folder / "new", SPEC, base=folder / "tp4")
    assert not (folder / "new").exists()


def test_a_writer_that_was_killed_while_it_made_changes_begins_anew(chain, monkeypatch):
    folder, made = chain
    write = native_delta.write

    def killed(path, *arguments):
        write(path, *arguments)
        raise KeyboardInterrupt
    monkeypatch.setattr(native.native_delta, "write", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.convert(folder / "hf1", folder / "new", SPEC, base=folder / "v0")
    assert not (folder / "new").exists()
    monkeypatch.undo()
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    checkpoint.convert(folder / "hf1", folder / "new", SPEC, base=folder / "v0")
    checkpoint.convert(folder / "new", folder / "out", "hf")
    assert read_folder(folder / "out") == plain(made[1])
