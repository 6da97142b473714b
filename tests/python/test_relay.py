"""A relay between two agents that flips bits in what a trainer sends over tcp, as memory and cables do behind checksums
that fit: no engine ever serves a wrong byte, and when the relay is honest again everything goes on."""

from __future__ import annotations

import random
import socket
import threading
import time

from frame_relay import hang_up
from weightwire.errors import WeightwireError

BYTES_BETWEEN_FLIPS = 3_000_000
FAILURES = 'weightwire_digest_failures_total{transport="tcp"}'


class Relay:
    """Listens on 127.0.0.2 and passes on to the same port of 127.0.0.1."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.2", 0))
        self.port = self._listener.getsockname()[1]
        self.flips = 0
        self.honest = False
        self._random = random.Random(1)
        self._left = BYTES_BETWEEN_FLIPS
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:
                return
            try:
                source = socket.create_connection(("127.0.0.1", self.port), timeout=10)
            except OSError:
                reader.close()
                continue
            source.settimeout(None)
            threading.Thread(target=self._pass_on, args=(reader, source, False), daemon=True).start()
            threading.Thread(target=self._pass_on, args=(source, reader, True), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, hurt: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(self._hurt(data) if hurt else data)
        except OSError:
            pass
        hang_up(source, sink)

    def _hurt(self, data: bytes) -> bytes:
        with self._lock:
            self._left -= len(data)
            if self.honest or self._left > 0:
                return data
            self._left = self._random.randrange(2 * BYTES_BETWEEN_FLIPS)
            self.flips += 1
            changed = bytearray(data)
            changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
            return bytes(changed)

    def close(self) -> None:
        self._listener.close()


def test_bits_that_flip_on_the_way_are_never_served(coordinator_job):
    relay = Relay()
    try:
        job = coordinator_job(trainer={"data_listen": f"127.0.0.1:{relay.port}", "advertise_host": "127.0.0.2"})
        job.attach_trainer(time.monotonic() + 30)
        given_up = 0
        for _ in range(4):
            try:
                for release in job.publish():
                    release.wait_released(60)
                job.serve_everywhere()
            except WeightwireError:  # three attempts were hit; the old version stays
                given_up += 1
            job.check()
        failures = job.agents[1].counter(FAILURES)
        relay.honest = True
        for release in job.publish():
            release.wait_released(60)
        job.serve_everywhere()
        print(f"{relay.flips} flips, {failures:.0f} segments read again, {given_up} versions given up")
        assert relay.flips >= 10 and failures >= 5
    finally:
        relay.close()
