"""The RL example as a user runs it: with sync the reward doubles, without it stays where it was."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))
SECONDS = 600


def run(tmp_path, *options) -> dict:
    out = tmp_path / "run.json"
    done = subprocess.run([sys.executable, ROOT / "client/python/examples/grpo/train.py", "--out", out, "--weightwired",
                           BINARIES / "weightwired", *options], stderr=subprocess.PIPE, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith('{"time"')] == [], "the service's log stands between the rewards"
    return json.loads(out.read_text())


def ends(rewards: list) -> tuple:
    return sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_with_sync_the_reward_at_least_doubles(tmp_path, engine):
    first, last = ends(run(tmp_path, "--engine", engine)["reward"])
    assert last >= 2 * first, (first, last)


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_sent_as_changes_every_answer_is_that_of_the_run_that_sends_everything(tmp_path, engine):
    options = "--engine", engine, "--dtype", "bfloat16", "--steps", "10", "--delta"
    whole, changes = run(tmp_path, *options, "off"), run(tmp_path, *options, "always")
    assert changes["answers"] == whole["answers"]
    assert changes["reward"] == whole["reward"]
    assert all(version["sent"] < version["bytes"] for version in changes["sent"][1:]), changes["sent"]


@pytest.mark.parametrize("engine", ["torch", "vllm"])
def test_with_sync_off_the_reward_stays_within_ten_percent(tmp_path, engine):
    first, last = ends(run(tmp_path, "--engine", engine, "--no-sync")["reward"])
    assert abs(last - first) <= 0.1 * first, (first, last)
