"""Ranks with several models in one process group, each parallel in its own way."""

from __future__ import annotations

import contextlib
import pathlib
import zlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file

import weightwire.fsdp
import weightwire.megatron
import weightwire.models
import weightwire.torch
from mcore_ranks import Job
from weightwire import WeightwireError


def _globals() -> dict:
    """What megatron.core.parallel_state knows: of one model."""
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


_NONE = _globals()

#: Of each model its parallel sizes, on the same four ranks.
MESHES = {"actor": dict(tp=2, pp=2), "reward": dict(tp=1, ep=2)}


class Models:
    """Two megatron-core models with process groups of their own; parallel_state knows none of them outside of `on`."""

    def __init__(self, checkpoints: dict[str, str], sizes: dict[str, dict] = MESHES):
        self.jobs, self._meshes = {}, {}
        for name, checkpoint in checkpoints.items():
            vars(parallel_state).update(_NONE)
            self.jobs[name] = Job(checkpoint, sizes[name], {})
            self._meshes[name] = _globals()
        vars(parallel_state).update(_NONE)

    @contextlib.contextmanager
    def on(self, name: str):
        vars(parallel_state).update(self._meshes[name])
        try:
            yield self.jobs[name]
        finally:
            vars(parallel_state).update(_NONE)

    def train(self, name: str, version: int, out: str) -> None:
        """Makes it what it is in `version`, and leaves that in <out>/<name>-v<version>.safetensors."""
        with self.on(name) as job:
            job.step(version)
            job.save(pathlib.Path(out) / f"{name}-v{version}.safetensors")


def train_two(rank: int, world_size: int, agent: str, checkpoints: dict[str, str], out: str, first: int, versions: int):
    """Publishes both in every version; a version that is given up is followed by the next."""
    models = Models(checkpoints)
    with weightwire.models.Publisher({name: weightwire.megatron.model(models.jobs[name].chunks, checkpoint)
                                      for name, checkpoint in checkpoints.items()}, agent=agent) as publisher:
        for version in range(first, first + versions):
            for name in checkpoints:
                models.train(name, version, out)
            publisher.publish(version).wait_released(timeout=60)
            dist.barrier()


def train_through_kills(rank: int, world_size: int, agent: str, checkpoints: dict[str, str], out: str, first: int):
    """As train_two, without an end: one version for each file <out>/go-<version>. <out>/told-<version>-<rank> says how it ended."""
    import time

    models = Models(checkpoints)
    publisher = weightwire.models.Publisher({name: weightwire.megatron.model(models.jobs[name].chunks, checkpoint)
                                             for name, checkpoint in checkpoints.items()}, agent=agent)
    version = first
    while True:
        while not (pathlib.Path(out) / f"go-{version}").exists():
            time.sleep(0.01)
        for name in checkpoints:
            models.train(name, version, out)
        try:
            publisher.publish(version, deadline=30).wait_released(timeout=60)
            told = "released"
        except WeightwireError as error:
            told = str(error)
        (pathlib.Path(out) / f"told-{version}-{rank}").write_text(told)
        version += 1


def train_apart(rank: int, world_size: int, agent: str, checkpoints: dict[str, str], out: str):
    """1: both; 2: the actor alone, although the reward model was trained, too; 3: the reward model alone."""
    models = Models(checkpoints)
    with weightwire.models.Publisher({name: weightwire.megatron.model(models.jobs[name].chunks, checkpoint)
                                      for name, checkpoint in checkpoints.items()}, agent=agent) as publisher:
        try:
            publisher.publish(1, models=["actor"])
            raise AssertionError("a model that was never published was left out")
        except WeightwireError as error:
            assert "'reward' was not published yet" in str(error), error
        for version, which in ((1, None), (2, ["actor"]), (3, ["reward"])):
            for name in checkpoints:
                models.train(name, version, out)
            publisher.publish(version, models=which).wait_released(timeout=60)
            dist.barrier()


def train_verified(rank: int, world_size: int, agent: str, checkpoints: dict[str, str], out: str):
    """Each version is compared with what its oracle saved. In version 3 one element of the reward model is not what it says; nor is
    it in version 6, of the actor alone; in version 7 the oracle of the reward model fails on one rank."""
    models, now = Models(checkpoints), 0

    def export(name: str):
        def pairs():
            if (now, name, rank) == (7, "reward", 2):
                raise RuntimeError("no such file")
            for tensor, value in load_file(f"{out}/{name}-v{now}.safetensors").items():
                if name == "reward" and now in (3, 6) and tensor == "model.norm.weight":
                    value.view(torch.int16)[1] ^= 1
                yield tensor, value
        return pairs

    parts = {name: weightwire.megatron.model(models.jobs[name].chunks, checkpoint, verify=export(name))
             for name, checkpoint in checkpoints.items()}
    with weightwire.models.Publisher(parts, agent=agent, verify_every=1) as publisher:
        for version, which, said in ((1, None, ""), (2, None, ""), (3, None, "reward::model.norm.weight"),
                                     (4, ["actor"], "'reward' was not published yet"), (5, None, ""), (6, ["actor"], ""),
                                     (7, None, "no such file")):
            now = version
            for name in checkpoints:
                models.train(name, version, out)
            try:
                publisher.publish(version, models=which).wait_released(timeout=60)
                assert not said, said
            except WeightwireError as error:
                assert said and said in str(error), (version, error)
            dist.barrier()


class Actor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(37, 12)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(12, 12 if i else 20, bias=bool(i)) for i in range(2))


def fill(module: torch.nn.Module, name: str, version: int) -> dict[str, torch.Tensor]:
    """Sets every parameter by its name, before it is sharded; returns them whole."""
    whole = {}
    for key, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{version} {name} {key}".encode()))
        whole[key] = torch.randn(parameter.shape, generator=generator)
    return whole


def publish_on_disjoint_ranks(rank: int, world_size: int, agent: str, out: str):
    """Three models on four ranks: the actor sharded over ranks 0 and 1, the critic whole on rank 2 and on rank 3, a draft on 3."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))["shard"]
    actor = fully_shard(Actor(), mesh=mesh) if rank < 2 else None
    critic = torch.nn.Linear(7, 3) if rank >= 2 else None
    draft = torch.nn.Linear(5, 5, bias=False) if rank == 3 else None
    wholes: dict[str, dict[str, torch.Tensor]] = {}

    def verify(name: str):
        return lambda: wholes[name].items()

    parts = {"critic": weightwire.torch.model(critic, verify=verify("critic")), "draft": weightwire.torch.model(draft),
             "actor": weightwire.fsdp.model(actor, verify=verify("actor"))}
    with weightwire.models.Publisher(parts, agent=agent) as publisher:
        for version in (1, 2, 3):
            for name, module, blank in (("actor", actor, Actor()), ("critic", critic, torch.nn.Linear(7, 3)),
                                        ("draft", draft, torch.nn.Linear(5, 5, bias=False))):
                whole = wholes[name] = fill(blank, name, version)
                if rank == 0:
                    save_file(whole, f"{out}/{name}-v{version}.safetensors")
                for key, parameter in (module.named_parameters() if module is not None else ()):
                    value = whole[key]
                    if isinstance(parameter, DTensor):
                        at = mesh.get_local_rank()
                        value = value.chunk(2, dim=0)[at] if at < len(value.chunk(2, dim=0)) else value[:0]
                        parameter.to_local().data.copy_(value)
                    else:
                        parameter.data.copy_(value)
            dist.barrier()
            publisher.publish(version).wait_released(timeout=60)
            dist.barrier()
        if rank == 1:
            wholes["actor"]["layers.1.bias"][11] += 1  # its last element
        for which, said in ((["draft"], "without `verify`"), (None, "actor::layers.1.bias: 0.0833 of 12 elements")):
            try:
                publisher.publish(4, models=which, verify=True)
                raise AssertionError(f"not refused: {said}")
            except WeightwireError as error:
                assert said in str(error), error
            dist.barrier()


def disagree(rank: int, world_size: int, agent: str):
    """What `model` says where ranks do not describe one model."""
    for made, said in ((lambda: weightwire.torch.model(None), "no rank has anything of the model"),
                       (lambda: weightwire.torch.model(torch.nn.Linear(3, 3 + rank)), "describe different models"),
                       (lambda: weightwire.torch.model(torch.nn.Linear(3, 3) if rank else {"a.lora_A": torch.zeros(2)}, names=None)
                        if rank else weightwire.torch.model(torch.nn.ModuleDict({"lora_A": torch.nn.Linear(2, 2)})), "adapter")):
        try:
            made()
            raise AssertionError(f"not refused: {said}")
        except WeightwireError as error:
            assert said in str(error), error
        dist.barrier()
