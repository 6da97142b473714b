"""Damaged and malicious checkpoints are refused before anything is written."""

import io
import json
import os
import pickle
import random
import shutil
import tracemalloc
import zipfile

import pytest

from conftest import BINARIES, DATA
from weightwire import checkpoint
from weightwire.checkpoint import pickles, safetensors

HF = DATA / "megatron/qwen2/hf"
TORCH_DIST = DATA / "checkpoints/torch_dist-qwen3_moe"
MEGATRON = DATA / "checkpoints/megatron-qwen2_tied"
refused = pytest.raises(checkpoint.CheckpointError)


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def test_a_thousand_malformed_headers_are_refused_without_large_allocations(tmp_path):
    header = {"__metadata__": {"format": "pt"}, "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
              "none": {"dtype": "I8", "shape": [0, 3], "data_offsets": [4, 4]},
              "a": {"dtype": "BF16", "shape": [4, 6], "data_offsets": [4, 52]},
              "b": {"dtype": "U8", "shape": [12], "data_offsets": [52, 64]}}
    text, data, rng = json.dumps(header).encode(), bytes(range(64)), random.Random(8)
    good, length, names = len(text).to_bytes(8, "little") + text + data, len(text), ["scalar", "none", "a", "b"]
    wrong = [None, -1, 1 << 63, 1e300, "x", [], {}, [1 << 40] * 9, [-1, 2], [2, 1], True, "../x", [[[]]], "BF17", 0.5]

    def mutated() -> bytes:
        kind = rng.randrange(5)
        if kind == 0:  # the length
            return rng.choice([0, 1, length - 1, length + 1, len(good), 1 << 40, (1 << 64) - 1]).to_bytes(8, "little") + good[8:]
        if kind == 1:  # bytes of the header
            text = bytearray(good[8:8 + length])
            for _ in range(rng.randrange(1, 4)):
                text[rng.randrange(length)] ^= 1 << rng.randrange(8)
            return good[:8] + bytes(text) + data
        if kind == 2:  # cut short, or longer
            return good[:rng.randrange(len(good))] if rng.random() < 0.7 else good + b"\0" * rng.randrange(1, 9)
        changed = json.loads(json.dumps(header))
        name = rng.choice(names)
        if kind == 3:
            changed[name][rng.choice(["dtype", "shape", "data_offsets"])] = rng.choice(wrong)
        else:
            changed[name] = rng.choice(wrong)
        text = json.dumps(changed).encode()
        return len(text).to_bytes(8, "little") + text + data

    accepted = 0
    tracemalloc.start()
    for number in range(1000):
        case = mutated()
        (tmp_path / "model.safetensors").write_bytes(case)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            found = safetensors.read_header(tmp_path, "model.safetensors")
        except checkpoint.CheckpointError:
            pass
        else:  # a flipped bit in a name makes another name: then the tensors still tile the file
            accepted += 1
            assert sum(t.bytes for t in found) == len(case) - 8 - int.from_bytes(case[:8], "little"), number
        assert tracemalloc.get_traced_memory()[1] - before < 4 << 20, number
    tracemalloc.stop()
    assert accepted < 300


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":1,"a":2}', b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                                  b'"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', b"\xff\xfe{}", b'{"a":NaN}'])
def test_a_header_that_is_no_plain_json_is_refused(tmp_path, text):
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with refused:
        checkpoint.open_checkpoint(tmp_path)


@pytest.fixture
def sharded(tmp_path):
    checkpoint.convert(HF, tmp_path / "hf", "hf", shard_bytes=100_000)
    return tmp_path / "hf"


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", ".hidden", "", 7, None, "a\0b"])
def test_a_file_name_in_an_index_is_an_id_and_no_path(sharded, file):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(HF / "model.safetensors", sharded.parent / "secret.safetensors")
    with pytest.raises(checkpoint.CheckpointError, match="no plain file name"):
        checkpoint.open_checkpoint(sharded)


@pytest.mark.parametrize("change,message", [
    (lambda m: m.update({"ghost": "model-00001-of-00004.safetensors"}), "does not hold it.*ghost"),
    (lambda m: m.update({"model.norm.weight": "model-00001-of-00004.safetensors"}), "model.norm.weight"),
    (lambda m: m.update({"ghost": "missing.safetensors"}), "missing.safetensors")])
def test_an_index_that_does_not_fit_its_files_is_refused(sharded, change, message):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    change(index["weight_map"])
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.open_checkpoint(sharded)


def flip(path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def copied(source, target):
    shutil.copytree(source, target)
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


def test_a_flipped_bit_anywhere_in_a_native_checkpoint_is_found(tmp_path):
    checkpoint.convert(HF, tmp_path / "n", "weightwire:megatron:tp2")
    rng = random.Random(3)
    for number in range(12):
        broken = copied(tmp_path / "n", tmp_path / f"broken{number}")
        path = broken / ("weightwire.json" if number < 4 else f"rank0000{number % 2}-00000.safetensors")
        text = path.read_bytes()
        at = text.index(b'"digest"') + 20 + 7 * number if number < 4 else rng.randrange(len(text))
        flip(path, at)
        with refused:
            checkpoint.check(broken)
        with refused:
            checkpoint.convert(broken, tmp_path / "out", "hf", verify=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("source,name", [(TORCH_DIST, "__0_0.distcp"),
                                         (MEGATRON, "iter_0000007/mp_rank_01_001/model_optim_rng.pt")])
def test_a_flipped_bit_in_torchs_files_is_found_by_their_checksums(tmp_path, source, name):
    broken = copied(source, tmp_path / "broken")
    opened = checkpoint.check(broken)
    region = next(r for tensors in opened.ranks for t in tensors.values() for r in t.regions
                  if r.file == name and r.crc is not None)
    flip(broken / name, region.offset + 11)
    with pytest.raises(checkpoint.CheckpointError, match="checksum"):
        checkpoint.check(broken)


@pytest.mark.parametrize("source,name", [
    (TORCH_DIST, "__1_0.distcp"), (TORCH_DIST, ".metadata"), (MEGATRON, "iter_0000007/mp_rank_01_001/model_optim_rng.pt"),
    (HF, "model.safetensors")])
def test_a_file_cut_short_or_missing_is_refused_before_anything_is_written(tmp_path, source, name):
    for keep in (None, 0, 100, 0.5, 0.999):
        shutil.rmtree(tmp_path / "broken", ignore_errors=True)
        broken = copied(source, tmp_path / "broken")
        if keep is None:
            (broken / name).unlink()
        else:
            data = (broken / name).read_bytes()
            (broken / name).write_bytes(data[:int(keep * len(data)) if keep < 1 else keep])
        with refused:
            checkpoint.convert(broken, tmp_path / "out", "hf", config=HF / "config.json")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["broken"], keep


class Evil:
    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def torch_zip(pickled: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    return out.getvalue()


def test_what_a_pickle_wants_called_is_never_called(tmp_path):
    evil = pickle.dumps({"model": {"a.weight": Evil(str(tmp_path / "executed"))}})
    pickle.loads(evil)
    os.rmdir(tmp_path / "executed")  # it does what it is for
    (tmp_path / "td").mkdir()
    (tmp_path / "td/.metadata").write_bytes(evil)
    legacy = tmp_path / "legacy/mp_rank_00"
    legacy.mkdir(parents=True)
    (legacy / "model_optim_rng.pt").write_bytes(torch_zip(evil))
    for folder in ("td", "legacy"):
        with refused:
            checkpoint.open_checkpoint(tmp_path / folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("pickled", [
    b"\x80\x02]r\xff\xff\xff\x7f.",  # a memo of two thousand million entries
    b"\x80\x05\x96\xff\xff\xff\xff\xff\xff\xff\x7f.",  # a bytearray as large as memory
    b"\x80\x04\x8c\xff.", b"", b"\x80\x02.", b"\x80\x02" + b"(" * 50_000, b"\x80\x02K\x01K\x02R.",
    b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R}b.", b"\x80\x02\x82\x01."])
def test_malformed_pickles_are_refused(pickled):
    try:
        made = pickles.load(pickled, "x")
    except checkpoint.CheckpointError:
        return
    assert isinstance(made, pickles.Inert) and made.path == "os.system"


def test_mutated_metadata_is_refused_or_describes_blocks_inside_the_files(tmp_path):
    broken, rng = copied(TORCH_DIST, tmp_path / "td"), random.Random(5)
    good = (TORCH_DIST / ".metadata").read_bytes()
    refusals = 0
    for _ in range(60):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(len(data) // 2)] = rng.randrange(256)
        (broken / ".metadata").write_bytes(data)
        try:
            opened = checkpoint.open_checkpoint(broken)
        except checkpoint.CheckpointError:
            refusals += 1
            continue
        for tensor in opened.ranks[0].values():
            for region in tensor.regions:
                assert 0 <= region.offset <= (broken / region.file).stat().st_size
    assert refusals > 10


def test_a_path_in_metadata_is_refused(tmp_path):
    broken = copied(TORCH_DIST, tmp_path / "td")
    data = (broken / ".metadata").read_bytes()
    assert data.count(b"__0_0.distcp") > 0
    (broken / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    with pytest.raises(checkpoint.CheckpointError, match="no plain file name"):
        checkpoint.open_checkpoint(broken)
