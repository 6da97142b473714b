"""Ranks that run a snippet of the docs with what its text takes for granted: a model, a training step, a checkpoint."""

from __future__ import annotations

import os
import pathlib

import torch
import torch.distributed as dist

from torch_ranks import gather_dtensors, load, save_full, shard_fsdp2, step


def run_torch(rank: int, world_size: int, snippet: str, receiver: str, agent: str, checkpoint: str, out: str, steps: int):
    """Rank 0 trains and publishes, rank 1 follows; both are worlds of their own to weightwire."""
    os.environ["WEIGHTWIRE_AGENT_SOCKET"] = agent
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{out}/store-{rank}", rank=0, world_size=1)
    model = load(pathlib.Path(checkpoint))
    if rank == 1:
        exec(receiver, dict(model=model, steps=steps))
        from conftest import read_safetensors
        want = read_safetensors(pathlib.Path(out) / f"v{steps}.safetensors")
        for name, parameter in model.named_parameters():
            assert (parameter.detach().view(torch.int32).numpy().view("uint32") == want[name][1]).all(), name
        return
    wait_for_follower(agent)
    exec(snippet, dict(model=model, steps=steps, train_step=stepper(model, out, lambda m: dict(m.named_parameters()))))


def run_fsdp(rank: int, world_size: int, snippet: str, agent: str, checkpoint: str, out: str, steps: int):
    os.environ["WEIGHTWIRE_AGENT_SOCKET"] = agent
    model = shard_fsdp2(load(pathlib.Path(checkpoint)), world_size)
    exec(snippet, dict(model=model, steps=steps, train_step=stepper(model, out, gather_dtensors)))


def run_megatron(rank: int, world_size: int, snippet: str, agent: str, checkpoint: str, out: str, steps: int):
    from mcore_ranks import Job
    os.environ["WEIGHTWIRE_AGENT_SOCKET"] = agent
    job, version = Job(checkpoint, dict(pp=2), {}), 0

    def train_step(models):
        nonlocal version
        version += 1
        job.step(version)
        job.save(pathlib.Path(out) / f"v{version}.safetensors")

    exec(snippet, dict(models=job.chunks, checkpoint=checkpoint, steps=steps, train_step=train_step))


def run_models(rank: int, world_size: int, snippet: str, agent: str, checkpoints: dict[str, str], out: str, steps: int):
    from models_ranks import Models
    os.environ["WEIGHTWIRE_AGENT_SOCKET"] = agent
    models, version = Models(checkpoints, {"actor": dict(tp=2), "reward": dict(ep=2)}), 0

    def train_step(*_):
        nonlocal version
        version += 1
        for name in checkpoints:
            models.train(name, version, out)

    chunks = {name: models.jobs[name].chunks for name in checkpoints}
    exec(snippet, dict(actor=chunks["actor"], reward=chunks["reward"], actor_checkpoint=checkpoints["actor"],
                       reward_checkpoint=checkpoints["reward"], steps=steps, train_step=train_step))


def run_tensors(rank: int, world_size: int, snippet: str, agent: str, checkpoint: str):
    from weightwire.fsdp import Publisher
    os.environ["WEIGHTWIRE_AGENT_SOCKET"] = agent
    model = shard_fsdp2(load(pathlib.Path(checkpoint)), world_size)
    want, got = gather_dtensors(model), {}
    with Publisher(model) as publisher:
        space = dict(publisher=publisher, rank=rank, checkpoint=checkpoint, load=got.__setitem__)
        exec(snippet, space)
        if rank == 0:
            space["reader"].close()
            assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
        dist.barrier()


def stepper(model, out: str, gather):
    """A training step that leaves what the model then holds in <out>/v<n>.safetensors."""
    optimizer, version = torch.optim.SGD(model.parameters(), lr=0.5), 0

    def train_step(model):
        nonlocal version
        version += 1
        step(model, optimizer, version)
        state = gather(model)
        if dist.get_rank() == 0:
            save_full(state, False, pathlib.Path(out) / f"v{version}.safetensors")
        dist.barrier()

    return train_step


def wait_for_follower(agent: str) -> None:
    """Until the receiver's group is complete, so that it sees every version."""
    import time
    import grpc
    from weightwire.v1 import agent_pb2, agent_pb2_grpc
    with grpc.insecure_channel(f"unix:{agent}") as channel:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            reply = agent_pb2_grpc.AgentStub(channel).LocalStatus(agent_pb2.LocalStatusRequest(), timeout=5)
            if any(local.group == "reference" and local.stage_bytes for local in reply.locals):
                return
            time.sleep(0.05)
    raise AssertionError("the receiver did not come up")
