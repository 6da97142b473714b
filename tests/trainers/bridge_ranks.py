"""Ranks whose models mbridge or Megatron-Bridge built, with Transformer Engine's names (stub_te.py).

They are loaded by mcore's description, as the others: Megatron-Bridge 0.3.1 itself cannot load a vocabulary that does
not divide by tp.
"""

from __future__ import annotations

import json
import pathlib

import stub_te

stub_te.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import mcore  # noqa: E402
from mcore_ranks import Job, publish_less_one  # noqa: E402

stub_te.keep_extra_state_whole()


class BridgeJob(Job):
    """As Job, with models that a bridge built."""

    def __init__(self, kind: str, checkpoint: str, sizes: dict):
        self.hf = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
        mcore.start(**sizes)
        self.bridge, self.chunks = {"mbridge": mbridge, "megatron-bridge": megatron_bridge}[kind](checkpoint)
        self.optimizer = torch.optim.SGD([p for chunk in self.chunks for p in chunk.parameters()], lr=0.25)
        from megatron.core import parallel_state as mpu
        for chunk in self.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith(("word_embeddings.weight", "output_layer.weight")):
                    self.hf["padded_vocab"] = parameter.shape[0] * mpu.get_tensor_model_parallel_world_size()
        self.load(checkpoint)


def mbridge(checkpoint: str):
    from mbridge import AutoBridge
    bridge = AutoBridge.from_pretrained(checkpoint)
    # The usual dispatcher needs CUDA streams, and this one sequences of equal length.
    bridge.set_extra_args(moe_token_dispatcher_type="allgather", variable_seq_lengths=False)
    models = bridge.get_model(use_cpu_initialization=True)
    return bridge, models


def megatron_bridge(checkpoint: str):
    from megatron.core import parallel_state as mpu
    from megatron.bridge import AutoBridge
    bridge = AutoBridge.from_hf_pretrained(checkpoint)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.use_cpu_initialization = True
    provider.gradient_accumulation_fusion = False  # an extension for CUDA
    provider.tensor_model_parallel_size = mpu.get_tensor_model_parallel_world_size()
    provider.pipeline_model_parallel_size = mpu.get_pipeline_model_parallel_world_size()
    provider.expert_model_parallel_size = mpu.get_expert_model_parallel_world_size()
    provider.expert_tensor_parallel_size = mpu.get_expert_tensor_parallel_world_size()
    provider.sequence_parallel = provider.expert_model_parallel_size > 1 and provider.tensor_model_parallel_size > 1
    provider.pipeline_dtype = torch.bfloat16
    provider.should_pad_vocab, provider.make_vocab_size_divisible_by = True, 128
    provider.moe_token_dispatcher_type = "allgather"
    provider.moe_permute_fusion = False
    provider.finalize()
    models = provider.provide_distributed_model(wrap_with_ddp=False, bf16=True)
    return bridge, models


def train(rank: int, world_size: int, kind: str, by: str, agent: str, checkpoint: str, out: str, sizes: dict):
    """Publishes `by` the scheme, the conversion tasks or mbridge's export; leaves what mcore's description gives in <out>/v<n>."""
    import weightwire.mbridge
    import weightwire.megatron
    import weightwire.megatron_bridge
    job = BridgeJob(kind, checkpoint, sizes)
    if by == "tasks":
        # The bridge's export cannot gather a vocabulary that does not divide by tp.
        verify = {} if job.hf["vocab_size"] % sizes.get("tp", 1) else dict(verify="export", verify_every=2)
        opened = weightwire.megatron_bridge.Publisher(job.bridge, job.chunks, agent=agent, **verify)
    elif by in ("export", "unverified"):
        verify = dict(verify="export", verify_every=2) if by == "export" else {}
        opened = weightwire.mbridge.Publisher(job.bridge, job.chunks, agent=agent, **verify)
    else:
        opened = weightwire.megatron.Publisher(
            job.chunks, job.bridge.hf_config if kind == "mbridge" else job.bridge.hf_pretrained.config, agent=agent)
        assert "spec=te" in opened.spec, opened.spec
    with opened as publisher:
        for version in (1, 2, 3):
            if version > 1:
                job.step(version)
            job.save(pathlib.Path(out) / f"v{version}.safetensors")
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def delayed(rank: int, world_size: int, agent: str, folder: str, out: str):
    """mcore's DDP over mbridge's model, with overlap_param_gather: each rank has changed its own part of a buffer, as the distributed
    optimizer does. Of what is frozen nothing changes."""
    import weightwire.mbridge
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from option_ranks import gathered
    job = BridgeJob("mbridge", folder, {})
    frozen = [p for name, p in job.chunks[0].named_parameters() if "word_embeddings" in name]
    for parameter in frozen:
        parameter.requires_grad = False
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=20_000, overlap_grad_reduce=True,
                                        overlap_param_gather=True)
    chunks = [DistributedDataParallel(chunk.module.config, ddp, chunk) for chunk in job.chunks]
    job.chunks[0].module.config.use_mup = True
    try:
        weightwire.mbridge.Publisher(job.bridge, chunks, agent=agent)
        raise AssertionError("use_mup was read")
    except weightwire.RefusedError as error:
        assert "use_mup=True" in str(error), error
    job.chunks[0].module.config.use_mup = False
    with weightwire.mbridge.Publisher(job.bridge, chunks, agent=agent, verify="export", verify_every=1) as publisher:
        for version in (1, 2, 3):
            if version > 1:
                for bucket in (bucket for chunk in chunks for buffer in chunk.buffers for bucket in buffer.buckets):
                    bucket.param_data.chunk(world_size)[rank].add_(version)
            stale = gathered(chunks, job, pathlib.Path(out) / f"v{version}.safetensors")
            assert (stale > 0) == (version > 1), stale
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()
        export = job.bridge.export_weights
        for said, what in (("less by one", "weight"), ("changed although they require no gradient", "word_embeddings")):
            job.bridge.export_weights = lambda models: ((name, tensor + (what == "weight")) for name, tensor in export(models))
            if what != "weight":
                frozen[0].data[0] += 1
            try:
                publisher.publish(4)
                raise AssertionError(f"{said}: published")
            except weightwire.RefusedError as error:
                assert said in str(error) and what in error.tensor, error


def interleaved(rank: int, world_size: int, by: str, agent: str, folder: str, out: str, size: int):
    """Transformer Engine's grouped experts with blocks of gate and up in turn."""
    import weightwire.mbridge
    import weightwire.megatron
    import weightwire.megatron_bridge
    from weightwire import RefusedError
    from weightwire.megatron_state import unwrap
    job = BridgeJob("mbridge" if by == "mbridge" else "megatron-bridge", folder, dict(ep=2))
    fused = [p for chunk in job.chunks for name, p in chunk.named_parameters() if ".experts.linear_fc1.weight" in name]
    assert fused
    for chunk in job.chunks:
        unwrap(chunk).config.moe_mlp_glu_interleave_size = size
    opened = (weightwire.mbridge.Publisher(job.bridge, job.chunks, agent=agent) if by == "mbridge" else
              weightwire.megatron_bridge.Publisher(job.bridge, job.chunks, agent=agent) if by == "tasks" else
              weightwire.megatron.Publisher(job.chunks, job.bridge.hf_pretrained.config, agent=agent))
    with opened as publisher:
        for version in (1, 2):
            if version > 1:
                job.step(version)
            job.save(pathlib.Path(out) / f"v{version}.safetensors")
            plain = [p.detach().clone() for p in fused]
            with torch.no_grad():
                for p in fused:
                    p.copy_(p[mcore.interleaved_rows(len(p), size)])
            publisher.publish(version).wait_released(timeout=30)
            try:
                dict(weightwire.megatron.named_tensors(job.chunks))
                raise AssertionError("a checkpoint would have taken permuted rows")
            except RefusedError as error:
                assert "moe_mlp_glu_interleave_size" in str(error), error
            with torch.no_grad():
                for p, before in zip(fused, plain):
                    p.copy_(before)
            dist.barrier()


def mappings(rank: int, world_size: int, tp: int):
    """Every kind of mapping that Megatron-Bridge has, on random shards: what our boxes (and what is added) give is what the mapping
    itself gathers. Of the other ranks' boxes too: each element comes from one tensor-parallel rank, or from all that have it."""
    from types import SimpleNamespace

    from megatron.bridge.models.conversion import param_mapping as pm
    from weightwire.megatron_bridge import convert
    from weightwire.memory import TensorMeta

    mcore.start(tp=tp)

    class ColumnParallelLinear(torch.nn.Module):
        config = SimpleNamespace(
            num_attention_heads=8, num_query_groups=4, kv_channels=6, hidden_size=20, attention_output_gate=False,
            linear_key_head_dim=4, linear_value_head_dim=6, linear_num_key_heads=4, linear_num_value_heads=8,
            mamba_num_heads=8, mamba_head_dim=3, mamba_state_dim=2, mamba_num_groups=4)

    class Gated(ColumnParallelLinear):
        config = SimpleNamespace(**{**vars(ColumnParallelLinear.config), "attention_output_gate": True})

    Gated.__name__ = "ColumnParallelLinear"

    class RowParallelLinear(ColumnParallelLinear):
        pass

    class RMSNorm(ColumnParallelLinear):
        pass

    class LooseGatedMLP(pm.GatedMLPMapping):
        """A newer version's subclass of a kind that is known."""

    column, gated, row, norm = ColumnParallelLinear(), Gated(), RowParallelLinear(), RMSNorm()
    m = "decoder.layers.0.mixer.weight"
    gdn = 2 * 4 * 4 + 2 * 8 * 6 + 2 * 8
    mamba = 2 * 8 * 3 + 2 * 2 * 4 + 8
    cases = [
        (pm.QKVMapping(m, q="q", k="k", v="v"), column, ((8 + 2 * 4) * 6 // tp, 20)),
        (pm.QKVMapping(m, q="q", k="k", v="v"), column, ((8 + 2 * 4) * 6 // tp,)),
        (pm.QKVMapping(m, q="q", k="k", v="v"), gated, ((2 * 8 + 2 * 4) * 6 // tp, 20)),
        (pm.ConcatenatedQKVMapping(m, "qkv"), column, ((8 + 2 * 4) * 6 // tp, 20)),
        (pm.KVMapping(m, k="k", v="v"), column, (2 * 4 * 6 // tp, 20)),
        (pm.GatedMLPMapping(m, gate="gate", up="up"), column, (2 * 24 // tp, 5)),
        (pm.GatedMLPMapping(m, gate="gate", up="up"), column, (2 * 24 // tp,)),
        (LooseGatedMLP(m, gate="gate", up="up"), column, (2 * 24 // tp, 5)),
        (pm.MambaInProjMapping(m, "in_proj"), column, (mamba // tp, 7)),
        (pm.MambaConv1dMapping(m, "conv1d"), column, ((8 * 3 + 2 * 2 * 4) // tp, 1, 4)),
        (pm.GDNConv1dMapping(m, "conv1d"), column, ((2 * 4 * 4 + 8 * 6) // tp, 1, 4)),
        (pm.GDNLinearMapping(m, qkvz="qkvz", ba="ba"), column, (gdn // tp, 20)),
        (pm.RMSNorm2ZeroCenteredRMSNormMapping(m, "norm"), norm, (20,)),
        (pm.AutoMapping(m, "w"), column, (24 // tp, 5)), (pm.AutoMapping(m, "w"), row, (5, 24 // tp)),
        (pm.AutoMapping(m, "w", permute_dims=(1, 0)), column, (24 // tp, 5)),
        (pm.ReplicatedMapping(m, "w"), norm, (20,)), (pm.DirectMapping(m, "w"), norm, (3, 4)),
    ]
    if hasattr(pm, "QKVGMapping"):
        cases.append((pm.QKVGMapping(m, q="q", k="k", v="v", g="g"), column, ((8 + 2 * 4) * 6 // tp + 8 // tp, 20)))
    if hasattr(pm, "GDNLinearMappingSeparate"):
        cases.append((pm.GDNLinearMappingSeparate(m, qkv="qkv", z="z", b="b", a="a"), column, (gdn // tp, 20)))
    for number, (mapping, module, shape) in enumerate(cases):
        shared = isinstance(module, RMSNorm)
        generator = torch.Generator().manual_seed(number * 10 + (0 if shared else rank))
        local = torch.randn(shape, generator=generator).to(torch.bfloat16)
        want = {name: t.clone() for name, t in mapping.megatron_to_hf(local.clone(), module).items()}
        whole = {name: TensorMeta(name, "BF16", tuple(t.shape)) for name, t in want.items()}
        task = SimpleNamespace(mapping=mapping, megatron_module=module, global_param_name=m)
        found = convert(task, shape, whole)
        flat = (local + found.added if found.added else local).reshape(-1)
        mine = [(box, flat[place(box)]) for box in found.boxes]
        everyone = [mine] * world_size
        dist.all_gather_object(everyone, mine)
        got = {name: torch.full(tuple(t.shape), float("nan"), dtype=torch.bfloat16) for name, t in want.items()}
        for one in everyone:
            for box, block in one:
                got[box.name][tuple(slice(b, b + e) for b, e in zip(box.begin, box.extent))] = block
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (number, type(mapping).__name__, name)
        count = sum(int(torch.tensor(box.extent).prod()) for box in found.boxes)
        assert count == local.numel(), (number, count)


def place(box) -> torch.Tensor:
    """Of each element of a box, where it lies in the local tensor."""
    index = torch.tensor(box.offset)
    for d, (extent, stride) in enumerate(zip(box.extent, box.stride)):
        index = index + (torch.arange(extent) * stride).view([-1 if k == d else 1 for k in range(len(box.extent))])
    return index


def fused_experts(rank: int, world_size: int, tp: int):
    """All experts of a layer in one tensor of the checkpoint, one after another here: where each lies in it, and whether it is
    transposed there, as Megatron-Bridge 0.6 stacks what its mapping gives. Older ones have no such mappings."""
    from types import SimpleNamespace

    from megatron.bridge.models.conversion import param_mapping as pm
    from weightwire.megatron_bridge import convert
    from weightwire.memory import TensorMeta

    mcore.start(tp=tp)
    if not hasattr(pm, "FusedExpertMapping"):
        return

    class ColumnParallelLinear(torch.nn.Module):
        config = SimpleNamespace(num_moe_experts=3)

    class RowParallelLinear(ColumnParallelLinear):
        pass

    for turned in (False, True):
        for kind, module, rows, columns in ((pm.FusedExpertMapping, RowParallelLinear(), 5, 24 // tp),
                                            (pm.FusedGatedExpertMapping, ColumnParallelLinear(), 2 * 24 // tp, 5)):
            full: dict = {}
            got: dict = {}
            for expert in range(3):
                name = f"decoder.layers.0.mlp.experts.linear_fc1.weight{expert}"
                mapping = kind(name, "model.experts", transpose_on_export=turned)
                local = torch.randn((rows, columns), generator=torch.Generator().manual_seed(expert * 100 + rank)).to(torch.bfloat16)
                (key, whole), = mapping.megatron_to_hf(local.clone(), module).items()
                full[expert] = whole.t() if turned else whole
                shape = (3, *full[expert].shape)
                task = SimpleNamespace(mapping=mapping, megatron_module=module, global_param_name=name)
                found = convert(task, (rows, columns), {key: TensorMeta(key, "BF16", shape)})
                mine = [(box, local.reshape(-1)[place(box)]) for box in found.boxes]
                everyone = [mine] * world_size
                dist.all_gather_object(everyone, mine)
                tensor = got.setdefault(key, torch.full(shape, float("nan"), dtype=torch.bfloat16))
                for one in everyone:
                    for box, block in one:
                        tensor[tuple(slice(b, b + e) for b, e in zip(box.begin, box.extent))] = block
            assert torch.equal(got[key], torch.stack([full[e] for e in range(3)])), (kind.__name__, turned)


def computing(rank: int, world_size: int):
    """A mapping that computes is refused by name; so is one that needs other parameters, and it keeps nothing of our numbers."""
    from types import SimpleNamespace

    from megatron.bridge.models.conversion import param_mapping as pm
    from weightwire import RefusedError
    from weightwire.megatron_bridge import convert
    from weightwire.memory import TensorMeta

    mcore.start()

    class Scaled(pm.ReplicatedMapping):
        def megatron_to_hf(self, weights, module):
            return {"w": weights * 2}

    class Collecting:
        def __init__(self):
            self.cache: dict = {}

        def maybe_modify_converted_hf_weight(self, task, converted, state):
            self.cache.update(converted)
            return {}

    bridge = Collecting()
    name = "decoder.layers.0.mlp.experts.linear_fc1.weight0"
    for mapping, owner, said in ((Scaled("x", "w"), None, "a Scaled: .*computes it"),
                                 (pm.GatedMLPMapping("x", gate="w", up="w2"), bridge, "gives nothing for this parameter alone")):
        task = SimpleNamespace(mapping=mapping, megatron_module=torch.nn.Linear(1, 1), global_param_name=name)
        try:
            convert(task, (4, 3), {"w": TensorMeta("w", "BF16", (4, 3))}, owner)
        except RefusedError as error:
            import re
            assert error.tensor == name and re.search(said, str(error)), error
            continue
        raise AssertionError(said)
    assert bridge.cache == {}


def added(rank: int, world_size: int, agent: str, folder: str, out: str):
    """Norms that the bridge itself maps as held less one: published as its mapping gives them."""
    from megatron.bridge.models.conversion import param_mapping as pm
    import weightwire.megatron_bridge
    job = BridgeJob("megatron-bridge", folder, dict(tp=2))
    make = job.bridge.get_conversion_tasks

    def tasks(*arguments, **options):
        found = [task for task in make(*arguments, **options) if task is not None]
        for task in found:
            if type(task.mapping) is pm.AutoMapping and "norm" in task.param_name:
                object.__setattr__(task, "mapping", pm.RMSNorm2ZeroCenteredRMSNormMapping(  # the dataclass is frozen
                    task.mapping.megatron_param, task.mapping.hf_param))
        return found

    job.bridge.get_conversion_tasks = tasks
    norms = [p for chunk in job.chunks for name, p in chunk.named_parameters() if "norm" in name]
    with weightwire.megatron_bridge.Publisher(job.bridge, job.chunks, agent=agent) as publisher:
        publish_less_one(job, publisher, norms, out)


def adapted(rank: int, world_size: int, agent: str, folder: str):
    """Megatron-Bridge's own LoRA: its export merges what it trains, and its tasks are of the weights without."""
    from megatron.bridge.peft.lora import LoRA
    import weightwire.megatron
    import weightwire.megatron_bridge
    from weightwire import RefusedError
    job = BridgeJob("megatron-bridge", folder, {})
    models = LoRA(target_modules=["linear_proj"], dim=4)(job.chunks, training=True)
    named = [name for chunk in models for name, parameter in chunk.named_parameters() if parameter.requires_grad]
    assert named and all(".adapter." in name for name in named), named
    for attempt in (lambda: weightwire.megatron_bridge.Publisher(job.bridge, models, agent=agent),
                    lambda: weightwire.megatron.Publisher(models, job.bridge.hf_pretrained.config, agent=agent),
                    lambda: dict(weightwire.megatron.named_tensors(models))):
        try:
            attempt()
        except RefusedError as error:
            assert "it belongs to an adapter" in str(error) and "export_hf_weights" in str(error), error
            continue
        raise AssertionError("weights were published without their adapters")
