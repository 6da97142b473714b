"""Every model type that the installed mbridge has, as every_bridge.py does it for Megatron-Bridge: a tiny model is published through
layouts that were recorded from mbridge's export, and arrives in an engine as that export has it, bit for bit.

Imports nothing heavy by itself: a parent may import it without the stubs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import zlib

from every_bridge import SMALL, not_built, published, row, save

MROPE = dict(type="default", rope_type="default", mrope_section=[1, 1, 2])
#: What a type needs beside every_bridge.ALSO. mbridge looks for sizes and rotary settings where older transformers had them.
ALSO = {
    "deepseek_v3": dict(num_hidden_layers=2, first_k_dense_replace=1),
    "gemma3": dict(vision_config=dict(image_size=896), mm_tokens_per_image=256),
    "glm4_moe": dict(attention_bias=True),
    "glm4v": dict(text_config=dict(rope_scaling=MROPE, partial_rotary_factor=0.5)),
    "glm4v_moe": dict(text_config=dict(rope_scaling=MROPE, first_k_dense_replace=1)),
    "mixtral": dict(head_dim=8),  # without it mbridge's export multiplies None
    "qwen2_5_vl": dict(text_config=dict(rope_scaling=MROPE)),
}
#: More of a type than its usual config has: label, type, config. The last ones come after what they disturb.
VARIANTS = (
    ("deepseek_v3 with MTP", "deepseek_v3", dict(num_hidden_layers=61, first_k_dense_replace=60, num_nextn_predict_layers=1)),
    ("mimo with MTP", "mimo", dict(num_nextn_predict_layers=1)),
    ("llama, tied", "llama", dict(tie_word_embeddings=True)),
    ("qwen2, tied", "qwen2", dict(tie_word_embeddings=True)),
    ("qwen2 after a tied one", "qwen2", dict(tie_word_embeddings=False)),
)
#: Packages whose towers have a size that mbridge's code says, and the number of layers that the small ones here have.
TOWERS = {"gemma3": 2, "internvl3": 24, "qwen2_5_vl": 1}
EXPERTS = {"deepseek_v3", "glm4_moe", "glm4v_moe", "mixtral", "qwen2_moe", "qwen3_moe"}
#: Which each rank has whole, and which mbridge's export joins as if they were shards (Transformer Engine marks them alike).
COPIED = {".linear_q_down_proj.": ".q_a_proj.", ".linear_kv_down_proj.": ".kv_a_proj_with_mqa."}


def check(rank: int, world_size: int, agent: str, out: str, sizes: dict, only: tuple, also: dict) -> None:
    """Rank 0 leaves in `out` of each type and variant what became of it, as every_bridge.check does. Behind what is equal are
    "loaded", or why mbridge did not load it, so that its weights are random, and the tensors of which mbridge's export gives
    several copies joined, of which one is compared. sizes: of mcore.start; only: these, where it says any; also: for each config."""
    import stub_te
    stub_te.install()
    import mcore
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    stub_te.keep_extra_state_whole()
    from mbridge import AutoBridge

    mcore.pack_what_is_scattered()
    mcore.start(**sizes)
    _shrink_towers()
    _as_before()
    rows: dict[str, list] = {}
    for number, (label, kind, config) in enumerate([*((one, one, {}) for one in sorted(AutoBridge.list_supported_models())), *VARIANTS], 1):
        if (only and label not in only) or (label == "mimo with MTP" and sizes.get("pp", 1) > 1):
            continue  # that one fails on the last stage, for which the first waits
        config = {**ALSO.get(kind, {}), **config, **also}
        rows[label] = row(rank, pathlib.Path(out).parent / f"model-{number}", lambda folder: _save(kind, config, folder),
                          lambda folder: _one(rank, agent, folder, number, kind))
        if rank == 0:
            print(label, *rows[label], flush=True)
    if rank == 0:
        pathlib.Path(out).write_text(json.dumps(rows))


def _as_before() -> None:
    """mbridge 0.15.1 was written for older megatron-cores and transformers. What it gives them that they do not take any more, or
    looks for where they had it, is seen to here: nothing of it says where an element lies."""
    from mbridge.models.deepseek_v3 import DeepseekV3Bridge, MLATransformerConfig
    from mbridge.models.ext.llama3_cp.llama3_cp_memory_efficient_attention import MemoryEfficientAttention
    from mbridge.models.ext.deepseek_v3 import dequant_fp8_safetensor_io
    from mbridge.models.gemma3.transformer_layer import Gemma3TransformerLayer
    from mbridge.models.glm4_vl.transformer_layer import Glm4TransformerLayer
    from safetensors import safe_open
    from transformers import Glm4vConfig

    class Config(MLATransformerConfig):
        def __init__(self, *, max_position_embeddings=None, **options):
            super().__init__(**options)

    DeepseekV3Bridge.TransformerConfigClass = Config
    for cls in (Gemma3TransformerLayer, Glm4TransformerLayer, MemoryEfficientAttention):
        cls.__init__ = _without(cls.__init__, "pg_collection", "vp_stage")
    dequant_fp8_safetensor_io.safe_open = lambda path, framework, device: safe_open(path, framework, device="cpu")

    def of_text(self, name: str):
        if name == "text_config":
            raise AttributeError(name)
        return getattr(self.text_config, name)

    Glm4vConfig.__getattr__ = of_text


def _without(make, *names: str):
    return lambda self, *arguments, **options: make(self, *arguments, **{k: v for k, v in options.items() if k not in names})


def _shrink_towers() -> None:
    import importlib
    for package, depth in TOWERS.items():
        module = importlib.import_module(f"mbridge.models.{package}")
        module.get_vision_model_config = _shrunk(module.get_vision_model_config, depth)


def _shrunk(make, depth: int):
    def made(config, *arguments, **options):
        config = make(config, *arguments, **options)
        config.num_layers, config.hidden_size, config.ffn_hidden_size = depth, SMALL["hidden_size"], SMALL["intermediate_size"]
        config.num_attention_heads = config.num_query_groups = SMALL["num_heads"]
        config.kv_channels = config.hidden_size // config.num_attention_heads
        return config
    return made


def _save(kind: str, also: dict, folder: pathlib.Path) -> str | None:
    """A tiny checkpoint, or config.json alone of what transformers has no class for, or of other layers than mbridge knows."""
    from transformers import models
    auto = models.auto.modeling_auto
    name = {**auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}.get(kind)
    if kind == "gemma3":
        name = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    if name is None or also.get("num_nextn_predict_layers"):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(dict(model_type=kind, **also)))
        return None
    why = save(name, folder, also)
    if why is None:  # mbridge's loader of deepseek_v3 wants an index
        from safetensors import safe_open
        with safe_open(folder / "model.safetensors", "pt") as file:
            index = dict(metadata={}, weight_map={key: "model.safetensors" for key in file.keys()})
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return why


def _config(kind: str, folder: pathlib.Path):
    import transformers
    also = json.loads((folder / "config.json").read_text())
    small = {key: value for key, value in SMALL.items() if key not in ("n_embd", "n_head", "n_layer")}
    if kind == "mimo":
        config = transformers.Qwen2Config(**{**small, **also}, tie_word_embeddings=False)
    elif kind == "internvl_chat":
        config = transformers.PretrainedConfig(tie_word_embeddings=False)
        config.llm_config = transformers.Qwen2Config(**small, tie_word_embeddings=False)
        config.vision_config = transformers.PretrainedConfig(num_hidden_layers=24, hidden_size=32, num_attention_heads=4)
    elif also.get("num_nextn_predict_layers"):
        config = transformers.DeepseekV3Config(**{**small, **also})
    else:
        return transformers.AutoConfig.from_pretrained(folder)
    config.model_type = kind
    return config


def _one(rank: int, agent: str, folder: pathlib.Path, version: int, kind: str) -> list:
    """Builds the model of megatron-core, publishes it, and compares what arrived with mbridge's export."""
    import torch
    import torch.distributed as dist
    from mbridge import AutoBridge
    from mbridge.core import LLMBridge
    from mbridge.core.bridge import _MODEL_REGISTRY
    from mbridge.core.parallel_states import ParallelStates
    from safetensors.torch import save_file

    import weightwire.mbridge
    from weightwire.hf_tensors import checkpoint_tensors

    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)  # as in every_bridge
    want, wrong = {}, []
    # Where mbridge pads the vocabulary (its deepseek_v3 and most towers do not), it is padded.
    pads = _MODEL_REGISTRY[kind]._model_provider is LLMBridge._model_provider
    options: dict = dict(make_vocab_size_divisible_by=96) if pads else {}
    if kind not in EXPERTS:
        options["parallel_states"] = dataclasses.replace(ParallelStates.get_parallel_state(), ep_size=1, ep_rank=0)

    def build():
        nonlocal bridge, models
        bridge = AutoBridge.from_config(_config(kind, folder), **options)
        bridge.set_extra_args(moe_token_dispatcher_type="allgather", variable_seq_lengths=False, moe_shared_expert_overlap=False)
        models = bridge.get_model(use_cpu_initialization=True)

    def export():
        nonlocal want, wrong
        exported = {name: tensor.detach().clone() for name, tensor in bridge.export_weights(models)}
        want = {name: _of_copies(name, tensor, bridge.mpu.tp_size) for name, tensor in exported.items()}
        wrong = [name for name in want if want[name].shape != exported[name].shape]

    bridge = models = None
    missing = not_built(_tried("megatron-core or mbridge", build))
    if missing is None:
        loaded = _load(bridge, models, folder)
        missing = not_built(_tried("mbridge's own export", export))
    if missing:
        return missing
    if rank == 0 and not (folder / "model.safetensors").exists():  # no class of transformers has them: mbridge's own names and shapes
        save_file({name: tensor.contiguous().clone() for name, tensor in want.items()}, folder / "model.safetensors")
    dist.barrier()
    # A tied head that its bridge does not map to the embedding is exported from the last stage, and no checkpoint has it.
    known = {meta.name for meta in checkpoint_tensors(folder)}
    want = {name: tensor for name, tensor in want.items() if name in known or name != "lm_head.weight"}
    made = published(rank, agent, folder, version, want,
                     lambda: weightwire.mbridge.Publisher(bridge, models, agent=agent, checkpoint=folder))
    torch.set_default_dtype(torch.float32)  # mbridge's loader of deepseek_v3 leaves another
    return [*made, loaded, wrong] if made[0] == "equal" else made


def _of_copies(name: str, tensor, count: int):
    """One of the copies that mbridge's export has joined."""
    import torch
    if not any(part in name for part in COPIED.values()):
        return tensor
    copies = tensor.chunk(count)
    assert all(torch.equal(copy, copies[0]) for copy in copies), name
    return copies[0]


def _load(bridge, models: list, folder: pathlib.Path) -> str:
    """By mbridge's loader, or with random numbers: then returns why."""
    import torch

    from weightwire.mbridge import _shard, global_name
    from weightwire.megatron_bridge import shares_head
    from weightwire.megatron_state import unwrap
    why = ["", "no class of transformers, or other layers than it has"]
    if (folder / "model.safetensors").exists():
        why = not_built(_tried("mbridge's own loader", lambda: bridge.load_weights(models, str(folder))))
    if why is None:
        return "loaded"
    for model in map(unwrap, models):
        names = bridge._weight_name_mapping_mcore_local_to_global(model, consider_ep=False)
        parameters = dict(model.named_parameters())
        for local, tensor in model.state_dict().items():
            if local not in names or not tensor.is_floating_point():
                continue
            name = global_name(bridge, names[local])
            shard = _shard(bridge, name, getattr(parameters.get(local), "tensor_model_parallel", False))
            if shares_head(model):
                name = name.replace("output_layer.weight", "embedding.word_embeddings.weight")
            seed = zlib.crc32(name.encode()) + (shard.rank if shard and not any(part in name for part in COPIED) else 0)
            with torch.no_grad():
                tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)) * 0.1)
    return why[1]


def _tried(what: str, step) -> str | None:
    try:
        step()
    except Exception as error:
        return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None
