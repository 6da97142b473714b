"""What a trainer tells its rollout workers beside the weights: which tensors come, and how a round ended.

verl's `prepare` cannot say either: it runs before the weights are looked at. So the actor's first rank listens,
and every rollout worker asks once per round. Lines of JSON over TCP:

  ask   {"token", "round"}
  told  {"version", "model_type", "tensors": [[name, dtype, shape], …]}   as soon as the trainer knows
  told  {"go"}                                              every rollout worker has registered
  told  {"error"}                                           the round ended; "" when the version was published

A line comes when it is known, or never: the asker has the deadline. Names and shapes pass here, no weights. The
token keeps strangers from reading them; whoever reads the traffic can.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from weightwire import errors
from weightwire.memory import TensorMeta

_LINE_BYTES_MAX = 64 << 20
_ASK_BYTES_MAX = 1024
_ASK_SECONDS = 5.0
_WORD_SECONDS = 1.0


@dataclass(frozen=True)
class Announcement:
    """What a round brings."""

    version: int
    tensors: list[TensorMeta]  #: whole tensors, by name
    model_type: str = ""  #: where packed experts must be taken apart for the rollout: the model's type


class Rendezvous:
    """The trainer's side. `begin` a round, `announce` what it sends, `go`, `finish` it; none waits for anybody."""

    def __init__(self, host: str):
        self.host = host
        self.token = secrets.token_hex(16)
        self._changed = threading.Condition()
        self._round = 0
        self._lines: list[dict[str, Any]] = []
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="weightwire-rendezvous", daemon=True).start()

    def begin(self) -> int:
        """A new round; who still waits for the one before is sent away."""
        with self._changed:
            self._round += 1
            self._lines = []
            self._changed.notify_all()
            return self._round

    def announce(self, what: Announcement) -> None:
        self._say({"version": what.version, "model_type": what.model_type,
                   "tensors": [[t.name, t.dtype, list(t.shape)] for t in what.tensors]})

    def go(self) -> None:
        """Every rollout worker has registered: the actor's other ranks may publish."""
        self._say({"go": True})

    def finish(self, error: str = "") -> None:
        """The round ended; `error` says why nothing was published."""
        self._say({"error": error})

    def _say(self, line: dict[str, Any]) -> None:
        with self._changed:
            self._lines.append(line)
            self._changed.notify_all()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(peer,), name="weightwire-rendezvous", daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            try:
                peer.settimeout(_ASK_SECONDS)
                ask = json.loads(_read_line(peer))
                if not hmac.compare_digest(str(ask["token"]), self.token):
                    return
                for line in self._told(int(ask["round"]), peer):
                    peer.settimeout(_ASK_SECONDS)
                    peer.sendall(json.dumps(line).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError):
                return  # the asker went away, or is none of ours

    def _told(self, number: int, peer: socket.socket) -> Iterator[dict[str, Any]]:
        """The lines of round `number` as they come; ends with its last one, or when it is over."""
        at = 0
        while True:
            with self._changed:
                while not self._closed and self._round == number and len(self._lines) <= at:
                    self._changed.wait(_WORD_SECONDS)
                    if _hung_up(peer):
                        return
                if self._closed or self._round != number:
                    return
                line = self._lines[at]
            yield line
            at += 1
            if "error" in line:
                return

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._listener.close()


def _read_line(peer: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _ASK_BYTES_MAX:
        more = peer.recv(_ASK_BYTES_MAX - len(data))
        if not more:
            break
        data += more
    return data


def _hung_up(peer: socket.socket) -> bool:
    try:
        peer.setblocking(False)
        return peer.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        peer.setblocking(True)


class Round:
    """A rollout worker's side of one round."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, where: str):
        self._reader, self._writer, self._where = reader, writer, where

    @staticmethod
    async def ask(rendezvous: Mapping[str, Any]) -> "Round":
        """`rendezvous`: host, port, token and round, as the trainer's `prepare` gave them."""
        where = f"{rendezvous['host']}:{rendezvous['port']}"
        try:
            reader, writer = await asyncio.open_connection(rendezvous["host"], rendezvous["port"], limit=_LINE_BYTES_MAX)
            writer.write(json.dumps({"token": rendezvous["token"], "round": rendezvous["round"]}).encode() + b"\n")
            await writer.drain()
        except OSError as error:
            raise _gone(where, str(error)) from error
        return Round(reader, writer, where)

    async def announced(self) -> Announcement:
        """AbortedError: the trainer gave up before it knew."""
        line = await self._line()
        return Announcement(line["version"], [TensorMeta(name, dtype, tuple(shape))
                                              for name, dtype, shape in line["tensors"]], line["model_type"])

    async def go(self) -> None:
        """Returns once every rollout worker has registered. AbortedError: the trainer gave up."""
        await self._line()

    async def published(self) -> None:
        """Returns once the version is staged everywhere. AbortedError: the trainer gave it up."""
        while "error" not in await self._line():
            pass

    async def _line(self) -> dict[str, Any]:
        try:
            data = await self._reader.readline()
        except (OSError, ValueError) as error:
            raise _gone(self._where, str(error)) from error
        if not data:
            raise _gone(self._where, "the trainer ended the round")
        line: dict[str, Any] = json.loads(data)
        if line.get("error"):
            raise errors.AbortedError(f"the trainer gave the version up: {line['error']}", code="ABORTED",
                                      reason="abort_requested")
        return line

    def close(self) -> None:
        self._writer.close()


def _gone(where: str, why: str) -> errors.UnavailableError:
    return errors.UnavailableError(f"the trainer at {where} cannot be asked: {why}", code="UNAVAILABLE",
                                   reason="member_lost")
