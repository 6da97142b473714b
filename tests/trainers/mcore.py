"""Real megatron-core 0.16.1 models on a machine without a GPU: patched from outside, built from a config.json.

`from_hf` and `to_hf` convert between Hugging Face tensors and the global tensors of mcore's own distributed
checkpoints (layers stacked on a leading axis), from the facts in docs/layouts.md. Where a rank's tensors lie in
those is what mcore's `sharded_state_dict()` says. No code is shared with the package.
"""

from __future__ import annotations

import contextlib
from typing import Mapping

import torch
import torch.distributed as dist


def patch_for_cpu() -> None:
    """What mcore assumes of CUDA, for the CPU. Once a process."""
    torch.cuda.current_stream = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self.clone()  # always another storage, as from a GPU
    torch.nn.Module.cuda = lambda self, *_, **__: self
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    CudaRNGStatesTracker.fork = lambda self, *_, **__: contextlib.nullcontext()


def pack_what_is_scattered() -> None:
    """gloo sends the storage of columns as it lies, NCCL packs them; Megatron-Bridge's loader scatters columns."""
    scatter = dist.scatter
    dist.scatter = lambda tensor, scatter_list=None, **options: scatter(
        tensor, scatter_list and [part.contiguous() for part in scatter_list], **options)


def start(*, tp=1, pp=1, vpp=None, cp=1, ep=1, etp=None, order="tp-cp-ep-dp-pp") -> None:
    """Initialises mcore's process groups over the world that torch.distributed has."""
    from megatron.core import parallel_state
    patch_for_cpu()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, order=order)


def transformer_config(hf: Mapping, **options):
    from megatron.core.transformer import TransformerConfig
    from megatron.core import parallel_state as mpu
    experts = {}
    if expert_count(hf):
        experts = dict(num_moe_experts=expert_count(hf), moe_ffn_hidden_size=hf["moe_intermediate_size"],
                       moe_router_topk=hf["num_experts_per_tok"], moe_token_dispatcher_type="allgather",
                       moe_router_load_balancing_type="none",
                       expert_model_parallel_size=mpu.get_expert_model_parallel_world_size(),
                       expert_tensor_parallel_size=mpu.get_expert_tensor_parallel_world_size())
    tp = mpu.get_tensor_model_parallel_world_size()
    return TransformerConfig(**{**dict(
        num_layers=hf["num_hidden_layers"], hidden_size=hf["hidden_size"], ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"], num_query_groups=hf["num_key_value_heads"],
        kv_channels=head_dim(hf), add_bias_linear=False, add_qkv_bias=hf["model_type"] == "qwen2",
        qk_layernorm=hf["model_type"].startswith("qwen3"), normalization="RMSNorm",
        layernorm_epsilon=hf["rms_norm_eps"], gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, params_dtype=torch.bfloat16,
        bf16=True, pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=mpu.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=mpu.get_virtual_pipeline_model_parallel_world_size()), **experts, **options})


def head_dim(hf: Mapping) -> int:
    return hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]


def expert_count(hf: Mapping) -> int:
    """transformers 4 and 5 spell it differently; 0 for a dense model."""
    return hf.get("num_experts") or hf.get("num_local_experts") or 0


def build(hf: Mapping, **options) -> list[torch.nn.Module]:
    """This rank's model chunks, in bf16, with the local layer spec."""
    from megatron.core import parallel_state as mpu
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    config = transformer_config(hf, **options)
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    for v in range(vpp or 1):
        stage = v if vpp else None
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage)
        chunks.append(GPTModel(
            config, spec, padded_vocab(hf), hf["max_position_embeddings"],
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=hf["tie_word_embeddings"], position_embedding_type="rope",
            vp_stage=stage).to(torch.bfloat16))
    return chunks


def interleaved_rows(rows: int, size: int) -> list[int]:
    """Which row of [gate; up] lies at each place when blocks of `size` rows alternate."""
    order: list[int] = []
    for begin in range(0, rows // 2, size):
        order += range(begin, begin + size)
        order += range(rows // 2 + begin, rows // 2 + begin + size)
    return order


def sharded(chunks) -> list:
    """Every ShardedTensor of this rank, as views of the parameters, replicas included."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import apply_factories
    found = []
    for chunk in chunks:
        state = chunk.sharded_state_dict()
        apply_factories(state)
        found += [value for value in nested_values(state) if isinstance(value, ShardedTensor)]
    return found


def place(tensor) -> tuple[slice, ...]:
    """Where a ShardedTensor lies in its global tensor."""
    shape = [1] * tensor.prepend_axis_num + list(tensor.local_shape)
    return tuple(slice(begin, begin + size) for begin, size in zip(tensor.global_offset, shape))


def from_hf(hf: Mapping, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """mcore's global tensors, by the keys of its distributed checkpoints."""
    layers = range(hf["num_hidden_layers"])
    out = {"embedding.word_embeddings.weight": pad(hf, tensors["model.embed_tokens.weight"]),
           "decoder.final_layernorm.weight": tensors["model.norm.weight"]}
    out["output_layer.weight"] = pad(hf, tensors[vocabulary_head(hf)])

    def stack(key, make):
        out[f"decoder.layers.{key}"] = torch.stack([make(f"model.layers.{i}.") for i in layers])

    def each(at, name, make):  # of the experts
        return torch.stack([make(f"{at}mlp.experts.{e}.{name}") for e in range(expert_count(hf))])

    stack("self_attention.linear_proj.weight", lambda at: tensors[f"{at}self_attn.o_proj.weight"])
    stack("self_attention.linear_qkv.weight", lambda at: grouped(hf, tensors, f"{at}self_attn.", "weight"))
    stack("self_attention.linear_qkv.layer_norm_weight", lambda at: tensors[f"{at}input_layernorm.weight"])
    if hf["model_type"] == "qwen2":
        stack("self_attention.linear_qkv.bias", lambda at: grouped(hf, tensors, f"{at}self_attn.", "bias"))
    if hf["model_type"].startswith("qwen3"):
        for x in "qk":
            stack(f"self_attention.{x}_layernorm.weight", lambda at: tensors[f"{at}self_attn.{x}_norm.weight"])
    stack("mlp.linear_fc1.layer_norm_weight", lambda at: tensors[f"{at}post_attention_layernorm.weight"])
    # Transformer Engine fuses this norm into a dense layer only; the local spec is saved as if it did.
    stack("pre_mlp_layernorm.weight", lambda at: tensors[f"{at}post_attention_layernorm.weight"])
    if not expert_count(hf):
        stack("mlp.linear_fc1.weight", lambda at: gate_up(tensors, f"{at}mlp."))
        stack("mlp.linear_fc2.weight", lambda at: tensors[f"{at}mlp.down_proj.weight"])
    else:
        stack("mlp.router.weight", lambda at: tensors[f"{at}mlp.gate.weight"])
        stack("mlp.experts.experts.linear_fc1.weight", lambda at: each(at, "", lambda e: gate_up(tensors, e)))
        stack("mlp.experts.experts.linear_fc2.weight", lambda at: each(at, "down_proj.weight", tensors.__getitem__))
    return out


def to_hf(hf: Mapping, mcore: Mapping[str, torch.Tensor], names) -> dict[str, torch.Tensor]:
    """The inverse of `from_hf`, for these Hugging Face names: element numbers go through it, values come back."""
    shapes = {name: shape for name, shape in names.items()}
    numbers, first, order = {}, 0, []
    for name, shape in shapes.items():
        count = shape.numel()
        numbers[name] = torch.arange(first + 1, first + 1 + count, dtype=torch.int64).view(shape)
        order.append((name, first, count, shape))
        first += count
    places = from_hf(hf, numbers)  # 0 is padding
    flat = torch.zeros(first + 1, dtype=torch.bfloat16)
    written = torch.zeros(first + 1, dtype=torch.bool)
    for key, where in places.items():
        if key in mcore:
            flat[where] = mcore[key]
            written[where] = True
    assert written[1:].all(), "mcore's description leaves Hugging Face elements out"
    return {name: flat[1 + begin:1 + begin + count].view(shape).clone() for name, begin, count, shape in order}


def vocabulary_head(hf: Mapping) -> str:
    return "model.embed_tokens.weight" if hf["tie_word_embeddings"] else "lm_head.weight"


def padded_vocab(hf: Mapping) -> int:
    """What a bridge says; else Megatron's own default: a multiple of 128 on each tensor-parallel rank."""
    if "padded_vocab" in hf:
        return hf["padded_vocab"]
    from megatron.core import parallel_state as mpu
    multiple = 128 * mpu.get_tensor_model_parallel_world_size()
    return -(-hf["vocab_size"] // multiple) * multiple


def pad(hf: Mapping, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, 0, 0, padded_vocab(hf) - rows.shape[0]))


def grouped(hf: Mapping, tensors: Mapping[str, torch.Tensor], at: str, leaf: str) -> torch.Tensor:
    """linear_qkv: for each key-value head its query heads, its key, its value."""
    groups, size = hf["num_key_value_heads"], head_dim(hf)
    q, k, v = (tensors[f"{at}{x}_proj.{leaf}"] for x in "qkv")
    per_group = q.shape[0] // groups
    rows = []
    for g in range(groups):
        rows += [q[g * per_group:(g + 1) * per_group], k[g * size:(g + 1) * size], v[g * size:(g + 1) * size]]
    return torch.cat(rows)


def gate_up(tensors: Mapping[str, torch.Tensor], at: str) -> torch.Tensor:
    return torch.cat([tensors[f"{at}gate_proj.weight"], tensors[f"{at}up_proj.weight"]])


def load(chunks, hf: Mapping, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a Hugging Face checkpoint into this rank's parameters, where mcore says that they lie."""
    whole = from_hf(hf, tensors)
    with torch.no_grad():
        for part in sharded(chunks):
            part.data.copy_(whole[part.key][place(part)].reshape(part.data.shape))


def gather(chunks, hf: Mapping, names) -> dict[str, torch.Tensor] | None:
    """Rank 0: the Hugging Face tensors that all ranks hold together, replicas compared. Others: None."""
    mine = [(part.key, place(part), part.global_shape, part.data.detach().clone().reshape(
        [s.stop - s.start for s in place(part)])) for part in sharded(chunks)]
    everyone = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    whole, seen = {}, {}
    for key, where, shape, data in (item for rank in everyone for item in rank):
        if key not in whole:
            whole[key], seen[key] = torch.zeros(shape, dtype=data.dtype), torch.zeros(shape, dtype=torch.bool)
        known = seen[key][where]
        assert torch.equal(whole[key][where][known], data[known]), f"replicas of {key} differ"
        whole[key][where], seen[key][where] = data, True
    assert all(mask.all() for mask in seen.values())
    return to_hf(hf, whole, names)
