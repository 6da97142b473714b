"""The package as a user gets it: built, installed into clean environments, used against a running daemon."""

import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

from conftest import BINARIES, ROOT

# The oldest protobuf that promises to read our stubs, with a grpcio of its time, or the oldest that there is for a Python that is
# newer than they are; and what pip takes today.
PINS = {"oldest": ["protobuf==3.20.3", "grpcio==1.51.3", "numpy<2"] if sys.version_info < (3, 12) else ["protobuf==4.21.12", "grpcio==1.67.1"],
        "newest": []}
USE = pathlib.Path(__file__).with_name("wheel_use.py")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The wheel without programs; tests/python/wheel_build.py has the one with them."""
    made = tmp_path_factory.mktemp("wheel") / "dist"
    subprocess.run([ROOT / "dev", "wheel", "--pure"], check=True, stdout=subprocess.DEVNULL, env={**os.environ, "WEIGHTWIRE_DIST": str(made)})
    return made


def test_wheel_and_sdist_hold_the_package_typed_and_nothing_else(dist):
    (wheel,), (sdist,) = dist.glob("*-py3-none-any.whl"), dist.glob("*.tar.gz")
    inside = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(p.relative_to(ROOT / "client/python")) for p in (ROOT / "client/python/weightwire").rglob("*")
            if p.suffix in (".py", ".typed")}
    assert {n for n in inside if ".dist-info/" not in n} == ours
    assert {"weightwire/py.typed", "weightwire/v1/agent_pb2.py", "weightwire/v1/coordinator_pb2_grpc.py"} <= inside
    plugs = next(n for n in inside if n.endswith("entry_points.txt"))
    said = zipfile.ZipFile(wheel).read(plugs).decode()
    assert "weightwire = weightwire.sglang:register" in said and "wwctl = weightwire.binaries:wwctl" in said
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
    version = wheel.name.split("-")[1]
    # Without programs the console scripts say how to get them; with them they become them.
    for script, binaries, code, said in (("wwctl", tmp_path, 1, "docs/install.md"), ("wwctl", BINARIES, 0, version),
                                         ("weightwired", BINARIES, 0, version), ("weightwire", tmp_path, 0, f"weightwire {version}")):
        ran = subprocess.run([tmp_path / "venv/bin" / script, "--version"], env={**environment, "WEIGHTWIRE_BIN_DIR": str(binaries)},
                             timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert ran.returncode == code and said in ran.stdout, (script, ran.stdout)


def test_there_is_one_version():
    """Of CMake, the package, the chart, the image and what the package says of itself."""
    def in_file(path, pattern):
        return set(re.findall(pattern, (ROOT / path).read_text(), re.M))
    (version,) = in_file("CMakeLists.txt", r"^project\(weightwire VERSION (\S+)")
    found = {"pyproject": in_file("client/python/pyproject.toml", r'^version = "(.+)"'),
             "package": in_file("client/python/weightwire/__init__.py", r'^__version__ = "(.+)"'),
             "chart": in_file("helm/weightwire/Chart.yaml", r"^version: (\S+)"),
             "app": in_file("helm/weightwire/Chart.yaml", r'^appVersion: "?([^"\s]+)'),
             "image": in_file("Dockerfile", r"^ARG WEIGHTWIRE_VERSION=(\S+)")}
    assert found == {place: {version} for place in found}


@pytest.mark.parametrize("machine, number, said", [("x86_64", 183, "is for aarch64, the wheel for x86_64"), ("aarch64", 62, "is for x86_64, the wheel for aarch64"),
                                                   ("aarch64", 243, "is for an unknown processor")])
def test_a_program_of_another_processor_is_refused(machine, number, said, tmp_path):
    """By the number in its ELF header, before any tool is asked."""
    program = bytearray(pathlib.Path("/bin/true").read_bytes())
    program[18:20] = number.to_bytes(2, "little")
    (tmp_path / "program").write_bytes(program)
    script = f"import pathlib, wheel; wheel.check(pathlib.Path({str(tmp_path / 'program')!r}), (), wheel.MACHINES[{machine!r}])"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT / "deploy", stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith(f"wheel.py: program {said}"), done.stderr
