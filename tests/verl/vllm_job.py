"""verl's own rollout replica with a real vLLM on a CPU. Replaced: how Ray says which accelerator a worker has."""

from __future__ import annotations

import asyncio
import os

import ray
import torch
from ray_job import Actor, actors, worker_group
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

__all__ = ["Replica", "Trainer", "actors", "replica"]


class Trainer(Actor):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def change(self, seed: int) -> dict:
        """Other weights; returns them whole, gathered by torch."""
        torch.manual_seed(seed)
        whole = {}
        with torch.no_grad():
            for name, parameter in self.engine.module.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0.0, 0.3)
                whole[name] = parameter.full_tensor().clone()
        return whole


class Replica(vLLMReplica):
    async def launch_servers(self):
        server = ray.remote(vLLMHttpServer).options(name=f"vllm_server_{self.replica_rank}_0", max_concurrency=100, num_cpus=0).remote(
            config=self.config, model_config=self.model_config, rollout_mode=RolloutMode.STANDALONE, workers=self.workers,
            replica_rank=self.replica_rank, node_rank=0, gpus_per_node=self.world_size, nnodes=1, cuda_visible_devices="")
        self.servers = [server]
        await server.launch_server.remote()
        self._server_handle = server


def replica(model, config, name: str) -> Replica:
    made = Replica(replica_rank=0, config=config, model_config=model)
    made.workers = worker_group(made.world_size, RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker), rollout_config=config,
                                                               model_config=model, replica_rank=0), name, 23200).workers
    asyncio.run(made.launch_servers())
    return made


def answers(made: Replica, prompt: list[int], tokens: int, number: int):
    """Greedy."""
    return ray.get(made.server_handle.generate.remote(
        prompt_ids=prompt, sampling_params={"temperature": 0.0, "logprobs": True, "max_tokens": tokens, "ignore_eos": True},
        request_id=f"{os.getpid()}-{number}"))
