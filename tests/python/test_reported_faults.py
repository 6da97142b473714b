"""Faults that were found on running jobs, each done again with real processes as it was found. The table of docs/faults.md names
them by the same words as the tests here; those of others lie where their subject does."""

from __future__ import annotations

import os
import signal
import threading
import time

import grpc
import pytest

from conftest import stand_still, until
from coordinator_job import CONFIG, Follower, metas
from demo import oracle
from soak_engine import EngineProcess
from soak_record import MIB, look
from test_client import CONFIG as SMALL
from test_client import assert_serves, engine, load, trainer
from test_exhaustion import address_of
from test_shutdown import request, said
from weightwire import Client, Publisher, Subscriber, TensorMeta, boxes
from weightwire.errors import WeightwireError
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1.types_pb2 import EPOCH_PHASE_COMMITTED


def publish(job, deadline: float = 60) -> float:
    """Seconds until the next version is released."""
    began = time.monotonic()
    for release in job.publish(deadline):
        release.wait_released(deadline + 10)
    return time.monotonic() - began


def test_d4_a_staged_version_whose_trainer_left_is_the_next_trainers_to_publish(daemon, groups):
    first, served = trainer(daemon), engine(daemon)
    groups.append(served)
    with Client(daemon.grpc) as client:
        for publisher in first.publishers:
            publisher.publish(1, manual_commit=True)
        client.wait_staged(1, timeout=60)
        first.close()
        groups.append(trainer(daemon))
        weights = load(groups[-1], 7)
        groups[-1].publish(1)  # not stale_version: nobody ever committed it
        served.wait_version(1)
        assert client.status().committed_version == 1
    assert_serves(served, weights)


def test_n7_an_engine_that_is_lost_between_staged_and_the_manual_commit_costs_its_place_only(coordinator_job, tmp_path):
    job = coordinator_job(lease_ms=60_000)
    lost = EngineProcess("engine-9", job.agents[1].agent_socket, str(tmp_path))
    try:
        job.attach_trainer(time.monotonic() + 60)
        until("engine-9 takes part", lambda: sum(p.has_layout for p in job.status().participants) == 6)
        publish(job)
        until("engine-9 serves it", lambda: lost.version == 1)
        with Client(job.address) as client:
            job.version += 1
            job._contents[job.version] = job._contents[1]
            releases = [publisher.publish(job.version, manual_commit=True) for publisher in job.publishers]
            staged = client.wait_staged(job.version, timeout=60)
            for release in releases:
                release.wait_released(60)  # the trainer goes on: nothing may take the version back from now on
            lost.process.kill()
            until("it is missed", lambda: sum(e.ranks_present for e in client.status().engines) == 3)
            client.commit(staged.epoch)
            client.wait_version(job.version, timeout=60, engines=[e.name for e in job.engines])
            assert client.status().epoch_of(job.version).phase == "committed"
        job.serve_everywhere()
    finally:
        lost.close()


def test_b7_an_engine_that_hangs_costs_its_deadline_once(coordinator_job, tmp_path):
    job = coordinator_job(commit_deadline_ms=3_000)
    job.attach_trainer(time.monotonic() + 60)
    hung = EngineProcess("engine-9", job.agents[1].agent_socket, str(tmp_path))
    try:
        until("engine-9 takes part", lambda: sum(p.has_layout for p in job.status().participants) == 6)
        publish(job)
        job.serve_everywhere()
        # Its answer to version 1 has arrived: it hangs in version 2.
        until("version 1 is over", lambda: any(e.version == 1 and e.phase == EPOCH_PHASE_COMMITTED for e in job.status().epochs))
        stand_still(hung.process.pid)
        seconds = []
        for _ in range(4):
            began = time.monotonic()
            publish(job)
            job.serve_everywhere()
            job.until("it is decided", lambda: job.status().committed_version == job.version, 30)
            seconds.append(time.monotonic() - began)
        # Version 2 goes out without it, and ends when its deadline is over: so version 3 waits, and no other, nor is anybody else
        # fenced for it.
        assert seconds[1] > 2.5 and max(seconds[0], *seconds[2:]) < 2.5, seconds
        assert all(engine.gaps == 0 for engine in job.engines)
        os.kill(hung.process.pid, signal.SIGCONT)
        until("it has caught up", lambda: hung.version == job.version)
        assert hung.gaps == 0 and not hung.wrong, "it served on, and was not fenced"
    finally:
        os.kill(hung.process.pid, signal.SIGCONT)
        hung.close()


def test_d6_engines_that_come_and_go_use_no_version_up(coordinator_job):
    """One leaves and one joins each 100 ms, several while a version moves: it takes a third of a second and more."""
    job = coordinator_job()
    job.attach_trainer(time.monotonic() + 60)
    publish(job)
    stop, came, left, failures = threading.Event(), [], [], []

    def come_and_go() -> None:
        here = []
        try:
            while not stop.wait(0.1):
                here.append(Follower(f"guest-{len(came)}", job.agents[1].agent_socket, job.wanted))
                came.append(here[-1])
                if len(here) > 4:
                    left.append(here.pop(0))
                    left[-1].subscriber.close()
        except BaseException as error:  # tells the test
            failures.append(error)
        finally:
            for guest in here:
                guest.subscriber.close()
    guests = threading.Thread(target=come_and_go)
    guests.start()
    try:
        end, seconds = time.monotonic() + 15, []
        while time.monotonic() < end and not failures:
            seconds.append(publish(job, deadline=60))  # raises when the version is given up
    finally:
        stop.set()
        guests.join(120)
        for guest in came:
            guest.close()
    assert not failures, failures
    job.serve_everywhere()
    assert all(e.gaps == 0 for e in job.engines) and not [line for guest in came for line in guest.wrong]
    print(f"{len(seconds)} versions in {min(seconds):.2f} to {max(seconds):.2f} s; {len(came)} engines came, {len(left)} left meanwhile")
    assert len(left) >= 2 * len(seconds) >= 6, "too few were lost while versions moved"


def test_d5_only_the_leader_refuses_for_an_engine(daemon, groups):
    groups += [trainer(daemon), engine(daemon, "engine-a", 1)]
    ranks = [Subscriber(group="engine-b", rank=rank, world_size=2, agent=daemon.agent_socket) for rank in range(2)]
    try:
        for rank in ranks:
            rank.bind(SMALL, "vllm:tp2", metas(oracle.vllm_shapes(SMALL, 2)))
        groups[0].publish(1)
        offers = [rank.wait_offer(60) for rank in ranks]
        with pytest.raises(WeightwireError, match="leader"):
            ranks[1].refuse(offers[1], "not me")
        for rank, offer in zip(ranks, offers):
            rank.flip(offer)
        ranks[0].acknowledge(offers[0])
        groups[1].wait_version(1)
        with Client(daemon.grpc) as client:
            client.wait_version(1, timeout=60, engines=["engine-a", "engine-b"])
        assert all(rank.last_fence is None for rank in ranks)
    finally:
        for rank in ranks:
            rank.close()


def test_d15_a_rank_of_72_000_tensors_is_bound_and_served(daemon):
    """Its agreed layout is more than gRPC's 4 MiB of an answer."""
    tensors = {f"model.layers.{i:05}.experts.some_rather_long_name_of_a.weight": None for i in range(72_000)}
    metas_ = {name: TensorMeta(name, "U8", (4,)) for name in tensors}
    layout = boxes.submission(metas_, [boxes.whole(meta) for meta in metas_.values()])
    assert layout.ByteSize() > 4 << 20
    with Publisher(rank=0, world_size=1, agent=daemon.agent_socket, timeout=120) as publisher, \
            Subscriber(group="engine-a", rank=0, world_size=1, agent=daemon.agent_socket, timeout=120) as one:
        arrays = publisher.bind_boxes(layout)
        one.bind_submission(layout)
        for i, array in enumerate(arrays.values()):
            array[...] = i % 251
        publisher.publish(1, mode="snapshot")
        offer = one.wait_offer(120)
        served = one.flip(offer)
        assert len(served) == 72_000
        assert all((served[name] == array).all() for name, array in arrays.items())
        one.acknowledge(offer)


def test_d3_a_bad_engine_uses_up_nobody_elses_fill(coordinator_job):
    job = coordinator_job(lease_ms=120_000)
    job.attach_trainer(time.monotonic() + 60)
    publish(job)
    job.serve_everywhere()
    agent = job.start_agent("bad")
    job.agents.append(agent)
    bad = Subscriber(group="engine-bad", rank=0, world_size=1, agent=agent.agent_socket)
    late = []
    try:
        bad.bind(CONFIG, "vllm:tp1", metas(oracle.vllm_shapes(CONFIG, 1)))
        stand_still(agent.pid)  # its fill has begun, or is about to
        late = [Follower(f"late-{i}", job.agents[1].agent_socket, job.wanted) for i in range(4)]
        began = time.monotonic()
        job.until("the others are filled", lambda: all(one.version == 1 for one in late), 30)
        print(f"four were filled in {time.monotonic() - began:.2f} s beside one that hangs")
        assert not [line for one in late for line in one.wrong]
        assert all(e.gaps == 0 for e in job.engines)
        os.kill(agent.pid, signal.SIGCONT)
        assert bad.wait_offer(60).version == 1
    finally:
        os.kill(agent.pid, signal.SIGCONT)
        for one in late:
            one.close()
        bad.close()


def test_an_agent_that_is_killed_again_and_again_has_its_engines_back(coordinator_job):
    """They attach again by themselves, and are filled by those who have what is committed."""
    job = coordinator_job()
    job.attach_trainer(time.monotonic() + 60)
    publish(job)
    job.serve_everywhere()
    slowest = 0.0
    for _ in range(int(os.environ.get("WEIGHTWIRE_KILLS", "5"))):
        job.agents[1].kill()
        job.agents[1] = job.start_agent("rollout")
        began = time.monotonic()
        # A fence is heard of a moment later: it serves again when it has flipped anew.
        flips = [len(e.flipped) for e in job.engines[1:]]
        job.until("its engines serve again", lambda: all(
            len(e.flipped) > n and e.version == 1 for e, n in zip(job.engines[1:], flips)), 60)
        slowest = max(slowest, time.monotonic() - began)
    print(f"all served again {slowest:.2f} s after their agent was back, at the latest")
    assert job.engines[0].gaps == 0, "it has another agent"
    publish(job)
    job.serve_everywhere()


def test_watchers_that_never_read_and_messages_of_40_mib_harm_nobody(coordinator_job):
    job = coordinator_job()
    job.attach_trainer(time.monotonic() + 60)
    publish(job)
    watch = request("Coordinator/Watch", pb.WatchRequest(min_interval_ms=1).SerializeToString())
    deaf = [said(address_of(job.address), watch) for _ in range(200)]
    try:
        until("they are there", lambda: len(os.listdir(f"/proc/{job.coordinator.pid}/fd")) > 200)
        before = look(job.coordinator.pid, 0).rss
        for _ in range(20):
            publish(job)
        job.serve_everywhere()
        with grpc.insecure_channel(job.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            with pytest.raises(grpc.RpcError) as refused:
                channel.unary_unary("/weightwire.v1.Coordinator/Report")(bytes(40 << 20), timeout=60)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        publish(job)
        job.serve_everywhere()
        grown = look(job.coordinator.pid, 0).rss - before
        assert grown < 64 * MIB, f"{grown / MIB:.0f} MiB for those who do not read"
    finally:
        for one in deaf:
            one.close()
