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
from megatron.core.extensions.transformer_engine import TEGroupedLinear  # noqa: E402
from mcore_ranks import Job  # noqa: E402

# Without fp8 there is none to be split.
TEGroupedLinear._split_extra_state = lambda self, state: [state] * self.num_gemms


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
    """Publishes `by` the scheme or the conversion tasks; leaves what mcore's description gives in <out>/v<n>."""
    import weightwire.megatron
    import weightwire.megatron_bridge
    job = BridgeJob(kind, checkpoint, sizes)
    if by == "tasks":
        opened = weightwire.megatron_bridge.Publisher(job.bridge, job.chunks, agent=agent)
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


def interleaved(rank: int, world_size: int, by: str, agent: str, folder: str, out: str, size: int):
    """Transformer Engine's grouped experts with blocks of gate and up in turn."""
    import weightwire.megatron
    import weightwire.megatron_bridge
    from weightwire import RefusedError
    from weightwire.megatron_state import unwrap
    job = BridgeJob("megatron-bridge", folder, dict(ep=2))
    fused = [p for chunk in job.chunks for name, p in chunk.named_parameters() if ".experts.linear_fc1.weight" in name]
    assert fused
    for chunk in job.chunks:
        unwrap(chunk).config.moe_mlp_glu_interleave_size = size
    opened = (weightwire.megatron_bridge.Publisher(job.bridge, job.chunks, agent=agent) if by == "tasks" else
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
