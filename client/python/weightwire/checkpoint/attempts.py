"""One try of several ranks at one folder. It is made beside its place, and has its name when it is whole and durable.

The ranks share a file system and nothing else: what one waits for is a file that another one renames into place.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Set

from weightwire import errors
from weightwire.checkpoint import disk, native, native_delta
from weightwire.checkpoint.hf import read_json
from weightwire.checkpoint.stored import CheckpointError, plain

_POLL_SECONDS_MAX = 0.05


class Attempt:
    """`name` is the same on all ranks and was never used before for `final`; `end` is on the monotonic clock. `moved`: where `final` is
    when the folder around it, an attempt too, has its name."""

    def __init__(self, final: Path, name: str, rank: int, end: float, moved: Optional[Path] = None):
        self.final, self.name, self.rank, self.end = final, plain(name, "attempt"), rank, end
        self.partial = final.with_name(f".{final.name}.{name}.partial")
        self.finals = (final,) if moved is None else (final, moved)

    def begin(self, resume: bool) -> None:
        """The attempt's folder: rank 0 makes it, the others wait for it."""
        if self.rank != 0:
            return self.wait(self.partial.is_dir, f"rank 0 did not begin attempt '{self.name}'")
        self.final.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.partial.mkdir(exist_ok=resume)
        except FileExistsError as error:
            raise CheckpointError(f"attempt '{self.name}' at {self.final} was made before", code="ALREADY_EXISTS",
                                  remedy="choose a new one for each attempt, the same on every rank; resume=True for a "
                                         "rank that was started again while it goes on") from error

    def wait(self, ready: Callable[[], bool], what: str, who: Callable[[], str] = str) -> None:
        pause = 0.001
        while not ready():
            if time.monotonic() > self.end:
                raise errors.DeadlineError(f"{what} {who()}".strip(), code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                           rank=str(self.rank), remedy="see why that rank failed; nothing was saved")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS_MAX)

    def wait_for_all(self, path: Callable[[int], Path], world_size: int) -> None:
        """Until each rank has put its file there; DeadlineError names those that have not."""
        def missing() -> str:
            return ", ".join(str(rank) for rank in range(world_size) if not path(rank).exists())
        self.wait(lambda: not missing(), "parts are missing", missing)

    def put(self, path: Path, text: str) -> None:
        """A file that is there whole and durable, or not at all."""
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text)
        disk.sync_file(temporary)
        with disk.opened(path.parent) as folder:  # rank 0, which waits for this file, may rename its folder at once
            os.rename(temporary, path)
            disk.sync_folder(Path(f"/proc/self/fd/{folder}"))

    def finish(self) -> None:
        """Rank 0: from here on the folder exists. Removes attempts at it that were given up."""
        disk.sync_tree(self.partial)
        os.rename(self.partial, self.final)
        disk.sync_folder(self.final.parent)
        for path in self.final.parent.iterdir():
            if path.name.startswith(f".{self.final.name}.") and path.name.endswith(".partial"):
                shutil.rmtree(path)


def prune(final: Path, keep: int, marker: str) -> None:
    """Keeps the last `keep` of the folders that differ from `final` in the number at the end of their name, and have a
    file `marker`. That file goes first: what is half removed is no checkpoint. What another folder beside it is based on is kept,
    too, until that one is removed or made whole."""
    match = re.fullmatch(r"(.*?)(\d+)", final.name)
    if not match:
        return
    older: Dict[int, Path] = {}
    needed = {path: _bases(path) for path in final.parent.resolve().iterdir() if path.is_dir()}
    for path in needed:
        found = re.fullmatch(re.escape(match.group(1)) + r"(\d+)", path.name)
        if found and int(found.group(1)) <= int(match.group(2)) and (path / marker).is_file():
            older[int(found.group(1))] = path
    going = [older[number] for number in sorted(older)[:-keep]]
    while free := [path for path in going if not any(path in bases for bases in needed.values())]:
        (free[0] / marker).unlink()
        disk.sync_folder(free[0])
        shutil.rmtree(free[0])
        going.remove(free[0])
        del needed[free[0]]


def _bases(folder: Path) -> Set[Path]:
    """The folders in which lies what this one, or a part of it, is based on. One that does not tell may need all beside it."""
    found: Set[Path] = set()
    for pattern in ("", "model/", "optimizer/*/"):
        for path in folder.glob(pattern + native.MANIFEST):
            try:
                manifest: Any = read_json(path)
                if "base" in manifest:
                    base = native_delta.base_of(manifest, path.parent)[0]
                    found |= {base, *base.parents}
            except CheckpointError as why:
                logging.getLogger("weightwire").warning("%s does not tell what it is based on, and nothing beside it is removed: %s",
                                                        path, why)
                found |= {*folder.parent.iterdir()} - {folder}
    return found
