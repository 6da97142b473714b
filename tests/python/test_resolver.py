"""Names are resolved by the system: gRPC 1.51 with c-ares shuts other people's sockets down (UseSystemResolver)."""

import os
import subprocess

import pytest

from conftest import BINARIES, until
from demo.fleet import Daemon

SAID = "Using native dns resolver"
LOUD = {**os.environ, "GRPC_VERBOSITY": "DEBUG"}


def test_wwctl_asks_the_system():
    done = subprocess.run([BINARIES / "wwctl", "status", "--address", "localhost:1"], env=LOUD, capture_output=True, text=True,
                          timeout=60)
    assert done.returncode != 0 and SAID in done.stderr and "ares dns resolver" not in done.stderr


@pytest.mark.parametrize("coordinator", ["localhost:1", "127.0.0.1:1"])
def test_an_agent_asks_the_system(tmp_path, coordinator):
    agent = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "agent"), "agent", role="agent", coordinator=coordinator,
                   log_level="debug", env=LOUD)
    try:
        log = lambda: (tmp_path / "agent/agent.log").read_text()
        until("gRPC has chosen", lambda: SAID in log())
        assert "ares dns resolver" not in log()
    finally:
        assert agent.stop() == 0


def test_a_name_that_nobody_knows_is_said():
    done = subprocess.run([BINARIES / "wwctl", "status", "--address", "nobody.invalid:7411"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "nobody.invalid" in done.stderr, done.stderr
