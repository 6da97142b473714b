"""A job whose coordinator is a daemon of its own with its journal on disk: two trainer ranks and three engines behind two
agents, all ranks in this process. Engines compare every byte before they flip."""

from __future__ import annotations

import os
import random
import threading
import time
import urllib.error
import urllib.request

import grpc
import numpy as np
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc

from conftest import BINARIES
from demo import checkpoint, oracle
from demo.fleet import Daemon
from weightwire import Publisher, Subscriber, TensorMeta
from weightwire.errors import StaleError, WeightwireError

SEED = int(os.environ.get("WEIGHTWIRE_SEED", "1"))
CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_000}
RATE = 60_000_000  # bytes a second: a version is long enough to be hit
TRAINERS = 2


def content(version: int, config: dict = CONFIG) -> dict[str, np.ndarray]:
    """What version `version` of the checkpoint holds: other bytes in every version."""
    random_bits = np.random.default_rng(version)
    return {name: random_bits.integers(0, 1 << 16, shape, dtype=np.uint16)
            for name, shape in checkpoint.hf_shapes(config).items()}


def metas(shapes: dict[str, tuple[int, ...]]) -> list[TensorMeta]:
    return [TensorMeta(name, "BF16", shape) for name, shape in shapes.items()]


class Follower:
    """An engine of one rank: flips to what it is offered, comparing every byte first."""

    def __init__(self, name: str, agent: str, wanted):
        self.name, self.wanted = name, wanted
        self.flipped: list[int] = []  # versions, in order
        self.contents: dict[int, int] = {}  # the versions again, by the epoch that committed them
        self.wrong: list[str] = []
        self._fences = 0
        self._fence: WeightwireError | None = None
        self.subscriber = Subscriber(group=name, rank=0, world_size=1, agent=agent)
        self.subscriber.bind(CONFIG, "vllm:tp1", metas(oracle.vllm_shapes(CONFIG, 1)))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                offer = self.subscriber.wait_offer(0.2)
                if offer is None:
                    continue
                wrong = self.differences(self.subscriber.flip(offer), offer.version)
                self.took(offer.content, offer.version, wrong)
                self.subscriber.acknowledge(offer)
            except StaleError:  # fenced meanwhile; what is served then is offered anew
                continue
            except WeightwireError:
                if self._stop.wait(0.05):
                    return

    def took(self, epoch: int, version: int, wrong: list[str]) -> None:
        self.wrong += wrong
        if not self.flipped:
            self._fence = self.subscriber.last_fence
        self.flipped.append(version)
        self.contents[epoch] = version

    @property
    def gaps(self) -> int:
        """Times that it stopped serving. It is the fence that counts, which stays to be seen: what a peer fills is served again
        after 0.1 s, which is over before anybody looks."""
        fence = self.subscriber.last_fence
        if fence is not self._fence:
            self._fence = fence
            self._fences += bool(self.flipped)
        return self._fences

    @property
    def version(self) -> int | None:
        """What it serves."""
        serving = self.subscriber.serving
        return serving.version if serving else None

    def compare(self) -> list[str]:
        """What of that is wrong now."""
        serving, params = self.subscriber.serving, self.subscriber.params
        if serving is None or params is None:
            return [f"{self.name} serves nothing: {self.subscriber.last_fence}"]
        return self.differences(params, serving.version)

    def differences(self, params, version: int) -> list[str]:
        """What of `params` is not that of `version`."""
        return [f"{self.name}: {name} is not that of version {version}" for name, want in self.wanted(version)
                if not np.array_equal(params[name][:len(want)], want)]

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)
        self.subscriber.close()


class Job:
    """The whole job; its coordinator is the one part that is hurt."""

    def __init__(self, directory, trainer: dict | None = None, **options):
        """`trainer`: for the trainer's agent; `options`: for the coordinator."""
        self.directory = str(directory)
        self.random = random.Random(SEED)
        self.options, self.trainer_options = options, trainer or {}
        self.version = 0
        self._contents: dict[int, dict] = {}
        self.publishers: list[Publisher] = []
        self.agents: list[Daemon] = []
        self.engines: list[Follower] = []
        self.coordinator = self.start_coordinator("127.0.0.1:0")
        self.address = self.coordinator.grpc
        try:
            self.start_members()
        except BaseException:
            for daemon in [*self.agents, self.coordinator]:
                daemon.kill()
            raise

    def start_members(self) -> None:
        """Agents, the trainer's first, and engines."""
        self.agents = [self.start_agent("trainer", **self.trainer_options), self.start_agent("rollout")]
        self.engines = [Follower(f"engine-{i}", self.agents[i > 0].agent_socket, self.wanted) for i in range(3)]

    def start_agent(self, name: str, **options) -> Daemon:
        return Daemon(str(BINARIES / "weightwired"), f"{self.directory}/{name}", name, role="agent",
                      **{"coordinator": self.address, "transports": "[tcp]", "rate_limit": RATE, "slot_bytes": 256 << 10,
                         "chunk_bytes": 128 << 10, "segment_bytes_max": 32 << 10, **options})

    def start_coordinator(self, listen: str) -> Daemon:
        return Daemon(str(BINARIES / "weightwired"), f"{self.directory}/coordinator", "coordinator", role="coordinator",
                      listen=listen, **{"state_dir": f"{self.directory}/coordinator", **self.options})

    def wanted(self, version: int):
        return oracle.vllm(CONFIG, self._contents[version], 1, 0)

    def status(self) -> pb.StatusResponse:
        with grpc.insecure_channel(self.address) as channel:
            return coordinator_pb2_grpc.CoordinatorStub(channel).Status(pb.StatusRequest(), timeout=10, wait_for_ready=True)

    def why_not_ready(self) -> str:
        """Of the coordinator: what /readyz says; empty when it is ready."""
        try:
            urllib.request.urlopen(f"http://{self.coordinator.http}/readyz", timeout=10).close()
            return ""
        except urllib.error.HTTPError as error:
            return error.read().decode()

    def ready(self) -> bool:
        return not self.why_not_ready()

    def until(self, what: str, condition, seconds: float):
        """The first answer of `condition` that is not false."""
        end = time.monotonic() + seconds
        while True:
            if answer := condition():
                return answer
            assert time.monotonic() < end, f"{what}: not within {seconds} s; {self.status()}"
            time.sleep(0.02)

    def attach_trainer(self, end: float) -> None:
        """Opens what is not attached, until `end`: the agents find their coordinator again after a while."""
        for publisher in self.publishers:
            publisher.close()
        self.publishers = []
        for rank in range(TRAINERS):
            shard = [(name, array.shape) for name, array in
                     oracle.megatron(CONFIG, checkpoint.empty(CONFIG), TRAINERS, 1, rank)]
            while True:
                publisher = None
                try:
                    publisher = Publisher(rank=rank, world_size=TRAINERS, agent=self.agents[0].agent_socket, timeout=5)
                    publisher.arrays = publisher.bind(CONFIG, f"megatron:tp{TRAINERS}", metas(dict(shard)))
                    break
                except WeightwireError:
                    if publisher:
                        publisher.close()
                    assert time.monotonic() < end, f"trainer/{rank} could not attach again"
                    time.sleep(0.05)
            self.publishers.append(publisher)

    def publish(self, deadline: float = 60) -> list:
        """The next version, accepted for every rank: the releases."""
        self.version += 1
        self._contents = {v: c for v, c in self._contents.items() if v >= self.version - 6}
        self._contents[self.version] = content(self.version)
        releases = []
        for rank, publisher in enumerate(self.publishers):
            for name, array in oracle.megatron(CONFIG, self._contents[self.version], TRAINERS, 1, rank):
                publisher.arrays[name][...] = array
            releases.append(publisher.publish(self.version, deadline=deadline))
        return releases

    def accept_next(self, end: float) -> list:
        """Attaches and publishes until a version was accepted for every rank, at the latest at `end`."""
        while True:
            self.attach_trainer(end)
            try:
                return self.publish()
            except WeightwireError:
                assert time.monotonic() < end, "no version was accepted in time"

    def serve_everywhere(self) -> None:
        self.until(f"version {self.version} everywhere",
                   lambda: all(engine.version == self.version for engine in self.engines), 60)
        self.check()

    def check(self) -> None:
        assert not [line for engine in self.engines for line in engine.wrong]

    def close(self) -> None:
        for part in self.publishers + self.engines:
            part.close()
        codes = [daemon.stop() for daemon in [*self.agents, self.coordinator]]
        assert not any(codes), codes
