"""What the ranks of the Megatron tests do: real megatron-core models, trained by steps on gradients made by name."""

from __future__ import annotations

import json
import pathlib
import zlib

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import mcore
# Imported here so that the fork server has them: a rank then starts in no time.
import megatron.core.models.gpt.gpt_layer_specs  # noqa: F401
import weightwire.megatron


class Job:
    """One rank: its chunks, filled from a checkpoint, and an optimizer."""

    def __init__(self, checkpoint: str, sizes: dict, options: dict, learning_rate: float = 0.25):
        self.hf = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
        mcore.start(**sizes)
        self.chunks = mcore.build(self.hf, **options)
        self.load(checkpoint)
        self.optimizer = torch.optim.SGD([p for chunk in self.chunks for p in chunk.parameters()], lr=learning_rate)

    def load(self, checkpoint: str) -> None:
        self.checkpoint = load_file(f"{checkpoint}/model.safetensors")
        if self.hf["tie_word_embeddings"]:
            self.checkpoint.pop("lm_head.weight", None)
        mcore.load(self.chunks, self.hf, self.checkpoint)

    def step(self, version: int) -> None:
        """Replicas have equal names and get equal gradients, as an all-reduce would give them."""
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if self.hf["tie_word_embeddings"]:
                    name = name.replace("output_layer", "embedding.word_embeddings")
                generator = torch.Generator().manual_seed(zlib.crc32(f"{version} {name}".encode()))
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        self.optimizer.step()

    def save(self, path: pathlib.Path) -> None:
        """Rank 0 writes what all ranks hold, by mcore's own description, as a Hugging Face checkpoint's tensors."""
        whole = mcore.gather(self.chunks, self.hf, {name: t.shape for name, t in self.checkpoint.items()})
        if whole is not None:
            save_file(whole, str(path), metadata={"format": "pt"})
        dist.barrier()


def publish_less_one(job: Job, publisher, norms: list, out: str) -> None:
    """Two versions of a trainer that holds `norms` less one; in <out>/v<n> they are what that plus one is in bf16."""
    for version in (1, 2):
        if version > 1:
            job.step(version)
        kept = [p.detach().clone() for p in norms]
        with torch.no_grad():
            for p in norms:
                p.copy_((p.float() + 1.0).to(p.dtype))
        job.save(pathlib.Path(out) / f"v{version}.safetensors")
        with torch.no_grad():
            for p, before in zip(norms, kept):
                p.copy_(before)
        publisher.publish(version).wait_released(timeout=30)
        dist.barrier()


def train(rank: int, world_size: int, agent: str, checkpoint: str, out: str, sizes: dict, options: dict, spec: str,
          versions: int):
    """Publishes the checkpoint as version 1 and trained ones as 2, 3, …; leaves each in <out>/v<n>.safetensors."""
    job = Job(checkpoint, sizes, options)
    with weightwire.megatron.Publisher(job.chunks, checkpoint, agent=agent) as publisher:
        assert publisher.spec == spec, publisher.spec
        for version in range(1, versions + 1):
            if version > 1:
                job.step(version)
            job.save(pathlib.Path(out) / f"v{version}.safetensors")
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def train_offloaded(rank: int, world_size: int, agent: str, checkpoint: str, out: str):
    """Parameters in the flat buffers of mcore's DDP; from version 2 on they are offloaded when they are published:
    first by mcore's own method, then in verl's way."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    job = Job(checkpoint, dict(tp=1, ep=2), {})
    config = job.chunks[0].config
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True),
                                      Float16Module(config, job.chunks[0]))
    buffers = wrapped.buffers + wrapped.expert_parallel_buffers
    with weightwire.megatron.Publisher([wrapped], checkpoint, agent=agent) as publisher:
        for version in (1, 2, 3):
            if version > 1:
                job.step(version)
            job.save(pathlib.Path(out) / f"v{version}.safetensors")
            for buffer in buffers:
                if version == 2:
                    buffer.offload_to_cpu(move_grads=False)
                elif version == 3:
                    buffer.param_data.cpu_data = buffer.param_data.detach().clone()
                    buffer.param_data.untyped_storage().resize_(0)
            freed = [p.untyped_storage().nbytes() == 0 for p in wrapped.parameters()]
            assert freed and all(freed) == any(freed) == (version > 1)
            publisher.publish(version).wait_released(timeout=30)
            if version == 2:
                for buffer in buffers:
                    buffer.reload_from_cpu(move_grads=False)
                    buffer.param_data_cpu = None
            dist.barrier()


def read_back(rank: int, world_size: int, agent: str, checkpoint: str, out: str):
    """The generator of whole tensors, on rank 0; compared there with what mcore's own description gives."""
    from weightwire.hf_tensors import HfReader, checkpoint_tensors, iter_hf_tensors
    job = Job(checkpoint, dict(tp=2), {})
    metas = checkpoint_tensors(checkpoint)
    with weightwire.megatron.Publisher(job.chunks, checkpoint, agent=agent) as publisher:
        reader = HfReader(metas, agent=agent) if rank == 0 else None
        for version in (1, 2, 3):
            job.step(version)
            path = pathlib.Path(out) / f"v{version}.safetensors"
            job.save(path)
            got = {}
            for name, tensor in iter_hf_tensors(publisher, version, reader, deadline=30):
                assert name not in got
                got[name] = tensor.clone()
                tensor.zero_()  # the consumer's own: the stage is mapped read-only
                if version == 2:
                    break  # a consumer that stops early must not hold up what follows
            if rank == 0 and version != 2:
                want = load_file(str(path))
                assert list(got) == [meta.name for meta in metas]
                assert all(torch.equal(got[name], want[name]) for name in want)
            dist.barrier()
        if reader:
            reader.close()
