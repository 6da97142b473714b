"""Who may call what: every RPC of the table in docs/security.md by every role, of this and of another job, and by nobody
who is known. rpc_test compares that table with the one in the code, and the code's with the protos."""

from __future__ import annotations

import re
import threading
from dataclasses import replace

import grpc
import pytest

import certificates
from conftest import BINARIES, ROOT
from demo.fleet import Daemon
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc, types_pb2

ROLES = ("trainer", "engine", "agent", "operator", "metrics")
TABLE = {method: dict(zip(ROLES, (cell.strip() for cell in cells.split("|"))))
         for method, cells in re.findall(r"^\| `(/\S+)` \|(.*)\|$", (ROOT / "docs/security.md").read_text(), re.M)}
DENIED = grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def coordinator(authority, tmp_path_factory):
    own = authority.issue("coordinator", "coordinator", job="rl")
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path_factory.mktemp("coordinator")), "coordinator",
                     role="coordinator", job="rl", listen="127.0.0.1:0", lease_ms=60_000, **certificates.settings(own))
    yield started
    assert started.stop() == 0


def outcome(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """What `method` says to an empty message; OK from its first answer on. Any kind of call is such a stream on the wire."""
    call = channel.stream_stream(method)(iter([b""]), timeout=20)
    try:
        next(call, None)
        call.cancel()
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()


def test_the_table_was_read():
    assert len(TABLE) >= 20 and all(set(row.values()) <= {"no", "own job", "yes"} for row in TABLE.values())
    assert all(len(row) == len(ROLES) for row in TABLE.values())


@pytest.mark.parametrize("job", ["rl", "other"])
@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_call_what_the_table_says(coordinator, authority, role, job):
    with certificates.channel(coordinator.grpc, authority.issue(f"{role}-{job}", role, job=job)) as channel:
        for method, row in TABLE.items():
            allowed = row[role] == "yes" or (row[role] == "own job" and job == "rl")
            code = outcome(channel, method)
            if not allowed:
                assert code == DENIED, f"{role} of job {job} called {method}: {code}"
            else:
                assert code not in (DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE,
                                    grpc.StatusCode.DEADLINE_EXCEEDED), f"{role} of job {job} called {method}: {code}"


@pytest.mark.parametrize("who", ["no certificate", "plaintext", "wrong CA", "expired"])
def test_nobody_who_is_not_known_gets_a_connection(coordinator, authority, tmp_path, who):
    counter = 'weightwire_auth_failures_total{reason="handshake"}'
    before = coordinator.counter(counter)
    if who == "no certificate":
        credentials = grpc.ssl_channel_credentials(open(authority.directory / "ca.crt", "rb").read())
        channel = grpc.secure_channel(coordinator.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)])
    elif who == "plaintext":
        channel = certificates.channel(coordinator.grpc, None)
    elif who == "wrong CA":
        stranger = certificates.Authority(tmp_path / "stranger").issue("operator", "operator", job="rl")
        channel = certificates.channel(coordinator.grpc, replace(stranger, ca=str(authority.directory / "ca.crt")))
    else:
        channel = certificates.channel(coordinator.grpc, authority.issue("expired", "operator", job="rl", days=-1))
    with channel:
        for method in TABLE:
            assert outcome(channel, method) == grpc.StatusCode.UNAVAILABLE, method
    assert coordinator.counter(counter) > before


def test_a_certificate_without_an_identity_is_nobody_and_refusals_are_counted(coordinator, authority):
    with certificates.channel(coordinator.grpc, authority.issue("nobody", "operator", job="r l")) as channel:
        for method in TABLE:
            assert outcome(channel, method) == grpc.StatusCode.UNAUTHENTICATED, method
    assert coordinator.counter('weightwire_auth_failures_total{reason="identity"}') == len(TABLE)
    evict = "/weightwire.v1.Coordinator/Evict"
    line = f'weightwire_authz_denied_total{{method="{evict}",role="metrics"}}'
    before = coordinator.counter(line)
    with certificates.channel(coordinator.grpc, authority.issue("scraper", "metrics", job="rl")) as channel:
        assert outcome(channel, evict) == DENIED
        assert outcome(channel, "/weightwire.v1.Coordinator/NoSuchMethod") == DENIED
    assert coordinator.counter(line) == before + 1
    assert coordinator.counter('weightwire_authz_denied_total{method="unknown",role="metrics"}') == 1


class Session:
    """An agent's session, opened by hand; its lease outlives the test."""

    def __init__(self, address: str, tls, incarnation: int, name: str = "by-hand"):
        self.channel = certificates.channel(address, tls)
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self._over = threading.Event()
        hello = pb.SessionUp(hello=pb.AgentHello(protocol=types_pb2.Protocol(min=1, max=1), job="rl", name=name,
                                                 incarnation=incarnation, host="h", addresses={"tcp": "127.0.0.1:1"}))
        self.call = self.stub.Session(self._ups(hello), timeout=60)
        self.agent = next(self.call).welcome.agent

    def _ups(self, hello):
        yield hello
        self._over.wait(60)

    def register(self, role, agent: int | None = None, rank: int = 0, group: str = "group"):
        return self.stub.Register(pb.RegisterRequest(agent=agent or self.agent, job="rl", role=role, group=group, rank=rank,
                                                     world_size=4, incarnation=4711 + rank), timeout=20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._over.set()
        self.channel.close()


def refused(call, *arguments, **named) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **named)
    assert caught.value.code() == DENIED, caught.value
    return caught.value.details()


def test_an_identity_names_only_what_it_brought_itself(coordinator, authority):
    trainer, engine = types_pb2.GROUP_ROLE_TRAINER, types_pb2.GROUP_ROLE_ENGINE
    with Session(coordinator.grpc, authority.issue("t", "trainer", job="rl"), 1) as owner, \
            Session(coordinator.grpc, authority.issue("e", "engine", job="rl"), 2) as rogue, \
            Session(coordinator.grpc, authority.issue("t2", "trainer", job="rl", rank=2), 3) as second:
        member = owner.register(trainer).member
        assert "role engine cannot register trainer ranks" in refused(rogue.register, trainer)
        assert "role trainer cannot register engine ranks" in refused(owner.register, engine)
        assert "role/trainer" in refused(rogue.register, engine, agent=owner.agent)
        assert "another rank" in refused(second.register, trainer, rank=1)
        assert second.register(trainer, rank=2).member.participant
        report = pb.ReportRequest(agent=owner.agent, member=member, lost=pb.ReportRequest.Lost(
            why=types_pb2.Outcome(code=14, message="gone")))
        refused(rogue.stub.Report, report, timeout=20)
        layout = types_pb2.LayoutSubmission(scheme=types_pb2.LayoutSubmission.Scheme(
            config_json="{}", topology=types_pb2.ParallelTopology(spec="megatron:tp4")))
        refused(rogue.stub.SubmitLayout, pb.SubmitLayoutRequest(member=member, layout=layout), timeout=20)
        refused(second.stub.PublishVersion, pb.PublishVersionRequest(member=member, version=1, deadline_ms=1_000), timeout=20)
        with pytest.raises(grpc.RpcError) as caught:  # the place of the same agent, by its incarnation
            Session(coordinator.grpc, authority.files("e"), 1)
        assert caught.value.code() == DENIED
        with certificates.channel(coordinator.grpc, authority.issue("o", "operator", job="rl")) as channel:
            present = coordinator_pb2_grpc.CoordinatorStub(channel).Status(pb.StatusRequest(), timeout=20).participants
        assert sorted((p.rank, p.agent) for p in present) == [(0, owner.agent), (2, second.agent)]


def test_a_pod_takes_itself_out_and_nobody_else(coordinator, authority):
    drain = lambda session, name, **more: session.stub.Drain(pb.DrainRequest(name=name, **more), timeout=20)
    with Session(coordinator.grpc, authority.issue("e", "engine", job="rl"), 11, "pod-1") as own, \
            Session(coordinator.grpc, authority.issue("e1", "engine", job="rl", rank=1), 12, "pod-2") as other:
        own.register(types_pb2.GROUP_ROLE_ENGINE, group="engine")
        assert list(drain(own, "pod-1").engines) == ["engine"]
        assert list(drain(own, "pod-1", undo=True).engines) == ["engine"]
        assert "agent" in refused(drain, other, "pod-1")
        for name in ("engine", "nobody", ""):  # not an engine by its name, be it its own
            with pytest.raises(grpc.RpcError) as caught:
                drain(own, name)
            assert caught.value.code() == grpc.StatusCode.NOT_FOUND, name
        with Session(coordinator.grpc, authority.files("e1"), 13, "pod-1"):
            refused(drain, own, "pod-1")  # one of two that call themselves so
