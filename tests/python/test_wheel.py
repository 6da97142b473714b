"""The package as a user gets it: built, installed into clean environments, used against a running daemon."""

import os
import pathlib
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

from conftest import ROOT

# The oldest protobuf that promises to read our stubs, with a grpcio of its time; and what pip takes today.
PINS = {"oldest": ["protobuf==3.20.3", "grpcio==1.51.3", "numpy<2"], "newest": []}
USE = pathlib.Path(__file__).with_name("wheel_use.py")


@pytest.fixture(scope="module")
def dist():
    subprocess.run([ROOT / "dev", "wheel"], check=True, stdout=subprocess.DEVNULL)
    return ROOT / "client/python/dist"


def test_wheel_and_sdist_hold_the_package_typed_and_nothing_else(dist):
    (wheel,), (sdist,) = dist.glob("*-py3-none-any.whl"), dist.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(p.relative_to(ROOT / "client/python")) for p in (ROOT / "client/python/weightwire").rglob("*")
            if p.suffix in (".py", ".typed")}
    assert {n for n in inside if ".dist-info/" not in n} == ours
    assert {"weightwire/py.typed", "weightwire/v1/agent_pb2.py", "weightwire/v1/coordinator_pb2_grpc.py"} <= inside
    plugs = next(n for n in inside if n.endswith("entry_points.txt"))
    assert "weightwire = weightwire.sglang:register" in zipfile.ZipFile(wheel).read(plugs).decode()
    packed = {n.split("/", 1)[1] for n in tarfile.open(sdist).getnames() if "/" in n}
    assert ours <= packed and not any(n.startswith("demo") for n in packed)


@pytest.mark.parametrize("pins", sorted(PINS))
def test_an_installed_wheel_without_torch_talks_to_a_daemon(dist, daemon, tmp_path, pins):
    (wheel,) = dist.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv/bin/python"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "WEIGHTWIRE"))}
    subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wheel, *PINS[pins]],
                   env=environment, check=True)
    done = subprocess.run([python, USE, daemon.grpc, daemon.agent_socket], env=environment, cwd=tmp_path, timeout=120,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "version 1 served from an installed wheel"
    print(pins, sys.version.split()[0], done.stdout)
