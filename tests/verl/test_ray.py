"""verl's CheckpointEngineManager moves verl's FSDP engine's weights to verl's rollout workers, over Ray."""

import os
import pathlib

import pytest
import ray
import torch

HERE = pathlib.Path(__file__).resolve().parent


@pytest.fixture
def cluster():
    """One for each test: verl never gives its placement groups back."""
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "client/python")])
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}})
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    """A tiny Qwen2 with a tokenizer of ten words, from a fixed seed."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    config = Qwen2Config(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=97, tie_word_embeddings=False)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(10)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1", pad_token="w2").save_pretrained(path)
    return path


def truth(path, factor: float) -> dict:
    """The checkpoint's own tensors, by safetensors; names and bytes."""
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as f:
        tensors = {name: f.get_tensor(name) * factor for name in f.keys()}
    return {n: (str(t.dtype), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


@pytest.mark.parametrize("route", ["tensors", "shards"])
def test_the_managers_update_brings_the_fsdp_engines_weights_to_every_replica(cluster, daemon, client, model_path, route):
    import ray_job
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig

    checkpoint = CheckpointEngineConfig(backend="weightwire", custom_backend_module="weightwire.verl", engine_kwargs={
        "weightwire": dict(route=route, coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=60.0)})
    model = HFModelConfig(path=str(model_path), use_remove_padding=False,
                          override_config={"attn_implementation": "sdpa"})
    actors = ray_job.actors(model, checkpoint, 2, f"actor-{route}")
    group, replicas = ray_job.rollouts(model, checkpoint, 2, f"rollout-{route}")
    actors.reset()
    actors.count_gathers()
    manager = CheckpointEngineManager(config=checkpoint, actor_wg=actors, replicas=replicas[:1])
    factor = 1.0
    for step, members in ((1, replicas[:1]), (2, replicas), (3, replicas[1:])):
        manager.add_replicas([r for r in members if r not in manager.replicas])
        manager.remove_replicas([r for r in list(manager.replicas) if r not in members])
        metrics = manager.update_weights(global_steps=step)
        assert metrics["weightwire/version"] == step and metrics["weightwire/failures"] == 0
        received = group.received()
        for replica, got in zip(replicas, received):
            if replica in members:
                assert got == truth(model_path, factor)
        actors.step(0.5)
        factor *= 0.5
    assert client.status().committed_version == 3
    gathers = actors.count_gathers()
    assert all(n == 0 for n in gathers) if route == "shards" else all(n > 0 for n in gathers), gathers
