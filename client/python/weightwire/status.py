"""What the coordinator says of its job, as plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Iterable, Mapping, Sequence

from weightwire import errors
from weightwire.v1 import coordinator_pb2, types_pb2


#: Epochs in one answer.
PAGE = 64


def _word(enum: Any, prefix: str, number: int) -> str:
    """ "serving" for ENGINE_STATE_SERVING; "unknown_<n>" for a number of a newer server."""
    try:
        return str(enum.Name(number))[len(prefix):].lower()
    except ValueError:
        return f"unknown_{number}"


@dataclass(frozen=True)
class ParticipantStatus:
    """One attached process."""

    name: str  #: "trainer/3"
    role: str  #: "trainer" or "engine"
    group: str
    rank: int
    world_size: int
    agent: str
    pid: int
    spec: str  #: its parallel layout as text; empty for explicit boxes
    has_layout: bool
    tensors: int
    bytes: int
    presence: str  #: "connected", "suspect" (its agent's connection ended, the lease has not) or "absent"
    cut_seconds: float  #: for so long it has not been connected; 0: it is

    @staticmethod
    def from_proto(p: Any) -> "ParticipantStatus":
        return ParticipantStatus(f"{p.group}/{p.rank}", _word(types_pb2.GroupRole, "GROUP_ROLE_", p.role), p.group,
                                 p.rank, p.world_size, p.agent_name, p.pid, p.spec, p.has_layout, p.tensors, p.bytes,
                                 p.presence or "connected", p.cut_seconds)


@dataclass(frozen=True)
class EngineStatus:
    """One rollout engine, all its ranks together."""

    name: str
    state: str  #: "incomplete", "empty", "filling", "serving", "staged", "installing", "dirty" or "cut_off"
    version: int  #: that it serves
    epoch: int  #: that it serves; 0: none
    ranks_present: int
    world_size: int
    lag_versions: int  #: away from what is committed; 0 only when it serves that
    last_error: str
    ready: bool  #: serves what is committed, or is about to change to it
    held_version: int  #: whole beside the one that it serves: the newest that `rollback` may go back to
    held_epoch: int  #: under which it was committed; 0: nothing is held
    drained: bool = False  #: by an operator: it takes no part in new versions
    busy_with: tuple[str, ...] = ()  #: of a drained one; empty: it may be stopped
    held_beyond: tuple[int, ...] = ()  #: further versions that it holds, newest first
    lineage: int = 0  #: of `version`; 0: not known, of one that is not committed any more

    @staticmethod
    def from_proto(e: Any) -> "EngineStatus":
        return EngineStatus(e.name, _word(coordinator_pb2.EngineState, "ENGINE_STATE_", e.state), e.version,
                            e.serving_epoch, e.ranks_present, e.world_size, e.lag_versions, e.last_error,
                            e.ready, e.held_version, e.held_epoch, e.drained, tuple(e.busy_with),
                            tuple(held.version for held in e.held_beyond), e.lineage)


@dataclass(frozen=True)
class EpochStatus:
    """One attempt to bring a version, or to fill an engine."""

    epoch: int
    kind: str  #: "publish", "fill" or "rollback"
    version: int
    phase: str  #: "preparing", "transferring", "staged", "committing", "committed", "aborting" or "aborted"
    attempt: int
    why: errors.WeightwireError | None  #: of an abort
    engines: tuple[str, ...]
    waiting_for: tuple[str, ...]
    seconds: Mapping[str, float]  #: "prepare", "transfer", "commit", "total"
    bytes: int  #: staged and verified so far
    bytes_by_transport: Mapping[str, int]  #: those that moved
    bytes_kept: int  #: those that the engines had already
    content_root: str  #: of what was committed, when it has been verified; else empty
    left_out: tuple[str, ...]  #: engines without which this attempt goes on (commit_policy)
    trace_id: str = ""  #: W3C, 32 hex digits: in the logs of every process that the version passes
    lineage: int = 0  #: of `version`; 0: not known
    waiting_for_left: int = 0  #: lines that `waiting_for` does not have: the coordinator sends the first 256
    delta_bytes: int = 0  #: of `bytes`: not moved, but made of what changed since earlier versions
    delta_code_bytes: int = 0  #: that were moved for them; part of `bytes_by_transport`
    delta_elements: int = 0  #: in `delta_bytes`
    delta_changed: int = 0  #: of `delta_elements`
    bytes_done: int = 0  #: while it runs: those that have arrived, as agents said last, of `bytes_total`
    bytes_total: int = 0  #: 0: not known, or the epoch has ended

    @staticmethod
    def from_proto(e: Any, engines: "_EngineTable | None" = None) -> "EpochStatus":
        engines = engines or _EngineTable(())
        return EpochStatus(
            e.epoch, _word(types_pb2.EpochKind, "EPOCH_KIND_", e.kind), e.version,
            _word(types_pb2.EpochPhase, "EPOCH_PHASE_", e.phase), e.attempt, errors.from_outcome(e.why),
            engines.named(e.engine_runs, e.engines), tuple(e.waiting_for),
            {"prepare": e.prepare_seconds, "transfer": e.transfer_seconds, "commit": e.commit_seconds,
             "total": e.total_seconds}, e.bytes, dict(e.bytes_by_transport), e.bytes_kept,
            e.content_root, engines.named(e.left_out_runs, e.left_out), e.trace_id, e.lineage, e.waiting_for_left,
            e.delta_bytes, e.delta_code_bytes, e.delta_elements, e.delta_changed, e.bytes_done, e.bytes_total)


class _EngineTable:
    """The engines that the epochs of one message name by number. Epochs of the same engines share them."""

    def __init__(self, names: Sequence[str]):
        self._names = tuple(names)
        self._known: dict[tuple[int, ...], tuple[str, ...]] = {}

    def named(self, runs: Sequence[int], names: Sequence[str]) -> tuple[str, ...]:
        """`names` as they are where there are no `runs` (pairs: the first one's number, how many)."""
        if not runs:
            return tuple(names)
        key = tuple(runs)
        if key not in self._known:
            found: list[str] = []
            for first, count in zip(key[::2], key[1::2]):
                if len(found) <= len(self._names):  # no epoch has an engine twice
                    found += self._names[first:first + count]
            self._known[key] = tuple(found)
        return self._known[key]


@dataclass(frozen=True)
class RolledBack:
    """A rollback that was committed."""

    epoch: int  #: under which the version is served now
    version: int
    held_epoch: int  #: under which its bytes were published; 0: it was committed already, nothing was done
    engines: tuple[str, ...]  #: that held it and serve it
    filling: tuple[str, ...]  #: that are being filled from them; `wait_epoch` waits for them
    lineage: int = 0  #: of `version`; 0: not known

    @staticmethod
    def from_proto(r: Any) -> "RolledBack":
        return RolledBack(r.epoch, r.version, r.held_epoch, tuple(r.engines), tuple(r.filling),
                          r.lineage)


@dataclass(frozen=True)
class EngineContent:
    """What one engine serves, as its own ranks summed it."""

    name: str
    epoch: int  #: under which its bytes were committed
    version: int
    why: errors.WeightwireError | None  #: it could not be read; what follows is empty then
    superseded: bool  #: because another epoch took over meanwhile: ask again
    content_class: str  #: of names, dtypes and counts of elements; only equal ones have comparable roots
    root: str
    tensors: int  #: below the root
    tensors_partial: int  #: that it does not hold whole: compared among its ranks only
    bytes: int  #: read, replicas included
    seconds: float  #: of its slowest rank

    @staticmethod
    def from_proto(e: Any) -> "EngineContent":
        return EngineContent(e.name, e.epoch, e.version, errors.from_outcome(e.why), e.superseded, e.content_class,
                             e.root, e.tensors, e.tensors_partial, e.bytes, e.seconds)


@dataclass(frozen=True)
class ContentDifference:
    """One tensor of one engine that is not what it should be."""

    engine: str
    ranks: tuple[int, ...]  #: of the engine: those that hold what differs
    tensor: str  #: Hugging Face name
    text: str


@dataclass(frozen=True)
class Verification:
    """What engines serve, compared."""

    equal: bool  #: every engine could be read and nothing differs
    engines: tuple[EngineContent, ...]
    differences: tuple[ContentDifference, ...]  #: the first 100
    differences_total: int
    seconds: float

    @staticmethod
    def from_proto(v: Any) -> "Verification":
        return Verification(v.equal, tuple(map(EngineContent.from_proto, v.engines)),
                            tuple(ContentDifference(d.engine, tuple(d.ranks), d.tensor, d.text)
                                  for d in v.differences), v.differences_total, v.seconds)


@dataclass(frozen=True)
class JobStatus:
    """The whole job at one moment."""

    job: str
    committed_epoch: int
    committed_version: int
    deciding: bool  #: False: the journal failed; nothing is decided until an operator acts
    waiting_for: str  #: what everyone waits for, as one line; empty: nothing
    participants: tuple[ParticipantStatus, ...]
    engines: tuple[EngineStatus, ...]
    epochs: tuple[EpochStatus, ...]  #: newest first
    agents: int
    committed_lineage: int = 0  #: of `committed_version`; 0: not known
    #: The newest one, committed or about to begin: versions of it come after all of the others. 0: of a coordinator that
    #: knows no lineages.
    lineage: int = 0
    epochs_left: int = 0  #: older ones that the coordinator remembers and that were not asked for
    participants_total: int = 0  #: whether `participants` were asked for or not

    @staticmethod
    def from_proto(s: Any) -> "JobStatus":
        engines = _EngineTable([*(engine.name for engine in s.engines), *s.engine_names])
        return JobStatus(s.job, s.committed_epoch, s.committed_version, s.deciding, s.waiting_for,
                         tuple(map(ParticipantStatus.from_proto, s.participants)),
                         tuple(map(EngineStatus.from_proto, s.engines)),
                         tuple(EpochStatus.from_proto(epoch, engines) for epoch in s.epochs), s.agents,
                         s.committed_lineage, s.lineage, s.epochs_left, max(s.participants_total, len(s.participants)))

    @property
    def unused_version(self) -> int:
        """The first number above all versions that the coordinator remembers."""
        return 1 + max([self.committed_version, *(epoch.version for epoch in self.epochs)])

    def epoch_of(self, version: int) -> EpochStatus | None:
        """The newest attempt to publish `version`, if it is still remembered."""
        return next((e for e in self.epochs if e.kind == "publish" and e.version == version), None)


class StatusPages:
    """One status, asked for page by page: `request` is what to ask for next."""

    def __init__(self, epochs: int | None, participants: bool):
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be 1 or more, or None for all of them, not {epochs}")
        self._most = epochs
        self.request = status_request(PAGE, participants)
        self._status: JobStatus | None = None
        self._next(0)

    def _next(self, had: int) -> None:
        self.request.epochs_max = PAGE if self._most is None else min(PAGE, self._most - had)

    def feed(self, reply: Any) -> JobStatus | None:
        """The whole once it is there; None: there is another page."""
        page = JobStatus.from_proto(reply)
        had = self._status
        if had is not None:
            fresh = tuple(epoch for epoch in page.epochs if epoch.epoch < self.request.epochs_before)
            # Those that were left may have been forgotten meanwhile.
            page = replace(had, epochs=had.epochs + fresh, epochs_left=page.epochs_left if fresh else 0)
        if self._most is not None and len(page.epochs) > self._most:  # a coordinator that knows no pages sends all
            over = len(page.epochs) - self._most
            page = replace(page, epochs=page.epochs[:self._most], epochs_left=page.epochs_left + over)
        self._status = page
        if not page.epochs or not page.epochs_left or len(page.epochs) == self._most:
            return page
        self.request.epochs_before = page.epochs[-1].epoch
        self._next(len(page.epochs))
        return None


def status_request(epochs: int = 0, participants: bool = True) -> Any:
    """Names of engines once; 0 epochs: all that the coordinator remembers."""
    return coordinator_pb2.StatusRequest(epochs_max=epochs, engine_runs=True, no_participants=not participants)


@dataclass(frozen=True)
class Event:
    """Something changed between two looks at a job."""

    kind: str  #: "participant", "engine" or "epoch"
    name: str  #: "trainer/3", "engine-a" or the epoch's number
    before: str  #: state or phase; empty: it was not there
    after: str  #: state or phase; empty: it is gone
    version: int = 0  #: of an engine or an epoch, afterwards


def _states(status: JobStatus | None) -> dict[tuple[str, str], tuple[str, int]]:
    if status is None:
        return {}
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for p in status.participants:
        found["participant", p.name] = ("ready" if p.has_layout else "registered", 0)
    for engine in status.engines:
        found["engine", engine.name] = (engine.state, engine.version)
    for epoch in reversed(status.epochs):
        found["epoch", str(epoch.epoch)] = (epoch.phase, epoch.version)
    return found


def changes(before: JobStatus | None, after: JobStatus) -> Iterable[Event]:
    """What became different. An epoch that the coordinator no longer remembers is no event."""
    old, new = _states(before), _states(after)
    for (kind, name), (state, version) in new.items():
        was = old.get((kind, name), ("", 0))
        if was != (state, version):
            yield Event(kind, name, was[0], state, version)
    for (kind, name), (state, version) in old.items():
        if (kind, name) not in new and kind != "epoch":
            yield Event(kind, name, state, "", version)
