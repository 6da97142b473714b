"""The trainer's side."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import threading
import time
from typing import Any, Callable, Collection, Literal, Mapping, Optional, Sequence, Union

import numpy as np

from weightwire import errors
from weightwire.device import Device, DeviceArray
from weightwire.interrupts import Flag
from weightwire.memory import Arena, TensorMeta, arena_map
from weightwire.session import Session, default_agent_socket
from weightwire.v1 import agent_pb2, types_pb2
from weightwire.waiting import Progress, ProgressCallback

_log = logging.getLogger(__name__)
_PROGRESS_SECONDS = 0.1
_VERSION_MAX = 2**63 - 1
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_MODES = {"hold": agent_pb2.PUBLISH_MODE_HOLD, "snapshot": agent_pb2.PUBLISH_MODE_SNAPSHOT}
#: In which lineage a rank publishes: a number, or "resume": see `Publisher.publish`.
Lineage = Union[int, Literal["resume"], None]
#: What of a version is sent: see `Publisher`.
DeltaMode = Optional[Literal["auto", "always", "off"]]
_FIRST_LINEAGE = 1
#: In which lineage the ranks of this process publish, by agent, job and rank: one that attaches again without having gone
#: back to an earlier step is the trainer that it was, and is fenced as that.
_lineages: dict[tuple[str, str, str], int] = {}
#: What `Publisher.withdraw` says of a version: nobody will serve it; all its bytes were read, and its release says
#: whether it is served; it was released.
Withdrawal = Literal["revoked", "read", "released"]
_WITHDRAWALS: dict[int, Withdrawal] = {agent_pb2.WITHDRAWAL_REVOKED: "revoked", agent_pb2.WITHDRAWAL_READ: "read",
                                       agent_pb2.WITHDRAWAL_RELEASED: "released"}


def _trace_id(traceparent: str | None) -> bytes:
    """The trace id of a W3C traceparent; a new one without."""
    if traceparent is None:
        return secrets.token_bytes(16)
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None or not int(found[1], 16):
        raise errors.RefusedError(f"{traceparent!r} is no W3C traceparent of version 00", code="INVALID_ARGUMENT",
                                  reason="invalid_request", remedy="pass the header as the tracer writes it, or nothing")
    return bytes.fromhex(found[1])


class Release:
    """What `publish` returns: tells when the parameters may change again."""

    def __init__(self, version: int, progress: Callable[[int], Progress]):
        self.version = version
        self._progress = progress
        #: Epoch under which the version was staged; 0 until released.
        self.epoch = 0
        #: Seconds from the publish call to the release: how long the trainer was blocked.
        self.blocked_seconds: float | None = None
        #: Of the version: a later lineage comes after all versions of an earlier one.
        self.lineage = _FIRST_LINEAGE
        self._started = time.perf_counter()
        self._done = Flag()
        self._accepted = False
        self._error: errors.WeightwireError | None = None

    def wait_released(self, timeout: float, on_progress: ProgressCallback | None = None) -> "Release":
        """Blocks until the parameters may change. Raises AbortedError (or what else was the reason)
        when the version was given up, DeadlineError after `timeout` seconds.

        `on_progress` is called here whenever the agent says something new of this rank: its stage, and
        the bytes that went out. An agent that does not answer is not asked again."""
        if on_progress is not None:
            self._report(timeout, on_progress)
            timeout = max(0.0, self._started + timeout - time.perf_counter())
        if not self._done.wait(timeout):
            raise errors.DeadlineError(f"version {self.version} is not released after {timeout} s",
                                       code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                       remedy="the arrays must not change yet: wait again, or `withdraw` the version; "
                                              "`wwctl status` says what everyone waits for")
        if self._error:
            raise self._error
        return self

    def _report(self, timeout: float, on_progress: ProgressCallback) -> None:
        end = time.perf_counter() + timeout
        told = None
        while not self._done.wait(min(_PROGRESS_SECONDS, max(0.0, end - time.perf_counter()))):
            if time.perf_counter() >= end:
                return
            try:
                now = self._progress(self.version)
            except errors.WeightwireError:
                return  # what is wrong with the session comes with the release
            if now != told:
                told = now
                on_progress(now)
        if self._error is None:
            on_progress(Progress(self.version, "released", self.epoch))

    @property
    def released(self) -> bool:
        return self._done.is_set()

    def _finish(self, epoch: int, error: errors.WeightwireError | None) -> None:
        self.epoch, self._error = epoch, error
        self.blocked_seconds = time.perf_counter() - self._started
        self._done.set()


def _delta_mode(delta: DeltaMode) -> int:
    wanted: object = delta if delta is not None else os.environ.get("WEIGHTWIRE_PUBLISHER_DELTA", "")
    modes: dict[object, int] = {"": agent_pb2.DELTA_MODE_UNSPECIFIED, "off": agent_pb2.DELTA_MODE_OFF,
                                False: agent_pb2.DELTA_MODE_OFF,  # as YAML reads off
                                "auto": agent_pb2.DELTA_MODE_AUTO, "always": agent_pb2.DELTA_MODE_ALWAYS}
    if wanted not in modes:
        raise errors.RefusedError(f'delta is "{wanted}"', code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy='give "auto", "always" or "off"')
    return modes[wanted]


class Publisher:
    """One trainer rank.

    >>> with Publisher(rank=0, world_size=4) as publisher:
    ...     params = publisher.bind(config, "megatron:tp2,pp2", tensors)   # shared arrays, by name
    ...     publisher.publish(1).wait_released(timeout=60)

    All methods raise errors.WeightwireError. Not for use from several threads at once.
    """

    def __init__(self, *, rank: int, world_size: int, group: str = "trainer", job: str = "",
                 agent: str | None = None, timeout: float = 30.0, device: Device | None = None, lineage: Lineage = None,
                 delta: DeltaMode = None):
        """`lineage`: that of every `publish` that names none.

        `delta`: whether only what changed since earlier versions is sent: "auto" (over a network or a rate limit, as long
        as that is shorter), "always" (wherever memory is not mapped) or "off". None: WEIGHTWIRE_PUBLISHER_DELTA, or as the agent is
        configured. An agent with `delta: off` sends everything. The agent keeps a copy of what was sent last.
        """
        self._device = device
        self._releases: dict[int, Release] = {}
        self._calls = 0  # of Publish, so far
        self._indices: dict[str, int] = {}  # of the agreed tensors
        self._written: set[str] = set()  # since the last call that the agent answered
        self._in_doubt: Release | None = None  # the caller of `publish` has an error, and the agent did not answer
        self._lock = threading.Lock()
        self._arena: Arena | None = None
        self._wanted_lineage = lineage
        self._lineage = 0  # of its versions; 0: none was accepted yet
        agent = agent or default_agent_socket()
        self._session = Session(agent=agent, role=types_pb2.GROUP_ROLE_TRAINER,
                                group=group, rank=rank, world_size=world_size, job=job, timeout=timeout,
                                device=device.uuid if device else "", delta=_delta_mode(delta), on_event=self._on_event, on_end=self._on_end).open()
        self._process_rank = (agent, job, self._session.rank_name)

    @property
    def attached(self) -> bool:
        """False once the agent went away or this rank was fenced: open a new publisher. (A coordinator that is lost and
        comes back on its journal is waited for.)"""
        return self._session.attached

    @property
    def device_refused(self) -> errors.WeightwireError | None:
        """Why the parameters lie in host memory though a device was asked for; None otherwise."""
        return self._session.device_refused

    def bind(self, config: Mapping[str, Any] | str, spec: str,
             tensors: Sequence[TensorMeta]) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        """Negotiates the layout, allocates shared memory for `tensors` and binds it.

        config: the model's config.json, as a mapping or as text
        spec:   this group's parallel layout, "megatron:tp2,pp2"
        tensors: what this rank holds, in any order
        Returns writable arrays by name; fill them, then publish. bf16 appears as uint16. On a device they are
        DeviceArrays.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        return self._bind_arena(self._agreed(self._session.submit_layout(text, spec, tensors)))

    def bind_boxes(self, layout: types_pb2.LayoutSubmission) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        """As `bind`, with explicit boxes instead of a scheme."""
        agreed, _ = self._session.submit(layout)
        return self._bind_arena(self._agreed(agreed))

    def bind_places(self, layout: types_pb2.LayoutSubmission, arenas: Sequence[Arena],
                    places: Mapping[str, tuple[int, int]]) -> None:
        """As `bind_boxes`, for memory of the caller, who keeps the arenas open.
        places: (index into `arenas`, offset in bytes) by tensor name."""
        agreed, _ = self._session.submit(layout)
        self._import(arenas, [places[meta.name] for meta in self._agreed(agreed)])

    def _bind_arena(self, agreed: Sequence[TensorMeta]) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        if self._device is not None and self._session.device:
            return self._bind_slab(self._device, agreed)
        arena = Arena(f"weightwire-{self._session.rank_name.replace('/', '-')}", agreed)
        try:
            self._import([arena], [(0, offset) for offset in arena.offsets])
        except BaseException:
            arena.close()
            raise
        if self._arena:
            self._arena.close()
        self._arena = arena
        return arena.arrays

    def _bind_slab(self, device: Device, agreed: Sequence[TensorMeta]) -> Mapping[str, DeviceArray]:
        offsets, size = arena_map(agreed)
        lent = self._session.call("OpenSlab", agent_pb2.OpenSlabRequest(bytes=size))
        arrays = device._map(lent.memory.ipc_handle, lent.memory.offset,
                             self._session.get_fd(lent.lease_token)).arrays(agreed, offsets)
        self._session.call("ImportMemory", agent_pb2.ImportMemoryRequest(
            regions=[agent_pb2.ImportMemoryRequest.Region(slab=lent.slab)],
            bindings=[agent_pb2.ImportMemoryRequest.Binding(tensor=i, region=0, offset=offset)
                      for i, offset in enumerate(offsets)]))
        return arrays

    def _agreed(self, tensors: Sequence[TensorMeta]) -> Sequence[TensorMeta]:
        self._indices = {meta.name: index for index, meta in enumerate(tensors)}
        self._written = set(self._indices)
        return tensors

    def _import(self, arenas: Sequence[Arena], places: Sequence[tuple[int, int]]) -> None:
        self._session.call("ImportMemory", agent_pb2.ImportMemoryRequest(
            regions=[agent_pb2.ImportMemoryRequest.Region(fd_token=self._session.put_fd(arena.fd),
                                                          bytes=arena.nbytes) for arena in arenas],
            bindings=[agent_pb2.ImportMemoryRequest.Binding(tensor=i, region=region, offset=offset)
                      for i, (region, offset) in enumerate(places)]))

    def _progress(self, version: int) -> Progress:
        """What the agent says of this rank now."""
        local = self._session.local_status()
        return Progress(version, local.phase, local.epoch, 0, local.bytes_done, local.bytes_total)

    def publish(self, version: int, *, mode: str = "hold", manual_commit: bool = False,
                deadline: float = 120.0, traceparent: str | None = None, lineage: Lineage = None,
                unchanged: Collection[str] = ()) -> Release:
        """Publishes what the shared arrays hold as `version` (greater than the last one, at most 2^63 - 1).

        mode "hold": the arrays must stay unchanged until released; "snapshot": the agent copies them
        first and releases right after. `deadline` (seconds) is for the version, all attempts included.
        `traceparent`: the W3C header of the step that publishes; its trace id is then in the logs of every process that
        the version passes, and in `wwctl epoch`. That of the first rank to publish counts; without, it is a random one.

        `lineage`: for a trainer that started anew from an earlier step than what is committed, 100 where 120 is. Versions of
        a later lineage come after all of an earlier one: the next number after the newest one begins a new lineage with
        the commit of this version, and from then on whoever publishes in an earlier one is refused (StaleError,
        `stale_incarnation`). "resume" is the newest lineage if `version` is above what is committed of it, else the next
        one; it is decided once in a process. Every rank must say the same, and a rank has one lineage as long as it is
        attached: later calls may leave it out. None: that of the call before, or of the constructor; without, 1, where every
        job begins.

        `unchanged`: names of tensors to which nothing was written since the call of `publish` before, whatever became of
        it. The agent does not read them again to sum or copy them, where it did before, and engines that hold them read
        nothing either. One that was written all the same may be served as it was before, and nobody notices.

        A repeat of a version that is not released yet returns the same Release. A call that gets no answer within the
        publisher's timeout, or is interrupted, withdraws the version: either it returns a Release, because the version
        was accepted all the same; or it raises, and the version is not served and may be published again. Only when the
        agent confirms neither may the arrays not change yet: the error says so.
        """
        self._written |= set(self._indices) - set(unchanged)  # first: the next call counts from this one
        if mode not in _MODES:
            raise errors.RefusedError(f"unknown mode {mode!r}", code="INVALID_ARGUMENT", reason="invalid_request",
                                      rank=self._session.rank_name, remedy=f"one of {', '.join(_MODES)}")
        if isinstance(version, int) and not 0 <= version <= _VERSION_MAX:  # 0 the agent refuses
            raise errors.RefusedError(f"version: {version} is outside of 1 to {_VERSION_MAX}", code="INVALID_ARGUMENT",
                                      reason="invalid_request", rank=self._session.rank_name,
                                      remedy="number versions from 1 on")
        unknown = sorted(set(unchanged) - set(self._indices))
        if unknown:
            raise errors.RefusedError(f"unchanged: {len(unknown)} names are not of this rank's layout", code="INVALID_ARGUMENT",
                                      reason="invalid_request", rank=self._session.rank_name, tensor=unknown[0],
                                      remedy="name tensors as they were bound")
        with errors.refusing(rank=self._session.rank_name):
            request = agent_pb2.PublishRequest(version=version, mode=_MODES[mode], manual_commit=manual_commit,
                                               deadline_ms=int(deadline * 1000), trace_id=_trace_id(traceparent),
                                               lineage=self._lineage_for(version, lineage),
                                               unchanged=[index for name, index in self._indices.items()
                                                          if name not in self._written])
        if self._in_doubt is not None:
            release = self._settle(self._in_doubt, version)
            if release is not None:
                return release
        release = self._release_of(version)
        release.lineage = request.lineage
        self._calls += 1
        request.number = self._calls
        try:
            self._session.call("Publish", request)
        except (errors.DeadlineError, errors.UnavailableError) as error:
            if not self._withdraw_unanswered(release, error):
                raise
        except errors.WeightwireError:
            self._not_accepted(release)
            raise
        except BaseException:  # an interrupt: nobody will wait for the release
            self._interrupted(release)
            raise
        release._accepted = True
        self._written = set()
        self._lineage = _lineages[self._process_rank] = request.lineage
        return release

    @property
    def lineage(self) -> int:
        """Of the versions that this rank publishes; 0 before the first one was accepted."""
        return self._lineage

    @property
    def committed(self) -> int:
        """The newest version that was committed, of the newest lineage, when this rank attached; 0: none, or one that has no
        number here (an agent that knows no lineages)."""
        return self._session.floor

    @property
    def committed_lineage(self) -> int:
        """Of `committed`. An agent that knows no lineages has the first one alone."""
        return self._session.lineage or _FIRST_LINEAGE

    def _lineage_for(self, version: int, wanted: Lineage) -> int:
        newest = self._session.lineage
        if wanted is None:
            wanted = self._lineage or self._wanted_lineage or _FIRST_LINEAGE
        if isinstance(wanted, int) and wanted < _FIRST_LINEAGE or isinstance(wanted, str) and wanted != "resume":
            raise errors.RefusedError(f"lineage: {wanted!r} is neither a number from 1 on nor \"resume\"",
                                      code="INVALID_ARGUMENT", reason="invalid_request", rank=self._session.rank_name,
                                      remedy="lineages are numbered from 1 on")
        if newest == 0 and wanted == "resume":
            return self._lineage or _FIRST_LINEAGE  # the publish is refused, unless it goes on
        if newest == 0 and wanted != _FIRST_LINEAGE:
            raise errors.RefusedError(f"lineage={wanted} was asked for, and the agent or the coordinator knows no lineages",
                                      code="FAILED_PRECONDITION", reason="protocol_version", rank=self._session.rank_name,
                                      remedy="upgrade both; until then publish numbers above what is committed")
        if not isinstance(wanted, str):
            return wanted
        decided = self._lineage or _lineages.get(self._process_rank, 0)
        return decided or (newest if version > self._session.floor else newest + 1)

    def withdraw(self, version: int, timeout: float | None = None) -> Withdrawal:
        """Takes a version back that was published and is not waited for any more. When it returns, the arrays may change:

        "revoked"  nothing reads them, and no engine will serve the version; it may be published again
        "read"     every byte was read before: the version is served as it was, or given up; its Release says which
        "released" its Release is done

        Raises when the agent does not answer: the arrays must not change then; call it again."""
        withdrawal = self._ask_to_withdraw(version, if_accepted=True, timeout=timeout)
        if withdrawal is None:
            raise errors.NotReadyError(f"version {version} was published again meanwhile", code="FAILED_PRECONDITION",
                                       reason="not_ready", rank=self._session.rank_name, remedy="withdraw it again")
        return withdrawal

    def reclaim(self) -> None:
        """Withdraws every version that is not released. When it returns, the arrays may change; raises as `withdraw`."""
        with self._lock:
            held = list(self._releases)
        for version in held:
            try:
                self.withdraw(version)
            except errors.WeightwireError:
                if self.attached:  # else what the agent held has ended with the session
                    raise

    def _ask_to_withdraw(self, version: int, if_accepted: bool, timeout: float | None = None) -> Withdrawal | None:
        """None: it is accepted, and `if_accepted` was not said."""
        reply = self._session.call("WithdrawVersion", agent_pb2.WithdrawRequest(
            version=version, number=self._calls, if_accepted=if_accepted), timeout)
        withdrawal = _WITHDRAWALS.get(reply.withdrawal)
        if self._in_doubt is not None and self._in_doubt.version == version:
            self._in_doubt = None
        with self._lock:
            release = self._releases.get(version)
            if release is not None and withdrawal == "revoked":
                del self._releases[version]
        if release is not None:
            release._accepted = withdrawal != "revoked"
            if withdrawal == "revoked":
                release._finish(0, errors.AbortedError(f"version {version} was withdrawn by its publisher", code="ABORTED",
                                                       reason="abort_requested", rank=self._session.rank_name,
                                                       remedy="publish it again"))
        return withdrawal

    def _release_of(self, version: int) -> Release:
        with self._lock:
            return self._releases.setdefault(version, Release(version, self._progress))

    def _not_accepted(self, release: Release) -> None:
        """The agent's refusal of a repeat says nothing of the version that is held."""
        if release._accepted:
            return
        with self._lock:
            self._releases.pop(release.version, None)

    def _withdraw_unanswered(self, release: Release, error: errors.WeightwireError) -> bool:
        """True: it was accepted, and its release comes. Else `error` says what became of it."""
        self._in_doubt = release
        told = "" if isinstance(error, errors.DeadlineError) or not error.remedy else f"; {error.remedy}"
        try:
            withdrawal = self._ask_to_withdraw(release.version, if_accepted=False)
        except errors.WeightwireError as unconfirmed:
            if not self.attached or unconfirmed.code == "UNIMPLEMENTED":
                self._in_doubt = None  # what the agent held has ended with the session; or it is too old to be asked
            if self.attached:
                error.remedy = (f"nor did the agent confirm that it withdrew the version ({unconfirmed.code}): it may still be "
                                f"read, and the arrays must not change until `withdraw({release.version})` or a publish has "
                                f"returned{told}")
            return False
        if withdrawal != "revoked":
            return True
        error.remedy = f"it was withdrawn: no engine will serve it, and the arrays may change; publish again{told}"
        return False

    def _interrupted(self, release: Release) -> None:
        self._in_doubt = release
        try:
            self._ask_to_withdraw(release.version, if_accepted=True)
        except errors.WeightwireError as unconfirmed:
            if self.attached:
                _log.warning("version %d may still be read, and its arrays must not change until withdraw(%d) has returned: "
                             "%s", release.version, release.version, unconfirmed)

    def _settle(self, doubt: Release, version: int) -> Release | None:
        """The bytes of a version that nobody waits for must be let go before other ones are published; a repeat of that
        version finds out itself, unless it is over already."""
        if doubt.version != version:
            self.withdraw(doubt.version)
            return None
        self._in_doubt = None
        return doubt if doubt.released and doubt._error is None else None

    def _on_event(self, event: agent_pb2.AttachEvent) -> None:
        if event.WhichOneof("kind") != "released":
            return
        with self._lock:
            release = self._releases.pop(event.released.version, None)
        if release:
            release._finish(event.released.epoch, errors.from_outcome(event.released.why))

    def _on_end(self, error: errors.WeightwireError) -> None:
        with self._lock:
            waiting, self._releases = list(self._releases.values()), {}
        for release in waiting:
            release._finish(0, error)

    def close(self) -> None:
        self._session.close()
        if self._arena:
            self._arena.close()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
