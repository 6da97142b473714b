"""verl's manager of checkpoint engines in another order: versions go to the rollout hosts while requests run.

actor_rollout_ref.rollout.checkpoint_manager_class: weightwire.verl.manager.CheckpointEngineManager
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from verl.checkpoint_engine.base import CheckpointEngineManager as VerlsManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await

import ray

_worker = ray.remote(CheckpointEngineWorker)


class CheckpointEngineManager(VerlsManager):  # type: ignore[misc]
    """verl's aborts all requests, then moves the weights, then resumes. This one moves them first: requests are aborted (and saved, for
    partial rollouts) only while engines load what lies on their hosts, and not at all when no version came."""

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        if self.backend != "weightwire":
            return cast("dict[str, Any]", await super().update_weights(global_steps=global_steps))
        workers = [worker for replica in self.replicas for worker in replica.workers]
        rollout = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker))
        await asyncio.to_thread(self.build_process_group, rollout)
        await asyncio.gather(*rollout.execute_checkpoint_engine(["stage"] * rollout.world_size))
        sent = await asyncio.gather(*self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        metrics: dict[str, Any] = {}
        for result in sent:
            metrics.update(result or {})
        came = metrics.get("weightwire/failures", 0.0) == 0.0
        if came:
            await self.abort_replicas()
            await self.release_kv_cache_replicas()
        # After a round that failed too, for each worker counts its failures; it tells its engine nothing then.
        await asyncio.gather(*rollout.update_weights(global_steps=global_steps))
        await asyncio.gather(*self.actor_wg.execute_checkpoint_engine(["finalize"] * self.actor_wg.world_size),
                             *rollout.execute_checkpoint_engine(["finalize"] * rollout.world_size))
        if came:
            await self.resume_kv_cache_replicas()
            await self.resume_generation_replicas()
        return metrics
