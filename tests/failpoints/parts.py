"""What a job under failpoints is made of: daemons that can be armed, and engines that look at every byte."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
import traceback

import numpy as np

from conftest import BINARIES, until
from coordinator_job import metas
from demo import oracle
from demo.fleet import Daemon
from weightwire import Subscriber
from weightwire.errors import StaleError, WeightwireError
from weightwire.subscriber import RoomWanted


class Part:
    """One `weightwired` of the job, through as many lives as it takes."""

    def __init__(self, directory: pathlib.Path, name: str, **config):
        self.name, self.config = name, config
        self.directory = directory / name
        self.directory.mkdir(mode=0o700)
        self.file = self.directory / "failpoint"
        self.agent_socket = str(self.directory / "agent.sock")
        self.daemon: Daemon | None = None

    def start(self) -> None:
        """Raises RuntimeError when it dies before it is ready."""
        self.daemon = Daemon(str(BINARIES / "weightwired"), str(self.directory), self.name, wait=False,
                             env={**os.environ, "WEIGHTWIRE_FAILPOINT": str(self.file)}, **self.config)
        self.daemon.await_ready()

    def arm(self, point: str, action: str, skip: int, delay_ms: int) -> None:
        crossed = self.file.with_name("failpoint.crossed")
        crossed.unlink(missing_ok=True)
        new = self.file.with_name("failpoint.new")
        new.write_text(f"{point} {action} {skip} {delay_ms}\n")
        new.rename(self.file)

    @property
    def crossed(self) -> bool:
        return self.file.with_name("failpoint.crossed").exists()

    def await_crossing(self, timeout: float) -> None:
        until(f"{self.name} crosses {self.file.read_text().strip() if self.file.exists() else 'its point'}",
              lambda: self.crossed, timeout)

    def await_death(self) -> None:
        """Of a process that its failpoint killed; the file is gone, so that the next life is not hit."""
        until(f"{self.name} is dead", lambda: _state(self.daemon.pid) in (None, "Z"), 10)
        self.daemon.kill()  # nothing is left to kill: it is reaped

    def hold_still(self, seconds: float) -> None:
        """Of a process that its failpoint stopped."""
        until(f"{self.name} stands still", lambda: _state(self.daemon.pid) in ("T", "t"), 10)
        time.sleep(seconds)  # how long it stands still is what is tested
        os.kill(self.daemon.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.daemon.kill()

    def log(self) -> str:
        return (self.directory / f"{self.name}.log").read_text()

    def stop(self) -> int:
        return self.daemon.stop() if self.daemon is not None else 0


def _state(pid: int) -> str | None:
    """R, S, T, Z, …; None when there is no such process."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


class Engine:
    """All ranks of an engine. A version is served only when all have it; every byte is compared with what the trainer
    published, when it is offered and again before it is given up."""

    def __init__(self, name: str, agent: str, tp: int, buffers: int, config: dict, contents: dict[int, dict]):
        self.name, self._tp, self._config, self._contents = name, tp, config, contents
        self.buffers = buffers
        self.flipped: list[tuple[int, int]] = []  # (epoch of the content, version), in order
        self.wrong: list[str] = []
        self.gaps = 0  # times that it was seen to serve nothing any more
        self._news, self._stop = threading.Event(), threading.Event()
        self.ranks = [Subscriber(group=name, rank=rank, world_size=tp, agent=agent, buffers=buffers, timeout=10,
                                 on_offer=self._news.set) for rank in range(tp)]
        self._newest: list = [None] * tp
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def bind(self) -> None:
        """Raises WeightwireError when the agent goes away meanwhile; then it is closed."""
        try:
            self._bind()
        except WeightwireError:
            self.close()
            raise
        self._thread.start()

    def _bind(self) -> None:
        for rank in self.ranks:
            rank.bind(self._config, f"vllm:tp{self._tp}", metas(oracle.vllm_shapes(self._config, self._tp)))

    def serves(self, version: int) -> bool:
        serving = [rank.serving for rank in self.ranks]
        return all(offer is not None and offer.version == version for offer in serving)

    def _follow(self) -> None:
        while not self._stop.is_set():
            self._news.wait(0.05)
            self._news.clear()
            self.gaps += bool(self.flipped) and self.buffers == 2 and self.ranks[0].serving is None
            try:
                self._step()
            except StaleError:  # fenced meanwhile; what is served then is offered anew
                continue
            except WeightwireError:  # its agent is gone for a while
                self._stop.wait(0.05)
            except Exception:
                self.wrong.append(traceback.format_exc())
                return

    def _step(self) -> None:
        for rank, subscriber in enumerate(self.ranks):
            while (event := subscriber.wait_event(0)) is not None:
                self._newest[rank] = event
        first = self._newest[0]
        if any(event is None or event.epoch != first.epoch for event in self._newest):
            return
        offers, self._newest = self._newest, [None] * self._tp
        self.compare_served()
        if isinstance(first, RoomWanted):
            return self._insist(lambda: self.ranks[0].make_room(first))
        for rank, (subscriber, offer) in enumerate(zip(self.ranks, offers)):
            self._compare(rank, subscriber.stage(offer), offer.version)
        for subscriber, offer in zip(self.ranks, offers):
            subscriber.flip(offer)
        self.flipped.append((first.content, first.version))
        self._insist(lambda: self.ranks[0].acknowledge(first))

    def _insist(self, call) -> None:
        """Until it is answered: an agent that stands still, or has just gone, is no answer."""
        while not self._stop.is_set():
            try:
                return call()
            except StaleError:
                raise
            except WeightwireError:
                self._stop.wait(0.05)

    def compare_served(self) -> None:
        for rank, subscriber in enumerate(self.ranks):
            serving, params = subscriber.serving, subscriber.params
            if serving is not None and params is not None:
                self._compare(rank, params, serving.version)

    def _compare(self, rank: int, params, version: int) -> None:
        for name, want in oracle.vllm(self._config, self._contents[version], self._tp, rank):
            if not np.array_equal(params[name][:len(want)], want):
                self.wrong.append(f"{self.name}/{rank}: {name} is not that of version {version}")

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(15)
        for rank in self.ranks:
            rank.close()
