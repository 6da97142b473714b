"""A training rank of slime: what its Megatron actor does with its weight updater, with a real megatron-core model."""

from __future__ import annotations

import pathlib
from argparse import Namespace

import torch.distributed as dist

import slime_standins
import weightwire.slime
from mcore_ranks import Job
from weightwire import AbortedError


def arguments(agent: str, checkpoint: str, **changes) -> Namespace:
    return Namespace(**{**dict(
        colocate=False, update_weight_mode="full", update_weight_transport="nccl", hf_checkpoint=checkpoint,
        rollout_num_gpus_per_engine=1, sglang_custom_weight_loader=["weightwire.sglang.load"], weightwire_agent=agent,
        weightwire_deadline=60), **changes})


def train(rank: int, world_size: int, agent: str, checkpoint: str, out: str, sizes: dict, servers: list[str],
          failing: list[int], freed: int = 0, deadline: float = 60, updates: int = 3, lineage=None, named: str = "v"):
    """`updates` of them; leaves what the model held in <out>/<named><n>, and the error of one in `failing` in <out>/error-<rank>.
    At update `freed` rank 1 has no parameters to publish."""
    actor = slime_standins.install()
    job = Job(checkpoint, sizes, {})
    args = arguments(agent, checkpoint, weightwire_deadline=deadline, weightwire_lineage=lineage)
    weightwire.slime.install(args)
    updater = actor.UpdateWeightFromDistributed(args, job.chunks, weights_getter=None, model_name="qwen2config",
                                                quantization_config=None)
    updater.weight_version = 0
    engines = [slime_standins.EngineActor(path, pathlib.Path(out) / f"a{i}") for i, path in enumerate(servers)]

    def connect():
        updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1] * len(engines),
                                        engine_gpu_offsets=list(range(len(engines))), engine_parallel_configs=None)

    connect()
    for version in range(1, updates + 1):
        if version > 1:
            job.step(version)
        if version == 3 and not failing:  # as slime does before it destroys its process groups, and after
            updater.disconnect_rollout_engines()
            connect()
        job.save(pathlib.Path(out) / f"{named}{version}.safetensors")
        storages = [p.untyped_storage() for p in job.chunks[0].parameters()] if (rank, version) == (1, freed) else []
        kept = [bytes(storage) for storage in storages]
        for storage in storages:
            storage.resize_(0)
        try:
            updater.update_weights()
            assert version not in failing and updater.pop_metrics() and not updater.pop_metrics()
        except AbortedError as error:
            assert version in failing, error
            (pathlib.Path(out) / f"error-{rank}").write_text(str(error))
        for storage, content in zip(storages, kept):
            import torch
            storage.resize_(len(content))
            storage.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8).untyped_storage())
        dist.barrier()
    updater.disconnect_rollout_engines()
