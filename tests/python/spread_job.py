"""The job of coordinator_job with each party on a host of its own: the coordinator, the trainer, two engines. What is done to
their network is the test's; what must hold whatever that is, is here."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import NamedTuple

from google.protobuf import json_format
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import types_pb2

import netns
from conftest import BINARIES
from coordinator_job import Follower, Job
from demo.fleet import Daemon
from weightwire.errors import WeightwireError

ENGINES = ("engine-0", "engine-1")
GRACE = 15.0  # beyond a version's deadline, until who waits for it must know how it ended: drains, and a loaded machine
_COMMITTED, _ABORTED = types_pb2.EPOCH_PHASE_COMMITTED, types_pb2.EPOCH_PHASE_ABORTED


class Cut(NamedTuple):
    """Who does not hear whom; or whose link is down."""

    deaf: tuple[tuple[str, str], ...]  # (who, whom)
    unplugged: str = ""

    def __str__(self) -> str:
        if self.unplugged:
            return f"{self.unplugged}-down"
        (who, whom), *back = self.deaf
        return f"{who}-and-{whom}" if back else f"{whom}-to-{who}"

    def make(self, job: SpreadJob) -> None:
        if self.unplugged:
            job.hosts[self.unplugged].unplug()
        for who, whom in self.deaf:
            job.hosts[who].deafen(job.hosts[whom])

    def between(self, a: str, b: str) -> bool:
        return self.unplugged in (a, b) or {(a, b), (b, a)} & set(self.deaf) != set()


def every_cut(parties: tuple[str, ...]) -> list[Cut]:
    cuts = [Cut((), party) for party in parties]
    for a, b in itertools.combinations(parties, 2):
        cuts += [Cut(((a, b), (b, a))), Cut(((a, b),)), Cut(((b, a),))]
    return cuts


class SpreadJob(Job):
    """Leases are short. A stream that stands still is given up before a version's deadline."""

    engine_names: tuple[str, ...] = ENGINES

    def __init__(self, directory, network: netns.Network, agents: dict | None = None, **options):
        """`agents`: for every agent; `options`: for the coordinator."""
        self._agent_options = {"progress_timeout_ms": 2500, **(agents or {})}
        self.parties = ("coordinator", "trainer", *self.engine_names)
        self.network, self.hosts = network, dict(zip(self.parties, network.hosts))
        self._ended: dict[int, tuple[int, int]] = {}  # by epoch: version, and how
        self._excused: dict[str, int] = {}  # gaps of engines that had a reason
        super().__init__(directory, **{"lease_ms": 3000, "heartbeat_ms": 500, "prepare_deadline_ms": 5000,
                                       **self.security("coordinator"), **options})

    def security(self, _party: str) -> dict[str, str]:
        """Settings of one party's daemon."""
        return {"insecure": "true"}

    def start_coordinator(self, listen: str) -> Daemon:
        daemon = self.hosts["coordinator"].call(super().start_coordinator, "0.0.0.0:7411")
        daemon.grpc = f"{self.hosts['coordinator'].address}:7411"
        return daemon

    def start_members(self) -> None:
        for name in self.parties[1:]:
            self.agents.append(self.start_agent_of(name))
        self.engines = [self.start_engine(agent.name, agent.agent_socket) for agent in self.agents[1:]]

    def start_agent_of(self, party: str) -> Daemon:
        host = self.hosts[party]
        return host.call(self.start_agent, party, data_listen=f"{host.address}:0",
                         **{**self.security(party), **self._agent_options})

    def start_engine(self, name: str, agent: str) -> Follower:
        return Follower(name, agent, self.wanted)

    def wwctl(self, *words: str) -> str:
        """On the coordinator's own host: nothing that is cut lies between."""
        return self.hosts["coordinator"].run(str(BINARIES / "wwctl"), *words, "--address", "127.0.0.1:7411")

    def status(self) -> pb.StatusResponse:
        return json_format.Parse(self.wwctl("status", "--json"), pb.StatusResponse())

    def attend(self, releases: list, deadline: float) -> str:
        """How what was published ended for the trainer: "released", or why not. All of it ends."""
        end = time.monotonic() + deadline + GRACE
        outcomes = set()
        for release in releases:
            try:
                release.wait_released(max(0.0, end - time.monotonic()))
                outcomes.add("released")
            except WeightwireError as error:
                assert release.released, f"version {release.version} has not ended {GRACE} s after its deadline: {self.status()}"
                outcomes.add(str(error))
        return "; ".join(sorted(outcomes))

    def try_next(self, deadline: float) -> str:
        """Publishes the next version, whatever the network is like: how it ended."""
        try:
            return self.attend(self.publish(deadline), deadline)
        except WeightwireError as error:
            return f"refused: {error}"

    def serve_next(self, seconds_max: float) -> float:
        """The trainer's loop, attached anew where it was fenced, until one more version is served everywhere: how long it took."""
        started = time.monotonic()
        end = started + seconds_max
        while self.attend(self.accept_next(end), 60) != "released":
            assert time.monotonic() < end, f"no version went through: {self.status()}"
        self.serve_everywhere()
        took = time.monotonic() - started
        assert took < seconds_max
        self.until("every flip is of a committed epoch", self.flips_were_committed, 20)
        return took

    def excuse(self, engines: list[Follower]) -> None:
        """Their own process or agent was killed."""
        self._excused |= {engine.name: engine.gaps for engine in engines}

    def serve(self, engines: list[Follower]) -> None:
        for engine in engines:
            self.until(f"{engine.name} serves version {self.version}", lambda: engine.version == self.version, 30)
        self.check()

    def account(self) -> pb.StatusResponse:
        """No epoch ended in two ways, and no engine flipped to one that was aborted or is another version."""
        status = self.status()
        for e in status.epochs:
            if e.phase in (_COMMITTED, _ABORTED):
                ended = (e.version, e.phase)
                assert self._ended.setdefault(e.epoch, ended) == ended, f"epoch {e.epoch} ended twice: {status}"
        for engine in self.engines:
            for epoch, version in list(engine.contents.items()):
                assert self._ended.get(epoch, (version, _COMMITTED)) == (version, _COMMITTED), (
                    f"{engine.name} flipped to version {version} of epoch {epoch}: {status}")
        return status

    def flips_were_committed(self) -> bool:
        self.account()
        return all(epoch in self._ended for engine in self.engines for epoch in list(engine.contents))

    def compare_what_is_served(self) -> None:
        """Every engine serves, never stopped, and every byte is of the version that it names."""
        for engine in self.engines:
            assert (wrong := engine.compare()) == [], wrong
            assert engine.gaps == self._excused.get(engine.name, 0), f"{engine.name} stopped serving for a while"
        self.check()


@contextlib.contextmanager
def spread_job(directory, agents: dict | None = None, kind: type[SpreadJob] = SpreadJob, **options):
    """A job in which two versions went through."""
    network = netns.Network(2 + len(kind.engine_names))
    try:
        job = kind(directory, network, agents, **options)
        try:
            job.attach_trainer(time.monotonic() + 30)
            for _ in range(2):
                job.usual_seconds = job.serve_next(60)
            yield job
        finally:
            network.heal()
            job.close()
    finally:
        network.close()
