"""verl's manager, worker and vLLM adapter move versions into a real vLLM, which answers as transformers does with the same weights."""

import os

import pytest
import ray
import torch

PROMPT = [5, 9, 31, 77, 2, 500, 1234]
TOKENS = 8
PATH = os.environ.get("PYTHONPATH", "")


@pytest.fixture
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=bool(os.environ.get("SHOW")), runtime_env={"env_vars": {
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform,cpu_vllm", "PYTHONPATH": PATH, "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind"}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A Qwen2 whose embedding is 2 MiB, twice verl's smallest bucket."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    config = Qwen2Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
                         vocab_size=8192, tie_word_embeddings=False, max_position_embeddings=128)
    Qwen2ForCausalLM(config).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(8192)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(path)
    return path


def expected(path, weights: dict) -> tuple[list[int], list[float]]:
    """What transformers answers, token by token."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.load_state_dict(weights)
    ids, logprobs = list(PROMPT), []
    with torch.no_grad():
        for _ in range(TOKENS):
            scores = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()))
    return ids[len(PROMPT):], logprobs


def rollout_config(checkpoint, **options):
    from verl.workers.config import RolloutConfig

    return RolloutConfig(name="vllm", checkpoint_engine=checkpoint, tensor_model_parallel_size=1, dtype="float32", enforce_eager=True,
                         enable_sleep_mode=False, free_cache_engine=False, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128,
                         prompt_length=64, response_length=32, gpu_memory_utilization=0.05,
                         engine_kwargs={"vllm": {"kv_cache_memory_bytes": 64 << 20}}, **options)


def checkpoint_config(daemon, **options):
    from verl.workers.config import CheckpointEngineConfig

    return CheckpointEngineConfig(
        backend="weightwire", custom_backend_module="weightwire.verl", update_weights_bucket_megabytes=1, engine_kwargs={
            "weightwire": dict(coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=120.0, **options)})


@pytest.mark.parametrize("route", ["shards"])
def test_five_versions_with_a_tensor_larger_than_the_bucket(cluster, daemon, client, model_path, route):
    import vllm_job
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.config import HFModelConfig

    checkpoint = checkpoint_config(daemon, route=route)
    model = HFModelConfig(path=str(model_path), use_remove_padding=False, override_config={"attn_implementation": "sdpa"})
    trainers = vllm_job.actors(model, checkpoint, 1, "actor", vllm_job.Trainer, "fp32")
    trainers.reset()
    replica = vllm_job.replica(model, rollout_config(checkpoint), "rollout")
    manager = CheckpointEngineManager(config=checkpoint, actor_wg=trainers, replicas=[replica])
    seen = []
    for version in range(1, 6):
        weights = trainers.change(version)[0]
        metrics = manager.update_weights(global_steps=version)
        assert metrics["weightwire/version"] == version and metrics["weightwire/failures"] == 0
        answer = vllm_job.answers(replica, PROMPT, TOKENS, version)
        tokens, logprobs = expected(model_path, weights)
        assert answer.token_ids == tokens and answer.extra_fields["global_steps"] == version
        assert answer.log_probs == pytest.approx(logprobs, abs=1e-3)
        seen.append(tuple(tokens))
    assert len(set(seen)) == 5 and client.status().committed_version == 5
