"""What each rank of vLLM or SGLang holds of a Hugging Face checkpoint, written from the engines' loaders.

Works on the checkpoint's arrays as the loaders do (chunk, concatenate, stack), knows nothing of boxes and
shares nothing with the service. Facts (docs/layouts.md): vLLM 0.32, SGLang 0.5.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np


@dataclasses.dataclass
class Param:
    dtype: str
    bits: np.ndarray
    filled: np.ndarray  # False where a loader writes nothing


@dataclasses.dataclass
class Shape:
    """The words of a parallel spec, as `parse` reads them."""
    engine: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 0  # 0: experts are cut like other weights


def parse(spec: str) -> Shape:
    engine, _, words = spec.partition(":")
    shape = Shape(engine)
    for name, size in re.findall(r"([a-z]+)(\d*)", words):
        setattr(shape, name, int(size or 1))
    if engine == "vllm" and shape.ep:
        shape.ep = shape.tp * shape.dp
    return shape


def engine_ranks(config: dict, hf: dict, spec: str) -> list[dict[str, Param]]:
    """`hf`: name -> (TensorMeta, bits). Rank = t + tp * (stage + pp * dp)."""
    shape = parse(spec)
    return [_Rank(config, hf, shape, rank).load() for rank in range(shape.tp * shape.pp * shape.dp)]


def stage_layers(shape: Shape, layers: int) -> list[range]:
    """Layers by stage. What remains: vLLM spares the last stage, SGLang gives to the last ones."""
    counts = [layers // shape.pp] * shape.pp
    for i in range(layers % shape.pp):
        counts[-1 - i if shape.engine == "sglang" else -2 - i] += 1
    ends = np.cumsum(counts).tolist()
    return [range(end - count, end) for end, count in zip(ends, counts)]


class _Rank:
    def __init__(self, config: dict, hf: dict, shape: Shape, rank: int):
        self.config, self.hf, self.shape = config, hf, shape
        self.t, rest = rank % shape.tp, rank // shape.tp
        self.stage, self.dp = rest % shape.pp, rest // shape.pp
        self.out: dict[str, Param] = {}

    def load(self) -> dict[str, Param]:
        first, last = self.stage == 0, self.stage == self.shape.pp - 1
        tied = self.config.get("tie_word_embeddings", False)
        if first:
            self.vocabulary("model.embed_tokens.weight", "model.embed_tokens.weight")
        if last:
            self.whole("model.norm.weight")
            if not tied:
                self.vocabulary("lm_head.weight", "lm_head.weight")
            elif not first:  # of a tied head with stages in between each engine makes a parameter of its own
                name = "lm_head.weight" if self.shape.engine == "sglang" else "model.embed_tokens.weight"
                self.vocabulary(name, "model.embed_tokens.weight")
        for layer in stage_layers(self.shape, self.config["num_hidden_layers"])[self.stage]:
            self.layer(f"model.layers.{layer}.")
        return self.out

    # ---- pieces of loaders ----

    def has(self, name: str) -> bool:
        return name in self.hf

    def of(self, name: str) -> np.ndarray:
        return self.hf[name][1]

    def put(self, name: str, like: str, bits: np.ndarray, filled: np.ndarray | None = None):
        assert name not in self.out
        self.out[name] = Param(self.hf[like][0].dtype, bits, np.ones(bits.shape, bool) if filled is None else filled)

    def whole(self, name: str):
        if self.has(name):
            self.put(name, name, self.of(name))

    def chunk(self, bits: np.ndarray, dim: int) -> np.ndarray:
        return np.split(bits, self.shape.tp, axis=dim)[self.t]

    def column_parallel(self, name: str):
        """torch stores [out, in]: the outputs are cut."""
        if self.has(name):
            self.put(name, name, self.chunk(self.of(name), 0))

    def row_parallel(self, name: str):
        if self.has(name):
            self.put(name, name, self.chunk(self.of(name), 1))

    def vocabulary(self, name: str, source: str):
        bits = self.of(source)
        padding = [(0, -len(bits) % 64)] + [(0, 0)] * (bits.ndim - 1)
        filled = np.pad(np.ones(bits.shape, bool), padding)
        self.put(name, source, self.chunk(np.pad(bits, padding), 0), self.chunk(filled, 0))

    # ---- a layer ----

    def layer(self, at: str):
        self.whole(at + "input_layernorm.weight")
        self.whole(at + "post_attention_layernorm.weight")
        if self.config["model_type"].startswith("deepseek"):
            self.latent_attention(at + "self_attn.")
        else:
            self.attention(at + "self_attn.")
        for module in ("mlp.", "mlp.shared_expert.", "mlp.shared_experts."):
            self.gated_mlp(at + module)
        if self.has(at + "block_sparse_moe.gate.weight"):
            self.mixture(at + "block_sparse_moe.", ("w1", "w3", "w2"))
        elif self.has(at + "mlp.gate.weight"):
            self.mixture(at + "mlp.", ("gate_proj", "up_proj", "down_proj"))
            self.whole(at + "mlp.shared_expert_gate.weight")

    def attention(self, at: str):
        for leaf in ("weight", "bias"):
            if self.has(f"{at}q_proj.{leaf}"):
                q, k, v = (self.of(f"{at}{p}_proj.{leaf}") for p in "qkv")
                parts = [self.chunk(q, 0), self.kv_heads(k), self.kv_heads(v)]
                self.put(f"{at}qkv_proj.{leaf}", f"{at}q_proj.{leaf}", np.concatenate(parts))
        self.row_parallel(at + "o_proj.weight")
        self.whole(at + "q_norm.weight")
        self.whole(at + "k_norm.weight")

    def kv_heads(self, bits: np.ndarray) -> np.ndarray:
        """The rank's heads; with more ranks than heads, neighbours have the same one."""
        heads = self.config["num_key_value_heads"]
        head_of = np.split(bits, heads)
        each = max(1, heads // self.shape.tp)
        begin = self.t * heads // self.shape.tp
        return np.concatenate(head_of[begin:begin + each])

    def latent_attention(self, at: str):
        down = [at + "q_a_proj.weight", at + "kv_a_proj_with_mqa.weight"]
        name = "fused_qkv_a_proj_with_mqa" if self.shape.engine == "sglang" else "fused_qkv_a_proj"
        self.put(f"{at}{name}.weight", down[0], np.concatenate([self.of(n) for n in down]))
        self.whole(at + "q_a_layernorm.weight")
        self.whole(at + "kv_a_layernorm.weight")
        self.column_parallel(at + "q_b_proj.weight")
        self.column_parallel(at + "kv_b_proj.weight")
        self.row_parallel(at + "o_proj.weight")

    def gated_mlp(self, at: str):
        if self.has(at + "gate_proj.weight"):
            halves = [self.chunk(self.of(f"{at}{half}_proj.weight"), 0) for half in ("gate", "up")]
            self.put(at + "gate_up_proj.weight", at + "gate_proj.weight", np.concatenate(halves))
            self.row_parallel(at + "down_proj.weight")

    def mixture(self, at: str, names: tuple[str, str, str]):
        self.whole(at + "gate.weight")
        self.whole(at + "gate.e_score_correction_bias")
        count = sum(self.has(f"{at}experts.{e}.{names[0]}.weight") for e in range(1024))
        experts, parts, part = self.experts(count)

        def stack(name: str, dim: int) -> np.ndarray:
            each = [self.of(f"{at}experts.{e}.{name}.weight") for e in experts]
            return np.stack([np.split(bits, parts, axis=dim)[part] for bits in each])

        gate, up, down = names
        engine = at + ("experts." if self.shape.engine == "sglang" else "experts.routed_experts.")
        like = f"{at}experts.0.{gate}.weight"
        self.put(engine + "w13_weight", like, np.concatenate([stack(gate, 0), stack(up, 0)], axis=1))
        self.put(engine + "w2_weight", like, stack(down, 1))

    def experts(self, count: int) -> tuple[list[int], int, int]:
        """The rank's experts, in how many parts each is cut, and which part is the rank's."""
        shape = self.shape
        if shape.engine == "sglang":  # expert parallelism inside the tensor-parallel group
            places = shape.ep or 1
            parts = shape.tp // places
            return np.split(np.arange(count), places)[self.t // parts].tolist(), parts, self.t % parts
        place = self.dp * shape.tp + self.t  # vLLM's experts see tp and dp as one group
        if shape.ep:
            return np.split(np.arange(count), shape.ep)[place].tolist(), 1, 0
        return list(range(count)), shape.tp * shape.dp, place
