"""Checkpoints and processes: a rank loads its part, a checkpoint becomes a version, a version becomes a checkpoint."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from conftest import BINARIES, DATA, EngineRanks, Trainer, read_safetensors
from weightwire import Client, DeadlineError, Publisher, RefusedError, Subscriber, WeightwireError, checkpoint

MOE, TIED = DATA / "checkpoints/torch_dist-qwen3_moe", DATA / "checkpoints/megatron-qwen2_tied"


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def hf_of(model: str):
    return DATA / "megatron" / model / "hf"


def bits_of(tensors: dict) -> dict:
    return {name: bits for name, (_, bits) in tensors.items()}


def whole(model: str) -> dict:
    """name -> (meta, bits) of the model's Hugging Face checkpoint."""
    return read_safetensors(hf_of(model) / "model.safetensors")


def engine(daemon, groups, model: str, name: str = "hf") -> EngineRanks:
    config = json.loads((hf_of(model) / "config.json").read_text())
    groups.append(EngineRanks(daemon.agent_socket, name, config, "hf", [[meta for meta, _ in whole(model).values()]]))
    return groups[-1]


@pytest.mark.parametrize("source,model,case,words", [
    (MOE, "qwen3_moe", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1"), (TIED, "qwen2_tied", "mcore-pp2vpp2", "pp2,vpp2"),
    (hf_of("deepseek_v3"), "deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,pp2,ep2,etp1")])
def test_a_rank_loads_what_a_real_megatron_process_of_that_rank_holds(source, model, case, words):
    dump = DATA / "megatron" / model / case
    padded = json.loads((dump / "layout.json").read_text())["padded_vocab"]
    read = 0
    for path in sorted(dump.glob("rank*.safetensors")):
        want = bits_of(read_safetensors(path))
        into = {name: np.zeros_like(bits) for name, bits in want.items()}
        report = checkpoint.load(source, f"megatron:{words},vocab_pad={padded}", int(path.stem[4:]), into,
                                 config=hf_of(model) / "config.json", memory=1 << 16)
        for name, bits in want.items():
            if "word_embeddings" in name or "output_layer" in name:
                bits = np.where(bits == 0x40E0, 0, bits)  # rows of padding: 7.0 in the dumps, untouched by a load
            assert np.array_equal(into[name], bits), (path.name, name)
        read += report.bytes
        assert report.bytes <= sum(bits.nbytes for bits in want.values())
    assert read > 0


@pytest.mark.parametrize("change,message", [
    (lambda into: into.pop("model.norm.weight"), "model.norm.weight"),
    (lambda into: into.update(other=np.zeros(1, np.uint16)), "other"),
    (lambda into: into.update({"model.norm.weight": np.zeros(64, np.float32)}), "dtype_mismatch.*model.norm.weight"),
    (lambda into: into.update({"model.norm.weight": np.zeros(64, np.float16)}), "dtype_mismatch.*model.norm.weight"),
    (lambda into: into.update({"model.norm.weight": np.zeros(128, np.uint16)[::2]}), "contiguous.*model.norm.weight"),
    (lambda into: into.update({"model.norm.weight": np.zeros(65, np.uint16)}), "shape_mismatch.*model.norm.weight")])
def test_tensors_that_do_not_fit_are_refused_before_the_first_byte(change, message):
    into = {name: np.zeros_like(bits) for name, bits in bits_of(whole("qwen2")).items()}
    change(into)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.load(hf_of("qwen2"), "hf", 0, into)
    assert not any(array.any() for array in into.values())


@pytest.mark.parametrize("source,model", [(MOE, "qwen3_moe"), (TIED, "qwen2_tied"), (hf_of("qwen2"), "qwen2")])
def test_a_checkpoint_in_any_format_becomes_a_version(daemon, groups, source, model):
    target = engine(daemon, groups, model)
    checkpoint.push(source, 7, config=hf_of(model) / "config.json", agent=daemon.agent_socket, coordinator=daemon.grpc,
                    timeout=60)
    assert target.ranks[0].serving.version == 7
    for name, bits in bits_of(whole(model)).items():
        assert np.array_equal(target.ranks[0].params[name].view(bits.dtype), bits), name


def test_a_push_that_fails_at_a_rank_leaves_no_rank_attached(daemon):
    place = dict(world_size=4, agent=daemon.agent_socket)
    with Publisher(rank=2, **place):
        with pytest.raises(RefusedError, match="duplicate_rank"):
            checkpoint.push(TIED, 7, config=hf_of("qwen2_tied") / "config.json", agent=daemon.agent_socket,
                            coordinator=daemon.grpc, timeout=60)
        with Publisher(rank=0, **place), Publisher(rank=1, **place):
            pass


@pytest.mark.parametrize("to", ["hf", "weightwire:megatron:tp2,ep2,etp1"])
def test_a_version_is_written_out_from_the_engines_after_the_trainer_has_gone(daemon, groups, tmp_path, to):
    config = hf_of("qwen3_moe") / "config.json"
    target = engine(daemon, groups, "qwen3_moe")
    trainer = Trainer(daemon.agent_socket, json.loads(config.read_text()), "hf", [whole("qwen3_moe")])
    trainer.publish(4)
    target.wait_version(4)
    trainer.close()
    assert checkpoint.save(tmp_path / "saved", to, config, agent=daemon.agent_socket, shard_bytes=100_000, timeout=60) == 4
    checkpoint.check(tmp_path / "saved")
    checkpoint.convert(tmp_path / "saved", tmp_path / "hf", "hf")
    got = bits_of(read_safetensors(tmp_path / "hf/model.safetensors"))
    want = bits_of(whole("qwen3_moe"))
    assert got.keys() == want.keys() and all(np.array_equal(got[name], want[name]) for name in want)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "hub") == ["hf", "saved"]


def test_push_and_save_from_the_command_line(daemon, groups, tmp_path):
    engine(daemon, groups, "qwen2")
    command = [sys.executable, "-m", "weightwire.checkpoint"]
    done = subprocess.run([*command, "push", hf_of("qwen2"), "--version", "2", "--agent", daemon.agent_socket, "--coordinator",
                           daemon.grpc, "--timeout", "60"], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "version 2 is served\n")
    done = subprocess.run([*command, "save", tmp_path / "saved", "--to", "hf", "--config", hf_of("qwen2") / "config.json",
                           "--agent", daemon.agent_socket, "--timeout", "60"], stdout=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'saved'}: version 2\n")
    assert bits_of(read_safetensors(tmp_path / "saved/model.safetensors")).keys() == whole("qwen2").keys()


def test_without_a_version_nothing_is_left_of_a_save(daemon, tmp_path):
    with pytest.raises(DeadlineError, match="wwctl status"):
        checkpoint.save(tmp_path / "saved", "hf", hf_of("qwen2") / "config.json", agent=daemon.agent_socket, timeout=1)
    assert not [path.name for path in tmp_path.iterdir() if "saved" in path.name]


def test_a_save_whose_engine_is_fenced_meanwhile_leaves_no_checkpoint(daemon, groups, tmp_path, monkeypatch):
    config = hf_of("qwen2") / "config.json"
    target = engine(daemon, groups, "qwen2")
    checkpoint.push(hf_of("qwen2"), 1, agent=daemon.agent_socket, coordinator=daemon.grpc, timeout=60)
    target.wait_version(1)
    acknowledge, evicted = Subscriber.acknowledge, []

    def evict(subscriber, offer):
        acknowledge(subscriber, offer)
        if subscriber is not target.ranks[0]:
            with Client(daemon.grpc) as client:
                client.evict("checkpoint")
            end = time.monotonic() + 30
            while subscriber.serving is not None and time.monotonic() < end:
                time.sleep(0.01)
            evicted.append(subscriber.serving)
    monkeypatch.setattr(Subscriber, "acknowledge", evict)
    with pytest.raises(WeightwireError):
        checkpoint.save(tmp_path / "saved", "hf", config, agent=daemon.agent_socket, timeout=60)
    assert evicted == [None] and not (tmp_path / "saved").exists()
