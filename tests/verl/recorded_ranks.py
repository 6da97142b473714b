"""Ranks that shard a model of transformers 5 and publish it; the oracle is what transformers itself saves."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import weightwire.fsdp
import weightwire.torch


def train(rank: int, world_size: int, agent: str, folder: str, out: str, kind: str, auto: str):
    """Three versions; rank 0 saves each from a whole model that took the same steps."""
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.bfloat16)
    whole = getattr(transformers, auto).from_pretrained(folder, dtype=torch.bfloat16)
    layers = [module for name, module in model.named_modules() if name.endswith(("layers.0", "layers.1"))]
    mesh = init_device_mesh("cpu", (world_size,))
    sharded = model
    if kind == "fsdp2":
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp1":
        sharded = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
                                           device_id=torch.device("cpu"), use_orig_params=True)
    adapter = weightwire.torch if kind == "ddp" else weightwire.fsdp
    verify = dict(verify="export", verify_every=1) if kind != "fsdp1" else {}
    with adapter.Publisher(sharded, agent=agent, **verify) as publisher:
        for version in (1, 2, 3):
            if version > 1:
                for one in (whole, model):
                    with torch.no_grad():
                        for number, parameter in enumerate(one.parameters()):
                            parameter.mul_(1.0 + (number + version) / 64)  # the same on every shard of it
            if rank == 0:
                whole.save_pretrained(pathlib.Path(out) / f"v{version}")
            dist.barrier()
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()
