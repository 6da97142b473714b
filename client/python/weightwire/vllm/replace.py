"""One installation on one engine: vLLM's calls in their order, and what to do when one fails."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any, Callable, Iterator

from weightwire import errors
from weightwire.vllm.link import Workers
from weightwire.vllm.ports import Port

log = logging.getLogger("weightwire.vllm")


@dataclass(frozen=True)
class Deadlines:
    """Seconds for each step. An engine that has not acknowledged after twice the coordinator's commit_deadline_ms is evicted
    and brought up to date anew: raise that too where updates take long."""

    init: float = 120.0
    transfer: float = 300.0  #: paused-live: from the pause until the version lies in every rank's stage
    room: float = 10.0  #: paused-live: for a rank to give its stage up
    prepare: float = 20.0
    pause: float = 20.0  #: with `adopt`, beside adopt_within
    start: float = 20.0
    update: float = 60.0
    finish: float = 60.0
    reset: float = 10.0
    canary: float = 30.0
    resume: float = 10.0
    close: float = 30.0  #: for EngineDriver.close to wait for the version that is being installed


class StepError(Exception):
    """A step that failed, and why."""

    def __init__(self, step: str, cause: BaseException):
        super().__init__(f"step {step}: {type(cause).__name__}: {cause}")
        self.step = step

    def __reduce__(self) -> Any:
        return errors.unpickled, (type(self), self.args, self.__dict__)


class Replacer:
    """Replaces the weights of a paused engine by a staged epoch.

    port, workers: the engine, and its ranks' own lines
    pause:    the mode in which it was paused
    draft:    it has a draft model, which takes a session of its own
    attempts: how often an epoch is tried before it is given up
    """

    def __init__(self, port: Port, workers: Workers, deadlines: Deadlines, *, pause: str, draft: bool, attempts: int):
        self._port, self._workers, self._deadlines = port, workers, deadlines
        self._pause, self._draft, self._attempts = pause, draft, attempts
        self._opened = False  # vLLM's session, where its ranks know nothing of one
        #: That each step took since this was last emptied; all tries of a step together.
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Adds what happens inside to the seconds of step `name`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def call(self, name: str, do: Callable[[float], object], deadline: str | None = None) -> None:
        with self.timed(name):
            try:
                do(getattr(self._deadlines, deadline or name))
            except Exception as error:
                raise StepError(name, error) from error

    def replace(self, epoch: int, version: int, label: str) -> list[StepError]:
        """Installs a staged epoch on every rank, and has vLLM label outputs with `label`; returns the tries that failed,
        `attempts` when all did."""
        failures: list[StepError] = []
        while len(failures) < self._attempts:
            try:
                self._replace_once(epoch, version, label)
                break
            except StepError as error:
                log.warning("weightwire: epoch %d: %s", epoch, error)
                failures.append(error)
                self.close_sessions()
        return failures

    def succeeded(self, failures: list[StepError]) -> bool:
        return len(failures) < self._attempts

    def _replace_once(self, epoch: int, version: int, label: str) -> None:
        ticket = {"epoch": epoch, "version": version}  # one for all ranks: vLLM before 0.29 takes no list
        for draft in (False, True) if self._draft else (False,):
            if self._workers.sessions:
                self._on_ranks("start", lambda t: self._port.start(draft, t))
                self._on_ranks("update", lambda t: self._port.update(ticket, t))
                self._on_ranks("finish", self._port.finish)
            else:
                self._update_without_sessions(ticket)
        self.call("finish", lambda t: self._check_ranks(epoch, t))
        self.call("finish", lambda t: self._port.set_version(label, t))
        self.call("reset", self._reset)

    def _update_without_sessions(self, ticket: dict[str, Any]) -> None:
        self.call("start", lambda t: self._port.start(False, t, direct=True))
        self._opened = True
        self._on_ranks("update", lambda t: self._port.update(ticket, t))
        self._close_opened()

    def _close_opened(self) -> None:
        self._opened = False  # whatever comes of it: without a session vLLM would refuse on every rank
        self.call("finish", self._port.finish)

    def _on_ranks(self, step: str, call: Callable[[float], None]) -> None:
        """A call of vLLM that every rank has to execute. What counts is what the ranks themselves say: vLLM may return
        before all have done it, once a call has failed."""
        def do(timeout: float) -> None:
            calls = [answer["calls"] for answer in self._workers.ask("state", timeout)]
            call(timeout)
            answers = self._workers.ask("await", timeout, calls=calls, seconds=timeout)
            failed = [f"rank {rank}: {answer['failure']}" for rank, answer in enumerate(answers) if answer["failure"]]
            if failed:
                raise RuntimeError("; ".join(failed))
        self.call(step, do)

    def _check_ranks(self, epoch: int, timeout: float) -> None:
        serving = [answer["serving"] for answer in self._workers.ask("state", timeout)]
        if set(serving) != {epoch}:
            raise RuntimeError(f"ranks serve epochs {serving} instead of {epoch}")

    def _reset(self, timeout: float) -> None:
        if not self._port.reset_prefix_cache(self._pause == "keep", timeout):
            raise RuntimeError("the prefix cache was not emptied: requests hold blocks of it")

    def intact(self, epoch: int | None) -> bool:
        """Whether every rank holds exactly the weights of `epoch`; None: those that it had when it was registered."""
        try:
            answers = self._workers.ask("state", self._deadlines.start)
        except errors.WeightwireError:
            return False
        return all(answer["serving"] == epoch and not answer["broken"] for answer in answers)

    def close_sessions(self) -> None:
        """vLLM has no abort: a session that is open is finished, and its ranks say that they are broken."""
        try:
            if self._opened:
                self._close_opened()
            elif any(answer["open"] for answer in self._workers.ask("state", self._deadlines.start)):
                self._on_ranks("finish", self._port.finish)
        except (errors.WeightwireError, StepError) as error:
            log.debug("weightwire: closing sessions: %s", error)

