"""The Dockerfile, really built (from source, without a daemon) and run: `./dev test image`. Needs root and a network; takes as
long as a build of weightwire and some minutes.

The base image is made by mmdebstrap, so that no registry is asked. The job is that of test_deploy_pods.py, with the image
as the root of weightwire's containers. What the image has for GPUs is built where CUDA can be had without a registry, in
WEIGHTWIRE_IMAGE_CUDA, a folder like /usr/local/cuda; the production target where UCX's release can, too: WEIGHTWIRE_IMAGE_UCX
is the tarball.
"""

import contextlib
import functools
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import threading

import pytest

import pods
from conftest import ROOT
from test_deploy_pods import COORDINATOR, WHY_NOT, move_versions_across_a_coordinators_death, running_cluster

BUILD_SECONDS = 3_000
UCX = os.environ.get("WEIGHTWIRE_IMAGE_UCX", "")
CUDA = os.environ.get("WEIGHTWIRE_IMAGE_CUDA", "/usr/local/cuda")
TARGETS = ("cpu", "production")


class Buildah:
    """Images in a throwaway store; stages that two targets share are built once."""

    def __init__(self, directory):
        self._where = ["buildah", "--storage-driver", self._driver(directory), "--root", str(directory / "root"),
                       "--runroot", str(directory / "run")]

    @staticmethod
    def _driver(directory) -> str:
        """vfs copies every layer whole; it is for where the kernel mounts no overlay here."""
        parts = [directory / name for name in ("lower", "upper", "work", "merged")]
        for part in parts:
            part.mkdir()
        options = "lowerdir={},upperdir={},workdir={}".format(*parts)
        if subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", parts[3]], capture_output=True).returncode != 0:
            return "vfs"
        subprocess.run(["umount", parts[3]], check=True)
        return "overlay"

    def __call__(self, *arguments):
        done = subprocess.run([*self._where, *map(str, arguments)], capture_output=True, text=True, timeout=BUILD_SECONDS)
        assert done.returncode == 0, f"buildah {arguments[0]}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout.strip()

    def build(self, context, *arguments):
        return self("bud", "--isolation", "chroot", "--format", "docker", "--layers", *arguments, context)


@pytest.fixture(scope="module")
def builder(tmp_path_factory):
    assert not WHY_NOT, WHY_NOT
    directory = tmp_path_factory.mktemp("image")
    base = directory / "base"
    base.mkdir()
    subprocess.run(["mmdebstrap", "--variant=minbase", "bookworm", base / "base.tar"], check=True, timeout=900)
    (base / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
    buildah = Buildah(directory)
    buildah.build(base, "-t", "localhost/base")
    (base / "base.tar").unlink()
    yield buildah
    buildah("rm", "--all")
    buildah("rmi", "--all", "--force")


@pytest.fixture(scope="module", params=TARGETS)
def image(request, builder, tmp_path_factory):
    """(what docker would know of it, the folder with its files, its target)"""
    target = request.param
    arguments = []
    if target == "production":
        if why_not := no_production():
            pytest.skip(f"the production target is not built: {why_not}")
        arguments += ["--build-arg", f"CUDA={cuda_image(builder, tmp_path_factory.mktemp('cuda'))}"]
    with serving(pathlib.Path(UCX)) as url, built(builder, target, *arguments, *(["--build-arg", f"UCX_URL={url}"] if url else [])) as root:
        yield json.loads(builder("inspect", "--type", "image", f"localhost/weightwire-{target}"))["Docker"]["config"], root, target


@contextlib.contextmanager
def built(builder, target: str, *arguments):
    """The folder with the files of this stage of the Dockerfile."""
    tag = f"localhost/weightwire-{target}"
    builder.build(ROOT, "--build-arg", "BASE=localhost/base", "--target", target, *compilers_cache(), *arguments, "-t", tag)
    container = builder("from", "--pull-never", tag)
    yield builder("mount", container)
    builder("umount", container)
    builder("rm", container)


def no_cuda() -> list[str]:
    return lacking("bin/nvcc", "nvvm/bin/cicc", "include/cuda.h", "lib64/libcudart_static.a")


def lacking(*files: str) -> list[str]:
    return [f"no {CUDA}/{file}" for file in files if not pathlib.Path(CUDA, file).exists()]


def no_production() -> str:
    missing = no_cuda() + lacking("include/nvml.h", "lib64/stubs/libnvidia-ml.so")
    if not os.path.isfile(UCX):
        missing.append("no WEIGHTWIRE_IMAGE_UCX, a release of UCX (its sum is in the Dockerfile)")
    return ", ".join(missing)


def cuda_image(buildah, directory) -> str:
    """What the Dockerfile takes of NVIDIA's image."""
    inside_it = directory / "usr/local/cuda"
    (inside_it / "lib64").mkdir(parents=True)
    for folder in ("bin", "nvvm", "include", "lib64/stubs"):
        if pathlib.Path(CUDA, folder).exists():  # the stubs are UCX's
            shutil.copytree(pathlib.Path(CUDA, folder), inside_it / folder, symlinks=True)
    for library in (file for pattern in ("libcudart.so*", "libcudart_static.a", "libcudadevrt.a") for file in pathlib.Path(CUDA, "lib64").glob(pattern)):
        shutil.copy(library, inside_it / "lib64", follow_symlinks=False)
    (directory / "Dockerfile").write_text("FROM scratch\nCOPY usr /usr\n")
    buildah.build(directory, "-t", "localhost/cuda")
    shutil.rmtree(inside_it)
    return "localhost/cuda"


class serving:
    """The file's URL on this machine, as a build asks for it; "" where there is none."""

    def __init__(self, file: pathlib.Path):
        self._file, self._server = file, None

    def __enter__(self) -> str:
        if not self._file.is_file():
            return ""
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(self._file.parent))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/{self._file.name}"

    def __exit__(self, *_):
        if self._server:
            self._server.shutdown()
            self._server.server_close()


def compilers_cache() -> list[str]:
    """What this machine has compiled already; the compiler in the image is the same package."""
    here = pathlib.Path(os.environ.get("CCACHE_DIR", pathlib.Path.home() / ".cache/ccache"))
    return ["--build-arg", "CCACHE_DIR=/ccache", "--volume", f"{here}:/ccache"] if here.is_dir() else []


def inside(root, *command):
    return ["chroot", root, "setpriv", "--reuid", "10001", "--regid", "10001", "--clear-groups", "--no-new-privs", *command]


def test_the_image_says_how_it_runs(image):
    config, root, target = image
    assert config["User"] == "10001:10001" and config["Entrypoint"] == ["weightwire-entrypoint"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == "weightwire" and config["Healthcheck"]["Test"][0] == "CMD"
    assert labels["dev.weightwire.ucx"] == ("Debian" if target == "cpu" else "1.22.0")
    version = pods.run(*inside(root, "weightwired", "--version")).strip()
    assert version and labels["org.opencontainers.image.version"] in version
    assert "simulate" in pods.run(*inside(root, "wwctl", "--help"))
    # The entry, and the checkpoint commands, which are Python's.
    assert pods.run(*inside(root, "weightwire-entrypoint", "--version")).strip() == version
    assert pods.run(*inside(root, "weightwire-entrypoint", "wwctl", "--version")).startswith("wwctl ")
    assert "usage: wwctl convert" in pods.run(*inside(root, "wwctl", "convert", "--help"))
    for command in ("demo", "vllm"):
        assert f"usage: weightwire {command}" in pods.run(*inside(root, "weightwire-entrypoint", command, "--help"))
    assert not [path for path in ("usr/bin/g++", "src", "sbom", "ucx") if (pathlib.Path(root) / path).exists()]
    size = int(pods.run("du", "-s", "--block-size=1M", root).split()[0])
    print(f"\n{target}: {size} MiB unpacked, {packed(root)} MiB as a compressed layer")


def packed(root) -> int:
    tar = subprocess.Popen(["tar", "-C", root, "-cf", "-", "."], stdout=subprocess.PIPE)
    size = subprocess.run("gzip -1 | wc -c", shell=True, stdin=tar.stdout, capture_output=True, text=True, check=True).stdout
    assert tar.wait() == 0
    return int(size) >> 20


def test_its_bill_of_materials_is_whole(image):
    _, root, target = image
    bill = json.loads((pathlib.Path(root) / "usr/share/weightwire/sbom.spdx.json").read_text())
    assert (bill["spdxVersion"], bill["dataLicense"], bill["SPDXID"]) == ("SPDX-2.3", "CC0-1.0", "SPDXRef-DOCUMENT")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", bill["creationInfo"]["created"])
    packages = {package["SPDXID"]: package for package in bill["packages"]}
    assert len(packages) == len(bill["packages"]) and all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", name) for name in packages)
    related = {(one["spdxElementId"], one["relationshipType"], one["relatedSpdxElement"]) for one in bill["relationships"]}
    assert {to for _, _, to in related} == packages.keys() and {of for of, _, _ in related} <= packages.keys() | {"SPDXRef-DOCUMENT"}
    installed = set(pods.run("chroot", root, "dpkg-query", "-W", "-f", "${Package} ${Version}\\n").splitlines())
    listed = {f"{packages[to]['name']} {packages[to]['versionInfo']}" for of, how, to in related
              if how == "CONTAINS" and to.startswith("SPDXRef-package-")}
    assert listed == installed and len(installed) > 100
    compiled_in = {packages[to]["name"] for _, how, to in related if how == "STATIC_LINK"}
    assert {"libboost1.81-dev", "nlohmann-json3-dev"} <= compiled_in
    assert all(package["externalRefs"][0]["referenceLocator"].startswith("pkg:deb/debian/")
               for name, package in packages.items() if name.startswith(("SPDXRef-package-", "SPDXRef-compiled-in-")))
    sources = {package["name"]: package for name, package in packages.items() if name.startswith("SPDXRef-source-")}
    assert set(sources) == (set() if target == "cpu" else {"ucx", "cuda-cudart"})
    if sources:
        assert sources["ucx"]["checksums"][0]["checksumValue"] in (ROOT / "Dockerfile").read_text()


def test_its_job_is_done_by_its_own_binaries_and_its_health_check_tells_the_living(image):
    config, root, _ = image
    check = config["Healthcheck"]["Test"][1:]
    with running_cluster(root) as cluster:
        own = dict(entry.split("=", 1) for entry in config["Env"])
        healthy = lambda: subprocess.run(cluster.pods[COORDINATOR].namespace.enter(*inside(root, *check)), timeout=30, env=own).returncode == 0
        assert not healthy()
        cluster.pods[COORDINATOR].start()
        assert healthy()
        cluster.pods[COORDINATOR].containers["coordinator"].kill()
        move_versions_across_a_coordinators_death(cluster)


def test_the_demo_runs_in_it(image):
    config, root, _ = image
    # What every container has.
    mounts = 'mount --rbind /proc "$0/proc"; mount --rbind /dev "$0/dev"; mount -t tmpfs -o mode=1777 none "$0/tmp"; exec "$@"'
    contained = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", mounts, root]
    done = subprocess.run([*contained, *inside(root, *config["Entrypoint"], "demo")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=300, env={**dict(entry.split("=", 1) for entry in config["Env"]), "HOME": "/tmp"})
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith(" versions on 3 engines"), done.stdout


def test_it_has_ucx(image):
    # With ucx alone weightwired starts only where the plug-in and libucp load.
    _, root, target = image
    job = pods.Namespace("--net", "--ipc")
    try:
        pods.run(*job.enter("ip", "link", "set", "lo", "up"))
        # What every container has: weightwired finds the plug-in by /proc, UCX the network in /sys, and it shares /dev/shm.
        mounts = 'mount --rbind /proc "$0/proc"; mount -t sysfs none "$0/sys"; mount -t tmpfs -o mode=1777 none "$0/dev/shm"; exec "$@"'
        contained = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", mounts, root]
        command = inside(root, "weightwired", "--transports", "ucx", "--http", "", "--agent-socket", "/run/weightwire/agent/agent.sock")
        with subprocess.Popen(job.enter(*contained, *command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
            killer = threading.Timer(60, started.kill)
            killer.start()
            line = started.stdout.readline()
            started.terminate()
            _, log = started.communicate()
            killer.cancel()
        assert line.startswith("weightwired ready role=all") and started.returncode == 0, log
    finally:
        job.close()
    if target == "cpu":
        return
    built = pods.run(*inside(root, "/opt/ucx/bin/ucx_info", "-v", "-b"))
    assert "Library version: 1.22.0" in built and "#define ENABLE_MT" in built
    modules = {file.name for file in pathlib.Path(root, "opt/ucx/lib/ucx").iterdir()}
    assert {"libuct_cuda.so.0", "libuct_ib.so.0", "libuct_ib_mlx5.so.0", "libuct_rdmacm.so.0", "libuct_cma.so.0"} <= modules, modules
    # What only the host's driver has is missing here, and nothing else.
    missing = re.findall(r"(\S+) => not found", pods.run("chroot", root, "sh", "-c", "ldd /opt/ucx/lib/*.so.0 /opt/ucx/lib/ucx/*.so.0"))
    assert set(missing) <= {"libcuda.so.1", "libnvidia-ml.so.1"}, missing


def test_on_a_host_with_gpus_only_the_driver_is_missing(builder, tmp_path_factory):
    """The stage below the production target. weightwired and the Python client find the library, which has the CUDA runtime inside."""
    if why_not := no_cuda():
        pytest.skip(", ".join(why_not))
    with built(builder, "gpu", "--build-arg", f"CUDA={cuda_image(builder, tmp_path_factory.mktemp('cuda'))}") as root:
        # What every container has: weightwired finds the library by /proc.
        contained = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", 'mount --rbind /proc "$0/proc"; exec "$@"', root]
        agent = subprocess.run([*contained, *inside(root, "weightwired", "--gpu", "required", "--gpu-slab-bytes", "1MiB", "--http", "",
                                                    "--agent-socket", "/run/weightwire/agent/agent.sock")], capture_output=True, text=True, timeout=60)
        assert agent.returncode != 0
        program = "from weightwire.device import Device; Device(0)"
        client = subprocess.run(inside(root, "python3", "-c", program), capture_output=True, text=True, timeout=60,
                                env={"WEIGHTWIRE_BIN_DIR": "/usr/local/bin", "PATH": os.environ["PATH"]})
        for said in (agent.stdout + agent.stderr, client.stderr):
            assert "this host has no CUDA driver" in said, said
        nccl = "import ctypes; print(ctypes.CDLL('/usr/local/bin/libweightwire_nccl.so').ww_nccl_abi_version())"
        assert int(pods.run(*inside(root, "python3", "-c", nccl))) > 0
