"""Where `weightwired`, `wwctl` and the libraries beside them are: a wheel with binaries holds them; without, a build or PATH does."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Iterator, NoReturn, Optional

from weightwire.errors import UnavailableError

_PACKAGE = Path(__file__).resolve().parent


def folders() -> Iterator[Path]:
    """Where they are looked for: $WEIGHTWIRE_BIN_DIR alone where it is set; else the package, and then the release build of the
    checkout that the package lies in."""
    if named := os.environ.get("WEIGHTWIRE_BIN_DIR"):
        yield Path(named)
        return
    yield _PACKAGE / "bin"
    if (_PACKAGE.parents[2] / "CMakePresets.json").is_file():
        yield _PACKAGE.parents[2] / "build/release/bin"
        yield _PACKAGE.parents[2] / "build/release/lib"


def find(name: str) -> Optional[Path]:
    """The file in the first of `folders` that has it, else, without WEIGHTWIRE_BIN_DIR, the program of that name on PATH; None: it
    is nowhere."""
    if inside := _in_folders(name):
        return inside
    found = None if os.environ.get("WEIGHTWIRE_BIN_DIR") else shutil.which(name)
    return Path(found) if found and _is_binary(Path(found)) else None


def program(name: str) -> Path:
    """As `find`; UnavailableError (FAILED_PRECONDITION) says where it was looked for and how to get it."""
    found = find(name)
    if found is None:
        where = ", ".join(map(str, folders()))
        raise UnavailableError(f"no {name} in {where}{'' if os.environ.get('WEIGHTWIRE_BIN_DIR') else ', nor on PATH'}", code="FAILED_PRECONDITION",
                               remedy="install the wheel with binaries (x86-64 Linux with glibc 2.34 or newer; docs/install.md), or build "
                                      "it and name the folder in WEIGHTWIRE_BIN_DIR")
    return found


def library(name: str) -> str:
    """The path of a shared library, or its name for the loader to find."""
    return str(_in_folders(name) or name)


def _in_folders(name: str) -> Optional[Path]:
    return next((folder / name for folder in folders() if (folder / name).is_file()), None)


def _is_binary(path: Path) -> bool:
    """A script of that name is a console script of this package, which would call itself."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return False


def _become(name: str) -> NoReturn:
    """The console scripts `weightwired` and `wwctl`."""
    try:
        path = program(name)
    except UnavailableError as error:
        sys.exit(f"{name}: {error}")
    os.environ.setdefault("WEIGHTWIRE_PYTHON", sys.executable)  # for wwctl's commands that are Python
    os.execv(path, [name, *sys.argv[1:]])


def weightwired() -> NoReturn:
    _become("weightwired")


def wwctl() -> NoReturn:
    _become("wwctl")
