"""The journal of one coordinator: a file of which it is the only owner."""

from __future__ import annotations

import socket
import subprocess

import pytest

from conftest import BINARIES
from demo.fleet import Daemon


def test_a_second_coordinator_on_a_journal_names_the_first(tmp_path):
    state = tmp_path / "state"

    def start(name: str) -> Daemon:
        return Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, role="coordinator", listen="127.0.0.1:0",
                      state_dir=str(state))
    first = start("first")
    try:
        with pytest.raises(RuntimeError) as refused:
            start("second")
        said = str(refused.value)
        assert "exit 97" in said and f"{state}/journal.sqlite.lock" in said
        assert f"locked by process {first.pid} on host {socket.gethostname()}" in said
        assert "give this one its own" in said
    finally:
        first.kill()
    assert start("third").stop() == 0, "the lock ends with its process"


def test_help_says_what_the_exit_code_means():
    said = subprocess.run([BINARIES / "weightwired", "--help"], capture_output=True, text=True, timeout=30).stdout
    assert "another process has it" in " ".join(said.split())
