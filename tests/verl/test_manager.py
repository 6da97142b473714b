"""weightwire.verl.manager over Ray: weights move first, requests are aborted only for what came, each replica's by itself."""

import pytest

from test_ray import cluster, model_path, truth  # noqa: F401  fixtures


@pytest.fixture
def started(cluster, daemon, client, model_path):  # noqa: F811
    """start(replicas, name): (manager, actors, rollout workers, what the manager asked of each replica, in this order)."""
    import ray_job
    from verl.workers.config import CheckpointEngineConfig, HFModelConfig
    from verl.workers.rollout.replica import RolloutReplica
    from weightwire.verl.manager import CheckpointEngineManager

    checkpoint = CheckpointEngineConfig(backend="weightwire", custom_backend_module="weightwire.verl", engine_kwargs={
        "weightwire": dict(route="shards", coordinator=daemon.grpc, agent=daemon.agent_socket, deadline=60.0)})
    model = HFModelConfig(path=str(model_path), use_remove_padding=False, override_config={"attn_implementation": "sdpa"})

    class Replica(RolloutReplica):
        async def launch_servers(self):
            raise NotImplementedError

        async def abort_all_requests(self, reject_request=False):
            if self.broken:
                self.broken = False
                raise RuntimeError("no answer, says the test")
            newest = max(client.status().epochs, key=lambda epoch: epoch.version)
            self.seen.append(("abort", newest.version, newest.phase))

        async def release_kv_cache(self):
            self.seen.append("release")

        async def resume_kv_cache(self):
            self.seen.append("restore")

        async def resume_generation(self):
            self.seen.append("resume")

    def start(count: int, name: str):
        actors = ray_job.actors(model, checkpoint, 1, f"actor-{name}")
        group, made = ray_job.rollouts(model, checkpoint, count, f"rollout-{name}")
        actors.reset()
        replicas = []
        for i, mock in enumerate(made):
            replica = Replica(i, mock.config, model)
            replica.workers, replica.seen, replica.broken = mock.workers, [], False
            replicas.append(replica)
        return CheckpointEngineManager(config=checkpoint, actor_wg=actors, replicas=replicas), actors, group, replicas

    return start


def served(replica, version):
    (what, aborted_at, state), *rest = replica.seen
    return (what, aborted_at, rest) == ("abort", version, ["release", "restore", "resume"]) and state in ("committing", "committed")


def test_requests_run_while_weights_move_and_are_not_aborted_for_a_round_that_failed(started, model_path):  # noqa: F811
    """By the time of the abort the version lies on the rollout's host."""
    manager, actors, group, (replica,) = started(1, "manager")
    for step in (1, 2):
        replica.seen.clear()
        assert manager.update_weights(global_steps=step)["weightwire/failures"] == 0
        assert served(replica, step), replica.seen
        assert group.received()[0] == truth(model_path, 0.5 ** (step - 1))
        actors.step(0.5)
    replica.seen.clear()
    actors.fail_next_round()
    assert manager.update_weights(global_steps=3) == {"weightwire/failures": 1.0} and replica.seen == []
    assert group.received()[0] == truth(model_path, 0.5)
    assert manager.update_weights(global_steps=4)["weightwire/failures"] == 0 and group.received()[0] == truth(model_path, 0.25)


def test_one_replica_that_fails_keeps_no_other_one_from_serving(started, model_path):  # noqa: F811
    manager, actors, group, replicas = started(2, "fails")
    assert manager.update_weights(global_steps=1)["weightwire/failures"] == 0

    def round_of(step: int, error: str):
        actors.step(0.5)
        for replica in replicas:
            replica.seen.clear()
        with pytest.raises(Exception, match=error):
            manager.update_weights(global_steps=step)

    group.execute_rank_zero_sync("fail_next_load")
    round_of(2, "no memory, says the test")
    assert [event if isinstance(event, str) else event[0] for event in replicas[0].seen] == ["abort", "release"]  # some weights are new
    assert served(replicas[1], 2) and group.received()[1] == truth(model_path, 0.5)

    replicas[1].broken = True
    round_of(3, "no answer, says the test")
    assert served(replicas[0], 3) and group.received()[0] == truth(model_path, 0.25)  # the next version brings it back
    assert replicas[1].seen == ["restore", "resume"] and group.received()[1] == truth(model_path, 0.5)  # with the weights that it has

    actors.step(0.5)
    for replica in replicas:
        replica.seen.clear()
    assert manager.update_weights(global_steps=4)["weightwire/failures"] == 0
    assert all(served(replica, 4) for replica in replicas) and group.received() == [truth(model_path, 0.125)] * 2
