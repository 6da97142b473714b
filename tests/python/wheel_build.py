"""`./dev test wheel`: the wheel with the programs, as somebody with nothing but Python gets it: in fresh systems, without root and
without a compiler. Needs root and mmdebstrap to make the systems, and PyPI."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
import zipfile

import pytest

from conftest import ROOT

UBUNTU = "deb [trusted=yes] http://archive.ubuntu.com/ubuntu {} main universe"
SYSTEMS = {"debian-12": ("bookworm", "http://deb.debian.org/debian"), "debian-13": ("trixie", "http://deb.debian.org/debian"),
           "ubuntu-22.04": ("jammy", UBUNTU.format("jammy")), "ubuntu-24.04": ("noble", UBUNTU.format("noble"))}
CERTIFICATES = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
WHEEL_BYTES_MAX = 40_000_000
SECONDS_MAX = 60


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    dist = tmp_path_factory.mktemp("wheel") / "dist"
    done = subprocess.run([ROOT / "dev", "wheel"], check=True, text=True, stdout=subprocess.PIPE, env={**os.environ, "WEIGHTWIRE_DIST": str(dist)})
    print(done.stdout)
    (found,) = dist.glob("*.whl")
    assert list(dist.glob("*.tar.gz"))
    return found


def test_it_is_small_tagged_and_holds_programs_licences_and_a_bill_of_materials(wheel):
    assert wheel.name.endswith("-py3-none-manylinux_2_34_x86_64.whl") and wheel.stat().st_size <= WHEEL_BYTES_MAX
    inside = zipfile.ZipFile(wheel)
    names = set(inside.namelist())
    assert {f"weightwire/bin/{name}" for name in ("weightwired", "wwctl", "libweightwire_checkpoint.so", "libweightwire_nccl.so",
                                                  "libweightwire_ucx.so")} <= names
    assert all(inside.getinfo(f"weightwire/bin/{name}").external_attr >> 16 & 0o111 for name in ("weightwired", "wwctl"))
    assert "weightwire/_demo/demo/run.py" in names and not any(name.startswith("demo/") for name in names)
    (sbom,) = [name for name in names if name.endswith(".spdx.json")]
    linked = re.findall(r'"name": "(\S+)"', inside.read(sbom).decode())
    licences = {pathlib.Path(name).name.removesuffix(".copyright") for name in names if name.endswith(".copyright")}
    assert {"libgrpc++-dev", "libssl-dev", "libprotobuf-dev", "spdlog", "fmtlib", "prometheus-cpp"} <= set(linked) & licences


def test_a_wheel_that_needs_more_than_every_machine_has_is_refused(tmp_path):
    """The release build's own wwctl needs Debian's gRPC."""
    script = ("import sys, pathlib; sys.path.insert(0, 'deploy'); import wheel\n"
              f"wheel.check(pathlib.Path('{ROOT}/build/release/bin/wwctl'), ())")
    done = subprocess.run(["python3", "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "libgrpc++.so" in done.stderr and "not every machine has" in done.stderr


def test_a_gpu_kit_is_small_and_runs_offline_over_the_fake_library(tmp_path):
    subprocess.run([ROOT / "dev", "gpu-kit", tmp_path / "kit"], check=True, stdout=subprocess.DEVNULL)
    size = sum(path.stat().st_size for path in (tmp_path / "kit").rglob("*"))
    began = time.monotonic()
    done = subprocess.run(["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", tmp_path / "kit/run.sh", "--small", "--library", ROOT / "build/release/lib/libfake_cuda.so",
                           "--out", tmp_path / "out"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=540,
                          env={"PATH": os.environ["PATH"], "PYTHON": sys.executable, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "out/results.json").read_text())["results"]
    assert {name for name, said in results.items() if said.get("passed")} == {"cuda-ipc", "kernels", "publish-1g", "publish-8g", "snapshot",
                                                                               "killed-holder", "over-nccl"}
    assert size <= 60 << 20
    print(f"gpu-kit: {size / 2**20:.1f} MiB, {time.monotonic() - began:.0f} s over the fake library")


@pytest.fixture(params=sorted(SYSTEMS))
def system(request, tmp_path):
    """A fresh one with python3-venv, with grpcio's libstdc++, and a user without rights."""
    suite, source = SYSTEMS[request.param]
    root = tmp_path / "root"
    subprocess.run(["mmdebstrap", "--variant=minbase", "--include=python3-venv,ca-certificates,libstdc++6", suite, str(root), source], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
    shutil.copy(CERTIFICATES, root / "etc/ssl/certs/ca-certificates.crt")  # of this machine: its way to PyPI may have a CA of its own
    return request.param, root


def inside(root, command, **variables):
    """As a user of one's own; the end of what it says where it fails."""
    # Mounts of a namespace of its own: none is left when this is killed, above which pytest would remove the folder.
    mounts = "".join(f"mount --rbind /{name} {root}/{name} && " for name in ("proc", "dev", "sys"))
    chroot = shlex.join(["chroot", "--userspec=1234:1234", str(root), "/bin/sh", "-c", f"cd /home/somebody && {command}"])
    done = subprocess.run(["unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", mounts + "exec " + chroot], text=True, timeout=900,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/somebody", "LANG": "C.UTF-8", **variables,
                               **{key: value for key, value in os.environ.items() if key.lower().endswith("_proxy") or key.startswith("PIP_")},
                               "PIP_CERT": "/etc/ssl/certs/ca-certificates.crt"})
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}"
    return done.stdout


def test_installed_without_root_the_demo_runs_within_a_minute(wheel, system):
    name, root = system
    home = root / "home/somebody"
    home.mkdir(parents=True)
    shutil.copy(wheel, home)
    os.chown(home, 1234, 1234)
    inside(root, f"python3 -m venv venv && venv/bin/pip download -q -d wheels ./{wheel.name}")
    began = time.monotonic()
    inside(root, f"venv/bin/pip install -q --no-index --find-links wheels ./{wheel.name}")
    said = inside(root, "venv/bin/weightwire demo")
    seconds = time.monotonic() - began
    assert said.splitlines()[-1].startswith("demo: verified ") and said.splitlines()[-1].endswith(" versions on 3 engines")
    assert seconds <= SECONDS_MAX
    print(f"{name}: install and demo {seconds:.0f} s")
    (home / "own.py").write_text("import weightwire\nwith weightwire.local():\n    print(weightwire.Client().status().job)\n")
    assert inside(root, "venv/bin/python own.py").strip() == "default"
    assert "wwctl" in inside(root, "venv/bin/wwctl --version") and "plan" in inside(root, "venv/bin/wwctl --help")
    assert "usage: wwctl convert" in inside(root, "venv/bin/wwctl convert --help")
    assert "cannot execute" not in inside(root, "venv/bin/weightwired --print-config")
