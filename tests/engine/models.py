"""Tiny random checkpoints as transformers saves them: `python -m tests.engine.models OUT KIND SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_COMMON = dict(vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
               max_position_embeddings=512, initializer_range=0.06, bos_token_id=0, eos_token_id=1)
_VISION = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=56, patch_size=14)
KINDS = {
    "qwen2": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=False)),
    "qwen2-4-layers": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=False, num_hidden_layers=4)),
    # Qwen2.5-0.5B: 988 MB
    "qwen2.5-0.5b": ("Qwen2Config", dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                         num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3Config", dict(intermediate_size=512, head_dim=32, tie_word_embeddings=False)),
    "qwen2-tied": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=True)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(intermediate_size=512, moe_intermediate_size=128, num_experts=8, head_dim=32,
                                         num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
                                         tie_word_embeddings=False)),
    "gpt-oss": ("GptOssConfig", dict(intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, head_dim=32,
                                     tie_word_embeddings=False)),
    "gemma3-text": ("Gemma3TextConfig", dict(intermediate_size=512, head_dim=32, tie_word_embeddings=True)),
    # The wrapper: a SigLIP tower before the text model.
    "gemma3": ("Gemma3Config", dict(intermediate_size=512, head_dim=32, tie_word_embeddings=True)),
    # Heads of two sizes, keys for values, layers that share them, inputs of each layer; and experts beside the MLP.
    "gemma4-text": ("Gemma4TextConfig", dict(intermediate_size=512, head_dim=32, global_head_dim=64, num_hidden_layers=4,
                                             layer_types=["sliding_attention", "full_attention"] * 2, attention_k_eq_v=True,
                                             num_global_key_value_heads=2, num_kv_shared_layers=1, use_double_wide_mlp=True,
                                             hidden_size_per_layer_input=16, vocab_size_per_layer_input=1024)),
    "gemma4-experts": ("Gemma4TextConfig", dict(intermediate_size=512, head_dim=32, global_head_dim=32, num_experts=8,
                                                enable_moe_block=True, moe_intermediate_size=128, top_k_experts=2,
                                                layer_types=["sliding_attention", "full_attention"],
                                                hidden_size_per_layer_input=0)),
    # Mamba, an MLP, Mamba, attention
    "nemotron-h": ("NemotronHConfig", dict(intermediate_size=512, hybrid_override_pattern="M-M*", num_hidden_layers=4,
                                           mamba_num_heads=8, mamba_head_dim=32, ssm_state_size=16, n_groups=2,
                                           conv_kernel=4, head_dim=32, tie_word_embeddings=False)),
    # One dense layer, one with experts, and an MTP layer, which transformers neither runs nor saves.
    "glm4-moe-mtp": ("Glm4MoeConfig", dict(intermediate_size=512, moe_intermediate_size=128, n_routed_experts=8,
                                           num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1,
                                           n_group=1, topk_group=1, head_dim=32, use_qk_norm=True,
                                           attention_bias=True, norm_topk_prob=True, num_nextn_predict_layers=1,
                                           tie_word_embeddings=False)),
}


def make(out: Path, kind: str, seed: int) -> Path:
    """Writes the checkpoint of `kind` with weights drawn from `seed`. Norms and biases are no constants either."""
    import tokenizers
    import torch
    import transformers
    name, options = KINDS[kind]
    torch.manual_seed(seed)
    options = {**_COMMON, **options}
    if kind == "gemma3":
        options = dict(text_config=options, vision_config=_VISION, mm_tokens_per_image=4, tie_word_embeddings=True, boi_token_index=1021,
                       eoi_token_index=1022, image_token_index=1023)
    config = getattr(transformers, name)(**options, dtype="bfloat16")
    auto = transformers.AutoModelForImageTextToText if kind == "gemma3" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        scalars = [buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
        for parameter in [*model.parameters(), *scalars]:
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(out)
    if getattr(config, "num_nextn_predict_layers", 0):
        _add_mtp(out, config)
    if kind == "gemma3":
        _rename_tower(out)
    vocabulary = {f"t{number}": number for number in range(getattr(config, "text_config", config).vocab_size)}
    if kind == "gemma3":  # vLLM looks for runs of lines in it
        vocabulary = {{1017: "\n", 1018: "\n\n", 1019: "\n\n\n", 1020: "\n\n\n\n"}.get(n, name): n for name, n in vocabulary.items()}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    images = dict(boi_token="t1021", eoi_token="t1022", image_token="t1023")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1",
                                                     **dict(extra_special_tokens=images) if kind == "gemma3" else {})
    if kind == "gemma3":
        transformers.Gemma3Processor(transformers.Gemma3ImageProcessor(size=dict(height=56, width=56)), tokenizer,
                                     image_seq_length=4).save_pretrained(out)
    else:
        tokenizer.save_pretrained(out)
    return out


def _rename_tower(out: Path) -> None:
    """As released checkpoints have it, and vLLM reads it; transformers 5 saves it one level higher."""
    import safetensors.torch
    path = out / "model.safetensors"
    tensors = {name if ".vision_model." in name else name.replace("vision_tower.", "vision_tower.vision_model."): tensor
               for name, tensor in safetensors.torch.load_file(path).items()}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def _add_mtp(out: Path, config) -> None:
    """Writes the MTP layer as DeepSeek-V3 and GLM-4.5 store it: a decoder layer with new weights, the projection and
    its norms, and copies of embedding and head. Biases of the router are float32 there."""
    import safetensors.torch
    import torch
    path, last = out / "model.safetensors", config.num_hidden_layers - 1
    tensors = {name: tensor.float() if name.endswith("e_score_correction_bias") else tensor
               for name, tensor in safetensors.torch.load_file(path).items()}
    mtp = f"model.layers.{last + 1}."
    for name, tensor in list(tensors.items()):
        if name.startswith(f"model.layers.{last}."):
            tensors[name.replace(f"model.layers.{last}.", mtp)] = torch.randn_like(tensor) * 0.06
    hidden = config.hidden_size
    for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("shared_head.norm", (hidden,)),
                        ("eh_proj", (hidden, 2 * hidden))):
        tensors[f"{mtp}{name}.weight"] = torch.randn(shape, dtype=torch.bfloat16) * 0.5
    tensors[f"{mtp}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{mtp}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"made": sys.argv[1]}))
