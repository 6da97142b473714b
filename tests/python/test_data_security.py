"""`integrity: mac` between real agents: who changes, repeats, exchanges or leaves out frames on the way is noticed, counted
and told, and the version is committed all the same, by another attempt. And who does not seal is refused."""

from __future__ import annotations

import subprocess
import time

import pytest

from certificates import Authority, settings
from conftest import BINARIES
from coordinator_job import Job
from frame_relay import ATTACKS, FrameRelay
from weightwire import Client
from weightwire.errors import WeightwireError

FORGED = 'weightwire_auth_failures_total{reason="mac"}'
JOB = {"job": "default"}
REFUSED = 64 + 36


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


class SealedJob(Job):
    """A job whose agents speak TLS to its coordinator and, where `options` do not say otherwise, seal their frames."""

    def __init__(self, directory, authority: Authority, trainer: dict | None = None, integrity: str = "mac"):
        self.own = settings(authority.issue("agent", "agent", **JOB))
        self.operator = authority.issue("operator", "operator", **JOB)
        self.integrity = integrity
        super().__init__(directory, trainer, **settings(authority.issue("coordinator", "coordinator", **JOB)))

    def start_agent(self, name: str, **options):
        return super().start_agent(name, **{**self.own, "integrity": self.integrity, **options})

    def status(self):
        with Client(self.address, tls=self.operator) as client:
            return client.status()

    def forged(self) -> float:
        return sum(agent.counter(FORGED) for agent in self.agents)

    def commit(self) -> None:
        for release in self.publish():
            release.wait_released(60)
        self.serve_everywhere()

    def logs(self) -> str:
        return "".join(open(daemon._log_path).read() for daemon in [*self.agents, self.coordinator])


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_is_changed_on_the_way_is_refused_and_the_version_comes_all_the_same(tmp_path, authority, attack):
    relay = FrameRelay(sealed=True)
    job = SealedJob(tmp_path, authority, trainer={"data_listen": f"127.0.0.1:{relay.port}", "advertise_host": "127.0.0.2"})
    try:
        job.attach_trainer(time.monotonic() + 30)
        job.commit()
        assert job.forged() == 0
        for strikes in range(1, 6):
            relay.arm(attack)
            job.commit()
            assert relay.done.is_set()
            assert job.forged() == strikes
            if told := [line for line in job.logs().splitlines() if "its MAC does not fit" in line]:
                break  # else the frame was the last one of the version, whose bytes were all there
        assert any("epoch" in line and "incarnation" in line for line in told), told
        job.commit()
        assert job.forged() == strikes
    finally:
        job.close()
        relay.close()


def test_under_crc_it_is_a_sum_that_notices(tmp_path, authority):
    """The relay does what it says."""
    relay = FrameRelay(sealed=False)
    job = SealedJob(tmp_path, authority, integrity="crc",
                    trainer={"data_listen": f"127.0.0.1:{relay.port}", "advertise_host": "127.0.0.2"})
    try:
        job.attach_trainer(time.monotonic() + 30)
        relay.arm("alter")
        job.commit()  # the sums of transfer notice, and the segment is read again
        assert relay.done.is_set() and job.forged() == 0
        assert sum(agent.counter('weightwire_digest_failures_total{transport="tcp"}') for agent in job.agents) == 1
    finally:
        job.close()
        relay.close()


@pytest.mark.parametrize("trainer, rollout", [("crc", "mac"), ("mac", "crc")])
def test_who_does_not_seal_is_refused_by_who_does(tmp_path, authority, trainer, rollout):
    job = SealedJob(tmp_path, authority, trainer={"integrity": trainer}, integrity=rollout)
    try:
        job.attach_trainer(time.monotonic() + 30)
        with pytest.raises(WeightwireError, match="integrity is mac"):
            for release in job.publish():
                release.wait_released(60)
        assert all(engine.version is None for engine in job.engines)
    finally:
        job.close()


def start(tmp_path, **options) -> subprocess.CompletedProcess:
    """An agent that is to refuse its settings."""
    given = {"role": "agent", "coordinator": "127.0.0.1:1", "http": "127.0.0.1:0", "agent_socket": f"{tmp_path}/a/agent.sock", **options}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    return subprocess.run([BINARIES / "weightwired", *flags], capture_output=True, text=True, timeout=60)


def test_mac_is_refused_where_it_would_not_be_one(tmp_path, authority):
    own = settings(authority.issue("agent", "agent", **JOB))
    run = start(tmp_path, integrity="mac", transports="shm,tcp")
    assert run.returncode == REFUSED and "plaintext" in run.stderr and "tls_cert" in run.stderr, run.stderr
    run = start(tmp_path, integrity="mac", transports="shm,ucx", **own)
    assert run.returncode == REFUSED and "ucx" in run.stderr and "carries no MAC" in run.stderr, run.stderr
    run = start(tmp_path, integrity="none", **own)
    assert run.returncode == REFUSED and "must be crc, mac or tls, not \"none\"" in run.stderr, run.stderr
