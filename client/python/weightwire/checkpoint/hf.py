"""`hf`: safetensors, in one file or in several with model.safetensors.index.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Dict, List, Sequence

from weightwire.checkpoint import safetensors
from weightwire.checkpoint.formats import Opened, Wanted
from weightwire.checkpoint.stored import Files, damaged, plain
from weightwire.memory import TensorMeta

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES_MAX = 256 << 20


def found_at(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def open_at(folder: Path) -> Opened:
    if not (folder / INDEX).is_file():
        tensors = {t.name: t for t in safetensors.read_header(folder, SINGLE)}
        return Opened("hf", "hf", Files(folder), [tensors])
    index = read_json(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        raise damaged(INDEX, "no weight_map")
    tensors = {}
    for file in sorted({plain(file, INDEX) for file in weight_map.values()}):
        for tensor in safetensors.read_header(folder, file):
            if weight_map.get(tensor.name) != file:
                raise damaged(INDEX, f"{file} holds it, the index says {weight_map.get(tensor.name)!r}",
                              tensor=tensor.name)
            tensors[tensor.name] = tensor
    missing = sorted(weight_map.keys() - tensors.keys())
    if missing:
        raise damaged(INDEX, f"{weight_map[missing[0]]} does not hold it", tensor=missing[0])
    return Opened("hf", "hf", Files(folder), [tensors])


def lay_out(folder: Path, wanted: Wanted) -> None:
    parts = shards(wanted.ranks[0], wanted.shard_bytes)
    weight_map: Dict[str, str] = {}
    for number, tensors in enumerate(parts, 1):
        file = SINGLE if len(parts) == 1 else f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        safetensors.write_skeleton(folder / file, [(t.name, t.dtype, t.shape) for t in tensors])
        weight_map.update((t.name, file) for t in tensors)
    if len(parts) > 1:
        total = sum(t.nbytes for t in wanted.ranks[0])
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1))


def seal(opened: Opened, wanted: Wanted) -> None:
    """The files are whole once they are filled."""


def shards(tensors: Sequence[TensorMeta], limit: int) -> List[List[TensorMeta]]:
    """The tensors in files of at most `limit` bytes, or of one tensor."""
    files: List[List[TensorMeta]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    return files


def read_json(path: Path) -> Dict[str, object]:
    """An object from a file of bounded size."""
    try:
        if path.stat().st_size > _INDEX_BYTES_MAX:
            raise damaged(path.name, f"{path.stat().st_size} bytes of JSON")
        made = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path.name, f"no JSON: {error}") from error
    if not isinstance(made, dict):
        raise damaged(path.name, "no JSON object")
    return made
