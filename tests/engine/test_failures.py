"""A worker that fails at any moment of an update leaves its engine on exactly one version, and the error says which.

One engine of two ranks goes through all cases, in the order of this file. "Which version" is proved by generation.
"""

import concurrent.futures

import pytest

from tests.engine import rig
from weightwire.vllm import InstallError

KIND, TP, ATTEMPTS = "qwen2", 2, 2


@pytest.fixture(scope="module")
def new_driver(job, module_stack):
    return lambda **options: module_stack.add(job.engine.driver(name="engine", agent=module_stack.agent,
                                                                attempts=ATTEMPTS, **options))


@pytest.fixture(scope="module")
def job(module_stack, faults, checkpoint, fresh):
    class Job:
        engine = module_stack.add(rig.Engine(checkpoint(KIND, 0), TP))
        trainer = module_stack.add(rig.Trainer(module_stack.agent, checkpoint(KIND, 1)))
        driver = module_stack.add(engine.driver(name="engine", agent=module_stack.agent, attempts=ATTEMPTS))
        version = 0

        def publish(self):
            """The next version; its weights alternate between two seeds."""
            self.version += 1
            self.trainer.send(self.version, checkpoint(KIND, self.seed(self.version)))

        def seed(self, version):
            return 1 + version % 2

        def serves(self, version):
            return self.engine.answers() == (fresh(KIND, TP, self.seed(version)) if version else initial)

    job = Job()
    initial = job.engine.answers()
    job.driver.init()
    return job


def test_failing_before_anything_was_served_the_engine_stays_paused_and_the_next_call_heals_it(job, faults):
    faults.arm("update", rank=1, times=ATTEMPTS)
    job.publish()
    with pytest.raises(InstallError, match="version 1 .epoch 1. was not installed: step update:.*paused") as failed:
        job.driver.step(60)
    assert failed.value.broken and failed.value.serving is None and not job.driver.ready
    request = job.engine.submit(rig.PROMPTS[0], rig.greedy())
    with pytest.raises(concurrent.futures.TimeoutError):
        request.result(3)  # it is queued: nothing is answered with mixed weights
    assert job.driver.step(60).version == 1
    assert job.trainer.released()["version"] == 1
    assert rig.answers_of(request.result(60)) == job.engine.answers()[0]
    assert job.serves(1) and job.driver.ready


@pytest.mark.parametrize("step", ["prepare", "start"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_before_start_changes_nothing(job, faults, step, rank):
    before = job.version
    faults.arm(step, rank, times=1 if step == "prepare" else ATTEMPTS)
    job.publish()
    with pytest.raises(InstallError, match=f"step {step}:.*The engine is on version {before}$") as failed:
        job.driver.step(60)
    assert not failed.value.broken and failed.value.serving.version == before
    assert job.serves(before)
    assert job.driver.step(60).version == job.version
    assert job.trainer.released()["version"] == job.version
    assert job.serves(job.version)


@pytest.mark.parametrize("step", ["update", "finish"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_after_start_is_healed_by_replaying_the_stage(job, faults, step, rank):
    """With `finish` the other rank has finished already."""
    faults.arm(step, rank, times=1)
    job.publish()
    serving = job.driver.step(60)
    assert serving.version == job.version and f"step {step}" in serving.recovered
    assert job.trainer.released()["version"] == job.version
    assert job.serves(job.version)


@pytest.mark.parametrize("step", ["update", "finish"])
def test_a_failure_that_stays_brings_the_version_before_back_on_every_rank(job, faults, step):
    before = job.version
    faults.arm(step, rank=1, times=ATTEMPTS)
    job.publish()
    with pytest.raises(InstallError, match=f"step {step}:.*The engine is on version {before}$"):
        job.driver.step(60)
    assert job.serves(before) and job.driver.ready
    assert job.driver.step(60).version == job.version
    assert job.trainer.released()["version"] == job.version
    assert job.serves(job.version)


def test_a_driver_that_dies_in_the_middle_is_followed_by_one_that_heals(job, new_driver):
    def die(timeout):
        raise KeyboardInterrupt
    job.driver._port.finish = die
    job.publish()
    with pytest.raises(KeyboardInterrupt):
        job.driver.step(60)
    job.driver.close()
    assert job.trainer.released()["version"] == job.version  # it was staged and committed
    job.driver = new_driver()
    job.driver.init()
    assert job.driver.broken and not job.driver.ready  # paused, of mixed versions
    job.publish()
    assert job.driver.step(90).version == job.version
    assert job.trainer.released()["version"] == job.version
    assert job.serves(job.version) and job.driver.ready


def test_device_shadow_is_replayed_from_the_stage(job, faults, new_driver):
    """The model takes the tensors of the shadow, which are half used when a rank fails."""
    job.driver.close()
    job.driver = new_driver(install="device-shadow")
    job.driver.init()
    for step, times in (("update", 1), ("finish", 1), ("finish", ATTEMPTS)):
        before = job.version
        faults.arm(step, rank=1, times=times)
        job.publish()
        if times == ATTEMPTS:
            with pytest.raises(InstallError, match=f"step {step}:.*The engine is on version {before}$"):
                job.driver.step(60)
            assert job.serves(before)
        serving = job.driver.step(60)
        assert serving.version == job.version and (f"step {step}" in serving.recovered) == (times < ATTEMPTS)
        assert job.trainer.released()["version"] == job.version
        assert job.serves(job.version)


def test_a_refused_canary_brings_the_version_before_back(job):
    def canary(generate, version):
        assert len(generate(rig.PROMPTS[0], 4)) == 4
        raise ValueError("these tokens are not those of the trainer")

    before = job.version
    job.driver._canary = canary
    job.publish()
    with pytest.raises(InstallError, match=f"step canary: ValueError: these tokens.*on version {before}$"):
        job.driver.step(60)
    assert job.serves(before)
    assert job.driver.step(1) is None  # a refused version is not tried again
