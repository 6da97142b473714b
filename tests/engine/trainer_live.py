"""As trainer_hf, with a live transformers model that weightwire.fsdp publishes from two ranks: FSDP2's shards where
`--shard` is given, whole parameters from one rank without it. The adapter finds out by itself how the checkpoint holds what
transformers 5 holds otherwise; no config.json and no family is given.

    python -m tests.engine.trainer_live --agent SOCKET --checkpoint DIR [--shard]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import weightwire.fsdp


def load(folder: str) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    made = getattr(transformers, config.architectures[0])
    return made.from_pretrained(folder, dtype=torch.bfloat16)


def copy_into(model: torch.nn.Module, new: torch.nn.Module) -> None:
    wanted = {**dict(new.named_parameters()), **dict(new.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = wanted[name].detach()
            if isinstance(tensor, DTensor):
                value = distribute_tensor(value, tensor.device_mesh, tensor.placements)
            tensor.copy_(value)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--shard", action="store_true")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), 2 if args.shard else 1
    torch.set_num_threads(1)
    peer = None
    if world > 1:
        store = os.environ.get("STORE") or os.path.join(tempfile.mkdtemp(), "store")
        if rank == 0:
            peer = subprocess.Popen([sys.executable, "-m", "tests.engine.trainer_live", *sys.argv[1:]], stdin=subprocess.DEVNULL,
                                    stdout=sys.stderr, env={**os.environ, "RANK": "1", "STORE": store})
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world,
                                timeout=timedelta(seconds=600))
    model = load(args.checkpoint)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for module in model.modules():
            if isinstance(module, torch.nn.ModuleList):
                for layer in module:
                    fully_shard(layer, mesh=mesh)
                break
        fully_shard(model, mesh=mesh)
    with weightwire.fsdp.Publisher(model, rank=rank, world_size=world, agent=args.agent, timeout=120) as publisher:
        if rank == 0:
            print(json.dumps({"ready": True}), flush=True)
        while True:
            said = [json.loads(sys.stdin.readline() or '{"stop": true}') if rank == 0 else None]
            if world > 1:
                dist.broadcast_object_list(said)
            if said[0].get("stop"):
                break
            copy_into(model, load(said[0]["checkpoint"]))
            try:
                release = publisher.publish(said[0]["publish"], deadline=300).wait_released(300)
                answer = {"version": release.version, "epoch": release.epoch, "blocked_seconds": release.blocked_seconds}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            if rank == 0:
                print(json.dumps(answer), flush=True)
    if peer is not None:
        peer.wait(30)


if __name__ == "__main__":
    main()
