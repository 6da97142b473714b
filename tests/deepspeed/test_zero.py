"""DeepSpeed ZeRO-3 trainers, live: engines have what DeepSpeed itself gathers, in the checkpoint's names, bit for bit."""

import os
import pathlib
import sys

import numpy as np
import pytest
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/trainers")]
from safetensors.torch import load_file  # noqa: E402
from world import World, preload  # noqa: E402
from zero_ranks import refused, train  # noqa: E402

from demo.fleet import Daemon  # noqa: E402
from weightwire import Subscriber, TensorMeta, boxes  # noqa: E402

preload("zero_ranks")
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            max_position_embeddings=64, tie_word_embeddings=False)
MODELS = {"qwen2": transformers.Qwen2Config(**TINY), "qwen3_moe": transformers.Qwen3MoeConfig(
    **{**TINY, "hidden_size": 32, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24})}


@pytest.fixture
def daemon(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


def checkpoint(folder: pathlib.Path, model: str) -> pathlib.Path:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(MODELS[model]).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model,world_size,stage,threshold", [
    ("qwen2", 2, 3, 0), ("qwen2", 3, 3, 100), ("qwen3_moe", 2, 3, 0), ("qwen2", 2, 1, 0)])
def test_versions_are_what_deepspeed_gathers(daemon, tmp_path, model, world_size, stage, threshold):
    folder = checkpoint(tmp_path / "hf", model)
    metas = {name: TensorMeta(name, "BF16", tuple(t.shape)) for name, t in load_file(folder / "model.safetensors").items()}
    with World(train, world_size, daemon.agent_socket, str(folder), str(tmp_path), stage, threshold) as world, \
            Subscriber(group="engine-a", rank=0, world_size=1, agent=daemon.agent_socket) as engine:
        engine.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
        before = None
        for version in (1, 2, 3):
            offer = world.next_offer(engine)
            got = engine.flip(offer)
            want = load_file(tmp_path / f"v{version}.safetensors")
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert np.array_equal(got[name].view(np.int16), tensor.view(torch.int16).numpy()), (version, name)
            assert before is None or any(not torch.equal(want[name], before[name]) for name in want)
            before = want
            engine.acknowledge(offer)
        world.join()


def test_what_is_not_a_plain_part_is_refused(daemon, tmp_path):
    with World(refused, 2, daemon.agent_socket, str(checkpoint(tmp_path / "hf", "qwen2"))) as world:
        world.join()
