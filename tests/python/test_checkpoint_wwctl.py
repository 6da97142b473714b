"""wwctl convert, load, push and save: Python's commands under wwctl's name, with its help, its exit codes and its planner."""

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from conftest import BINARIES, DATA, EngineRanks, read_safetensors
from weightwire import Client, checkpoint
from weightwire.checkpoint.__main__ import main
from weightwire.checkpoint.planner import planner_of

QWEN2 = DATA / "megatron/qwen2/hf"
MOE = DATA / "checkpoints/torch_dist-qwen3_moe"


def wwctl(*arguments, **environment):
    """Runs it with nothing but itself to plan with."""
    env = {**os.environ, "WEIGHTWIRE_PYTHON": sys.executable, **environment}
    env.pop("WEIGHTWIRE_BIN_DIR", None)
    return subprocess.run([BINARIES / "wwctl", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          timeout=120, env=env, cwd=environment.get("HOME"))


def test_convert_plans_with_the_wwctl_that_was_called(tmp_path):
    done = wwctl("convert", QWEN2, tmp_path / "plan", "--to", "weightwire:megatron:tp2", "--quiet", PATH="/usr/bin:/bin")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"{tmp_path}/plan: weightwire, layout megatron:tp2, ")
    # A folder may be called as a command is, and an argument may look like anything: none of it is wwctl's.
    done = wwctl("convert", "plan", "back", "--to", "hf", "--quiet", HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    got, want = (read_safetensors(folder / "model.safetensors") for folder in (tmp_path / "back", QWEN2))
    assert got.keys() == want.keys() and all((got[name][1] == want[name][1]).all() for name in want)


@pytest.mark.parametrize("arguments,status,said", [
    (["convert", "--help"], 0, "usage: wwctl convert "),
    (["load", "-h"], 0, "usage: wwctl load "),
    (["push", "--help"], 0, "usage: wwctl push "),
    (["save", "--help"], 0, "usage: wwctl save "),
    (["--help"], 0, "Write a checkpoint in another format and layout"),
    (["convert"], 2, "the following arguments are required: source, target, --to"),
    (["load", "x"], 2, "one of the arguments --version --to is required"),
    (["load", "x", "--to", "hf"], 1, "x: no checkpoint"),
    (["convert", QWEN2, DATA, "--to", "hf"], 1, "exists")])
def test_help_and_exit_codes_are_the_modules(arguments, status, said):
    done = wwctl(*arguments)
    assert done.returncode == status and said in " ".join((done.stdout + done.stderr).split())


def test_a_python_that_is_missing_or_lacks_the_package_says_what_to_do(tmp_path):
    done = wwctl("convert", "a", "b", "--to", "hf", WEIGHTWIRE_PYTHON=str(tmp_path / "python3"))
    assert done.returncode == 100 and "No such file" in done.stderr and "WEIGHTWIRE_PYTHON" in done.stderr
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I -S "$@"\n')  # no packages at all
    bare.chmod(0o755)
    done = wwctl("convert", "a", "b", "--to", "hf", WEIGHTWIRE_PYTHON=str(bare))
    assert done.returncode == 100 and "cannot import weightwire.checkpoint" in done.stderr
    assert "./dev wheel" in done.stderr and "Traceback" not in done.stderr


def test_a_trial_finds_what_every_rank_would_load(tmp_path, monkeypatch, capsys):
    done = wwctl("load", MOE, "--to", "vllm:tp2,ep", "--verify", "--config", DATA / "megatron/qwen3_moe/hf/config.json")
    assert done.returncode == 0, done.stderr
    assert [line.split(": ")[0] for line in done.stdout.splitlines()] == ["vllm:tp2,ep rank 0", "vllm:tp2,ep rank 1"]
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    (trial,) = checkpoint.try_load(QWEN2, "megatron:tp2,pp2", [3])
    held = planner_of((QWEN2 / "config.json").read_text()).rank_boxes("megatron:tp2,pp2", 3)
    assert (trial.rank, trial.tensors) == (3, len(held))
    assert trial.bytes == sum(2 * math.prod(box.extent) for one in held for box in one.boxes)
    with pytest.raises(checkpoint.CheckpointError, match="has ranks 0 to 3.*rank 4"):
        list(checkpoint.try_load(QWEN2, "megatron:tp2,pp2", [4]))
    checkpoint.convert(QWEN2, tmp_path / "n", "weightwire")
    file = next(tmp_path.glob("n/*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert main(["load", str(tmp_path / "n"), "--to", "hf"]) == 0  # sizes are right; digests are compared on request
    assert main(["load", str(tmp_path / "n"), "--to", "hf", "--verify"]) == 1
    assert "not those of the digest" in capsys.readouterr().err


def engine(daemon, groups, name: str) -> EngineRanks:
    groups.append(EngineRanks(daemon.agent_socket, name, (QWEN2 / "config.json").read_text(), "hf",
                              [[meta for meta, _ in read_safetensors(QWEN2 / "model.safetensors").values()]]))
    return groups[-1]


def test_engines_start_from_the_checkpoint_once_and_from_a_peer_ever_after(daemon, groups):
    engine(daemon, groups, "a")

    def load(_=None):
        return wwctl("load", QWEN2, "--version", "2", "--agent", daemon.agent_socket, "--coordinator", daemon.grpc,
                     "--timeout", "60")
    with ThreadPoolExecutor(3) as pool:  # as many pods that start at once
        done = list(pool.map(load, range(3)))
    assert [one.returncode for one in done] == [0, 0, 0], done
    assert sorted(one.stdout.split(", from ")[1] for one in done).count(f"{QWEN2}\n") == 1
    with Client(daemon.grpc) as client:
        published = [e.version for e in client.status().epochs if e.kind == "publish"]
        engine(daemon, groups, "b")
        assert load().stdout == "version 2 is served, from a peer\n"
        epochs = client.status().epochs
        assert published == [2] == [e.version for e in epochs if e.kind == "publish"]
        assert [e.engines for e in epochs if e.kind == "fill"] == [("b",)]


def test_an_engine_start_that_cannot_be_says_why(daemon, groups):
    engine(daemon, groups, "a")
    checkpoint.push(QWEN2, 3, agent=daemon.agent_socket, coordinator=daemon.grpc, timeout=60)
    groups.pop().close()
    done = wwctl("load", QWEN2, "--version", "3", "--agent", daemon.agent_socket, "--coordinator", daemon.grpc, "--timeout", "3")
    assert done.returncode == 1
    assert "version 3 is not served" in done.stderr and "the checkpoint was not published: " in done.stderr
