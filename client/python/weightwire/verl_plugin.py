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
    """Idempotent: the wait has a bound, and a receiver that failed leaves no socket behind, which would take the next sender's words.
    Where verl's receiver is another one than verl 0.9's it is left as it is, with a warning."""
    try:
        from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
    except (ImportError, ValueError) as error:  # ValueError: verl's word for a vLLM that it does not know
        logger.debug("weightwire: verl's vLLM adapter is not there: %s", error)
        return
    receiver: Any = getattr(transfer, "BucketedWeightReceiver", None)
    calls = [parameters(getattr(receiver, name, None)) for name in ("_init_socket", "_cleanup")]
    if parameters(receiver) != ["zmq_handle", "device", "use_shm"] or calls != [["self"], ["self"]]:
        logger.warning("weightwire: this verl has another BucketedWeightReceiver: its workers wait for a sender without an end")
    elif not hasattr(receiver._init_socket, "__wrapped__"):
        receiver._init_socket, receiver._cleanup = _bounded(receiver._init_socket), _closing(receiver._cleanup)


def _bounded(original: Callable[[Any], None]) -> Callable[[Any], None]:
    def wait(socket: Any, events: int) -> None:
        if not socket.poll(SILENCE_SECONDS * 1000, events):
            raise TimeoutError(f"weightwire: the sender of the weights has said nothing for {SILENCE_SECONDS:g} s")

    @functools.wraps(original)
    def _init_socket(self: Any) -> None:
        original(self)
        self.socket = Bounded(self.socket, wait)

    return _init_socket


def _closing(original: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(original)
    def _cleanup(self: Any) -> None:
        try:
            original(self)
        except BufferError as error:  # tensors in the bucket are seen from the error that is on its way: the memory goes with it
            logger.warning("weightwire: a bucket of weights is still in use: %s", error)
            self.shm = None
        finally:
            socket, self.socket = self.socket, None
            if socket is not None:
                socket.close()

    return _cleanup


# The first is set by verl's vLLM server for its workers, the other one by who wants the bound.
if "VERL_REPLICA_RANK" in os.environ and "WEIGHTWIRE_VERL_SILENCE_SECONDS" in os.environ:
    bound_receiver()
