"""Every bridge that the installed Megatron-Bridge has, with a tiny model of the transformers class that it names: random parameters are
published through recorded layouts and arrive in an engine as Megatron-Bridge's own export has them, bit for bit.

Imports nothing heavy by itself: a parent may import it without the stubs.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil

#: Sizes that transformers' classes know, each set where the class has it.
SMALL = dict(
    hidden_size=32, n_embd=32, d_model=32, intermediate_size=48, n_inner=48, ffn_dim=48, encoder_ffn_dim=48, num_hidden_layers=2,
    n_layer=2, num_layers=2, decoder_layers=2, encoder_layers=2, num_attention_heads=4, encoder_attention_heads=4, n_head=4,
    num_heads=4, num_key_value_heads=2, head_dim=8, global_head_dim=8,
    num_global_key_value_heads=2, vocab_size=64, vocab_size_per_layer_input=64, hidden_size_per_layer_input=8,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_topk=2, moe_k=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, expert_ffn_hidden_size=16, q_lora_rank=16, kv_lora_rank=8,
    qk_rope_head_dim=8, qk_nope_head_dim=8, qk_head_dim=16, v_head_dim=8, n_group=1, topk_group=1, first_k_dense_replace=1,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, max_position_embeddings=64,
    mamba_d_ssm=32, mamba_n_heads=16, mamba_d_head=2, mamba_n_groups=2, mamba_d_state=4, depth=1, embed_dim=16, out_hidden_size=32,
    image_size=28, patch_size=14, num_mel_bins=16, pad_token_id=0, bos_token_id=1, eos_token_id=2)

#: What a class does not set of itself, or not as released models have it.
ALSO = {
    "DeepseekV4ForCausalLM": dict(rope_parameters=dict(
        main=dict(rope_type="default", rope_theta=10000.0),
        compress=dict(rope_type="yarn", rope_theta=160000.0, factor=16, original_max_position_embeddings=64))),
    "Ernie4_5_VLMoeForConditionalGeneration": dict(text_config=dict(
        rope_parameters=dict(rope_type="default", rope_theta=500000.0, mrope_section=[1, 1, 2]), moe_intermediate_size=[16, 8])),
    "Exaone4ForCausalLM": dict(tie_word_embeddings=True),
    "FalconH1ForCausalLM": dict(mamba_norm_before_gate=False),
    "Gemma4ForConditionalGeneration": dict(vision_config="Gemma4VisionConfig"),
    "Glm4vMoeForConditionalGeneration": dict(text_config=dict(head_dim=8, use_qk_norm=False)),
    "GlmMoeDsaForCausalLM": dict(first_k_dense_replace=1, moe_layer_freq=1, indexer_rope_interleave=True),
    "HYV3ForCausalLM": dict(first_k_dense_replace=1),
    "Mistral3ForConditionalGeneration": dict(text_config="Ministral3Config"),
    "NemotronForCausalLM": dict(head_dim=8, num_key_value_heads=2),
    "OlmoeForCausalLM": dict(num_key_value_heads=4),
    "DeepseekV3ForCausalLM": dict(scoring_func="sigmoid", topk_method="noaux_tc"),
    "Qwen3NextForCausalLM": dict(full_attention_interval=2),
    "Qwen3_5ForCausalLM": dict(full_attention_interval=2),
    "Qwen3_5ForConditionalGeneration": dict(text_config=dict(full_attention_interval=2)),
    "Qwen3_5MoeForCausalLM": dict(full_attention_interval=2),
    "Qwen3_5MoeForConditionalGeneration": dict(text_config=dict(full_attention_interval=2)),
    "Qwen2_5OmniForConditionalGeneration": dict(enable_audio_output=False),
    "Qwen3OmniMoeForConditionalGeneration": dict(enable_audio_output=False),
    "Qwen3VLForConditionalGeneration": dict(vision_config=dict(deepstack_visual_indexes=[0])),
    "Qwen3VLMoeForConditionalGeneration": dict(vision_config=dict(deepstack_visual_indexes=[0])),
}
#: Names that released checkpoints have, where this version of transformers saves others.
RENAMED = {
    "NemotronHForCausalLM": {"backbone.embedding.": "backbone.embeddings."},
    "Qwen2AudioForConditionalGeneration": {"language_model.model.model.": "language_model.model."},
}
#: Architectures of remote code that are a class of transformers under another name.
SAME = {"KimiK2ForCausalLM": "DeepseekV3ForCausalLM"}
#: Whose releases have MTP layers under names of their own ("mtp."), which transformers builds none of: what config.json says of it.
MTP = {"Qwen3NextForCausalLM": {}, "Qwen3_5ForCausalLM": dict(mtp_num_hidden_layers=1)}
LARGEST = 200e6  # parameters


def check(rank: int, world_size: int, agent: str, out: str, by: str) -> None:
    """Rank 0 leaves in `out` of each architecture what became of it: ["equal", number of tensors, those of the checkpoint that the
    bridge does not export], ["different", tensors], ["not built", why] or ["refused", why].

    by: "bridge" for layouts recorded from the bridge, "scheme" for weightwire's own description of the model's family, "MTP" for
    that of models with an MTP layer
    """
    import stub_kernels
    import stub_te
    stub_te.install()
    stub_kernels.install()
    import mcore
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    stub_te.keep_extra_state_whole()
    from megatron.bridge import AutoBridge
    with contextlib.suppress(ImportError):  # older ones have none
        from megatron.bridge.models.minimax_m2 import minimax_m2_bridge
        minimax_m2_bridge.torch = _OnCpu()

    mcore.pack_what_is_scattered()
    mcore.start(tp=world_size, ep=world_size, etp=1)
    rows: dict[str, list] = {}
    only = os.environ.get("WEIGHTWIRE_BRIDGES", "").split()
    for number, name in enumerate(sorted(AutoBridge.list_supported_models()), 1):
        if (only and name not in only) or (by == "MTP" and name not in MTP):
            continue
        also = MTP[name] if by == "MTP" else None
        rows[name] = row(rank, pathlib.Path(out).parent / f"model-{name}", lambda folder: save(name, folder, also, by == "MTP"),
                         lambda folder: _one(rank, world_size, agent, folder, number, by))
        if rank == 0:
            print(name, *rows[name], flush=True)
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(rows))


def row(rank: int, folder: pathlib.Path, make, one) -> list:
    """Rank 0 makes a checkpoint, make(folder), which says why there is none; then all: what becomes of it, one(folder)."""
    import torch.distributed as dist
    why = [make(folder) if rank == 0 else None]
    dist.broadcast_object_list(why)
    made = ["not built", why[0]] if why[0] else one(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return made


class _OnCpu:
    """torch, for a loader that asks for the device "cuda" by its number."""

    def __getattr__(self, name):
        import torch
        return (lambda *_: torch.empty(0).device) if name == "device" else getattr(torch, name)


def save(name: str, folder: pathlib.Path, also: dict | None = None, mtp: bool = False) -> str | None:
    """A tiny checkpoint of the class `name`, whose config has `also`, too, and with `mtp` an MTP layer; returns why there is none."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
    cls = getattr(transformers, SAME.get(name, name), None)
    if cls is None:
        return f"no such class in transformers {transformers.__version__}"
    try:
        config = _shrunk(cls.config_class(), {**ALSO.get(name, {}), **(also or {})})
        config.architectures = [name]
        with torch.device("meta"):
            size = sum(p.numel() for p in cls(config).parameters())
        if size > LARGEST:
            return f"transformers builds none below {size / 1e6:.0f} M parameters"
        model = cls(config).to(torch.bfloat16)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.randn(tensor.shape) * 0.1)
        model.save_pretrained(folder)
    except Exception as error:
        return f"transformers does not build it: {type(error).__name__}: {error}"
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for old, new in RENAMED.get(name, {}).items():
        tensors = {key.replace(old, new): tensor for key, tensor in tensors.items()}
    if mtp:
        tensors.update(_mtp_of(tensors))
    # As released checkpoints, and megatron-core, have it.
    tensors = {key: tensor.float() if key.endswith(("e_score_correction_bias", "expert_bias")) else tensor for key, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return None


def _mtp_of(tensors):
    """As releases of Qwen3-Next and Qwen3.5 have it: a layer like the last one, which has attention, and what goes before and after."""
    import torch
    last = [name for name in tensors if name.startswith("model.layers.1.")]
    assert "model.layers.1.self_attn.q_proj.weight" in last
    like = {name.replace("model.layers.1.", "mtp.layers.0."): tensors[name] for name in last}
    norm = tensors["model.norm.weight"]
    like |= {"mtp.fc.weight": torch.empty(len(norm), 2 * len(norm), dtype=norm.dtype), "mtp.norm.weight": norm,
             "mtp.pre_fc_norm_embedding.weight": norm, "mtp.pre_fc_norm_hidden.weight": norm}
    return {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in like.items()}


def _shrunk(config, also):
    import transformers
    for key, value in also.items():
        if isinstance(value, str) and value.endswith("Config"):
            setattr(config, key, getattr(transformers, value)())
    fixed = {key for key in dir(type(config)) if isinstance(getattr(type(config), key, None), property)}
    for key, value in SMALL.items():
        old = getattr(config, key, None)
        if key not in fixed and old is not None and not isinstance(old, (list, tuple, dict)):
            setattr(config, key, value)
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        kinds = getattr(config, key, None)
        if isinstance(kinds, list) and kinds and getattr(config, "attribute_map", {}).get(key, key) not in fixed:
            setattr(config, key, [kinds[0], kinds[-1]])
    for key in getattr(type(config), "sub_configs", {}):
        if hasattr(getattr(config, key, None), "to_dict"):
            _shrunk(getattr(config, key), also.get(key) if isinstance(also.get(key), dict) else {})
    for key, value in also.items():
        if not hasattr(getattr(config, key, None), "to_dict"):
            setattr(config, key, value)
    return config


def _one(rank: int, world_size: int, agent: str, folder: pathlib.Path, version: int, by: str) -> list:
    """Builds the model of megatron-core, publishes it, and compares what arrived with the bridge's export."""
    import torch
    from megatron.bridge import AutoBridge
    from megatron.core.transformer.enums import AttnBackend

    import weightwire.megatron
    import weightwire.megatron_bridge

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # megatron-core sets them for one model, and the next one may want others
    models, want, why = None, {}, None
    step = "megatron-core or its bridge"
    try:
        bridge = AutoBridge.from_hf_pretrained(folder)
        provider = bridge.to_megatron_provider(load_weights=False)
        options = dict(
            use_cpu_initialization=True, gradient_accumulation_fusion=False, pipeline_dtype=torch.bfloat16, should_pad_vocab=True,
            make_vocab_size_divisible_by=1, tensor_model_parallel_size=world_size, moe_token_dispatcher_type="allgather",
            moe_permute_fusion=False, moe_shared_expert_overlap=False, attention_backend=AttnBackend.auto,
            sequence_parallel=world_size > 1, expert_tensor_parallel_size=1,
            expert_model_parallel_size=world_size if provider.num_moe_experts else 1)
        for key, value in options.items():
            setattr(provider, key, value)
        if by == "MTP":
            provider.mtp_num_layers = 1
        provider.finalize()
        models = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
        step = "the bridge's own loader"
        bridge.load_hf_weights(models, str(folder))
        step = "the bridge's own export"
        want = {name: tensor.clone() for name, tensor in bridge.export_hf_weights(models, cpu=True, show_progress=False)}
    except Exception as error:
        why = f"{step}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"

    def opened():
        if by in ("scheme", "MTP"):
            return weightwire.megatron.Publisher(models, bridge.hf_pretrained.config, agent=agent)
        return weightwire.megatron_bridge.Publisher(bridge, models, agent=agent)

    return not_built(why) or published(rank, agent, folder, version, want, opened)


def not_built(why: str | None) -> list | None:
    """What one rank could not build, none has."""
    import torch.distributed as dist
    everyone = [why] * dist.get_world_size()
    dist.all_gather_object(everyone, why)
    return ["not built", next(filter(None, everyone))] if any(everyone) else None


def published(rank: int, agent: str, folder: pathlib.Path, version: int, want: dict, opened) -> list:
    """What arrives in an engine of what the publisher `opened()` sends, compared with `want`, the framework's own export."""
    import torch.distributed as dist
    from weightwire import NotReadyError, RefusedError, Subscriber, boxes
    from weightwire.hf_tensors import checkpoint_tensors

    whole = {meta.name: meta for meta in checkpoint_tensors(folder)}
    said: list = [None]
    publisher = engine = None
    try:
        publisher = opened()
        if rank == 0:
            wanted = [whole[name] for name in want]
            engine = Subscriber(group="engine", rank=0, world_size=1, agent=agent)
            engine.bind_submission(boxes.submission(whole, [boxes.whole(meta) for meta in wanted]))
        dist.barrier()
        release = publisher.publish(version)
        if rank == 0:
            offer = engine.wait_offer(20)
            if offer is None:
                release.wait_released(timeout=1)  # says why
            got = engine.flip(offer)
            different = [name for name, tensor in want.items() if not _equal(got[name], tensor)]
            engine.acknowledge(offer)
            said = [["different", different] if different or got.keys() != want.keys() else
                    ["equal", len(want), sorted(whole.keys() - want.keys())]]
        release.wait_released(timeout=30)
    except (NotReadyError, RefusedError) as error:
        said = [["refused", str(error)]]
    finally:
        for one in (engine, publisher):
            if one is not None:
                one.close()
    dist.broadcast_object_list(said)
    return said[0]


def _equal(got, want) -> bool:
    import numpy as np
    import torch
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
    bits = want.detach().contiguous().reshape(-1).view(kind).numpy()
    return got.dtype.itemsize == bits.itemsize and np.array_equal(got.reshape(-1).view(bits.dtype), bits)
