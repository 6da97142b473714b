"""Folders of safetensors as exporters leave them, written by the tests themselves: no code is shared with what reads them."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from conftest import read_safetensors

INDEX = "model.safetensors.index.json"


def write_file(path: pathlib.Path, tensors: dict) -> None:
    """name -> (meta, bits), as `read_safetensors` gives them."""
    header, data = {}, b""
    for name, (meta, bits) in tensors.items():
        header[name] = {"dtype": meta.dtype, "shape": list(meta.shape), "data_offsets": [len(data), len(data) + bits.nbytes]}
        data += np.ascontiguousarray(bits).tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(folder: pathlib.Path, config: dict, tensors: dict, count: int = 2, index: bool = True) -> list:
    """The model in `count` shards; the names in each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names, weight_map, parts = list(tensors), {}, []
    for number in range(count):
        parts.append(names[number * len(names) // count:(number + 1) * len(names) // count])
        file = shard(number + 1, count)
        write_file(folder / file, {name: tensors[name] for name in parts[-1]})
        weight_map.update(dict.fromkeys(parts[-1], file))
    if index:
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return parts


def shard(number: int, count: int = 2) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def change_index(folder: pathlib.Path, change) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def read_folder(folder: pathlib.Path) -> dict:
    """name -> (dtype, shape, bytes) of every safetensors file."""
    return {name: (meta.dtype, meta.shape, bits.tobytes()) for path in sorted(folder.glob("*.safetensors"))
            for name, (meta, bits) in read_safetensors(path).items()}


def plain(tensors: dict) -> dict:
    """The same of tensors in memory."""
    return {name: (meta.dtype, meta.shape, bits.tobytes()) for name, (meta, bits) in tensors.items()}
