"""SIGKILL and SIGSTOP to a coordinator of its own (`role: coordinator`, its journal on disk) at moments by chance, under
running publishes: two trainer ranks and three engines of two agents, one process for all ranks.

After every restart: the journal knows every version that an engine served; no engine serves anything but one whole
version, every byte compared at every flip, and none stops serving; publishers stay open, what they hold is released, and the
next version is accepted within 10 s of the kill.

`WEIGHTWIRE_KILLS` (default 5) kills; `./dev test long` runs 100. `WEIGHTWIRE_SEED` repeats the moments."""

from __future__ import annotations

import os
import signal
import time

import numpy as np

from conftest import stand_still

KILLS = int(os.environ.get("WEIGHTWIRE_KILLS", "5"))
ACCEPTED_SECONDS_MAX = 10


def test_a_killed_coordinator_loses_no_commit_and_takes_the_next_version(coordinator_job):
    job = coordinator_job()
    job.attach_trainer(time.monotonic() + 30)
    for release in job.publish():
        release.wait_released(60)
    job.serve_everywhere()
    started = time.monotonic()
    for release in job.publish():
        release.wait_released(60)
    job.serve_everywhere()
    seconds = time.monotonic() - started
    accepted, went_on, committed_at_kill = [], 0, 0
    for _ in range(KILLS):
        served = job.version
        releases = job.publish()
        under_way = job.version
        time.sleep(job.random.uniform(0, 1.1 * seconds))
        job.coordinator.kill()
        killed = time.monotonic()
        seen = max(engine.flipped[-1] for engine in job.engines)
        assert all(engine.subscriber.serving for engine in job.engines), "engines serve on"
        job.coordinator = job.start_coordinator(job.address)
        known = job.status().committed_version
        assert max(served, seen) <= known <= job.version, f"{seen} was served, the journal knows {known}"
        committed_at_kill += known == under_way
        for release in releases:  # the publishers never learn of it
            release.wait_released(60)
        releases = job.publish()
        accepted.append(time.monotonic() - killed)
        for release in releases:
            release.wait_released(60)
        job.serve_everywhere()
        went_on += all(under_way in engine.flipped for engine in job.engines)
        assert all(publisher.attached for publisher in job.publishers)
        assert not [engine.name for engine in job.engines if engine.gaps], "an engine served nothing for a while"
    print(f"{KILLS} kills, {committed_at_kill} after the commit; the version under way was served everywhere {went_on} times; "
          f"the next one accepted after {np.median(accepted):.2f} s in the median, {max(accepted):.2f} s at most")
    assert max(accepted) <= ACCEPTED_SECONDS_MAX


def test_a_coordinator_that_stood_still_past_its_leases_goes_on(coordinator_job):
    lease = 2.0
    job = coordinator_job(lease_ms=int(1000 * lease), heartbeat_ms=400)
    job.attach_trainer(time.monotonic() + 30)
    for release in job.publish():
        release.wait_released(60)
    job.serve_everywhere()
    served = job.version
    job.publish()
    stand_still(job.coordinator.pid)
    try:
        time.sleep(2.5 * lease)
        for engine in job.engines:
            assert engine.version in (served, job.version) and not engine.gaps, f"{engine.name} stopped: {engine.subscriber.last_fence}"
    finally:
        os.kill(job.coordinator.pid, signal.SIGCONT)
    woken = time.monotonic()
    assert job.status().committed_version in (served, job.version)
    for release in job.accept_next(woken + ACCEPTED_SECONDS_MAX):
        release.wait_released(60)
    job.serve_everywhere()
