"""A real vLLM beside its trainer: the trainer is this process, whose tensors the engine's workers open. No agent runs."""

import contextlib

import pytest
from safetensors.torch import load_file

from tests.engine import rig
from weightwire import colocated
from weightwire.vllm import Colocated, checkpoint as checkpoints

EXTENSION = "tests.engine.extension.Beside"


class Trainer:
    """Ranks that hold parts of each tensor's rows, as FSDP shards them, and overwrite them in place."""

    def __init__(self, folder, ranks: int):
        self._ranks = ranks
        self._shards = [dict(self._part(folder, rank)) for rank in range(ranks)]
        config = checkpoints.config_of(checkpoints.config_text(checkpoints.folder_of(str(folder))))
        self.exporters = [colocated.export(shard, config=config, layout=f"fsdp:dp{ranks}" if ranks > 1 else "hf", rank=rank)
                          for rank, shard in enumerate(self._shards)]
        self.exports = [exporter.export for exporter in self.exporters]

    def _part(self, folder, rank):
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in load_file(file).items():
                rows = -(-tensor.shape[0] // self._ranks)
                yield name, tensor[rank * rows:(rank + 1) * rows].clone()

    def step(self, folder) -> None:
        for rank, shard in enumerate(self._shards):
            for name, tensor in self._part(folder, rank):
                shard[name].copy_(tensor)
        for exporter in self.exporters:
            exporter.ready()


def ask(engine, method, *args):
    return engine.run(engine.llm.collective_rpc(method, args=args))


def driver_of(engine, trainer) -> Colocated:
    async def make():
        return Colocated(engine.llm, trainer.exports)
    return engine.run(make())


@pytest.mark.parametrize("kind, tp, ranks", [("qwen2", 1, 1), ("qwen2-tied", 2, 3), ("qwen3-moe", 2, 2)])
def test_answers_are_those_of_a_fresh_engine_after_every_version_and_after_a_failure(checkpoint, fresh, kind, tp, ranks):
    with contextlib.closing(rig.Engine(checkpoint(kind, 0), tp, worker_extension_cls=EXTENSION)) as engine:
        before = engine.answers()
        assert before == fresh(kind, tp, 0)
        trainer = Trainer(checkpoint(kind, 1), ranks)
        driver = driver_of(engine, trainer)
        for version in (1, 2, 1):
            trainer.step(checkpoint(kind, version))
            driver.install(version, verify=True)
            assert engine.answers() == fresh(kind, tp, version) != before
        trainer.step(checkpoint(kind, 2))
        ask(engine, "fail_once", tp - 1)
        with pytest.raises(Exception) as failed:
            driver.install(2)
        assert "for a test" in str(failed.value) and failed.value.rank == f"engine/{tp - 1}" and driver.version is None
        waiting = engine.submit(rig.PROMPTS[0], rig.greedy())
        assert engine.run(engine.llm.is_sleeping()), "a mixture of versions answers nothing"
        driver.install(2)
        assert rig.answers_of(waiting.result(60)) == fresh(kind, tp, 2)[0]
        assert engine.answers() == fresh(kind, tp, 2)
        ask(engine, "lose_parameters")  # as sleep level 2 does
        driver.install(2)
        assert engine.answers() == fresh(kind, tp, 2)


def test_a_rank_that_is_missing_is_named_and_the_engine_answers_on(checkpoint, fresh):
    kind = "qwen2"
    with contextlib.closing(rig.Engine(checkpoint(kind, 0), 1, worker_extension_cls=EXTENSION)) as engine:
        trainer = Trainer(checkpoint(kind, 1), 2)
        trainer.exports.pop()
        with pytest.raises(Exception) as refused:
            driver_of(engine, trainer).install(1)
        assert "no export of rank 1" in str(refused.value) and refused.value.rank == "engine/0"
        assert engine.answers() == fresh(kind, 1, 0)


