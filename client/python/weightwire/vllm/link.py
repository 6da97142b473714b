"""The line between an engine's driver and its workers: a Unix socket, one JSON object a line, never weights.

Workers tell their offers, their wishes for room and what they serve; the driver asks (`do`) and every worker answers under the same id.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
import threading
import time
from typing import Any, Callable

from weightwire import errors

Message = dict[str, Any]


class Link:
    """A worker's end. `on_ask(do, message)` runs on the link's own thread and returns the answer."""

    def __init__(self, path: str, on_ask: Callable[[str, Message], Message], timeout: float):
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(path)
        except OSError as error:
            raise errors.UnavailableError(f"the driver's socket {path}: {error}", code="UNAVAILABLE",
                                          remedy="driver and engine must share a file system") from error
        self._socket.settimeout(None)
        self._on_ask, self._lock = on_ask, threading.Lock()
        threading.Thread(target=self._read, name="weightwire-link", daemon=True).start()

    def send(self, message: Message) -> None:
        """Best effort: a driver that left learns everything again when it comes back."""
        try:
            with self._lock:
                self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass

    def _read(self) -> None:
        try:
            for line in self._socket.makefile():
                message = json.loads(line)
                try:
                    answer = {"ok": True, **self._on_ask(message["do"], message)}
                except Exception as error:  # the driver decides what it means
                    answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
                self.send({"id": message["id"], **answer})
        except OSError:
            pass

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


class Workers:
    """The driver's end: all ranks of one engine. Thread-safe."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="weightwire-driver-")
        self.path = f"{self._folder}/link.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(64)
        self._changed = threading.Condition()
        self._ranks: dict[int, socket.socket] = {}
        self._hello: dict[int, Message] = {}
        self._offers: dict[int, Message] = {}
        self._rooms: dict[int, Message] = {}
        self._answers: dict[tuple[int, int], Message] = {}
        self._fences: dict[int, str] = {}
        self._lost: dict[int, Message] = {}
        self._next_id = 0
        self._stopped = False
        threading.Thread(target=self._accept, name="weightwire-driver", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(connection,), name="weightwire-driver-rank", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        rank = -1
        try:
            for line in connection.makefile():
                message = json.loads(line)
                with self._changed:
                    if "hello" in message:
                        rank = message["rank"]
                        self._ranks[rank], self._hello[rank] = connection, message["hello"]
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
        except OSError:
            pass
        with self._changed:
            if self._ranks.get(rank) is connection:
                del self._ranks[rank]
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
                raise errors.DeadlineError(f"only ranks {sorted(self._hello)} of the engine are bound after {timeout} s",
                                           code="DEADLINE_EXCEEDED", remedy="the engine's own log says why")
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
            connections = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        if missing:
            raise errors.UnavailableError(f"ranks {missing} of the engine are gone", code="UNAVAILABLE",
                                          remedy="restart the engine and its driver")
        for connection in connections:
            try:
                connection.sendall(json.dumps({**line, "id": number}).encode() + b"\n")
            except OSError as error:
                raise errors.UnavailableError(f"asking a rank to {do}: {error}", code="UNAVAILABLE") from error
        end = time.monotonic() + timeout
        answers = []
        for rank in ranks:
            with self._changed:
                done = lambda: (rank, number) in self._answers or rank not in self._ranks  # noqa: E731
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
            # What waits in accept is woken by a shutdown alone.
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            connections = list(self._ranks.values())
        for connection in connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        os.unlink(self.path)
        os.rmdir(self._folder)
