"""What Publisher.publish makes of an agent that does not answer: against a stand-in at the RPCs, which answers as it is told."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from weightwire.v1 import agent_pb2 as pb
from weightwire.v1 import agent_pb2_grpc

from weightwire import AbortedError, Publisher
from weightwire.aio import Publisher as AsyncPublisher
from weightwire.errors import DeadlineError, NotReadyError, WeightwireError

REVOKED, ACCEPTED, READ, RELEASED = (pb.WITHDRAWAL_REVOKED, pb.WITHDRAWAL_ACCEPTED, pb.WITHDRAWAL_READ, pb.WITHDRAWAL_RELEASED)


class Agent(agent_pb2_grpc.AgentServicer):
    """`silent`: RPCs that are not answered, by name. `withdrawal`: what is answered to WithdrawVersion."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.withdrawal = REVOKED
        self.refusal = ""
        self.old = False  # it knows no WithdrawVersion
        self.published: list[pb.PublishRequest] = []
        self.withdrawn: list[pb.WithdrawRequest] = []
        self.came = threading.Event()  # a Publish
        self._events: queue.SimpleQueue = queue.SimpleQueue()
        self._ended = threading.Event()

    def Attach(self, up, context):
        next(up)
        context.add_callback(lambda: self._events.put(None))
        yield pb.AttachEvent(attached=pb.AttachEvent.Attached(handle=7))
        yield from iter(self._events.get, None)

    def release(self, version: int, epoch: int = 3) -> None:
        self._events.put(pb.AttachEvent(released=pb.AttachEvent.Released(version=version, epoch=epoch)))

    def _answer(self, name: str, context) -> None:
        gone = threading.Event()
        if not context.add_callback(gone.set):
            gone.set()
        while name in self.silent and not gone.wait(0.02) and not self._ended.is_set():
            pass

    def Publish(self, request, context):
        self.published.append(request)
        self.came.set()
        self._answer("Publish", context)
        if self.refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refusal)
        return pb.PublishResponse()

    def WithdrawVersion(self, request, context):
        if self.old:
            return super().WithdrawVersion(request, context)
        self.withdrawn.append(request)
        if self.withdrawal == REVOKED:
            self.silent.discard("Publish")  # as the agent does: the call is answered, with a refusal
            self.refusal = "withdrawn"
        self._answer("WithdrawVersion", context)
        return pb.WithdrawResponse(withdrawal=self.withdrawal)

    def end(self) -> None:
        self._ended.set()
        self._events.put(None)


@pytest.fixture
def agent(tmp_path):
    server = grpc.server(ThreadPoolExecutor(16))
    service = Agent()
    service.socket = str(tmp_path / "agent.sock")
    agent_pb2_grpc.add_AgentServicer_to_server(service, server)
    server.add_insecure_port(f"unix:{service.socket}")
    server.start()
    yield service
    service.end()
    server.stop(None).wait()


def open_publisher(agent: Agent, kind=Publisher, timeout: float = 1.0):
    return kind(rank=0, world_size=1, agent=agent.socket, timeout=timeout)


def test_a_publish_that_times_out_is_withdrawn_and_may_be_repeated(agent):
    with open_publisher(agent) as publisher:
        agent.silent = {"Publish"}
        with pytest.raises(DeadlineError, match="it was withdrawn: no engine will serve it"):
            publisher.publish(5)
        assert [(w.version, w.number, w.if_accepted) for w in agent.withdrawn] == [(5, 1, False)]
        agent.refusal = ""
        release = publisher.publish(5)
        assert [p.number for p in agent.published] == [1, 2]
        agent.release(5)
        assert release.wait_released(30).epoch == 3


@pytest.mark.parametrize("found", [ACCEPTED, RELEASED])
def test_a_publish_that_was_accepted_all_the_same_returns_its_release(agent, found):
    with open_publisher(agent) as publisher:
        agent.silent, agent.withdrawal = {"Publish"}, found
        release = publisher.publish(5)
        agent.release(5)
        assert release.wait_released(30).epoch == 3


def test_the_arrays_are_in_doubt_until_the_agent_answers(agent):
    with open_publisher(agent) as publisher:
        agent.silent = {"Publish", "WithdrawVersion"}
        agent.withdrawal = ACCEPTED
        with pytest.raises(DeadlineError, match="the arrays must not change until"):
            publisher.publish(5)
        with pytest.raises(WeightwireError):
            publisher.publish(6)
        assert [p.version for p in agent.published] == [5], "version 6 waits for what becomes of 5"
        agent.silent, agent.withdrawal = set(), REVOKED
        agent.refusal = ""
        assert publisher.withdraw(5) == "revoked"
        agent.refusal = ""
        publisher.publish(6)
        assert [p.version for p in agent.published] == [5, 6]
        assert agent.withdrawn[-1].if_accepted


def test_a_repeat_in_doubt_gets_the_release_of_the_first_call(agent):
    with open_publisher(agent) as publisher:
        agent.silent, agent.withdrawal = {"Publish", "WithdrawVersion"}, ACCEPTED
        with pytest.raises(DeadlineError):
            publisher.publish(5)
        agent.silent = set()
        release = publisher.publish(5)
        agent.release(5)
        assert release.wait_released(30).epoch == 3


def test_a_release_that_came_while_it_was_in_doubt_is_not_lost(agent):
    with open_publisher(agent) as publisher:
        agent.silent, agent.withdrawal = {"Publish", "WithdrawVersion"}, ACCEPTED
        with pytest.raises(DeadlineError):
            publisher.publish(5)
        doubt = publisher._in_doubt
        agent.release(5)
        doubt.wait_released(30)
        assert publisher.publish(5) is doubt
        assert len(agent.published) == 1


def test_a_refused_repeat_leaves_the_first_release(agent):
    with open_publisher(agent) as publisher:
        first = publisher.publish(5)
        assert publisher.publish(5) is first
        agent.refusal = "published with another mode"
        with pytest.raises(NotReadyError):
            publisher.publish(5, manual_commit=True)
        agent.release(5)
        assert first.wait_released(30).epoch == 3


def test_a_revoked_release_says_so_and_the_next_one_is_another(agent):
    with open_publisher(agent) as publisher:
        first = publisher.publish(5)
        publisher.reclaim()
        with pytest.raises(AbortedError, match="withdrawn by its publisher"):
            first.wait_released(30)
        agent.refusal = ""
        second = publisher.publish(5)
        assert second is not first and not second.released


def test_an_interrupt_withdraws_what_nobody_will_wait_for(agent):
    with open_publisher(agent, timeout=60) as publisher:
        agent.silent = {"Publish"}
        threading.Thread(target=lambda: (agent.came.wait(30), os.kill(os.getpid(), signal.SIGINT))).start()
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(5)
        assert [(w.version, w.number, w.if_accepted) for w in agent.withdrawn] == [(5, 1, True)]


class Interrupts:
    """Raises KeyboardInterrupt on this thread, which is the main one, when a Condition's `with` has just taken its lock for the n-th
    time, as a signal's handler may. It counts those that nobody interrupts."""

    def __init__(self, at: int):
        self._at, self.passed = at, 0

    def _trace(self, frame, event, _):
        if event == "call":
            return self._trace if frame.f_code is threading.Condition.__enter__.__code__ else None
        if event == "return":
            self.passed += 1
            if self.passed == self._at:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self) -> Interrupts:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_) -> None:
        sys.settrace(self._before)


def test_an_interrupt_at_any_lock_leaves_none_taken(agent):
    """Wherever it comes in `publish` and `wait_released`, the agent's events still arrive, and the publisher closes."""
    agent.withdrawal = ACCEPTED
    version, at, interrupted = 1, 1, True
    with open_publisher(agent, timeout=30) as publisher:
        while interrupted:
            interrupted = False
            threading.Thread(target=lambda v=version: (agent.came.wait(30), agent.release(v))).start()
            with Interrupts(at) as interrupts:
                try:
                    publisher.publish(version).wait_released(30)
                except KeyboardInterrupt:
                    interrupted = True
            agent.came.clear()
            assert publisher.attached
            release = publisher.publish(version + 1)
            agent.release(version + 1)
            assert release.wait_released(30).epoch == 3, f"interrupted at lock {at}"
            agent.came.clear()
            version, at = version + 2, at + 1
    assert interrupts.passed < at - 1  # the last one met nothing to interrupt
    assert not publisher.attached


def test_a_channel_of_which_a_lock_is_taken_for_ever_keeps_nobody_from_closing(agent):
    held, done = threading.Event(), threading.Event()

    def hold(lock) -> None:
        with lock:
            held.set()
            done.wait(60)

    with open_publisher(agent, timeout=30) as publisher:
        holder = threading.Thread(target=hold, args=(publisher._session._stream._state.condition,))  # gRPC's
        holder.start()
        held.wait(30)
        started = time.monotonic()
    assert time.monotonic() - started < 10
    done.set()
    holder.join(30)


def test_a_cancelled_publish_is_withdrawn_before_it_raises(agent):
    async def main() -> None:
        async with open_publisher(agent, AsyncPublisher, timeout=60) as publisher:
            agent.silent = {"Publish"}
            call = asyncio.ensure_future(publisher.publish(5))
            await asyncio.to_thread(agent.came.wait, 30)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert [(w.version, w.if_accepted) for w in agent.withdrawn] == [(5, True)]
            agent.refusal = ""
            release = await publisher.publish(5)
            agent.release(5)
            assert (await publisher.released(release, 30)).epoch == 3
    asyncio.run(main())


def test_an_agent_that_knows_no_withdrawal_is_asked_once(agent):
    agent.old = True
    with open_publisher(agent) as publisher:
        agent.silent = {"Publish"}
        with pytest.raises(DeadlineError, match="nor did the agent confirm .*UNIMPLEMENTED"):
            publisher.publish(5)
        agent.silent = set()
        publisher.publish(6)
