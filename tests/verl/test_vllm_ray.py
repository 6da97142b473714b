"""verl's manager, worker and vLLM adapter move versions into a real vLLM, which answers as transformers does with the same weights."""

import os

import pytest
import ray
import vllm_model

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
    return vllm_model.write(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("route", ["shards"])
def test_five_versions_with_a_tensor_larger_than_the_bucket(cluster, daemon, client, model_path, route):
    import vllm_job
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.config import HFModelConfig

    checkpoint = vllm_model.checkpoint_config(route=route, coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=120.0)
    model = HFModelConfig(path=str(model_path), use_remove_padding=False, override_config={"attn_implementation": "sdpa"})
    trainers = vllm_job.actors(model, checkpoint, 1, "actor", vllm_job.Trainer, "fp32")
    trainers.reset()
    replica = vllm_job.replica(model, vllm_model.rollout_config(checkpoint), "rollout")
    manager = CheckpointEngineManager(config=checkpoint, actor_wg=trainers, replicas=[replica])
    seen = []
    for version in range(1, 6):
        weights = trainers.change(version)[0]
        metrics = manager.update_weights(global_steps=version)
        assert metrics["weightwire/version"] == version and metrics["weightwire/failures"] == 0
        answer = vllm_job.answers(replica, vllm_model.PROMPT, vllm_model.TOKENS, version)
        tokens, logprobs = vllm_model.expected(model_path, weights)
        assert answer.token_ids == tokens and answer.extra_fields["global_steps"] == version
        assert answer.log_probs == pytest.approx(logprobs, abs=1e-3)
        seen.append(tuple(tokens))
    assert len(set(seen)) == 5 and client.status().committed_version == 5
