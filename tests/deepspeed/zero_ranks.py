"""Ranks that train with DeepSpeed's engine on a CPU; the oracle is DeepSpeed's own gather, saved as transformers saves."""

from __future__ import annotations

import os
import pathlib

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

import weightwire.fsdp
import weightwire.torch
from weightwire import RefusedError


def engine_of(rank: int, world_size: int, folder: str, stage: int, threshold: int):
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    import deepspeed
    deepspeed.init_distributed("gloo")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = dict(train_batch_size=world_size, bf16=dict(enabled=True),
                  zero_optimization=dict(stage=stage, stage3_param_persistence_threshold=threshold),
                  optimizer=dict(type="Adam", params=dict(lr=0.05, torch_adam=True)))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def gathered(engine, path: pathlib.Path) -> None:
    import deepspeed
    named = list(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters([p for _, p in named]):
        whole = {name: p.detach().clone() for name, p in named}
    if dist.get_rank() == 0:
        saved = revert_weight_conversion(engine.module, whole)
        save_file({name: t.detach().contiguous().clone() for name, t in saved.items()}, str(path))


def train(rank: int, world_size: int, agent: str, folder: str, out: str, stage: int, threshold: int):
    """Three versions, each after a real step."""
    engine = engine_of(rank, world_size, folder, stage, threshold)
    whole = [p.ds_persist for p in engine.module.parameters()] if stage == 3 else []
    assert stage < 3 or (any(whole) == (threshold > 0) and not all(whole))
    verify = dict(verify="export", verify_every=1) if stage == 3 else {}
    with weightwire.fsdp.Publisher(engine if threshold else engine.module, agent=agent, **verify) as publisher:
        for version in (1, 2, 3):
            if version > 1:
                tokens = torch.randint(0, 37, (1, 8), generator=torch.Generator().manual_seed(version * 10 + rank))
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            gathered(engine, pathlib.Path(out) / f"v{version}.safetensors")
            dist.barrier()
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def refused(rank: int, world_size: int, agent: str, folder: str):
    """What holds something else than its part: gathered now, quantized, moved away; and the adapter for whole tensors."""
    import deepspeed
    engine = engine_of(rank, world_size, folder, 3, 0)
    first = next(engine.module.parameters())

    def refuses(said: str, adapter=weightwire.fsdp):
        try:
            adapter.Publisher(engine, agent=agent)
            raise AssertionError(said)
        except RefusedError as error:
            assert said in str(error) and error.tensor, error

    refuses("use weightwire.fsdp", weightwire.torch)
    with deepspeed.zero.GatheredParameters([first]):
        refuses("ZeRO-3 has gathered it")
    first.ds_tensor.ds_quant_scale = torch.ones(1)
    refuses("holds it quantized")
    del first.ds_tensor.ds_quant_scale
    first.ds_tensor.status = type(first.ds_tensor.status).NOT_AVAILABLE
    refuses("moved its part away")
