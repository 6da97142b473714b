"""weightwire.nemo_rl over real Ray actors and FSDP2; NeMo-RL's classes and the engines' driver are stood in for
(nemo_job.py). Here because this environment has Ray."""

import pathlib
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import ray
import weightwire.nemo_rl
from conftest import BINARIES, Daemon
from test_ray import cluster, model_path, truth  # noqa: F401  fixtures
from weightwire import AbortedError, RefusedError

(SNIPPET,) = re.findall(r"```python nemo-rl\n(.*?)```",
                        (pathlib.Path(__file__).resolve().parents[2] / "docs/frameworks.md").read_text(), re.S)


@pytest.fixture
def daemon(tmp_path):
    """Fences soon: a version that an engine does not acknowledge holds the next one up."""
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                     commit_deadline_ms=5000)
    yield started
    assert started.stop() == 0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_every_sync_brings_the_policys_weights_or_says_who_failed(cluster, daemon, model_path, tmp_path, monkeypatch,  # noqa: F811
                                                                  asynchronous):
    import nemo_job
    policy, generation = nemo_job.job(str(model_path), str(tmp_path / "store"), 2, asynchronous)
    trainers, engines = policy.worker_group.workers, generation.worker_group.workers[::2]
    exec(SNIPPET, dict(policy=policy, policy_generation=generation, agent_socket=daemon.agent_socket, deadline=120))
    synchronizer = generation.weight_synchronizer
    timed = []
    timer = SimpleNamespace(time=contextmanager(lambda name: iter([timed.append(name)])))

    def step():
        ray.get([worker.step.remote(0.5) for worker in trainers], timeout=60)

    def served():
        return ray.get([engine.weights.remote() for engine in engines], timeout=60)

    assert synchronizer.is_stale
    metrics = synchronizer.sync_weights(timer=timer)
    assert not synchronizer.is_stale and len(timed) == 1 and set(metrics) == {
        "weightwire/publish_seconds", "weightwire/install_seconds"}
    assert served() == [truth(model_path, 1.0)] * 2
    step()
    synchronizer.sync_weights()
    assert served() == [truth(model_path, 0.5)] * 2

    synchronizer._deadline = 15
    ray.get(trainers[1].free.remote(), timeout=60)
    with pytest.raises(AbortedError, match="engines keep what they serve.*policy worker 1: .*lm_head.weight"):
        synchronizer.sync_weights()
    assert synchronizer.is_stale and served() == [truth(model_path, 0.5)] * 2
    ray.get(trainers[1].bring_back.remote(), timeout=60)
    step()
    assert ray.get(engines[1].refuse.remote(True), timeout=60) == "keep"  # what the snippet asks of the driver
    with pytest.raises(AbortedError, match="not served by every engine: vllm-1"):
        synchronizer.sync_weights()
    assert served() == [truth(model_path, 0.25), truth(model_path, 0.5)]
    ray.get(engines[1].refuse.remote(False), timeout=60)
    synchronizer._deadline = 120
    synchronizer.sync_weights()
    assert served() == [truth(model_path, 0.25)] * 2 and synchronizer.version == 5
    synchronizer.shutdown()


def test_what_it_cannot_do_is_refused():
    group = SimpleNamespace(workers=[])
    generation = SimpleNamespace(cfg={"colocated": {"enabled": True}, "vllm_cfg": {"async_engine": True}},
                                 worker_group=group)
    with pytest.raises(RefusedError, match="share their GPUs"):
        weightwire.nemo_rl.Synchronizer(SimpleNamespace(worker_group=group), generation)
    generation.cfg["colocated"]["enabled"] = False
    synchronizer = weightwire.nemo_rl.Synchronizer(SimpleNamespace(worker_group=group), generation)
    with pytest.raises(RefusedError, match="fp8 cache"):
        synchronizer.sync_weights(kv_scales={"layer": 1.0})
