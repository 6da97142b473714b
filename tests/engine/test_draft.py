"""A model with an MTP layer: main and draft weights of one version are replaced in one pause."""

import contextlib

from tests.engine import rig

KIND = "glm4-moe-mtp"
OPTIONS = dict(speculative_config={"method": "mtp", "num_speculative_tokens": 1},
               worker_extension_cls="tests.engine.extension.Inspect")


def state_of(engine):
    """What it says, and what its draft model is made of: greedy answers hardly depend on a draft."""
    return engine.answers(), engine.run(engine.llm.collective_rpc("draft_digests"))


def test_main_and_draft_weights_equal_those_of_a_fresh_engine(checkpoint, stack):
    want = {}
    for seed in (1, 2):
        with contextlib.closing(rig.Engine(checkpoint(KIND, seed), **OPTIONS)) as fresh:
            want[seed] = state_of(fresh)
    hidden = [name for name in want[1][1][0] if name.endswith("()")]
    assert len(hidden) >= 6 and all(want[1][1][0][name] != want[2][1][0][name] for name in hidden)
    engine = stack.add(rig.Engine(checkpoint(KIND, 0), **OPTIONS))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
    for version, mode in enumerate(["fused", "fused", "hf_sharded"], 1):
        if version != 2:
            driver = stack.add(engine.driver(name="engine", agent=stack.agent, draft=True, mode=mode))
            driver.init()
        seed = 2 - version % 2
        trainer.send(version, checkpoint(KIND, seed))
        assert driver.step(60).version == version
        assert trainer.released()["version"] == version
        assert state_of(engine) == want[seed], (version, mode)


def test_without_draft_the_draft_keeps_its_weights(checkpoint, stack):
    """What `draft=True` is for; and that the comparison above sees a draft that was left out."""
    engine = stack.add(rig.Engine(checkpoint(KIND, 0), **OPTIONS))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
    before = state_of(engine)
    driver = stack.add(engine.driver(name="engine", agent=stack.agent))
    driver.init()
    trainer.send(1, checkpoint(KIND, 1))
    assert driver.step(60).version == 1
    after = state_of(engine)
    assert after[0] != before[0]
    own = "model.layers.2.eh_proj.weight"
    assert after[1][0][own] == before[1][0][own]
