"""Versions that a trainer publishes are what a real vLLM then answers with, bit for bit as one started on them."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine import rig

# What the engine is asked to do, one after another: three versions in the default mode, then each other mode.
ROUNDS = [dict(), dict(), dict(), dict(mode="hf_sharded"), dict(mode="hf_full"), dict(install="device-shadow")]


@pytest.mark.parametrize("kind", ["qwen2", "qwen2-tied", "qwen3-moe"])
@pytest.mark.parametrize("tp", [1, 2])
def test_answers_equal_those_of_a_fresh_engine_in_every_mode(kind, tp, checkpoint, fresh, stack):
    want = {seed: fresh(kind, tp, seed) for seed in (1, 2, 3)}
    assert len({str(answers) for answers in want.values()}) == 3
    engine = stack.add(rig.Engine(checkpoint(kind, 0), tp))
    assert engine.answers() not in want.values()
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(kind, 1)))
    driver, made_with = None, None
    for version, options in enumerate(ROUNDS, 1):
        if options != made_with:
            driver, made_with = stack.add(engine.driver(name="engine", agent=stack.agent, **options)), options
            ranks = driver.init()
            assert [r["mode"] for r in ranks] == [options.get("mode", "fused")] * tp
            assert [r["notes"] for r in ranks] == [[]] * tp, "the recorded loader and the scheme disagree"
        seed = 1 + (version - 1) % 3
        trainer.send(version, checkpoint(kind, seed))
        serving = driver.step(60)
        assert (serving.version, serving.recovered) == (version, "")
        assert trainer.released()["version"] == version
        assert engine.answers() == want[seed], f"{options}, version {version}"
        assert engine.run(engine.llm.get_weight_version()) == str(version)


def test_two_engines_are_updated_in_one_epoch(checkpoint, fresh, stack):
    engines = [stack.add(rig.Engine(checkpoint("qwen2", 0), tp)) for tp in (1, 2)]
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint("qwen2", 1)))
    drivers = [stack.add(engine.driver(name=f"engine-{number}", agent=stack.agent))
               for number, engine in enumerate(engines)]
    for driver in drivers:
        driver.init()
    for version in (1, 2):
        trainer.send(version, checkpoint("qwen2", version))
        with ThreadPoolExecutor() as pool:
            served = list(pool.map(lambda driver: driver.step(60), drivers))
        assert [s.version for s in served] == [version] * 2
        assert {s.epoch for s in served} == {trainer.released()["epoch"]}
        for tp, engine in zip((1, 2), engines):
            assert engine.answers() == fresh("qwen2", tp, version)


def test_ranks_of_an_expert_parallel_engine_hold_their_experts_of_every_version(checkpoint, stack):
    """vLLM's worker for CPUs loads a model whose ranks have experts of their own, and dies when it is asked anything (0.32.0, its
    second rank, by SIGSEGV): what is compared are all parameters of both ranks with those of an engine that was started on the version."""
    options = dict(enable_expert_parallel=True, worker_extension_cls="tests.engine.extension.Inspect")

    def parameters(engine):
        return engine.run(engine.llm.collective_rpc("parameter_digests"))

    want = {}
    for seed in (1, 2):
        with contextlib.closing(rig.Engine(checkpoint("qwen3-moe", seed), 2, **options)) as engine:
            want[seed] = parameters(engine)
        first, second = want[seed]
        experts = [name for name in first if ".experts." in name]
        assert experts and all(first[name] != second[name] for name in experts)
    assert want[1] != want[2]
    engine = stack.add(rig.Engine(checkpoint("qwen3-moe", 0), 2, **options))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint("qwen3-moe", 1)))
    for version, (seed, mode) in enumerate([(1, "fused"), (2, "fused"), (1, "hf_sharded"), (2, "hf_full")], 1):
        if mode != "fused" or version == 1:
            driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
            ranks = driver.init()
            assert [(r["mode"], r["notes"]) for r in ranks] == [(mode, [])] * 2, "the recorded loader and the scheme disagree"
        trainer.send(version, checkpoint("qwen3-moe", seed))
        serving = driver.step(60)
        assert (serving.version, serving.recovered) == (version, "")
        assert trainer.released()["version"] == version
        assert parameters(engine) == want[seed], f"{mode}, version {version}"
