"""What each rank must hold, computed from the checkpoint with plain numpy.

Shares no code with weightwire: it follows Megatron-core's and vLLM's own rules for Qwen2. Every
function takes `hf`, the checkpoint's tensors by Hugging Face name, and yields (name, array) pairs;
arrays may be views.
"""

from __future__ import annotations

from typing import Iterator

import numpy as np

Named = Iterator[tuple[str, np.ndarray]]


def _chunk(array: np.ndarray, parts: int, index: int, axis: int = 0) -> np.ndarray:
    return np.split(array, parts, axis=axis)[index]


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    """Rows up to `rows`, the rest 7.0 in bf16 bits: padding that must never arrive anywhere."""
    return np.concatenate([array, np.full((rows - len(array), *array.shape[1:]), 0x40E0, array.dtype)])


def megatron_padded_vocab(config: dict, tp: int) -> int:
    """Megatron's rule: up to a multiple of 128 × TP."""
    return -(-config["vocab_size"] // (128 * tp)) * 128 * tp


def _grouped_qkv(config: dict, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """For each KV group: its q heads, its k head, its v head."""
    d = config["hidden_size"] // config["num_attention_heads"]
    groups = config["num_key_value_heads"]
    rest = q.shape[1:]
    parts = [x.reshape(groups, -1, *rest) for x in (q, k, v)]
    assert parts[1].shape[1] == d
    return np.concatenate(parts, axis=1).reshape(-1, *rest)


def megatron(config: dict, hf: dict, tp: int, pp: int, rank: int) -> Named:
    """Megatron-core (local spec) at TP × PP; rank = tp_rank + tp · pp_rank."""
    t, p = rank % tp, rank // tp
    per_stage = config["num_hidden_layers"] // pp
    embed = _padded(hf["model.embed_tokens.weight"], megatron_padded_vocab(config, tp))
    if p == 0:
        yield "embedding.word_embeddings.weight", _chunk(embed, tp, t)
    for local in range(per_stage):
        src, dst = f"model.layers.{p * per_stage + local}.", f"decoder.layers.{local}."
        qkv = [hf[f"{src}self_attn.{x}_proj.weight"] for x in "qkv"]
        bias = [hf[f"{src}self_attn.{x}_proj.bias"] for x in "qkv"]
        yield dst + "input_layernorm.weight", hf[src + "input_layernorm.weight"]
        yield dst + "self_attention.linear_qkv.weight", _chunk(_grouped_qkv(config, *qkv), tp, t)
        yield dst + "self_attention.linear_qkv.bias", _chunk(_grouped_qkv(config, *bias), tp, t)
        yield dst + "self_attention.linear_proj.weight", _chunk(hf[src + "self_attn.o_proj.weight"], tp, t, 1)
        yield dst + "pre_mlp_layernorm.weight", hf[src + "post_attention_layernorm.weight"]
        yield dst + "mlp.linear_fc1.weight", np.concatenate(
            [_chunk(hf[src + "mlp.gate_proj.weight"], tp, t), _chunk(hf[src + "mlp.up_proj.weight"], tp, t)])
        yield dst + "mlp.linear_fc2.weight", _chunk(hf[src + "mlp.down_proj.weight"], tp, t, 1)
    if p == pp - 1:
        yield "decoder.final_layernorm.weight", hf["model.norm.weight"]
        if config["tie_word_embeddings"]:
            if pp > 1:
                yield "output_layer.weight", _chunk(embed, tp, t)
        else:
            head = _padded(hf["lm_head.weight"], megatron_padded_vocab(config, tp))
            yield "output_layer.weight", _chunk(head, tp, t)


def vllm(config: dict, hf: dict, tp: int, rank: int) -> Named:
    """vLLM at TP: fused qkv_proj and gate_up_proj, vocabulary padded to a multiple of 64.

    Padding rows are not weights: arrays of a vocabulary are cut to the rows that exist.
    """
    rows = -(-config["vocab_size"] // 64) * 64 // tp
    kv_heads = config["num_key_value_heads"]
    d = config["hidden_size"] // config["num_attention_heads"]

    def kv(x: np.ndarray) -> np.ndarray:
        if kv_heads >= tp:
            return _chunk(x, tp, rank)
        head = rank * kv_heads // tp  # replicated heads
        return x[head * d:(head + 1) * d]

    yield "model.embed_tokens.weight", hf["model.embed_tokens.weight"][rank * rows:(rank + 1) * rows]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", hf["lm_head.weight"][rank * rows:(rank + 1) * rows]
    yield "model.norm.weight", hf["model.norm.weight"]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for kind in ("weight", "bias"):
            q, k, v = (hf[f"{p}self_attn.{x}_proj.{kind}"] for x in "qkv")
            yield f"{p}self_attn.qkv_proj.{kind}", np.concatenate([_chunk(q, tp, rank), kv(k), kv(v)])
        yield p + "self_attn.o_proj.weight", _chunk(hf[p + "self_attn.o_proj.weight"], tp, rank, 1)
        yield p + "mlp.gate_up_proj.weight", np.concatenate(
            [_chunk(hf[p + "mlp.gate_proj.weight"], tp, rank), _chunk(hf[p + "mlp.up_proj.weight"], tp, rank)])
        yield p + "mlp.down_proj.weight", _chunk(hf[p + "mlp.down_proj.weight"], tp, rank, 1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{p}{norm}.weight", hf[f"{p}{norm}.weight"]


def vllm_shapes(config: dict, tp: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a rank's parameters as vLLM allocates them, padding rows included."""
    h, f = config["hidden_size"], config["intermediate_size"]
    d = h // config["num_attention_heads"]
    qkv = (config["num_attention_heads"] // tp + 2 * max(1, config["num_key_value_heads"] // tp)) * d
    rows = -(-config["vocab_size"] // 64) * 64 // tp
    shapes = {"model.embed_tokens.weight": (rows, h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (rows, h)
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        shapes.update({
            p + "self_attn.qkv_proj.weight": (qkv, h), p + "self_attn.qkv_proj.bias": (qkv,),
            p + "self_attn.o_proj.weight": (h, h // tp), p + "mlp.gate_up_proj.weight": (2 * f // tp, h),
            p + "mlp.down_proj.weight": (h, f // tp), p + "input_layernorm.weight": (h,),
            p + "post_attention_layernorm.weight": (h,),
        })
    return shapes


def vllm_samples(config: dict, hf: dict, tp: int, rank: int) -> list[np.ndarray]:
    """A few values of each layer, for recognising which version a rank's tensors hold."""
    rows = -(-config["vocab_size"] // 64) * 64 // tp
    samples = [np.array(hf["model.embed_tokens.weight"][rank * rows]), np.array(hf["model.norm.weight"])]
    for i in range(config["num_hidden_layers"]):
        p = f"model.layers.{i}."
        samples.append(np.array(hf[p + "input_layernorm.weight"]))
        samples.append(np.array(_chunk(hf[p + "mlp.down_proj.weight"], tp, rank, 1)[-1]))
    return samples


def vllm_sampled_from(config: dict, params: dict) -> list[np.ndarray]:
    """The same values, read from a rank's live parameters."""
    samples = [params["model.embed_tokens.weight"][0], params["model.norm.weight"]]
    for i in range(config["num_hidden_layers"]):
        samples.append(params[f"model.layers.{i}.input_layernorm.weight"])
        samples.append(params[f"model.layers.{i}.mlp.down_proj.weight"][-1])
    return samples
