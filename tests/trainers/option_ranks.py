"""Ranks whose megatron-core has options that move, permute, shift or delay parameters."""

from __future__ import annotations

import json
import pathlib

import torch
import torch.distributed as dist

import mcore
import weightwire.megatron
from mcore_ranks import Job, publish_less_one
from optimizer_ranks import Trainer
from weightwire import RefusedError, checkpoint


def gathered(trainer: Trainer, path: pathlib.Path) -> int:
    """Leaves what mcore gathers in `path`, and the parameters as stale as they were; how many elements are."""
    buffers = [buffer for chunk in trainer.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    stale = [buffer.param_data.clone() for buffer in buffers]
    for chunk in trainer.chunks:
        chunk.start_param_sync(force_sync=True)
    trainer.job.save(path)
    count = 0
    for buffer, before in zip(buffers, stale):
        count += int((buffer.param_data != before).sum())
        buffer.param_data.copy_(before)
    return count


def overlapped(rank: int, world_size: int, agent: str, folder: str, out: str, sizes: dict, wrapped: bool):
    """Five versions right after the optimizer's steps; every second one is saved first, by checkpoint.State."""
    trainer = Trainer(folder, sizes, overlap=True)
    chunks = trainer.chunks if wrapped else trainer.job.chunks
    with weightwire.megatron.Publisher(chunks, folder, agent=agent) as publisher:
        model = checkpoint.Model(publisher.spec, lambda: dict(weightwire.megatron.named_tensors(chunks)), json.dumps(trainer.job.hf))
        state = checkpoint.State(checkpoint.Options(("hf_model",), ("hf_model",)), checkpoint.Contents(model), rank=rank,
                                 world_size=world_size, timeout=60)
        for version in range(1, 6):
            if version > 1:
                trainer.step(version)
            stale = gathered(trainer, pathlib.Path(out) / f"v{version}.safetensors")
            assert (stale > 0) == (version > 1), stale
            if version % 2 == 0:
                state.save(f"{out}/step_{version}", attempt="a").result()
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def offloaded(rank: int, world_size: int, agent: str, folder: str, out: str):
    """What an offloading kept is not published when it may be stale, and is when it was gathered before."""
    trainer = Trainer(folder, dict(tp=1), overlap=True)
    buffers = [buffer for chunk in trainer.chunks for buffer in chunk.buffers]
    with weightwire.megatron.Publisher(trainer.chunks, folder, agent=agent) as publisher:
        trainer.step(1)
        for chunk in trainer.chunks:
            for group in chunk.bucket_groups:
                group.finish_grad_sync()  # as every backward pass ends
        for buffer in buffers:
            buffer.offload_to_cpu(move_grads=False)
        try:
            publisher.publish(1)
            raise AssertionError("stale parameters were published")
        except RefusedError as error:
            assert "overlap_param_gather" in str(error) and "offload" in str(error), error
        for buffer in buffers:
            buffer.reload_from_cpu(move_grads=False)
        for chunk in trainer.chunks:
            chunk.start_param_sync(force_sync=True)
        trainer.job.save(pathlib.Path(out) / "v1.safetensors")
        for buffer in buffers:
            buffer.offload_to_cpu(move_grads=False)
        publisher.publish(1).wait_released(timeout=30)
        dist.barrier()


def zero_centred(rank: int, world_size: int, agent: str, folder: str, out: str, sizes: dict):
    """The trainer holds w - 1; what is published is that plus 1, in bf16."""
    job = Job(folder, sizes, {})
    norms = [p for chunk in job.chunks for name, p in chunk.named_parameters() if "layernorm" in name]
    for chunk in job.chunks:
        chunk.config.layernorm_zero_centered_gamma = True
    with torch.no_grad():
        for p in norms:
            p.sub_(1.0)
    with weightwire.megatron.Publisher(job.chunks, folder, agent=agent) as publisher:
        publish_less_one(job, publisher, norms, out)


def expert_bias(rank: int, world_size: int, agent: str, config: dict, out: str, when: str):
    """Float16Module makes the routers' correction bf16, and mcore's first forward pass fp32; then it moves."""
    from megatron.core.transformer.module import Float16Module
    import megatron.core.transformer.moe.moe_utils as moe_utils
    from safetensors.torch import save_file
    moe_utils.te_general_gemm = None  # mcore 0.16.1 without Transformer Engine forgets it
    mcore.start(tp=1)
    chunks = mcore.build({**config, "model_type": "qwen3_moe", "num_experts": config["n_routed_experts"]},
                         moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid",
                         moe_router_bias_update_rate=1e-3)
    wrapped = Float16Module(chunks[0].config, chunks[0])
    corrections = {name: buffer for name, buffer in wrapped.named_buffers() if name.endswith("expert_bias")}
    assert {buffer.dtype for buffer in corrections.values()} == {torch.bfloat16}

    def forward():
        tokens = torch.arange(8).view(1, 8)
        wrapped(tokens, tokens.clone(), torch.zeros(1, 1, 8, 8, dtype=torch.bool))
        found = {n: b for n, b in wrapped.named_buffers() if n.endswith("expert_bias")}
        assert {b.dtype for b in found.values()} == {torch.float32}
        for number, bias in enumerate(found.values()):
            bias.copy_(torch.linspace(-1, 1, bias.numel()) / 3 + number)  # needs more than bf16 has

    def keep(version: int):
        save_file({f"model.layers.{n}.mlp.gate.e_score_correction_bias": b.detach().float().clone() for n, b in enumerate(
            b for name, b in wrapped.named_buffers() if name.endswith("expert_bias"))}, f"{out}/v{version}.safetensors")

    if when == "before":
        forward()
    with weightwire.megatron.Publisher([wrapped], config, agent=agent) as publisher:
        if when == "opened":
            forward()
        for version in (1, 2):
            if version == 2:
                forward()
            keep(version)
            publisher.publish(version).wait_released(timeout=30)


class Quantized(torch.Tensor):
    """Stands for Transformer Engine's Float8Tensor."""


def refused(rank: int, world_size: int, agent: str, folder: str, what: str, said: str):
    """Opening a publisher is refused, and the message says it."""
    job = Job(folder, dict(tp=1), {})
    chunks = list(job.chunks)
    if what == "fsdp2":
        from megatron.core import parallel_state as mpu
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard
        fully_shard(chunks[0], mesh=DeviceMesh.from_group(mpu.get_data_parallel_group(), "cpu"))
    elif what == "megatron-fsdp":
        kind = type("FullyShardedDataParallel", (torch.nn.Module,), {"__module__": "megatron.core.distributed.fsdp.adapter"})
        wrapper = kind()
        wrapper.module = chunks[0]
        chunks = [wrapper]
    elif what == "quantized":
        parameter = next(chunks[0].parameters())
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(parameter.detach().clone().as_subclass(Quantized)))
    else:
        setattr(chunks[0].config, what, True if what != "gtp_weight_remat_size" else 2)
    for attempt in (lambda: weightwire.megatron.Publisher(chunks, folder, agent=agent),
                    lambda: list(weightwire.megatron.named_tensors(chunks))):
        try:
            attempt()
        except RefusedError as error:
            assert said in str(error), error
            continue
        raise AssertionError(f"{what} was read")


def exported(job: Job, change=None):
    """What mcore's own description gives, whole, on every rank; `change` makes it something else."""
    whole = [mcore.gather(job.chunks, job.hf, {name: t.shape for name, t in job.checkpoint.items()})]
    dist.broadcast_object_list(whole, 0)
    for name, tensor in whole[0].items():
        if change is None or change(name, tensor) is not None:
            yield name, tensor if change is None else change(name, tensor)


#: What an exporter would give if an option did this, and what is said of it.
CHANGES = {
    "norms": (lambda n, t: t + 1 if n.endswith("norm.weight") else t, "less by one"),
    "swapped": (lambda n, t: torch.cat([t[len(t) // 2:], t[:len(t) // 2]]) if n.endswith("input_layernorm.weight") else t,
                "its halves are swapped"),
    "alternating": (lambda n, t: t if "down_proj" not in n else t[mcore.interleaved_rows(len(t), 4)].reshape(t.shape), ""),
    "stale": (lambda n, t: torch.cat([t[:1] + 1, t[1:]]) if n.endswith("o_proj.weight") else t, "a stale shard"),
    "other": (lambda n, t: t * 3 if n.endswith("q_proj.weight") else t, "other values"),
    "missing": (lambda n, t: None if n.endswith("v_proj.weight") else t, "the export does not give it"),
    "shape": (lambda n, t: t[None] if n.endswith("k_proj.weight") else t, "the export has the shape"),
}


def verified(rank: int, world_size: int, agent: str, folder: str, out: str, sizes: dict):
    """Right as it is; and every change of the export is found on every rank, before anything is published."""
    import re
    job = Job(folder, sizes, {})
    calls = []

    def export():
        calls.append(changed)
        if changed == "fails" and rank > 0:
            return  # whoever fails is heard of by those that do not
        yield from exported(job, CHANGES[changed][0] if changed else None)

    changed = ""
    with weightwire.megatron.Publisher(job.chunks, folder, agent=agent, verify=export, verify_every=3) as publisher:
        for version in range(1, 6):
            if version > 1:
                job.step(version)
            job.save(pathlib.Path(out) / f"v{version}.safetensors")
            publisher.publish(version, verify=version == 3).wait_released(timeout=30)
            dist.barrier()
        assert len(calls) == 3  # the first, the fourth and the one that was asked for
        for changed, (_, said) in CHANGES.items():
            try:
                publisher.publish(6, verify=True)
                raise AssertionError(f"{changed} was published")
            except RefusedError as error:
                assert re.search(said, str(error)) and "version 6 is not what the trainer's own export gives" in str(error), error
                assert error.tensor in job.checkpoint
        changed = "fails"
        try:
            publisher.publish(6, verify=True)
            raise AssertionError("nothing was compared")
        except RefusedError as error:
            assert "could not be compared" in str(error) and "KeyError: 'fails'" in str(error) and error.rank == "0", error
        changed = ""
        job.save(pathlib.Path(out) / "v6.safetensors")
        publisher.publish(6, verify=True).wait_released(timeout=30)
        dist.barrier()
