"""A real megatron-core trainer on one side, real vLLM engines on the other, weightwire between them and nothing else."""

import contextlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine import rig

COMMAND = str(rig.ROOT / "tests/trainers/run_trainer.sh")


class Trainer(rig.Trainer):
    """tests/trainers/megatron_trainer.py: loads checkpoints into megatron-core, and trains."""

    def train(self, version, out) -> None:
        """One optimizer step; the result is published, and written into the checkpoint folder `out`."""
        self._process.stdin.write(json.dumps({"publish": version, "train": str(out)}) + "\n")
        self._process.stdin.flush()


@pytest.mark.parametrize("kind,sizes", [
    ("qwen2", ["--tp", "2", "--pp", "2"]),
    ("qwen2-tied", ["--tp", "2", "--pp", "2"]),
    ("qwen3-moe", ["--ep", "2"]),
])
def test_engines_answer_as_fresh_ones_on_what_megatron_holds(kind, sizes, checkpoint, fresh, stack, tmp_path):
    """Two engines, of one rank and of two, follow three versions in common epochs: two checkpoints that Megatron loaded
    and one that it trained. Greedy tokens and top-3 logprobs equal a fresh engine's, bit for bit."""
    trained = shutil.copytree(checkpoint(kind, 1), tmp_path / "trained")
    answers = {}
    with contextlib.ExitStack() as opened:  # fresh engines start when these are gone: memory for two at a time
        def keep(thing):
            return opened.enter_context(contextlib.closing(thing))

        engines = [keep(rig.Engine(checkpoint(kind, 0), tp)) for tp in (1, 2)]
        trainer = keep(Trainer(stack.agent, checkpoint(kind, 1), [COMMAND, *sizes]))
        drivers = [keep(engine.driver(name=f"engine-{number}", agent=stack.agent))
                   for number, engine in enumerate(engines)]
        for driver in drivers:
            driver.init()
        for version in (1, 2, 3):
            if version < 3:
                trainer.send(version, checkpoint(kind, version))
            else:
                trainer.train(version, trained)
            with ThreadPoolExecutor() as pool:
                served = list(pool.map(lambda driver: driver.step(120), drivers))
            assert [s.version for s in served] == [version] * 2
            assert {s.epoch for s in served} == {trainer.released()["epoch"]}
            answers[version] = [engine.answers() for engine in engines]
    for number, tp in enumerate((1, 2)):
        for version in (1, 2):
            assert answers[version][number] == fresh(kind, tp, version), f"tp {tp}, version {version}"
        with contextlib.closing(rig.Engine(trained, tp)) as engine:
            assert answers[3][number] == engine.answers(), f"tp {tp}, the trained version"
        assert answers[3][number] not in (answers[1][number], answers[2][number])
