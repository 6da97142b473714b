"""The job of coordinator_job with each party on a host of its own: the coordinator, the trainer, two engines. What is done to
their network is the test's; what must hold whatever that is, is here."""

from __future__ import annotations

import contextlib
import time

from google.protobuf import json_format
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import types_pb2

import netns
from conftest import BINARIES
from coordinator_job import Follower, Job
from demo.fleet import Daemon
from weightwire.errors import WeightwireError

ENGINES = ("engine-0", "engine-1")
PARTIES = ("coordinator", "trainer", *ENGINES)
GRACE = 15.0  # beyond a version's deadline, until who waits for it must know how it ended: drains, and a loaded machine
_COMMITTED, _ABORTED = types_pb2.EPOCH_PHASE_COMMITTED, types_pb2.EPOCH_PHASE_ABORTED


class SpreadJob(Job):
    """Leases are short. A stream that stands still is given up before a version's deadline."""

    def __init__(self, directory, network: netns.Network, agents: dict | None = None, **options):
        """`agents`: for every agent; `options`: for the coordinator."""
        self._agent_options = {"progress_timeout_ms": 2500, "insecure": "true", **(agents or {})}
        self.network, self.hosts = network, dict(zip(PARTIES, network.hosts))
        self._ended: dict[int, tuple[int, int]] = {}  # by epoch: version, and how
        super().__init__(directory, **{"lease_ms": 3000, "heartbeat_ms": 500, "prepare_deadline_ms": 5000, "insecure": "true",
                                       **options})

    def start_coordinator(self, listen: str) -> Daemon:
        daemon = self.hosts["coordinator"].call(super().start_coordinator, "0.0.0.0:7411")
        daemon.grpc = f"{self.hosts['coordinator'].address}:7411"
        return daemon

    def start_members(self) -> None:
        for name in PARTIES[1:]:
            host = self.hosts[name]
            self.agents.append(host.call(self.start_agent, name, data_listen=f"{host.address}:0",
                                         **self._agent_options))
        self.engines = [Follower(agent.name, agent.agent_socket, self.wanted) for agent in self.agents[1:]]

    def status(self) -> pb.StatusResponse:
        """As the coordinator's own host sees it: nothing that is cut lies between."""
        text = self.hosts["coordinator"].run(str(BINARIES / "wwctl"), "status", "--json", "--address", "127.0.0.1:7411")
        return json_format.Parse(text, pb.StatusResponse())

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
        self.until("every flip is of a committed epoch", self._flips_were_committed, 20)
        for engine in self.engines:
            engine.gaps = 0  # who was fenced for good reason served nothing until it was filled
        return took

    def serve(self, engines: list[Follower]) -> None:
        for engine in engines:
            self.until(f"{engine.name} serves version {self.version}", lambda: engine.subscriber.serving
                       and engine.subscriber.serving.version == self.version, 30)
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

    def _flips_were_committed(self) -> bool:
        self.account()
        return all(epoch in self._ended for engine in self.engines for epoch in list(engine.contents))

    def compare_what_is_served(self) -> None:
        """Every engine serves, never stopped, and every byte is of the version that it names."""
        for engine in self.engines:
            serving, params = engine.subscriber.serving, engine.subscriber.params
            assert serving and not engine.gaps, f"{engine.name} stopped serving: {engine.subscriber.last_fence}"
            assert (wrong := engine.differences(params, serving.version)) == [], wrong
        self.check()


@contextlib.contextmanager
def spread_job(directory, agents: dict | None = None, **options):
    """A job in which two versions went through."""
    network = netns.Network(len(PARTIES))
    try:
        job = SpreadJob(directory, network, agents, **options)
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
