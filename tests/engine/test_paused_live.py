"""Install mode paused-live: one stage for each rank, given up while the engine is paused."""

import concurrent.futures
import contextlib

import pytest

import weightwire
from tests.engine import rig
from tests.engine.conftest import Stack
from weightwire.vllm import InstallError

KIND = "qwen2"


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def job(request, tmp_path_factory, checkpoint):
    with contextlib.closing(Stack(tmp_path_factory.mktemp("daemon"), room_deadline_ms=2000)) as stack:
        class Job:
            tp = request.param
            engine = stack.add(rig.Engine(checkpoint(KIND, 0), tp))
            trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
            driver = stack.add(engine.driver(name="engine", agent=stack.agent, install="paused-live"))
            client = stack.add(weightwire.Client(stack.daemon.grpc))
        yield Job()


def test_versions_come_one_over_the_other(job, checkpoint, fresh):
    job.driver.init()
    for version, seed in enumerate((1, 2, 1), 1):
        job.trainer.send(version, checkpoint(KIND, seed))
        serving = job.driver.step(60)
        assert (serving.version, serving.recovered) == (version, "") and serving.paused_seconds > 0
        assert job.trainer.released()["version"] == version
        assert job.engine.answers() == fresh(KIND, job.tp, seed)


def test_the_engine_stands_still_from_the_first_byte_and_an_abort_leaves_its_weights(job, checkpoint, fresh):
    """After the test before: version 3, seed 1."""
    job.trainer.send(4, checkpoint(KIND, 2), manual=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        step = pool.submit(job.driver.step, 60)
        epoch = job.client.wait_staged(4, 60)  # the bytes lie where those of version 3 were
        request = job.engine.submit(rig.PROMPTS[0], rig.greedy())
        with pytest.raises(concurrent.futures.TimeoutError):
            request.result(2)
        job.client.abort(epoch.epoch)
        with pytest.raises(InstallError, match="step transfer: .*given up for an epoch that failed.*on version 3$"):
            step.result(60)
    assert job.trainer.released()["version"] == 4  # staged everywhere before the abort
    want = fresh(KIND, job.tp, 1)
    assert rig.answers_of(request.result(60)) == want[0] and job.engine.answers() == want
    assert not job.driver.ready


def test_the_next_version_heals_it(job, checkpoint, fresh):
    job.trainer.send(5, checkpoint(KIND, 2))
    assert job.driver.step(60).version == 5
    assert job.trainer.released()["version"] == 5
    assert job.engine.answers() == fresh(KIND, job.tp, 2) and job.driver.ready
