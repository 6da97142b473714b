"""Makes checkpoints whole that are stored as what changed."""

from __future__ import annotations

import os
from pathlib import Path

from weightwire.checkpoint import composed, native
from weightwire.checkpoint.sources import PathLike
from weightwire.checkpoint.stored import CheckpointError


def compact(folder: PathLike) -> bool:
    """Stores a native checkpoint whole, in place, that was stored as what changed since another one, which may be removed then.

    False: it was whole before. Of a folder of `State.save` each content is looked at. Killed at any moment it is one or the other.
    Whoever reads it meanwhile may be told that a file was removed, and reads again. CheckpointError: no native checkpoint, or what it
    is based on is gone or damaged.
    """
    path = Path(os.path.abspath(folder))
    parts = [path / part for part in composed.read(path)[0]] if composed.found_at(path) else [path]
    natives = [part for part in parts if native.found_at(part)]
    if not natives:
        raise CheckpointError(f"{path} is not a native checkpoint", code="FAILED_PRECONDITION",
                              remedy=f"only those have {native.MANIFEST} and can be stored as what changed")
    return any([native.make_whole(part) for part in natives])
