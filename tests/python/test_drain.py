"""`wwctl drain` over real processes: a drained engine finishes, serves on, and may be stopped with nothing waiting for it."""

from __future__ import annotations

import subprocess
import time

import pytest

from conftest import BINARIES
from coordinator_job import Follower, Job
from weightwire import Client, StaleError


def wwctl(job: Job, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(BINARIES / "wwctl"), *arguments, "--address", job.address], timeout=90, capture_output=True, text=True)


class Deployment(Job):
    """engine-0 and engine-1 at an agent each, engine-2 at a third: one may go without the others."""

    def start_members(self) -> None:
        self.agents = [self.start_agent("pod-trainer")] + [self.start_agent(f"pod-{i}") for i in range(3)]
        self.engines = [Follower(f"engine-{i}", self.agents[1 + i].agent_socket, self.wanted) for i in range(3)]

    def release_next(self, waiting: bool = True) -> None:
        for release in self.publish():
            release.wait_released(60)
        if waiting:
            self.serve_everywhere()

    def served_by(self, index: int) -> int:
        serving = self.engines[index].subscriber.serving
        return serving.version if serving else 0

    def named(self, name: str):
        return next(e for e in self.status().engines if e.name == name)

    def stop_engine(self, index: int) -> None:
        self.engines[index].close()
        assert self.agents[1 + index].stop() == 0

    def newest_publish(self):
        return next(e for e in self.status().epochs if e.version == self.version)


@pytest.fixture
def job(tmp_path):
    started = Deployment(tmp_path)
    started.attach_trainer(time.monotonic() + 60)
    started.release_next()
    yield started
    for part in started.publishers + started.engines:
        part.close()
    for daemon in [*started.agents, started.coordinator]:
        daemon.stop()


def test_a_drained_engine_serves_on_and_may_be_stopped_with_nothing_waiting(job):
    drained = wwctl(job, "drain", "engine-2")
    assert drained.returncode == 0 and "engine-2 is drained; safe to stop" in drained.stdout, drained.stderr
    assert "serving, drained" in wwctl(job, "engines").stdout
    found = wwctl(job, "doctor")
    assert found.returncode == 1 and "wwctl drain --undo engine-2" in found.stdout
    job.release_next(waiting=False)
    job.until("the others to serve version 2", lambda: job.served_by(0) == job.served_by(1) == 2, 60)
    assert list(job.newest_publish().engines) == ["engine-0", "engine-1"]
    assert job.served_by(2) == 1 and job.engines[2].gaps == 0, "it goes on serving what it served"
    started = time.monotonic()
    job.stop_engine(2)
    job.release_next(waiting=False)
    assert time.monotonic() - started < 30, "nothing waited for a lease or a deadline"
    assert list(job.newest_publish().engines) == ["engine-0", "engine-1"] and job.newest_publish().attempt == 1
    job.until("the others to serve version 3", lambda: job.served_by(0) == job.served_by(1) == 3, 60)
    job.check()
    # The pod that takes its place takes part at once, under the same name.
    job.agents[3] = job.start_agent("pod-2")
    job.engines[2] = Follower("engine-2", job.agents[3].agent_socket, job.wanted)
    job.serve_everywhere()
    assert not job.named("engine-2").drained
    job.release_next()


def test_undo_brings_an_agent_and_its_engine_back(job):
    with Client(job.address) as client:
        assert client.drain("pod-1") == ("engine-1",)
        job.release_next(waiting=False)
        job.until("the others to serve version 2", lambda: job.served_by(0) == job.served_by(2) == 2, 60)
        drained = next(e for e in client.status().engines if e.name == "engine-1")
        assert drained.drained and drained.busy_with == () and drained.version == 1 and not drained.ready
    undone = wwctl(job, "drain", "pod-1", "--undo")
    assert undone.returncode == 0 and undone.stdout == "pod-1 takes part again (engine-1)\n"
    job.serve_everywhere()
    job.release_next()


def test_what_it_is_in_is_finished_and_named_meanwhile(job):
    job.engines[1]._stop.set()  # it does not flip any more, as one in a long step
    job.engines[1]._thread.join(30)
    job.release_next(waiting=False)
    job.until("the swap to be all that is left", lambda: job.named("engine-1").state == 6, 60)
    slow = wwctl(job, "drain", "engine-1", "--wait", "0.5")
    assert slow.returncode == 64 + 26 and "still busy with engine-1: epoch 2 (version 2): committing" in slow.stderr
    offer = job.engines[1].subscriber.wait_offer(20)
    job.engines[1].subscriber.flip(offer)
    job.engines[1].subscriber.acknowledge(offer)
    done = wwctl(job, "drain", "engine-1")
    assert done.returncode == 0, done.stderr
    assert job.named("engine-1").version == 2


def test_the_trainers_agent_and_strangers_are_refused(job):
    trainer = wwctl(job, "drain", "pod-trainer")
    assert trainer.returncode == 64 + 23 and "a rank of the trainer" in trainer.stderr
    stranger = wwctl(job, "drain", "nobody")
    assert stranger.returncode == 64 + 22 and "wwctl participants" in stranger.stderr


def test_a_drained_engine_fills_nobody(job):
    for name in ("engine-0", "engine-1"):
        assert wwctl(job, "drain", name).returncode == 0
    late = Follower("late", job.agents[3].agent_socket, job.wanted)
    job.engines.append(late)
    job.until("the late one to be filled", lambda: late.flipped == [1], 60)
    fill = next(e for e in job.status().epochs if e.kind == 2)
    told = wwctl(job, "epoch", str(fill.epoch)).stdout
    assert "fill of version 1" in told
    with pytest.raises(StaleError, match="drained"):
        with Client(job.address) as client:
            job.release_next(waiting=False)
            job.until("version 2 to be served by them",
                      lambda: (newest := client.status().epochs[0]).version == 2 and newest.phase == "committed", 60)
            for name in ("engine-2", "late"):
                client.drain(name)
            client.rollback(1)


def test_a_coordinator_that_is_killed_in_the_middle_of_a_drain_forgets_nothing(job):
    job.engines[1]._stop.set()  # it does not flip any more, so that its drain goes on
    job.engines[1]._thread.join(30)
    job.release_next(waiting=False)
    job.until("the swap to be all that is left", lambda: job.named("engine-1").state == 6, 60)
    assert wwctl(job, "drain", "engine-1", "--wait", "0.1").returncode == 64 + 26
    assert wwctl(job, "drain", "pod-2").returncode == 0
    job.coordinator.kill()
    job.coordinator = job.start_coordinator(job.address)
    job.until("everyone to be back", lambda: len(job.status().engines) == 3 and all(e.ranks_present for e in job.status().engines), 60)
    assert [(e.name, e.drained) for e in job.status().engines] == [("engine-0", False), ("engine-1", True), ("engine-2", True)]
    offer = job.engines[1].subscriber.wait_offer(20)  # what it was in goes on with the next coordinator
    job.engines[1].subscriber.flip(offer)
    job.engines[1].subscriber.acknowledge(offer)
    assert wwctl(job, "drain", "engine-1").returncode == 0
    for release in job.accept_next(time.monotonic() + 60):
        release.wait_released(60)
    job.until("engine-0 to serve it", lambda: job.served_by(0) == job.version, 60)
    assert list(job.newest_publish().engines) == ["engine-0"] and job.served_by(1) == job.served_by(2) == 2
    undone = wwctl(job, "drain", "engine-2", "--undo")
    assert undone.returncode == 0, undone.stderr
    job.until("engine-2 to be filled", lambda: job.served_by(2) == job.version, 60)
