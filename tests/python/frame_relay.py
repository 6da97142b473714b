"""A relay between two agents that knows the frames of tcp data sessions, and can change one: once it is armed, the next
frame of a kind that serves, with every checksum made good again."""

from __future__ import annotations

import socket
import struct
import threading

from ports import listen

HEADER, TAG = 64, 16
PREAMBLE, PROOF, CHALLENGED, WELCOME = 96, 48, 112, 80  # bytes of the handshake's messages
JOIN = b"WWJN"
GET_REPLY, NOTIFY = 2, 3
ATTACKS = ("alter", "replay", "swap", "drop")


class Frame:
    def __init__(self, header: bytes, payload: bytes):
        self.header, self.payload = header, payload

    @property
    def type(self) -> int:
        return struct.unpack_from("<H", self.header, 4)[0]

    def __bytes__(self) -> bytes:
        return self.header + self.payload


class Relay:
    """Listens on 127.0.0.2 for callers of the same port of 127.0.0.1; `open` is what is done with each, on a thread."""

    def __init__(self) -> None:
        self._listener, callee = listen("127.0.0.2", "127.0.0.1")
        callee.close()
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def callee(self) -> socket.socket:
        callee = socket.create_connection(("127.0.0.1", self.port), timeout=10)
        callee.settimeout(None)
        return callee

    def open(self, caller: socket.socket) -> None:
        raise NotImplementedError

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self.open, args=(caller,), daemon=True).start()


class FrameRelay(Relay):
    """What callees send is what it changes."""

    def __init__(self, sealed: bool):
        self._tag = TAG if sealed else 0
        self._attack: str | None = None
        self._lock = threading.Lock()
        self.done = threading.Event()
        super().__init__()

    def arm(self, attack: str) -> None:
        self.done.clear()
        with self._lock:
            self._attack = attack

    def open(self, caller: socket.socket) -> None:
        try:
            callee = self.callee()
            first = exactly(caller, PREAMBLE)
            callee.sendall(first)
        except OSError:
            return caller.close()
        joins = first.startswith(JOIN)
        threading.Thread(target=self._pass_on, args=(caller, callee, 0 if joins else PROOF, False), daemon=True).start()
        self._pass_on(callee, caller, WELCOME if joins else CHALLENGED + WELCOME, True)

    def _pass_on(self, source: socket.socket, sink: socket.socket, handshake: int, hurts: bool) -> None:
        try:
            while handshake and (data := source.recv(handshake)):  # as it comes: each side waits for the other's part
                sink.sendall(data)
                handshake -= len(data)
            if hurts:
                self._frames(source, sink)
            while data := source.recv(1 << 16):
                sink.sendall(data)
        except OSError:
            pass
        hang_up(source, sink)

    def _frames(self, source: socket.socket, sink: socket.socket) -> None:
        held: Frame | None = None
        while True:
            frame = self._read(source)
            if held:  # the other's payload, tag and all
                held.payload, frame.payload = frame.payload, held.payload
                sink.sendall(bytes(held) + bytes(frame))
                held = None
                self.done.set()
                continue
            attack = self._take(frame)
            if attack == "swap":
                held = frame
                continue
            if attack == "alter":
                middle = len(frame.payload) // 2
                frame.payload = frame.payload[:middle] + bytes([frame.payload[middle] ^ 4]) + frame.payload[middle + 1:]
            if attack != "drop":
                sink.sendall(bytes(frame) * (2 if attack == "replay" else 1))
            if attack:
                self.done.set()

    def _take(self, frame: Frame) -> str | None:
        """The attack, when it is this frame's turn."""
        with self._lock:
            wanted = NOTIFY if self._attack in ("replay", "drop") else GET_REPLY
            if frame.type != wanted or not frame.payload:
                return None
            attack, self._attack = self._attack, None
            return attack

    def _read(self, source: socket.socket) -> Frame:
        header = exactly(source, HEADER + self._tag)
        kind, length = struct.unpack_from("<H", header, 4)[0], struct.unpack_from("<Q", header, 48)[0]
        follows = kind in (GET_REPLY, NOTIFY) and length > 0
        return Frame(header, exactly(source, length + self._tag) if follows else b"")


def hang_up(*ends: socket.socket) -> None:
    """Ends connections in both directions, whatever is left of them."""
    for end in ends:
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass


def exactly(source: socket.socket, count: int) -> bytes:
    """So many bytes, or ConnectionError."""
    parts = bytearray()
    while len(parts) < count:
        data = source.recv(count - len(parts))
        if not data:
            raise ConnectionError("the connection ended")
        parts += data
    return bytes(parts)
