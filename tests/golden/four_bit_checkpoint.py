#!/usr/bin/env python3
"""Writes tests/data/four_bit_checkpoints.json: what the libraries that define formats of four bits store of a small model, for
tests/python/test_quantize_convert.py. In an environment of its own (torch 2.15.0, torchao 0.18.0, compressed-tensors 0.20.1,
llm-compressor 0.14.0.1 and transformers 5.24.0 wrote the file):
  pip install torch torchao compressed-tensors transformers datasets accelerate loguru && pip install --no-deps llmcompressor
  VENV/bin/python tests/golden/four_bit_checkpoint.py            # exit 1 when the file would change
  VENV/bin/python tests/golden/four_bit_checkpoint.py --update   # writes
"""

import hashlib
import json
import os
import pathlib

import numpy as np

import golden_file

FILE = pathlib.Path(__file__).resolve().parents[1] / "data/four_bit_checkpoints.json"
SMALL = {"hidden_size": 160, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 48}
WIDE = {**SMALL, "hidden_size": 128, "intermediate_size": 384, "head_dim": 64}
REST = {"num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": False}
LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", **REST}
GPT_OSS = {"model_type": "gpt_oss", **REST, **SMALL, "num_local_experts": 2, "num_experts_per_tok": 1, "torch_dtype": "bfloat16"}
#: format -> (sizes, what compressed-tensors is told of the weights, its format)
FORMATS = {
    "mxfp4-compressed-tensors": (SMALL, {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"},
                                 "mxfp4-pack-quantized"),
    "nvfp4-compressed-tensors": (SMALL, {"type": "float", "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"},
                                 "nvfp4-pack-quantized"),
    "int4-32-compressed-tensors": (SMALL, {"type": "int", "strategy": "group", "group_size": 32}, "pack-quantized"),
    "int4-128-compressed-tensors": (WIDE, {"type": "int", "strategy": "group", "group_size": 128}, "pack-quantized")}
#: dtype -> (bits of the fraction, least and greatest exponent)
KINDS = {"BF16": (7, 112, 134), "F16": (10, 2, 20), "F32": (23, 112, 134)}


def numbers(seed: int, shape: tuple, dtype: str) -> np.ndarray:
    """Bits that only a stream of PCG64 decides, which NumPy promises to keep: numbers, whole rows of them small, zeros with signs."""
    fraction, least, greatest = KINDS[dtype]
    raw = np.random.PCG64(seed).random_raw(int(np.prod(shape))).reshape(shape)
    exponent = least + (raw >> 40) % (greatest - least) - (raw[..., :1] >> 50) % 3
    bits = (raw & 1) << (31 if dtype == "F32" else 15) | exponent << fraction | (raw >> 8) & ((1 << fraction) - 1)
    bits[raw % 61 == 0] = 0
    bits[raw % 61 == 1] = 1 << (31 if dtype == "F32" else 15)
    return bits.astype(np.uint32 if dtype == "F32" else np.uint16)


def model(config: dict, dtype: str) -> dict:
    """name -> bits."""
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, key_heads = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (8, hidden), "lm_head.weight": (8, hidden), "model.norm.weight": (hidden,)}
    layer = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows, columns in (("q", heads, hidden), ("k", key_heads, hidden), ("v", key_heads, hidden), ("o", hidden, heads)):
        layer[f"self_attn.{name}_proj.weight"] = rows, columns
        if config["model_type"] == "gpt_oss":
            layer[f"self_attn.{name}_proj.bias"] = (rows,)
    if config["model_type"] == "gpt_oss":
        layer |= {"self_attn.sinks": (2,), "mlp.router.weight": (2, hidden), "mlp.router.bias": (2,),
                  "mlp.experts.gate_up_proj": (2, hidden, 2 * middle), "mlp.experts.gate_up_proj_bias": (2, 2 * middle),
                  "mlp.experts.down_proj": (2, middle, hidden), "mlp.experts.down_proj_bias": (2, hidden)}
    else:
        layer |= {"mlp.gate_proj.weight": (middle, hidden), "mlp.up_proj.weight": (middle, hidden), "mlp.down_proj.weight": (hidden, middle)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    return {name: numbers(seed, shape, dtype) for seed, (name, shape) in enumerate(sorted(shapes.items()))}


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def entry(tensor) -> list:
    """[dtype, shape, sum of the bytes]"""
    import torch
    names = {torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
             torch.float8_e4m3fn: "F8_E4M3"}
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [names[tensor.dtype], list(tensor.shape), hashlib.sha256(data).hexdigest()]


def as_torch(bits: np.ndarray, dtype: str):
    import torch
    integer, kind = {"BF16": (np.int16, torch.bfloat16), "F16": (np.int16, torch.float16), "F32": (np.int32, torch.float32)}[dtype]
    return torch.from_numpy(bits.view(integer).copy()).view(kind)


def compressed(format: str, dtype: str) -> dict:
    """By compressed-tensors: what it stores of each linear weight; global scales and scales are those of llm-compressor's observers,
    which makes them common to what vLLM fuses."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor.observers import Observer
    from llmcompressor.observers.helpers import fuse_weight_observers
    sizes, said, name = FORMATS[format]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(num_bits=4, symmetric=True, dynamic=False, **said))
    whole, linear = torch.nn.Module(), {}
    for weight, bits in model({**LLAMA, **sizes}, dtype).items():
        if not is_linear(weight):
            continue
        at = whole
        for part in weight.removesuffix(".weight").split("."):
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        linear[weight.removesuffix("weight")] = at
        at.weight = torch.nn.Parameter(as_torch(bits, dtype), requires_grad=False)
        at.weight_observer = Observer.load_from_registry("memoryless-minmax", base_name="weight", args=scheme.weights.model_copy())
    fuse_weight_observers(whole)
    for at in linear.values():
        at.weight_observer(at.weight)
    stored = {}
    for prefix, at in linear.items():
        found = at.weight_observer.get_qparams()
        state = {"weight": at.weight.data, "weight_scale": found["scale"]}
        if found["global_scale"] is not None:
            state["weight_global_scale"] = found["global_scale"]
        made = BaseCompressor.get_value_from_registry(name).compress(state, scheme)
        stored |= {prefix + key: entry(tensor) for key, tensor in made.items()}
    return stored


def gpt_oss() -> dict:
    """Codes by torchao, in the places from which transformers' own function reads the same numbers back."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    stored = {}
    for name, bits in model(GPT_OSS, "BF16").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        values = as_torch(bits, "BF16").transpose(1, 2).contiguous()
        scales, codes = to_mx(values, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
        numbers = to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.bfloat16)
        blocks = codes.view(torch.uint8).reshape(*values.shape[:2], -1, 16)
        exponents = scales.view(torch.uint8).reshape(blocks.shape[:3])
        back = convert_moe_packed_tensors(blocks, exponents)
        assert torch.equal(back, numbers.transpose(1, 2)), name
        stored |= {f"{name}_blocks": entry(blocks), f"{name}_scales": entry(exponents)}
    return stored


def check_config(format: str, written: dict) -> None:
    """compressed-tensors reads what `wwctl convert` says in config.json as the same scheme."""
    from compressed_tensors.quantization import QuantizationConfig
    read = QuantizationConfig.model_validate(written)
    args = read.config_groups["group_0"].weights
    assert read.format == FORMATS[format][2] and args.num_bits == 4 and not args.dynamic and args.symmetric
    for key, value in FORMATS[format][1].items():
        assert str(args.model_dump()[key]) == str(value), (key, args)


def main():
    parser = golden_file.parser(__doc__)
    parser.add_argument("--read", nargs=2, metavar=("FORMAT", "CONFIG"), help="only look whether compressed-tensors reads a config.json")
    args = parser.parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compressed-tensors compiles what it casts with
    if args.read:
        return check_config(args.read[0], json.loads(pathlib.Path(args.read[1]).read_text())["quantization_config"])
    made = {format: {dtype: compressed(format, dtype) for dtype in KINDS if dtype != "F16" or "mx" not in format} for format in FORMATS}
    made["mxfp4-gpt-oss"] = {"BF16": gpt_oss()}
    text = json.dumps(made, indent=1) + "\n"
    golden_file.settle(FILE, text, args.update)


if __name__ == "__main__":
    main()
