"""What the checkpoint that an engine was started from holds: names, dtypes and shapes, never elements."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from weightwire.errors import RefusedError
from weightwire.memory import TensorMeta


def folder_of(model: str) -> Path:
    """The folder of a model given as a path or as the name of one in the local Hugging Face cache."""
    path = Path(model)
    if path.is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:
        raise RefusedError(f"{model!r} is neither a folder nor a model in the local Hugging Face cache: {error}",
                           code="NOT_FOUND", remedy="start the engine from a folder that holds config.json") from error


def config_text(folder: Path) -> str:
    """config.json as it stands there."""
    try:
        return (folder / "config.json").read_text()
    except OSError as error:
        raise RefusedError(f"{folder} has no config.json: {error}", code="NOT_FOUND") from error


def config_of(text: str) -> str:
    """config.json as the coordinator takes it: without members that transformers 5 writes as null."""
    return json.dumps({key: value for key, value in json.loads(text).items() if value is not None})


def tensors(folder: Path) -> list[TensorMeta]:
    """The tensors of all *.safetensors of `folder`, from their headers."""
    found: dict[str, TensorMeta] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            found[name] = TensorMeta(name, entry["dtype"], tuple(entry["shape"]))
    if not found:
        raise RefusedError(f"{folder} holds no *.safetensors, so the names and shapes that the loader takes are unknown",
                           code="NOT_FOUND", remedy="give EngineDriver(checkpoint=…) a folder with the safetensors "
                                                    "files (or their headers alone) of this model")
    return list(found.values())
