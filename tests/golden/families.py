#!/usr/bin/env python3
"""Writes tests/data/transformers/<family>-<variant>.json: what transformers saves of tiny models.

Each file is {"config": config.json, "tensors": {name: [dtype, shape]}}. The model is made from the config and
saved by save_pretrained itself, so names are the checkpoint's (a class may map those in memory to others,
as Qwen2.5-VL does: `model.visual.` in memory, `visual.` in the checkpoint), tied tensors are written once
and persistent buffers such as e_score_correction_bias are included. tests/unit/layout/families_test.cc
compares the `hf` layout with these files.

It needs an environment of its own, 5 GB large; no GPU:
  python3 -m venv /tmp/tv && /tmp/tv/bin/pip install torch transformers==4.57.6 accelerate
  /tmp/tv/bin/python tests/golden/families.py            # exit 1 and names when a file would change
  /tmp/tv/bin/python tests/golden/families.py --update   # writes
Models that 4.57.6 lacks are made with 5.19.0 (`transformers=LATER`), in an environment with that; each version
looks at its own variants only.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile

import safetensors
import torch
import transformers
from transformers.integrations import finegrained_fp8

DATA = pathlib.Path(__file__).resolve().parents[1] / "data/transformers"
TRANSFORMERS = "4.57.6"
LATER = "5.19.0"

# Odd sizes that differ from one another, so that no two dimensions are taken for each other.
DENSE = dict(vocab_size=83, hidden_size=36, intermediate_size=52, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2)
EXPERTS = dict(moe_intermediate_size=14, num_experts_per_tok=2)
LATENT = dict(kv_lora_rank=10, q_lora_rank=22, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12,
              num_key_value_heads=6)
DEEPSEEK = DENSE | EXPERTS | LATENT | dict(n_routed_experts=4, n_group=1, topk_group=1)
VISION = dict(depth=2, hidden_size=24, intermediate_size=20, num_heads=4, in_channels=3, patch_size=7,
              temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=36)
SIGLIP = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_channels=2,
              image_size=30, patch_size=7)
QWEN_VL = DENSE | dict(rope_scaling=dict(type="mrope", mrope_section=[1, 1, 1]))
DELTA = dict(vocab_size=83, hidden_size=36, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2,
             head_dim=10, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=8,
             linear_value_head_dim=12, linear_conv_kernel_dim=3)
DELTA_SILENT = ("head_dim", "num_key_value_heads", "layer_types", "linear_num_key_heads", "linear_num_value_heads",
                "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "tie_word_embeddings")
NEMOTRON = dict(vocab_size=83, hidden_size=36, intermediate_size=52, num_attention_heads=6, num_key_value_heads=2,
                head_dim=10, mamba_num_heads=6, mamba_head_dim=5, n_groups=2, ssm_state_size=7, conv_kernel=3,
                n_routed_experts=4, moe_intermediate_size=14, moe_shared_expert_intermediate_size=26,
                num_experts_per_tok=2)


LLAMA4 = DENSE | dict(head_dim=10, num_local_experts=3, intermediate_size_mlp=46, interleave_moe_layer_step=2)
LLAMA4_VISION = dict(hidden_size=24, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_channels=2,
                     image_size=28, patch_size=7, vision_output_dim=18, projector_input_dim=18, projector_output_dim=18)
PIXTRAL = dict(hidden_size=24, head_dim=6, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_channels=2,
               image_size=28, patch_size=7)
VISION3 = VISION | dict(num_position_embeddings=16, deepstack_visual_indexes=[0, 1])
VISION3_5 = VISION | dict(num_position_embeddings=16)
QWEN3_VL = DENSE | dict(head_dim=10, rope_scaling=dict(rope_type="default", mrope_section=[1, 1, 1]))
MOONVIT = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, patch_size=7,
               pos_emb_height=5, pos_emb_width=6, merge_kernel_size=[2, 3])
GEMMA4 = DENSE | dict(head_dim=10, global_head_dim=14, vocab_size_per_layer_input=71)
GEMMA4_EXPERTS = dict(num_experts=5, enable_moe_block=True, moe_intermediate_size=14, top_k_experts=2)
GEMMA4_VISION = dict(hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     head_dim=8, patch_size=5, position_embedding_size=17)
GEMMA4_AUDIO = dict(hidden_size=18, num_hidden_layers=2, num_attention_heads=3, subsampling_conv_channels=[9, 5],
                    output_proj_dims=11, conv_kernel_size=4)
KIMI_NAMES = {"language_model.model.blocks.": "language_model.model.layers.", "model.mm_projector.": "mm_projector.",
              "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed."}
ENGINE = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=32, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
ENGINE_MOE = ENGINE | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
ENGINE_MLA = ENGINE | dict(num_key_value_heads=4, kv_lora_rank=72, q_lora_rank=40, qk_nope_head_dim=64, qk_rope_head_dim=64,
                           v_head_dim=64, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1,
                           moe_intermediate_size=48, num_experts_per_tok=2, first_k_dense_replace=1)
ENGINE_TOWER = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, num_channels=3)
ENGINE_VISION3 = dict(depth=2, hidden_size=64, intermediate_size=96, num_heads=2, in_channels=3, patch_size=7,
                      temporal_patch_size=2, spatial_merge_size=2, out_hidden_size=64, num_position_embeddings=16,
                      deepstack_visual_indexes=[0])
ENGINE_INDEXER = dict(index_n_heads=2, index_head_dim=128, index_topk=4)
INDEXER = dict(index_n_heads=2, index_head_dim=16, index_topk=4)


class Variant:
    """A config to make: `drop` names keys that config.json shall be silent about, `keep` stores the fields
    given instead of what transformers writes, `model_type` is what it is renamed to afterwards, `fp8` is a
    quantization_config, `transformers` the version that makes it, `rename` beginnings of names that it gets wrong,
    `in_memory` saves the names and shapes that the model itself has, as it does when those of its checkpoint were such."""

    def __init__(self, family, name, sizes, *, drop=(), keep=False, model_type=None, fp8=None,
                 transformers=TRANSFORMERS, rename=None, in_memory=False, **more):
        self.family, self.name, self.drop, self.keep, self.model_type = family, name, drop, keep, model_type
        self.transformers, self.rename = transformers, rename or {}
        self.options = dict(save_original_format=False) if in_memory else {}
        self.fp8 = fp8 and dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic") | fp8
        self.fields = sizes | more

    def file(self):
        return f"{self.model_type or self.family}-{self.name}.json"


VARIANTS = [
    Variant("llama", "plain", DENSE),
    Variant("llama", "tied", DENSE, tie_word_embeddings=True),
    Variant("llama", "biases", DENSE, attention_bias=True, mlp_bias=True, head_dim=10),
    Variant("llama", "silent", DENSE, drop=("head_dim", "num_key_value_heads", "attention_bias", "mlp_bias")),
    Variant("mistral", "plain", DENSE, head_dim=None),
    Variant("mistral", "biases", DENSE, attention_bias=True, mlp_bias=True, head_dim=10),
    Variant("mistral", "silent", DENSE | dict(num_attention_heads=24), hidden_size=48,
            drop=("head_dim", "num_key_value_heads", "tie_word_embeddings")),
    Variant("mixtral", "plain", DENSE, num_local_experts=3),
    Variant("mixtral", "tied", DENSE, num_local_experts=3, head_dim=10, tie_word_embeddings=True),
    Variant("qwen2", "plain", DENSE),
    Variant("qwen2", "tied", DENSE, tie_word_embeddings=True, attention_bias=False),
    Variant("qwen2", "silent", DENSE | dict(num_attention_heads=64, hidden_size=128),
            drop=("num_key_value_heads", "tie_word_embeddings")),
    Variant("qwen2_moe", "plain", DENSE | EXPERTS, num_experts=5, shared_expert_intermediate_size=26),
    Variant("qwen2_moe", "sparse", DENSE | EXPERTS, num_experts=5, shared_expert_intermediate_size=26,
            num_hidden_layers=5, decoder_sparse_step=2, mlp_only_layers=[3], qkv_bias=False),
    Variant("qwen2_moe", "dense", DENSE | EXPERTS, num_experts=0, shared_expert_intermediate_size=26),
    Variant("qwen3", "plain", DENSE, head_dim=16),
    Variant("qwen3", "biases", DENSE, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    Variant("qwen3", "silent", DENSE | dict(num_attention_heads=64, hidden_size=63),
            drop=("head_dim", "num_key_value_heads", "tie_word_embeddings", "attention_bias")),
    Variant("qwen3_moe", "plain", DENSE | EXPERTS, num_experts=5),
    Variant("qwen3_moe", "sparse", DENSE | EXPERTS, num_experts=5, head_dim=16, num_hidden_layers=4,
            decoder_sparse_step=2, mlp_only_layers=[1], attention_bias=True, tie_word_embeddings=True),
    Variant("deepseek_v2", "plain", DEEPSEEK, first_k_dense_replace=1, n_shared_experts=2),
    Variant("deepseek_v2", "plain-q", DEEPSEEK, first_k_dense_replace=2, q_lora_rank=None, n_shared_experts=1),
    Variant("deepseek_v2", "silent", DEEPSEEK,
            drop=("first_k_dense_replace", "n_shared_experts", "q_lora_rank", "tie_word_embeddings")),
    Variant("deepseek_v3", "plain", DEEPSEEK, first_k_dense_replace=1, num_nextn_predict_layers=1),
    Variant("deepseek_v3", "plain-q", DEEPSEEK, first_k_dense_replace=0, q_lora_rank=None, n_shared_experts=3,
            tie_word_embeddings=True),
    Variant("deepseek_v3", "silent", DEEPSEEK, num_hidden_layers=5,
            drop=("first_k_dense_replace", "n_shared_experts", "q_lora_rank")),
    # transformers has no class for Kimi-K2: its releases bring DeepSeek-V3's code under another name.
    Variant("deepseek_v3", "plain", DEEPSEEK, first_k_dense_replace=1, model_type="kimi_k2"),
    Variant("glm4_moe", "plain", DENSE | EXPERTS, head_dim=10, n_routed_experts=4, n_shared_experts=2,
            attention_bias=True, use_qk_norm=True, num_nextn_predict_layers=1),
    Variant("glm4_moe", "silent", DENSE | EXPERTS, n_routed_experts=4,
            drop=("head_dim", "attention_bias", "use_qk_norm", "n_shared_experts", "first_k_dense_replace")),
    Variant("gemma3_text", "silent", DENSE | dict(num_attention_heads=8), drop=("head_dim", "num_key_value_heads")),
    Variant("llama4_text", "plain", DENSE, head_dim=10, num_local_experts=3, intermediate_size_mlp=46,
            num_hidden_layers=4, interleave_moe_layer_step=2, moe_layers=None),
    Variant("llama4_text", "listed", DENSE, head_dim=10, num_local_experts=3, intermediate_size_mlp=46,
            moe_layers=[0], attention_bias=True, tie_word_embeddings=True),
    Variant("llama4_text", "silent", DENSE | dict(num_attention_heads=16), num_local_experts=3,
            intermediate_size_mlp=46, interleave_moe_layer_step=2,
            drop=("head_dim", "num_key_value_heads", "moe_layers", "attention_bias", "tie_word_embeddings")),
    # The text model's sizes stand in text_config, as transformers writes them, or beside vision_config, as in
    # the releases.
    Variant("qwen2_5_vl", "nested", dict(text_config=QWEN_VL, vision_config=VISION)),
    Variant("qwen2_5_vl", "flat", QWEN_VL | dict(vision_config=VISION), keep=True),
    Variant("qwen2_5_vl", "flat-tied", QWEN_VL | dict(vision_config=VISION), keep=True, tie_word_embeddings=True),
    Variant("qwen2_5_vl", "nested-tied", dict(text_config=QWEN_VL | dict(tie_word_embeddings=True), vision_config=VISION)),
    Variant("gpt_oss", "plain", DENSE, head_dim=10, num_local_experts=3),
    Variant("gpt_oss", "silent", DENSE | dict(num_attention_heads=16), num_local_experts=3,
            tie_word_embeddings=True, drop=("head_dim", "num_key_value_heads", "attention_bias")),
    Variant("gemma", "plain", DENSE, head_dim=10),
    Variant("gemma", "untied", DENSE, head_dim=10, tie_word_embeddings=False, attention_bias=True),
    Variant("gemma", "silent", DENSE | dict(num_attention_heads=32), drop=("head_dim", "num_key_value_heads")),
    Variant("gemma2", "plain", DENSE, head_dim=10),
    Variant("gemma2", "silent", DENSE | dict(num_attention_heads=8), drop=("head_dim", "num_key_value_heads")),
    Variant("gemma3_text", "plain", DENSE, head_dim=10),
    Variant("gemma3_text", "untied", DENSE, head_dim=10, tie_word_embeddings=False, attention_bias=True),
    Variant("gemma4_text", "plain", GEMMA4, num_hidden_layers=7, hidden_size_per_layer_input=6, transformers=LATER),
    Variant("gemma4_text", "untied", GEMMA4, hidden_size_per_layer_input=0, num_hidden_layers=2, attention_bias=True,
            tie_word_embeddings=False, layer_types=["full_attention", "sliding_attention"], attention_k_eq_v=True,
            num_global_key_value_heads=6, transformers=LATER),
    Variant("gemma4_text", "experts", GEMMA4 | GEMMA4_EXPERTS, hidden_size_per_layer_input=0, attention_k_eq_v=True,
            num_global_key_value_heads=1, layer_types=["sliding_attention", "full_attention", "full_attention"],
            transformers=LATER),
    # As the releases say it, and the last layers attend to what those before them stored.
    Variant("gemma4_text", "released", GEMMA4 | dict(hidden_size_per_layer_input=6, num_hidden_layers=13, attention_k_eq_v=True,
                                                     num_kv_shared_layers=8, use_double_wide_mlp=True,
                                                     num_global_key_value_heads=1), keep=True, transformers=LATER),
    Variant("gemma4_text", "silent", DENSE | dict(num_attention_heads=8), hidden_size_per_layer_input=6,
            vocab_size_per_layer_input=71, attention_k_eq_v=True, transformers=LATER,
            drop=("head_dim", "num_key_value_heads", "hidden_size_per_layer_input", "layer_types", "per_layer_config",
                  "tie_word_embeddings", "num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block", "num_experts")),
    Variant("gemma4", "plain", dict(text_config=GEMMA4 | dict(hidden_size_per_layer_input=6, num_kv_shared_layers=1,
                                                              use_double_wide_mlp=True),
                                    vision_config=GEMMA4_VISION | dict(use_clipped_linears=True, standardize=True),
                                    audio_config=GEMMA4_AUDIO), transformers=LATER),
    Variant("gemma4", "experts", dict(text_config=GEMMA4 | GEMMA4_EXPERTS | dict(hidden_size_per_layer_input=0),
                                      vision_config=GEMMA4_VISION), transformers=LATER),
    Variant("gemma4", "unclipped", dict(text_config=GEMMA4 | dict(hidden_size_per_layer_input=6), vision_config=GEMMA4_VISION,
                                        audio_config=GEMMA4_AUDIO | dict(use_clipped_linears=False)), transformers=LATER),
    Variant("gemma3", "plain", dict(text_config=DENSE | dict(head_dim=10), vision_config=SIGLIP, mm_tokens_per_image=4)),
    Variant("gemma3", "untied", dict(text_config=DENSE | dict(head_dim=10, tie_word_embeddings=False, attention_bias=True),
                                     vision_config=SIGLIP | dict(vision_use_head=False), mm_tokens_per_image=4)),
    Variant("llama4", "plain", dict(text_config=LLAMA4 | dict(num_hidden_layers=2), vision_config=LLAMA4_VISION)),
    Variant("llama4", "biases", dict(text_config=LLAMA4 | dict(attention_bias=True, moe_layers=[0]),
                                     vision_config=LLAMA4_VISION | dict(num_hidden_layers=1))),
    Variant("mistral3", "plain", dict(text_config=DENSE | dict(model_type="mistral", head_dim=10), vision_config=PIXTRAL)),
    Variant("mistral3", "tied", dict(text_config=DENSE | dict(model_type="mistral", head_dim=10, tie_word_embeddings=True),
                                     vision_config=PIXTRAL, multimodal_projector_bias=True, spatial_merge_size=3)),
    Variant("mistral3", "ministral3", dict(text_config=DENSE | dict(model_type="ministral3", head_dim=10,
                                                                     tie_word_embeddings=False),
                                           vision_config=PIXTRAL, tie_word_embeddings=False), transformers=LATER),
    Variant("qwen3_vl", "plain", dict(text_config=QWEN3_VL, vision_config=VISION3)),
    Variant("qwen3_vl", "tied", dict(text_config=QWEN3_VL | dict(attention_bias=True), tie_word_embeddings=True,
                                     vision_config=VISION3 | dict(deepstack_visual_indexes=[1])), transformers=LATER),
    Variant("qwen3_vl_moe", "plain", dict(text_config=QWEN3_VL | EXPERTS | dict(num_experts=5), vision_config=VISION3)),
    Variant("qwen3_vl_moe", "sparse", dict(text_config=QWEN3_VL | EXPERTS | dict(num_experts=5, mlp_only_layers=[1]),
                                           vision_config=VISION3 | dict(deepstack_visual_indexes=[1]))),
    # The release's names; those of 5.19.0 differ where it renames "layers" to "blocks" and back in the wrong place.
    Variant("kimi_k25", "plain", dict(text_config=DEEPSEEK | dict(first_k_dense_replace=1, tie_word_embeddings=False,
                                                              num_nextn_predict_layers=0),
                                      vision_config=MOONVIT, projection_hidden_size=24, tie_word_embeddings=False), transformers=LATER,
            rename=KIMI_NAMES),
    Variant("deepseek_v32", "plain", DEEPSEEK | INDEXER, first_k_dense_replace=1, transformers=LATER),
    Variant("deepseek_v32", "silent", DEEPSEEK, num_hidden_layers=5, transformers=LATER,
            drop=("first_k_dense_replace", "n_shared_experts", "mlp_layer_types", "index_n_heads", "index_head_dim",
                  "head_dim", "index_topk")),
    Variant("glm_moe_dsa", "plain", DEEPSEEK | INDEXER, mlp_layer_types=["dense", "sparse", "sparse"],
            first_k_dense_replace=1, transformers=LATER),
    Variant("glm_moe_dsa", "shared", DEEPSEEK | INDEXER, first_k_dense_replace=1, n_shared_experts=2, num_hidden_layers=5,
            indexer_types=["full", "shared", "full", "shared", "shared"], transformers=LATER),
    Variant("glm_moe_dsa", "step", DEEPSEEK | INDEXER, first_k_dense_replace=1, num_hidden_layers=6, index_topk_freq=3,
            index_skip_topk_offset=1, transformers=LATER, drop=("indexer_types", "mlp_layer_types")),
    Variant("glm_moe_dsa", "pattern", DEEPSEEK | INDEXER, first_k_dense_replace=0, index_topk_pattern="FSF",
            transformers=LATER, drop=("indexer_types", "mlp_layer_types")),
    Variant("glm4_moe_lite", "plain", DEEPSEEK, mlp_layer_types=["dense", "sparse", "sparse"], transformers=LATER),
    Variant("glm4_moe_lite", "silent", DEEPSEEK, q_lora_rank=None, transformers=LATER,
            drop=("mlp_layer_types", "n_shared_experts")),
    Variant("seed_oss", "plain", DENSE, head_dim=10, transformers=LATER),
    Variant("seed_oss", "biases", DENSE, head_dim=10, attention_bias=False, attention_out_bias=True, mlp_bias=True,
            tie_word_embeddings=True, transformers=LATER),
    Variant("seed_oss", "silent", DENSE | dict(num_attention_heads=16), transformers=LATER,
            drop=("head_dim", "num_key_value_heads", "attention_bias", "attention_out_bias", "mlp_bias")),
    Variant("ministral3", "plain", DENSE, head_dim=10, transformers=LATER),
    Variant("ministral3", "silent", DENSE | dict(num_attention_heads=16), transformers=LATER,
            drop=("head_dim", "num_key_value_heads", "tie_word_embeddings")),
    Variant("minimax_m2", "plain", DENSE, head_dim=10, num_local_experts=5, transformers=LATER),
    Variant("minimax_m2", "silent", DENSE | dict(num_attention_heads=16), num_local_experts=5, transformers=LATER,
            drop=("head_dim", "num_key_value_heads", "tie_word_embeddings")),
    Variant("granite", "plain", DENSE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    Variant("granite", "silent", DENSE, drop=("num_key_value_heads", "attention_bias", "mlp_bias", "tie_word_embeddings")),
    Variant("glm4", "plain", DENSE, head_dim=10, pad_token_id=0),
    Variant("glm4", "silent", DENSE, head_dim=10, pad_token_id=0, attention_bias=False, tie_word_embeddings=True),
    Variant("exaone4", "plain", DENSE, head_dim=10),
    Variant("exaone4", "silent", DENSE | dict(num_attention_heads=64, hidden_size=128),
            drop=("num_key_value_heads", "tie_word_embeddings")),
    # Sizes that vLLM accepts: tests/golden/vllm_families.py records its loader with these.
    Variant("gemma3", "engine", dict(text_config=ENGINE, mm_tokens_per_image=4,
                                     vision_config=SIGLIP | ENGINE_TOWER | dict(vision_use_head=False, image_size=28))),
    Variant("gemma4", "engine", dict(text_config=ENGINE | dict(global_head_dim=64, hidden_size_per_layer_input=16,
                                                               vocab_size_per_layer_input=100, num_hidden_layers=4,
                                                               num_kv_shared_layers=1, use_double_wide_mlp=True,
                                                               attention_k_eq_v=True, num_global_key_value_heads=1,
                                                               layer_types=["sliding_attention", "full_attention",
                                                                            "sliding_attention", "full_attention"]),
                                     vision_config=GEMMA4_VISION | dict(use_clipped_linears=True, standardize=True),
                                     audio_config=GEMMA4_AUDIO), transformers=LATER),
    Variant("gemma4_text", "engine", ENGINE | GEMMA4_EXPERTS, moe_intermediate_size=48, num_experts=4, global_head_dim=64,
            hidden_size_per_layer_input=0, attention_k_eq_v=True, num_global_key_value_heads=1, transformers=LATER),
    Variant("llama4", "engine", dict(text_config=ENGINE | dict(num_local_experts=4, intermediate_size_mlp=160,
                                                               interleave_moe_layer_step=2, attention_bias=False),
                                     vision_config=LLAMA4_VISION | ENGINE_TOWER | dict(intermediate_size=256, num_hidden_layers=1))),
    Variant("mistral3", "engine", dict(text_config=ENGINE | dict(model_type="mistral", tie_word_embeddings=False),
                                       vision_config=PIXTRAL | ENGINE_TOWER | dict(head_dim=32), tie_word_embeddings=False),
            transformers=LATER),
    Variant("qwen3_vl", "engine", dict(text_config=ENGINE | dict(rope_scaling=dict(rope_type="default", mrope_section=[6, 5, 5])),
                                       vision_config=ENGINE_VISION3)),
    Variant("qwen3_vl_moe", "engine", dict(text_config=ENGINE_MOE | dict(rope_scaling=dict(rope_type="default",
                                                                                          mrope_section=[6, 5, 5])),
                                           vision_config=ENGINE_VISION3)),
    Variant("kimi_k25", "engine", dict(text_config=ENGINE_MLA | dict(tie_word_embeddings=False, num_nextn_predict_layers=0),
                                       projection_hidden_size=64,
                                       vision_config=MOONVIT | ENGINE_TOWER, tie_word_embeddings=False),
            transformers=LATER, rename=KIMI_NAMES),
    Variant("deepseek_v32", "engine", ENGINE_MLA | ENGINE_INDEXER, transformers=LATER),
    Variant("glm_moe_dsa", "engine", ENGINE_MLA | ENGINE_INDEXER, num_hidden_layers=4, index_topk_freq=2,
            transformers=LATER, drop=("indexer_types", "mlp_layer_types")),
    Variant("glm4_moe_lite", "engine", ENGINE_MLA, transformers=LATER),
    Variant("granite", "engine", ENGINE, attention_bias=True, mlp_bias=True, transformers=LATER),
    Variant("glm4", "engine", ENGINE),
    Variant("exaone4", "engine", ENGINE),
    Variant("seed_oss", "engine", ENGINE, attention_out_bias=True, transformers=LATER),
    Variant("ministral3", "engine", ENGINE, transformers=LATER),
    Variant("minimax_m2", "engine", ENGINE, num_local_experts=4, num_experts_per_tok=2, use_routing_bias=True,
            scoring_func="sigmoid", rotary_dim=16, transformers=LATER),
    # The class pads with token 32,000 unless told otherwise.
    Variant("phi3", "plain", DENSE, pad_token_id=0),
    Variant("phi3", "tied", DENSE, pad_token_id=0, head_dim=10, tie_word_embeddings=True, attention_bias=True,
            mlp_bias=True),
    Variant("phi3", "silent", DENSE, pad_token_id=0, drop=("num_key_value_heads", "tie_word_embeddings")),
    # Layers with linear attention: every fourth one has attention unless layer_types says which.
    Variant("qwen3_next", "plain", DELTA | EXPERTS, num_experts=4, shared_expert_intermediate_size=26,
            intermediate_size=52, mlp_only_layers=[1]),
    Variant("qwen3_next", "listed", DELTA | EXPERTS, num_experts=4, shared_expert_intermediate_size=26,
            intermediate_size=52, decoder_sparse_step=2, tie_word_embeddings=True, num_hidden_layers=3,
            layer_types=["full_attention", "linear_attention", "full_attention"]),
    Variant("qwen3_next", "silent", DELTA | EXPERTS, num_experts=3, shared_expert_intermediate_size=26,
            intermediate_size=52, num_attention_heads=4, drop=DELTA_SILENT + ("decoder_sparse_step", "mlp_only_layers")),
    Variant("qwen3_5_text", "plain", DELTA, intermediate_size=52, transformers=LATER),
    Variant("qwen3_5_text", "silent", DELTA, intermediate_size=52, num_attention_heads=8, transformers=LATER,
            drop=DELTA_SILENT),
    Variant("qwen3_5_text", "tied", DELTA, intermediate_size=52, tie_word_embeddings=True, num_hidden_layers=2,
            layer_types=["full_attention", "linear_attention"], transformers=LATER),
    Variant("qwen3_5_moe_text", "plain", DELTA | EXPERTS, num_experts=4, shared_expert_intermediate_size=26,
            transformers=LATER),
    Variant("qwen3_5_moe_text", "silent", DELTA | EXPERTS, num_experts=3, num_attention_heads=4, transformers=LATER,
            drop=DELTA_SILENT + ("shared_expert_intermediate_size", "moe_intermediate_size")),
    Variant("qwen3_5", "plain", dict(text_config=DELTA | dict(intermediate_size=52), vision_config=VISION3_5),
            transformers=LATER),
    Variant("qwen3_5", "tied", dict(text_config=DELTA | dict(intermediate_size=52, tie_word_embeddings=True),
                                    vision_config=VISION3_5), tie_word_embeddings=True, transformers=LATER),
    # As the releases are, and what is loaded from one and saved: all experts in one tensor.
    Variant("qwen3_5_moe", "plain", dict(text_config=DELTA | EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=26),
                                         vision_config=VISION3_5), transformers=LATER, in_memory=True),
    Variant("nemotron_h", "plain", NEMOTRON, hybrid_override_pattern="M-*EM", transformers=LATER),
    Variant("nemotron_h", "latent", NEMOTRON, hybrid_override_pattern="EM*", moe_latent_size=16, use_conv_bias=False,
            num_nextn_predict_layers=1, transformers=LATER),
    Variant("nemotron_h", "pattern", NEMOTRON | dict(hybrid_override_pattern="M*-E", num_hidden_layers=4), keep=True,
            transformers=LATER),
    Variant("nemotron_h", "silent", NEMOTRON | dict(num_attention_heads=8), transformers=LATER,
            drop=("head_dim", "num_key_value_heads", "layers_block_type", "moe_latent_size", "use_conv_bias", "time_step_limit",
                  "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel", "n_routed_experts",
                  "tie_word_embeddings")),
    # fp8 with one scale for each block: sizes that blocks divide and others.
    Variant("llama", "fp8", DENSE, attention_bias=True, mlp_bias=True, head_dim=10,
            fp8=dict(weight_block_size=[13, 8])),
    Variant("qwen3", "fp8", DENSE, head_dim=16,
            fp8=dict(weight_block_size=[16, 10], modules_to_not_convert=["lm_head", "model.layers.1.self_attn"])),
    Variant("qwen3_moe", "fp8", DENSE | EXPERTS, num_experts=5,
            fp8=dict(weight_block_size=[8, 16],
                     modules_to_not_convert=["lm_head"] + [f"model.layers.{layer}.{module}" for layer in range(3)
                                                           for module in ("input_layernorm", "mlp.gate")])),
    Variant("qwen3_moe", "fp8-silent", DENSE | EXPERTS, num_experts=5, fp8=dict(weight_block_size=[8, 16])),
    Variant("qwen2_moe", "fp8", DENSE | EXPERTS, num_experts=5, shared_expert_intermediate_size=26,
            fp8=dict(weight_block_size=[4, 9])),
    Variant("mixtral", "fp8", DENSE, num_local_experts=3, fp8=dict(weight_block_size=[4, 9])),
    Variant("deepseek_v3", "fp8", DEEPSEEK, first_k_dense_replace=1, num_nextn_predict_layers=1,
            fp8=dict(weight_block_size=[8, 6])),
    Variant("deepseek_v3", "fp8", DEEPSEEK, first_k_dense_replace=1, q_lora_rank=None,
            fp8=dict(weight_block_size=[8, 6]), model_type="kimi_k2"),
    Variant("glm4_moe", "fp8", DENSE | EXPERTS, head_dim=10, n_routed_experts=4, n_shared_experts=2,
            attention_bias=True, fp8=dict(weight_block_size=[8, 6])),
    Variant("qwen3_next", "fp8", DELTA | EXPERTS, num_experts=4, shared_expert_intermediate_size=26,
            intermediate_size=52, mlp_only_layers=[1],
            fp8=dict(weight_block_size=[8, 6], modules_to_not_convert=["lm_head", "model.layers.1.linear_attn.in_proj_ba"])),
]


def quantized(model, fp8):
    """Its linear layers as transformers replaces them. FineGrainedFP8HfQuantizer itself wants a GPU; its steps
    before loading are these, and loading changes no name, shape or dtype."""
    config = transformers.FineGrainedFP8Config(**fp8)
    finegrained_fp8.init_empty_weights = contextlib.nullcontext  # accelerate's; nothing has to be empty here
    skipped = transformers.quantizers.base.HfQuantizer.get_modules_to_not_convert(
        model, config.modules_to_not_convert, model._keep_in_fp32_modules)
    torch.set_default_dtype(model.dtype)  # of biases, which a loaded model has in the checkpoint's
    replaced = finegrained_fp8.replace_with_fp8_linear(model, skipped, config)
    torch.set_default_dtype(torch.float32)
    return replaced


def saved(config, folder, fp8=None, **options):
    """Makes the model, saves it into `folder` with save_pretrained's `options`; {name: [dtype, shape]}."""
    torch.manual_seed(0)
    wrapper = hasattr(config, "vision_config")  # some are listed for both, as text models that they cannot make
    auto = transformers.AutoModelForImageTextToText if wrapper else transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    (quantized(model, fp8) if fp8 else model).save_pretrained(folder, **options)
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            for name in file.keys():
                part = file.get_slice(name)
                tensors[name] = [part.get_dtype(), part.get_shape()]
    return dict(sorted(tensors.items()))


def listing(variant):
    made = transformers.AutoConfig.for_model(variant.family, **variant.fields)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        tensors = saved(made, folder, variant.fp8, **variant.options)
        config = dict(variant.fields) if variant.keep else json.loads((folder / "config.json").read_text())
    if variant.drop:
        config = {key: value for key, value in config.items() if key not in variant.drop}
        silent = transformers.AutoConfig.for_model(**config)
        with tempfile.TemporaryDirectory() as name:
            tensors = saved(silent, pathlib.Path(name))
    for wrong, right in variant.rename.items():
        tensors = {right + name.removeprefix(wrong) if name.startswith(wrong) else name: value
                   for name, value in tensors.items()}
    config["model_type"] = variant.model_type or variant.family
    if variant.fp8:
        config["quantization_config"] = variant.fp8
    return {"config": config, "tensors": tensors}


def text_of(entry):
    """JSON with one line for each tensor, so that a change can be read as a diff."""
    tensors = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in entry["tensors"].items())
    return f'{{"config":\n {json.dumps(entry["config"], sort_keys=True)},\n "tensors": {{\n{tensors}}}}}\n'


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument("--only", default="", help="families whose name begins so")
    options = parser.parse_args(arguments)
    if transformers.__version__ not in (TRANSFORMERS, LATER):
        parser.error(f"transformers is {transformers.__version__}, the listings are of {TRANSFORMERS} and {LATER}")
    changed = []
    for variant in VARIANTS:
        if variant.transformers != transformers.__version__ or not variant.file().startswith(options.only):
            continue
        path, text = DATA / variant.file(), text_of(listing(variant))
        if not path.exists() or path.read_text() != text:
            changed.append(path.name)
        if options.update:
            path.write_text(text)
    unknown = {path.name for path in DATA.glob("*.json")} - {variant.file() for variant in VARIANTS}
    for name in sorted(unknown):
        print(f"{name}: no variant of this script makes it")
    for name in changed:
        print(f"{name}: {'written' if options.update else 'would change'}")
    return 1 if unknown or (changed and not options.update) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
