"""python -m weightwire.health tells the living from the dead on any port, with TLS and without."""

import os
import subprocess
import sys

import pytest

from certificates import Authority
from conftest import BINARIES
from demo.fleet import Daemon
from ports import free_ports
from weightwire import health


def healthy(pid: int) -> int:
    return subprocess.run([sys.executable, "-m", "weightwire.health", "--pid", str(pid)], timeout=60, stderr=subprocess.DEVNULL, env={
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "WEIGHTWIRE_BIN_DIR": str(BINARIES)}).returncode


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("by", ["file", "environment"])
def test_a_living_one_is_told_from_a_dead_one(tmp_path, monkeypatch, tls, by):
    (port,), options, environment = free_ports(1), {}, {**os.environ}
    if tls:
        files = Authority(tmp_path / "authority")
        files.issue("hub", "coordinator", san="DNS:localhost,IP:127.0.0.1")
        folder = tmp_path / "authority/hub"
        options = {"http_tls": "true", "tls_cert": folder / "tls.crt", "tls_key": folder / "tls.key", "tls_ca": folder / "ca.crt"}
    if by == "environment":
        environment["WEIGHTWIRE_HTTP"] = f"127.0.0.1:{port}"
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="coordinator", listen="127.0.0.1:0", env=environment,
                    http=f"127.0.0.1:{port if by == 'file' else 1}", **options)
    try:
        assert healthy(daemon.pid) == 0
        # Where that process is not to be seen, as from outside of a container, either way is tried.
        monkeypatch.setenv("WEIGHTWIRE_HTTP", f"127.0.0.1:{port}")
        assert healthy(os.getpid()) == 0
    finally:
        daemon.kill()
    assert healthy(daemon.pid) == healthy(os.getpid()) == 1


def test_without_a_listener_it_says_that_there_is_nobody_to_ask(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(health, "settings_of", lambda pid: {"http": ""})
    assert health.main([]) == 1 and "no HTTP listener" in capsys.readouterr().err


def test_one_that_answers_something_else_is_not_alive():
    import http.server
    import threading

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"welcome\n")
    server = http.server.HTTPServer(("127.0.0.1", 0), Other)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        assert not health.alive({"http": f"127.0.0.1:{server.server_port}", "http_tls": "false"})
    finally:
        server.shutdown()
