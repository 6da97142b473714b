"""Checkpoints converted by a plan: bit for bit what real Megatron files and dumps hold, in bounded memory. No torch here."""

import json
import os
import resource
import subprocess
import sys

import numpy as np
import pytest

from conftest import BINARIES, DATA, read_safetensors
from demo import checkpoint as model_files
from weightwire import checkpoint
from weightwire.checkpoint import planner

CHECKPOINTS = DATA / "checkpoints"


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def hf_of(model: str):
    return DATA / "megatron" / model / "hf"


def read_folder(folder) -> dict:
    """name -> (meta, bits) of every safetensors file, by the test's own reader."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(read_safetensors(path))
    return found


def same(folder, want) -> None:
    """Names, dtypes, shapes and bits of two folders of safetensors agree."""
    got, expected = read_folder(folder), read_folder(want)
    expected.pop("input_ids", None), expected.pop("logits", None)
    assert got.keys() == expected.keys()
    for name, (meta, bits) in expected.items():
        assert got[name][0] == meta and np.array_equal(got[name][1], bits), name


@pytest.mark.parametrize("model,spec", [
    ("qwen2", "hf"), ("qwen2_tied", "megatron:tp2,pp2"), ("qwen2_kv2", "megatron:tp4"), ("qwen3", "vllm:tp2,pp2"),
    ("qwen3_moe", "megatron:ep2,dp2,experts=grouped"), ("deepseek_v3", "megatron:tp2,pp2,ep2,etp1"), ("mixtral", "fsdp:dp3")])
def test_a_native_checkpoint_in_any_layout_gives_the_model_back(tmp_path, model, spec):
    """With a bound far below the tensors and files of a few tensors each."""
    checkpoint.convert(hf_of(model), tmp_path / "native", f"weightwire:{spec}", memory=1, shard_bytes=50_000, verify=True)
    assert checkpoint.check(tmp_path / "native").spec == spec
    report = checkpoint.convert(tmp_path / "native", tmp_path / "hf", "hf", memory=1, shard_bytes=100_000, verify=True)
    assert report.left_out == [] and report.resumed == 0
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    same(tmp_path / "hf", hf_of(model))


@pytest.mark.parametrize("model,case,words", [
    ("qwen2", "mcore-tp2pp2", "tp2,pp2"), ("qwen2", "mcore-pp2vpp2", "pp2,vpp2"), ("qwen2_kv2", "mcore-tp4", "tp4"),
    ("qwen3_moe", "mcore-tp2ep2etp2-seq", "tp2,ep2,etp2,dp2"), ("qwen3_moe", "mcore-ep2-grouped", "ep2,dp2,experts=grouped")])
def test_the_ranks_of_a_native_checkpoint_are_those_of_real_megatron_processes(tmp_path, model, case, words):
    dump = DATA / "megatron" / model / case
    padded = json.loads((dump / "layout.json").read_text())["padded_vocab"]
    checkpoint.convert(hf_of(model), tmp_path / "native", f"weightwire:megatron:{words},vocab_pad={padded}")
    for path in sorted(dump.glob("rank*.safetensors")):
        rank, want = int(path.stem[4:]), read_safetensors(path)
        got = read_safetensors(tmp_path / f"native/rank{rank:05d}-00000.safetensors")
        for name, (meta, bits) in want.items():
            assert got[name][0] == meta, (rank, name)
            if "word_embeddings" in name or "output_layer" in name:
                bits = np.where(bits == 0x40E0, 0, bits)  # rows of padding: 7.0 in the dumps, 0 in ours
            assert np.array_equal(bits, got[name][1]), (rank, name)


@pytest.mark.parametrize("folder,spec", [
    ("torch_dist-qwen3_moe", "megatron:spec=te,experts=sequential,vocab_pad=256"),
    ("megatron-qwen2_tied", "megatron:tp2,pp2,vocab_pad=256")])
def test_what_megatron_core_saved_is_read_without_torch(tmp_path, folder, spec):
    model = folder.split("-")[1]
    opened = checkpoint.check(CHECKPOINTS / folder)
    assert opened.spec == spec
    report = checkpoint.convert(CHECKPOINTS / folder, tmp_path / "hf", "hf", config=hf_of(model) / "config.json",
                                memory=1 << 16, verify=True)
    same(tmp_path / "hf", hf_of(model))
    assert report.left_out and not any(name.endswith(".weight") for name in report.left_out)
    assert "torch" not in sys.modules


def test_memory_stays_near_the_bound_whatever_the_model(tmp_path):
    """115 MB with an embedding of 51 MB; what a conversion takes beyond an idle process is told by the kernel."""
    model_files.write(str(tmp_path / "hf"), model_files.SMALL, seed=5)

    def peak(*arguments) -> int:
        """Bytes that the process, its planner among them, had resident at most."""
        code = ("import sys; from weightwire.checkpoint.__main__ import main; status = main(sys.argv[1:]); "
                "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))); sys.exit(status)")
        ran = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True,
                             check=True, timeout=120)
        return 1024 * int(ran.stdout.split()[-1])
    idle = peak("show", tmp_path / "hf")
    for source, target, to in (("hf", "native", "weightwire:megatron:tp2,pp2"), ("native", "back", "hf")):
        used = peak("convert", tmp_path / source, tmp_path / target, "--to", to, "--memory", "16MiB", "--verify", "--quiet")
        assert used - idle < 28 << 20, (to, used, idle)
    same(tmp_path / "back", tmp_path / "hf")


def test_the_command_line_converts_checks_and_shows(tmp_path):
    command = [sys.executable, "-m", "weightwire.checkpoint"]

    def run(*arguments):
        return subprocess.run([*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                              timeout=120)
    done = run("convert", hf_of("qwen2"), tmp_path / "n", "--to", "weightwire", "--memory", "1MiB", "--verify")
    assert done.returncode == 0 and done.stdout.endswith("bytes, verified\n")
    assert done.stderr.splitlines()[-1].startswith("verify: 0.3 of 0.3 MB")
    assert run("check", tmp_path / "n").stdout == run("show", tmp_path / "n").stdout
    refused = run("convert", hf_of("qwen2"), tmp_path / "n", "--to", "hf")
    assert refused.returncode == 1 and "exists" in refused.stderr
    refused = run("convert", hf_of("qwen2"), tmp_path / "x", "--to", "gguf")
    assert refused.returncode == 1 and "one of hf, torch_dist" in refused.stderr and not (tmp_path / "x").exists()


@pytest.mark.parametrize("change,message", [
    (dict(intermediate_size=128), r"expected \[64, 128\], found \[64, 96\].*layers.0.mlp.down_proj"),
    (dict(num_hidden_layers=5), "found none.*model.layers.4"),
    (dict(num_hidden_layers=3), "does not know.*model.layers.3"),
    (dict(model_type="unheard"), "unheard")])
def test_a_config_that_does_not_fit_is_refused_with_the_tensor(tmp_path, change, message):
    config = {**json.loads((hf_of("qwen2") / "config.json").read_text()), **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.convert(hf_of("qwen2"), tmp_path / "out", "weightwire", config=tmp_path / "config.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json"]


def test_tensors_that_no_layout_knows_are_dropped_only_on_request(tmp_path):
    tensors = {**{n: v for n, v in read_folder(hf_of("qwen2")).items() if n not in ("input_ids", "logits")}}
    header, data = {}, b""
    for name, (meta, bits) in {**tensors, "rotary.inv_freq": tensors["model.norm.weight"]}.items():
        header[name] = {"dtype": meta.dtype, "shape": meta.shape, "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += bits.tobytes()
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = hf_of("qwen2") / "config.json"
    with pytest.raises(checkpoint.CheckpointError, match="rotary.inv_freq.*--leave-out"):
        checkpoint.convert(tmp_path, tmp_path / "out", "hf", config=config)
    report = checkpoint.convert(tmp_path, tmp_path / "out", "hf", config=config, leave_out=["rotary.*"])
    assert report.left_out == ["rotary.inv_freq"]
    same(tmp_path / "out", hf_of("qwen2"))


def test_without_a_planner_the_remedy_says_where_one_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(tmp_path))
    with pytest.raises(checkpoint.CheckpointError, match="WEIGHTWIRE_BIN_DIR"):
        checkpoint.convert(hf_of("qwen2"), tmp_path / "out", "weightwire")


def test_a_plan_file_that_is_cut_or_continued_is_refused(tmp_path):
    subprocess.run([BINARIES / "wwctl", "plan", "--config", hf_of("qwen2") / "config.json", "--from", "hf", "--to",
                    "megatron:tp2", "--per", "rank", "--out", tmp_path / "plan"], check=True, stdout=subprocess.DEVNULL)
    data = (tmp_path / "plan").read_bytes()
    assert sum(np.prod(copy.extent) for copy in planner.read_plan(data).copies) > 100_000
    for wrong in (b"", data[:100], data[:-1], data + b"\0", b"x" + data):
        with pytest.raises(checkpoint.CheckpointError):
            planner.read_plan(wrong)


def test_a_full_disk_is_an_error_and_leaves_no_checkpoint(tmp_path):
    """A limit on the size of files stands in for the disk; the space is reserved before the first byte."""
    code = ("import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
            "from weightwire.checkpoint.__main__ import main; sys.exit(main(sys.argv[1:]))")
    ran = subprocess.run([sys.executable, "-c", code, "convert", hf_of("qwen2"), tmp_path / "out", "--to", "weightwire"],
                         stderr=subprocess.PIPE, text=True, timeout=60, env={**os.environ})
    assert ran.returncode == 1 and "File too large" in ran.stderr
    assert not (tmp_path / "out").exists()
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
