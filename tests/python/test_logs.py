"""What weightwired writes to stderr: for people on a terminal, for machines elsewhere."""

import json
import os
import pty
import re
import socket
import subprocess

import pytest

from conftest import BINARIES
from demo.fleet import Daemon
from ports import free_ports

END = b"\0end"
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (trace|debug|info|warning|error|critical) +\S")


def lines_of_one_that_cannot_start(tmp_path, *flags, terminal=False, **environment):
    """Its port is taken."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [BINARIES / "weightwired", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", "--http", "127.0.0.1:0", "--data-listen", "127.0.0.1:0",
                   "--agent-socket", str(tmp_path / "agent.sock"), *flags]
        ours, its = pty.openpty() if terminal else os.pipe()
        tmp_path.chmod(0o700)
        clean = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTWIRE_") and key != "NO_COLOR"}
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=its, env={**clean, "TERM": "xterm-256color", **environment})
        code = running.wait(30)
        # Ours comes after all of its: a terminal whose other end closes may say so before it has handed on what was written.
        os.write(its, END)
        said = b""
        while END not in said:
            said += os.read(ours, 65536)
        os.close(ours)
        os.close(its)
        said = said.partition(END)[0]
        assert code == 64 + 37, said.decode()
        return said.decode().splitlines()


@pytest.mark.parametrize("terminal, flags, json_lines, colour", [
    (False, (), True, False), (True, (), False, True), (True, ("--log-format", "json"), True, False),
    (False, ("--log-format", "text"), False, False)], ids=["pipe", "terminal", "json-on-a-terminal", "text-in-a-pipe"])
def test_a_terminal_gets_text_and_all_else_json_unless_it_is_said(tmp_path, terminal, flags, json_lines, colour):
    lines = lines_of_one_that_cannot_start(tmp_path, *flags, terminal=terminal)
    assert lines
    if json_lines:
        assert all({"time", "level", "thread", "role", "job", "name", "message"} <= json.loads(line).keys() for line in lines), lines
    else:
        assert all(TEXT.match(ESCAPE.sub("", line)) for line in lines), lines
    assert bool(ESCAPE.search("\n".join(lines))) == colour


def test_no_color_is_respected(tmp_path):
    lines = lines_of_one_that_cannot_start(tmp_path, terminal=True, NO_COLOR="1")
    assert all(TEXT.match(line) for line in lines), lines


def test_why_it_cannot_start_is_one_critical_line_before_it_stops(tmp_path):
    lines = [json.loads(line) for line in lines_of_one_that_cannot_start(tmp_path)]
    why = [line for line in lines if line["level"] == "critical"]
    assert len(why) == 1 and "in use" in why[0]["message"], lines
    assert [line["message"] for line in lines[lines.index(why[0]):][1:]] == ["stopped"], lines


def test_an_agent_that_has_no_coordinator_names_it_and_why(tmp_path):
    """It is ready all the same: the coordinator may come later."""
    (port,) = free_ports(1)
    agent = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "agent"), "agent", role="agent", coordinator=f"127.0.0.1:{port}")
    try:
        lines = [json.loads(line) for line in (tmp_path / "agent/agent.log").read_text().splitlines()]
        why = [line["message"] for line in lines if line["level"] == "warning"]
        assert len(why) == 1 and why[0].startswith(f"no session with the coordinator 127.0.0.1:{port} yet: "), lines
        assert "onnection refused" in why[0] and why[0].endswith("; the agent keeps trying")
        assert why[0].count("no session") == 1, why[0]
    finally:
        assert agent.stop() == 0


@pytest.mark.parametrize("asked, said", [
    (["--rate-limit", "1000"], "rate_limit is 1000 bytes a second: 0 for none, or at least slot_bytes, 8388608"),
    (["--peer-rate-limit", "1MB"], "peer_rate_limit is 1000000 bytes a second"),
    (["--slot-bytes", "64KiB"], "slot_bytes must be at least segment_bytes_max + 128")])
def test_what_does_not_fit_together_is_named_with_its_value(tmp_path, asked, said):
    done = subprocess.run([str(BINARIES / "weightwired"), "--agent-socket", str(tmp_path / "a.sock"), "--http", "", *asked], capture_output=True,
                          text=True, timeout=60)
    assert done.returncode != 0 and said in done.stdout + done.stderr, done.stdout + done.stderr
