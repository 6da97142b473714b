"""Tiny random checkpoints as transformers saves them: `python -m tests.engine.models OUT KIND SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_COMMON = dict(vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
               max_position_embeddings=512, initializer_range=0.06, bos_token_id=0, eos_token_id=1)
KINDS = {
    "qwen2": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=False)),
    "qwen2-4-layers": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=False, num_hidden_layers=4)),
    # Qwen2.5-0.5B: 988 MB
    "qwen2.5-0.5b": ("Qwen2Config", dict(vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
                                         num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen2-tied": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=True)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(intermediate_size=512, moe_intermediate_size=128, num_experts=8, head_dim=32,
                                         num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
                                         tie_word_embeddings=False)),
    "gpt-oss": ("GptOssConfig", dict(intermediate_size=128, num_local_experts=8, num_experts_per_tok=2, head_dim=32,
                                     tie_word_embeddings=False)),
    "gemma3-text": ("Gemma3TextConfig", dict(intermediate_size=512, head_dim=32, tie_word_embeddings=True)),
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
    config = getattr(transformers, name)(**{**_COMMON, **options}, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(out)
    if getattr(config, "num_nextn_predict_layers", 0):
        _add_mtp(out, config)
    vocabulary = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(out)
    return out


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
