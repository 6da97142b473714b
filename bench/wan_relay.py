#!/usr/bin/env python3
"""Carries IP packets between two TUN devices as a long, slow line would, where the kernel has no netem.

wan_relay.py FD FD MBIT ONE_WAY_MS: each direction has its own rate and its own queue of 400 ms, whose end is dropped. A packet leaves
when all before it have been sent at that rate, and arrives that much later. Ends when its standard input does.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections import deque

_QUEUE_SECONDS = 0.4
_PACKET_MAX = 65_536
_AT_ONCE = 64


class Direction:
    def __init__(self, source: int, sink: int, bytes_per_second: float, delay: float):
        self.source, self.sink, self._rate, self._delay = source, sink, bytes_per_second, delay
        self._free_at = 0.0  # when all that was taken has left
        self.packets: deque[tuple[float, bytes]] = deque()  # when it arrives

    def take(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self.source, _PACKET_MAX)
            except BlockingIOError:
                return
            now = time.monotonic()
            begin = max(now, self._free_at)
            if begin - now < _QUEUE_SECONDS:
                self._free_at = begin + len(packet) / self._rate
                self.packets.append((self._free_at + self._delay, packet))

    def give(self, now: float) -> None:
        while self.packets and self.packets[0][0] <= now:
            try:
                os.write(self.sink, self.packets[0][1])
            except BlockingIOError:
                return
            self.packets.popleft()


def main() -> None:
    left, right = int(sys.argv[1]), int(sys.argv[2])
    rate, delay = float(sys.argv[3]) * 1e6 / 8, float(sys.argv[4]) / 1e3
    for device in (left, right):
        os.set_blocking(device, False)
    both = Direction(left, right, rate, delay), Direction(right, left, rate, delay)
    poll = select.epoll()
    for device in (left, right, 0):
        poll.register(device, select.EPOLLIN)
    while True:
        due = min((direction.packets[0][0] for direction in both if direction.packets), default=None)
        ready = poll.poll(-1 if due is None else max(0.0, due - time.monotonic()))
        for device, _ in ready:
            if device == 0:
                return
        for direction in both:
            if any(device == direction.source for device, _ in ready):
                direction.take()
            direction.give(time.monotonic())


if __name__ == "__main__":
    main()
