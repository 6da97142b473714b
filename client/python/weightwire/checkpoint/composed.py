"""The manifest of a composed checkpoint: which checkpoints it is made of, and that they are those that were saved together."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

from weightwire.checkpoint import hf, native
from weightwire.checkpoint.stored import damaged

MANIFEST = "weightwire_state.json"
#: The layout of what belongs to a rank, and to no other layout.
PER_RANK = "per-rank"
SHARED, OWN = "extra/shared", "extra/own"
_PART = re.compile(r"model|hf_model|extra/(own|shared)|optimizer/[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def found_at(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def manifest(folder: Path, parts: List[str], world_size: int) -> Dict[str, Any]:
    return _signed(world_size, {part: _identity(folder / part) for part in parts})


def read(folder: Path) -> Tuple[List[str], int]:
    """The names of its checkpoints, and how many ranks saved it. CheckpointError (DATA_LOSS): the manifest is damaged, or
    one of them is not the one that was saved with the others."""
    said: Any = hf.read_json(folder / MANIFEST)
    parts, world_size = said.get("parts"), said.get("world_size")
    if not isinstance(parts, dict) or not all(isinstance(p, str) and _PART.fullmatch(p) for p in parts) \
            or not isinstance(world_size, int) or said != _signed(world_size, parts):
        raise damaged(MANIFEST, "its digest is not that of its parts")
    for part, identity in parts.items():
        if _identity(folder / part) != identity:
            raise damaged(f"{part}/{native.MANIFEST}", "this part was not saved with the others")
    return list(parts), world_size


def _signed(world_size: int, parts: Dict[str, Any]) -> Dict[str, Any]:
    content: Dict[str, Any] = {"format": "weightwire-state", "version": 1, "world_size": world_size, "parts": parts}
    return {**content, "digest": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}


def _identity(part: Path) -> str:
    """The root of its digests; of safetensors that have none, what is in their headers."""
    if native.found_at(part):
        return str(hf.read_json(part / native.MANIFEST).get("digest"))
    if not hf.found_at(part):
        raise damaged(str(part.name), "is missing")
    tensors = [[t.name, t.dtype, t.shape, [r.file for r in t.regions]] for t in hf.open_at(part).ranks[0].values()]
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()
