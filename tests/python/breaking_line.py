"""A TCP relay whose connections break again and again, by a reset, after some bytes in the middle of a line."""

from __future__ import annotations

import random
import socket
import struct
import threading


class BreakingLine:
    """Relays to `target` (host, port). Each connection is reset after `most` bytes at the latest, counted over both directions;
    `None`: it lasts until `cut`."""

    def __init__(self, target: tuple[str, int], seed: int = 1, least: int = 900, most: int | None = 4000, port: int = 0):
        self._target, self._random, self._least, self._most = target, random.Random(seed), least, most
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = self._listener.getsockname()
        self._lock = threading.Lock()
        self._open: list[tuple[socket.socket, socket.socket]] = []
        self.breaks = 0
        self.seen: list[bytes] = []  # of what the dialling ends sent
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.socket()
            try:
                there.connect(self._target)
            except OSError:
                here.close()
                there.close()
                continue
            pair = (here, there)
            left = [self._random.randint(self._least, self._most) if self._most else 1 << 60]
            with self._lock:
                self._open.append(pair)
            for source, sink in (pair, pair[::-1]):
                threading.Thread(target=self._pump, args=(source, sink, pair, left), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, pair, left: list[int]) -> None:
        try:
            while data := source.recv(65536):
                with self._lock:
                    if source is pair[0]:
                        self.seen.append(data)
                    data, over = data[:left[0]], len(data) > left[0]
                    left[0] -= len(data)
                sink.sendall(data)
                if over:
                    break
        except OSError:
            pass
        self._reset(pair)

    def _reset(self, pair) -> None:
        with self._lock:
            if pair not in self._open:
                return
            self._open.remove(pair)
            self.breaks += 1
        for end in pair:
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def cut(self) -> None:
        """All connections of now."""
        for pair in list(self._open):
            self._reset(pair)

    def close(self) -> None:
        """Nobody reaches the target through it any more. Idempotent."""
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        self.cut()
