"""What the ranks of the checkpoint tests do: real megatron-core models saved and loaded by mcore's and torch's own code."""

from __future__ import annotations

import gc
import multiprocessing
import pathlib

import torch
import torch.distributed as dist

import megatron.core.dist_checkpointing as dist_checkpointing
from mcore_ranks import Job
from megatron.core.dist_checkpointing.strategies import filesystem_async
from weightwire import checkpoint


def sharded(job: Job) -> dict:
    """As Megatron-LM names chunks; entries are mcore's."""
    if len(job.chunks) == 1:
        return {"model": job.chunks[0].sharded_state_dict()}
    return {f"model{v}": chunk.sharded_state_dict() for v, chunk in enumerate(job.chunks)}


def legacy_file(folder: str, sizes: dict) -> pathlib.Path:
    """This rank's file, as Megatron-LM's get_checkpoint_name makes it of its ranks."""
    from megatron.core import parallel_state as mpu
    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if sizes.get("pp", 1) > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if sizes.get("ep", 1) > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return pathlib.Path(folder) / name / "model_optim_rng.pt"


def save(rank: int, world_size: int, folder: str, out: str, sizes: dict, options: dict, spec: str = ""):
    """Saves a model that holds `folder`: with mcore's dist_checkpointing, in per-rank files, and, with a spec, by
    `checkpoint.save_rank_later`, and what two steps of training change of that; into <out>/{torch_dist,megatron,weightwire,changed},
    and what torch says that the rank held then into <out>/changed.RANK."""
    job = Job(folder, sizes, options)
    torch_dist, legacy = f"{out}/torch_dist", f"{out}/megatron"
    if spec:
        prefixes = [""] if len(job.chunks) == 1 else [f"vpp{v}." for v in range(len(job.chunks))]
        held = {prefix + name: tensor for prefix, chunk in zip(prefixes, job.chunks)
                for name, tensor in chunk.named_parameters()}
        how = {"attempt": "one", "timeout": 60, "config": (pathlib.Path(folder) / "config.json").read_text()}
        saved = checkpoint.save_rank_later(f"{out}/weightwire", spec, rank, world_size, held, **how)
        job.step(2)  # the copy is taken: what is trained meanwhile does not reach it
        saved.result(60)
        checkpoint.save_rank(f"{out}/changed", spec, rank, world_size, held, base=f"{out}/weightwire", **how)
        torch.save({name: tensor.detach().clone() for name, tensor in held.items()}, f"{out}/changed.{rank}")
        job.load(folder)
    multiprocessing.current_process()._config["daemon"] = False  # mcore writes in processes of its own
    dist_checkpointing.save(sharded(job), torch_dist)
    filesystem_async._results_queue = None  # the one that it keeps: its process ends with the last reference
    gc.collect()
    path = legacy_file(f"{legacy}/iter_0000007", sizes)
    path.parent.mkdir(parents=True, exist_ok=True)
    chunks = {"model" if len(job.chunks) == 1 else f"model{v}": chunk.state_dict_for_save_checkpoint()
              for v, chunk in enumerate(job.chunks)}
    torch.save({"args": None, "iteration": 7, "optimizer": {"step": torch.zeros(3)}, **chunks}, path)
    if rank == 0:
        (pathlib.Path(legacy) / "latest_checkpointed_iteration.txt").write_text("7\n")


def load(rank: int, world_size: int, folder: str, torch_dist: str, legacy: str, out: str, sizes: dict, spec: str):
    """Loads both with mcore's and torch's code, and the first once more with `checkpoint.load`, straight into the
    parameters; leaves what the model then holds in <out>/{torch_dist,legacy,loaded}.safetensors."""
    job = Job(folder, sizes, {})

    def forget() -> None:
        with torch.no_grad():
            for chunk in job.chunks:
                for tensor in [*chunk.parameters(), *chunk.buffers()]:
                    tensor.fill_(3)
    forget()
    state = dist_checkpointing.load(sharded(job), torch_dist)
    for v, chunk in enumerate(job.chunks):
        chunk.load_state_dict(state["model" if len(job.chunks) == 1 else f"model{v}"])
    job.save(pathlib.Path(out) / "torch_dist.safetensors")
    forget()
    loaded = torch.load(legacy_file(f"{legacy}/release", sizes), weights_only=True)
    for v, chunk in enumerate(job.chunks):
        found = chunk.load_state_dict(loaded["model" if len(job.chunks) == 1 else f"model{v}"], strict=False)
        lacking = [name for name in found.missing_keys if not name.endswith("_extra_state")]
        assert not lacking and not found.unexpected_keys, found
    job.save(pathlib.Path(out) / "legacy.safetensors")
    forget()
    for chunk in job.chunks:
        checkpoint.load(torch_dist, spec, rank, dict(chunk.named_parameters()))
    job.save(pathlib.Path(out) / "loaded.safetensors")
    dist.barrier()
