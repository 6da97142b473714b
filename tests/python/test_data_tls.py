"""`integrity: tls` between real agents: who reads along reads nothing, who changes something is noticed, and nobody but an agent
of the job gets as far as a ticket, on either side of a connection."""

from __future__ import annotations

import socket
import ssl
import threading
import time

import pytest

from certificates import Authority, Place, settings
from conftest import until
from coordinator_job import content
from frame_relay import Relay, hang_up
from test_data_security import FORGED, JOB, REFUSED, SealedJob, authority, start  # noqa: F401  a fixture
from weightwire.errors import WeightwireError

TURNED_AWAY = 'weightwire_auth_failures_total{reason="tls"}'


class ByteRelay(Relay):
    """What callees send is kept, and one bit of it turned when `turn` was called. `guise`: a certificate with which it ends TLS
    itself, instead of passing on."""

    def __init__(self, guise: ssl.SSLContext | None = None):
        self._guise = guise
        self._turn = threading.Event()
        self.turned = threading.Event()
        self.seen = bytearray()
        super().__init__()

    def turn(self) -> None:
        self._turn.set()

    def open(self, caller: socket.socket) -> None:
        self._pretend(caller) if self._guise else self._pass_on(caller)

    def _pretend(self, caller: socket.socket) -> None:
        try:
            self._guise.wrap_socket(caller, server_side=True).recv(1)
        except OSError:
            pass
        caller.close()

    def _pass_on(self, caller: socket.socket) -> None:
        callee = self.callee()
        threading.Thread(target=self._pump, args=(caller, callee, False), daemon=True).start()
        self._pump(callee, caller, True)

    def _pump(self, source: socket.socket, sink: socket.socket, looks: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if looks:
                    self.seen += data
                    if self._turn.is_set() and len(data) > 8_000:
                        self._turn.clear()
                        middle = len(data) // 2
                        data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1:]
                        self.turned.set()
                sink.sendall(data)
        except OSError:
            pass
        hang_up(source, sink)


class Relayed:
    """A job whose trainer's agent is reached through a relay."""

    def __init__(self, directory, authority: Authority, relay: ByteRelay, integrity: str = "tls", **trainer):  # noqa: F811
        self.relay = relay
        self.job = SealedJob(directory, authority, integrity=integrity,
                             trainer={"data_listen": f"127.0.0.1:{relay.port}", "advertise_host": "127.0.0.2", **trainer})

    def __enter__(self) -> SealedJob:
        self.job.attach_trainer(time.monotonic() + 30)
        return self.job

    def __exit__(self, *_):
        self.job.close()
        self.relay.close()


@pytest.mark.parametrize("integrity", ["crc", "tls"])
def test_who_reads_along_reads_weights_without_tls_only(tmp_path, authority, integrity):  # noqa: F811
    relay = ByteRelay()
    with Relayed(tmp_path, authority, relay, integrity) as job:
        job.commit()
        tensor = content(job.version)["model.embed_tokens.weight"].tobytes()
        found = sum(tensor[at:at + 64] in relay.seen for at in range(0, len(tensor) - 64, len(tensor) // 50))
        assert len(relay.seen) > len(tensor)
        assert found > 40 if integrity == "crc" else found == 0


def test_a_bit_that_is_turned_ends_the_session_and_the_version_comes_all_the_same(tmp_path, authority):  # noqa: F811
    relay = ByteRelay()
    with Relayed(tmp_path, authority, relay) as job:
        job.commit()
        assert job.forged() == 0
        relay.turn()
        job.commit()
        assert relay.turned.is_set() and job.forged() == 1
        assert [line for line in job.logs().splitlines() if "its MAC does not fit" in line]


def visit(port: int, context: ssl.SSLContext | None) -> bytes:
    """What a caller hears that has shaken hands, or said something in the open."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as plain:
        try:
            if context is None:
                plain.sendall(b"G" * 200)
                heard = plain.recv(100)
                return b"" if heard[:1] == b"\x15" and plain.recv(1) == b"" else heard  # an alert
            with context.wrap_socket(plain, server_hostname="agent") as secure:
                return secure.recv(1)
        except (ssl.SSLError, ConnectionResetError):
            return b""


def caller(authority: Authority, tls=None, version=ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:  # noqa: F811
    context = ssl.create_default_context(cafile=authority.directory / "ca.crt")
    context.check_hostname = False
    context.minimum_version = context.maximum_version = version
    if tls:
        context.load_cert_chain(tls.cert, tls.key)
    return context


def test_nobody_but_an_agent_of_the_job_is_listened_to(tmp_path, authority, tmp_path_factory):  # noqa: F811
    other = Authority(tmp_path_factory.mktemp("other"))
    issue = authority.issue
    strangers = {
        "no certificate": caller(authority),
        "another CA": caller(authority, other.issue("agent", "agent", **JOB)),
        "expired": caller(authority, issue("late", "agent", days="-1", **JOB)),
        "another job": caller(authority, issue("neighbour", "agent", job="other")),
        "an operator": caller(authority, issue("person", "operator", **JOB)),
        "TLS 1.2": caller(authority, issue("old", "agent", **JOB), ssl.TLSVersion.TLSv1_2),
        "in the open": None,
    }
    relay = ByteRelay()
    with Relayed(tmp_path, authority, relay) as job:
        agent = job.agents[0]
        for number, (who, context) in enumerate(strangers.items(), start=1):
            assert visit(relay.port, context) == b"", who
            until(f"{who} is counted", lambda: agent.counter(TURNED_AWAY) == number)
        job.commit()
        assert agent.counter(TURNED_AWAY) == len(strangers)


@pytest.mark.parametrize("who, said", [("another CA", "certificate verify failed"), ("another job", "is no agent of the job")])
def test_nobody_but_an_agent_of_the_job_is_told_anything(tmp_path, authority, tmp_path_factory, who, said):  # noqa: F811
    other = Authority(tmp_path_factory.mktemp("other")) if who == "another CA" else authority
    shown = other.issue("guise", "agent", **(JOB if who == "another CA" else {"job": "other"}))
    guise = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    guise.load_cert_chain(shown.cert, shown.key)
    with Relayed(tmp_path, authority, ByteRelay(guise)) as job:
        with pytest.raises(WeightwireError, match=said):
            for release in job.publish(deadline=20):  # it is tried again until then
                release.wait_released(60)
        assert all(engine.version is None for engine in job.engines[1:])


def test_a_new_certificate_is_shown_to_whoever_comes_next(tmp_path, authority):  # noqa: F811
    place = Place(tmp_path / "place", "trainer")
    own = place.put(authority.issue("first", "agent", **JOB), authority)
    friend = caller(authority, authority.issue("friend", "agent", **JOB))
    relay = ByteRelay()

    def shown() -> bytes:
        with socket.create_connection(("127.0.0.1", relay.port), timeout=20) as plain:
            with friend.wrap_socket(plain) as secure:
                return secure.getpeercert(binary_form=True)

    with Relayed(tmp_path, authority, relay, **settings(own)) as job:
        job.commit()
        before = shown()
        assert shown() == before
        place.put(authority.issue("second", "agent", **JOB), authority)
        assert shown() != before
        job.commit()
        assert job.forged() == 0 and sum(agent.counter(TURNED_AWAY) for agent in job.agents) == 0


@pytest.mark.parametrize("trainer, rollout", [("crc", "tls"), ("tls", "crc"), ("mac", "tls"), ("tls", "mac")])
def test_who_is_set_otherwise_is_refused_at_once(tmp_path, authority, trainer, rollout):  # noqa: F811
    job = SealedJob(tmp_path, authority, trainer={"integrity": trainer}, integrity=rollout)
    try:
        job.attach_trainer(time.monotonic() + 30)
        with pytest.raises(WeightwireError) as refused:
            for release in job.publish():
                release.wait_released(60)
        # Who reads from an engine that could not connect may be the first to say so.
        assert "integrity is tls" in str(refused.value) or "the source gave up" in str(refused.value)
        assert "no session over tcp: integrity is tls" in job.logs()
        assert all(engine.version is None for engine in job.engines[1:])
    finally:
        job.close()


def test_tls_is_refused_where_there_would_be_none(tmp_path, authority):  # noqa: F811
    own = settings(authority.issue("agent", "agent", **JOB))
    token = tmp_path / "token"
    token.write_text("ww1;")
    for why, options in {"there is no certificate to show": {}, "carries no TLS": {"transports": "shm,ucx", **own},
                         "no certificate to show": {"token_file": str(token), "tls_ca": own["tls_ca"]}}.items():
        run = start(tmp_path, integrity="tls", **options)
        assert run.returncode == REFUSED and why in run.stderr, run.stderr


def test_what_other_hosts_reach_needs_no_leave_under_tls(tmp_path, authority):  # noqa: F811
    own = settings(authority.issue("agent", "agent", **JOB))
    run = start(tmp_path, data_listen="0.0.0.0:0", advertise_host="127.0.0.1", print_config="true", **own)
    assert run.returncode == 64 + 32 and "allow_plaintext: data" in run.stderr, run.stderr
    run = start(tmp_path, data_listen="0.0.0.0:0", advertise_host="127.0.0.1", integrity="tls", print_config="true", **own)
    assert run.returncode == 0 and "integrity: tls" in run.stdout, run.stderr
