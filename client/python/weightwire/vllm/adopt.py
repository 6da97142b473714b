"""When an engine that has requests changes to a version that lies ready: at once, or when they have ended, within a bound."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Callable

from weightwire import errors
from weightwire.client import Client
from weightwire.vllm.ports import Port
from weightwire.vllm.replace import Deadlines

log = logging.getLogger("weightwire.vllm")
ADOPTIONS = ("lockstep", "at_request_end", "rolling")
_LOOK_SECONDS = 0.2  # how soon an engine that is too far behind is seen
_UNKNOWN_SECONDS = 5.0  # for which the last word of a coordinator that does not answer counts


@dataclass(frozen=True)
class Adoption:
    """`how`: one of ADOPTIONS. `within`: seconds after which the engine changes whatever runs. `max_behind`, of "rolling": it
    also changes when it is more than that many versions behind what is committed, as `wwctl status` counts them."""

    how: str
    within: float
    max_behind: int

    def check(self, pause: str, coordinator: str | None) -> None:
        """RefusedError: no such adoption, or one that cannot keep what it promises."""
        if self.how not in ADOPTIONS:
            raise _refused(f"unknown adoption {self.how!r}", f"one of {', '.join(ADOPTIONS)}")
        if self.how == "lockstep":
            return
        if pause == "wait":
            raise _refused(f"pause='wait' with adopt={self.how!r}: requests that outlive adopt_within would be waited for all the "
                           "same", "pause='abort' or 'keep' says what becomes of them then")
        if not self.within > 0:
            raise _refused(f"adopt_within={self.within} is no time", "seconds, more than 0")
        if self.how == "rolling" and self.max_behind < 1:
            raise _refused(f"max_behind={self.max_behind}: an engine is one version behind while it waits for its requests",
                           "1 or more, or adopt='lockstep'")
        if self.how == "rolling" and not coordinator:
            raise _refused("adopt='rolling' needs coordinator=: an engine that waits is told of no newer versions",
                           "its address, or adopt='at_request_end'")


class Lag:
    """How many versions an engine is behind what is committed, in the coordinator's words. Not thread-safe."""

    def __init__(self, coordinator: str, engine: str):
        self._client, self._engine = Client(coordinator, timeout=1.0), engine
        self._known, self._at = 0, time.monotonic()

    def versions(self) -> int | None:
        """None: the coordinator has said nothing for 5 s."""
        try:
            status = self._client.status(epochs=1, participants=False)
            self._known = next((engine.lag_versions for engine in status.engines if engine.name == self._engine), 0)
            self._at = time.monotonic()
        except errors.WeightwireError as error:
            log.debug("weightwire: %s", error)
            if time.monotonic() - self._at > _UNKNOWN_SECONDS:
                return None
        return self._known

    def begin(self) -> None:
        """What was known before counts no more."""
        self._known, self._at = 0, time.monotonic()

    def close(self) -> None:
        self._client.close()


class Drain:
    """Lets the requests of an engine end on the weights that they began with; the next ones wait in vLLM's queue."""

    def __init__(self, port: Port, adoption: Adoption, deadlines: Deadlines, lag: Lag | None):
        self._port, self._adoption, self._deadlines, self._lag = port, adoption, deadlines, lag

    def pause(self, mode: str) -> str:
        """Pauses the engine. Returns why that was done before all requests had ended, which `mode` was used for then; empty when
        they had. Takes at most `within` and the deadline of a pause; raises what a pause raises."""
        done, failed = threading.Event(), []

        def drain() -> None:
            try:
                self._port.pause("wait", self._adoption.within + self._deadlines.pause)
            except Exception as error:  # told below, or of no interest after a forced pause
                failed.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=drain, name="weightwire-drain", daemon=True)
        if not self._port.needs_thread:  # an LLM's calls belong to this thread; it has no requests while it is called
            self._port.pause(mode, self._deadlines.pause)
            return ""
        thread.start()
        why = self._wait(done)
        if why:
            log.warning("weightwire: the engine changes its weights while requests run (%s): %s", mode, why)
            self._port.pause(mode, self._deadlines.pause)
            done.wait(self._deadlines.pause)  # else its late word would fall between the calls that follow
        elif failed:
            raise failed[0]
        return why

    def _wait(self, done: threading.Event) -> str:
        end = time.monotonic() + self._adoption.within
        look: Callable[[], str] = self._behind
        if self._lag:
            self._lag.begin()
        while not (why := look()):
            left = end - time.monotonic()
            if done.wait(max(0.0, min(left, _LOOK_SECONDS) if self._lag else left)):
                return ""
            if end - time.monotonic() <= 0:
                return f"requests still ran after {self._adoption.within:g} s"
        return "" if done.is_set() else why

    def _behind(self) -> str:
        if self._lag is None:
            return ""
        behind = self._lag.versions()
        if behind is None:
            return f"how far it is behind is not known: the coordinator does not answer for {_UNKNOWN_SECONDS:g} s"
        return f"it is {behind} versions behind, and {self._adoption.max_behind} may be" if behind > self._adoption.max_behind else ""


def _refused(what: str, remedy: str) -> errors.RefusedError:
    return errors.RefusedError(what, code="INVALID_ARGUMENT", reason="invalid_request", remedy=remedy)
