"""A publish whose caller does not wait any more, with processes of their own: the coordinator (or the agent) is stopped, the call
times out or is interrupted, and the trainer writes the next step over its arrays. What an engine serves under any version is
one step's bytes, whole: every byte is compared here with what each step wrote."""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from conftest import stand_still, until
from coordinator_job import CONFIG, Follower, Job, content, metas
from demo import oracle
from weightwire import AbortedError, Publisher, RefusedError
from weightwire.aio import Publisher as AsyncPublisher
from weightwire.errors import DeadlineError, WeightwireError

STEPS = {step: content(step) for step in range(1, 6)}
PATIENCE = 120  # seconds, for what must happen
WANTED = {step: list(oracle.vllm(CONFIG, STEPS[step], 1, 0)) for step in STEPS}


class Engine(Follower):
    """Knows by the bytes alone which step it serves."""

    def __init__(self, name: str, agent: str):
        self.steps: dict[int, list[int]] = {}  # version -> steps whose bytes it served under it; 0: of no one step
        super().__init__(name, agent, wanted=None)

    def differences(self, params, version: int) -> list[str]:
        whole = [step for step, wanted in WANTED.items()
                 if all(np.array_equal(params[name][:len(want)], want) for name, want in wanted)]
        self.steps.setdefault(version, []).append(whole[0] if whole else 0)
        return []


class OneRank(Job):
    """Two engines, and a trainer of one rank, whose calls give up after two seconds."""

    def start_members(self) -> None:
        self.agents = [self.start_agent("trainer", **self.trainer_options), self.start_agent("rollout")]
        self.engines = [Engine(f"engine-{i}", self.agents[1].agent_socket) for i in range(2)]

    def trainer(self, kind=Publisher, **options):
        return kind(rank=0, world_size=1, agent=self.agents[0].agent_socket, timeout=2, **options)

    def bind(self, publisher: Publisher) -> None:
        self.publishers.append(publisher)
        publisher.arrays = bind(publisher)

    def open(self) -> Publisher:
        """Attached, and step 1 is served as version 1."""
        publisher = self.trainer()
        self.bind(publisher)
        write(publisher.arrays, 1)
        self.until("version 1 is accepted", lambda: accepted(publisher, 1), PATIENCE).wait_released(PATIENCE)
        self.serves(1, 1)
        return publisher

    def serves(self, version: int, step: int) -> None:
        """Every engine serves that step under that version, and never served anything else under it."""
        self.until(f"version {version} everywhere", lambda: all(engine.version == version for engine in self.engines),
                   PATIENCE)
        self.until("compared", lambda: all(version in engine.steps for engine in self.engines), PATIENCE)
        assert [set(engine.steps[version]) for engine in self.engines] == [{step}] * len(self.engines)

    def quiet(self) -> None:
        """Nothing of a version is under way, and the trainer is attached."""
        def idle():
            status = self.status()
            return (not status.waiting_for and [p for p in status.participants if p.group == "trainer" and p.has_layout]
                    and all(epoch.phase in (5, 7) for epoch in status.epochs))
        self.until("quiet", idle, PATIENCE)


def bind(publisher: Publisher):
    return publisher.bind(CONFIG, "megatron:tp1", metas({name: array.shape for name, array in
                                                         oracle.megatron(CONFIG, STEPS[1], 1, 1, 0)}))


def write(arrays, step: int) -> None:
    for name, array in oracle.megatron(CONFIG, STEPS[step], 1, 1, 0):
        arrays[name][...] = array


def stop(daemon) -> None:
    """Returns when no thread of it runs any more."""
    stand_still(daemon.pid)

    def stopped() -> bool:
        states = [pathlib.Path(f"/proc/{daemon.pid}/task/{task}/stat").read_text().rpartition(")")[2].split()[0]
                  for task in os.listdir(f"/proc/{daemon.pid}/task")]
        return all(state in "Tt" for state in states)
    until("it stands still", stopped, 20)


def accepted(publisher: Publisher, version: int, **options):
    """The Release; None when it was not accepted this time, and withdrawn."""
    try:
        return publisher.publish(version, **options)
    except WeightwireError:
        return None


@pytest.fixture
def job(tmp_path, request):
    job = OneRank(tmp_path, trainer=getattr(request, "param", None))
    yield job
    for daemon in [job.coordinator, *job.agents]:
        os.kill(daemon.pid, signal.SIGCONT)
    job.close()


@pytest.mark.parametrize("mode", ["hold", "snapshot"])
def test_a_version_that_timed_out_is_never_a_mix_of_two_steps(job, mode):
    publisher = job.open()
    write(publisher.arrays, 2)
    stop(job.coordinator)
    with pytest.raises(DeadlineError, match="it was withdrawn: no engine will serve it"):
        publisher.publish(2, mode=mode)
    write(publisher.arrays, 3)
    os.kill(job.coordinator.pid, signal.SIGCONT)
    job.quiet()
    assert job.status().committed_version == 1, "nobody publishes it again"
    job.until("version 2 is accepted", lambda: accepted(publisher, 2, mode=mode), PATIENCE).wait_released(PATIENCE)
    job.serves(2, 3)
    write(publisher.arrays, 4)
    publisher.publish(3, mode=mode).wait_released(PATIENCE)
    job.serves(3, 4)


def test_a_version_that_is_repeated_at_once_holds_the_later_step(job):
    """As above, but the repeat meets what the stopped coordinator has received of the first call."""
    publisher = job.open()
    write(publisher.arrays, 2)
    stop(job.coordinator)
    assert accepted(publisher, 2) is None
    write(publisher.arrays, 3)
    threading.Timer(0.5, os.kill, (job.coordinator.pid, signal.SIGCONT)).start()
    job.until("version 2 is accepted", lambda: accepted(publisher, 2), PATIENCE).wait_released(PATIENCE)
    job.serves(2, 3)


def test_an_interrupted_publish_is_withdrawn(job):
    publisher = job.open()
    write(publisher.arrays, 2)
    stop(job.coordinator)
    publisher._session.timeout = PATIENCE  # it is not the deadline that ends it
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        publisher.publish(2)
    write(publisher.arrays, 3)
    os.kill(job.coordinator.pid, signal.SIGCONT)
    job.quiet()
    assert job.status().committed_version == 1
    publisher.publish(2).wait_released(PATIENCE)
    job.serves(2, 3)


def test_a_cancelled_publish_is_withdrawn(job):
    job.open().close()
    job.publishers.clear()

    async def main() -> None:
        async with job.trainer(AsyncPublisher) as publisher:
            arrays = await asyncio.to_thread(bind, publisher.sync)
            write(arrays, 2)
            stop(job.coordinator)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(publisher.publish(2), 0.5)
            write(arrays, 3)
            os.kill(job.coordinator.pid, signal.SIGCONT)
            await asyncio.to_thread(job.quiet)
            release = await publisher.publish(2)
            await publisher.released(release, PATIENCE)
    asyncio.run(main())
    job.serves(2, 3)


def test_a_trainer_that_is_killed_after_it_wrote_over_its_arrays(job):
    job.open().close()
    job.publishers.clear()
    trainer = subprocess.Popen([sys.executable, __file__, job.agents[0].agent_socket], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "ready\n"
    stop(job.coordinator)
    print("go", file=trainer.stdin, flush=True)
    assert "it was withdrawn" in trainer.stdout.readline()
    trainer.kill()
    trainer.communicate()
    os.kill(job.coordinator.pid, signal.SIGCONT)
    again = job.until("a new trainer", lambda: attached(job), PATIENCE)
    job.bind(again)
    assert job.status().committed_version == 1
    write(again.arrays, 4)
    job.until("version 2 is accepted", lambda: accepted(again, 2), PATIENCE).wait_released(PATIENCE)
    job.serves(2, 4)


def attached(job: OneRank) -> Publisher | None:
    try:
        return job.trainer()
    except WeightwireError:  # the place of the one that was killed is not free yet
        return None


def killed_trainer(agent: str) -> None:
    """The other process: publishes version 2, writes over it and says so."""
    publisher = Publisher(rank=0, world_size=1, agent=agent, timeout=2)
    arrays = bind(publisher)
    write(arrays, 2)
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        publisher.publish(2)
    except DeadlineError as error:
        write(arrays, 3)
        print(str(error).replace("\n", " "), flush=True)
    time.sleep(PATIENCE)


def test_a_repeat_of_a_held_version_is_the_same_release(job):
    publisher = job.open()
    write(publisher.arrays, 2)
    first = publisher.publish(2, manual_commit=True)
    assert publisher.publish(2, manual_commit=True) is first
    with pytest.raises(RefusedError, match="another mode"):
        publisher.publish(2, manual_commit=False)
    job.until("staged", lambda: [e for e in job.status().epochs if e.version == 2 and e.phase == 3], PATIENCE)
    first.wait_released(PATIENCE)
    with pytest.raises(WeightwireError, match="not newer"):
        publisher.publish(2)
    assert first.released and first.epoch > 0


@pytest.mark.parametrize("job", [{"rate_limit": 4_000_000}], indirect=True)  # it moves for seconds
def test_a_version_that_moves_is_withdrawn_before_its_bytes_change(job):
    publisher = job.open()
    write(publisher.arrays, 2)
    release = publisher.publish(2)
    job.until("it moves", lambda: [e for e in job.status().epochs if e.version == 2 and e.phase == 2], PATIENCE)
    assert publisher.withdraw(2, timeout=PATIENCE) == "revoked"
    write(publisher.arrays, 3)
    with pytest.raises(AbortedError, match="withdrawn by its publisher"):
        release.wait_released(PATIENCE)
    again = job.until("version 2 is accepted", lambda: accepted(publisher, 2), PATIENCE)
    assert again is not release
    again.wait_released(PATIENCE)
    job.serves(2, 3)
    assert publisher.withdraw(2) == "released"


def test_an_agent_that_does_not_answer_is_asked_again_before_bytes_change(job):
    publisher = job.open()
    write(publisher.arrays, 2)
    stand_still(job.agents[0].pid)
    with pytest.raises(DeadlineError, match="the arrays must not change until"):
        publisher.publish(2)
    with pytest.raises(DeadlineError):
        publisher.withdraw(2, timeout=0.5)
    os.kill(job.agents[0].pid, signal.SIGCONT)
    withdrawn = publisher.withdraw(2, timeout=PATIENCE)
    assert withdrawn in ("revoked", "read", "released")
    write(publisher.arrays, 3)
    job.quiet()
    write(publisher.arrays, 4)
    job.until("version 3 is accepted", lambda: accepted(publisher, 3), PATIENCE).wait_released(PATIENCE)
    job.serves(3, 4)
    for engine in job.engines:
        assert set(engine.steps.get(2, [])) <= {2}, "whole, as it was published, or not at all"


def test_a_publish_in_doubt_is_settled_by_the_next_one(job):
    publisher = job.open()
    write(publisher.arrays, 2)
    stand_still(job.agents[0].pid)
    with pytest.raises(DeadlineError, match="the arrays must not change until"):
        publisher.publish(2)
    threading.Timer(0.5, os.kill, (job.agents[0].pid, signal.SIGCONT)).start()
    job.until("version 2 is accepted", lambda: accepted(publisher, 2), PATIENCE).wait_released(PATIENCE)
    job.serves(2, 2)


if __name__ == "__main__":
    killed_trainer(sys.argv[1])
