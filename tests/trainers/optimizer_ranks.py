"""What the ranks of the optimizer tests do: megatron-core's own distributed optimizer, saved and loaded by mcore's code."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import zlib

import torch
import torch.distributed as dist

import megatron.core.dist_checkpointing as dist_checkpointing
import mcore
from mcore_ranks import Job
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module
from weightwire import checkpoint
from weightwire.checkpoint.megatron_optimizer import distributed
from weightwire.megatron import named_tensors, parallel_spec

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def patch_for_cpu() -> None:
    """What mcore's optimizers assume of CUDA, beyond what mcore.py has."""
    make, kind = torch.tensor, torch.Tensor.type
    torch.tensor = lambda *values, device=None, **options: make(*values, **options)
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")
    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def with_step(self, parameter, tensors):  # mcore looks for one in the checkpoint where Adam is torch's
        group, order = self.model_param_group_index_map[parameter]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        fill(self, parameter, {"step": state["step"], **tensors})
    DistributedOptimizer._set_main_param_and_optimizer_states = with_step


class Trainer:
    """One rank: chunks in mcore's DDP, and its optimizer."""

    def __init__(self, folder: str, sizes: dict, distributed: bool = True, overlap: bool = False):
        self.job = Job(folder, sizes, {})
        patch_for_cpu()
        config = self.job.chunks[0].config
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, bucket_size=20_000 if distributed else None,
                                            overlap_grad_reduce=overlap, overlap_param_gather=overlap)
        self.chunks = [DistributedDataParallel(config, ddp, Float16Module(config, chunk)) for chunk in self.job.chunks]
        self.optimizer = get_megatron_optimizer(OptimizerConfig(
            optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed,
            overlap_param_gather=overlap, clip_grad=0.0), self.chunks)

    def step(self, number: int) -> None:
        for chunk in self.job.chunks:
            for name, parameter in chunk.named_parameters():
                if self.job.hf["tie_word_embeddings"]:  # replicas get equal gradients, as an all-reduce would give them
                    name = name.replace("output_layer", "embedding.word_embeddings")
                generator = torch.Generator().manual_seed(zlib.crc32(f"{number} {name}".encode()))
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
        self.optimizer.prepare_grads()  # `step` would clip them, by kernels
        self.optimizer.step_with_ready_grads()

    def sharded(self, loading: bool, metadata: dict = METADATA) -> dict:
        model = {"model" if len(self.job.chunks) == 1 else f"model{v}": chunk.sharded_state_dict(metadata=metadata)
                 for v, chunk in enumerate(self.job.chunks)}
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)}


    def state(self, rank: int, world_size: int, load_from: str = "") -> checkpoint.State:
        """As a trainer would save and load by weightwire."""
        config = json.dumps(self.job.hf)
        spec = parallel_spec(self.chunks, self.job.hf)
        contents = checkpoint.Contents(checkpoint.Model(spec, lambda: dict(named_tensors(self.chunks)), config),
                                       distributed(self.optimizer, self.chunks, spec, rank, config))
        both = ("model", "optimizer")
        options = checkpoint.Options(both, both, load_from={content: load_from for content in both if load_from})
        return checkpoint.State(options, contents, rank=rank, world_size=world_size, timeout=60)

    def save(self, folder: str, metadata: dict = METADATA) -> None:
        """All of it by mcore's own code."""
        multiprocessing.current_process()._config["daemon"] = False  # it writes in processes of its own
        dist_checkpointing.save({**self.sharded(False, metadata), "iteration": 7}, folder)
        filesystem_async._results_queue = None  # the one that it keeps: its process ends with the last reference
        gc.collect()

    def load(self, folder: str, metadata: dict) -> None:
        """All of it by mcore's own code."""
        loaded = dist_checkpointing.load(self.sharded(True, metadata), folder)
        for v, chunk in enumerate(self.job.chunks):
            chunk.load_state_dict(loaded["model" if len(self.job.chunks) == 1 else f"model{v}"])
        self.optimizer.load_state_dict(loaded["optimizer"])
        for one in self.optimizer.chained_optimizers:  # mcore gives torch's Adam one step for all, which each would count up
            for state in one.optimizer.state.values():
                state["step"] = state["step"].clone()

    def held(self) -> dict:
        """Copies of everything that this rank trains by."""
        found = {name: tensor.detach().clone() for name, tensor in named_tensors(self.chunks)}
        for number, one in enumerate(self.optimizer.chained_optimizers):
            masters = [master for group in one.optimizer.param_groups for master in group["params"]]
            for m, master in enumerate(masters):
                found[f"{number} {m}"] = master.detach().clone()
                found.update({f"{number} {m} {key}": torch.as_tensor(value).clone()
                              for key, value in one.optimizer.state[master].items()})
        return found

    def forget(self) -> None:
        with torch.no_grad():
            for _, tensor in named_tensors(self.chunks):
                tensor.fill_(3)
            for one in self.optimizer.chained_optimizers:
                for master in (master for group in one.optimizer.param_groups for master in group["params"]):
                    for tensor in [master, *one.optimizer.state[master].values()]:
                        tensor.fill_(3)


    def number(self, whole: dict) -> None:
        """Makes this rank's states of the numbers of `whole` (mcore's global tensors, fp32), by mcore's own description of
        where its parameters lie: the moment n, the second -n, the master n + 0.5."""
        numbers = {}
        parameters = [p for chunk in self.job.chunks for p in chunk.parameters()]
        for part in mcore.sharded(self.job.chunks):
            at = part.data.storage_offset()
            p = next(p for p in parameters if p.untyped_storage().data_ptr() == part.data.untyped_storage().data_ptr()
                     and p.storage_offset() <= at < p.storage_offset() + p.numel())
            made = numbers.setdefault(p, torch.zeros(p.shape))
            into = made.as_strided(part.data.shape, part.data.stride(), at - p.storage_offset())
            into.copy_(whole[part.key][mcore.place(part)].reshape(into.shape))
        for one in self.optimizer.chained_optimizers:
            for bucket in (bucket for by_dtype in one.gbuf_ranges for of in by_dtype.values() for bucket in of):
                for p, found in bucket["param_map"].items():
                    group, order = one.model_param_group_index_map[p]
                    master = one.optimizer.param_groups[group]["params"][order]
                    mine = numbers[p].flatten()[found["param"].start:found["param"].end]
                    with torch.no_grad():
                        master.copy_(mine + 0.5)
                        one.optimizer.state[master]["exp_avg"].copy_(mine)
                        one.optimizer.state[master]["exp_avg_sq"].copy_(-mine)


def numbered(shapes: dict) -> dict:
    """Of each element of the whole tensors its number, in the order of their names."""
    made, first = {}, 1
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        made[name] = torch.arange(first, first + math.prod(shape), dtype=torch.float32).reshape(shape)
        first += math.prod(shape)
    return made


def save_numbered(rank: int, world_size: int, folder: str, out: str, sizes: dict):
    """What tests/data/checkpoints/torch_dist-optimizer holds."""
    trainer = Trainer(folder, sizes)
    trainer.step(1)
    trainer.number(mcore.from_hf(trainer.job.hf, numbered({n: t.shape for n, t in trainer.job.checkpoint.items()})))
    trainer.save(out)


def same(got: dict, want: dict, what: str) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), f"{what}: {name} differs"


def save(rank: int, world_size: int, folder: str, out: str, sizes: dict, metadata: dict, by_us: bool = True):
    """Trains two steps; saves by mcore's code into <out>/mcore and by weightwire's into <out>/state."""
    trainer = Trainer(folder, sizes)
    trainer.step(1)
    trainer.step(2)
    if by_us:
        trainer.state(rank, world_size).save(f"{out}/state", attempt="one").result(60)
    trainer.save(f"{out}/mcore", metadata)


def save_plain(rank: int, world_size: int, folder: str, out: str, sizes: dict):
    """mcore's optimizer that shards nothing over data-parallel ranks; then each rank loads its own states by weightwire."""
    trainer = Trainer(folder, sizes, distributed=False)
    trainer.step(1)
    trainer.save(out)
    names = {id(p): name for chunk in trainer.job.chunks for name, p in chunk.named_parameters()}
    live = {"fp32_param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    (one,) = trainer.optimizer.chained_optimizers
    for parameters, masters in zip(one.float16_groups, one.fp32_from_float16_groups):
        for p, master in zip(parameters, masters):
            held = {"fp32_param": master.detach(), **one.optimizer.state[master]}
            for group, tensors in live.items():
                tensors[names[id(p)]] = held[group]
    assert live["exp_avg"].keys() == set(names.values())
    spec = parallel_spec(trainer.chunks, trainer.job.hf)
    for group, want in live.items():
        into = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
        checkpoint.load(out, spec, rank, into, group=group, config=f"{folder}/config.json")
        same(into, want, group)
    dist.barrier()


def go_on(rank: int, world_size: int, folder: str, out: str, sizes: dict, metadata: dict):
    """Under another layout: what mcore loads of its own save, and a further step, are what weightwire's save gives when
    weightwire loads it, and when mcore loads what it was converted to."""
    trainer = Trainer(folder, sizes)
    trainer.step(9)  # states exist; torch's Adam has none before
    trainer.load(f"{out}/mcore", metadata)
    loaded = trainer.held()
    trainer.step(3)
    stepped = trainer.held()
    for what, load in (("weightwire", lambda: trainer.state(rank, world_size).load(f"{out}/state")),
                       ("converted", lambda: trainer.load(f"{out}/converted", metadata))):
        trainer.forget()
        load()
        same(trainer.held(), loaded, what)
        trainer.step(3)
        same(trainer.held(), stepped, what)
    trainer.forget()
    report = trainer.state(rank, world_size, f"{out}/mcore").load(f"{out}/none")  # straight out of what mcore saved
    assert (report.left, report.iteration) == ({}, 7)
    same(trainer.held(), loaded, "from mcore's")
    trainer.step(3)
    same(trainer.held(), stepped, "from mcore's")
    dist.barrier()
