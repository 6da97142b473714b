"""The same for asyncio: a client of the coordinator, and thin twins of Publisher and Subscriber."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any, AsyncIterator, Callable, Generic, Mapping, Sequence, TypeVar

import grpc
import numpy as np

from weightwire import errors
from weightwire import publisher as _publisher
from weightwire import subscriber as _subscriber
from weightwire.client import (RETRY_SECONDS, WATCH_INTERVAL_MS, channel_options, default_coordinator,
                               explain_unreachable, watch_request)
from weightwire.device import DeviceArray
from weightwire.memory import TensorMeta
from weightwire.status import EpochStatus, Event, JobStatus, RolledBack, StatusPages, Verification, changes
from weightwire.tls import Channels, Tls
from weightwire.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from weightwire.waiting import EpochWait, Found, ProgressCallback, ServedWait, StagedWait, VersionWait

Opened_ = TypeVar("Opened_", bound="_publisher.Publisher | _subscriber.Subscriber")
Found_ = TypeVar("Found_", bound="_subscriber.Offer | _subscriber.RoomWanted")


class Client:
    """As weightwire.Client; to be made and used in one event loop."""

    def __init__(self, address: str | None = None, *, timeout: float = 10.0, tls: Tls | None = None):
        self.address = address or default_coordinator()
        self.timeout = timeout
        self._channels: Channels[grpc.aio.Channel] = Channels(grpc.aio, self.address, channel_options(),
                                                              tls or Tls.from_environment())

    @property
    def _stub(self) -> Any:
        return coordinator_pb2_grpc.CoordinatorStub(self._channels.newest())

    async def _call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=self.timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise explain_unreachable(errors.from_rpc_error(error), self.address) from None

    async def status(self, *, epochs: int | None = None, participants: bool = True) -> JobStatus:
        pages = StatusPages(epochs, participants)
        while (status := pages.feed(await self._call("Status", pages.request))) is None:
            pass
        return status

    async def explain(self, engine: str = "", tensor: str = "") -> str:
        reply = await self._call("ExplainPlan", coordinator_pb2.ExplainPlanRequest(engine=engine, tensor=tensor))
        return str(reply.text)

    async def commit(self, epoch: int) -> None:
        await self._call("Commit", coordinator_pb2.CommitRequest(epoch=epoch))

    async def abort(self, epoch: int, why: str = "asked for by a client") -> None:
        await self._call("Abort", coordinator_pb2.AbortRequest(epoch=epoch, why=why))

    async def rollback(self, version: int, timeout: float = 60.0) -> RolledBack:
        reply = await self._call("Rollback", coordinator_pb2.RollbackRequest(version=version), timeout)
        return RolledBack.from_proto(reply)

    async def verify(self, engine: str = "", timeout: float = 60.0) -> Verification:
        request = coordinator_pb2.VerifyRequest(engine=engine, deadline_ms=max(1, int(timeout * 900)))
        return Verification.from_proto(await self._call("Verify", request, timeout))

    async def drain(self, name: str, *, undo: bool = False) -> tuple[str, ...]:
        reply = await self._call("Drain", coordinator_pb2.DrainRequest(name=name, undo=undo))
        return tuple(reply.engines)

    async def evict(self, group: str, why: str = "asked for by a client") -> None:
        await self._call("Evict", coordinator_pb2.EvictRequest(group=group, why=why))

    async def watch(self, timeout: float, *, interval: float = WATCH_INTERVAL_MS / 1000,
                    participants: bool = True) -> AsyncIterator[JobStatus]:
        call = self._stub.Watch(watch_request(interval, participants), timeout=timeout)
        try:
            async for reply in call:
                yield JobStatus.from_proto(reply)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise explain_unreachable(errors.from_rpc_error(error), self.address) from None
        finally:
            call.cancel()

    async def events(self, timeout: float) -> AsyncIterator[Event]:
        before = None
        async for status in self.watch(timeout):
            for event in changes(before, status):
                yield event
            before = status

    async def wait_version(self, version: int, timeout: float, *, engines: Sequence[str] = (),
                           on_progress: ProgressCallback | None = None, lineage: int | None = None) -> JobStatus:
        return await self._wait(ServedWait(version, engines, on_progress, lineage), timeout, "served")

    async def wait_epoch(self, result: RolledBack, timeout: float) -> JobStatus:
        return await self._wait(EpochWait(result.epoch, result.version), timeout, f"served as epoch {result.epoch}")

    async def wait_staged(self, version: int, timeout: float, *,
                          on_progress: ProgressCallback | None = None) -> EpochStatus:
        return await self._wait(StagedWait(version, on_progress), timeout, "staged")

    async def _wait(self, wait: VersionWait[Found], timeout: float, what: str) -> Found:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            statuses = self.watch(left)
            heard = False
            try:
                async for status in statuses:
                    heard = True
                    found = wait.feed(status)
                    if found is not None:
                        return found
            except errors.UnavailableError as error:
                wait.lost(error)
            except errors.RefusedError:  # as in Client._wait
                if not heard:
                    raise
            finally:
                await statuses.aclose()  # type: ignore[attr-defined]
            await asyncio.sleep(min(RETRY_SECONDS, max(0.0, end - time.monotonic())))
        raise wait.deadline(what, timeout)

    async def close(self) -> None:
        for channel in self._channels.opened:
            await channel.close(None)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Publisher:
    """weightwire.Publisher on the event loop. `await Publisher.open(rank=…, world_size=…)`, or `async with`."""

    def __init__(self, **place: Any):
        self._place = place
        self.sync: _publisher.Publisher | None = None  #: the publisher behind it, once open

    async def open(self) -> "Publisher":
        self.sync = await _open(lambda: _publisher.Publisher(**self._place))
        return self

    def _opened(self) -> _publisher.Publisher:
        if self.sync is None:
            raise errors.NotReadyError("not open; use `async with` or `await publisher.open()`",
                                       code="FAILED_PRECONDITION", reason="not_ready")
        return self.sync

    async def bind(self, config: Mapping[str, Any] | str, spec: str,
                   tensors: Sequence[TensorMeta]) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        return await asyncio.to_thread(self._opened().bind, config, spec, tensors)

    async def publish(self, version: int, **options: Any) -> _publisher.Release:
        """Accepted when it returns; `await released(release, timeout)` before the parameters change. A publish that is
        cancelled withdraws the version before it raises."""
        publisher = self._opened()
        call = asyncio.ensure_future(asyncio.to_thread(lambda: publisher.publish(version, **options)))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.shield(_take_back(publisher, version, call))
            raise

    async def withdraw(self, version: int, timeout: float | None = None) -> _publisher.Withdrawal:
        return await asyncio.to_thread(self._opened().withdraw, version, timeout)

    async def released(self, release: _publisher.Release, timeout: float,
                       on_progress: ProgressCallback | None = None) -> _publisher.Release:
        return await asyncio.to_thread(release.wait_released, timeout, on_progress)

    async def close(self) -> None:
        if self.sync is not None:
            await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> "Publisher":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Subscriber:
    """weightwire.Subscriber on the event loop; its offers are awaited. `flip` needs no await."""

    def __init__(self, **place: Any):
        self._place = place
        self.sync: _subscriber.Subscriber | None = None  #: the subscriber behind it, once open

    async def open(self) -> "Subscriber":
        return await self._open_by(lambda make: make())

    async def _open_by(self, by: Callable[[Callable[..., _subscriber.Subscriber]], _subscriber.Subscriber]) -> "Subscriber":
        """`by`: makes it, on a thread, by a function that takes further arguments of weightwire.Subscriber."""
        loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()

        def make(**more: Any) -> _subscriber.Subscriber:
            return _subscriber.Subscriber(**{**self._place, **more}, on_offer=lambda: _wake(loop, self._arrived))

        self.sync = await _open(lambda: by(make))
        return self

    def _opened(self) -> _subscriber.Subscriber:
        if self.sync is None:
            raise errors.NotReadyError("not open; use `async with` or `await subscriber.open()`",
                                       code="FAILED_PRECONDITION", reason="not_ready")
        return self.sync

    async def bind(self, config: Mapping[str, Any] | str, spec: str, tensors: Sequence[TensorMeta],
                   trace: Sequence[Mapping[str, Any]] | None = None,
                   checkpoint: Sequence[TensorMeta] = ()) -> list[str]:
        return await asyncio.to_thread(self._opened().bind, config, spec, tensors, trace, checkpoint)

    async def bind_submission(self, layout: types_pb2.LayoutSubmission) -> list[str]:
        return await asyncio.to_thread(self._opened().bind_submission, layout)

    async def wait_offer(self, timeout: float) -> _subscriber.Offer | None:
        """The next committed version; None after `timeout` seconds. An offer is not lost by a cancelled wait."""
        return await self._wait(self._opened().wait_offer, timeout)

    async def wait_event(self, timeout: float) -> _subscriber.Offer | _subscriber.RoomWanted | None:
        """As wait_offer, for a subscriber with one buffer."""
        return await self._wait(self._opened().wait_event, timeout)

    async def _wait(self, look: Callable[[float], Found_ | None], timeout: float) -> Found_ | None:
        end = time.monotonic() + timeout
        while True:
            self._arrived.clear()
            event = look(0)
            if event is not None:
                return event
            try:
                await asyncio.wait_for(self._arrived.wait(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                return None

    @property
    def serving(self) -> _subscriber.Offer | None:
        """The offer that was flipped to last; None before, and from a fence on."""
        return self._opened().serving

    def flip(self, offer: _subscriber.Offer) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        return self._opened().flip(offer)

    async def make_room(self, wanted: _subscriber.RoomWanted) -> None:
        await asyncio.to_thread(self._opened().make_room, wanted)

    async def acknowledge(self, offer: _subscriber.Offer, flip_seconds: float = 0.0) -> None:
        await asyncio.to_thread(self._opened().acknowledge, offer, flip_seconds)

    async def refuse(self, offer: _subscriber.Offer, why: str) -> None:
        await asyncio.to_thread(self._opened().refuse, offer, why)

    async def fail(self, offer: _subscriber.Offer, why: str) -> None:
        await asyncio.to_thread(self._opened().fail, offer, why)

    async def close(self) -> None:
        if self.sync is not None:
            await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> "Subscriber":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _Opening(Generic[Opened_]):
    """What is being opened, on a thread that does not end when nobody waits for it any more."""

    def __init__(self, make: Callable[[], Opened_]):
        self._make, self._lock = make, threading.Lock()
        self._made: Opened_ | None = None
        self._given_up = False

    def run(self) -> Opened_:
        made = self._make()
        with self._lock:
            self._made, given_up = made, self._given_up
        if given_up:
            made.close()
        return made

    def give_up(self) -> None:
        """It is closed as soon as it is there: a rank that nobody holds keeps its place, and an engine keeps versions waiting."""
        with self._lock:
            self._given_up, made = True, self._made
        if made is not None:
            threading.Thread(target=made.close, name="weightwire-close", daemon=True).start()


async def _open(make: Callable[[], Opened_]) -> Opened_:
    """What `make` makes, on a thread; nothing is left of it when this is cancelled."""
    opening = _Opening(make)
    try:
        return await asyncio.to_thread(opening.run)
    except asyncio.CancelledError:
        opening.give_up()
        raise


async def _take_back(publisher: _publisher.Publisher, version: int,
                     call: asyncio.Future[_publisher.Release]) -> None:
    """Ends a call that nobody waits for, and the version with it."""
    with contextlib.suppress(errors.WeightwireError):
        await asyncio.to_thread(publisher.withdraw, version)  # which answers the call
    try:
        release = await call
    except errors.WeightwireError:
        return
    await asyncio.to_thread(publisher._interrupted, release)  # it began, or was accepted, after that


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    try:
        loop.call_soon_threadsafe(event.set)
    except RuntimeError:  # the loop is closed: nobody waits any more
        pass
