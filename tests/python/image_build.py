"""The Dockerfile, really built (from source, without a daemon) and run: `./dev test image`. Needs root and a network; takes as
long as a build of weightwire and two minutes.

The base image is made by mmdebstrap, so that no registry is asked. The job is that of test_deploy_pods.py, with the image
as the root of weightwire's containers.
"""

import json
import os
import pathlib
import subprocess

import pytest

import pods
from conftest import ROOT
from test_deploy_pods import COORDINATOR, WHY_NOT, move_versions_across_a_coordinators_death, running_cluster

BUILD_SECONDS = 3_000


class Buildah:
    """Images in a throwaway store."""

    def __init__(self, directory):
        self._where = ["buildah", "--storage-driver", "vfs", "--root", str(directory / "root"), "--runroot", str(directory / "run")]

    def __call__(self, *arguments):
        done = subprocess.run([*self._where, *map(str, arguments)], capture_output=True, text=True, timeout=BUILD_SECONDS)
        assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, context, *arguments):
        return self("bud", "--isolation", "chroot", "--format", "docker", *arguments, context)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """(what docker would know of it, the folder with its files)"""
    assert not WHY_NOT, WHY_NOT
    directory = tmp_path_factory.mktemp("image")
    base = directory / "base"
    base.mkdir()
    subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", base / "base.tar"], check=True, timeout=900)
    (base / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    buildah = Buildah(directory)
    buildah.build(base, "-t", "localhost/base")
    buildah.build(ROOT, "--build-arg", "BASE=localhost/base", *compilers_cache(), "-t", "localhost/weightwire")
    container = buildah("from", "--pull-never", "localhost/weightwire")
    yield json.loads(buildah("inspect", "--type", "image", "localhost/weightwire"))["Docker"]["config"], buildah("mount", container)
    buildah("umount", container)
    buildah("rm", container)


def compilers_cache() -> list[str]:
    """What this machine has compiled already; the compiler in the image is the same package."""
    here = pathlib.Path(os.environ.get("CCACHE_DIR", pathlib.Path.home() / ".cache/ccache"))
    return ["--build-arg", "CCACHE_DIR=/ccache", "--volume", f"{here}:/ccache"] if here.is_dir() else []


def inside(root, *command):
    return ["chroot", root, "setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--no-new-privs", *command]


def test_the_image_says_how_it_runs(image):
    config, root = image
    assert config["User"] == "10001:10001" and config["Entrypoint"] == ["weightwired"]
    assert config["Labels"]["org.opencontainers.image.title"] == "weightwire" and config["Healthcheck"]["Test"][0] == "CMD"
    version = pods.run(*inside(root, "weightwired", "--version")).strip()
    assert version and config["Labels"]["org.opencontainers.image.version"] in version
    assert "libgrpc++1.51" in pods.run(*inside(root, "cat", "/usr/share/weightwire-packages.txt"))
    assert "simulate" in pods.run(*inside(root, "wwctl", "--help"))
    assert not [path for path in ("usr/bin/g++", "src") if (pathlib.Path(root) / path).exists()]


def test_its_job_is_done_by_its_own_binaries_and_its_health_check_tells_the_living(image):
    config, root = image
    check = config["Healthcheck"]["Test"][1:]
    with running_cluster(root) as cluster:
        healthy = lambda: subprocess.run(cluster.pods[COORDINATOR].namespace.enter(*inside(root, *check)), timeout=30).returncode == 0
        assert not healthy()
        cluster.pods[COORDINATOR].start()
        assert healthy()
        cluster.pods[COORDINATOR].containers["coordinator"].kill()
        move_versions_across_a_coordinators_death(cluster)


def test_it_has_ucx(image):
    # With ucx alone weightwired starts only where the plug-in and libucp load.
    _, root = image
    job = pods.Namespace("--net", "--ipc")
    try:
        pods.run(*job.enter("ip", "link", "set", "lo", "up"))
        command = inside(root, "timeout", "--signal=TERM", "5", "weightwired", "--transports", "ucx", "--http", "",
                         "--agent-socket", "/run/weightwire/agent/agent.sock")
        done = subprocess.run(job.enter(*command), capture_output=True, text=True, timeout=60)
        assert "weightwired ready role=all" in done.stdout, done.stderr
    finally:
        job.close()
