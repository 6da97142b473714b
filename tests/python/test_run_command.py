"""`weightwire run SETTINGS -- COMMAND`: an agent in the application's own container."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

import pods
from conftest import BINARIES, ROOT, until
from demo.fleet import Daemon

RUN = [sys.executable, "-m", "weightwire", "run"]


@pytest.fixture
def hub(tmp_path):
    """A coordinator alone."""
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="coordinator", listen="127.0.0.1:0")
    yield daemon
    assert daemon.stop() == 0


def environment(**more: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WEIGHTWIRE_")}
    return {**clean, "PYTHONPATH": str(ROOT / "client/python"), "WEIGHTWIRE_BIN_DIR": str(BINARIES), **more}


class Beside:
    """A command with an agent of its own."""

    def __init__(self, tmp_path, name: str, hub, *command: str, prefix: tuple = (), **popen):
        self.log, self.socket = tmp_path / f"{name}.log", str(tmp_path / name / "agent.sock")
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*prefix, *RUN, "--coordinator", hub.grpc, "--agent-socket", self.socket, "--http", "", "--heartbeat-ms", "200", "--", *command],
                env=environment(), stdout=subprocess.PIPE, stdin=subprocess.PIPE, stderr=log, text=True, **popen)

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def say(self, text: str) -> None:
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def agents(self) -> list[int]:
        """Processes of weightwired that serve its socket."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if words[0].endswith("/weightwired") and self.socket in words:
                found.append(int(path.name))
        return found

    def close(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def beside(tmp_path, hub):
    opened = []

    def start(name, *command, **options):
        opened.append(Beside(tmp_path, name, hub, *command, **options))
        return opened[-1]
    yield start
    for one in opened:
        one.close()


def test_weights_move_between_two_commands_that_know_nothing_but_their_agents(beside):
    trainer, engine = (beside(name, sys.executable, str(ROOT / "tests/python/run_members.py"), name) for name in ("trainer", "engine"))
    for version in (1, 2):
        trainer.say(str(version))
        engine.say(str(version))
        want, got = json.loads(trainer.line()), json.loads(engine.line())
        assert want == got and got["version"] == version and len(got["sums"]) > 10
    for one in (trainer, engine):
        one.process.stdin.close()
        assert one.process.wait(30) == 0
        assert one.agents() == []


def test_an_agent_that_is_killed_is_started_again_and_the_command_goes_on(beside):
    trainer, engine = (beside(name, sys.executable, str(ROOT / "tests/python/run_members.py"), name) for name in ("trainer", "engine"))
    for version in (1, 2, 3):
        trainer.say(str(version))
        engine.say(str(version))
        assert json.loads(trainer.line()) == json.loads(engine.line())
        if version < 3:
            (agent,) = engine.agents()
            os.kill(agent, signal.SIGKILL)
            until("another agent", lambda: engine.agents() not in ([], [agent]))
            assert engine.process.poll() is None
    assert engine.log.read_text().count("is started again in") == 2


def test_the_exit_code_is_the_commands(beside):
    assert beside("a", "sh", "-c", "exit 7").process.wait(15) == 7  # its agent says goodbye, and is not killed after 20 s
    assert beside("b", "sh", "-c", "kill -9 $$").process.wait(30) == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_the_commands(beside, number):
    one = beside("a", "sh", "-c", f"trap 'echo caught; exit 5' {int(number)}; echo up; while :; do sleep 0.1; done")
    assert one.line() == "up"
    (agent,) = one.agents()
    one.process.send_signal(number)
    assert one.line() == "caught" and one.process.wait(30) == 5
    assert one.agents() == []


def test_the_agent_ends_with_it_however_it_ends(beside):
    one = beside("a", "sleep", "60")
    until("its agent", one.agents)
    one.process.kill()
    until("the agent has ended", lambda: one.agents() == [])


@pytest.mark.parametrize("words, code, why", [
    (["--coordinator", "127.0.0.1:1", "--http", ""], 125, "there is no command"),
    (["--coordinator", "127.0.0.1:1", "--"], 125, "there is no command"),
    (["--", "true"], 125, "needs the address of a coordinator"),
    (["--coordinator", "127.0.0.1:1", "--slot-bites", "1", "--", "true"], 125, "slot-bites"),
    (["--coordinator", "127.0.0.1:1", "--http", "", "--", "no-such-program"], 127, "no-such-program"),
    (["--coordinator", "127.0.0.1:1", "--http", "", "--", "/etc/passwd"], 126, "/etc/passwd")])
def test_what_cannot_work_is_refused_before_the_command_runs(tmp_path, words, code, why):
    done = subprocess.run([*RUN, *words], env=environment(WEIGHTWIRE_AGENT_SOCKET=str(tmp_path / "a/agent.sock")), text=True,
                          stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == code and why in done.stderr and "Traceback" not in done.stderr


def test_of_two_on_one_socket_the_second_is_refused_and_its_command_does_not_run(beside, tmp_path, hub):
    first = beside("a", "sleep", "60")
    until("its agent", first.agents)
    second = subprocess.run([*RUN, "--coordinator", hub.grpc, "--agent-socket", first.socket, "--http", "", "--", "echo", "ran"],
                            env=environment(), text=True, capture_output=True, timeout=60)
    assert second.returncode == 125 and "ran" not in second.stdout and first.socket in second.stderr


@pytest.mark.skipif(bool(pods.possible()), reason=f"no namespaces here: {pods.possible()}")
def test_as_the_first_process_of_a_container_it_leaves_no_zombie(beside):
    script = "(sleep 0.2 & sleep 0.1 & exec true) & wait; (setsid sleep 0.3 &); sleep 1; grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"
    one = beside("a", "sh", "-c", script, prefix=("unshare", "--pid", "--fork", "--mount-proc"))
    assert one.line() == "0" and one.process.wait(30) == 0


def test_its_help_names_what_it_exits_with():
    said = subprocess.run([*RUN, "--help"], env=environment(), text=True, capture_output=True, timeout=60, check=True).stdout
    assert re.search(r"125: the settings are refused", " ".join(said.split()))
