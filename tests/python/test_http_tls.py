"""`http_tls`: the pages over TLS with the process's certificate. Probes need none of their own; everything else is for who may
ask for the status, and /metrics also for role metrics of the job."""

from __future__ import annotations

import http.client
import socket
import ssl

import pytest

from certificates import Authority, Place, settings
from conftest import BINARIES
from demo.fleet import Daemon
from test_tls import daemon_of, start
from weightwire import Tls

JOB = {"job": "rl"}
COUNTED = 'weightwire_auth_failures_total{reason="page"}'


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def coordinator(authority, tmp_path_factory):
    started = serve(tmp_path_factory.mktemp("coordinator"), authority.issue("coordinator", "coordinator", **JOB))
    yield started
    assert started.stop() == 0


def serve(directory, tls: Tls, **options) -> Daemon:
    return daemon_of(directory, "coordinator", tls, role="coordinator", **{"listen": "127.0.0.1:0", "http_tls": "true", **options})


class Browser:
    """One connection to the pages, as `tls`, or without a certificate."""

    def __init__(self, daemon: Daemon, authority: Authority, tls: Tls | None = None, version=ssl.TLSVersion.TLSv1_3):
        context = ssl.create_default_context(cafile=authority.directory / "ca.crt")
        context.minimum_version = context.maximum_version = version
        if tls:
            context.load_cert_chain(tls.cert, tls.key)
        host, port = daemon.http.rsplit(":", 1)
        self.connection = http.client.HTTPSConnection(host, int(port), timeout=20, context=context)

    def get(self, path: str) -> tuple[int, str]:
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        return answer.status, answer.read().decode()

    def certificate(self) -> bytes:
        if self.connection.sock is None:
            self.connection.connect()
        return self.connection.sock.getpeercert(binary_form=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.connection.close()


def test_probes_need_no_certificate_and_nobody_else_is_shown_anything(coordinator, authority):
    with Browser(coordinator, authority, authority.issue("counter", "metrics", **JOB)) as counter:
        before = counted(counter)
        with Browser(coordinator, authority) as nobody:
            assert nobody.get("/healthz") == (200, "alive\n")
            assert nobody.get("/readyz") == (200, "ready\n")
            for path in ("/metrics", "/status", "/", "/api/status", "/nothing"):
                status, text = nobody.get(path)
                assert status == 401 and "certificate" in text, (path, text)
        assert counted(counter) == before + 5


def counted(browser: Browser) -> float:
    status, text = browser.get("/metrics")
    assert status == 200, text
    return float(next(line for line in text.splitlines() if line.startswith(COUNTED)).rsplit(" ", 1)[1])


@pytest.mark.parametrize("role, job, metrics, status", [
    ("metrics", "rl", 200, 403), ("metrics", "other", 403, 403), ("operator", "rl", 200, 200), ("operator", "other", 200, 200),
    ("trainer", "rl", 200, 200), ("engine", "other", 403, 403)])
def test_a_certificate_shows_what_its_role_may_see(coordinator, authority, role, job, metrics, status):
    with Browser(coordinator, authority, authority.issue(f"{role}-{job}", role, job=job)) as browser:
        assert browser.get("/metrics")[0] == metrics
        for path in ("/status", "/"):
            assert browser.get(path)[0] == status, path
        assert browser.get("/healthz")[0] == 200


def test_a_bad_certificate_an_old_version_and_plaintext_get_no_page(coordinator, authority, tmp_path):
    stranger = Authority(tmp_path / "stranger").issue("operator", "operator", **JOB)
    expired = authority.issue("expired", "operator", days=-1, **JOB)
    for tls in (stranger, expired):
        with Browser(coordinator, authority, tls) as browser, pytest.raises((ssl.SSLError, ConnectionError, http.client.HTTPException)):
            browser.get("/healthz")
    with Browser(coordinator, authority, version=ssl.TLSVersion.TLSv1_2) as browser, pytest.raises((ssl.SSLError, ConnectionError)):
        browser.get("/healthz")
    host, port = coordinator.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=20) as plain:
        plain.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"weightwire" not in plain.recv(1 << 16)


def test_an_answer_that_is_the_last_ends_tls_properly(coordinator, authority):
    with Browser(coordinator, authority) as browser:
        browser.connection.connect()
        browser.connection.sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        text = b""
        while data := browser.connection.sock.recv(1 << 16):  # raises when the connection was only cut
            text += data
    assert text.endswith(b"alive\n")


def test_pages_follow_the_files(tmp_path):
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    place = Place(tmp_path / "files", "coordinator")
    place.put(old.issue("coordinator", "coordinator", **JOB), old)
    started = serve(tmp_path, place.tls)
    with Browser(started, old) as before:
        shown = before.certificate()
        place.put(new.issue("coordinator", "coordinator", **JOB), new)
        with Browser(started, new, new.issue("scraper", "metrics", **JOB)) as after:
            assert after.get("/metrics")[0] == 200 and after.certificate() != shown
        assert before.get("/healthz")[0] == 200, "a connection that is open goes on"
        # A key that is not the certificate's: what served before serves.
        place.put(Tls(new.files("coordinator").cert, new.files("scraper").key, new.files("scraper").ca), new)
        with Browser(started, new) as after:
            assert after.get("/healthz")[0] == 200
    assert started.stop() == 0


def test_agents_have_them_too_and_beyond_loopback_they_need_no_other_word(authority, tmp_path):
    wide = serve(tmp_path, authority.issue("wide", "coordinator", **JOB), http="0.0.0.0:0")
    agent = Daemon(str(BINARIES / "weightwired"), f"{tmp_path}/agent", "agent", role="agent", coordinator=wide.grpc, http_tls="true",
                   **JOB, **settings(authority.issue("agent", "agent", san="IP:127.0.0.1", **JOB)))
    with Browser(agent, authority) as nobody, Browser(agent, authority, authority.issue("m", "metrics", **JOB)) as metrics:
        assert nobody.get("/healthz")[0] == 200 and nobody.get("/metrics")[0] == 401
        assert metrics.get("/metrics")[0] == 200
    assert [daemon.stop() for daemon in (agent, wide)] == [0, 0]


def test_without_a_certificate_the_setting_is_refused(tmp_path):
    run = start(tmp_path, http_tls="true")
    assert run.returncode == 64 + 36 and "http_tls needs a certificate" in run.stderr, run.stderr
