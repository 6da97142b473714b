"""Other versions of vLLM: WEIGHTWIRE_VLLM says which (tests/envs/other_vllm.py)."""

import os

import pytest

from tests.engine import rig
from weightwire.vllm import features


def test_this_vllm_is_the_one_that_was_asked_for_and_has_all_that_is_needed():
    assert features.version().removesuffix("+cpu") == os.environ.get("WEIGHTWIRE_VLLM", "0.32.0")
    assert features.changed() == ()
    features.check()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3-moe"])
def test_answers_equal_those_of_the_engine_before_it_was_updated(kind, checkpoint, stack):
    engine = stack.add(rig.Engine(checkpoint(kind, 1)))
    want = {1: engine.answers()}
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(kind, 1)))
    for version, mode in enumerate(["fused", "fused", "hf_sharded", "hf_sharded"], 1):
        if version % 2:
            driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
            assert [(rank["mode"], rank["notes"]) for rank in driver.init()] == [(mode, [])], "the scheme knows other names"
        seed = 1 + version % 2
        trainer.send(version, checkpoint(kind, seed))
        serving = driver.step(60)
        assert (serving.version, serving.recovered) == (version, "")
        assert trainer.released()["version"] == version
        answers = engine.answers()
        assert answers == want.setdefault(seed, answers), f"{mode}, version {version}"
    assert want[1] != want[2]
