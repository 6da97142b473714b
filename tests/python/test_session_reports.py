"""What an agent says on its session, to a real coordinator: reports in batches and in parts, and such as are not its own."""

from __future__ import annotations

import queue
import threading

import grpc
import pytest

from conftest import BINARIES
from demo.fleet import Daemon
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc, types_pb2

REPORTS_ON_SESSION = 1
PATIENCE = 30


class Session:
    def __init__(self, stub, name: str, incarnation: int):
        self._up: queue.Queue = queue.Queue()
        self.down: queue.Queue = queue.Queue()
        self.error: grpc.RpcError | None = None
        hello = pb.AgentHello(job="default", name=name, incarnation=incarnation, host=name, addresses={"tcp": "127.0.0.1:1"})
        hello.protocol.min = hello.protocol.max = 1
        self.send(pb.SessionUp(hello=hello))
        self._call = stub.Session(iter(self._up.get, None))
        threading.Thread(target=self._read, daemon=True).start()
        self.welcome = self.next("welcome").welcome

    def _read(self) -> None:
        try:
            for down in self._call:
                self.down.put(down)
        except grpc.RpcError as error:
            self.error = error
        self.down.put(None)

    def send(self, up: pb.SessionUp) -> None:
        self._up.put(up)

    def next(self, kind: str) -> pb.SessionDown:
        down = self.down.get(timeout=PATIENCE)
        assert down is not None and down.WhichOneof("kind") == kind, (down, self.error)
        return down

    def ended(self) -> grpc.RpcError:
        while self.down.get(timeout=PATIENCE) is not None:
            pass
        return self.error

    def close(self) -> None:
        self._up.put(None)


@pytest.fixture
def coordinator(tmp_path):
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path), "coordinator", role="coordinator", listen="127.0.0.1:0",
                    state_dir=str(tmp_path / "state"), lease_ms=60_000)  # these sessions have no heartbeats
    with grpc.insecure_channel(daemon.grpc) as channel:
        yield coordinator_pb2_grpc.CoordinatorStub(channel)
    assert daemon.stop() == 0


def register(stub, session: Session, engine: str, incarnation: int) -> types_pb2.Member:
    return stub.Register(pb.RegisterRequest(agent=session.welcome.agent, job="default", role=types_pb2.GROUP_ROLE_ENGINE,
                                            group=engine, rank=0, world_size=1, incarnation=incarnation)).member


def lost(session: Session, member: types_pb2.Member) -> pb.ReportRequest:
    report = pb.ReportRequest(agent=session.welcome.agent, member=member)
    report.lost.why.code = grpc.StatusCode.ABORTED.value[0]
    report.lost.why.detail.reason = types_pb2.REASON_MEMBER_LOST
    return report


def participants(stub) -> set[str]:
    return {p.group for p in stub.Status(pb.StatusRequest()).participants}


def test_what_is_not_its_own_or_cannot_be_read_is_refused_alone(coordinator):
    one, other = Session(coordinator, "one", 11), Session(coordinator, "other", 22)
    assert one.welcome.features & REPORTS_ON_SESSION
    mine, others = register(coordinator, one, "engine-a", 101), register(coordinator, other, "engine-b", 102)
    assert participants(coordinator) == {"engine-a", "engine-b"}
    forged = lost(other, others)  # says that it is of the other agent
    reports = pb.Reports(reports=[forged, pb.ReportRequest(agent=one.welcome.agent), lost(one, mine)], number=7)
    one.send(pb.SessionUp(reports=reports))
    reported = one.next("reported").reported
    assert reported.number == 7
    assert [why.code for why in reported.refused] == [grpc.StatusCode.PERMISSION_DENIED.value[0],
                                                      grpc.StatusCode.INVALID_ARGUMENT.value[0]]
    assert f"agent {other.welcome.agent}" in reported.refused[0].message
    # Answered means taken: the third one, and not the first.
    assert participants(coordinator) == {"engine-b"}
    one.send(pb.SessionUp(reports=pb.Reports(number=8)))
    assert one.next("reported").reported.number == 8  # the session goes on
    one.close(), other.close()


def test_a_long_report_arrives_in_parts_and_is_one(coordinator):
    session = Session(coordinator, "one", 11)
    member = register(coordinator, session, "engine-a", 101)
    report = pb.ReportRequest(agent=session.welcome.agent, member=member, epoch=1)
    for stream in range(900_000):
        report.sourced.digests.add(plan=types_pb2.PlanId(high=1, low=2), stream=stream, digest=stream * 7)
    text = report.SerializeToString()
    assert len(text) > 16 << 20  # more than a message may have
    for at in range(0, len(text), 1 << 20):
        more = at + (1 << 20) < len(text)
        session.send(pb.SessionUp(reports=pb.Reports(part=text[at:at + (1 << 20)], more=more, number=0 if more else 1)))
    session.send(pb.SessionUp(reports=pb.Reports(reports=[lost(session, member)], number=2)))
    for number in (1, 2):
        reported = session.next("reported").reported
        assert reported.number == number and not reported.refused
    assert not participants(coordinator)
    session.close()


def test_who_sends_more_than_a_report_may_have_is_told_and_stays(coordinator):
    session = Session(coordinator, "one", 11)
    member = register(coordinator, session, "engine-a", 101)
    for _ in range(70):
        session.send(pb.SessionUp(reports=pb.Reports(part=b"x" * (1 << 20), more=True)))
    refused = session.next("reported").reported.refused
    assert len(refused) == 1 and "67108864" in refused[0].message
    session.send(pb.SessionUp(reports=pb.Reports(part=b"x")))
    session.send(pb.SessionUp(reports=pb.Reports(reports=[lost(session, member)], number=3)))
    assert session.next("reported").reported.number == 3
    assert not participants(coordinator)
    session.close()


@pytest.mark.parametrize("up", [pb.SessionUp(hello=pb.AgentHello(job="default")), pb.SessionUp()])
def test_what_belongs_on_no_session_ends_it_and_says_why(coordinator, up):
    session = Session(coordinator, "one", 11)
    session.send(up)
    assert session.ended().code() == grpc.StatusCode.INVALID_ARGUMENT
