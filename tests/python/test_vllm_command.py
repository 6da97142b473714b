"""`weightwire vllm`: the driver of a server, in a process of its own."""

import os
import signal
import subprocess
import sys

import pytest

from conftest import ROOT, until
from fake_vllm import Engine, Rank, Server

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "client/python")}


class Command:
    """A running one, and what it has said."""

    def __init__(self, tmp_path, *words):
        self.ready, self._log = tmp_path / "ready", tmp_path / "log"
        with open(self._log, "w") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "weightwire", "vllm", *words, "--ready-file", str(self.ready)],
                                            env=ENVIRONMENT, stderr=log)

    @property
    def log(self):
        return self._log.read_text()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(20)

    def close(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture
def command(tmp_path):
    started = []

    def start(*words):
        started.append(Command(tmp_path, *words))
        return started[-1]
    yield start
    for one in started:
        one.close()


@pytest.fixture
def server():
    made = Server(Engine())
    yield made
    made.close()
    for rank in made.engine.ranks:
        rank.link.close()


def offered_and_served(server, command, version):
    engine = server.engine
    until("ranks are bound", lambda: len(engine.ranks) == engine.size)
    engine.offer(version)
    until(f"version {version}", lambda: engine.serves() == {version} and f"serving version {version} (" in command.log)
    until("ready", command.ready.exists)
    assert not engine.paused


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_follows_every_version_until_it_is_ended(server, command, number):
    one = command(server.url, "--name", "engine-a")
    for version in (1, 2, 3):
        offered_and_served(server, one, version)
    assert one.end(number) == 0 and not one.ready.exists()
    assert server.engine.serves() == {3} and not server.engine.paused


def test_it_waits_for_a_server_that_is_started_later(server, command):
    server.close()
    one = command(server.url, "--name", "engine-a")
    until("it says so", lambda: "does not answer yet" in one.log)
    again = Server(server.engine, server.port)
    offered_and_served(again, one, 1)
    assert one.end() == 0
    again.close()


@pytest.mark.parametrize("says_goodbye", [True, False])
@pytest.mark.parametrize("listen", [[], ["--listen", "127.0.0.1"]], ids=["unix", "tcp"])
def test_a_server_that_is_started_anew_is_brought_up_to_date(server, command, says_goodbye, listen):
    one = command(server.url, "--name", "engine-a", *listen)
    offered_and_served(server, one, 4)
    server.close()
    server.engine.restart(says_goodbye)
    until("not ready", lambda: not one.ready.exists())
    again = Server(server.engine, server.port)
    offered_and_served(again, one, 4)
    assert one.end() == 0
    again.close()


def test_it_ends_while_it_waits_for_a_server(command):
    one = command("http://127.0.0.1:9", "--name", "engine-a")
    until("it says so", lambda: "does not answer yet" in one.log)
    assert one.end() == 0


def test_a_vllm_with_which_no_try_can_do_better_ends_it(server, command):
    def refuse(settings, timeout):
        server.engine.ranks = [Rank(0, 1, settings, server.engine, error="vLLM 0.99: no such part", unsupported=True)]
    server.engine.init = refuse
    one = command(server.url, "--name", "engine-a")
    assert one.process.wait(30) == 2 and "vLLM 0.99: no such part" in one.log and not one.ready.exists()


@pytest.mark.parametrize("words, why", [
    ([], "the engine has no name"),
    (["--name", "a", "--listen", "0.0.0.0"], "no host that workers could dial"),
    (["--name", "a", "--adopt", "rolling"], "needs coordinator="),
    (["--name", "a", "--adopt", "at_request_end", "--adopt-within", "0"], "adopt_within=0.0 is no time"),
    (["--name", "a", "--deadline", "finsh=3"], "--deadline finsh=3"),
    (["--name", "a", "--deadline", "finish=0"], "--deadline finish=0"),
    (["--name", "a", "--deadline", "finish"], "--deadline finish"),
    (["--name", "a", "--mode", "fuse"], "--mode"),
    (["--nam", "a", "--agent"], "--agent")])
def test_what_cannot_work_is_refused_at_once(words, why):
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("WEIGHTWIRE_")}
    done = subprocess.run([sys.executable, "-m", "weightwire", "vllm", "http://127.0.0.1:9", *words], env=environment, text=True,
                          stderr=subprocess.PIPE, timeout=60)
    assert done.returncode == 2 and why in done.stderr and "Traceback" not in done.stderr
