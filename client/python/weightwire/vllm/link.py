"""The line between an engine's driver and its workers (weightwire.vllm.channel): JSON messages, never weights. A Unix socket, or TCP for an
engine of several hosts.

Workers tell their offers, their wishes for room and what they serve; the driver asks (`do`) and every worker answers under the same id.
"""

from __future__ import annotations

import collections
import ipaddress
import logging
import math
import os
import secrets
import socket
import tempfile
import threading
import time
from typing import Any, Callable

from weightwire import errors
from weightwire.vllm.channel import Channel, ChannelError, Message, Wire, address_of, connect, hang_up, new_key

log = logging.getLogger("weightwire.vllm")
_DIAL_SECONDS_MIN, _DIAL_SECONDS_MAX = 0.1, 5.0  # between two tries to reach a driver that was reached before
_STRANGERS_MAX = 64  # connections that have not shown the key


class Link:
    """A worker's end. `on_ask(do, message)` runs on the link's own thread and returns the answer. Over TCP a connection that breaks
    is made again, and nothing is lost. UnavailableError: the driver is not reached within `timeout` seconds."""

    def __init__(self, address: str, key: str, on_ask: Callable[[str, Message], Message], timeout: float):
        self._address, self._key, self._on_ask, self._timeout = address, key, on_ask, timeout
        self._session = secrets.token_hex(16)
        self._channel, self._closed = Channel(), threading.Event()
        try:
            wire = self._dial()
        except (OSError, ChannelError) as error:
            remedy = "driver and engine must share a file system, or be given EngineDriver(listen=HOST)" if address.startswith("/") else \
                "EngineDriver(listen=…) must name an address that every host of the engine reaches"
            raise errors.UnavailableError(f"the driver's socket {address}: {error}", code="UNAVAILABLE", remedy=remedy) from error
        threading.Thread(target=self._run, args=(wire,), name="weightwire-link", daemon=True).start()

    def _dial(self) -> Wire:
        connection = connect(self._address, self._timeout)
        try:
            wire, received = Wire.dial(connection, self._key, self._session, self._channel.received)
            self._channel.attach(wire, received)
        except (OSError, ChannelError):
            hang_up(connection)
            raise
        return wire

    def send(self, message: Message) -> None:
        """Best effort: a driver that left learns everything again when it comes back."""
        self._channel.send(message)

    def _run(self, wire: Wire | None) -> None:
        while wire is not None:
            try:
                self._channel.run(wire, self._answer)
            except OSError:
                pass
            except ChannelError as error:
                log.error("weightwire: the driver at %s: %s", self._address, error)
            wire = None if self._address.startswith("/") else self._dial_again()

    def _dial_again(self) -> Wire | None:
        pause = _DIAL_SECONDS_MIN
        while not self._closed.wait(pause):
            try:
                return self._dial()
            except (OSError, ChannelError) as error:
                if pause == _DIAL_SECONDS_MIN:
                    log.warning("weightwire: the driver at %s is not reached, and is tried again until it is: %s", self._address, error)
            pause = min(2 * pause, _DIAL_SECONDS_MAX)
        return None

    def _answer(self, message: Message) -> None:
        if "bye" in message:
            self._closed.set()
            return
        try:
            answer = {"ok": True, **self._on_ask(message["do"], message)}
        except Exception as error:  # the driver decides what it means
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        self.send({"id": message["id"], **answer})

    def close(self) -> None:
        self._closed.set()
        self.send({"bye": True})
        self._channel.close()


class Workers:
    """The driver's end: all ranks of one engine. Thread-safe. `listen`: HOST or HOST:PORT for ranks on other hosts, too; None: a Unix
    socket. A rank whose connection ends is gone, but over TCP, where it may dial again: there deadlines decide."""

    def __init__(self, listen: str | None = None) -> None:
        self.key = new_key()
        self._folder = ""
        self._listener = self._bind(listen)
        self._listener.listen(64)
        self._changed = threading.Condition()
        self._strangers: collections.deque[socket.socket] = collections.deque()
        self._channels: dict[str, Channel] = {}  # by session
        self._ranks: dict[int, Channel] = {}
        self._hello: dict[int, Message] = {}
        self._offers: dict[int, Message] = {}
        self._rooms: dict[int, Message] = {}
        self._answers: dict[tuple[int, int], Message] = {}
        self._fences: dict[int, str] = {}
        self._lost: dict[int, Message] = {}
        self._away: dict[int, float] = {}  # since when a rank has had no connection
        self._next_id = 0
        self._stopped = False
        threading.Thread(target=self._accept, name="weightwire-driver", daemon=True).start()

    def _bind(self, listen: str | None) -> socket.socket:
        """Sets `address`, which workers dial: HOST:PORT, or the path of a Unix socket."""
        if listen is None:
            self._folder = tempfile.mkdtemp(prefix="weightwire-driver-")
            self.address = f"{self._folder}/link.sock"
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(self.address)
            return listener
        host, port = address_of(listen)
        if _is_any(host):
            raise errors.RefusedError(f"listen={listen!r} names no host that workers could dial", code="INVALID_ARGUMENT",
                                      remedy="this host's address or name, as the engine's other hosts know it")
        try:
            family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = socket.create_server(place[:2], family=family)
        except OSError as error:
            raise errors.RefusedError(f"listen={listen!r}: {error}", code="INVALID_ARGUMENT",
                                      remedy="an address of this host, and a port that is free (or none)") from error
        self.address = f"[{host}]:{listener.getsockname()[1]}" if ":" in host else f"{host}:{listener.getsockname()[1]}"
        return listener

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or self._stopped:
                    return
                time.sleep(0.05)  # no descriptor is free, say
                continue
            with self._changed:
                self._strangers.append(connection)
                oldest = self._strangers.popleft() if len(self._strangers) > _STRANGERS_MAX else None
            if oldest is not None:
                hang_up(oldest)
            threading.Thread(target=self._serve, args=(connection,), name="weightwire-driver-rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            wire, session, received = Wire.accept(connection, self.key)
            with self._changed:
                channel = self._channels.setdefault(session, Channel())
            channel.attach(wire, received, welcome=True)
            with self._changed:
                self._away = {rank: since for rank, since in self._away.items() if self._ranks.get(rank) is not channel}
        except (OSError, ChannelError) as error:
            if not isinstance(error, ConnectionError):
                log.warning("weightwire: a connection to the driver's %s is not a worker's: %s", self.address, error)
            hang_up(connection)
            return
        finally:
            with self._changed:
                if connection in self._strangers:
                    self._strangers.remove(connection)
        try:
            channel.run(wire, lambda message: self._hear(channel, message))
        except OSError:
            pass
        except ChannelError as error:
            log.error("weightwire: a worker at %s: %s", self.address, error)
        if self._folder:
            self._forget(channel)
        elif not channel.attached:
            with self._changed:
                self._away.update((rank, time.monotonic()) for rank, known in self._ranks.items() if known is channel)

    def _forget(self, channel: Channel) -> None:
        """Of a rank that does not come back."""
        with self._changed:
            self._away.update((rank, -math.inf) for rank, known in self._ranks.items() if known is channel)
            self._channels = {session: known for session, known in self._channels.items() if known is not channel}
            self._ranks = {rank: known for rank, known in self._ranks.items() if known is not channel}
            self._changed.notify_all()

    def _hear(self, channel: Channel, message: Message) -> None:
        if "bye" in message:
            self._forget(channel)
            return
        with self._changed:
            rank = next((rank for rank, known in self._ranks.items() if known is channel), -1)
            if "hello" in message:
                rank = message["rank"]
                self._ranks[rank], self._hello[rank] = channel, message["hello"]
                self._away.pop(rank, None)
            elif "offer" in message:
                self._offers[rank] = message["offer"]
                self._rooms.pop(rank, None)
                self._fences.pop(rank, None)
            elif "room" in message:
                self._rooms[rank] = {**message["room"], "rank": rank}
            elif "lost" in message:
                self._lost[rank] = message
            elif "fenced" in message:
                self._fences[rank] = message["fenced"]
                self._offers.pop(rank, None)  # of an incarnation that is gone
                self._rooms.pop(rank, None)
            else:
                self._answers[rank, message["id"]] = message
            self._changed.notify_all()

    def _complete(self) -> bool:
        return bool(self._hello) and len(self._hello) == self.world_size

    @property
    def world_size(self) -> int:
        """Ranks of the engine; known from the first that said hello."""
        return int(next(iter(self._hello.values()))["world_size"])

    @property
    def sessions(self) -> bool:
        """Whether vLLM tells the ranks when an update starts and ends; else they make all of it when they receive."""
        return all(hello.get("sessions", True) for hello in self._hello.values())

    def wait_hello(self, timeout: float) -> list[Message]:
        """What every rank said when it was bound, by rank. Ends at once with `stop_waiting`."""
        with self._changed:
            self._changed.wait_for(lambda: self._complete() or self._stopped, timeout)
            if not self._complete():
                reached = f"only ranks {sorted(self._hello)}" if self._hello else "no rank"
                raise errors.DeadlineError(f"{reached} of the engine said hello at {self.address} within {timeout} s",
                                           code="DEADLINE_EXCEEDED", remedy="the workers' log says why; ranks on other hosts, or in another "
                                           "container, need EngineDriver(listen=an address of this host)")
            return [self._hello[rank] for rank in sorted(self._hello)]

    def wait_event(self, timeout: float, losses: bool = False) -> Message | None:
        """The offer that every rank holds and that nobody has answered, or one rank's wish for room, which names the
        `rank`, or with `losses` what a rank has lost (`lost`); None after `timeout` seconds. Epochs are only compared for equality: a coordinator that lost its memory
        counts from 1 again."""
        def event() -> Message | None:
            if not self._complete():
                return None
            epochs = {offer["epoch"] for offer in self._offers.values()}
            if len(self._offers) == self.world_size and len(epochs) == 1:
                return self._offers[0]
            lost = self._lost.values() if losses else ()
            return next(iter([*self._rooms.values(), *lost]), None)
        with self._changed:
            self._changed.wait_for(lambda: event() or self._stopped, timeout)
            return event()

    def are_gone(self, seconds: float) -> bool:
        """Whether every rank has left, or has had no connection for `seconds`: the engine was started anew, or is no more."""
        with self._changed:
            left = time.monotonic() - seconds
            return self._complete() and all(self._away.get(rank, math.inf) <= left for rank in self._hello)

    def forget(self) -> None:
        """Nothing that ranks have said counts any more: others will say hello in their places."""
        with self._changed:
            self._channels, self._ranks = {}, {}
            self._hello, self._offers, self._rooms, self._answers = {}, {}, {}, {}
            self._fences, self._lost, self._away = {}, {}, {}

    def stop_waiting(self) -> None:
        """Nobody waits for a rank's first word or for its next offer any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def answered(self, epoch: int) -> None:
        """The offer of `epoch` is dealt with."""
        with self._changed:
            self._offers = {rank: offer for rank, offer in self._offers.items() if offer["epoch"] != epoch}

    def restored(self) -> None:
        """What ranks said that they lost is dealt with."""
        with self._changed:
            self._lost = {}

    def roomed(self, rank: int) -> None:
        """Its wish is dealt with. An offer that it held before is of bytes that are gone."""
        with self._changed:
            self._rooms.pop(rank, None)
            self._offers.pop(rank, None)

    @property
    def fences(self) -> dict[int, str]:
        """Ranks that are fenced now, and why."""
        with self._changed:
            return dict(self._fences)

    def ask(self, do: str, timeout: float, ranks: list[int] | None = None, **arguments: Any) -> list[Message]:
        """Asks all ranks (or some) at once; their answers by rank. Raises when one refuses, is gone, or is late."""
        ranks = sorted(self._hello) if ranks is None else ranks
        line = {"do": do, **arguments}
        with self._changed:
            self._next_id += 1
            number = self._next_id
            missing = [rank for rank in ranks if rank not in self._ranks]
            channels = {rank: self._ranks[rank] for rank in ranks if rank in self._ranks}
        if missing:
            raise errors.UnavailableError(f"ranks {missing} of the engine are gone", code="UNAVAILABLE",
                                          remedy="restart the engine and its driver")
        for channel in channels.values():
            channel.send({**line, "id": number})
        end = time.monotonic() + timeout
        answers = []
        for rank in ranks:
            with self._changed:
                done = lambda: (rank, number) in self._answers or self._ranks.get(rank) is not channels[rank]  # noqa: E731
                if not self._changed.wait_for(done, max(0.0, end - time.monotonic())):
                    raise errors.DeadlineError(f"rank {rank} did not {do} within {timeout} s",
                                               code="DEADLINE_EXCEEDED", rank=str(rank))
                answer = self._answers.pop((rank, number), {"ok": False, "error": "its process is gone"})
            if not answer["ok"]:
                raise errors.WeightwireError(f"{do}: {answer['error']}", code="FAILED_PRECONDITION", rank=str(rank))
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            if self._listener.fileno() < 0:
                return
            self._stopped = True
            # What waits in accept is woken by a shutdown alone.
            try:
                self._listener.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            self._listener.close()
            channels, strangers = list(self._channels.values()), list(self._strangers)
        for channel in channels:
            channel.send({"bye": True})
            channel.close()
        for connection in strangers:
            hang_up(connection)
        if self._folder:
            os.unlink(self.address)
            os.rmdir(self._folder)


def _is_any(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
