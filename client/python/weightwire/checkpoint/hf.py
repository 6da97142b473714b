"""`hf`: safetensors, in one file or in several with model.safetensors.index.json.

Which files of a folder are the model is not always clear. What is chosen is said (`Opened.notes`), and what no reader would
take is refused by its name.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Tuple, cast

from weightwire.checkpoint import safetensors
from weightwire.checkpoint.formats import Opened, Wanted
from weightwire.checkpoint.stored import CheckpointError, Files, damaged, plain
from weightwire.memory import TensorMeta

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_INDEX_BYTES_MAX = 256 << 20
_SHARD = re.compile(r"(model)-(\d{5,6})-of-(\d{5,6})\.safetensors")
#: What others call weights, and what to do about them.
_OTHERS = (
    (re.compile(r"adapter_model\.(safetensors|bin)"), "an adapter without its model",
     "merge it into the model, or publish it as an adapter"),
    (re.compile(r"consolidated.*\.(safetensors|pth)"), "the weights under their vendor's own names",
     "take the Hugging Face form of the model, or convert it with the vendor's script"),
    (re.compile(r".*\.safetensors\.index\.json"), "an index of another name", f"call it {INDEX}, if it is the model's"),
    (re.compile(r".*\.safetensors"), "safetensors of another name", f"call the file {SINGLE}, if it is the whole model"),
    (re.compile(r".*\.(bin|pt|pth|ckpt)"), "pickled weights, which are not read",
     "save the model as safetensors: save_pretrained(..., safe_serialization=True)"),
    (re.compile(r".*\.gguf"), "GGUF, which is not read", "take the model's safetensors"))


def found_at(folder: Path) -> bool:
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file() or bool(_shards(folder))


def open_at(folder: Path) -> Opened:
    files, weight_map, notes = _chosen(folder)
    opened = Opened("hf", "hf", Files(folder), [{}], notes=notes)
    tensors, unlisted = opened.ranks[0], []
    for file in files:
        for tensor in safetensors.read_header(folder, file, opened.files.seen):
            listed = weight_map.get(tensor.name, file) if weight_map is not None else file
            if listed != file or tensor.name in tensors:
                raise _held_twice(file, tensor.name, listed if listed != file else tensors[tensor.name].regions[0].file)
            if weight_map is not None and tensor.name not in weight_map:
                unlisted.append(tensor.name)
            tensors[tensor.name] = tensor
    missing = sorted((weight_map or {}).keys() - tensors.keys())
    if missing and weight_map:
        raise damaged(INDEX, f"{weight_map[missing[0]]} does not hold it", tensor=missing[0])
    if unlisted:
        notes.append(f"{INDEX} does not list {len(unlisted)} of the tensors in its files, such as {unlisted[0]}: they are taken "
                     "like the others")
    notes += _not_read(folder, files)
    return opened


def _chosen(folder: Path) -> Tuple[List[str], Optional[Dict[str, str]], List[str]]:
    """The files that are read, what an index says of them, and why these, where there was a choice."""
    single = (folder / SINGLE).is_file()
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) and not single:
            raise damaged(INDEX, "no weight_map")
        named = sorted({plain(file, INDEX) for file in weight_map.values()}) if isinstance(weight_map, dict) else []
        if not single or SINGLE in named:
            return named, cast(Dict[str, str], weight_map), []  # plain() saw every file that it names
        gone = [file for file in named if not (folder / file).is_file()]
        why = (f"{gone[0]}, which the index names, is not there" if gone else "as transformers does; vLLM and SGLang read the "
               "shards that the index names: remove what is not meant")
        return [SINGLE], None, [f"{SINGLE} and {INDEX} are both there: {SINGLE} is read, the index is not ({why})"]
    if single:
        return [SINGLE], None, []
    shards_here = _shards(folder)
    count = max(int(match.group(3)) for match in shards_here)
    here = {int(match.group(2)) for match in shards_here}
    missing = sorted(set(range(1, min(count, len(here) + 1) + 1)) - here)
    if missing or len(shards_here) != count or len({match.group(3) for match in shards_here}) != 1:
        raise damaged(shards_here[0].group(0), f"one of {count} shards without {INDEX}, and "
                      + (f"number {missing[0]} is not there" if missing else "there are shards of another number"))
    return sorted(match.group(0) for match in shards_here), None, [f"no {INDEX}: all {count} shards are read"]


def _shards(folder: Path) -> List["re.Match[str]"]:
    if not folder.is_dir():
        return []
    return [match for match in map(_SHARD.fullmatch, sorted(path.name for path in folder.iterdir())) if match]


def _held_twice(file: str, name: str, other: str) -> CheckpointError:
    return CheckpointError(f"{file} holds it, and {INDEX} or another file says {other}", code="DATA_LOSS", reason="io_error",
                           tensor=name, remedy="which one is meant cannot be told: remove the file that is stale, or name each "
                                               "tensor once in the index")


def _not_read(folder: Path, files: Sequence[str]) -> List[str]:
    """Weights that lie beside those that are read: somebody may have meant them."""
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in files)
    return [f"not read: {', '.join(others[:4])}" + (f" and {len(others) - 4} more" if len(others) > 4 else "")] if others else []


def other_weights(folder: Path) -> Optional[Tuple[str, str]]:
    """Of a folder that holds no checkpoint: the weights that it has in a form that is not read, and what to do about it."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for pattern, what, remedy in _OTHERS:
        for name in names:
            if pattern.fullmatch(name):
                return f"{name} is {what}", remedy
    return None


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
