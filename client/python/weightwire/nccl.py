"""Collective: NCCL in this process, for fixed groups that want it. The data plane does not need it.

>>> with weightwire.Client() as client:
...     collective = weightwire.nccl.Collective(client, "class-a", rank, size)
...     collective.broadcast(buffer, root=0)            # anything with a buffer, or (address, bytes)
...     collective.exchange(sends=[(1, mine)], receives=[(1, theirs)])
...     collective.close()

Members meet at the coordinator, which gives each communicator an epoch; a member that loses anything reports it and
asks for the next one with `form`. On a GPU the memory is (tensor.data_ptr(), bytes), `stream` a cudaStream_t, and the
thread's current CUDA device is `device`. Untested on hardware: docs/nccl.md.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import time
from typing import Any, Sequence, Tuple, Union

import grpc

from weightwire import binaries, errors
from weightwire.client import Client, explain_unreachable
from weightwire.nccl_library import HANDLE, STATES, UNIQUE_ID_BYTES, Library, Options, Piece
from weightwire.v1 import communicator_pb2 as pb
from weightwire.v1 import communicator_pb2_grpc

CALL_SECONDS_MORE = 5.0  #: for the answer to a call that the coordinator itself ends at its deadline

#: Memory with a writable buffer (numpy, bytearray, memoryview), or its address and size.
Memory = Union[Tuple[int, int], Any]


def _span(memory: Memory) -> tuple[int, int]:
    """Address and bytes. The caller keeps the memory until the operation has ended."""
    if isinstance(memory, tuple):
        return memory
    view = memoryview(memory).cast("B")
    return ctypes.addressof(ctypes.c_char.from_buffer(view)), view.nbytes


def _pieces(parts: Sequence[tuple[int, Memory]]) -> Any:
    return (Piece * len(parts))(*(Piece(*_span(memory), peer) for peer, memory in parts))


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


class Collective:
    """One member of a group. It forms its first communicator at once.

    client:       a Client of the job's coordinator; it outlives the Collective
    group:        any name that exactly these members use, e.g. of a layout class
    timeout:      seconds that forming and each operation may take when they say nothing else
    library, nccl_library, cuda_library: files; WEIGHTWIRE_NCCL, WEIGHTWIRE_NCCL_LIBRARY, WEIGHTWIRE_CUDA_LIBRARY or
                  the loader's search when not given; `library` is looked for in the package and the build before

    An operation returns when its bytes are there, or raises when it has failed and the communicator was aborted: no
    memory is touched any more, the coordinator was told, and `form` goes on in the next epoch. After an error whose
    remedy is "end this process" (state "stuck") memory must stay. One call at a time, except for `abort`.
    """

    def __init__(self, client: Client, group: str, rank: int, size: int, *, participant: str = "", device: int = 0,
                 timeout: float = 60.0, library: str | None = None, nccl_library: str | None = None,
                 cuda_library: str | None = None, release_grace: float = 10.0):
        self.group, self.rank, self.size, self.timeout = group, rank, size, timeout
        self.participant = participant or f"pid {os.getpid()} on {socket.gethostname()}"[:128]
        self._client = client
        self._member = pb.CommunicatorMember(group=group, rank=rank, incarnation=secrets.randbits(63) + 1)
        self._epoch = 0
        self._handle = HANDLE()
        self._library = Library(library or os.environ.get("WEIGHTWIRE_NCCL") or binaries.library("libweightwire_nccl.so"))
        names = [os.fsencode(name) if name else None for name in (
            nccl_library or os.environ.get("WEIGHTWIRE_NCCL_LIBRARY"),
            cuda_library or os.environ.get("WEIGHTWIRE_CUDA_LIBRARY"))]
        self._library.call("open", ctypes.byref(Options(*names, device, _milliseconds(release_grace))),
                           ctypes.byref(self._handle))
        try:
            self.form()
        except BaseException:
            self._free()
            raise

    @property
    def epoch(self) -> int:
        """The newest communicator epoch that this member has been in; 0: none."""
        return self._epoch

    @property
    def state(self) -> str:
        return STATES[self._library.get("state", self._handle)] if self._handle else "closed"

    def form(self, timeout: float | None = None) -> None:
        """Meets the other members and forms the next communicator. To be called by every member after a loss."""
        self._check_open()
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        self.abort("forming anew")
        joined = self._ask("JoinCommunicator", end, size=self.size, participant=self.participant,
                           last_epoch=self._epoch)
        self._epoch = joined.epoch
        unique_id = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
        with self._reported("forming"):
            if self.rank == 0:
                self._library.call("unique_id", self._handle, unique_id)
                self._tell("OfferUniqueId", epoch=self._epoch, unique_id=unique_id.raw)
            else:
                unique_id.raw = self._ask("AwaitUniqueId", end, epoch=self._epoch).unique_id
            self._library.call("form", self._handle, unique_id, self.rank, self.size, self._epoch,
                               _milliseconds(end - time.monotonic()))

    def broadcast(self, memory: Memory, root: int, *, stream: int = 0, timeout: float | None = None) -> None:
        """The root's bytes to every member's `memory`, which has the same size everywhere."""
        self._check_open()
        address, size = _span(memory)
        with self._reported("broadcast"):
            self._library.call("broadcast", self._handle, address, size, root, stream, self._deadline(timeout))

    def exchange(self, sends: Sequence[tuple[int, Memory]], receives: Sequence[tuple[int, Memory]], *,
                 stream: int = 0, timeout: float | None = None) -> None:
        """(peer, memory) pairs, all at once; each send meets the peer's receive of the same size, in order."""
        self._check_open()
        with self._reported("exchange"):
            self._library.call("exchange", self._handle, _pieces(sends), len(sends), _pieces(receives),
                               len(receives), stream, self._deadline(timeout))

    def abort(self, why: str = "asked for by the application") -> None:
        """From any thread: what runs ends with AbortedError; a ready communicator is given back."""
        self._check_open()
        self._library.call("abort", self._handle, why.encode())

    def close(self, timeout: float = 10.0) -> None:
        """Flushes, gives everything back, and ends the epoch for the group. Idempotent."""
        if not self._handle:
            return
        try:
            self._library.call("close", self._handle, _milliseconds(timeout))
        finally:
            if self.state == "closed":  # not while another thread runs an operation
                self._end("closed")
                self._free()

    def __enter__(self) -> "Collective":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deadline(self, timeout: float | None) -> int:
        return _milliseconds(self.timeout if timeout is None else timeout)

    def _check_open(self) -> None:
        if not self._handle:
            raise errors.NotReadyError("the collective is closed", code="FAILED_PRECONDITION", reason="not_ready",
                                       remedy="open a new one")

    def _free(self) -> None:
        self._library.get("free", self._handle)
        self._handle = HANDLE()

    def _reported(self, what: str) -> "_Reported":
        return _Reported(self, what)

    def _end(self, why: str) -> None:
        """Best effort: a coordinator that does not hear of it learns from this member's next join."""
        if self._epoch:
            try:
                self._tell("EndCommunicator", epoch=self._epoch, why=why[:1024])
            except errors.WeightwireError:
                pass

    def _tell(self, method: str, **fields: Any) -> Any:
        return self._rpc(method, self._client.timeout, fields)

    def _ask(self, method: str, end: float, **fields: Any) -> Any:
        left = max(0.001, end - time.monotonic())
        return self._rpc(method, left + CALL_SECONDS_MORE, {**fields, "deadline_ms": _milliseconds(left)})

    def _rpc(self, method: str, timeout: float, fields: dict[str, Any]) -> Any:
        try:
            stub = communicator_pb2_grpc.CommunicatorsStub(self._client.channel())
            return getattr(stub, method)(getattr(pb, method + "Request")(member=self._member, **fields), timeout=timeout)
        except grpc.RpcError as error:
            raise explain_unreachable(errors.from_rpc_error(error), self._client.address) from None


class _Reported:
    """Reports a failure that took the communicator away, so that the group's epoch ends for everybody."""

    def __init__(self, collective: Collective, what: str):
        self._collective, self._what = collective, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None and self._collective.state not in ("ready", "running"):
            self._collective._end(f"{self._what}: {error}")
