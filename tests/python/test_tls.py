"""mTLS between coordinator, agents and clients: what is refused at start and in the handshake, and that certificates,
keys and the CA change under running publishes without an epoch being lost."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import threading
import time

import pytest

from certificates import Authority, Place, settings
from conftest import BINARIES, until
from demo.fleet import Daemon
from test_client import assert_serves, engine, load, trainer
from weightwire import Client, RefusedError, Tls, UnavailableError, aio

JOB = {"job": "rl"}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def operator(authority):
    return authority.issue("operator", "operator", **JOB)


def daemon_of(directory, name: str, tls: Tls | None, **options) -> Daemon:
    return Daemon(str(BINARIES / "weightwired"), f"{directory}/{name}", name, **JOB, **(settings(tls) if tls else {}), **options)


def coordinator_of(directory, tls: Tls, **options) -> Daemon:
    return daemon_of(directory, "coordinator", tls, role="coordinator", **{"listen": "127.0.0.1:0", **options})


@pytest.fixture
def coordinator(authority, tmp_path):
    started = coordinator_of(tmp_path, authority.issue("coordinator", "coordinator", **JOB))
    yield started
    assert started.stop() == 0


def shown_certificate(address: str, tls: Tls, version=ssl.TLSVersion.TLSv1_3) -> bytes:
    """What the server shows on a connection made now, as `tls`, in exactly this version of TLS."""
    context = ssl.create_default_context(cafile=tls.ca)
    context.load_cert_chain(tls.cert, tls.key)
    context.set_alpn_protocols(["h2"])
    context.minimum_version = context.maximum_version = version
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as plain, \
            context.wrap_socket(plain, server_hostname=host) as secure:
        return secure.getpeercert(binary_form=True)


def test_tls_1_3_only(coordinator, operator):
    assert shown_certificate(coordinator.grpc, operator)
    with pytest.raises(ssl.SSLError):
        shown_certificate(coordinator.grpc, operator, ssl.TLSVersion.TLSv1_2)


def start(tmp_path, **options) -> subprocess.CompletedProcess:
    """A coordinator that is to refuse its settings."""
    given = {"role": "coordinator", "job": "rl", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", **options}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    return subprocess.run([BINARIES / "weightwired", *flags], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("role, job, days, words", [
    ("trainer", "rl", 30, "cannot be coordinator of job rl"), ("coordinator", "other", 30, "cannot be coordinator of job rl"),
    ("coordinator", "rl", -1, "expired"), ("coordinator", "r l", 30, "has not the form")])
def test_a_coordinator_that_cannot_be_one_says_so_at_start(authority, tmp_path, role, job, days, words):
    own = authority.issue(f"{role}-{job}-{days}".replace(" ", "_"), role, job=job, days=days)
    run = start(tmp_path, **settings(own))
    assert run.returncode in (64 + 36, 64 + 35) and words in run.stderr, run.stderr


def test_files_that_do_not_belong_together_are_refused(authority, tmp_path):
    own, other = (authority.issue(f"pair-{i}", "coordinator", **JOB) for i in range(2))
    assert "is not the key" in start(tmp_path, **{**settings(own), "tls_key": other.key}).stderr
    assert "set all three" in start(tmp_path, tls_cert=own.cert).stderr
    assert "cannot be read" in start(tmp_path, **{**settings(own), "tls_ca": "/nowhere"}).stderr
    stranger = Authority(tmp_path / "stranger")
    run = start(tmp_path, **{**settings(own), "tls_ca": str(stranger.directory / "ca.crt")})
    assert run.returncode == 64 + 36 and "is not good under" in run.stderr, run.stderr


def test_beyond_loopback_grpc_needs_tls_and_the_rest_a_word(authority, tmp_path):
    own = authority.issue("wide", "coordinator", **JOB)
    assert "it is plaintext" in start(tmp_path, listen="0.0.0.0:0").stderr
    run = start(tmp_path, http="0.0.0.0:0", **settings(own))
    assert run.returncode == 64 + 32 and "allow_plaintext: http" in run.stderr, run.stderr
    wide = coordinator_of(tmp_path, own, listen="0.0.0.0:0", http="0.0.0.0:0", allow_plaintext="http")
    assert wide.counter("weightwire_insecure_mode") == 0
    assert wide.counter("weightwire_cert_expiry_timestamp_seconds") == pytest.approx(time.time() + 30 * 86_400, abs=3_600)
    assert wide.stop() == 0


def wwctl(address: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run([BINARIES / "wwctl", "status", "--address", address], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **environment})


def variables(tls: Tls) -> dict[str, str]:
    return {"WEIGHTWIRE_TLS_CERT": tls.cert, "WEIGHTWIRE_TLS_KEY": tls.key, "WEIGHTWIRE_TLS_CA": tls.ca}


def test_clients_take_their_files_from_arguments_or_the_environment(coordinator, operator, authority, monkeypatch):
    run = wwctl(coordinator.grpc, **variables(operator))
    assert run.returncode == 0, run.stderr
    run = wwctl(coordinator.grpc)
    assert run.returncode != 0 and "--tls-cert" in run.stderr, run.stderr
    run = wwctl(coordinator.grpc.replace("127.0.0.1", "127.0.0.2"), **variables(operator))
    assert run.returncode != 0, "the certificate is not 127.0.0.2's"
    with Client(coordinator.grpc, tls=operator) as client:
        assert client.status().job == "rl"
    with Client(coordinator.grpc, timeout=5) as client, pytest.raises(UnavailableError, match="certificates"):
        client.status()
    with Client(coordinator.grpc, tls=authority.issue("watcher", "metrics", **JOB)) as client, \
            pytest.raises(RefusedError, match="role/metrics may not call"):
        client.status()
    for name, value in variables(operator).items():
        monkeypatch.setenv(name, value)

    async def ask() -> str:
        async with aio.Client(coordinator.grpc) as client:
            return (await client.status()).job
    assert asyncio.run(ask()) == "rl"
    monkeypatch.delenv("WEIGHTWIRE_TLS_KEY")
    with pytest.raises(RefusedError, match="belong together"):
        Client(coordinator.grpc)


def test_a_name_stands_in_for_the_address(authority, operator, tmp_path):
    own = authority.issue("named", "coordinator", san="DNS:coordinator.rl.svc", **JOB)
    started = coordinator_of(tmp_path, own)
    named = Tls(operator.cert, operator.key, operator.ca, "coordinator.rl.svc")
    with Client(started.grpc, tls=named) as client:
        assert client.status().job == "rl"
    run = wwctl("ipv4:" + started.grpc, **variables(operator), WEIGHTWIRE_TLS_SERVER_NAME=named.server_name)
    assert run.returncode == 0, run.stderr
    assert started.stop() == 0


class Publishing:
    """A trainer that publishes one version after another, each compared where it is served."""

    def __init__(self, group, engines, version: int = 0):
        self.group, self.engines = group, engines
        self.version, self.failures = version, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                hf = load(self.group, self.version + 1)
                self.group.publish(self.version + 1)
                for e in self.engines:
                    e.wait_version(self.version + 1)
                    assert_serves(e, hf)
                self.version += 1
        except BaseException as error:
            self.failures.append(error)

    def more(self, count: int = 3) -> None:
        """Waits for `count` versions that begin from now on."""
        wanted = self.version + count + 1
        until(f"version {wanted}", lambda: self.failures or self.version >= wanted)
        assert not self.failures, self.failures

    def close(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive() and not self.failures, self.failures


def test_certificates_and_ca_change_under_publishes_and_no_epoch_is_lost(tmp_path, groups):
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    roles = {"coordinator": "coordinator", "trainer": "trainer", "rollout": "engine", "person": "operator"}
    places = {name: Place(tmp_path / "files", name) for name in roles}
    issued = {a: {name: a.issue(name, role, **JOB) for name, role in roles.items()} for a in (old, new)}

    def put(certificates_of: Authority, *believed: Authority) -> None:
        for name, place in places.items():
            place.put(issued[certificates_of][name], *believed)

    put(old, old)
    state = {"state_dir": f"{tmp_path}/state"}
    coordinator = coordinator_of(tmp_path, places["coordinator"].tls, **state)
    address = coordinator.grpc
    agents = [daemon_of(tmp_path, name, places[name].tls, role="agent", coordinator=address) for name in ("trainer", "rollout")]
    groups += [trainer(agents[0]), engine(agents[1], "engine-a", 1), engine(agents[1], "engine-b", 2)]
    publishing = Publishing(groups[0], groups[1:])
    with Client(address, tls=places["person"].tls) as client:
        publishing.more()
        before = shown_certificate(address, issued[old]["person"])
        put(old, old, new)     # everybody believes both
        publishing.more()
        put(new, old, new)     # everybody shows the new one
        until("the coordinator shows its new certificate", lambda: shown_certificate(
            address, places["person"].tls) != before)
        publishing.more()
        put(new, new)          # the old CA is nobody's any more
        until("a certificate of the old CA is refused", lambda: not works(address, issued[old]["person"], new))
        publishing.more()
        served = publishing.version
        status = client.status()
        assert status.committed_version >= served, "nothing is served before it is in the journal"
        assert coordinator.counter('weightwire_epochs_total{outcome="aborted"}') == 0
        assert all(e.phase != "aborted" for e in status.epochs)
        # Connections that begin now: everybody's, to a coordinator that has only ever seen the new files. (Between two
        # versions: one that is released and not yet committed may be lost with its coordinator.)
        publishing.close()
        coordinator.kill()
        coordinator = coordinator_of(tmp_path, places["coordinator"].tls, listen=address, **state)
        publishing = Publishing(groups[0], groups[1:], publishing.version)
        publishing.more()
        publishing.close()
        assert client.status().committed_version == publishing.version
    for group in reversed(groups):
        group.close()
    groups.clear()
    assert [daemon.stop() for daemon in [*agents, coordinator]] == [0, 0, 0]


def works(address: str, tls: Tls, server: Authority) -> bool:
    """Whether a call with the certificate of `tls` gets through to a server of the CA `server`."""
    with Client(address, timeout=5, tls=Tls(tls.cert, tls.key, str(server.directory / "ca.crt"))) as client:
        try:
            return bool(client.status().job)
        except UnavailableError:
            return False
