"""Versions of a LoRA adapter, without the base weights, in a real engine."""

import contextlib
import json

import numpy as np

from tests.engine import rig
from tests.engine.trainer_hf import config_of
from weightwire import Publisher
from weightwire.vllm import Adapter, AdapterDriver, checkpoint as files

KIND = "qwen2"
ADAPTER = Adapter("policy", 1, rank=8, alpha=16, targets=("q_proj", "v_proj", "down_proj"))
OPTIONS = dict(enable_lora=True, max_lora_rank=8, max_loras=1)


def weights(tensors, seed):
    """bf16 bits of normal numbers; both matrices, so that the adapter changes something."""
    rng = np.random.default_rng(seed)
    return {m.name: (rng.normal(0, 0.1, m.shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            for m in tensors}


def peft_files(folder, tensors, arrays):
    """The adapter on disk, written by safetensors itself."""
    import torch
    from safetensors.torch import save_file
    folder.mkdir()
    save_file({n: torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) for n, a in arrays.items()},
              folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(dict(
        peft_type="LORA", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], bias="none")))
    return folder


def test_versions_of_an_adapter_answer_as_one_that_a_fresh_engine_reads_from_disk(checkpoint, stack, tmp_path):
    from vllm.lora.request import LoRARequest
    base = checkpoint(KIND, 0)
    tensors = ADAPTER.tensors(files.tensors(base))
    assert len(tensors) == 2 * 2 * 3
    want = {}
    with contextlib.closing(rig.Engine(base, **OPTIONS)) as fresh:
        plain = fresh.answers()
        for seed in (1, 2):
            folder = peft_files(tmp_path / str(seed), tensors, weights(tensors, seed))
            want[seed] = fresh.answers(lora_request=LoRARequest(f"disk-{seed}", seed, str(folder)))
    assert want[1] != want[2] and plain not in want.values()
    engine = stack.add(rig.Engine(base, **OPTIONS))
    publisher = stack.add(Publisher(rank=0, world_size=1, agent=stack.agent))
    params = publisher.bind(config_of(base), ADAPTER.spec, tensors)

    async def make():
        return AdapterDriver(engine.llm, name="engine", model=str(base), adapter=ADAPTER, agent=stack.agent)
    driver = stack.add(engine.run(make()))
    for version, seed in enumerate((1, 2, 1), 1):
        for name, bits in weights(tensors, seed).items():
            params[name][...] = bits
        release = publisher.publish(version)
        assert driver.step(60).version == version
        release.wait_released(60)
        assert engine.answers(lora_request=driver.request) == want[seed]
        assert engine.answers() == plain, "the base weights changed"
