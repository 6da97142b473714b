"""What runs out: file descriptors and the journal's disk. The daemon sheds what is new, keeps what it has, and recovers."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import time
import urllib.request

import grpc
import pytest
from weightwire.v1 import agent_pb2, agent_pb2_grpc, coordinator_pb2_grpc
from weightwire.v1 import coordinator_pb2 as pb

from conftest import BINARIES, Trainer, until
from demo.fleet import Daemon
from test_client import CONFIG, checkpoint_of, engine, load, shards_of
from weightwire import WeightwireError


def flood(address: str | tuple[str, int], count: int) -> list[socket.socket]:
    """`count` connections that say nothing; those that are refused count too."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    opened = []
    for _ in range(count):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(2)
        opened.append(connection)
        try:
            connection.connect(address)
        except OSError:
            pass
    return opened


def descriptors(daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def data_address(daemon) -> tuple[str, int]:
    with grpc.insecure_channel(f"unix:{daemon.agent_socket}") as channel:
        status = agent_pb2_grpc.AgentStub(channel).LocalStatus(agent_pb2.LocalStatusRequest(), timeout=20)
    return address_of(status.addresses["tcp"])


def processor_seconds(daemon) -> float:
    fields = open(f"/proc/{daemon.pid}/stat").read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def test_a_daemon_out_of_descriptors_keeps_its_job_and_takes_new_connections_again(daemon, groups):
    trainer = Trainer(daemon.agent_socket, CONFIG, "megatron:tp2,pp2", shards_of(checkpoint_of(1)))
    groups.append(trainer)
    subscriber = engine(daemon)
    groups.append(subscriber)
    trainer.publish(1)
    subscriber.wait_version(1)
    data_port = data_address(daemon)
    used = descriptors(daemon)
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (used + 8, used + 8))
    for address in (address_of(daemon.grpc), address_of(daemon.http), daemon.agent_socket, f"{daemon.agent_socket}.fd",
                    data_port):
        connections = flood(address, 120)
        try:
            until("none is left", lambda: descriptors(daemon) >= used + 7, 20)
            begun, spent = time.monotonic(), processor_seconds(daemon)
            time.sleep(1)  # the window is what is measured
            spent = processor_seconds(daemon) - spent
            assert spent < (time.monotonic() - begun) / 2, f"{address}: {spent} s of a processor: an accept spins"
        finally:
            for connection in connections:
                connection.close()
        until("they are back", lambda: descriptors(daemon) <= used + 2, 20)
    load(trainer, 2)
    trainer.publish(2)  # what was connected still is
    subscriber.wait_version(2)
    with grpc.insecure_channel(daemon.grpc) as channel:  # and who comes now is let in
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        assert stub.Status(pb.StatusRequest(), timeout=20, wait_for_ready=True).committed_version == 2
    assert "weightwire_epoch_committed" in daemon.metrics()


@pytest.mark.parametrize("count", [100, 1_000])
def test_silent_http_connections_leave_health_and_metrics_working(daemon, count):
    silent = flood(address_of(daemon.http), count)
    try:
        for page in ("healthz", "metrics"):
            with urllib.request.urlopen(f"http://{daemon.http}/{page}", timeout=20) as reply:
                assert reply.status == 200
    finally:
        for connection in silent:
            connection.close()


def test_connections_that_fill_the_descriptors_leave_some_to_health(daemon_with_few_descriptors):
    daemon = daemon_with_few_descriptors
    connections = flood(address_of(daemon.grpc), 300)
    try:
        until("connections are shed", lambda: daemon.counter("weightwire_connections_shed_total") > 0, 20)
        assert urllib.request.urlopen(f"http://{daemon.http}/healthz", timeout=20).status == 200
    finally:
        for connection in connections:
            connection.close()


@pytest.fixture
def daemon_with_few_descriptors(tmp_path):
    limited = tmp_path / "limited"  # this process may have more open than that
    limited.write_text(f'#!/bin/sh\nulimit -Sn 256\nexec "{BINARIES / "weightwired"}" "$@"\n')
    limited.chmod(0o755)
    started = Daemon(str(limited), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


def test_a_full_disk_stops_decisions_until_there_is_space_and_nothing_else(coordinator_job, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", state], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("no right to mount a tmpfs here")
    try:
        job = coordinator_job(state_dir=str(state))
        job.attach_trainer(time.monotonic() + 30)
        for release in job.publish():
            release.wait_released(60)
        job.serve_everywhere()
        committed = job.version
        filler = state / "filler"
        with open(filler, "wb", buffering=0) as out, pytest.raises(OSError, match="No space left"):
            while True:
                out.write(bytes(512))
        # Records go into what the log has allocated, until that is full.
        with pytest.raises(WeightwireError):
            while job.version < 200:
                for release in job.publish(deadline=5):
                    release.wait_released(5)
                job.until("the decision", lambda: job.status().committed_version == job.version or not job.ready(), 30)
                if not job.ready():
                    raise WeightwireError("not ready")
                committed = job.version
        job.until("it says why", lambda: "full" in job.why_not_ready(), 30)
        status = job.status()
        assert status.deciding and status.committed_version == committed and "full" in status.waiting_for
        assert "\nweightwire_journal_failing 1\n" in job.coordinator.metrics()
        assert all(e.subscriber.serving.version == committed for e in job.engines)
        filler.unlink()
        job.until("it is ready again", job.ready, 30)
        assert "\nweightwire_journal_failing 0\n" in job.coordinator.metrics()
        job.until("what waited is decided", lambda: job.status().committed_version == job.version, 30)
        for release in job.accept_next(time.monotonic() + 30):
            release.wait_released(60)
        job.serve_everywhere()
        job.coordinator.kill()
        job.coordinator = job.start_coordinator(job.address)
        assert job.status().committed_version == job.version
    finally:
        subprocess.run(["umount", "-l", state], check=True)  # the coordinator has it until its end
