"""verl's own pieces put together on CPU: Ray actors, its FSDP engine, its checkpoint manager and test adapter.

What is replaced: the accelerator (cpu_platform.py), the inference server (verl's own MockServerAdapter).
"""

from __future__ import annotations

import ray
import torch
from tests.checkpoint_engine.test_utils import CheckpointEngineWorkerTest, MockReplica
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.trainer.config import CheckpointConfig
from verl.workers.config import (CheckpointEngineConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig,
                                 RolloutConfig)
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker, TrainingWorkerConfig
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs


class Actor(TrainingWorker):
    """verl's training worker with what ActorRolloutRefWorker adds for a checkpoint engine; its update_weights is
    ActorRolloutRefWorker's own."""

    def __init__(self, config: TrainingWorkerConfig, checkpoint: CheckpointEngineConfig):
        initialize_global_process_group_ray(backend="gloo")
        for backend in ("fsdp", "fsdp2"):
            EngineRegistry._engines.setdefault("language_model", {}).setdefault(backend, {}).setdefault(
                "cpu", FSDPEngineWithLMHead)
        super().__init__(config)
        import_external_libs(checkpoint.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            checkpoint.backend, is_master=torch.distributed.get_rank() == 0, bucket_size=1 << 20,
            **checkpoint.engine_kwargs[checkpoint.backend])
        self.gathered = 0

    @property
    def actor(self):
        return self

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int = None, mode: str = "auto"):
        return await ActorRolloutRefWorker.update_weights.__wrapped__(self, global_steps=global_steps, mode=mode)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def step(self, factor: float):
        """Stands for an optimizer step: every parameter times `factor`, exactly representable."""
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.mul_(factor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_next_round(self):
        from weightwire.errors import AbortedError
        from weightwire.verl import sender

        publish = sender.publish

        async def fails(*_):
            sender.publish = publish
            raise AbortedError("by the test", code="ABORTED", reason="abort_requested")

        sender.publish = fails

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def count_gathers(self):
        """From now on, how often a DTensor of this rank was gathered; the count so far is returned."""
        from torch.distributed.tensor import DTensor

        before, self.gathered = self.gathered, 0
        if not hasattr(DTensor, "uncounted"):
            DTensor.uncounted = DTensor.full_tensor

            def full_tensor(tensor, **options):
                self.gathered += 1
                return tensor.uncounted(**options)

            DTensor.full_tensor = full_tensor
        return before


class Rollout(CheckpointEngineWorkerTest):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fail_next_load(self):
        """In the middle of it: the engine has one new tensor then."""
        load = self.server_adapter.update_weights

        async def fails(weights, **_):
            self.server_adapter.update_weights = load
            async for _ in weights:
                raise RuntimeError("no memory, says the test")

        self.server_adapter.update_weights = fails

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def received(self):
        """name -> (dtype, bytes)"""
        return {name: (str(t.dtype), t.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                for name, t in self.server_adapter.received_weights.items()}


def actors(model: HFModelConfig, checkpoint: CheckpointEngineConfig, ranks: int, name: str, cls: type = Actor,
           dtype: str = "bfloat16") -> RayWorkerGroup:
    config = TrainingWorkerConfig(model_type="language_model", model_config=model, engine_config=FSDPEngineConfig(
        fsdp_size=ranks, strategy="fsdp2", model_dtype=dtype), optimizer_config=FSDPOptimizerConfig(
            lr=1e-6, total_training_steps=10), checkpoint_config=CheckpointConfig())
    return worker_group(ranks, RayClassWithInitArgs(cls=ray.remote(cls), config=config, checkpoint=checkpoint), name, 23000)


def rollouts(model: HFModelConfig, checkpoint: CheckpointEngineConfig, count: int,
             name: str) -> tuple[RayWorkerGroup, list[MockReplica]]:
    """`count` replicas of one worker each."""
    config = RolloutConfig(name="vllm", checkpoint_engine=checkpoint)
    group = worker_group(count, RayClassWithInitArgs(cls=ray.remote(Rollout), model_config=model, rollout_config=config), name,
                   23100)
    replicas = [MockReplica(replica_rank=i, config=config, model_config=model) for i in range(count)]
    for i, replica in enumerate(replicas):
        replica.workers = [group.workers[i]]
    return group, replicas


def worker_group(ranks: int, cls: RayClassWithInitArgs, name: str, first_port: int) -> RayWorkerGroup:
    """verl picks the master's port long before the master opens it: groups that look at once must not look in the same
    range."""
    pool = RayResourcePool(process_on_nodes=[ranks], use_gpu=False, max_colocate_count=1, name_prefix=name)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=cls, use_gpu=False, device_name="cpu", name_prefix=name,
                          master_port_range=[first_port, first_port + 100])
