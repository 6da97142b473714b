"""The leader of one vLLM engine: takes each committed version through the engine in the one order that is right.

    prepare → pause → start → update → finish → reset prefix cache → resume → canary → acknowledge

vLLM schedules nothing while it is paused, so the canary runs right after `resume`. What fails before `start` leaves
the engine as it was. After `start` there is no way back but a whole install: the driver replays the staged version,
then the one before it, and resumes only when every rank says that it serves the same one.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Callable, Mapping, Sequence

from weightwire import errors
from weightwire.vllm.adopt import Adoption, Drain, Lag
from weightwire.labels import label
from weightwire.vllm.channel import Message
from weightwire.vllm.link import Workers
from weightwire.vllm.ports import is_here, is_unsupported, port_of
from weightwire.vllm.replace import Deadlines, Replacer, StepError
from weightwire.vllm.room import give_room

log = logging.getLogger("weightwire.vllm")
#: canary(generate, version), generate(token ids, max_tokens) -> greedy token ids
Canary = Callable[[Callable[[Sequence[int], int], list[int]], int], None]
MODES = ("fused", "hf_sharded", "hf_full")
INSTALLS = ("auto", "host-shadow", "device-shadow", "device-stage", "paused-live")
PAUSE_MODES = ("abort", "wait", "keep")
_PAUSE_SECONDS = 0.5  # after a failure; doubled for each one in a row
_HELLO_SECONDS = 30.0  # for ranks that vLLM says are initialised
_GONE_SECONDS = 10.0  # without a connection to any rank: the engine was started anew
_LOOK_SECONDS = 0.2  # how soon it is seen that an engine woke up
_PAUSE_SECONDS_MAX, _INIT_PAUSE_SECONDS_MAX = 5.0, 30.0


@dataclass(frozen=True)
class Serving:
    """What the engine answers with."""

    version: int
    epoch: int
    paused_seconds: float = 0.0  #: for which the engine scheduled nothing
    recovered: str = ""  #: the failure after which the stage was replayed, if there was one
    #: that each step took, by its name in Deadlines
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    lineage: int = 1  #: of `version`, as Offer.lineage
    #: Why the engine changed before its requests had ended, which `adopt` had it wait for; empty: it did not.
    forced: str = ""

    @property
    def label(self) -> str:
        """What vLLM labels outputs with, see weightwire.vllm.spans."""
        return label(self.version, self.lineage)


class InstallError(errors.WeightwireError):
    """A version was not installed. `serving` is what the engine is on now: a `Serving`; None for the weights that it
    was started with. `broken`: it is on no version, and stays paused; the next version, or a restart, heals it."""

    def __init__(self, message: str, *, step: str, version: int, serving: Serving | None, broken: bool, epoch: int):
        now = "no version: it is paused and answers nothing" if broken else \
            f"version {serving.version}" if serving else "the weights that it was started with"
        super().__init__(f"version {version} (epoch {epoch}) was not installed: {message}. The engine is on {now}",
                         code="ABORTED")
        self.step, self.version, self.serving, self.broken = step, version, serving, broken


def check_known(what: str, given: str, known: Sequence[str]) -> None:
    """RefusedError: `given` is none of `known`."""
    if given not in known:
        raise errors.RefusedError(f"unknown {what} {given!r}", code="INVALID_ARGUMENT", remedy=f"one of {', '.join(known)}")


class EngineDriver:
    """Leader of one engine.

    engine:     a `vllm.LLM`, an `AsyncLLM` (construct the driver on its event loop), or the base URL of `vllm serve`
    name:       the engine's group in weightwire
    agent:      the agent's socket; default as everywhere in weightwire
    mode:       "fused" (the engine's own parameters), "hf_sharded" or "hf_full" (through its `load_weights`)
    install:    "host-shadow", "device-shadow" (a second copy in device memory, made before the pause), "device-stage" (versions arrive in
                one buffer of the engine's GPU, that the agent lends; nothing goes by the host), "auto" (two such buffers where the agent
                lends them, else as "device-shadow" where each update finds free GPU memory for it, else as "host-shadow") or "paused-live"
                (half the host memory: the engine is paused while the next version overwrites the stage of the last)
    pause:      what happens to requests in flight: "abort", "wait" (they end first) or "keep" (they go on with the
                new weights, their cache recomputed)
    adopt:      when requests run: "lockstep" (`pause` ends or keeps them at once), "at_request_end" (they end on the weights that
                they began with, while the next ones wait; after `adopt_within` seconds as "lockstep") or "rolling" (the same,
                and as "lockstep" as soon as the engine is more than `max_behind` versions behind; `coordinator`, its address,
                says so). What a late change costs the others: docs/vllm.md
    checkpoint: folder with config.json and safetensors headers; default: what the engine was started from
    listen:     of an engine on several hosts: this host's address (HOST or HOST:PORT), which workers on the others dial; None: a Unix
                socket. Every host has an agent, and `agent` is its socket there
    draft:      the engine has a draft or MTP model; it is updated in the same pause
    model_name: which of the trainer's models this is, where it publishes several (weightwire.models)
    canary:     called as canary(generate, version) with generate(token ids, max_tokens) -> greedy token ids; raises
                to refuse the version

    `step` installs one version; `start` follows on a thread of its own. With an `LLM` only `step`.
    """

    def __init__(self, engine: Any, *, name: str, agent: str | None = None, job: str = "", mode: str = "fused",
                 install: str = "auto", pause: str = "abort", adopt: str = "lockstep", adopt_within: float = 10.0,
                 max_behind: int = 1, coordinator: str | None = None, checkpoint: str | None = None, listen: str | None = None,
                 draft: bool = False, model_name: str = "", canary: Canary | None = None, attempts: int = 2,
                 deadlines: Deadlines = Deadlines()):
        check_known("mode", mode, MODES)
        check_known("install mode", install, INSTALLS)
        check_known("pause mode", pause, PAUSE_MODES)
        adoption = Adoption(adopt, adopt_within, max_behind)
        adoption.check(pause, coordinator)
        self._port = port_of(engine)
        self._pause, self._canary, self._draft, self.deadlines = pause, canary, draft, deadlines
        self._workers = Workers(listen)
        self._replacer = Replacer(self._port, self._workers, deadlines, pause=pause, draft=draft, attempts=attempts)
        self._lag = Lag(coordinator, name) if coordinator and adopt == "rolling" else None
        self._drain = None if adopt == "lockstep" else Drain(self._port, adoption, deadlines, self._lag)
        self._forced = ""  # of the pause that is on
        self._draining: int | None = None
        self._turn = threading.RLock()  # one install at a time
        self._slept = False  # and was not brought up to date since
        self._looked = time.monotonic()
        self._settings = dict(engine=name, link=self._workers.address, link_key=self._workers.key, agent=agent, job=job,
                              mode=mode, install=install, checkpoint=checkpoint, draft=draft, model_name=model_name)
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._gave_up = False  # no later try can do better
        self._ranks: list[dict[str, Any]] = []
        self._paused_at: float | None = None
        #: What the engine answers with; None: the weights that it was started with.
        self.serving: Serving | None = None
        self._acknowledged: Serving | None = None  # what `serving` was when weightwire was told of it last
        self.broken = False
        #: The last InstallError or other reason for which a version was not installed.
        self.last_error: Exception | None = None

    def init(self) -> list[dict[str, Any]]:
        """Registers every rank with its recorded layout. Returns, by rank: mode, rows, bytes, notes, stage (where versions arrive: a
        GPU's UUID, or "cpu")."""
        replicas = self._port.replicas(self.deadlines.resume)
        self._port.init({**self._settings, "replicas": replicas}, self.deadlines.init)
        if self._draft:  # only inside a draft session do workers see their draft model
            self._port.start(True, self.deadlines.init)
            self._port.finish(self.deadlines.init)
        ranks = self._workers.wait_hello(min(self.deadlines.init, _HELLO_SECONDS))
        refused = [f"rank {rank}: {hello['error']}" for rank, hello in enumerate(ranks) if "error" in hello]
        if refused:
            unsupported = any(hello.get("unsupported") for hello in ranks)
            raise errors.RefusedError("; ".join(refused), code="UNIMPLEMENTED" if unsupported else "FAILED_PRECONDITION")
        self._ranks = ranks
        if any(hello["interrupted"] for hello in ranks):
            self._take_over()
        return ranks

    def _take_over(self) -> None:
        """The driver before this one ended in the middle of an update, and left the engine paused."""
        self._replacer.close_sessions()
        self.broken = not self._replacer.intact(None)
        self._paused_at = time.monotonic()
        self._resume_quietly()

    @property
    def ready(self) -> bool:
        """On one version, and in contact with weightwire on every rank."""
        return bool(self._ranks) and not self.broken and not self._workers.fences

    def step(self, timeout: float) -> Serving | None:
        """Waits for the next committed version and installs it; None after `timeout` seconds without one. Where the engine was
        found to have lost parameters of the version that it serves (`wwctl verify`), that is installed again, and returned.

        An engine whose ranks have all gone is initialised again: a server that was started anew behind the same URL.

        An engine that sleeps is left alone until it is awake; then what it serves is installed again.

        Raises InstallError, which says on which version the engine is. A version that failed for another reason
        than its canary is tried again by the next call, until the coordinator evicts the engine. With "paused-live" the
        call may take `timeout` and the transfer.
        """
        if self._ranks and self._workers.are_gone(_GONE_SECONDS):
            self._start_over()
        if not self._ranks:
            self.init()
        end = time.monotonic() + timeout
        event = self._workers.wait_event(timeout, losses=True)
        if not self._wait_awake(event is not None, end):
            return None
        with self._turn:
            return self._take(self._workers.wait_event(0.0, losses=True) if self._slept else event)

    def _start_over(self) -> None:
        """With an engine that was started anew, or will be: it holds what it was started with."""
        log.warning("weightwire: all ranks of the engine are gone; it is initialised again when it is there")
        self._workers.forget()
        self._ranks, self._paused_at, self._slept = [], None, False
        self._set(None, broken=False)

    def _take(self, event: Message | None) -> Serving | None:
        self._replacer.seconds, self._forced = {}, ""
        slept, self._slept = self._slept, False
        if event is not None and "lost" in event:
            return self._restore(event["lost"]["epoch"], event["lost"]["why"])
        if event is not None and "rank" in event:
            event = self._give_room(event)
        if event is not None:
            return self._install(event["epoch"], event["version"], event.get("lineage", 1))
        if slept and self.serving is not None:
            return self._restore(self.serving.epoch, "the engine slept, and somebody else than its driver woke it; what it answered "
                                                     "meanwhile may be of no version")
        return None

    # ---- sleep

    def _wait_awake(self, wanted: bool, end: float) -> bool:
        """Whether the engine is awake before `end`; what it slept through is then known. `wanted`: it is about to be touched."""
        if self._paused_at is not None:
            return True  # by this driver, which vLLM cannot tell from sleep
        if not wanted and time.monotonic() < self._looked + self._port.look_seconds:
            return True
        while self._port.asleep(self.deadlines.prepare):
            if not self._slept:
                self._slept = True
                self.last_error = errors.NotReadyError(
                    "the engine sleeps, or somebody has paused it: no version is installed until it is awake",
                    code="FAILED_PRECONDITION", remedy="call the driver's wake_up (of a paused one: resume_generation)")
                log.warning("weightwire: %s", self.last_error)
            if self._stop.wait(max(0.0, min(_LOOK_SECONDS, end - time.monotonic()))) or time.monotonic() >= end:
                return False
        self._looked = time.monotonic()
        return True

    def wake_up(self) -> Serving | None:
        """Wakes an engine that sleeps. vLLM's level 2 gives the weights away, so they are installed again, from the stage, before
        anything is scheduled: no request sees what lay there. What was waiting goes on. Returns what is served; None: no version
        of weightwire is, and whoever loads the weights has to.

        Raises InstallError: the engine sleeps on, and answers nothing. A version that came meanwhile is installed by `step`."""
        with self._turn:
            serving = self.serving
            if self.broken:
                raise errors.NotReadyError("the engine is on no version, and would answer from none", code="FAILED_PRECONDITION",
                                           remedy="restart the engine")
            try:
                self._replacer.call("resume", lambda t: self._port.wake_up("weights", t))
                self._slept, self._replacer.seconds = False, {}
                if serving is None:
                    self._replacer.call("resume", lambda t: self._port.wake_up("kv_cache", t))
            except StepError as error:
                raise self._failed(error, serving.version if serving else 0, serving.epoch if serving else 0) from error
            return self._restore(serving.epoch, "the engine slept", asleep=True) if serving else None

    def _give_room(self, wanted: Message) -> Message | None:
        paused = self._settings["install"] == "paused-live"  # with device-stage it goes on: on weights of its own, too
        try:
            if paused:
                self._pause_engine(wanted["version"])
            with self._replacer.timed("transfer"):
                offer = give_room(self._workers, wanted, self.deadlines, self._stop.is_set)
        except StepError as error:
            if paused:
                self._resume_quietly()  # the engine's own weights are untouched
            raise self._failed(error, wanted["version"], wanted["epoch"]) from error
        if offer is None and paused:
            self._resume_quietly()
        return offer

    @property
    def draining(self) -> int | None:
        """The version for which requests are waited for; what is sent to the engine now waits, and may go to another one."""
        return self._draining

    def _pause_engine(self, version: int | None = None) -> None:
        """For `version`, when `adopt` says so; at once without."""
        if self._paused_at is not None:  # pausing again would drop what is queued
            return
        drain = self._drain
        if drain is None or version is None:
            self._replacer.call("pause", lambda t: self._port.pause(self._pause, t))
        else:
            def wait(_: float) -> None:
                self._forced = drain.pause(self._pause)
            self._draining = version
            try:
                self._replacer.call("drain", wait, "pause")
            finally:
                self._draining = None
        self._paused_at = time.monotonic()

    # ---- one version

    def _install(self, epoch: int, version: int, lineage: int) -> Serving:
        # After a coordinator lost its memory an epoch's number may come again: then there is no way back.
        before = self.serving if self.serving and self.serving.epoch != epoch else None
        started = time.monotonic()
        step = self._replacer.call
        try:
            step("prepare", lambda t: self._workers.ask("prepare", t, epoch=epoch))
            self._pause_engine(version)
        except StepError as error:
            self._resume_quietly()
            raise self._failed(error, version, epoch) from error
        failures = self._replacer.replace(epoch, version, label(version, lineage))
        assert self._paused_at is not None
        serving = Serving(version, epoch, time.monotonic() - self._paused_at, "; ".join(map(str, failures)),
                          lineage=lineage, forced=self._forced)
        if self._replacer.succeeded(failures):
            self._set(serving, broken=False)
        elif not self._replacer.intact(before.epoch if before else None) and not (before and self._replaced(before)):
            self._set(None, broken=True)
            raise self._failed(failures[0], version, epoch) from failures[0]
        self._resume(version, epoch)
        if not self._replacer.succeeded(failures):
            raise self._failed(failures[0], version, epoch) from failures[0]
        try:
            canary = self._canary
            if canary:
                step("canary", lambda t: canary(lambda p, n: self._port.generate(p, n, t), version))
        except StepError as error:
            self._back_to(before, version, epoch, error)
        try:
            self._seal()
            step("acknowledge", lambda t: self._workers.ask("acknowledge", t, ranks=[0], epoch=epoch,
                                                            seconds=time.monotonic() - started), "resume")
            step("acknowledge", lambda t: self._workers.ask("forget", t, epoch=epoch), "resume")
        except StepError as error:
            raise self._failed(error, version, epoch) from error
        self._workers.answered(epoch)
        serving = replace(serving, seconds=dict(self._replacer.seconds))
        with self._changed:
            self.serving = self._acknowledged = serving
            self._changed.notify_all()
        return serving

    def _replaced(self, serving: Serving) -> bool:
        """Whether what was served could be installed again."""
        return self._replacer.succeeded(self._replacer.replace(serving.epoch, serving.version, serving.label))

    def _seal(self) -> None:
        """What a parameter is from now on is known before the version counts as served."""
        seconds = self.deadlines.resume
        self._replacer.call("acknowledge", lambda t: self._workers.ask("sealed", t, seconds=0.8 * seconds), "resume")

    def _restore(self, epoch: int, why: str, asleep: bool = False) -> Serving | None:
        """Installs what is served again, from the stage: what the engine answers now is not of this version. `asleep`: its weights'
        memory is there, and the rest follows when it holds them."""
        self._workers.restored()
        serving = self.serving
        if serving is None or serving.epoch != epoch or self.broken:
            return None  # said of a version that was replaced meanwhile
        log.error("weightwire: version %d is installed again: %s", serving.version, why)
        if asleep:
            self._paused_at = time.monotonic()  # vLLM has done it; again would drop what is queued
        try:
            self._pause_engine()
        except StepError as error:
            self._resume_quietly()
            raise self._failed(error, serving.version, epoch) from error
        failures = self._replacer.replace(epoch, serving.version, serving.label)
        if not self._replacer.succeeded(failures):
            self._set(None, broken=True)
            raise self._failed(failures[0], serving.version, epoch) from failures[0]
        if asleep:
            try:
                self._replacer.call("resume", lambda t: self._port.wake_up("kv_cache", t))
            except StepError as error:
                raise self._failed(error, serving.version, epoch) from error
        self._resume(serving.version, epoch)
        try:
            self._seal()
        except StepError as error:
            raise self._failed(error, serving.version, epoch) from error
        self._workers.restored()  # what other ranks said meanwhile was of the weights before
        known = self._acknowledged is not None and self._acknowledged.epoch == epoch
        serving = replace(serving, recovered=why, seconds=dict(self._replacer.seconds))
        self._set(serving, broken=False)
        if known:
            self._acknowledged = serving
        return serving

    def _resume(self, version: int, epoch: int) -> None:
        try:
            self._replacer.call("resume", self._port.resume)
            self._paused_at = None
            self._replacer.call("resume", lambda t: self._workers.ask("resumed", t))
        except StepError as error:
            raise self._failed(error, version, epoch) from error

    def _resume_quietly(self) -> None:
        if self.broken:
            return
        try:
            self._port.resume(self.deadlines.resume)
            self._paused_at = None
            self._workers.ask("resumed", self.deadlines.resume)
        except Exception as error:
            log.warning("weightwire: resume: %s", error)

    def _back_to(self, before: Serving | None, version: int, epoch: int, why: StepError) -> None:
        """After a refused canary: the version before, or nothing. The version is not tried again, and the coordinator is
        told: the whole fleet goes back where it is configured so."""
        self._workers.answered(epoch)
        try:
            self._replacer.call("pause", lambda t: self._port.pause("abort", t))
            self._paused_at = time.monotonic()
            back = before is not None and self._replaced(before)
        except StepError as error:
            log.error("weightwire: %s: %s", error.step, error)
            back = False
        self._set(before if back else None, broken=not back)
        try:
            self._replacer.call("refuse", lambda t: self._workers.ask("refuse", t, ranks=[0], epoch=epoch, why=str(why)),
                                "resume")
        except StepError as error:
            log.warning("weightwire: %s: %s; the coordinator fences the engine at its commit deadline", error.step, error)
        if back:
            self._resume(version, epoch)
        raise self._failed(why, version, epoch) from why

    def _set(self, serving: Serving | None, broken: bool) -> None:
        with self._changed:
            self.serving, self.broken = serving, broken

    def _failed(self, error: StepError, version: int, epoch: int) -> InstallError:
        self.last_error = InstallError(str(error), step=error.step, version=version, serving=self.serving,
                                       broken=self.broken, epoch=epoch)
        return self.last_error

    # ---- following

    def start(self) -> "EngineDriver":
        """Follows every committed version on a thread of its own until `close`; returns at once. After a failure it waits
        longer each time; on a vLLM that is not supported it gives up, and `wait_version` says so."""
        if not self._port.needs_thread:
            raise errors.RefusedError("an LLM is not for use from several threads", code="FAILED_PRECONDITION",
                                      remedy="call step() between generate() calls, or use AsyncLLM")
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="weightwire-engine-driver", daemon=True)
            self._thread.start()
        return self

    def _follow(self) -> None:
        pause = _PAUSE_SECONDS
        while not self._stop.is_set():
            try:
                self.step(0.5)
                pause = _PAUSE_SECONDS
            except Exception as error:
                if self._stop.is_set():
                    break
                log.error("weightwire: %s", error)
                self._gave_up = is_unsupported(error)
                with self._changed:
                    self.last_error = error
                    self._changed.notify_all()
                if self._gave_up:
                    break
                self._stop.wait(pause)
                pause = min(2 * pause, _PAUSE_SECONDS_MAX if self._ranks else _INIT_PAUSE_SECONDS_MAX)
        self._close_lines()

    def wait_version(self, version: int, timeout: float, *, lineage: int = 1) -> Serving:
        """Until the engine serves `version` of `lineage` (Publisher.lineage) or a later one, acknowledged. For use beside
        `start`."""
        def served() -> Serving | None:
            told = self._acknowledged if self.serving is not None else None
            return told if told is not None and (told.lineage, told.version) >= (lineage, version) else None

        with self._changed:
            self._changed.wait_for(lambda: self._gave_up or served(), timeout)
            if self._gave_up and self.last_error is not None:
                raise self.last_error
            serving = served()
            if serving is None:
                raise errors.DeadlineError(f"version {version} is not served after {timeout} s; serving {self.serving}",
                                           code="DEADLINE_EXCEEDED",
                                           remedy=f"last error: {self.last_error}") from self.last_error
            return serving

    @property
    def gave_up(self) -> bool:
        """Whether `start` follows no more, for no later try can do better: `last_error` says why."""
        return self._gave_up

    def status(self) -> dict[str, Any]:
        """For people and probes."""
        return {"serving": asdict(self.serving) if self.serving else None, "ready": self.ready, "broken": self.broken,
                "draining": self._draining,
                "fences": self._workers.fences, "last_error": str(self.last_error) if self.last_error else None}

    def close(self) -> None:
        """Stops following. The engine keeps its weights and stays registered until its process ends. An installation that is
        under way goes on to its end: for `deadlines.close` it is waited for, on the engine's own event loop not at all."""
        self._stop.set()
        self._workers.stop_waiting()
        if self._thread is None:
            self._close_lines()
            return
        self._thread.join(0 if is_here(self._port) else self.deadlines.close)
        if self._thread.is_alive():
            log.warning("weightwire: the driver was closed while it was busy; its thread ends with what it does")

    def _close_lines(self) -> None:
        self._workers.close()
        if self._lag is not None:
            self._lag.close()

    def __enter__(self) -> "EngineDriver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
