"""verl imports this in each of its processes (entry point group verl.plugins). In a worker of verl's vLLM it bounds the wait for weights:
verl's receiver waits without an end, so that an actor that was killed takes the engine with it."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from typing import Any, Callable

logger = logging.getLogger(__name__)
# A sender that lives sends its next bucket as soon as it is told that the one before was taken.
SILENCE_SECONDS = 60.0
try:
    SILENCE_SECONDS = float(os.environ.get("WEIGHTWIRE_VERL_SILENCE_SECONDS", SILENCE_SECONDS))
except ValueError as error:  # verl imports this in every process: none of them may end of it
    logger.warning("weightwire: WEIGHTWIRE_VERL_SILENCE_SECONDS: %s: %g s it is", error, SILENCE_SECONDS)
_POLLIN, _POLLOUT = 1, 2  # zmq's


class Bounded:
    """A ZeroMQ socket that waits no longer than `wait(socket, events)` does."""

    def __init__(self, socket: Any, wait: Callable[[Any, int], None]):
        self._socket, self._wait = socket, wait

    def send_pyobj(self, what: Any) -> None:
        self._wait(self._socket, _POLLOUT)
        self._socket.send_pyobj(what)

    def send(self, what: bytes) -> None:
        self._socket.send(what)

    def recv(self) -> bytes:
        self._wait(self._socket, _POLLIN)
        return bytes(self._socket.recv())

    def recv_pyobj(self) -> Any:
        self._wait(self._socket, _POLLIN)
        return self._socket.recv_pyobj()

    def connect(self, where: str) -> None:
        self._socket.connect(where)

    def close(self) -> None:
        self._socket.close(linger=1000)  # what was acknowledged last is still to go out


def parameters(call: Any) -> list[str]:
    """Names of what `call` takes; none for what is not there."""
    return [] if call is None else list(inspect.signature(call).parameters)


def bound_receiver() -> None:
    """Idempotent. Where verl's receiver is another one than verl 0.9's it is left as it is, with a warning."""
    try:
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
    except (ImportError, ValueError) as error:  # ValueError: verl's word for a vLLM that it does not know
        logger.debug("weightwire: verl's vLLM adapter is not there: %s", error)
        return
    receiver: Any = getattr(transfer, "BucketedWeightReceiver", None)
    if parameters(receiver) != ["zmq_handle", "device", "use_shm"] or parameters(getattr(receiver, "_init_socket", None)) != ["self"]:
        logger.warning("weightwire: this verl has another BucketedWeightReceiver: its workers wait for a sender without an end")
    elif not hasattr(receiver._init_socket, "__wrapped__"):
        receiver._init_socket = _bounded(receiver._init_socket)


def _bounded(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def wait(socket: Any, events: int) -> None:
        if not socket.poll(SILENCE_SECONDS * 1000, events):
            raise TimeoutError(f"weightwire: the sender of the weights has said nothing for {SILENCE_SECONDS:g} s")

    @functools.wraps(original)
    def _init_socket(self: Any) -> None:
        original(self)
        self.socket = Bounded(self.socket, wait)

    return _init_socket


# The first is set by verl's vLLM server for its workers, the other one by who wants the bound.
if "VERL_REPLICA_RANK" in os.environ and "WEIGHTWIRE_VERL_SILENCE_SECONDS" in os.environ:
    bound_receiver()
