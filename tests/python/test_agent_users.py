"""Who may attach to an agent: its own user, and those of `allow_uids`. Everybody else is told so, and the agent's log has it once."""

import json
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from conftest import BINARIES
from demo.fleet import Daemon
from weightwire import Client

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
ALLOWED, STRANGER, GROUP = 54711, 54712, 54713

#: One rank as another user: everything is imported before it becomes that user, who may not read this tree.
PROCESS = """
import json, os, sys
import numpy as np
import weightwire
from weightwire import Publisher, Subscriber, TensorMeta, boxes
does, socket, uid, groups = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
os.setgroups(groups)
os.setgid(uid)
os.setuid(uid)
meta = TensorMeta("w", "F32", (1024,))
layout = boxes.submission({"w": meta}, [boxes.whole(meta)])
rows = (np.arange(1024) * 7).astype(np.float32)
try:
    if does == "trainer":
        with Publisher(rank=0, world_size=1, agent=socket, timeout=10) as publisher:
            publisher.bind_boxes(layout)["w"].view(np.float32)[...] = rows
            publisher.publish(1).wait_released(30)
    else:
        with Subscriber(group="engine", rank=0, world_size=1, agent=socket, timeout=10) as subscriber:
            subscriber.bind_submission(layout)
            print("attached", flush=True)
            offer = subscriber.wait_offer(30)
            served = subscriber.flip(offer)["w"].view(np.float32).tolist()
            subscriber.acknowledge(offer)
            print(json.dumps(served), flush=True)
except weightwire.WeightwireError as error:
    print(type(error).__name__, error.code, error, error.remedy, flush=True)
"""


@pytest.fixture
def folder():
    """That every user may enter: pytest's own are private."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o711)
        yield made


@pytest.fixture
def agent(folder):
    started = []

    def start(**settings) -> Daemon:
        daemon = Daemon(str(BINARIES / "weightwired"), f"{folder}/own", "hub", role="all", listen="127.0.0.1:0",
                        **{"agent_socket": f"{folder}/socket/agent.sock", **settings})
        daemon.agent_socket = f"{folder}/socket/agent.sock"
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        assert daemon.stop() == 0


def as_user(does: str, agent: Daemon, uid: int, groups=()) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", PROCESS, does, agent.agent_socket, str(uid), json.dumps(list(groups))],
                            stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen) -> str:
    return process.communicate(timeout=60)[0]


def modes(agent: Daemon) -> list[tuple[int, int]]:
    paths = [os.path.dirname(agent.agent_socket), agent.agent_socket, agent.agent_socket + ".fd"]
    return [(stat.S_IMODE(os.stat(path).st_mode), os.stat(path).st_gid) for path in paths]


def log_of(folder: str) -> list[str]:
    lines = (json.loads(line) for line in pathlib.Path(f"{folder}/own/hub.log").read_text().splitlines())
    return [line["message"] for line in lines]


def doctor(agent: Daemon, uid: int) -> dict:
    """What `wwctl doctor` finds as that user, by its checks."""
    with tempfile.TemporaryDirectory() as place:  # where that user may run it
        os.chmod(place, 0o755)
        shutil.copy(BINARIES / "wwctl", place)
        run = subprocess.run(["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", f"{place}/wwctl", "doctor", "--json",
                              "--address", agent.grpc], env={"WEIGHTWIRE_AGENT_SOCKET": agent.agent_socket, "PATH": os.environ["PATH"]},
                             capture_output=True, text=True, timeout=60)
    return {found["check"]: found["what"] for found in json.loads(run.stdout)["findings"]}


def test_without_a_word_only_the_own_user_attaches_and_others_learn_why(agent):
    daemon = agent()
    assert [mode for mode, _ in modes(daemon)] == [0o700, 0o600, 0o600]
    text = said(as_user("engine", daemon, STRANGER))
    assert text.startswith("RefusedError PERMISSION_DENIED") and "/socket belongs to uid 0" in text, text
    assert f"this process has uid {STRANGER}" in text and f"name uid {STRANGER} in the agent's allow_uids" in text, text
    found = doctor(daemon, STRANGER)
    assert "belongs to uid 0" in found["uid"] and f"this process has uid {STRANGER}" in found["uid"]


def test_users_that_are_named_attach_and_strangers_are_told_and_logged_once(agent, folder):
    daemon = agent(allow_uids=f"[{ALLOWED}, 1]")
    assert [mode for mode, _ in modes(daemon)] == [0o711, 0o666, 0o666]
    engine = as_user("engine", daemon, ALLOWED)
    assert engine.stdout.readline() == "attached\n"
    assert said(as_user("trainer", daemon, 0)) == ""  # the agent's own, as ever
    np.testing.assert_array_equal(json.loads(said(engine)), np.arange(1024) * 7)
    for _ in range(3):
        text = said(as_user("engine", daemon, STRANGER))
        assert text.startswith("RefusedError PERMISSION_DENIED") and "its agent has uid 0 and refuses other users" in text, text
        assert f"this process has uid {STRANGER}" in text and "allow_uids" in text, text
    said(as_user("engine", daemon, STRANGER + 5))
    lines = [line for line in log_of(folder) if line.startswith("refused a process of uid")]
    assert [line.split(":")[0] for line in lines] == [f"refused a process of uid {uid}" for uid in (STRANGER, STRANGER + 5)], lines
    assert "this agent has uid 0" in lines[0] and f"name uid {STRANGER} in allow_uids" in lines[0]
    assert daemon.counter('weightwire_auth_failures_total{reason="uid"}') >= 4
    assert "uid" in doctor(daemon, STRANGER) and "uid" not in doctor(daemon, ALLOWED)
    with Client(daemon.grpc) as client:
        assert client.status().committed_version == 1


def test_with_a_group_only_its_members_reach_the_socket(agent):
    daemon = agent(allow_uids=ALLOWED, socket_group=GROUP)
    assert modes(daemon) == [(0o710, GROUP), (0o660, GROUP), (0o660, GROUP)]
    outside = said(as_user("engine", daemon, ALLOWED))
    assert "RefusedError" in outside and "/socket belongs to uid 0" in outside, outside
    stranger = said(as_user("engine", daemon, STRANGER, [GROUP]))
    assert "its agent has uid 0 and refuses other users" in stranger, stranger
    engine = as_user("engine", daemon, ALLOWED, [GROUP])
    assert engine.stdout.readline() == "attached\n"
    assert said(as_user("trainer", daemon, ALLOWED, [GROUP])) == ""
    np.testing.assert_array_equal(json.loads(said(engine)), np.arange(1024) * 7)


def test_an_agent_that_is_no_root_lets_root_in_when_it_is_named(folder):
    """vLLM's images run as root, the agent does not. Root passes the socket's mode, and needs its name all the same."""
    os.chmod(folder, 0o777)
    program = f"{folder}/as-nobody"
    shutil.copy(BINARIES / "weightwired", f"{folder}/weightwired")
    pathlib.Path(program).write_text(f'#!/bin/sh\nexec setpriv --reuid=65534 --regid=65534 --clear-groups "{folder}/weightwired" "$@"\n')
    os.chmod(program, 0o755)
    for name, settings in (("closed", {}), ("open", {"allow_uids": 0})):
        os.mkdir(f"{folder}/{name}", 0o755)
        daemon = Daemon(program, f"{folder}/{name}", "hub", role="all", listen="127.0.0.1:0", agent_socket=f"{folder}/{name}-s/agent.sock",
                        **settings)
        daemon.agent_socket = f"{folder}/{name}-s/agent.sock"
        engine = as_user("engine", daemon, 0)
        first = engine.stdout.readline()
        if settings:
            assert first == "attached\n"
            assert said(as_user("trainer", daemon, 0)) == ""
            np.testing.assert_array_equal(json.loads(said(engine)), np.arange(1024) * 7)
        else:
            assert "its agent has uid 65534 and refuses other users; this process has uid 0" in first, first
            said(engine)
        assert daemon.stop() == 0


@pytest.mark.parametrize("mode, settings, words", [
    (0o700, {"allow_uids": ALLOWED}, "does not let the users of allow_uids pass; chmod 711 {}, or choose another directory"),
    (0o711, {"allow_uids": ALLOWED, "socket_group": GROUP}, None),
    (0o710, {"allow_uids": ALLOWED, "socket_group": GROUP}, f"does not let members of group {GROUP} (socket_group) pass; chgrp {GROUP} {{}}"),
    (0o777, {"allow_uids": ALLOWED}, "can be changed by others; chmod 711 {}"),
    (0o1777, {"allow_uids": ALLOWED}, "choose a directory of its own, for example {}/weightwire"),
    (0o1777, {}, "can be entered by others; choose a directory of its own, for example {}/weightwire"),
    (0o711, {}, "can be entered by others; chmod 700 {}"),
])
def test_a_directory_that_is_there_keeps_its_mode_and_must_fit(folder, mode, settings, words):
    place = f"{folder}/socket"
    os.mkdir(place)
    os.chmod(place, mode)
    settings = {"agent_socket": f"{place}/agent.sock", "http": "127.0.0.1:0", "listen": "127.0.0.1:0", **settings}
    path = pathlib.Path(f"{folder}/settings.yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    with subprocess.Popen([BINARIES / "weightwired", "--config", path], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        ready = process.stdout.readline()
        process.terminate()
        text = process.communicate(timeout=30)[1]
    assert bool(ready) == (words is None), text
    assert stat.S_IMODE(os.stat(place).st_mode) == mode
    if words:
        assert words.format(place) in text, text


def test_a_path_that_others_cannot_enter_is_named_in_the_log(folder):
    os.mkdir(f"{folder}/home", 0o700)
    daemon = Daemon(str(BINARIES / "weightwired"), f"{folder}/own", "hub", role="all", listen="127.0.0.1:0",
                    agent_socket=f"{folder}/home/run/agent.sock", allow_uids=ALLOWED)
    daemon.agent_socket = f"{folder}/home/run/agent.sock"
    text = said(as_user("engine", daemon, ALLOWED))
    assert f"{folder}/home belongs to uid 0" in text, text
    assert daemon.stop() == 0
    assert any(line.startswith(f"allow_uids: {folder}/home does not let other users pass") for line in log_of(folder))


def test_who_is_named_comes_from_flags_environment_and_file_in_this_order(folder):
    path = pathlib.Path(f"{folder}/settings.yaml")
    path.write_text("allow_uids: [1, 2]\n")

    def settings(*flags, **environment) -> str:
        run = subprocess.run([BINARIES / "weightwired", "--config", path, "--print-config", *flags], capture_output=True, text=True,
                             env={**os.environ, **environment}, timeout=30)
        assert run.returncode == 0, run.stderr
        return next(line for line in run.stdout.splitlines() if line.startswith("allow_uids"))

    assert "1,2" in settings()
    assert "3" in settings(WEIGHTWIRE_ALLOW_UIDS="3") and "1,2" not in settings(WEIGHTWIRE_ALLOW_UIDS="3")
    assert "4,5" in settings("--allow-uids", "4,5,4", WEIGHTWIRE_ALLOW_UIDS="3")


@pytest.mark.parametrize("settings, words", [
    ({"allow_uids": "nobody"}, '"nobody" is no number from 0 to 4294967294; `id -u NAME`'),
    ({"allow_uids": 4294967295}, '"4294967295" is no number'),
    ({"socket_group": 5}, "socket_group is for the users of allow_uids, and that is empty"),
])
def test_numbers_that_are_none_are_refused(folder, settings, words):
    path = pathlib.Path(f"{folder}/settings.yaml")
    path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    run = subprocess.run([BINARIES / "weightwired", "--config", path], capture_output=True, text=True, timeout=30)
    assert run.returncode != 0 and words in run.stderr, run.stderr
