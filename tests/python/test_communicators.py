"""weightwire.v1.Communicators of a real weightwired, over raw gRPC: two steps to a communicator epoch, and its end."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from weightwire import errors
from weightwire.v1 import communicator_pb2 as pb
from weightwire.v1 import communicator_pb2_grpc


class Members:
    """Ranks of one group, each as its own caller."""

    def __init__(self, channel, size):
        self.stub = communicator_pb2_grpc.CommunicatorsStub(channel)
        self.size = size

    def call(self, method, **fields):
        try:
            return getattr(self.stub, method)(getattr(pb, f"{method}Request")(**fields), timeout=20)
        except grpc.RpcError as error:
            raise errors.from_rpc_error(error) from None

    def member(self, rank):
        return pb.CommunicatorMember(group="class-a", rank=rank, incarnation=rank + 1)

    def join(self, rank, last_epoch=0, deadline_ms=15_000):
        return self.call("JoinCommunicator", member=self.member(rank), size=self.size, last_epoch=last_epoch,
                         participant=f"test/{rank}", deadline_ms=deadline_ms)

    def form(self, last_epoch=0):
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: self.join(rank, last_epoch), range(self.size)))


@pytest.fixture
def members(daemon):
    with grpc.insecure_channel(daemon.grpc) as channel:
        yield Members(channel, 3)


def test_ranks_meet_and_get_rank_0s_id(members):
    formed = members.form()
    assert [f.epoch for f in formed] == [1, 1, 1]
    assert all([p.participant for p in f.participants] == ["test/0", "test/1", "test/2"] for f in formed)
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(members.call, "AwaitUniqueId", member=members.member(r), epoch=1, deadline_ms=15_000)
                 for r in (1, 2)]
        members.call("OfferUniqueId", member=members.member(0), epoch=1, unique_id=b"\0id\xff" * 32)
        assert [w.result().unique_id for w in waits] == [b"\0id\xff" * 32] * 2


def test_an_ended_epoch_is_stale_and_the_next_one_is_higher(members):
    members.form()
    members.call("EndCommunicator", member=members.member(2), epoch=1, why="a test lost it")
    with pytest.raises(errors.StaleError, match="class-a/2: a test lost it"):
        members.call("AwaitUniqueId", member=members.member(1), epoch=1, deadline_ms=1_000)
    assert {f.epoch for f in members.form(last_epoch=1)} == {2}


def test_a_member_that_never_comes_is_named_in_time(members):
    with pytest.raises(errors.DeadlineError, match="these have not asked: 0, 2"):
        members.join(1, deadline_ms=300)


def test_bad_fields_are_named(members):
    for fields, text in (({"group": "a b", "incarnation": 1}, "member.group"),
                         ({"group": "a"}, "member.incarnation: must not be 0")):
        with pytest.raises(errors.RefusedError, match=text):
            members.call("JoinCommunicator", member=pb.CommunicatorMember(**fields), size=1, deadline_ms=100)


def test_a_stopping_daemon_answers_those_that_wait(daemon, members):
    told = []

    def wait():
        try:
            members.join(0)
        except errors.WeightwireError as error:
            told.append(error.reason)

    waiting = threading.Thread(target=wait)
    waiting.start()
    missing = ""
    while not missing.endswith("asked: 2"):  # until the first one is known to wait
        with pytest.raises(errors.DeadlineError) as refused:
            members.join(1, deadline_ms=200)
        missing = str(refused.value).split(" [")[0]
    daemon.stop()
    waiting.join(15)
    assert told == ["shutting_down"]
