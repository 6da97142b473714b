"""Options of megatron-core that move, permute, shift or delay parameters: what is done about each, or that it is refused.

Facts from megatron-core 0.16.1 and 0.19.2: transformer_config.py, distributed/param_and_grad_buffer.py,
transformer/moe/experts.py. docs/trainers.md has the table for users.
"""

from __future__ import annotations

import logging
import re
from dataclasses import MISSING, replace
from typing import Any, Callable, Container, Iterator, Mapping, Sequence

import torch

from weightwire.adapter import is_freed, refuse
from weightwire.megatron_state import OUT_NORM, chunks_of, unwrap
from weightwire.memory import TensorMeta

log = logging.getLogger("weightwire")

#: Writes a parameter into shared memory of its shape as Hugging Face has it.
Write = Callable[[torch.Tensor, torch.Tensor], None]

_INTERLEAVED = ((".experts.", "moe_mlp_glu_interleave_size"),
                (".shared_experts.", "moe_shared_expert_glu_interleave_size"))
#: What mcore makes with its config, so that layernorm_zero_centered_gamma is theirs, too; final_norm is HybridModel's.
_NORMS = ("layernorm.weight", "layer_norm_weight", ".enorm.weight", ".hnorm.weight", ".final_norm.weight", ".indexer.k_norm.weight")
_MAMBAS = ".mixer.norm.weight"  # of a class of its own, which knows no such option
#: Model types (of the text part) whose checkpoints hold w - 1 in these norms themselves, as transformers' classes add 1; and
#: those where a field of the config says whether they do, which they do without it.
_ZERO_CENTRED = frozenset((
    "gemma", "gemma2", "gemma3", "gemma3_text", "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "recurrent_gemma", "t5gemma", "t5gemma2", "vaultgemma"))
_ZERO_CENTRED_FIELD = {"step3p5": "zero_centered", "step3p7": "zero_centered", "minimax_m3": "use_gemma_norm"}
#: Model types whose checkpoints hold w. Of any other type it is not known.
_PLAIN = frozenset((
    "bailing_moe_v2", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "ernie4_5", "ernie4_5_moe", "exaone4",
    "exaone_moe", "falcon_h1", "gemma4", "gemma4_text", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v_moe_text", "glm_moe_dsa",
    "gpt_oss", "granite", "granitemoe", "hy_v3", "kimi_k2", "kimi_k25", "llama", "llama4", "llama4_text", "mimo", "mimo_v2_flash",
    "minimax_m2", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nemotron_h", "olmo2", "olmo3", "olmoe", "phi3",
    "phimoe", "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
    "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3"))
#: Refused where they are set: (option, what it is when nothing is asked of it, what becomes of the parameters, remedy).
_REFUSED: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("moe_single_grouped_weight", (False,), "all experts of a rank are one parameter", "unset it"),
    ("moe_single_grouped_bias", (False,), "all biases of a rank's experts are one parameter", "unset it"),
    ("gtp_weight_remat_size", (1,), "weights are cut once more, over data-parallel ranks",
     "set it to 1, and leave out tensor_parallel_num_weight_shards"),
    ("expert_gtp_weight_remat_size", (1,), "experts are cut once more, over data-parallel ranks",
     "set it to 1, and leave out expert_tensor_parallel_num_weight_shards"),
    ("use_grouped_gemm_for_dense_mlp", (False,), "gate and up of dense layers alternate, depending on the kernels in use", "unset it"),
    ("mtp_use_repeated_layer", (False,), "one MTP layer stands for several", "unset it"),
    ("use_mup", (False,), "the forward pass scales embeddings and logits, which no checkpoint of the model's type says",
     "unset it"),
    ("fp8_param", (False,), "parameters are quantized", "keep parameters in bf16 (fp8 for the matrix products alone is read)"),
    ("fp4_param", (False,), "parameters are quantized", "keep parameters in bf16"),
)
#: The same of DistributedDataParallelConfig.
_REFUSED_BY_DDP: tuple[tuple[str, tuple[Any, ...], str, str], ...] = (
    ("reuse_grad_buf_for_mxfp8_param_ag", (False,), "parameters are gathered through the memory of gradients: to gather them now "
     "would take gradients for parameters", "unset it"),
    ("fp8_param_gather", (False,), "parameters are quantized", "keep parameters in bf16 (fp8 for the matrix products alone is read)"),
    ("fp4_param_gather", (False,), "parameters are quantized", "keep parameters in bf16"),
)
#: What adapters of Megatron-Bridge and NeMo put around a layer and beside it.
_ADAPTERS = re.compile(r"(?:^|\.)(?:to_wrap|adapters?|lora_[^.]*)\.")
#: Model types whose rotary embedding is not interleaved, in Megatron or in Hugging Face.
_HALVES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma", "glm4_moe", "gpt_oss")


def ddp_wrappers(chunks: Sequence[Any]) -> list[Any]:
    """The DistributedDataParallel of each chunk, also where the model inside was passed: mcore's hook knows its owner."""
    found: list[Any] = []
    for chunk in chunks:
        owners = [chunk]
        while getattr(owners[-1], "module", None) is not None:
            owners.append(owners[-1].module)
        owners += [owner for hook in getattr(owners[-1], "_forward_pre_hooks", {}).values() for owner in _owners(hook)]
        for owner in owners:
            if hasattr(owner, "start_param_sync") and not any(owner is one for one in found):
                found.append(owner)  # once: whoever is here is gathered
    return found


def _owners(hook: Any) -> Iterator[Any]:
    if "DistributedDataParallel." in getattr(hook, "__qualname__", ""):
        for cell in hook.__closure__ or ():
            yield cell.cell_contents


def gather_delayed(chunks: Sequence[Any]) -> None:
    """With `overlap_param_gather` the optimizer leaves each rank's parameters to be gathered at the next forward pass: they
    are gathered now. A collective of the data-parallel group then, so every rank must come here; else nothing.

    RefusedError: parameters are offloaded, and whether they were gathered before is not known.
    """
    for wrapper in ddp_wrappers(chunks):
        if not getattr(getattr(wrapper, "ddp_config", None), "overlap_param_gather", False):
            continue
        if any(is_freed(parameter) for parameter in wrapper.parameters()):
            if all(_gathered(wrapper)):
                continue
            raise refuse("overlap_param_gather is set and parameters are offloaded: what the offloading kept may be older than "
                         "the optimizer's last step",
                         remedy="call start_param_sync(force_sync=True) of each chunk before offloading, or unset "
                                "overlap_param_gather")
        if wrapper.ddp_config.use_distributed_optimizer:
            wrapper.start_param_sync(force_sync=True)
        else:
            _gather_layer_wise(wrapper)


def _gather_layer_wise(wrapper: Any) -> None:
    """mcore's LayerWiseDistributedOptimizer without a layout of its own gathers through the memory of the gradients, and
    leaves zeros there: whoever publishes between two backward passes keeps what was accumulated."""
    for group in _bucket_groups(wrapper):
        if getattr(group, "param_gather_handle", None) is not None:
            # It was begun already. Only this takes what arrives out of the gradients' memory; start_param_sync would drop it.
            group.finish_param_sync(skip_next_bucket_dispatch=True)
            continue
        kept = [(bucket.grad_data, bucket.grad_data.clone()) for bucket in group.buckets]
        group.start_param_sync(force_sync=True)
        for gradients, before in kept:
            gradients.copy_(before)


def _bucket_groups(wrapper: Any) -> list[Any]:
    return [*getattr(wrapper, "bucket_groups", ()), *getattr(wrapper, "expert_parallel_bucket_groups", ())]


def _gathered(wrapper: Any) -> Iterator[bool]:
    for group in _bucket_groups(wrapper):
        yield bool(getattr(group, "param_gather_dispatched", False)) and getattr(group, "param_gather_handle", 1) is None


def checked(models: Any) -> tuple[list[Any], list[Any]]:
    """This rank's chunks as they were passed, and the models inside their wrappers, which `check` took."""
    chunks = chunks_of(models)
    inner = [unwrap(chunk) for chunk in chunks]
    check(chunks, inner)
    return chunks, inner


def check(chunks: Sequence[Any], models: Sequence[Any]) -> None:
    """chunks: as they were passed; models: inside their wrappers. RefusedError names the option that is not read. Options
    that weightwire has never heard of and that are set are named once, in a warning."""
    for chunk, model in zip(chunks, models):
        _check_wrappers(chunk, model)
        config = getattr(model, "config", None)
        _check_options(config, _REFUSED)
        if "quantile_balancing" in _strings(getattr(config, "moe_router_load_balancing_type", "")):
            raise refuse("moe_router_load_balancing_type=quantile_balancing: routers choose experts by a bias of their own (qb_beta), "
                         "which no checkpoint of the model's type has", remedy="balance by the auxiliary loss, or by "
                         "moe_router_enable_expert_bias where the model has a correction")
        _warn_unknown(config, _KNOWN)
        for wrapper in ddp_wrappers([chunk]):
            ddp = getattr(wrapper, "ddp_config", None)
            _check_options(ddp, _REFUSED_BY_DDP)
            _warn_unknown(ddp, _KNOWN_OF_DDP)
        _check_adapters(model)
        for name, parameter in model.named_parameters():
            if type(parameter.data) is not torch.Tensor:
                raise refuse(f"it is a {type(parameter.data).__name__}, not a plain tensor", tensor=name,
                             remedy="keep parameters in bf16, fp16 or fp32")


def _check_options(config: Any, refused: Sequence[tuple[str, tuple[Any, ...], str, str]]) -> None:
    for option, unset, what, remedy in refused:
        value = getattr(config, option, unset[0])
        if value not in unset:
            raise refuse(f"{option}={value}: {what}, which weightwire does not read", remedy=remedy)


def _strings(value: Any) -> Sequence[str]:
    return [value] if isinstance(value, str) else value or []


def _check_adapters(model: Any) -> None:
    """Engines would have the weights without them: by name nothing is missing."""
    for at, module in model.named_modules():
        kind = type(module)
        names = (f"{at}.{name}" if at else name for name, _ in module.named_parameters(recurse=False))
        wrapped = next((name for name in names if _ADAPTERS.search(name)), None)
        if wrapped or kind.__module__.startswith("megatron.bridge.peft."):
            raise refuse(f"it belongs to an adapter (a {kind.__name__}): engines would have the weights without it",
                         tensor=wrapped or at, remedy="publish what your exporter gives, merged (Megatron-Bridge: "
                         "bridge.export_hf_weights(models)), through weightwire.torch")


def _check_wrappers(chunk: Any, model: Any) -> None:
    while chunk is not None:
        if "fsdp" in type(chunk).__module__.lower() or "FullySharded" in type(chunk).__name__:
            raise refuse(f"the model is in {type(chunk).__name__} (Megatron-FSDP or --use-torch-fsdp2): its parameters are cut "
                         "over the data-parallel ranks as well",
                         remedy="train with the distributed optimizer instead, or publish what the model exports through "
                                "weightwire.torch")
        chunk = getattr(chunk, "module", None)
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise refuse(f"it is a {type(parameter).__name__} of torch's FSDP2 (--use-torch-fsdp2) or Megatron-FSDP", tensor=name,
                         remedy="train with the distributed optimizer instead, or publish what the model exports through "
                                "weightwire.torch")


def fixed_dtype(meta: TensorMeta) -> TensorMeta:
    """`meta` with the dtype that it is published in, whenever that is: Float16Module makes the routers' correction bf16, and
    mcore's first forward pass fp32 again."""
    return replace(meta, dtype="F32") if meta.name.endswith(".expert_bias") else meta


def refuse_transforms(models: Sequence[Any], config: Mapping[str, Any]) -> None:
    """For who takes parameters as they lie: RefusedError where the trainer holds other elements than the layout says."""
    for model in models:
        for name, parameter in model.named_parameters():
            if transform(model.config, config, name, parameter.shape) is not None:
                raise refuse(f"{_option_of(model.config, name)} is set: the trainer holds other elements than its layout says",
                             tensor=name, remedy="unset it, or save by the trainer's own means")


def _option_of(options: Any, name: str) -> str:
    if name.endswith((*_NORMS, OUT_NORM)):
        return "layernorm_zero_centered_gamma"
    return next(option for part, option in _INTERLEAVED if part in name)


def transform(options: Any, config: Mapping[str, Any], name: str, shape: Sequence[int], *, exported: bool = False) -> Write | None:
    """What makes Hugging Face's elements of the parameter `name`; None: it holds them. options: mcore's; config: the model's.
    exported: a bridge made the model and maps the parameter as it is, which is believed where nothing is known of its type.

    RefusedError: an option permutes or shifts it in a way that is not known.
    """
    if name.endswith(_NORMS):
        return _centred(options, config, name, exported)
    if name.endswith("norm.weight") and not exported and getattr(options, "layernorm_zero_centered_gamma", False):
        if name.endswith(OUT_NORM):
            return _add_one
        if not name.endswith(_MAMBAS):
            raise refuse("layernorm_zero_centered_gamma is set, and it is not known whether mcore holds this norm less one",
                         tensor=name, remedy="unset it, or publish what your exporter gives through weightwire.torch")
    if "linear_fc1" in name and getattr(options, "gated_linear_unit", False):
        for part, option in _INTERLEAVED:
            size = getattr(options, option, None) if part in name else None
            if "shared" in option and not getattr(options, "use_grouped_gemm_for_shared_expert", True):
                continue  # mcore 0.19 looks at it only with that
            if size is not None:
                return _interleaved(option, int(size), name, shape)
    elif name.endswith(".experts.weight1") and getattr(options, "moe_mlp_glu_interleave_size", None) is not None:
        raise refuse("moe_mlp_glu_interleave_size is set, which legacy grouped experts do not have", tensor=name,
                     remedy="unset it")
    if ".linear_q" in name and getattr(options, "rotary_interleaved", False):
        model_type = str(config.get("model_type", ""))
        if not getattr(options, "multi_latent_attention", False) and (not model_type or model_type.startswith(_HALVES)):
            raise refuse(f"rotary_interleaved is set, and {model_type or 'a model of unknown type'} has its heads in two halves: "
                         "rows of queries and keys would be in another order", tensor=name, remedy="unset it")
    return None


def _centred(options: Any, config: Mapping[str, Any], name: str, exported: bool) -> Write | None:
    text = config.get("text_config") or config
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    ours, theirs = bool(getattr(options, "layernorm_zero_centered_gamma", False)), _checkpoints_hold_less_one(model_type, text)
    if theirs is None:
        if not ours or exported:
            return None
        raise refuse(f"layernorm_zero_centered_gamma is set, and it is not known whether {model_type or 'a model of unknown type'} "
                     "has w or w - 1 in its checkpoints", tensor=name,
                     remedy="unset it, or publish what your exporter gives through weightwire.torch")
    if ours == theirs:
        return None
    if theirs:
        raise refuse(f"layernorm_zero_centered_gamma is not set, and {model_type}'s checkpoints hold w - 1",
                     tensor=name, remedy="set it (--apply-layernorm-1p)")
    return _add_one


def _checkpoints_hold_less_one(model_type: str, config: Mapping[str, Any]) -> bool | None:
    """None: it is not known."""
    if model_type in _ZERO_CENTRED_FIELD:
        return bool(config.get(_ZERO_CENTRED_FIELD[model_type], True))
    return True if model_type in _ZERO_CENTRED else False if model_type in _PLAIN else None


def transform_exported(model: Any, config: Mapping[str, Any], name: str, shape: Sequence[int]) -> Write | None:
    """As transform, for a model that a bridge made. A tower has options of its own: its norms may be held whole where the text's
    are not."""
    options = _owner(model, name)
    text = getattr(getattr(model, "language_model", model), "config", None)
    ours, its = (bool(getattr(one, "layernorm_zero_centered_gamma", False)) for one in (options, text))
    if ours and not its:
        raise refuse("layernorm_zero_centered_gamma is set for this part of the model and not for its text part", tensor=name,
                     remedy="unset it")
    if its and not ours and name.endswith(_NORMS):
        return None
    return transform(options, config, name, shape, exported=True)


def _owner(model: Any, name: str) -> Any:
    """The options of the innermost module that has its own among those around the parameter `name`."""
    found, module = getattr(model, "config", None), model
    for part in name.split(".")[:-1]:
        module = getattr(module, part, None)
        own = getattr(module, "config", None)
        if hasattr(own, "layernorm_zero_centered_gamma"):
            found = own
    return found


def _add_one(into: torch.Tensor, tensor: torch.Tensor) -> None:
    into.copy_(tensor + 1)  # rounds as Megatron-Bridge's export does, in the parameter's dtype


def _interleaved(option: str, size: int, name: str, shape: Sequence[int]) -> Write | None:
    if size < 1 or shape[0] % (2 * size):
        raise refuse(f"{option}={size} does not divide the {shape[0] // 2} rows of gate and up", tensor=name,
                     remedy=f"choose an {option} that does")
    if shape[0] == 2 * size:
        return None  # one block of each
    if ".local_experts." in name:
        raise refuse(f"{option}={size} is set, and these are not grouped experts, where mcore does not look at it: how their rows "
                     "lie is not known", tensor=name, remedy="unset it, or set moe_grouped_gemm")
    blocks = shape[0] // (2 * size)

    def write(into: torch.Tensor, tensor: torch.Tensor) -> None:
        rest = tensor.shape[1:]
        into.view(2, blocks, size, *rest).copy_(tensor.view(blocks, 2, size, *rest).transpose(0, 1))

    return write


_warned: set[str] = set()


def _differs(value: Any, default: Any) -> bool:
    try:
        return bool(value != default)
    except Exception:  # of a kind that cannot be compared (an array)
        return True


def _warn_unknown(config: Any, known: Container[str]) -> None:
    found = []
    for kind in type(config).__mro__:
        if not kind.__module__.startswith("megatron.core."):
            continue
        for name, field in getattr(kind, "__dataclass_fields__", {}).items():
            if name in known or name in found or not hasattr(config, name):
                continue
            default = field.default if field.default is not MISSING else (
                field.default_factory() if field.default_factory is not MISSING else None)
            if _differs(getattr(config, name), default):
                found.append(name)
    told = [f"{name}={getattr(config, name)!r}" for name in found if name not in _warned]
    _warned.update(found)
    if told:
        log.warning("weightwire: megatron-core has options that this version does not know: %s. If one moves, permutes or shifts "
                    "parameters, what is published is wrong: compare a version with the trainer's own export", ", ".join(told))


#: Of 0.16 and 0.19: these do not say where an element lies or what it is, or are read above, or by the names and shapes
#: that they lead to.
_KNOWN = frozenset("""
    _cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func
    activation_func_clamp_value activation_func_fp8_input_store activation_offload_fraction add_bias_linear add_qkv_bias
    apply_query_key_layer_scaling apply_residual_connection_post_layernorm apply_rope_fusion
    async_tensor_model_parallel_allreduce attention_backend attention_dropout attention_output_gate attention_softmax_in_fp32
    autocast_dtype barrier_with_L1_time batch_invariant_mode batch_p2p_comm batch_p2p_sync beta_fast beta_slow bf16
    bias_activation_fusion bias_dropout_fusion cache_mla_latents calculate_per_token_loss clone_scatter_output_in_embedding
    config_logger_dir context_parallel_size cp_comm_type cpu_offloading cpu_offloading_activations
    cpu_offloading_double_buffering cpu_offloading_num_layers cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights
    cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_modules cuda_graph_retain_backward_graph
    cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_warmup_steps deallocate_pipeline_outputs
    defer_embedding_wgrad_compute delay_offload_until_cuda_graph delay_wgrad_compute delta_offload_bytes_across_pp_ranks
    deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache distribute_saved_activations
    dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_n_heads
    dsa_indexer_rope_interleaved dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset
    dsa_indexer_topk dsa_indexer_topk_freq dsa_indexer_use_sparse_loss dsa_kernel_backend embedding_init_method
    embedding_init_method_std enable_autocast enable_cuda_graph ep_overlap_early_attn_memory_release
    experimental_attention_variant experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size
    expert_model_parallel_size expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size external_cuda_graph
    ffn_hidden_size finalize_model_grads_func fine_grained_activation_offloading fine_grained_offloading_max_inflight_offloads
    first_last_layers_bf16 flash_attention_version flash_decode fp16 fp32_residual_connection fp4 fp4_param
    fp4_quantizer_factory fp4_recipe fp8 fp8_amax_compute_algo fp8_amax_history_len fp8_dot_product_attention fp8_interval
    fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param fp8_quantizer_factory fp8_recipe fp8_wgrad
    fused_residual_rmsnorm fused_single_qkv_rope gated_linear_unit glu_linear_offset grad_scale_func grad_sync_func
    gradient_accumulation_fusion gtp_weight_remat_size hetereogenous_dist_checkpoint heterogeneous_block_specs hidden_dropout
    hidden_size hierarchical_context_parallel_sizes high_priority_a2a_comm_stream hybrid_context_parallel
    inference_cuda_graph_scope inference_disable_triton_nvls_kernels inference_fuse_tp_communication
    inference_grouped_gemm_backend inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
    inference_rng_tracker inference_sampling_seed init_method init_method_std init_model_with_meta_device is_hybrid_model
    kitchen_attention_backend kv_channels kv_lora_rank layernorm_epsilon layernorm_zero_centered_gamma linear_attention_freq
    linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim
    log_max_attention_logit mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype
    masked_softmax_fusion max_seqlen_per_dp_cp_rank memory_efficient_layer_norm microbatch_group_size_per_vp_stage
    min_offloaded_tensor_size mla_down_proj_fusion mlp_chunks_for_prefill mlp_chunks_for_training moe_apply_probs_on_input
    moe_aux_loss_coeff moe_deepep_num_sms moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor
    moe_expert_rank_capacity_factor moe_extended_tp moe_ffn_hidden_size moe_flex_dispatcher_backend
    moe_flex_dispatcher_num_sms moe_grad_scale_func moe_grouped_gemm moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
    moe_hybridep_pad_uneven_dispatch_inputs moe_input_jitter_eps moe_latent_size moe_layer_freq moe_layer_recompute
    moe_mlp_glu_interleave_size moe_ncclep_static_shape moe_ncclep_zero_copy moe_pad_expert_input_to_capacity
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
    moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
    moe_router_force_biased moe_router_force_load_balancing moe_router_fusion moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk
    moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate
    moe_shared_expert_glu_interleave_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
    moe_single_grouped_bias moe_single_grouped_weight moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
    moe_use_legacy_grouped_gemm moe_z_loss_coeff mrope_section mscale mscale_all_dim mtp_detach_heads mtp_grad_scale_func
    mtp_hybrid_override_pattern mtp_loss_scaling_factor mtp_num_layers mtp_standalone mtp_use_repeated_layer
    multi_latent_attention mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult mup_output_mult
    mup_width_mult nccl_all_reduce_for_prefill no_rope_freq no_sync_func normalization num_attention_heads num_layers
    num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    num_microbatches_with_partial_activation_checkpoints num_moe_experts num_query_groups offload_modules
    original_max_position_embeddings output_layer_init_method overlap_dispatch_backward_with_experts_wgrad
    overlap_moe_expert_parallel_comm overlap_p2p_comm overlap_p2p_comm_warmup_flush param_sync_func params_dtype
    perform_initialization persist_layer_norm pipeline_dtype pipeline_model_parallel_comm_backend
    pipeline_model_parallel_layout pipeline_model_parallel_size q_lora_rank qk_clip qk_clip_alpha qk_clip_threshold
    qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quant_recipe recompute_granularity recompute_method
    recompute_modules recompute_num_layers rope_type rotary_base rotary_interleaved rotary_percent rotary_scaling_factor
    sequence_parallel softmax_scale softmax_type symmetric_ar_type tensor_model_parallel_size
    tensor_parallel_num_weight_shards test_mode timers tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
    tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs tp_only_amax_red
    transformer_impl use_cpu_initialization use_fused_weighted_squared_relu use_grouped_gemm_for_dense_mlp
    use_grouped_gemm_for_shared_expert use_inference_optimized_layers use_kitchen use_kitchen_attention use_mamba_mem_eff_path
    use_mup use_ring_exchange_p2p use_te_activation_func use_te_rng_tracker use_transformer_engine_op_fuser v_head_dim
    variable_seq_lengths virtual_pipeline_model_parallel_size wgrad_deferral_limit window_attn_skip_freq window_size
""".split())

#: The same of DistributedDataParallelConfig.
_KNOWN_OF_DDP = frozenset("""
    align_param_gather average_in_collective bucket_size check_for_large_grads check_for_nan_in_grad
    data_parallel_sharding_strategy delay_wgrad_compute disable_symmetric_registration fp4_param_gather fp8_param_gather
    fsdp_all_gather_in_start_param_sync fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
    grad_reduce_in_fp32 gradient_reduce_div_fusion keep_fp8_transpose_cache megatron_fsdp_cuda_graph_mode
    megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype
    megatron_fsdp_main_params_dtype megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad nccl_ub num_buckets
    num_distributed_optimizer_instances outer_dp_sharding_strategy overlap_grad_reduce overlap_param_gather
    pad_buckets_for_high_nccl_busbw param_name_patterns_for_fp32_local_accumulation preserve_fp32_weights
    reduce_scatter_with_fp32_accumulation reuse_grad_buf_for_mxfp8_param_ag suggested_communication_unit_size use_custom_fsdp
    use_distributed_optimizer use_megatron_fsdp
""".split())
