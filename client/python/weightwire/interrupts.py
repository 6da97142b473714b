"""Calls and waits of the main thread that a signal may end at any moment.

CPython runs signal handlers on the main thread, between any two of its instructions, and a handler may raise: that of Ctrl-C does. In
the middle of gRPC, or of threading's Condition and Event, this leaves a lock taken, and every other thread that needs it waits for
ever. Plain locks are safe: taking one and knowing that it is taken is one instruction.
"""

from __future__ import annotations

import _thread
import threading
from typing import Callable, TypeVar

T = TypeVar("T")


def apart(call: Callable[[], T], timeout: float | None = None) -> T:
    """What `call` returns or raises. On the main thread it runs in another one, which goes on when a signal's handler raises here.

    TimeoutError: it has not ended after `timeout` seconds, and goes on. Not counted on other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    ended = threading.Lock()
    ended.acquire()
    result: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            failure.append(error)
        finally:
            ended.release()

    _thread.start_new_thread(run, ())  # Thread.start waits for an Event
    if not ended.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
        raise TimeoutError(f"no end after {timeout} s")
    if failure:
        raise failure[0]
    return result[0]


class Flag:
    """As threading.Event, without `clear`."""

    def __init__(self) -> None:
        self._set = False
        self._setting = threading.Lock()
        self._unset = threading.Lock()
        self._unset.acquire()

    def set(self) -> None:
        with self._setting:
            if not self._set:
                self._set = True
                self._unset.release()

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float) -> bool:
        """Whether it is set within so many seconds."""
        if not self._set and self._unset.acquire(timeout=min(max(0.0, timeout), threading.TIMEOUT_MAX)):
            self._unset.release()
        return self._set
