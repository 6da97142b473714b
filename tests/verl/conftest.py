"""A daemon and a verl job in one process: actors and rollout workers as verl's own classes hold them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import pathlib
from types import SimpleNamespace
from typing import Any

# Before verl is imported: workers take the environment over. Ray's own niceness lets imports starve beside other work.
os.environ.update(VERL_USE_EXTERNAL_MODULES="cpu_platform", RAY_worker_niceness="0")

import pytest
import torch
from demo.fleet import Daemon
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.workers.engine_workers import ActorRolloutRefWorker

import weightwire.verl  # noqa: F401  registers the backend
from weightwire import Client

# Of run.sh, whose environment has no vLLM; in_vllm.sh runs them.
collect_ignore = [] if importlib.util.find_spec("vllm") else ["test_vllm.py", "test_vllm_ray.py"]
ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))


@pytest.fixture
def daemon(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


@pytest.fixture
def client(daemon):
    with Client(daemon.grpc) as opened:
        yield opened


class Adapter:
    """A rollout adapter as verl's are used: it is told that weights come, takes them all, and is done."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}
        self.updates = 0
        self.open = False

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors", **_):
        assert wire_format == "named_tensors"
        self.open = True
        self.weights = {name: tensor.clone() async for name, tensor in weights}
        self.open = False
        self.updates += 1


class Job:
    """Actor ranks and rollout workers; `update` does what CheckpointEngineManager.update_weights does with Ray."""

    def __init__(self, daemon: Daemon, params, actors: int = 1, **options: Any):
        self.params = params  # (rank) -> what get_per_tensor_param gives there
        self._options = dict(bucket_size=1 << 16, coordinator=daemon.grpc, agent=daemon.agent_socket, host="127.0.0.1",
                             deadline=30.0, **options)
        self.actors = [self._actor(rank) for rank in range(actors)]
        self.rollouts: list[Any] = []

    def _actor(self, rank: int):
        worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
        worker.config = SimpleNamespace(rollout=SimpleNamespace(checkpoint_engine=SimpleNamespace(backend="weightwire")))
        worker.actor = SimpleNamespace(engine=SimpleNamespace(
            get_per_tensor_param=lambda: (self.params(rank), None)))
        worker.checkpoint_engine = CheckpointEngineRegistry.new("weightwire", is_master=rank == 0, **self._options)
        return worker

    def add_rollout(self):
        worker = CheckpointEngineWorker.__new__(CheckpointEngineWorker)
        worker.checkpoint_engine = CheckpointEngineRegistry.new("weightwire", **self._options)
        worker.server_adapter = Adapter()
        self.rollouts.append(worker)
        return worker

    async def update(self, step: int, rollouts=None, actors=None):
        """Results of the actors, then of the rollout workers; an exception in its place where one was raised."""
        actors = self.actors if actors is None else actors
        rollouts = self.rollouts if rollouts is None else rollouts
        engines = [w.checkpoint_engine for w in self.actors + rollouts]
        metadata = [engine.prepare() for engine in engines]
        topology = CheckpointEngineRegistry.get("weightwire").build_topology(len(self.actors), len(rollouts), metadata)
        for group, kwargs in zip((self.actors, rollouts), topology):
            for i, worker in enumerate(group):
                worker.checkpoint_engine.init_process_group(**{k: v[i] for k, v in kwargs.items()})
        results = await asyncio.gather(
            *[ActorRolloutRefWorker.update_weights.__wrapped__(w, global_steps=step) for w in actors],
            *[CheckpointEngineWorker.update_weights.__wrapped__(w, global_steps=step) for w in rollouts],
            return_exceptions=True)
        for engine in engines:
            engine.finalize()
        return results

    async def close(self):
        await asyncio.gather(*[w.checkpoint_engine.close() for w in self.actors + self.rollouts])
