"""Tiny models with linear attention or Mamba, whose checkpoints transformers names."""

import pathlib
import tempfile

COMMON = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=128,
              max_position_embeddings=64, tie_word_embeddings=False, dtype="bfloat16")
EXPERTS = dict(moe_intermediate_size=24, num_experts_per_tok=2)
DELTA = COMMON | dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], rms_norm_eps=1e-6,
                      hidden_act="silu", linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16,
                      linear_value_head_dim=24, linear_conv_kernel_dim=4)
NEMOTRON = COMMON | EXPERTS | dict(
    architectures=["NemotronHForCausalLM"], model_type="nemotron_h", intermediate_size=80, mamba_num_heads=8,
    mamba_head_dim=16, ssm_state_size=24, conv_kernel=4, n_routed_experts=3,
    moe_shared_expert_intermediate_size=40, num_hidden_layers=4)
MODELS = {
    "qwen3-next": DELTA | EXPERTS | dict(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", intermediate_size=80, num_experts=3,
        shared_expert_intermediate_size=40, mlp_only_layers=[1], decoder_sparse_step=1),
    "qwen3-5": DELTA | dict(architectures=["Qwen3_5ForCausalLM"], model_type="qwen3_5_text", intermediate_size=80),
    "qwen3-5-moe": DELTA | EXPERTS | dict(
        architectures=["Qwen3_5MoeForCausalLM"], model_type="qwen3_5_moe_text", num_experts=3,
        shared_expert_intermediate_size=40),
    "nemotron-h": NEMOTRON | dict(hybrid_override_pattern="M-*E", n_groups=2),
    # One group of B and C for both ranks; experts that read and write a latent.
    "nemotron-h-latent": NEMOTRON | dict(hybrid_override_pattern="ME", n_groups=1, moe_latent_size=32,
                                         num_hidden_layers=2),
}


def checkpoint(config):
    """{name: (dtype, shape)} as transformers saves a model of that config, all in bf16.

    5.10 calls Nemotron-H's embedding backbone.embedding, which no release and no loader does.
    """
    import families
    import torch
    import transformers
    made = transformers.AutoConfig.for_model(**{key: value for key, value in config.items() if key != "num_hidden_layers"
                                                or config["model_type"] != "nemotron_h"})
    with tempfile.TemporaryDirectory() as folder:
        tensors = families.saved(made, pathlib.Path(folder))
    return {name.replace("backbone.embedding.", "backbone.embeddings."): (torch.bfloat16, tuple(shape))
            for name, (_, shape) in tensors.items()}
