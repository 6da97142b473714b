"""Tiny random checkpoints as transformers saves them: `python -m tests.engine.models OUT KIND SEED`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

_COMMON = dict(vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
               max_position_embeddings=512, initializer_range=0.06, bos_token_id=0, eos_token_id=1)
KINDS = {
    "qwen2": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=False)),
    "qwen2-tied": ("Qwen2Config", dict(intermediate_size=704, tie_word_embeddings=True)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(intermediate_size=512, moe_intermediate_size=128, num_experts=8, head_dim=32,
                                         num_experts_per_tok=2, decoder_sparse_step=1, norm_topk_prob=True,
                                         tie_word_embeddings=False)),
}


def make(out: Path, kind: str, seed: int) -> Path:
    """Writes the checkpoint of `kind` with weights drawn from `seed`. Norms and biases are no constants either."""
    import tokenizers
    import torch
    import transformers
    name, options = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**_COMMON, **options, dtype="bfloat16")
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn_like(parameter) * 0.1
    model.save_pretrained(out)
    vocabulary = {f"t{number}": number for number in range(config.vocab_size)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(out)
    return out


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    print(json.dumps({"made": sys.argv[1]}))
