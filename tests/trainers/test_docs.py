"""The snippets of docs/trainers.md, as they stand there."""

import re

from conftest import ROOT, HfEngine
from doc_ranks import run_fsdp, run_megatron, run_models, run_tensors, run_torch
from torch_ranks import make_checkpoint
from world import World

STEPS = 2
SNIPPETS = dict(re.findall(r"```python (\w+)\n(.*?)```", (ROOT / "docs/trainers.md").read_text(), re.S))


def follow(engine, tmp_path, world):
    for version in range(1, STEPS + 1):
        engine.expect(version, tmp_path / f"v{version}.safetensors", world)
    world.join()


def test_every_snippet_is_known_here():
    assert set(SNIPPETS) == {"torch", "receiver", "fsdp", "megatron", "models", "tensors"}


def test_torch_and_receiver(daemon, hf_engine, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "hf")
    engine = hf_engine(checkpoint)
    with World(run_torch, 2, SNIPPETS["torch"], SNIPPETS["receiver"], daemon.agent_socket, str(checkpoint),
               str(tmp_path), STEPS) as world:
        follow(engine, tmp_path, world)


def test_fsdp(daemon, hf_engine, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "hf")
    engine = hf_engine(checkpoint)
    with World(run_fsdp, 2, SNIPPETS["fsdp"], daemon.agent_socket, str(checkpoint), str(tmp_path), STEPS) as world:
        follow(engine, tmp_path, world)


def test_megatron(daemon, hf_engine, tmp_path):
    checkpoint = ROOT / "tests/data/megatron/qwen2/hf"
    engine = hf_engine(checkpoint)
    with World(run_megatron, 2, SNIPPETS["megatron"], daemon.agent_socket, str(checkpoint), str(tmp_path),
               STEPS) as world:
        follow(engine, tmp_path, world)


def test_models(daemon, tmp_path):
    checkpoints = {"actor": ROOT / "tests/data/megatron/qwen2/hf", "reward": ROOT / "tests/data/megatron/qwen3_moe/hf"}
    engines = {model: HfEngine(daemon.agent_socket, checkpoint, model, model_name=model) for model, checkpoint in checkpoints.items()}
    try:
        with World(run_models, 2, SNIPPETS["models"], daemon.agent_socket, {m: str(c) for m, c in checkpoints.items()},
                   str(tmp_path), STEPS) as world:
            for version in range(1, STEPS + 1):
                for model, engine in engines.items():
                    engine.expect(version, tmp_path / f"{model}-v{version}.safetensors", world)
            world.join()
    finally:
        for engine in engines.values():
            engine.close()


def test_whole_tensors(daemon, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "hf")
    with World(run_tensors, 2, SNIPPETS["tensors"], daemon.agent_socket, str(checkpoint)) as world:
        world.join()
