"""A job in which one process at a time can be armed: a coordinator with its journal on disk, the agent of two trainer
ranks, the agent of engine-a (TP2) and engine-b (TP1), and that of engine-c (TP1, one buffer, reads over tcp what engine-b
passes on). All ranks are in this process. Leases are short, so that what stands still is lost."""

from __future__ import annotations

import pathlib
import re
import time
from dataclasses import dataclass, field

from conftest import until
from coordinator_job import content, metas
from demo import checkpoint, oracle
from parts import Engine, Part
from weightwire import Client, Publisher
from weightwire.errors import WeightwireError

# Odd sizes: heads of 9, 89 rows of an MLP's half on each of two ranks, a vocabulary that nothing divides.
CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "hidden_size": 72, "intermediate_size": 178, "vocab_size": 517}
TRAINERS = 2
LEASE = 1.0
DEADLINE = 15.0  # of a version
RETRY_DEADLINE = 8.0  # of one that is followed by another when it fails
ACCEPTED_SECONDS_MAX = 10.0  # until the next version is accepted, once the fault is over
SERVED_SECONDS_MAX = 30.0
TRANSFER = {"slot_bytes": 16 << 10, "chunk_bytes": 8 << 10, "segment_bytes_max": 4 << 10}


def shapes_of(rank: int) -> dict:
    return {name: array.shape for name, array in
            oracle.megatron(CONFIG, checkpoint.empty(CONFIG), TRAINERS, 1, rank)}


@dataclass
class Outcome:
    """What became of the versions of a scenario, and what must hold of them."""

    releases: list = field(default_factory=list)
    refused: list[WeightwireError] = field(default_factory=list)
    never: set[int] = field(default_factory=set)  # versions that were aborted: nobody serves them


class Job:
    def __init__(self, directory: pathlib.Path):
        self.directory = directory
        self.contents: dict[int, dict] = {}
        self.version = 0
        self.parts: dict[str, Part] = {}
        self.publishers: list[Publisher] = []
        self.engines: list[Engine] = []
        self.client: Client | None = None

    def start(self) -> None:
        deadlines = {f"{phase}_deadline_ms": 5_000 for phase in ("prepare", "transfer", "commit", "abort")}
        self._start_part("coordinator", role="coordinator", listen="127.0.0.1:0", fanout="chain", heartbeat_ms=200,
                         lease_ms=int(1000 * LEASE), state_dir=self.directory / "coordinator/state", **deadlines)
        address = self.coordinator.config["listen"] = self.coordinator.daemon.grpc  # in every life
        for name, transports in (("trainer", "[shm, tcp]"), ("engine", "[shm, tcp]"), ("edge", "[tcp]")):
            self._start_part(name, role="agent", coordinator=address, transports=transports, progress_timeout_ms=4_000,
                             **TRANSFER)
        self.client = Client(address, timeout=10)
        for engine in (("engine-a", "engine", 2, 2), ("engine-b", "engine", 1, 2), ("engine-c", "edge", 1, 1)):
            self.engines.append(self._engine(*engine))
            self.engines[-1].bind()
        self.publish_until_served(time.monotonic())

    def _start_part(self, name: str, **config) -> None:
        self.parts[name] = Part(self.directory, name, **config)
        self.parts[name].start()

    @property
    def coordinator(self) -> Part:
        return self.parts["coordinator"]

    def _engine(self, name: str, part: str, tp: int, buffers: int) -> Engine:
        return Engine(name, self.parts[part].agent_socket, tp, buffers, CONFIG, self.contents)

    def replace_engine(self, index: int, end: float) -> None:
        """Its process ends; another one comes in its place, which has nothing. Again and again, as a supervisor would."""
        old = self.engines[index]
        old.close()
        part = "edge" if old.buffers == 1 else "engine"
        while True:
            try:
                new = self._engine(old.name, part, 1, old.buffers)
                new.bind()
                break
            except WeightwireError as error:
                assert time.monotonic() < end, f"{old.name} could not attach: {error}"
                time.sleep(0.05)
        new.wrong += old.wrong
        self.engines[index] = new

    # ---- trainer ----

    def attach_trainer(self, end: float) -> None:
        """As a supervisor would: all ranks again when one has lost its place."""
        if self.publishers and all(publisher.attached for publisher in self.publishers):
            return
        while True:
            try:
                return self.open_trainer()
            except WeightwireError as error:
                assert time.monotonic() < end, f"the trainer could not attach again: {error}"
                time.sleep(0.05)

    def open_trainer(self) -> None:
        self.close_trainer()
        for rank in range(TRAINERS):
            publisher = Publisher(rank=rank, world_size=TRAINERS, agent=self.parts["trainer"].agent_socket, timeout=10)
            self.publishers.append(publisher)
            publisher.arrays = publisher.bind(CONFIG, f"megatron:tp{TRAINERS}", metas(shapes_of(rank)))

    def close_trainer(self) -> None:
        publishers, self.publishers = self.publishers, []
        for publisher in publishers:
            publisher.close()

    def publish(self, outcome: Outcome, deadline: float = DEADLINE, **options) -> int:
        """The next version; what is accepted is in the outcome, and what is refused: no further rank publishes it then."""
        self.version += 1
        version = self.version
        self.contents[version] = content(version, CONFIG)
        for rank, publisher in enumerate(self.publishers):
            for name, array in oracle.megatron(CONFIG, self.contents[version], TRAINERS, 1, rank):
                publisher.arrays[name][...] = array
            try:
                outcome.releases.append(publisher.publish(version, deadline=deadline, **options))
            except WeightwireError as error:
                outcome.refused.append(error)
                break
        return version

    def publish_until_served(self, began: float) -> None:
        """The next version: accepted in time after `began`, released, and served by everyone. A fault that a process has
        not noticed yet may cost a version; never more than the time allows."""
        accepted, ended = began + ACCEPTED_SECONDS_MAX, began + ACCEPTED_SECONDS_MAX + SERVED_SECONDS_MAX
        while True:
            self.attach_trainer(accepted)
            outcome = Outcome()
            self.publish(outcome, RETRY_DEADLINE)
            assert not outcome.refused or time.monotonic() < accepted, f"no version was accepted: {outcome.refused}"
            errors = outcome.refused + await_releases(outcome.releases)
            if not errors:
                break
            time.sleep(0.05)
            assert time.monotonic() < ended, f"no version went through: {errors}"
        until(f"version {self.version} everywhere; {self.describe()}", self.all_serve, SERVED_SECONDS_MAX)

    def all_serve(self) -> bool:
        self.raise_wrong()
        return all(engine.serves(self.version) for engine in self.engines)

    # ---- what must hold ----

    def describe(self) -> str:
        return "; ".join(f"{engine.name}: {[rank.serving for rank in engine.ranks]} after {engine.flipped[-3:]}, "
                         f"fenced {[rank.last_fence for rank in engine.ranks]}" for engine in self.engines)

    def raise_wrong(self) -> None:
        wrong = [line for engine in self.engines for line in engine.wrong]
        assert not wrong, "\n".join(wrong)

    def check_commits(self) -> None:
        """What an engine served is what the journal knows."""
        seen = [flip for engine in self.engines for flip in engine.flipped]
        status = until("the coordinator answers", self.status, 20)
        assert max(seen)[0] <= status.committed_epoch, f"{max(seen)} was served, the journal knows {status.committed_epoch}"
        by_epoch: dict[int, set[int]] = {}
        for epoch, version in seen:
            by_epoch.setdefault(epoch, set()).add(version)
        assert all(len(versions) == 1 for versions in by_epoch.values()), f"two versions of one epoch: {by_epoch}"

    def status(self):
        try:
            return self.client.status()
        except WeightwireError:
            return None

    def leases_lost(self) -> bool:
        """Of agents that this machine left too little time, or that stood still."""
        return bool(re.search(r"^weightwire_lease_expiries_total\S* [1-9]", self.coordinator.daemon.metrics(), re.M))

    def close(self) -> list[str]:
        """What was wrong with the end."""
        self.close_trainer()
        for engine in self.engines:
            engine.close()
        if self.client is not None:
            self.client.close()
        codes = {name: part.stop() for name, part in reversed(self.parts.items())}
        wrong = [f"{name} ended with {code}" for name, code in codes.items() if code != 0]
        return wrong + [f"{name}: {line}" for name, part in self.parts.items() for line in part.log().splitlines()
                        if "Sanitizer" in line or "runtime error" in line]


def await_releases(releases: list) -> list[WeightwireError]:
    """Each ends within its version's deadline: the errors of those that were given up."""
    errors = []
    for release in releases:
        try:
            release.wait_released(DEADLINE + 10)
        except WeightwireError as error:
            assert release.released, f"version {release.version} was neither released nor given up"
            errors.append(error)
    return errors
