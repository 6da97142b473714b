"""A Hugging Face checkpoint with a real model's names and shapes, its values made from a seed."""

from __future__ import annotations

import glob
import json
import math
import os
from typing import Iterable

import numpy as np

QWEN25_05B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "hidden_act": "silu", "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16",
}
#: The same family, small: a vocabulary that no parallel size divides, heads and widths that do.
SMALL = {**QWEN25_05B, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 50021}


def hf_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers makes them for Qwen2."""
    h, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    d = h // config["num_attention_heads"]
    kv = d * config["num_key_value_heads"]
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes.update({
            p + "self_attn.q_proj.weight": (h, h), p + "self_attn.q_proj.bias": (h,),
            p + "self_attn.k_proj.weight": (kv, h), p + "self_attn.k_proj.bias": (kv,),
            p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.v_proj.bias": (kv,),
            p + "self_attn.o_proj.weight": (h, h),
            p + "mlp.gate_proj.weight": (f, h), p + "mlp.up_proj.weight": (f, h), p + "mlp.down_proj.weight": (h, f),
            p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,),
        })
    return shapes


def write(directory: str, config: dict, seed: int) -> None:
    """Writes config.json and model.safetensors: bf16 bits drawn from `seed`, every tensor its own."""
    rng = np.random.Generator(np.random.SFC64(seed))
    write_tensors(directory, config, (rng.bytes(2 * math.prod(shape)) for shape in hf_shapes(config).values()))


def write_tensors(directory: str, config: dict, tensors: Iterable[bytes | memoryview]) -> None:
    """The same of given bf16 bits: of every tensor of `hf_shapes`, in its order."""
    os.makedirs(directory, exist_ok=True)
    with open(f"{directory}/config.json", "w") as out:
        json.dump(config, out)
    shapes, header, end = hf_shapes(config), {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{directory}/model.safetensors", "wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            out.write(tensor)


def read(directory: str) -> dict[str, np.ndarray]:
    """Read-only views (bf16 as uint16) of the checkpoint's tensors, in whatever safetensors files they are."""
    out = {}
    for path in sorted(glob.glob(f"{directory}/*.safetensors")):
        data = np.memmap(path, dtype=np.uint8, mode="r")
        length = int.from_bytes(data[:8].tobytes(), "little")
        header = json.loads(data[8:8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            out[name] = data[8 + length + begin:8 + length + end].view(np.uint16).reshape(entry["shape"])
    return out


def read_config(directory: str) -> dict:
    with open(f"{directory}/config.json") as text:
        return json.load(text)


def empty(config: dict) -> dict[str, np.ndarray]:
    """Tensors of the right shapes that take no memory; for asking the oracle about shapes."""
    return {name: np.broadcast_to(np.uint16(0), shape) for name, shape in hf_shapes(config).items()}
