"""A relay between two agents that flips bits in what a trainer sends over tcp, as memory and cables do behind checksums
that fit: no engine ever serves a wrong byte, and when the relay is honest again everything goes on."""

from __future__ import annotations

import random
import socket
import threading
import time

from frame_relay import Relay, hang_up
from weightwire.errors import WeightwireError

BYTES_BETWEEN_FLIPS = 3_000_000
FAILURES = 'weightwire_digest_failures_total{transport="tcp"}'


class FlippingRelay(Relay):
    """What callees send is what it flips bits in."""

    def __init__(self):
        self.flips = 0
        self.honest = False
        self._random = random.Random(1)
        self._left = BYTES_BETWEEN_FLIPS
        self._lock = threading.Lock()
        super().__init__()

    def open(self, caller: socket.socket) -> None:
        try:
            callee = self.callee()
        except OSError:
            return caller.close()
        threading.Thread(target=self._pass_on, args=(caller, callee, False), daemon=True).start()
        self._pass_on(callee, caller, True)

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


def test_bits_that_flip_on_the_way_are_never_served(coordinator_job):
    relay = FlippingRelay()
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
