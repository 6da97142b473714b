"""What makes files durable, and room for them certain."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, List


def allocate(folder: Path) -> None:
    """Reserves the space, so that a full disk is known before the first byte."""
    for path in _files(folder):
        with open(path, "rb+") as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                os.posix_fallocate(file.fileno(), 0, size)


def sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    for path in _files(folder):
        sync_file(path)
    for path in [folder, *(p for p in folder.rglob("*") if p.is_dir())]:
        sync_folder(path)


def sync_folder(path: Path) -> None:
    with opened(path) as fd:
        os.fsync(fd)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """The folder, whatever it is called afterwards."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _files(folder: Path) -> List[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
