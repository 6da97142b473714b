"""weightwire.local(): a private daemon that this process's clients find, and that ends with the block and with the process."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

from conftest import BINARIES, ROOT
from weightwire import Client, Publisher, Subscriber, TensorMeta, UnavailableError, binaries, local
from weightwire.__main__ import main
from weightwire.pytest_plugin import weightwire_daemon  # noqa: F401  # a fixture: of an installed package a plug-in
from weightwire.v1 import types_pb2


@pytest.fixture(autouse=True)
def built(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def boxes() -> types_pb2.LayoutSubmission:
    meta = TensorMeta("w", "F32", (3, 5)).to_proto()
    piece = types_pb2.Piece(tensor=0, begin=[0, 0], extent=[3, 5], local_offset=0, local_stride=[5, 1])
    return types_pb2.LayoutSubmission(boxes=types_pb2.LayoutSubmission.Explicit(
        canonical=types_pb2.CanonicalSpace(tensors=[meta]),
        layout=types_pb2.RankLayout(tensors=[types_pb2.LocalTensor(spec=meta, pieces=[piece])])))


def move(value: float) -> None:
    """One version from a publisher to a subscriber; nobody is told where the daemon is."""
    with Publisher(rank=0, world_size=1) as publisher, Subscriber(group="e", rank=0, world_size=1) as subscriber:
        publisher.bind_boxes(boxes())["w"][...] = value
        subscriber.bind_submission(boxes())
        release = publisher.publish(1)
        offer = subscriber.wait_offer(30)
        got = subscriber.flip(offer)
        subscriber.acknowledge(offer)
        release.wait_released(30)
        assert np.array_equal(got["w"], np.full((3, 5), value, np.float32))
        with Client() as client:
            assert client.wait_version(1, timeout=30).engines[0].version == 1


def gone(path: str) -> bool:
    return not pathlib.Path(path).exists()


def alive(directory: str) -> list:
    """Processes of the machine whose command line names the directory."""
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if directory.encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            pass
    return found


def test_clients_find_it_without_configuration_and_it_ends_with_the_block(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("WEIGHTWIRE_TLS_CA", "/nowhere")
    monkeypatch.delenv("WEIGHTWIRE_AGENT_SOCKET", raising=False)
    with local(heartbeat_ms=250) as daemon:
        move(7)
        assert urllib.request.urlopen(f"http://{daemon.http}/healthz", timeout=10).read().startswith(b"alive")
        assert len(alive(daemon.directory)) == 2  # the daemon, and who watches it
        with local() as other:  # one within another: each has its own
            assert other.address != daemon.address
            move(8)
        assert os.environ["WEIGHTWIRE_ADDRESS"] == daemon.address
    assert gone(daemon.directory) and not alive(daemon.directory)
    assert os.environ["WEIGHTWIRE_ADDRESS"] == "127.0.0.1:1" and os.environ["WEIGHTWIRE_TLS_CA"] == "/nowhere"
    assert "WEIGHTWIRE_AGENT_SOCKET" not in os.environ


def test_the_fixture_is_one(weightwire_daemon):  # noqa: F811
    move(9)
    assert os.environ["WEIGHTWIRE_AGENT_SOCKET"] == weightwire_daemon.agent_socket


def test_it_ends_when_its_process_is_killed():
    script = "import weightwire, sys, time\nwith weightwire.local() as daemon:\n    print(daemon.directory, flush=True)\n    time.sleep(600)\n"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    directory = child.stdout.readline().strip()
    assert alive(directory)
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    end = time.monotonic() + 30
    while alive(directory):
        assert time.monotonic() < end, "the daemon outlives its process"
        time.sleep(0.05)


def test_an_exception_in_the_block_ends_it_too():
    with pytest.raises(KeyError):
        with local() as daemon:
            raise KeyError("own")
    assert gone(daemon.directory) and not alive(daemon.directory)


def test_a_setting_that_it_refuses_is_said_in_its_own_words():
    with pytest.raises(UnavailableError, match="slot_byte"):
        with local(slot_byte=1):
            pass


def test_where_there_is_none_the_remedy_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(tmp_path))
    with pytest.raises(UnavailableError) as none:
        with local():
            pass
    assert str(tmp_path) in str(none.value) and "docs/install.md" in none.value.remedy
    assert main(["demo"]) == 1 and "docs/install.md" in capsys.readouterr().err


def test_binaries_are_looked_for_in_order(monkeypatch, tmp_path):
    script, binary = tmp_path / "path/wwctl", tmp_path / "named/wwctl"
    for file, text in ((script, b"#!/usr/bin/python3\n"), (binary, b"\x7fELF...")):
        file.parent.mkdir()
        file.write_bytes(text)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", str(script.parent))
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(binary.parent))
    assert binaries.find("wwctl") == binary and binaries.find("weightwired") is None
    monkeypatch.delenv("WEIGHTWIRE_BIN_DIR")
    monkeypatch.setattr(binaries, "_PACKAGE", tmp_path / "a/b/c/weightwire")
    assert binaries.find("wwctl") is None, "a console script would call itself"
    monkeypatch.setenv("PATH", str(binary.parent))
    assert binaries.find("wwctl") == binary
    inside = tmp_path / "a/b/c/weightwire/bin/wwctl"
    inside.parent.mkdir(parents=True)
    inside.write_bytes(b"\x7fELF")
    assert binaries.find("wwctl") == inside
    assert binaries.library("libx.so") == "libx.so"


def test_the_demo_is_one_command(tmp_path):
    """It moves versions from 4 trainer ranks to 3 engines, kills two processes, and compares every byte by itself."""
    done = subprocess.run([sys.executable, "-m", "weightwire", "demo", "--small"], cwd=tmp_path, text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": str(ROOT / "client/python")})
    assert done.returncode == 0, done.stdout
    assert "status page, while this runs: http://127.0.0.1:" in done.stdout and " killed " in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last.startswith("demo: verified ") and last.endswith(" versions on 3 engines")
