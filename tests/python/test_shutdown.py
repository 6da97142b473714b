"""SIGTERM while calls hang: weightwired ends in order, with exit code 0, whatever others have open on it. (Exit 90: its own alarm
ended it after 5 s, in the middle of what it was doing.) Hanging callers are raw sockets where a client library would read, or
finish its request."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import threading
import time

import grpc
import pytest

from conftest import BINARIES, stand_still, until
from demo.fleet import Daemon
from test_exhaustion import address_of, data_address
from weightwire import Subscriber
from weightwire.errors import WeightwireError
from weightwire.v1 import agent_pb2, communicator_pb2, communicator_pb2_grpc, coordinator_pb2 as pb, types_pb2

ORDERLY_SECONDS = 4.5  # of the 5 s after which its alarm ends it
MANY = 30
_HEADERS, _DATA, _SETTINGS = 1, 0, 4
_END_STREAM, _END_HEADERS = 1, 4


def connect(address: str | tuple[str, int]) -> socket.socket:
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    opened = socket.socket(family, socket.SOCK_STREAM)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # who never reads is soon not written to
    opened.settimeout(10)
    opened.connect(address)
    return opened


def said(address, words: bytes) -> socket.socket:
    opened = connect(address)
    opened.sendall(words)
    return opened


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """A header as HPACK has it without tables."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


def request(method: str, message: bytes = b"", whole: bool = True) -> bytes:
    """A gRPC call over HTTP/2 from its preface on; `whole`: its message is complete, and the stream half closed."""
    headers = b"".join(literal(name, value) for name, value in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", f"/weightwire.v1.{method}".encode()), (b":authority", b"hang"),
        (b"te", b"trailers"), (b"content-type", b"application/grpc")))
    body = b"\0" + struct.pack(">I", len(message) + (0 if whole else 100)) + message
    return (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(_SETTINGS, 0, 0, b"") + frame(_HEADERS, _END_HEADERS, 1, headers)
            + frame(_DATA, _END_STREAM if whole else 0, 1, body))


def open_stream(method: str, message: bytes | None = None) -> bytes:
    """The same of a stream that does not end, with a first message or none."""
    whole = request(method, message or b"")
    at = len(whole) - len(message or b"") - 5 - 9
    return whole[:at] if message is None else whole[:at + 4] + bytes([0]) + whole[at + 5:]


def attach_hello(rank: int) -> bytes:
    hello = agent_pb2.AttachHello(protocol=types_pb2.Protocol(min=1, max=1), role=types_pb2.GROUP_ROLE_ENGINE, group="hanging",
                                  rank=rank, world_size=MANY, incarnation=rank + 1, pid=os.getpid())
    return agent_pb2.AttachUp(hello=hello).SerializeToString()


HANGING = {
    "watches that nobody reads": lambda d: [
        said(address_of(d.grpc), request("Coordinator/Watch", pb.WatchRequest(min_interval_ms=1).SerializeToString()))
        for _ in range(MANY)],
    "sessions that say nothing": lambda d: [said(address_of(d.grpc), open_stream("Coordinator/Session")) for _ in range(MANY)],
    "half a request": lambda d: [said(address, request(method, b"half", whole=False)) for _ in range(MANY) for address, method in (
        (address_of(d.grpc), "Coordinator/Status"), (address_of(d.grpc), "Coordinator/Session"),
        (d.agent_socket, "Agent/Publish"))],
    "half a preface": lambda d: [said(address, b"PRI * HT") for _ in range(MANY) for address in (address_of(d.grpc), d.agent_socket)],
    "attachments that nobody reads": lambda d: [said(d.agent_socket, open_stream("Agent/Attach", attach_hello(i)))
                                                for i in range(MANY)],
    "HTTP": lambda d: [said(address_of(d.http), words) for _ in range(MANY) for words in (
        b"", b"GET /met", b"GET /metrics HTTP/1.1\r\nHost: hang\r\n\r\n" * 50, b"GET /status HTTP/1.1\r\nHost: hang\r\n\r\n")],
    "the data port": lambda d: [said(data_address(d), words) for _ in range(MANY) for words in (b"", b"WW", b"\0" * 95)],
    "the fd socket": lambda d: [said(f"{d.agent_socket}.fd", words) for _ in range(MANY) for words in (b"", b"1234567")],
}


@contextlib.contextmanager
def calls_that_wait(daemon: Daemon):
    """Unary calls that are answered when somebody else does something, and nobody does: members of a communicator."""
    def join(rank: int) -> None:
        with contextlib.suppress(grpc.RpcError):
            stub.JoinCommunicator(communicator_pb2.JoinCommunicatorRequest(
                member=communicator_pb2.CommunicatorMember(group="hanging", rank=rank, incarnation=rank + 1), size=MANY + 1,
                participant=f"hanging/{rank}", deadline_ms=60_000), timeout=60)
            ended.append(rank)
    ended: list[int] = []
    with grpc.insecure_channel(daemon.grpc) as channel:
        stub = communicator_pb2_grpc.CommunicatorsStub(channel)
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(MANY)]
        for thread in threads:
            thread.start()
        until("they wait", lambda: under_way(daemon, "JoinCommunicator") == MANY)
        yield
        for thread in threads:
            thread.join(20)
    assert not ended, "nobody waited"


def under_way(daemon: Daemon, method: str) -> float:
    """Calls that were begun and not answered."""
    count = dict.fromkeys(("started", "handled"), 0.0)
    for what, value in re.findall(rf'^weightwire_rpc_(started|handled)_total{{[^}}]*method="{method}"[^}}]*}} (\S+)$',
                                  daemon.metrics(), re.M):
        count[what] += float(value)
    return count["started"] - count["handled"]


def end(daemon: Daemon) -> None:
    """By SIGTERM: in order, and in time."""
    began = time.monotonic()
    code = daemon.stop()
    seconds = time.monotonic() - began
    log = open(daemon._log_path).read()
    assert code == 0 and seconds < ORDERLY_SECONDS and '"stopped"' in log, f"exit {code} after {seconds:.2f} s:\n{log[-2000:]}"
    print(f"{daemon.name}: {seconds:.2f} s")


@pytest.mark.parametrize("what", [*HANGING, "all of it"])
def test_sigterm_ends_in_order_with_calls_hanging(tmp_path, what):
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                    state_dir=str(tmp_path / "state"))
    hanging: list[socket.socket] = []
    try:
        with calls_that_wait(daemon) if what == "all of it" else contextlib.nullcontext():
            before = len(os.listdir(f"/proc/{daemon.pid}/fd"))
            for name in HANGING if what == "all of it" else [what]:
                hanging += HANGING[name](daemon)
            until("they are taken", lambda: len(os.listdir(f"/proc/{daemon.pid}/fd")) >= before + len(hanging) * 2 // 3)
            end(daemon)
    finally:
        daemon.kill()
        for one in hanging:
            one.close()


@contextlib.contextmanager
def stopped(*pids: int):
    for pid in pids:
        stand_still(pid)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def moving(coordinator_job):
    """A job in the middle of a version; its releases."""
    job = coordinator_job(lease_ms=60_000)
    job.attach_trainer(time.monotonic() + 60)
    releases = job.publish()
    job.until("bytes move", lambda: any(e.phase == types_pb2.EPOCH_PHASE_TRANSFERRING for e in job.status().epochs), 60)
    return job, releases


def end_of(job, which: Daemon) -> None:
    """`end`, and another one in its place, so that the job can be closed."""
    end(which)
    if which is job.coordinator:
        job.coordinator = job.start_coordinator(job.address)
    else:
        job.agents[job.agents.index(which)] = job.start_agent(which.name)


@pytest.mark.parametrize("of, silent", [("coordinator", "both agents"), ("agent", "coordinator"), ("agent", "other agent")])
def test_sigterm_ends_in_order_while_those_it_talks_to_stand_still(coordinator_job, of, silent):
    job, _ = moving(coordinator_job)
    ending = job.coordinator if of == "coordinator" else job.agents[0]
    still = {"both agents": job.agents, "coordinator": [job.coordinator], "other agent": job.agents[1:]}[silent]
    with stopped(*(daemon.pid for daemon in still)):
        callers = [threading.Thread(target=ignored, args=(call,)) for call in (
            lambda: job.publishers[0].publish(job.version + 1), lambda: job.publishers[1].publish(job.version + 1))]
        for caller in callers:
            caller.start()
        end_of(job, ending)
    for caller in callers:
        caller.join(60)
    job.until("the job goes on", lambda: [r.wait_released(60) for r in job.accept_next(time.monotonic() + 60)], 60)
    job.serve_everywhere()


def ignored(call) -> None:
    try:
        call()
    except WeightwireError as error:
        print(error)


def test_sigterm_ends_in_order_while_a_place_is_waited_for(coordinator_job):
    """Another process asks for the place of an engine whose agent was killed: it is answered when the lease has ended."""
    job = coordinator_job(lease_ms=60_000)
    job.agents[1].kill()
    asks = threading.Thread(target=ignored, args=(lambda: Subscriber(
        group="engine-1", rank=0, world_size=1, agent=job.agents[0].agent_socket, timeout=30).close(),))
    asks.start()
    until("it waits", lambda: under_way(job.coordinator, "Register") == 1)
    end_of(job, job.coordinator)
    job.agents[1] = job.start_agent("rollout")
    asks.join(60)
    assert not asks.is_alive()
