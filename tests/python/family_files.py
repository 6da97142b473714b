"""Checkpoints of random bits with the names of a family, from the configurations in tests/data/transformers."""

from __future__ import annotations

import json
import pathlib

import numpy as np

from weightwire import checkpoint
from weightwire.checkpoint import hf, safetensors
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.stored import bits_of

CONFIGS = pathlib.Path(__file__).resolve().parents[1] / "data/transformers"
MTP = dict(num_nextn_predict_layers=1)


def config_of(name: str, **changes) -> dict:
    return {**json.loads((CONFIGS / f"{name}.json").read_text())["config"], **changes}


def write(folder: pathlib.Path, config: dict) -> dict:
    """A Hugging Face checkpoint; what `read` gives of it. Copies of embedding and head that MTP layers hold are equal, as in
    real ones."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    metas = planner_of(json.dumps(config)).layout("hf")[0]
    safetensors.write_skeleton(folder / "model.safetensors", [(m.name, m.dtype, m.shape) for m in metas])
    opened = hf.open_at(folder)
    opened.files.writable = True
    random = np.random.default_rng(5)
    for tensor in opened.ranks[0].values():
        bits = random.bytes(tensor.bytes)
        if tensor.name.endswith(("embed_tokens.weight", "head.weight")):
            bits = np.random.default_rng("embed" in tensor.name).bytes(tensor.bytes)
        opened.files.write(tensor, 0, np.frombuffer(bits, bits_of(tensor.dtype)))
    opened.files.close()
    return read(folder)


def read(folder: pathlib.Path) -> dict:
    """name -> (dtype, shape, bytes) of a checkpoint of one rank."""
    opened = checkpoint.open_checkpoint(folder)
    return {name: (t.dtype, t.shape, opened.files.flat(t, 0, t.count).tobytes()) for name, t in opened.ranks[0].items()}
