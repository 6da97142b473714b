"""The attachment of one process to its agent: channel, event stream, fd socket."""

from __future__ import annotations

import contextlib
import logging
import os
import pathlib
import queue
import secrets
import socket
import stat
import struct
import threading
from typing import Any, Callable, Sequence

import grpc

from weightwire import errors
from weightwire.interrupts import Flag, apart
from weightwire.memory import TensorMeta
from weightwire.v1 import agent_pb2, agent_pb2_grpc, types_pb2

log = logging.getLogger("weightwire")
PROTOCOL_MIN = 1
PROTOCOL_MAX = 1
_LEAVE_SECONDS = 2.0
_FD_MAGIC = 0x44465757  # "WWFD"
_FD_PUT, _FD_GET = 1, 2
_FD_FRAME = struct.Struct("<IIQ")


def default_agent_socket() -> str:
    """WEIGHTWIRE_AGENT_SOCKET, or the path that `weightwired` uses by default for this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "/tmp")
    return os.environ.get("WEIGHTWIRE_AGENT_SOCKET", f"{runtime}/weightwire-{os.getuid()}/agent.sock")


def scheme_layout(config_json: str, spec: str, observed: Sequence[TensorMeta]) -> types_pb2.LayoutSubmission:
    """What a rank submits that holds these tensors by a scheme, "megatron:tp2,pp2"."""
    return types_pb2.LayoutSubmission(scheme=types_pb2.LayoutSubmission.Scheme(
        config_json=config_json, topology=types_pb2.ParallelTopology(spec=spec), observed=[meta.to_proto() for meta in observed]))


def _fd_call(path: str, op: int, token: int, fd: int | None, timeout: float) -> tuple[int, int | None]:
    """One exchange on the fd socket; returns (token, fd or None)."""
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(timeout)
            s.connect(path)
            frame = _FD_FRAME.pack(_FD_MAGIC, op, token)
            if fd is None:
                s.sendall(frame)
            else:
                socket.send_fds(s, [frame], [fd])
            data, fds, _, _ = socket.recv_fds(s, _FD_FRAME.size, 1)
            while 0 < len(data) < _FD_FRAME.size:
                more = s.recv(_FD_FRAME.size - len(data))
                if not more:
                    break
                data += more
        if len(data) != _FD_FRAME.size:
            raise errors.UnavailableError(f"fd socket {path}: the agent closed it", code="UNAVAILABLE",
                                          reason="io_error")
        magic, code, answer = _FD_FRAME.unpack(data)
        if magic != _FD_MAGIC or code != 0:
            raise errors.make_error("INVALID_ARGUMENT", "the agent refused a file descriptor",
                                    types_pb2.ErrorDetail(reason=code))
        return answer, (fds.pop() if fds else None)
    except OSError as error:
        raise errors.UnavailableError(f"fd socket {path}: {error}", code="UNAVAILABLE",
                                      reason="io_error") from error
    finally:
        for unclaimed in fds:
            os.close(unclaimed)


def uid_refusal(path: str, rank: str) -> errors.RefusedError | None:
    """Why a process of this user cannot use the agent's socket at `path`, when users are the reason."""
    uid = os.geteuid()

    def refused(why: str) -> errors.RefusedError:
        return errors.RefusedError(f"{why}; this process has uid {uid}", code="PERMISSION_DENIED", reason="permission_denied", rank=rank,
                                   remedy="run both as the same user (runAsUser), or name "
                                          f"uid {uid} in the agent's allow_uids")

    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.settimeout(1)
        try:
            s.connect(path)
        except PermissionError:
            full = pathlib.Path(path).absolute()
            for at in (*reversed(full.parents), full):
                info = at.stat()
                if not os.access(at, os.X_OK if stat.S_ISDIR(info.st_mode) else os.W_OK, effective_ids=True):
                    return refused(f"{at} belongs to uid {info.st_uid}, which lets nobody else reach the agent")
            return None
        agent = struct.unpack("iII", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        # An agent that takes the connection speaks first (HTTP/2); one that refuses it closes at once.
        if agent != uid and not s.recv(1):
            return refused(f"its agent has uid {agent} and refuses other users")
    return None


class Session:
    """One incarnation of one rank, attached when `open` returns.

    `on_event(AttachEvent)` runs on the session's reader thread, in order; `on_end(error)` runs there
    once, last. Calls raise errors.WeightwireError and never take longer than `timeout` seconds.
    """

    def __init__(self, *, agent: str, role: int, group: str, rank: int, world_size: int, job: str,
                 timeout: float, buffers: int = 0, device: str = "", delta: int = 0, previous: int = 0, checks_copies: bool = False, on_event: Callable[[agent_pb2.AttachEvent], None],
                 on_end: Callable[[errors.WeightwireError], None]):
        self.timeout = timeout
        self.rank_name = f"{group}/{rank}"
        self.trace_id = secrets.token_bytes(16)
        self.incarnation = secrets.randbits(64) | 1
        self._socket = agent.removeprefix("unix:")
        with errors.refusing(rank=self.rank_name):
            hello = agent_pb2.AttachHello(
                protocol=types_pb2.Protocol(min=PROTOCOL_MIN, max=PROTOCOL_MAX),
                job=job, role=role, group=group, rank=rank, world_size=world_size, buffers=buffers, device=device,
                delta=delta, incarnation=self.incarnation, previous=previous, pid=os.getpid(), trace_id=self.trace_id,
                checks_copies=checks_copies)
        self._channel = grpc.insecure_channel(f"unix:{self._socket}", options=[
            ("grpc.max_receive_message_length", 64 << 20),
            ("grpc.max_send_message_length", 64 << 20),
        ])
        self._stub = agent_pb2_grpc.AgentStub(self._channel)
        self._up: queue.SimpleQueue[agent_pb2.AttachUp | None] = queue.SimpleQueue()
        self._on_event, self._on_end = on_event, on_end
        self._attached = Flag()
        self._failure: errors.WeightwireError | None = None
        self._closed = False
        self.handle = 0
        #: The newest lineage that was committed when it attached, and of that the version up to which nothing is accepted
        #: any more; 0: the agent or the coordinator is of a version that knows no lineages.
        self.lineage = self.floor = 0
        #: UUID of the GPU where the agent puts this rank's memory; "": in host memory.
        self.device = ""
        #: Why it is not the GPU that was asked for; None when it is, or none was.
        self.device_refused: errors.WeightwireError | None = None
        self._left: errors.WeightwireError | None = None
        self._up.put(agent_pb2.AttachUp(hello=hello))
        try:
            self._stream = self._stub.Attach(iter(self._up.get, None))
            self._reader = threading.Thread(target=self._read, name=f"weightwire-{self.rank_name}", daemon=True)
            self._reader.start()
        except BaseException:  # no thread to be had
            self._up.put(None)
            self._channel.close()
            raise

    def open(self) -> "Session":
        """Waits until it is attached; closed by then, from any thread, it raises at once."""
        if not self._attached.wait(self.timeout):
            self.close()
            raise errors.DeadlineError(f"the agent at {self._socket} did not answer within {self.timeout} s",
                                       code="DEADLINE_EXCEEDED", reason="deadline_exceeded", rank=self.rank_name,
                                       remedy="is weightwired running, and is this its --agent-socket?")
        if self.handle == 0:
            self._channel.close()
            assert self._failure is not None
            raise self._failure
        return self

    def _read(self) -> None:
        error: errors.WeightwireError = errors.UnavailableError("the agent ended the session", code="UNAVAILABLE", reason="shutting_down",
                                        rank=self.rank_name)
        try:
            for event in self._stream:
                if event.WhichOneof("kind") == "attached":
                    self.handle = event.attached.handle
                    self.lineage, self.floor = event.attached.lineage, event.attached.floor
                    self.device = event.attached.device
                    self.device_refused = errors.from_outcome(event.attached.device_refused)
                    self._attached.set()
                else:
                    if event.WhichOneof("kind") == "fenced":
                        error = errors.from_outcome(event.fenced.why) or error
                    self._on_event(event)
        except grpc.RpcError as rpc_error:
            error = errors.from_rpc_error(rpc_error)
            if isinstance(error, errors.UnavailableError) and not self._attached.is_set():
                error = uid_refusal(self._socket, self.rank_name) or error
        except Exception as failure:  # no memory for an event, for one: the session ends as one that was lost
            log.exception("weightwire: %s: the session ends", self.rank_name)
            error = errors.UnavailableError(f"{type(failure).__name__}: {failure}", code="UNAVAILABLE", reason="io_error",
                                            rank=self.rank_name)
        self._up.put(None)  # ends gRPC's thread that waits for more to send
        error = self._left or error
        self._failure = error
        ready = self._attached.is_set()
        self._attached.set()
        if ready:
            self._on_end(error)

    @property
    def attached(self) -> bool:
        """False once the agent ended the session or went away: a new session is needed."""
        return self.handle != 0 and self._failure is None

    def call(self, method: str, request: Any, timeout: float | None = None) -> Any:
        """Calls `method` of the Agent service with this session's handle filled in where it has one."""
        if "handle" in request.DESCRIPTOR.fields_by_name:
            request.handle = self.handle
        try:
            return apart(lambda: getattr(self._stub, method)(request, timeout=timeout or self.timeout))
        except (grpc.RpcError, ValueError) as error:
            if self._closed or self.handle == 0:  # by another thread perhaps, which attaches again after a fence
                raise errors.StaleError("its session has ended", code="ABORTED", reason="stale_incarnation",
                                        rank=self.rank_name) from None
            if isinstance(error, ValueError):
                raise
            failure = errors.from_rpc_error(error)
            if isinstance(failure, errors.DeadlineError) and failure.reason == "none":  # ours: nobody has said why
                failure = errors.DeadlineError(
                    f"the agent at {self._socket} did not answer {method} within {timeout or self.timeout} s",
                    code=failure.code, reason="deadline_exceeded", rank=self.rank_name,
                    remedy="what was asked for may still happen; `wwctl status` says what everyone waits for")
            raise failure from None

    def submit_layout(self, config_json: str, spec: str, observed: Sequence[TensorMeta]) -> list[TensorMeta]:
        """Negotiates a scheme's layout; returns the tensors in binding order."""
        agreed, _ = self.submit(scheme_layout(config_json, spec, observed))
        return agreed

    def submit(self, layout: types_pb2.LayoutSubmission) -> tuple[list[TensorMeta], list[str]]:
        """Submits any layout (explicit boxes included); returns the tensors in binding order, and where a
        trace and its scheme disagree."""
        reply = self.call("SubmitLayout", agent_pb2.AgentLayoutRequest(layout=layout))
        return [TensorMeta.from_proto(t.spec) for t in reply.agreed.tensors], list(reply.notes)

    def local_status(self) -> agent_pb2.LocalStatusResponse.Local:
        """What the agent says of this rank. StaleError when it knows this session no more."""
        reply = self.call("LocalStatus", agent_pb2.LocalStatusRequest())
        for local in reply.locals:
            if f"{local.group}/{local.rank}" == self.rank_name:
                return local
        raise errors.StaleError("the agent knows this session no more", code="ABORTED",
                                reason="stale_incarnation", rank=self.rank_name)

    def put_fd(self, fd: int) -> int:
        """Hands an fd to the agent; returns its token."""
        return _fd_call(f"{self._socket}.fd", _FD_PUT, 0, fd, self.timeout)[0]

    def get_fd(self, token: int) -> int:
        """Redeems a token for an fd that the caller owns."""
        fd = _fd_call(f"{self._socket}.fd", _FD_GET, token, None, self.timeout)[1]
        if fd is None:
            raise errors.WeightwireError("the agent's answer carried no file descriptor", code="INTERNAL")
        return fd

    def leave(self, why: errors.WeightwireError) -> None:
        """Tells the agent, and through it the coordinator, why the session ends, which then ends with `why`; returns at once."""
        self._left = why
        said = str(why.args[0]).encode(errors="replace")[:1000].decode(errors="ignore")
        self._up.put(agent_pb2.AttachUp(detach=agent_pb2.Detach(why=said)))

    def close(self) -> None:
        """Leaves in good order. Idempotent."""
        self._closed = True
        self._up.put(agent_pb2.AttachUp(detach=agent_pb2.Detach()))
        self._up.put(None)
        if threading.current_thread() is not self._reader:
            self._reader.join(min(self.timeout, _LEAVE_SECONDS))
        with contextlib.suppress(TimeoutError):  # a signal before has left gRPC in the middle of something
            apart(self._end_channel, _LEAVE_SECONDS)

    def _end_channel(self) -> None:
        self._stream.cancel()
        self._channel.close()
