"""An S3 server for tests (moto's, over real HTTP), and a proxy before it that answers as a bad day would."""

from __future__ import annotations

import http.client
import http.server
import random
import threading
import urllib.request

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
BUCKET = "weights"


class S3:
    def __init__(self) -> None:
        from moto.s3.responses import S3Response
        from moto.server import ThreadedMotoServer
        if not hasattr(S3Response.put_object, "one_at_a_time"):
            S3Response.put_object = _one_at_a_time(S3Response.put_object)
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=30).close()

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}"

    def stop(self) -> None:
        self._server.stop()


def _one_at_a_time(put_object):
    """moto looks at a condition and then writes, for each request on a thread of its own: of two writers both could win, as in no
    real store."""
    lock = threading.Lock()

    def put(self):
        with lock:
            return put_object(self)
    put.one_at_a_time = True
    return put


def error_body(code: str) -> bytes:
    return f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{code}</Message></Error>'.encode()


class Proxy:
    """Before `endpoint`. `fault(method, path)` says what becomes of a request: None, it is passed on; (status, code), it is answered
    so; and with a third word "after", it is passed on first, and its answer is lost. `edit(headers)` changes what is passed on."""

    def __init__(self, endpoint: str, fault=lambda method, path: None, edit=lambda headers: None):
        proxy = self
        self.fault, self.requests, self.faults = fault, 0, 0
        host = endpoint.removeprefix("http://")

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fault = proxy.fault(self.command, self.path)
                proxy.requests += 1
                proxy.faults += fault is not None
                if fault is None or "after" in fault:
                    upstream = http.client.HTTPConnection(host, timeout=30)
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    edit(headers)
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    status, headers, data = answer.status, answer.getheaders(), answer.read()
                    upstream.close()
                if fault is not None:
                    status, headers, data = fault[0], [("Content-Type", "application/xml")], error_body(fault[1])
                self.send_response(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                length = next((v for n, v in headers if n.lower() == "content-length"), len(data)) if self.command == "HEAD" else len(data)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = serve
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def half_the_time(seed: int):
    """503 for every second request, by chance; half of these have happened all the same."""
    chance, lock = random.Random(seed), threading.Lock()

    def fault(_method: str, _path: str):
        with lock:
            drawn = chance.random()
        return None if drawn >= 0.5 else (503, "SlowDown") if drawn >= 0.25 else (503, "SlowDown", "after")
    return fault
