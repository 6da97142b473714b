"""What a job does while a failpoint waits in one of its processes: first what comes before it is armed, then what leads
there. The second part runs beside the harness, and whatever it asks of a process that dies may fail."""

from __future__ import annotations

import time
from typing import Callable

from conftest import until
from job import Job, Outcome, await_releases
from weightwire.errors import WeightwireError

ATTACH_SECONDS = 30.0
DRAINED_SECONDS = 20.0
COPY_SECONDS = 5.0  # or it was lost
TRAINER_TAKES_MS = 600  # less than a lease


def _nothing(job: Job, outcome: Outcome, process: str) -> None:
    pass


def _publish(job: Job, outcome: Outcome, process: str) -> None:
    job.publish(outcome)


def _snapshot(job: Job, outcome: Outcome, process: str) -> None:
    """Released at once; the next version must wait for the copy, which moves still."""
    job.publish(outcome, mode="snapshot")
    end = time.monotonic() + COPY_SECONDS
    while not job.all_serve() and time.monotonic() < end:
        time.sleep(0.02)


def _abort(job: Job, outcome: Outcome, process: str) -> None:
    version = job.publish(outcome, manual_commit=True)
    job.client.abort(job.client.wait_staged(version, timeout=10).epoch)
    outcome.never.add(version)


def _second_version(job: Job, outcome: Outcome, process: str) -> None:
    job.publish_until_served(time.monotonic())


def _rollback(job: Job, outcome: Outcome, process: str) -> None:
    job.client.rollback(job.version - 1, timeout=20)


def _join(job: Job, outcome: Outcome, process: str) -> None:
    job.replace_engine(2 if process == "edge" else 1, time.monotonic() + ATTACH_SECONDS)


def _reattach(job: Job, outcome: Outcome, process: str) -> None:
    job.close_trainer()
    job.attach_trainer(time.monotonic() + ATTACH_SECONDS)


def _evict(job: Job, outcome: Outcome, process: str) -> None:
    job.client.evict("engine-a")


def _drain(job: Job, outcome: Outcome, process: str) -> None:
    """What is in the journal holds, whatever became of its answer; then it is taken back."""
    try:
        job.client.drain("engine-a")
    except WeightwireError:
        pass  # the next coordinator knows it all the same
    before = job.version
    until("engine-a is here, and drained", lambda: _is_drained(job, before), DRAINED_SECONDS)
    version = job.publish(outcome)
    errors = await_releases(outcome.releases)
    until(f"the others serve version {version}, released with {errors}",
          lambda: all(engine.serves(version) for engine in job.engines[1:]), DRAINED_SECONDS)
    assert _is_drained(job, before) and job.engines[0].serves(before), "a drained engine serves on, and nothing new"
    assert job.client.drain("engine-a", undo=True) == ("engine-a",)


def _is_drained(job: Job, version: int) -> bool:
    status = job.status()
    return status is not None and any(engine.name == "engine-a" and engine.drained and engine.version == version
                                      for engine in status.engines)


def _verify(job: Job, outcome: Outcome, process: str) -> None:
    found = job.client.verify(timeout=15)
    assert not found.differences, found


def _kill_it(job: Job, outcome: Outcome, process: str) -> None:
    job.parts[process].kill()


def _start_it(job: Job, outcome: Outcome, process: str) -> None:
    job.parts[process].start()


def _lose_the_edge(job: Job, outcome: Outcome, process: str) -> None:
    job.parts["edge"].kill()
    job.parts["edge"].start()


def _close_the_edge(job: Job, outcome: Outcome, process: str) -> None:
    """It says goodbye, where one that is killed keeps its place until its lease has ended."""
    assert job.parts["edge"].stop() == 0
    job.parts["edge"].start()


def _lose_a_reader(job: Job, outcome: Outcome, process: str) -> None:
    """The edge dies when it has begun to read a version, which goes on without it. The trainer says late that it
    was read: once every other rank is done, nobody is told to drop a reader."""
    edge = job.parts["edge"]
    job.parts["trainer"].arm("agent.after_all_read_before_sourced", "delay", 0, TRAINER_TAKES_MS)
    edge.arm("transfer.before_a_slot_is_read", "kill", 0, 0)
    job.publish(outcome)
    edge.await_crossing(20)
    edge.await_death()
    edge.start()


def _publish_until(point: str) -> Callable[[Job, Outcome, str], None]:
    """The coordinator dies at `point` of a version."""
    def act(job: Job, outcome: Outcome, process: str) -> None:
        job.coordinator.arm(point, "kill", 0, 0)
        job.publish(outcome)
        job.coordinator.await_crossing(20)
        job.coordinator.await_death()
    return act


def _start_coordinator(job: Job, outcome: Outcome, process: str) -> None:
    job.coordinator.start()


def _restart_coordinator(job: Job, outcome: Outcome, process: str) -> None:
    job.coordinator.kill()
    job.coordinator.start()


SCENARIOS = {
    "publish": (_nothing, _publish),
    "snapshot": (_nothing, _snapshot),
    "abort": (_nothing, _abort),
    "rollback": (_second_version, _rollback),
    "join": (_nothing, _join),
    "reattach": (_nothing, _reattach),
    "evict": (_nothing, _evict),
    "drain": (_nothing, _drain),
    "verify": (_nothing, _verify),
    "start": (_kill_it, _start_it),
    "agent lost": (_nothing, _lose_the_edge),
    "agent leaves": (_nothing, _close_the_edge),
    "reader lost": (_nothing, _lose_a_reader),
    "coordinator lost": (_nothing, _restart_coordinator),
    "lost undecided": (_publish_until("coordinator.before_commit_appended"), _start_coordinator),
    "lost decided": (_publish_until("coordinator.after_journal_before_send"), _start_coordinator),
}
