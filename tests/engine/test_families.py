"""Models of 2026 in a real vLLM: what a trainer publishes is what it then answers with, bit for bit as an engine that was
started on the same checkpoint. By the scheme `hf`, and from a live transformers 5 model, whose experts are fused."""

import importlib.util
import sys

import pytest

from tests.engine import rig

IMAGES = pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM's gemma3 needs torchvision")
LIVE = [sys.executable, "-m", "tests.engine.trainer_live"]
SHARDED = [*LIVE, "--shard"]
SCHEME = [sys.executable, "-m", "tests.engine.trainer_hf"]


@pytest.mark.parametrize("kind,tp,command", [
    ("qwen3-moe", 1, SHARDED), ("qwen3-moe", 2, SHARDED),
    ("gpt-oss", 1, LIVE), ("gpt-oss", 1, SCHEME),
    ("gemma3-text", 1, LIVE), ("gemma3-text", 1, SCHEME),
    pytest.param("gemma3", 1, SCHEME, marks=IMAGES), pytest.param("gemma3", 2, SCHEME, marks=IMAGES),
    ("gemma4-text", 1, LIVE), ("gemma4-text", 2, SCHEME), ("gemma4-experts", 2, SCHEME),
    ("nemotron-h", 1, LIVE), ("nemotron-h", 1, SCHEME), ("nemotron-h", 2, SCHEME),
], ids=lambda value: value if isinstance(value, str) else str(value) if isinstance(value, int) else
    "sharded" if value is SHARDED else "live" if value is LIVE else "scheme")
def test_answers_equal_those_of_a_fresh_engine(kind, tp, command, checkpoint, fresh, stack):
    want = {seed: fresh(kind, tp, seed) for seed in (1, 2)}
    assert str(want[1]) != str(want[2])
    engine = stack.add(rig.Engine(checkpoint(kind, 0), tp))
    assert engine.answers() not in want.values()
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(kind, 1), command))
    driver = stack.add(engine.driver(name="engine", agent=stack.agent))
    driver.init()
    for version, seed in enumerate((1, 2, 1), 1):
        trainer.send(version, checkpoint(kind, seed))
        serving = driver.step(120)
        assert (serving.version, serving.recovered) == (version, ""), trainer.released()
        assert trainer.released()["version"] == version
        assert engine.answers() == want[seed], f"version {version}"
