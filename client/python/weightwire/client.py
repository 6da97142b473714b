"""The control plane of a running weightwired, for programs: what `wwctl` is for people."""

from __future__ import annotations

import os
import time
from typing import Any, Iterator, Sequence

import grpc

from weightwire import errors
from weightwire.status import (EpochStatus, Event, JobStatus, RolledBack, StatusPages, Verification, changes,
                               status_request)
from weightwire.tls import Channels, Tls
from weightwire.v1 import coordinator_pb2, coordinator_pb2_grpc
from weightwire.waiting import EpochWait, Found, ProgressCallback, ServedWait, StagedWait, VersionWait

MESSAGE_BYTES_MAX = 64 << 20
WATCH_INTERVAL_MS = 100
RETRY_SECONDS = 0.2


def default_coordinator() -> str:
    """WEIGHTWIRE_ADDRESS, or where `weightwired` listens by default."""
    return os.environ.get("WEIGHTWIRE_ADDRESS", "127.0.0.1:7411")


def channel_options() -> list[tuple[str, Any]]:
    # Retries are ours, so that every call ends within its deadline and with our own error.
    return [("grpc.max_receive_message_length", MESSAGE_BYTES_MAX), ("grpc.enable_retries", 0),
            ("grpc.max_reconnect_backoff_ms", 1000)]


def watch_request(interval: float, participants: bool) -> Any:
    return coordinator_pb2.WatchRequest(min_interval_ms=max(1, int(interval * 1000)),
                                        status=status_request(participants=participants))


def explain_unreachable(error: errors.WeightwireError, address: str) -> errors.WeightwireError:
    if isinstance(error, errors.UnavailableError) and not error.remedy:
        error.remedy = f"is weightwired running, is {address} its address, and are certificates given if it speaks TLS?"
    return error


class Client:
    """One coordinator. Safe for use from several threads.

    >>> with weightwire.Client("127.0.0.1:7411") as client:
    ...     client.wait_version(7, timeout=60)          # every complete engine serves it
    ...     print(client.status().waiting_for)

    Every call ends within `timeout` seconds (or its own) and raises errors.WeightwireError. `tls`: the certificates of a
    coordinator with TLS; else those of the environment (Tls.from_environment), else plaintext.
    """

    def __init__(self, address: str | None = None, *, timeout: float = 10.0, tls: Tls | None = None):
        self.address = address or default_coordinator()
        self.timeout = timeout
        self._channels: Channels[grpc.Channel] = Channels(grpc, self.address, channel_options(),
                                                          tls or Tls.from_environment())

    def channel(self) -> grpc.Channel:
        """To its coordinator, for stubs of one's own; ask again for each call, or one that is open for hours misses a
        change of certificates."""
        return self._channels.newest()

    @property
    def _stub(self) -> Any:
        return coordinator_pb2_grpc.CoordinatorStub(self.channel())

    def _call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        try:
            return getattr(self._stub, method)(request, timeout=self.timeout if timeout is None else timeout)
        except grpc.RpcError as error:
            raise explain_unreachable(errors.from_rpc_error(error), self.address) from None

    def status(self, *, epochs: int | None = None, participants: bool = True) -> JobStatus:
        """The job now. `epochs`: only the newest so many; None: all that the coordinator remembers. Without `participants` it
        is much less where there are thousands of ranks."""
        pages = StatusPages(epochs, participants)
        while (status := pages.feed(self._call("Status", pages.request))) is None:
            pass
        return status

    def explain(self, engine: str = "", tensor: str = "") -> str:
        """Who sends what to whom in the newest epoch, as text; `tensor` by its Hugging Face name.
        RefusedError: no such engine or tensor, or no plan yet."""
        reply = self._call("ExplainPlan", coordinator_pb2.ExplainPlanRequest(engine=engine, tensor=tensor))
        return str(reply.text)

    def commit(self, epoch: int) -> None:
        """Commits a staged epoch of a version published with manual_commit.
        StaleError: not staged, or decided already."""
        self._call("Commit", coordinator_pb2.CommitRequest(epoch=epoch))

    def abort(self, epoch: int, why: str = "asked for by a client") -> None:
        """Aborts an epoch that is not decided. StaleError: decided already; RefusedError: not in progress."""
        self._call("Abort", coordinator_pb2.AbortRequest(epoch=epoch, why=why))

    def rollback(self, version: int, timeout: float = 60.0) -> RolledBack:
        """Goes back to `version` under a new, higher epoch: engines that still hold it beside the one that they serve
        change pointers and serve it when this returns; the others are filled from them (`wait_epoch`).

        StaleError: nobody holds it any more, with what each engine holds and what to do. NotReadyError: an epoch, or
        another rollback, is in progress. A trainer goes on above the numbers that it has used; one that starts anew
        may use those that were taken back."""
        return RolledBack.from_proto(self._call("Rollback", coordinator_pb2.RollbackRequest(version=version), timeout))

    def verify(self, engine: str = "", timeout: float = 60.0) -> Verification:
        """Every engine (or this one) sums what it serves, in each rank, and sums are compared among replicas, engines
        and with what was found before for the same epoch. Differences are part of the answer; an engine whose bytes
        begin to be overwritten meanwhile is `superseded`. NotReadyError: nothing is served yet, or another
        verification is in progress."""
        request = coordinator_pb2.VerifyRequest(engine=engine, deadline_ms=max(1, int(timeout * 900)))
        return Verification.from_proto(self._call("Verify", request, timeout))

    def drain(self, name: str, *, undo: bool = False) -> tuple[str, ...]:
        """Lets an engine, or every engine of an agent, finish what it does and take no part in new versions; `undo` takes
        that back. Returns the engines. One may be stopped once `EngineStatus.busy_with` is empty."""
        return tuple(self._call("Drain", coordinator_pb2.DrainRequest(name=name, undo=undo)).engines)

    def evict(self, group: str, why: str = "asked for by a client") -> None:
        """Fences a group; its processes must register again."""
        self._call("Evict", coordinator_pb2.EvictRequest(group=group, why=why))

    def watch(self, timeout: float, *, interval: float = WATCH_INTERVAL_MS / 1000,
              participants: bool = True) -> Iterator[JobStatus]:
        """The status now and after each change, at most every `interval` seconds; ends after `timeout`."""
        call = self._stub.Watch(watch_request(interval, participants), timeout=timeout)
        try:
            for reply in call:
                yield JobStatus.from_proto(reply)
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise explain_unreachable(errors.from_rpc_error(error), self.address) from None
        finally:
            call.cancel()

    def events(self, timeout: float) -> Iterator[Event]:
        """What changes in the job, first what is there now; ends after `timeout` seconds."""
        before = None
        for status in self.watch(timeout):
            yield from changes(before, status)
            before = status

    def wait_version(self, version: int, timeout: float, *, engines: Sequence[str] = (),
                     on_progress: ProgressCallback | None = None, lineage: int | None = None) -> JobStatus:
        """Blocks until `engines` (or every complete engine, at least one) serve `version` or a newer one of its lineage.
        Survives a restart of the coordinator. DeadlineError says what everyone waits for.

        `lineage`: `Publisher.lineage` of who publishes it. None: the newest that the coordinator knows, which is another
        one as soon as a trainer that went back to an earlier step has published. StaleError: the lineage has ended."""
        return self._wait(ServedWait(version, engines, on_progress, lineage), timeout, "served")

    def wait_epoch(self, result: RolledBack, timeout: float) -> JobStatus:
        """Blocks until every complete engine serves what `rollback` committed, or something newer."""
        return self._wait(EpochWait(result.epoch, result.version), timeout, f"served as epoch {result.epoch}")

    def wait_staged(self, version: int, timeout: float, *,
                    on_progress: ProgressCallback | None = None) -> EpochStatus:
        """Blocks until `version`, published with manual_commit, is staged: its epoch goes to `commit`.
        StaleError: the version is decided already."""
        return self._wait(StagedWait(version, on_progress), timeout, "staged")

    def _wait(self, wait: VersionWait[Found], timeout: float, what: str) -> Found:
        end = time.monotonic() + timeout
        while (left := end - time.monotonic()) > 0:
            heard = False
            try:
                for status in self.watch(left):
                    heard = True
                    found = wait.feed(status)
                    if found is not None:
                        return found
            except errors.UnavailableError as error:
                wait.lost(error)
            except errors.RefusedError:
                if not heard:  # else the token ended that it was begun with: its file may hold the next one
                    raise
            time.sleep(min(RETRY_SECONDS, max(0.0, end - time.monotonic())))
        raise wait.deadline(what, timeout)

    def close(self) -> None:
        for channel in self._channels.opened:
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
