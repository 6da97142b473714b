"""The processes of the demo and the benchmark: trainer ranks and engine ranks, one process each.

Each listens on a Unix socket for the driver (and, inside an engine, for its leader): a request is a
tuple (verb, *arguments), the answer (True, value) or (False, text).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Client, Listener

import numpy as np

from demo import checkpoint, oracle
from weightwire import Publisher, Subscriber, TensorMeta

_ANSWER_SECONDS = 120


def ask(path: str, *request, timeout: float = _ANSWER_SECONDS):
    """Sends one request to the process listening at `path`; raises on failure, death or time-out."""
    with Client(path, "AF_UNIX") as connection:
        connection.send(request)
        if not connection.poll(timeout):
            raise TimeoutError(f"{path} did not answer {request[0]!r} within {timeout} s")
        ok, value = connection.recv()
    if not ok:
        raise RuntimeError(f"{os.path.basename(path)} {request[0]}: {value}")
    return value


def serve(path: str, handlers: dict) -> None:
    """Answers requests, each on its own thread, until "stop"."""
    def answer(connection):
        with connection:
            try:
                verb, *arguments = connection.recv()
                reply = (True, handlers[verb](*arguments))
            except EOFError:
                return
            except Exception as error:  # the driver reports it with the process's name
                reply = (False, f"{type(error).__name__}: {error}")
            try:
                connection.send(reply)
            except OSError:
                pass

    stopping = threading.Event()
    handlers = {**handlers, "stop": stopping.set}
    with Listener(path, "AF_UNIX", backlog=16) as listener:
        def accept():
            while True:
                try:
                    threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()
                except OSError:
                    return
        threading.Thread(target=accept, daemon=True).start()
        stopping.wait()
        time.sleep(0)  # let the answer to "stop" leave before the socket goes


class Process:
    """A child running this module, or another program that calls `serve`; killed with the driver."""

    def __init__(self, path: str, *arguments: str, log, program: tuple[str, ...] = ("-m", "demo.processes")):
        self.path = path
        self._start = lambda: subprocess.Popen(
            [sys.executable, *program, path, *arguments], stdout=log, stderr=log,
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        self._popen = self._start()

    def wait_ready(self, timeout: float = 60) -> None:
        """Returns when the process takes connections; its socket's file is there a moment earlier."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                Client(self.path, "AF_UNIX").close()
                return
            except (FileNotFoundError, ConnectionRefusedError):
                pass
            if self._popen.poll() is not None:
                raise RuntimeError(f"{os.path.basename(self.path)} ended with {self._popen.returncode}; see its log")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{os.path.basename(self.path)} did not start within {timeout} s")
            time.sleep(0.01)

    def ask(self, *request, timeout: float = _ANSWER_SECONDS):
        return ask(self.path, *request, timeout=timeout)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def kill(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self.wait_dead()

    def wait_dead(self) -> None:
        self._popen.wait(30)
        if os.path.exists(self.path):
            os.unlink(self.path)

    def restart(self) -> None:
        self._popen = self._start()

    def stop(self) -> None:
        if self._popen.poll() is None:
            try:
                self.ask("stop", timeout=5)
                self._popen.wait(5)
            except (OSError, EOFError, TimeoutError, subprocess.TimeoutExpired):
                self._popen.kill()
        self._popen.wait()


def _bf16(shapes: dict[str, tuple[int, ...]]) -> list[TensorMeta]:
    return [TensorMeta(name, "BF16", shape) for name, shape in shapes.items()]


def trainer(path: str, agent: str, config_dir: str, tp: str, pp: str, rank: str) -> None:
    """One Megatron rank. Verbs: load DIRECTORY, change (every element), publish VERSION MODE."""
    tp_size, pp_size, index = int(tp), int(pp), int(rank)
    config = checkpoint.read_config(config_dir)
    shapes = {name: a.shape for name, a in
              oracle.megatron(config, checkpoint.empty(config), tp_size, pp_size, index)}
    with Publisher(rank=index, world_size=tp_size * pp_size, agent=agent) as publisher:
        params = publisher.bind(config, f"megatron:tp{tp_size},pp{pp_size}", _bf16(shapes))

        def load(directory: str) -> None:
            for name, array in oracle.megatron(config, checkpoint.read(directory), tp_size, pp_size, index):
                params[name][...] = array

        def change() -> None:
            for array in params.values():
                array += 1

        def publish(version: int, mode: str = "hold", deadline: float = 60.0):
            release = publisher.publish(version, mode=mode, deadline=deadline).wait_released(deadline + 10)
            return release.epoch, release.blocked_seconds

        serve(path, {"load": load, "change": change, "publish": publish})


class EngineRank:
    """One vLLM-layout rank; rank 0 leads: it flips all ranks under its step lock, then acknowledges."""

    def __init__(self, agent: str, config: dict, name: str, tp: int, rank: int, peers: list[str]):
        self._config, self._tp, self._rank, self._peers = config, tp, rank, peers
        self._step = threading.Lock()  # held while the engine is between two scheduler steps
        self._offers: dict[int, object] = {}
        self._arrived = threading.Condition()
        self._samples: dict[int, list[np.ndarray]] = {}
        self._die_at_version = 0
        self.subscriber = Subscriber(group=name, rank=rank, world_size=tp, agent=agent)
        self.subscriber.bind(config, f"vllm:tp{tp}", _bf16(oracle.vllm_shapes(config, tp)))
        threading.Thread(target=self._take_offers, daemon=True).start()

    def _take_offers(self) -> None:
        while True:
            offer = self.subscriber.wait_offer(timeout=60)
            if offer is None:
                continue
            with self._arrived:
                self._offers[offer.epoch] = offer
                self._arrived.notify_all()
            if offer.leader:
                try:
                    self._swap_all(offer)
                except Exception as error:  # a rank is gone: the agent fences this engine
                    print(f"swap to epoch {offer.epoch} not done: {error}", file=sys.stderr, flush=True)

    def _swap_all(self, offer) -> None:
        with self._step:
            started = time.perf_counter()
            self.subscriber.flip(offer)
            for peer in self._peers:
                self._ask_to_flip(peer, offer.epoch)
            seconds = time.perf_counter() - started
        self.subscriber.acknowledge(offer, seconds)

    def _ask_to_flip(self, peer: str, epoch: int) -> None:
        end = time.monotonic() + 10
        while True:
            try:
                return ask(peer, "flip", epoch, timeout=10)
            except (FileNotFoundError, ConnectionRefusedError):  # a rank that has just started is offered before it listens
                if time.monotonic() > end or self.subscriber.serving is None:
                    raise
                time.sleep(0.01)

    def flip(self, epoch: int) -> None:
        with self._arrived:
            if not self._arrived.wait_for(lambda: epoch in self._offers, 10):
                raise TimeoutError(f"no offer of epoch {epoch}")
            offer = self._offers[epoch]
        if offer.version == self._die_at_version:
            os.kill(os.getpid(), signal.SIGKILL)
        self.subscriber.flip(offer)

    def die_at_flip(self, version: int) -> None:
        self._die_at_version = version

    def expect(self, version: int, directory: str) -> None:
        """Remembers a few values of `version`, to recognise it while serving."""
        samples = oracle.vllm_samples(self._config, checkpoint.read(directory), self._tp, self._rank)
        self._samples = {**self._samples, version: samples}  # another thread may be looking through the one of before

    def stamp(self):
        """(version this rank claims, versions its sampled tensors really hold); None = not serving, or just started again
        and not told yet what any version holds."""
        serving, params, samples = self.subscriber.serving, self.subscriber.params, self._samples
        if serving is None or params is None or not samples:
            return None
        held = oracle.vllm_sampled_from(self._config, params)
        found = {v for i, h in enumerate(held) for v, s in samples.items() if np.array_equal(s[i], h)}
        known = all(any(np.array_equal(s[i], h) for s in samples.values()) for i, h in enumerate(held))
        return serving.version, sorted(found) if known else sorted(found) + ["unknown bytes"]

    def serve(self):
        """Leader: answers one request between two steps. None: the engine does not serve now."""
        with self._step:
            try:
                stamps = [self.stamp()] + [ask(peer, "stamp", timeout=5) for peer in self._peers]
            except (OSError, EOFError):  # a rank is gone, so is the engine
                return None
            if self.subscriber.serving is None:  # fenced meanwhile
                return None
        return stamps if all(stamps) else None

    def verify(self, version: int, directory: str):
        """(elements compared, elements that differ, version served) against the oracle."""
        serving, params = self.subscriber.serving, self.subscriber.params
        if serving is None:
            return 0, 0, None
        compared = wrong = 0
        for name, want in oracle.vllm(self._config, checkpoint.read(directory), self._tp, self._rank):
            got = params[name][:len(want)]
            compared += want.size
            wrong += int(np.count_nonzero(got != want))
        return compared, wrong, serving.version


def engine(path: str, agent: str, config_dir: str, name: str, tp: str, rank: str, *peers: str) -> None:
    """One rank of an engine. Verbs: those of EngineRank."""
    me = EngineRank(agent, checkpoint.read_config(config_dir), name, int(tp), int(rank), list(peers))
    serve(path, {verb: getattr(me, verb) for verb in ("flip", "die_at_flip", "expect", "stamp", "serve", "verify")})
    me.subscriber.close()


if __name__ == "__main__":
    socket_path, kind, *rest = sys.argv[1:]
    {"trainer": trainer, "engine": engine}[kind](socket_path, *rest)
