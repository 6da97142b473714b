"""A coordinator, a trainer's agent and the agents of two engines on hosts of their own (network namespaces): each pair of them
cut in each direction while versions are published, a link that is down, loss, a link that is too narrow. A cut drops packets
without a word; who is cut off learns of it by silence.

Whatever is cut: what a publisher was asked for ends within its deadline; no engine serves anything but a version that was
committed, every byte compared; none stops serving; who is cut off is not ready in the coordinator's eyes; and when the network
is whole again every engine serves the next version.

`./dev test` runs some of the cuts, `./dev test long` all of them (`WEIGHTWIRE_CUTS=all`). `WEIGHTWIRE_SEED` repeats the moments."""

from __future__ import annotations

import os
import time

import pytest

import netns
from spread_job import ENGINES, every_cut, spread_job

WHY_NOT = netns.possible()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no networks of our own here: {WHY_NOT}")

WHOLE_AGAIN = 60.0  # seconds until the next version is served everywhere


ALL = os.environ.get("WEIGHTWIRE_CUTS") == "all"
CUTS = [cut for cut in every_cut(("coordinator", "trainer", *ENGINES)) if ALL or str(cut) in ("coordinator-and-engine-0", "coordinator-to-trainer")]
LOSSES = (0.01, 0.1) if ALL else (0.01,)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    with spread_job(tmp_path_factory.mktemp("spread"), fanout="chain") as running:
        yield running


@pytest.fixture
def job(chain):
    """One job for all tests: engine-1 reads from engine-0."""
    yield chain
    chain.network.heal()


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_splits_no_commit_and_stops_no_engine(job, cut):
    served = job.version
    trainer_is_cut_off = cut.between("coordinator", "trainer")
    lost = [engine for engine in job.engines if cut.between("coordinator", engine.name)]
    deadline = 3.0 if trainer_is_cut_off else 15.0
    started = time.monotonic()
    releases = job.publish(deadline)
    time.sleep(job.random.uniform(0, job.usual_seconds))
    cut.make(job)
    first = job.attend(releases, deadline)
    ended = time.monotonic() - started
    second = job.try_next(deadline)
    status = job.account()
    job.compare_what_is_served()
    print(f"{cut}: version {served + 1} after {ended:.1f} s: {first}; version {served + 2}: {second}")
    if trainer_is_cut_off:
        assert second != "released" and status.committed_version <= served + 1
    elif lost:
        assert second == "released"
        job.until(f"version {served + 2} is committed", lambda: job.account().committed_version == served + 2, 20)
        job.serve([engine for engine in job.engines if engine not in lost])
        for engine in lost:
            assert_known_as_stale(job, engine, served + 2)
    elif cut.between("trainer", "engine-0"):  # the first of the chain: no version can reach everyone
        assert second != "released" and "[rank " in second
    else:
        assert second == "released"
    job.compare_what_is_served()
    job.network.heal()
    seconds = job.serve_next(WHOLE_AGAIN)
    print(f"{cut}: whole again, version {job.version} everywhere after {seconds:.1f} s")
    job.compare_what_is_served()


def assert_known_as_stale(job, engine, committed: int) -> None:
    """The coordinator says so. The agent says that it has lost the coordinator, and stays ready: whether something was
    committed meanwhile nobody can tell it, and engines outlive coordinators."""
    host, http = job.hosts[engine.name], job.agents[1 + ENGINES.index(engine.name)].http
    known = next(e for e in job.status().engines if e.name == engine.name)
    assert not known.ready and known.lag_versions > 0 and known.version != committed
    assert engine.subscriber.serving.version < committed
    job.until(f"{engine.name}'s agent misses its coordinator",
              lambda: "session with the coordinator: UNAVAILABLE" in host.page(http, "/")[1], 30)
    assert host.page(http, "/readyz")[0] == 200


@pytest.mark.parametrize("probability", LOSSES)
def test_lost_packets_cost_time_and_nothing_else(job, probability):
    flips = [len(engine.flipped) for engine in job.engines]
    for host in job.network.hosts:
        host.lose(probability)
    seconds = [job.serve_next(WHOLE_AGAIN) for _ in range(2)]
    lost = sum(host.lost() for host in job.network.hosts)
    print(f"{lost} packets ({probability:.0%}) lost: two versions took {seconds[0]:.1f} and {seconds[1]:.1f} s instead of "
          f"{job.usual_seconds:.1f}")
    assert lost > 100
    assert all(len(engine.flipped) >= 2 + before for engine, before in zip(job.engines, flips))
    if probability == LOSSES[0]:  # of a tenth of all packets a lease may die
        job.compare_what_is_served()


def test_an_engine_behind_a_narrow_link_is_named_when_it_misses_the_deadline(tmp_path):
    """Both engines read from the trainer; one of them at a fraction of the rate that the deadline asks for. The other one is
    done by then, because a whole version fits into the trainer's window: slots wait for their slowest reader."""
    with spread_job(tmp_path, {"window": 128, "slots_in_pool": 160, "progress_timeout_ms": 20_000}, fanout="star",
                    transfer_deadline_ms=4000, attempts_max=1) as job:
        served = job.version
        job.hosts["engine-0"].narrow(1_000_000)
        outcome = job.try_next(30)
        print(f"narrow link: {outcome}")
        assert "the deadline of transferring passed" in outcome and "engine-0/0" in outcome and "engine-1/0" not in outcome
        job.compare_what_is_served()
        assert job.account().committed_version == served
        job.network.heal()
        job.serve_next(WHOLE_AGAIN)
