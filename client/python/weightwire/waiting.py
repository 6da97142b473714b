"""What it means to wait for a version: the same rules for the synchronous and the asynchronous client."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Generic, Sequence, TypeVar

from weightwire import errors
from weightwire.status import EpochStatus, JobStatus


@dataclass(frozen=True)
class Progress:
    """How far a version is, as the server reports it."""

    version: int
    stage: str  #: a phase of the epoch, or "waiting" before there is one
    epoch: int = 0
    attempt: int = 0
    bytes_done: int = 0
    bytes_total: int = 0  #: 0: not known at this place
    waiting_for: str = ""
    transfer_seconds: float = field(default=0.0, compare=False)  #: since bytes began to move

    @property
    def percent(self) -> float | None:
        """Of all bytes so many have arrived, from 0 to 100; None where it is not known."""
        return 100 * self.bytes_done / self.bytes_total if self.bytes_total > 0 else None

    @property
    def bytes_per_second(self) -> float | None:
        """The mean since the transfer began; None where it is not known, or before anything has arrived."""
        known = self.bytes_total > 0 and self.bytes_done > 0 and self.transfer_seconds > 0
        return self.bytes_done / self.transfer_seconds if known else None

    @property
    def seconds_left(self) -> float | None:
        """Until all has arrived, at that rate; None where it is not known."""
        rate = self.bytes_per_second
        return (self.bytes_total - self.bytes_done) / rate if rate else None


ProgressCallback = Callable[[Progress], Any]
Found = TypeVar("Found")


class VersionWait(Generic[Found]):
    """Looks at one status after the other until a version is where it was asked to be."""

    def __init__(self, version: int, on_progress: ProgressCallback | None):
        self.version = version
        self._on_progress = on_progress
        self._told: Progress | None = None
        self._last: JobStatus | None = None
        self._unreachable: errors.WeightwireError | None = None

    def feed(self, status: JobStatus) -> Found | None:
        """What was waited for, once it holds; None before."""
        raise NotImplementedError

    def lost(self, error: errors.UnavailableError) -> None:
        """The coordinator went away; it is asked again until the deadline."""
        self._unreachable = error

    def _look(self, status: JobStatus) -> EpochStatus | None:
        self._last, self._unreachable = status, None
        epoch = status.epoch_of(self.version)
        if epoch is None:
            now = Progress(self.version, "waiting", waiting_for=status.waiting_for)
        else:
            now = Progress(self.version, epoch.phase, epoch.epoch, epoch.attempt,
                           max(epoch.bytes, epoch.bytes_done), epoch.bytes_total, status.waiting_for,
                           epoch.seconds["transfer"])
        if self._on_progress is not None and now != self._told:
            self._told = now
            self._on_progress(now)
        return epoch

    def deadline(self, what: str, timeout: float) -> errors.DeadlineError:
        """The error for a wait that took too long; says what is missing."""
        if self._unreachable is not None:
            why = f"the coordinator cannot be reached: {self._unreachable}"
        elif self._last is None:
            why = "the coordinator did not answer"
        else:
            epoch = self._last.epoch_of(self.version)
            why = f"everyone waits for: {self._last.waiting_for}" if self._last.waiting_for else "nothing is under way"
            if epoch is not None and epoch.why is not None:
                why += f"; epoch {epoch.epoch} was aborted: {epoch.why}"
        return errors.DeadlineError(f"version {self.version} is not {what} after {timeout:g} s: {why}",
                                    code="DEADLINE_EXCEEDED", reason="deadline_exceeded")


class ServedWait(VersionWait[JobStatus]):
    """Until engines serve the version or a newer one of its lineage: those that are named, or all that are complete."""

    def __init__(self, version: int, engines: Sequence[str], on_progress: ProgressCallback | None, lineage: int | None = None):
        super().__init__(version, on_progress)
        self._engines = frozenset(engines)
        self._lineage = lineage

    def feed(self, status: JobStatus) -> JobStatus | None:
        self._look(status)
        if self._engines:
            asked = [e for e in status.engines if e.name in self._engines]
            complete = len(asked) == len(self._engines)
        else:
            asked = [e for e in status.engines if e.ranks_present == e.world_size]
            complete = bool(asked)
        newest = status.lineage or 1  # of a coordinator that knows none
        wanted = self._lineage or newest
        if status.committed_lineage > wanted:
            raise errors.StaleError(f"version {self.version} of lineage {wanted} was asked for, which has ended: version "
                                    f"{status.committed_version} of lineage {status.committed_lineage} is committed",
                                    code="FAILED_PRECONDITION", reason="stale_version",
                                    remedy=f"wait for a version of lineage {status.committed_lineage}")
        served = all(e.epoch and (e.lineage if status.lineage else 1) == wanted and e.version >= self.version for e in asked)
        return status if complete and served else None


class EpochWait(VersionWait[JobStatus]):
    """Until every complete engine serves a committed epoch or a later one: what `version` cannot say after a
    rollback, when engines that are not there yet serve a greater one."""

    def __init__(self, epoch: int, version: int):
        super().__init__(version, None)
        self._epoch = epoch

    def feed(self, status: JobStatus) -> JobStatus | None:
        self._look(status)
        asked = [e for e in status.engines if e.ranks_present == e.world_size]
        return status if asked and all(e.epoch >= self._epoch for e in asked) else None


class StagedWait(VersionWait[EpochStatus]):
    """Until a version that was published with manual_commit is staged everywhere."""

    def feed(self, status: JobStatus) -> EpochStatus | None:
        """The epoch to commit or abort. StaleError when the version is decided already."""
        epoch = self._look(status)
        if epoch is not None and epoch.phase in ("committing", "committed"):
            raise errors.StaleError(f"version {self.version} is {epoch.phase} already; it was not published with "
                                    "manual_commit, or somebody else decided", code="FAILED_PRECONDITION",
                                    reason="stale_epoch", epoch=epoch.epoch)
        return epoch if epoch is not None and epoch.phase == "staged" else None
