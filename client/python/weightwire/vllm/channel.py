"""JSON messages between two processes, each delivered once and in order, over connections that may break.

The end that dials may dial again: both ends then say how many messages they have, and what the other end lacks is sent again.
Every line carries a MAC under a key that both ends were given, fresh for each connection. So nobody else on the network can say
anything, change a line or repeat one. Nothing is encrypted: use it for what may be read.

    listening end                                   dialling end
    {"protocol", "nonce"}                      ->
                                               <-   {"protocol", "nonce", "session", "received"} + MAC
    {"received"} + MAC                         ->
    then in both directions: {"n", "received", "body"} + MAC
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
from typing import Any, Callable

from weightwire import errors

Message = dict[str, Any]

PROTOCOL = 1
HANDSHAKE_SECONDS = 10.0
LINE_BYTES_MAX = 16 << 20
_FIRST_LINE_BYTES_MAX = 4096  # before the other end has shown that it holds the key
_SEND_SECONDS = 5  # that the other end may leave its side unread
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 12_000}  # seconds, and milliseconds


class ChannelError(Exception):
    """What the other end says is not what a holder of the key says."""


def new_key() -> str:
    return secrets.token_hex(32)


def address_of(text: str) -> tuple[str, int]:
    """HOST:PORT, HOST (any free port) or [HOST6]:PORT. RefusedError otherwise."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, "0"
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise errors.RefusedError(f"{text!r} is no address", code="INVALID_ARGUMENT", remedy="HOST or HOST:PORT")
    return host, int(port)


def connect(address: str, timeout: float) -> socket.socket:
    """To HOST:PORT, or to the Unix socket of that absolute path."""
    if not address.startswith("/"):
        return _lasting(socket.create_connection(address_of(address), timeout))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def hang_up(connection: socket.socket) -> None:
    """At once, and whoever reads is woken: to close is not enough while somebody holds a file of it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    connection.close()


def _lasting(connection: socket.socket) -> socket.socket:
    """A peer whose host is gone is noticed within some ten seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


class Wire:
    """One connection whose other end holds the key. `read` on one thread; `write` under the channel's lock."""

    def __init__(self, connection: socket.socket):
        if connection.family != socket.AF_UNIX:
            _lasting(connection)
        self._connection = connection
        self._lines = connection.makefile("rb")
        self._mine = self._theirs = b""
        connection.settimeout(HANDSHAKE_SECONDS)

    @classmethod
    def accept(cls, connection: socket.socket, key: str) -> tuple["Wire", str, int]:
        """The listening end, but for its last line (`welcome`): the wire, the caller's session, how much it has received."""
        wire = cls(connection)
        nonce = secrets.token_hex(16)
        wire._put({"protocol": PROTOCOL, "nonce": nonce})
        line = wire._line(_FIRST_LINE_BYTES_MAX)
        said = _parsed(line[65:])
        _same_protocol(said)
        wire._keys(key, nonce, str(said.get("nonce")), b"listens", b"dials")
        message = wire._checked(line)
        session, received = message.get("session"), message.get("received")
        if not isinstance(session, str) or not isinstance(received, int):
            raise ChannelError("its first line names no session")
        return wire, session, received

    def welcome(self, received: int) -> None:
        self.write({"received": received})
        self._settle()

    @classmethod
    def dial(cls, connection: socket.socket, key: str, session: str, received: int) -> tuple["Wire", int]:
        """The dialling end: the wire, and how much the other end has received of this session."""
        wire = cls(connection)
        said = _parsed(wire._line(_FIRST_LINE_BYTES_MAX))
        _same_protocol(said)
        nonce = secrets.token_hex(16)
        wire._keys(key, str(said.get("nonce")), nonce, b"dials", b"listens")
        wire.write({"protocol": PROTOCOL, "nonce": nonce, "session": session, "received": received})
        heard = wire._checked(wire._line(_FIRST_LINE_BYTES_MAX)).get("received")
        if not isinstance(heard, int):
            raise ChannelError("its first line does not say what it has received")
        wire._settle()
        return wire, heard

    def _keys(self, key: str, listener: str, dialler: str, mine: bytes, theirs: bytes) -> None:
        shared = bytes.fromhex(key)
        nonces = f" {listener} {dialler}".encode()
        self._mine = hmac.digest(shared, mine + nonces, "sha256")
        self._theirs = hmac.digest(shared, theirs + nonces, "sha256")

    def _settle(self) -> None:
        """Reads wait as long as it takes from now on; writes do not."""
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _SEND_SECONDS, 0))

    def _put(self, message: Message) -> None:
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def write(self, message: Message) -> None:
        data = json.dumps(message).encode()
        self._connection.sendall(hmac.new(self._mine, data, hashlib.sha256).hexdigest().encode() + b" " + data + b"\n")

    def read(self) -> Message:
        """The next line. OSError: the connection has ended."""
        return self._checked(self._line(LINE_BYTES_MAX))

    def _line(self, most: int) -> bytes:
        line = self._lines.readline(most + 1)
        if len(line) > most:
            raise ChannelError(f"a line of more than {most} bytes")
        if not line.endswith(b"\n"):
            raise ConnectionError("the connection has ended")
        return line

    def _checked(self, line: bytes) -> Message:
        mac, _, data = line[:-1].partition(b" ")
        if not hmac.compare_digest(hmac.new(self._theirs, data, hashlib.sha256).hexdigest().encode(), mac):
            raise ChannelError("a line without the key's MAC")
        return _parsed(data)

    def close(self) -> None:
        hang_up(self._connection)


def _parsed(data: bytes) -> Message:
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ChannelError(f"a line that is no JSON: {data[:40]!r}") from error
    if not isinstance(message, dict):
        raise ChannelError("a line that is no object")
    return message


def _same_protocol(said: Message) -> None:
    if said.get("protocol") != PROTOCOL:
        raise ChannelError(f"it speaks protocol {said.get('protocol')}, this end {PROTOCOL}: install one version of weightwire "
                           "for the driver and on every host of the engine")


class Channel:
    """One end. Thread-safe; `run` on a thread of its own for each wire."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wire: Wire | None = None
        self._waiting: collections.deque[tuple[int, Message]] = collections.deque()  # that the other end may lack
        self._sent = self._received = 0

    @property
    def received(self) -> int:
        return self._received

    @property
    def attached(self) -> bool:
        return self._wire is not None

    def send(self, body: Message) -> None:
        """Now, or when there is a wire again."""
        with self._lock:
            self._sent += 1
            self._waiting.append((self._sent, body))
            if self._wire is not None:
                self._write(self._sent, body)

    def _write(self, number: int, body: Message) -> None:
        wire = self._wire
        assert wire is not None
        try:
            wire.write({"n": number, "received": self._received, "body": body})
        except OSError:  # half a line may be out: this wire is of no more use, and `run` ends
            wire.close()

    def attach(self, wire: Wire, received: int, welcome: bool = False) -> None:
        """`wire` in the place of the one before. `welcome`: this is the listening end."""
        with self._lock:
            if not self._sent - len(self._waiting) <= received <= self._sent:
                raise ChannelError(f"it says that it has received {received} messages of {self._sent}")
            if self._wire is not None:
                self._wire.close()
            self._wire = None
            if welcome:
                wire.welcome(self._received)
            self._wire = wire
            self._drop(received)
            for number, body in list(self._waiting):
                self._write(number, body)

    def _drop(self, received: int) -> None:
        while self._waiting and self._waiting[0][0] <= received:
            self._waiting.popleft()

    def run(self, wire: Wire, on_body: Callable[[Message], None]) -> None:
        """Gives what arrives to `on_body` until the wire ends (OSError), or says what no holder of the key says (ChannelError)."""
        try:
            while True:
                message = wire.read()
                number, received, body = message.get("n"), message.get("received"), message.get("body")
                if not isinstance(number, int) or not isinstance(received, int) or not isinstance(body, dict):
                    raise ChannelError("a line that is no message")
                with self._lock:
                    if self._wire is not wire:
                        raise ConnectionError("another connection has taken its place")
                    self._drop(received)
                    if number != self._received + 1:
                        raise ChannelError(f"message {number} after {self._received}")
                    self._received = number
                on_body(body)
        finally:
            wire.close()
            with self._lock:
                if self._wire is wire:
                    self._wire = None

    def close(self) -> None:
        with self._lock:
            if self._wire is not None:
                self._wire.close()
