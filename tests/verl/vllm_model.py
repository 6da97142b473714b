"""A Qwen2 whose embedding is 2 MiB, twice verl's smallest bucket, and what transformers answers with given weights."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

PROMPT = [5, 9, 31, 77, 2, 500, 1234]
TOKENS = 8
CONFIG = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                     vocab_size=8192, tie_word_embeddings=False, max_position_embeddings=128)


def write(path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(11)
    Qwen2ForCausalLM(CONFIG).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(path)
    return path


def expected(path, weights: dict) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs."""
    model = Qwen2ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(TOKENS):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(PROMPT):], logprobs


def rollout_config(checkpoint, tp=1, **options):
    from verl.workers.config import RolloutConfig

    return RolloutConfig(name="vllm", checkpoint_engine=checkpoint, tensor_model_parallel_size=tp, dtype="float32", enforce_eager=True,
                         enable_sleep_mode=False, free_cache_engine=False, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128,
                         prompt_length=64, response_length=32, gpu_memory_utilization=0.05,
                         engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}}, **options)


def checkpoint_config(**options):
    from verl.workers.config import CheckpointEngineConfig

    return CheckpointEngineConfig(backend="weightwire", custom_backend_module="weightwire.verl", update_weights_bucket_megabytes=1,
                                  engine_kwargs={"weightwire": options})
