"""Ranks whose megatron-core has options that move, permute, shift or delay parameters."""

from __future__ import annotations

import json
import pathlib
import zlib
from types import SimpleNamespace

import torch
import torch.distributed as dist

import mcore
import weightwire.megatron
from mcore_ranks import Job, publish_less_one
from optimizer_ranks import Trainer, patch_for_cpu
from weightwire import RefusedError, checkpoint, megatron_options


def gathered(chunks: list, job: Job, path: pathlib.Path) -> int:
    """Leaves what mcore gathers in `path`, and the parameters as stale as they were; how many elements are."""
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    stale = [parameter.detach().clone() for parameter in parameters]
    for chunk in chunks:
        chunk.start_param_sync(force_sync=True)
    job.save(path)
    count = sum(int((parameter != before).sum()) for parameter, before in zip(parameters, stale))
    put_back(parameters, stale)
    return count


def put_back(parameters: list, held: list) -> None:
    with torch.no_grad():
        for parameter, before in zip(parameters, held):
            parameter.copy_(before)


def overlapped(rank: int, world_size: int, agent: str, folder: str, out: str, sizes: dict, wrapped: bool):
    """Five versions right after the optimizer's steps, published, and saved by checkpoint.State, each time from what is stale."""
    trainer = Trainer(folder, sizes, overlap=True)
    chunks = trainer.chunks if wrapped else trainer.job.chunks
    assert [id(one) for one in megatron_options.ddp_wrappers(chunks)] == [id(one) for one in trainer.chunks]  # each is gathered once
    with weightwire.megatron.Publisher(chunks, folder, agent=agent) as publisher:
        model = checkpoint.Model(publisher.spec, lambda: dict(weightwire.megatron.named_tensors(chunks)), json.dumps(trainer.job.hf))
        state = checkpoint.State(checkpoint.Options(("hf_model",), ("hf_model",)), checkpoint.Contents(model), rank=rank,
                                 world_size=world_size, timeout=60)
        for version in range(1, 6):
            if version > 1:
                trainer.step(version)
            for use in (lambda: state.save(f"{out}/step_{version}", attempt="a").result(),
                        lambda: publisher.publish(version).wait_released(timeout=30)):
                stale = gathered(trainer.chunks, trainer.job, pathlib.Path(out) / f"v{version}.safetensors")
                assert (stale > 0) == (version > 1), stale
                parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
                before = [parameter.detach().clone() for parameter in parameters]
                use()
                put_back(parameters, before)
            dist.barrier()


def gather_uneven(into: list, _, group=None, async_op: bool = False) -> None:
    """torch's all_gather of parts of different sizes, which NCCL does and gloo refuses. This rank's part is in its place already."""
    handles = [dist.broadcast(part, dist.get_global_rank(group, rank), group=group, async_op=async_op)
               for rank, part in enumerate(into) if part.numel()]
    return SimpleNamespace(wait=lambda: [handle.wait() for handle in handles]) if async_op else None


def layer_wise(rank: int, world_size: int, agent: str, folder: str, out: str, sizes: dict, begun: bool):
    """As `overlapped`, by mcore's LayerWiseDistributedOptimizer, which gives each rank whole parameters. What was accumulated in
    gradients stays. `begun`: the trainer has begun to gather, which arrives in the memory of the gradients."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import Float16Module
    job = Job(folder, sizes, {})
    patch_for_cpu()
    dist.all_gather = gather_uneven
    config = job.chunks[0].config
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, bucket_size=20_000, overlap_grad_reduce=True,
                                        overlap_param_gather=True)
    chunks = [DistributedDataParallel(config, ddp, Float16Module(config, chunk)) for chunk in job.chunks]
    parameters: dict[bool, list] = {False: [], True: []}
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameters[not getattr(parameter, "allreduce", True)].append(parameter)
    adam = torch.optim.Adam([dict(params=found, is_expert_parallel=expert) for expert, found in parameters.items() if found], lr=0.01)
    optimizer = LayerWiseDistributedOptimizer(
        [adam], OptimizerConfig(optimizer="adam", lr=0.01, bf16=True, params_dtype=torch.bfloat16, overlap_param_gather=True,
                                clip_grad=0.0), ProcessGroupCollection.use_mpu_process_groups(), [lambda *_: None], model_chunks=chunks)
    with weightwire.megatron.Publisher(chunks, folder, agent=agent) as publisher:
        for version in range(1, 6):
            if version > 1:
                for chunk in job.chunks:
                    for name, parameter in chunk.named_parameters():
                        generator = torch.Generator().manual_seed(zlib.crc32(f"{version} {name}".encode()))
                        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))
                optimizer.prepare_grads()
                optimizer.step_with_ready_grads()
            stale = gathered(chunks, job, pathlib.Path(out) / f"v{version}.safetensors")
            assert (stale > 0) == (version > 1), stale
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.main_grad.fill_(version + 0.5)
                if begun:
                    chunk.start_param_sync()
                    assert any(group.param_gather_handle for group in chunk.bucket_groups)
            publisher.publish(version).wait_released(timeout=30)
            assert begun or all(bool((p.main_grad == version + 0.5).all()) for chunk in chunks for p in chunk.parameters())
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
    import torch._dynamo
    from megatron.core.transformer.module import Float16Module
    import megatron.core.transformer.moe.moe_utils as moe_utils
    torch._dynamo.config.disable = True  # mcore compiles the router: most of this test's time, a minute on a busy machine
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
    elif what == "adapter":  # as Megatron-Bridge's LoRA has it
        layer = chunks[0].decoder.layers[0].self_attention
        layer.linear_proj = torch.nn.ModuleDict(dict(to_wrap=layer.linear_proj, adapter=torch.nn.Linear(2, 2)))
    elif what == "quantile_balancing":
        chunks[0].config.moe_router_load_balancing_type = [what]
    elif what in ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather"):
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True)
        chunks = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in chunks]
        setattr(ddp, what, True)
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
    try:
        weightwire.megatron.Publisher(job.chunks, folder, agent=agent, verify="export")
        raise AssertionError("mcore has no export of its own")
    except RefusedError as error:
        assert "verify='export'" in str(error), error
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
