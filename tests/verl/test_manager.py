"""weightwire.verl.manager over Ray: weights move first, and requests are aborted only for what came."""

from test_ray import cluster, model_path, truth  # noqa: F401  fixtures


def test_requests_run_while_weights_move_and_are_not_aborted_for_a_round_that_failed(
        cluster, daemon, client, model_path):  # noqa: F811
    """weightwire.verl.manager: by the time of the abort the version lies on the rollout's host."""
    import ray_job
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig
    from verl.workers.rollout.replica import RolloutReplica
    from weightwire.verl.manager import CheckpointEngineManager

    checkpoint = CheckpointEngineConfig(backend="weightwire", custom_backend_module="weightwire.verl", engine_kwargs={
        "weightwire": dict(route="shards", coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=60.0)})
    model = HFModelConfig(path=str(model_path), use_remove_padding=False, override_config={"attn_implementation": "sdpa"})
    actors = ray_job.actors(model, checkpoint, 1, "actor-manager")
    group, replicas = ray_job.rollouts(model, checkpoint, 1, "rollout-manager")
    actors.reset()
    seen = []

    class Replica(RolloutReplica):  # what the manager asks of it, in the order in which it asks
        async def launch_servers(self):
            raise NotImplementedError

        async def abort_all_requests(self, reject_request=False):
            newest = max(client.status().epochs, key=lambda epoch: epoch.version)
            seen.append(("abort", newest.version, newest.phase))

        async def release_kv_cache(self):
            seen.append("release")

        async def resume_kv_cache(self):
            seen.append("restore")

        async def resume_generation(self):
            seen.append("resume")

    replica = Replica(0, replicas[0].config, model)
    replica.workers = replicas[0].workers
    manager = CheckpointEngineManager(config=checkpoint, actor_wg=actors, replicas=[replica])
    for step in (1, 2):
        seen.clear()
        assert manager.update_weights(global_steps=step)["weightwire/failures"] == 0
        (what, version, state), *rest = seen
        assert (what, version, rest) == ("abort", step, ["release", "restore", "resume"]) and state in ("committing", "committed"), seen
        assert group.received()[0] == truth(model_path, 0.5 ** (step - 1))
        actors.step(0.5)
    seen.clear()
    actors.fail_next_round()
    assert manager.update_weights(global_steps=3) == {"weightwire/failures": 1.0} and seen == []
    assert group.received()[0] == truth(model_path, 0.5)
    assert manager.update_weights(global_steps=4)["weightwire/failures"] == 0 and group.received()[0] == truth(model_path, 0.25)
