"""Pages of a status, and engines by number in them: every epoch once, and clients and coordinators of before understand those of
now (tests/python/test_large_status.py has a coordinator of before)."""

import asyncio
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from conftest import BINARIES, until
from test_client import engine, trainer
from test_wwctl import Coordinator
from weightwire import Client, aio
from weightwire.status import PAGE, JobStatus
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc

VERSIONS = PAGE + 6  # two pages


@pytest.fixture
def job(daemon, groups):
    """A trainer and two engines that have served VERSIONS versions; the daemon, the trainer and a stub."""
    groups += [trainer(daemon), engine(daemon, "engine-a"), engine(daemon, "engine-b")]
    with Client(daemon.grpc) as client, grpc.insecure_channel(daemon.grpc) as channel:
        for version in range(1, VERSIONS + 1):
            groups[0].publish(version)
        client.wait_version(VERSIONS, timeout=60)
        yield daemon, groups[0], coordinator_pb2_grpc.CoordinatorStub(channel)


def wwctl(daemon, *arguments):
    return subprocess.run([BINARIES / "wwctl", *arguments, "--address", daemon.grpc], check=True, timeout=60, capture_output=True,
                          text=True).stdout


def settled(status):
    """Without what moves on between two answers."""
    for participant in status.participants:
        participant.silent_seconds = participant.cut_seconds = 0
    return status


def test_who_asks_for_nothing_gets_everything_by_name(job):
    daemon, _, stub = job
    before = settled(stub.Status(pb.StatusRequest()))
    assert len(before.epochs) == VERSIONS and len(before.participants) == before.participants_total == 8
    assert all(epoch.engines == ["engine-a", "engine-b"] and not epoch.engine_runs for epoch in before.epochs)
    assert not before.engine_names and before.epochs_left == 0 and before.trainers_total == 4
    now = settled(stub.Status(pb.StatusRequest(engine_runs=True)))
    assert all(epoch.engine_runs == [0, 2] and not epoch.engines for epoch in now.epochs)
    assert JobStatus.from_proto(now) == JobStatus.from_proto(before), "the same by numbers"
    bare = stub.Status(pb.StatusRequest(epochs_max=1, no_participants=True))
    assert not bare.participants and bare.participants_total == 8 and len(bare.engines) == 2
    assert [epoch.version for epoch in bare.epochs] == [VERSIONS] and bare.epochs_left == VERSIONS - 1


def test_pages_have_every_epoch_once_while_versions_are_published(job):
    daemon, trainer, stub = job
    want = [epoch.epoch for epoch in stub.Status(pb.StatusRequest()).epochs]
    request = pb.StatusRequest(epochs_max=7, engine_runs=True)
    got, left = [], None
    while left != 0:
        page = stub.Status(request)
        assert len(page.epochs) <= 7 and bool(page.engines) == bool(page.participants) == (not got)
        names = [engine.name for engine in page.engines] + list(page.engine_names)
        assert names == ["engine-a", "engine-b"] and all(epoch.engine_runs == [0, 2] for epoch in page.epochs)
        got += [epoch.epoch for epoch in page.epochs]
        request.epochs_before, left = got[-1], page.epochs_left
        trainer.publish(trainer_version := VERSIONS + len(got))
    assert got == want
    assert stub.Status(pb.StatusRequest(epochs_max=1)).epochs[0].version == trainer_version


def test_clients_page_on(job):
    daemon, _, stub = job
    whole = JobStatus.from_proto(stub.Status(pb.StatusRequest()))
    with Client(daemon.grpc) as client:
        asked = client.status()
        assert asked.epochs == whole.epochs and asked.engines == whole.engines and asked.epochs_left == 0
        newest = client.status(epochs=5, participants=False)
        assert newest.epochs == whole.epochs[:5] and newest.epochs_left == VERSIONS - 5
        assert newest.participants == () and newest.participants_total == 8
        assert client.status(epochs=PAGE + 1).epochs == whole.epochs[:PAGE + 1]
        with pytest.raises(ValueError, match="1 or more"):
            client.status(epochs=0)
        watched = next(client.watch(10, participants=False))
        assert watched.epochs == whole.epochs and watched.participants == ()

    async def ask():
        async with aio.Client(daemon.grpc) as client:
            return await client.status(epochs=PAGE + 2)
    assert asyncio.run(ask()).epochs == whole.epochs[:PAGE + 2]

    def versions(text):
        return [int(epoch["version"]) for epoch in json.loads(text)]
    falling = list(range(VERSIONS, 0, -1))
    assert versions(wwctl(daemon, "epochs", "--json")) == falling[:16]
    assert versions(wwctl(daemon, "epochs", "--json", "--epochs", "0")) == falling
    assert versions(wwctl(daemon, "epochs", "--json", "--epochs", str(PAGE + 3))) == falling[:PAGE + 3]
    status = json.loads(wwctl(daemon, "status", "--json"))
    assert len(status["epochs"]) == 16 and status["epochs_left"] == VERSIONS - 16 and len(status["participants"]) == 8
    assert all(epoch["engines"] == ["engine-a", "engine-b"] for epoch in status["epochs"])
    text = wwctl(daemon, "epochs", "--epochs", "3").splitlines()
    assert len(text) == 5 and text[-1] == f"and {VERSIONS - 3} older; --epochs 0 shows all"
    assert len(wwctl(daemon, "epochs", "--epochs", "0").splitlines()) == VERSIONS + 1
    shown = wwctl(daemon, "status")
    assert "8 ranks" in shown and shown.count("engine-a, engine-b") == 5
    assert "8 ranks" in wwctl(daemon, "top", "--once") and wwctl(daemon, "doctor") == "nothing found\n"


def test_an_engine_that_left_is_named_in_its_epochs(job, groups):
    daemon, trainer, stub = job
    gone = groups.pop()
    gone.close()
    with Client(daemon.grpc) as client:
        until("it left", lambda: [e.ranks_present for e in client.status().engines] == [2, 0])
        trainer.publish(VERSIONS + 1)
        status = client.wait_version(VERSIONS + 1, timeout=60)
        assert status.epoch_of(VERSIONS + 1).engines == ("engine-a",)
        assert status.epoch_of(VERSIONS).engines == ("engine-a", "engine-b")
    (newest, before) = json.loads(wwctl(daemon, "epochs", "--json", "--epochs", "2"))
    assert newest["engines"] == ["engine-a"] and before["engines"] == ["engine-a", "engine-b"]


def test_numbers_that_are_no_engines_cost_nothing():
    """Whatever a peer sends, an epoch has no more engines than there are."""
    status = pb.StatusResponse(job="default", deciding=True, epochs_left=3)
    for name in "ab":
        status.engines.add(name=name, ranks_present=1, world_size=1, ready=True)
    runs = [0, 2**32 - 1, 2**32 - 1, 1, 1, 1, 7] * 1_000
    status.epochs.add(epoch=2, version=2, engine_runs=runs, left_out_runs=[5, 5])
    assert JobStatus.from_proto(status).epochs[0].engines[:2] == ("a", "b") and len(JobStatus.from_proto(status).epochs[0].engines) < 9
    with Coordinator(status) as coordinator:
        shown = subprocess.run([BINARIES / "wwctl", "epochs", "--json", "--address", coordinator.address], timeout=60, check=True,
                               capture_output=True, text=True).stdout
        (epoch,) = json.loads(shown)
        assert epoch["engines"] == ["a", "b"] and epoch["left_out"] == [] and epoch["engine_runs"] == []
        assert len(coordinator.calls) == 2, "a page that begins where it should not ends it"
        with Client(coordinator.address) as client:
            assert len(client.status().epochs) == 1 and len(coordinator.calls) == 4


class TwoPages(coordinator_pb2_grpc.CoordinatorServicer):
    """An engine is here, another one has left; an epoch of both on each page."""

    def Status(self, request, context):
        if request.epochs_before:
            assert request.epochs_before == 9
            page = pb.StatusResponse(engine_names=["left", "here"])
            page.epochs.add(epoch=8, version=8, engine_runs=[0, 2], left_out_runs=[1, 1])
            return page
        page = pb.StatusResponse(engine_names=["left"], epochs_left=1)
        page.engines.add(name="here", ranks_present=1, world_size=1, ready=True)
        page.epochs.add(epoch=9, version=9, engine_runs=[0, 2], left_out_runs=[0, 1])
        return page


def test_numbers_are_those_of_their_own_page():
    server = grpc.server(ThreadPoolExecutor(2))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(TwoPages(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with Client(address) as client:
            epochs = [(list(e.engines), list(e.left_out)) for e in client.status().epochs]
        shown = subprocess.run([BINARIES / "wwctl", "epochs", "--json", "--epochs", "0", "--address", address], check=True, timeout=60,
                               capture_output=True, text=True).stdout
    finally:
        server.stop(None)
    assert epochs == [(["here", "left"], ["here"]), (["left", "here"], ["here"])]
    assert [(e["engines"], e["left_out"]) for e in json.loads(shown)] == epochs
