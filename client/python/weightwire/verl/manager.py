"""verl's manager of checkpoint engines in another order: versions go to the rollout hosts while requests run.

actor_rollout_ref.rollout.checkpoint_manager_class: weightwire.verl.manager.CheckpointEngineManager
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

from verl.checkpoint_engine.base import CheckpointEngineManager as VerlsManager
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.replica import RolloutReplica

import ray

logger = logging.getLogger(__name__)
_worker = ray.remote(CheckpointEngineWorker)


class CheckpointEngineManager(VerlsManager):  # type: ignore[misc]
    """verl's aborts all requests, then moves the weights, then resumes. This one moves them first: requests are aborted (and saved, for
    partial rollouts) only while engines load what lies on their hosts, each replica by itself, and not at all when no version came."""

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Raises the error of a replica whose load failed, once all others serve the version. The failed one stays aborted, for some
        of its weights may be new and others not; it serves again after the next version."""
        if self.backend != "weightwire":
            return cast("dict[str, Any]", await super().update_weights(global_steps=global_steps))
        rollout = _group([worker for replica in self.replicas for worker in replica.workers])
        await asyncio.to_thread(self.build_process_group, rollout)
        await asyncio.gather(*rollout.execute_checkpoint_engine(["stage"] * rollout.world_size))
        sent = await asyncio.gather(*self.actor_wg.update_weights(global_steps=global_steps, mode=self.backend))
        metrics: dict[str, Any] = {}
        for result in sent:
            metrics.update(result or {})
        if metrics.get("weightwire/failures", 0.0) == 0.0:
            loads = await asyncio.gather(*(_load(replica, global_steps) for replica in self.replicas), return_exceptions=True)
        else:  # each worker counts its failures; it tells its engine nothing then
            loads = await asyncio.gather(*rollout.update_weights(global_steps=global_steps), return_exceptions=True)
        await asyncio.gather(*self.actor_wg.execute_checkpoint_engine(["finalize"] * self.actor_wg.world_size),
                             *rollout.execute_checkpoint_engine(["finalize"] * rollout.world_size))
        _raise_first(loads)
        return metrics


def _group(workers: list[Any]) -> RayWorkerGroup:
    return RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker))


async def _load(replica: RolloutReplica, global_steps: int | None) -> None:
    try:
        await replica.abort_all_requests()
        await replica.release_kv_cache()
    except Exception:
        await _resume(replica)  # its weights are as they were
        raise
    try:
        _raise_first(await asyncio.gather(*_group(list(replica.workers)).update_weights(global_steps=global_steps),
                                          return_exceptions=True))
    except Exception as error:
        logger.error("replica %d could not load the weights of step %s: it generates nothing until the next version: %s",
                     replica.replica_rank, global_steps, error)
        raise
    await _resume(replica)


async def _resume(replica: RolloutReplica) -> None:
    try:
        await replica.resume_kv_cache()
    finally:
        await replica.resume_generation()


def _raise_first(results: list[Any]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
