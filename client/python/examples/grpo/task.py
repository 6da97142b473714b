"""The toy task: answer with small numbers. A random model's token is right once in four times."""

from __future__ import annotations

import random

VOCAB, SMALL, PROMPT_TOKENS, ANSWER_TOKENS = 64, 16, 4, 8
PROMPTS_PER_STEP, ANSWERS_PER_PROMPT = 32, 8


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS_PER_STEP)]


def reward(answer: list[int]) -> float:
    """The share of the answer's tokens that are small numbers."""
    return sum(token < SMALL for token in answer) / len(answer)


def model_config():
    from transformers import Qwen2Config

    return Qwen2Config(vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
                       num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
                       tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None)
