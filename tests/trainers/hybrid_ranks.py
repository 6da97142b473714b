"""Ranks with megatron-core 0.19's HybridModel (Transformer Engine's names by stub_te.py): a transformer whose attention and
MLP are layers of their own. Trained and saved as mcore_ranks.py does, by mcore's own description.
"""

from __future__ import annotations

import copy

import stub_te

stub_te.install()

import mcore  # noqa: E402
import mcore_ranks  # noqa: E402
import torch  # noqa: E402
import weightwire.megatron  # noqa: E402
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # noqa: E402
from megatron.core.models.hybrid.hybrid_model import HybridModel  # noqa: E402

stub_te.keep_extra_state_whole()
_STACKED = "decoder.layers."
_MLP = ("mlp.", "pre_mlp_layernorm.")


def build(hf, pattern: str, **options) -> list:
    """This rank's chunks; `pattern` as --hybrid-layer-pattern."""
    from megatron.core import parallel_state as mpu
    from megatron.core.extensions.transformer_engine import TENorm
    config = mcore.transformer_config(hf, **options)
    config.num_layers = len(pattern.replace("|", ""))
    spec = copy.deepcopy(hybrid_stack_spec)
    if config.qk_layernorm:  # mcore's own spec has no place for them
        attention = spec.submodules.attention_layer.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = TENorm
    vpp = config.virtual_pipeline_model_parallel_size
    return [HybridModel(
        config, spec, mcore.padded_vocab(hf), hf["max_position_embeddings"], pattern,
        pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=v),
        post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=v),
        share_embeddings_and_output_weights=hf["tie_word_embeddings"], position_embedding_type="rope",
        vp_stage=v).bfloat16() for v in (range(vpp) if vpp else [None])]


def halves(stacked: dict) -> dict:
    """mcore's global tensors of a HybridModel: layer 2n has the attention of a transformer's layer n, 2n + 1 its MLP, and
    no two layers share a tensor."""
    out = {}
    for key, value in stacked.items():
        if not key.startswith(_STACKED):
            out[key.replace("final_layernorm", "final_norm")] = value
            continue
        name = key.removeprefix(_STACKED)
        for n, layer in enumerate(value):
            out[f"{_STACKED}{2 * n + name.startswith(_MLP)}.{name}"] = layer
    return out


def train(rank: int, world_size: int, agent: str, checkpoint: str, out: str, sizes: dict, options: dict, pattern: str,
          spec: str, versions: int):
    """As mcore_ranks.train."""
    stacked = mcore.from_hf
    mcore.build = lambda hf, **options: build(hf, pattern, **options)
    mcore.from_hf = lambda hf, tensors: halves(stacked(hf, tensors))
    mcore_ranks.train(rank, world_size, agent, checkpoint, out, sizes, options, spec, versions)


def train_less_one(rank: int, world_size: int, agent: str, checkpoint: str, out: str, sizes: dict, pattern: str):
    """Every norm that mcore made with zero_centered_gamma is held less one."""
    stacked = mcore.from_hf
    mcore.build = lambda hf, **options: build(hf, pattern, **options)
    mcore.from_hf = lambda hf, tensors: halves(stacked(hf, tensors))
    job = mcore_ranks.Job(checkpoint, sizes, dict(layernorm_zero_centered_gamma=True))
    norms = [module.layer_norm_weight if hasattr(module, "layer_norm_weight") else module.weight
             for chunk in job.chunks for module in chunk.modules() if getattr(module, "zero_centered_gamma", False)]
    assert len(norms) == 4 * job.hf["num_hidden_layers"] + 1, len(norms)  # input, queries, keys, before the MLP; the last one
    with torch.no_grad():
        for norm in norms:
            norm.sub_(1.0)
    with weightwire.megatron.Publisher(job.chunks, checkpoint, agent=agent) as publisher:
        mcore_ranks.publish_less_one(job, publisher, norms, out)
