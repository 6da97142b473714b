"""A trainer that starts anew from an earlier step than what is committed, with every byte of every engine compared before it
flips: real processes, each trainer one of its own, and a coordinator that is killed in between."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from conftest import BINARIES, until
from coordinator_job import CONFIG, Job, content
from demo import oracle
from weightwire import Client, JobStatus, StaleError
from weightwire.v1 import coordinator_pb2
from weightwire.waiting import ServedWait

#: One process with every rank of a trainer: reads "VERSION LINEAGE SEED" lines, answers "released EPOCH LINEAGE" or an error.
TRAINER = textwrap.dedent("""
    import sys
    import time
    from coordinator_job import CONFIG, TRAINERS, content, metas
    from demo import checkpoint, oracle
    from weightwire import Publisher
    from weightwire.errors import UnavailableError, WeightwireError

    def shards(contents):
        return [list(oracle.megatron(CONFIG, contents, TRAINERS, 1, rank)) for rank in range(TRAINERS)]

    def attach(rank):
        end = time.monotonic() + 30  # the agent finds its coordinator again after a while
        while True:
            try:
                return Publisher(rank=rank, world_size=TRAINERS, agent=sys.argv[1])
            except UnavailableError:
                if time.monotonic() > end:
                    raise
            time.sleep(0.05)

    publishers = [attach(rank) for rank in range(TRAINERS)]
    arrays = [publisher.bind(CONFIG, f"megatron:tp{TRAINERS}", metas({name: array.shape for name, array in shard}))
              for publisher, shard in zip(publishers, shards(checkpoint.empty(CONFIG)))]
    print("attached", flush=True)
    for line in sys.stdin:
        version, lineage, seed = line.split()
        wanted = None if lineage == "-" else lineage if lineage == "resume" else int(lineage)
        for params, shard in zip(arrays, shards(content(int(seed)))):
            for name, array in shard:
                params[name][...] = array
        try:
            releases = [publisher.publish(int(version), lineage=wanted, deadline=60) for publisher in publishers]
            for release in releases:
                release.wait_released(60)
            print("released", releases[0].epoch, publishers[0].lineage, flush=True)
        except WeightwireError as error:
            print(type(error).__name__, " ".join(str(error).split()), flush=True)
""")


class Trainer:
    """One life of a trainer."""

    def __init__(self, job: Job):
        self.process = subprocess.Popen([sys.executable, "-c", TRAINER, job.agents[0].agent_socket], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        assert self.answer() == "attached"

    def ask(self, version: int, lineage: str, seed: int) -> None:
        self.process.stdin.write(f"{version} {lineage} {seed}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        return self.process.stdout.readline().strip()

    def publish(self, version: int, lineage: str, seed: int) -> str:
        self.ask(version, lineage, seed)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Lineages(Job):
    """The bytes that engines must have belong to (lineage, version), not to a number alone."""

    def __init__(self, directory):
        self.seeds: dict[tuple[int, int], int] = {}
        super().__init__(directory)

    def wanted(self, version: int):
        raise AssertionError("a version alone says nothing here")

    def start_members(self) -> None:
        super().start_members()
        for engine in self.engines:
            engine.differences = lambda params, version, engine=engine: self.differences(engine, params)

    def differences(self, engine, params) -> list[str]:
        lineage, version = engine.subscriber.serving.order
        want = oracle.vllm(CONFIG, content(self.seeds[lineage, version]), 1, 0)
        return [f"{engine.name}: {name} is not that of version {version} of lineage {lineage}" for name, want in want
                if not np.array_equal(params[name][:len(want)], want)]

    def served(self, lineage: int, version: int) -> bool:
        return all(e.subscriber.serving and e.subscriber.serving.order == (lineage, version) for e in self.engines)

    def restart_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator = self.start_coordinator(self.address)


@pytest.fixture
def job(tmp_path):
    opened = Lineages(tmp_path)
    trainers: list[Trainer] = []
    opened.trainer = lambda: trainers.append(Trainer(opened)) or trainers[-1]
    yield opened
    for trainer in trainers:
        trainer.kill()
    opened.close()


def test_a_trainer_goes_back_and_its_versions_are_not_taken_for_those_before(job):
    first = job.trainer()
    for version in (110, 120):
        job.seeds[1, version] = version
        assert first.publish(version, "-", version).endswith(" 1")
    until("version 120 is served", lambda: job.served(1, 120))
    first.kill()

    again = job.trainer()
    refused = again.publish(101, "-", 7)
    assert refused.startswith("StaleError") and "version 101 is not newer than version 120" in refused
    assert 'lineage="resume"' in refused, "it says what to set"
    assert job.served(1, 120)

    job.seeds[2, 101], job.seeds[2, 110] = 1001, 1010
    again.ask(101, "resume", 1001)
    job.restart_coordinator()  # before, in or after the decision: whatever it was, it goes on
    assert again.answer().endswith(" 2")
    with Client(job.address) as client:
        client.wait_version(101, timeout=60, lineage=2)
        until("version 101 of lineage 2 is served", lambda: job.served(2, 101))
        with pytest.raises(StaleError, match="lineage 1 was asked for, which has ended"):
            client.wait_version(110, timeout=60, lineage=1)
        assert again.publish(110, "-", 1010).endswith(" 2"), "the lineage is said once"
        client.wait_version(110, timeout=60)
        status = client.status()
        assert (status.lineage, status.committed_lineage, status.committed_version) == (2, 2, 110)
        assert {(e.lineage, e.version) for e in status.engines} == {(2, 110)}
        until("version 110 of lineage 2 is served", lambda: job.served(2, 110))
        back = client.rollback(101)
        assert (back.lineage, back.version) == (2, 101)
        until("version 101 of lineage 2 is served again", lambda: job.served(2, 101))

    job.restart_coordinator()
    again.kill()
    zombie = job.trainer()  # the trainer before, which never heard of it, is faster than the next life of this one
    fenced = zombie.publish(121, "-", 9)
    assert fenced.startswith("StaleError") and "version 121 is of lineage 1, which has ended: version 101 of lineage 2" in fenced
    assert "lineage=2" in fenced and "lineage=3" in fenced
    zombie.kill()
    with Client(job.address) as client:
        assert client.status().committed_version == 101
        assert job.coordinator.counter("weightwire_lineage") == 2
        assert job.coordinator.counter('weightwire_fenced_requests_total{cause="stale_incarnation"}') >= 1
    said = subprocess.run([BINARIES / "wwctl", "status", "--address", job.address], text=True, capture_output=True, check=True).stdout
    assert "version 101 (lineage 2) committed" in said
    assert not [engine.name for engine in job.engines if engine.gaps], "an engine served nothing for a while"
    job.check()


def status(lineage: int, committed: tuple[int, int], *engines: tuple[int, int]) -> JobStatus:
    return JobStatus.from_proto(coordinator_pb2.StatusResponse(
        lineage=lineage, committed_lineage=committed[0], committed_version=committed[1], committed_epoch=9, engines=[
            coordinator_pb2.StatusResponse.Engine(name=f"engine-{i}", serving_epoch=9, lineage=of, version=version,
                                                  ranks_present=1, world_size=1) for i, (of, version) in enumerate(engines)]))


@pytest.mark.parametrize("lineage, now, served", [
    (None, status(1, (1, 120), (1, 120), (1, 101)), True),
    (None, status(1, (1, 120), (1, 120), (1, 100)), False),
    (None, status(2, (1, 120), (1, 120)), False),  # a trainer has published 101 of lineage 2
    (None, status(2, (2, 101), (2, 101), (1, 120)), False),  # an engine that is behind
    (None, status(2, (2, 101), (2, 101), (0, 120)), False),  # what is not known is not served
    (None, status(2, (2, 102), (2, 102), (2, 101)), True),
    (2, status(1, (1, 120), (1, 120)), False),  # it is yet to begin
    (2, status(2, (2, 101), (2, 101)), True),
    (1, status(2, (1, 120), (1, 120)), True),  # it has not ended yet, or everybody was rolled back to it
    (None, status(0, (0, 120), (0, 120)), True),  # a coordinator that knows none
    (2, status(0, (0, 120), (0, 120)), False),
])
def test_a_version_is_waited_for_in_its_lineage(lineage, now, served):
    assert bool(ServedWait(101, (), None, lineage).feed(now)) == served


def test_a_version_of_an_ended_lineage_is_not_waited_for():
    with pytest.raises(StaleError, match="version 110 of lineage 1 was asked for, which has ended"):
        ServedWait(110, (), None, 1).feed(status(2, (2, 120), (2, 120)))
