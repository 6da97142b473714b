"""The exceptions of the client: a small tree that carries the server's reason."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator, cast

import grpc

from weightwire.v1 import types_pb2


class WeightwireError(Exception):
    """Something was refused or failed.

    code:    gRPC's canonical code, e.g. "FAILED_PRECONDITION"
    reason:  name from the closed set weightwire.v1.Reason, lower case, e.g. "stale_version"
    rank, tensor, epoch: what it is about; empty or 0 where they do not apply
    remedy:  what to do
    """

    def __init__(self, message: str, *, code: str = "UNKNOWN", reason: str = "none", rank: str = "",
                 tensor: str = "", epoch: int = 0, remedy: str = ""):
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.rank = rank
        self.tensor = tensor
        self.epoch = epoch
        self.remedy = remedy

    def __reduce__(self) -> Any:
        """With all it says, whatever a subclass's constructor asks for: process pools and Ray pickle what a task raises."""
        return unpickled, (type(self), self.args, self.__dict__)

    def __str__(self) -> str:
        where = [f"{k} {v}" for k, v in (("rank", self.rank), ("tensor", self.tensor), ("epoch", self.epoch)) if v]
        text = f"{self.code} ({self.reason}): {super().__str__()}"
        if where:
            text += f" [{', '.join(where)}]"
        return f"{text}; {self.remedy}" if self.remedy else text


def unpickled(kind: type[BaseException], args: tuple[Any, ...], said: dict[str, Any]) -> BaseException:
    """An exception as it was, without its constructor."""
    made = kind.__new__(kind, *args)
    made.__dict__.update(said)
    return made


class RefusedError(WeightwireError):
    """The request is wrong; repeating it does not help."""


class StaleError(WeightwireError):
    """The caller's incarnation, epoch or version was overtaken."""


class NotReadyError(WeightwireError):
    """Not possible now; the message says what is missing."""


class AbortedError(WeightwireError):
    """The version was given up; engines keep what they served."""


class DeadlineError(WeightwireError):
    """Not finished in time."""


class UnavailableError(WeightwireError):
    """The agent or the coordinator cannot be reached."""


_STALE = {"stale_incarnation", "stale_epoch", "stale_version", "lease_expired"}
_BY_CODE = {
    "INVALID_ARGUMENT": RefusedError,
    "ALREADY_EXISTS": RefusedError,
    "PERMISSION_DENIED": RefusedError,
    "UNAUTHENTICATED": RefusedError,
    "RESOURCE_EXHAUSTED": RefusedError,
    "NOT_FOUND": RefusedError,
    "OUT_OF_RANGE": RefusedError,
    "FAILED_PRECONDITION": NotReadyError,
    "DEADLINE_EXCEEDED": DeadlineError,
    "UNAVAILABLE": UnavailableError,
    "ABORTED": AbortedError,
    "CANCELLED": AbortedError,
    "DATA_LOSS": AbortedError,
}


@contextlib.contextmanager
def refusing(*, rank: str = "", tensor: str = "") -> Iterator[None]:
    """For a request that is put together inside: an argument of the wrong type or range is a RefusedError, not what Python
    or protobuf say of it."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise RefusedError(str(error), code="INVALID_ARGUMENT", reason="invalid_request", rank=rank, tensor=tensor,
                           remedy="correct the argument") from error


def reason_name(number: int) -> str:
    """ "stale_version" for REASON_STALE_VERSION; "unknown_<n>" for a number of a newer server."""
    try:
        return str(types_pb2.Reason.Name(number))[len("REASON_"):].lower()
    except ValueError:
        return f"unknown_{number}"


def make_error(code: str, message: str, detail: types_pb2.ErrorDetail | None = None) -> WeightwireError:
    detail = detail or types_pb2.ErrorDetail()
    reason = reason_name(detail.reason)
    kind = StaleError if reason in _STALE else _BY_CODE.get(code, WeightwireError)
    return kind(message, code=code, reason=reason, rank=detail.rank, tensor=detail.tensor,
                epoch=detail.epoch, remedy=detail.remedy)


def from_rpc_error(error: grpc.RpcError) -> WeightwireError:
    """The exception for a failed call; reads the ErrorDetail in its status details."""
    detail = None
    # Pairs: grpc's are named tuples, grpc.aio's plain ones, and the stubs' are neither.
    for key, value in cast("Iterable[tuple[str, Any]]", error.trailing_metadata() or ()):
        if key == "grpc-status-details-bin":
            status = types_pb2.RpcStatus.FromString(value)
            for packed in status.details:
                found = types_pb2.ErrorDetail()
                if packed.Unpack(found):
                    detail = found
    return make_error(error.code().name, error.details() or "", detail)


def from_outcome(outcome: types_pb2.Outcome) -> WeightwireError | None:
    """None when the outcome is OK."""
    if outcome.code == 0:
        return None
    code = next((c.name for c in grpc.StatusCode if c.value[0] == outcome.code), "UNKNOWN")
    return make_error(code, outcome.message, outcome.detail)


def to_outcome(error: WeightwireError | None) -> types_pb2.Outcome:
    """The other way; None is OK. Long messages are cut."""
    if error is None:
        return types_pb2.Outcome()
    code = next((c.value[0] for c in grpc.StatusCode if c.name == error.code), grpc.StatusCode.UNKNOWN.value[0])
    known = types_pb2.Reason.keys()
    reason = f"REASON_{error.reason.upper()}"
    said = str(error.args[0] if error.args else "").encode(errors="replace")[:2000].decode(errors="ignore")
    return types_pb2.Outcome(code=code, message=said, detail=types_pb2.ErrorDetail(
        reason=reason if reason in known else "REASON_INTERNAL", rank=error.rank, tensor=error.tensor, epoch=error.epoch,
        remedy=error.remedy))
