"""What one engine rank asks weightwire for, and how its staged bytes become torch tensors."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import torch

from weightwire.adapter import as_tensor
from weightwire.memory import Arrays, TensorMeta
from weightwire.vllm import install, loading
from weightwire.vllm.geometry import row_major
from weightwire.vllm.tracer import Probe

log = logging.getLogger("weightwire.vllm")
DRAFT = "draft:"  # prefix of a draft model's tensors in the stage
_CHECKPOINT = "hf:"  # prefix of tensors that go through the loader
# MTP layers store copies of these under names of their own; weightwire knows a tensor once.
_COPY = re.compile(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
_ORIGINAL = {"embed_tokens": "model.embed_tokens.weight", "shared_head.head": "lm_head.weight"}


@dataclass
class Target:
    """One model of the rank (the main one, or the draft) and the form in which it takes its weights."""

    prefix: str
    mode: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    observed: list[TensorMeta] = field(default_factory=list)
    windows: Mapping[str, Sequence[tuple[int, int]]] = field(default_factory=dict)
    checkpoint: Mapping[str, TensorMeta] = field(default_factory=dict)
    filled: frozenset[str] = frozenset()  #: the model's parameters that a checkpoint fills, by their own names

    def tensors(self, staged: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What this model's install takes, from all staged tensors of the rank."""
        if self.mode == "fused":
            return {meta.name.removeprefix(self.prefix): staged[meta.name] for meta in self.observed}
        out = {}
        for name, window in self.windows.items():
            whole, held = self.checkpoint[name], staged[self.prefix + _CHECKPOINT + name]
            out[name] = held if held.shape == whole.shape else Probe(
                name, whole.shape, held.dtype, fetch=install.fetch_window(held, window))
        return out

    def installer(self, model: torch.nn.Module, model_config: Any) -> install.Fused | install.Loader:
        return (install.Fused if self.mode == "fused" else install.Loader)(model, model_config)


def target_of(model: torch.nn.Module, checkpoint: Sequence[TensorMeta], mode: str, prefix: str = "") -> Target:
    """Records the model's loader and says what this rank needs in `mode`; see docs/vllm.md."""
    by_name = {meta.name: meta for meta in checkpoint}
    trace = loading.trace(model, checkpoint)
    if trace.whole and mode == "fused":
        log.warning("weightwire: mode fused is not possible for this model, hf_sharded is used: %s",
                    "; ".join(trace.whole.values()))
        mode = "hf_sharded"
    target = Target(prefix, mode, checkpoint=by_name, filled=frozenset(row["param"] for row in trace.rows))
    if mode == "fused":
        rows = [{**row, "src": _original(row["src"]), "param": prefix + row["param"]} for row in trace.rows]
        target.rows = list({repr(row): row for row in rows}.values())  # a copy and its original are one
        target.observed = [TensorMeta(prefix + m.name, m.dtype, m.shape) for m in trace.params]
        return target
    whole = {name: [(0, extent) for extent in by_name[name].shape] for name in trace.whole}
    read = install.windows(trace.rows, {name: meta.shape for name, meta in by_name.items()})
    if mode == "hf_full":
        read = {name: [(0, extent) for extent in by_name[name].shape] for name in read}
    target.windows = {**read, **whole}
    for name, window in target.windows.items():
        meta, shape = by_name[name], [size for _, size in window]
        param = prefix + _CHECKPOINT + name
        target.rows.append(dict(
            src=_original(name), param=param, offset=0, shape=shape, stride=list(row_major(shape)),
            dtype=str(loading.TORCH[meta.dtype]).removeprefix("torch."),
            ops=[("narrow", dim, start, size) for dim, (start, size) in enumerate(window) if size != meta.shape[dim]]))
        target.observed.append(TensorMeta(param, meta.dtype, tuple(shape)))
    return target


def _original(name: str) -> str:
    copy = _COPY.fullmatch(name)
    return _ORIGINAL[copy[1]] if copy else name


def originals(checkpoint: Sequence[TensorMeta]) -> list[TensorMeta]:
    """The checkpoint's tensors as rows name them: each once, without the copies that MTP layers have of them."""
    return list({name: TensorMeta(name, meta.dtype, meta.shape)
                 for meta in checkpoint for name in [_original(meta.name)]}.values())


def as_torch(arrays: Arrays, observed: Sequence[TensorMeta]) -> dict[str, torch.Tensor]:
    """Views of staged arrays; no copy. They are read-only memory: never write to them."""
    return {meta.name: as_tensor(arrays[meta.name], meta) for meta in observed}


def spec_of(parallel_config: Any, replicas: int) -> str:
    """The engine's parallel layout in weightwire's words. `replicas`: data parallel ones, of which a dense model's workers do not know."""
    words = [f"tp{parallel_config.tensor_parallel_size}"]
    if parallel_config.pipeline_parallel_size > 1:
        words.append(f"pp{parallel_config.pipeline_parallel_size}")
    if replicas > 1:
        words.append(f"dp{replicas}")
    if parallel_config.enable_expert_parallel:
        words.append("ep")
    return "vllm:" + ",".join(words)
