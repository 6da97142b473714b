"""Sites of a job: each a `weightwired` with its engines, joined by a store through real writer and follower processes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np

from conftest import BINARIES, DATA, Daemon, EngineRanks, Trainer, read_safetensors, until
from weightwire import Client

MODEL = DATA / "megatron/qwen2/hf"
CONFIG = MODEL / "config.json"


def weights() -> dict:
    """name -> (meta, bits) of a small real model."""
    return read_safetensors(MODEL / "model.safetensors")


def stepped(tensors: dict, seed: int, share: float = 0.03) -> dict:
    """About this share of all elements moved by one in the last place, as a training step moves them."""
    random = np.random.default_rng(seed)
    return {name: (meta, np.where(random.random(bits.shape) < share, bits + bits.dtype.type(1), bits).astype(bits.dtype))
            for name, (meta, bits) in tensors.items()}


class Command:
    """A `python -m weightwire.store …`, whose lines are kept."""

    def __init__(self, *arguments: object, env: dict | None = None):
        self.process = subprocess.Popen([sys.executable, "-u", "-m", "weightwire.store", *map(str, arguments)], stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True, env={**os.environ, **(env or {})})
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_line(self, *words: str, timeout: float = 60) -> str:
        def found():
            line = next((line for line in self.lines if all(word in line for word in words)), None)
            assert line is not None or self.process.poll() is None, f"it ended ({self.process.returncode}):\n{self.text}"
            return line
        return until(f"a line with {words}; lines: {self.lines[-5:]}", found, timeout)

    def wait(self, timeout: float = 60) -> int:
        code = self.process.wait(timeout)
        self._thread.join(10)
        return code

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(30)

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(30)


class Site:
    def __init__(self, folder: pathlib.Path, name: str):
        self.name = name
        self.daemon = Daemon(str(BINARIES / "weightwired"), str(folder / name), name, role="all", listen="127.0.0.1:0")
        self.config = json.loads(CONFIG.read_text())
        self.engines: list[EngineRanks] = []
        self.trainer: Trainer | None = None
        self.commands: list[Command] = []

    def add_trainer(self, tensors: dict) -> Trainer:
        self.trainer = Trainer(self.daemon.agent_socket, self.config, "hf", [tensors])
        return self.trainer

    def add_engine(self, name: str) -> EngineRanks:
        shapes = [[meta for meta, _ in weights().values()]]
        self.engines.append(EngineRanks(self.daemon.agent_socket, name, self.config, "hf", shapes))
        return self.engines[-1]

    def writer(self, url: str, *more: object, env: dict | None = None) -> Command:
        return self._start("write", url, "--config", CONFIG, "--agent", self.daemon.agent_socket, "--quiet", *more, env=env)

    def follower(self, url: str, *more: object, env: dict | None = None) -> Command:
        return self._start("follow", url, "--site", self.name, "--agent", self.daemon.agent_socket, "--coordinator", self.daemon.grpc,
                           "--poll", "0.1s", "--quiet", *more, env=env)

    def _start(self, *arguments: object, env: dict | None) -> Command:
        self.commands.append(Command(*arguments, env=env))
        return self.commands[-1]

    def publish(self, version: int, tensors: dict) -> None:
        """As a training loop does: the parameters change, then the version is published, and released everywhere."""
        self.trainer.fill([tensors])
        self.trainer.publish(version)

    def root(self) -> str:
        """What `wwctl verify` says of the content of its first engine that is no writer."""
        with Client(self.daemon.grpc) as client:
            return next(engine.root for engine in client.verify().engines if engine.name != "store")

    def close(self) -> None:
        for command in self.commands:
            command.close()
        for engine in self.engines:
            engine.close()
        if self.trainer is not None:
            self.trainer.close()
        self.daemon.stop()


def holds(engine: EngineRanks, tensors: dict) -> bool:
    """Every byte that the engine serves is the byte of these arrays."""
    params = engine.ranks[0].params
    return params is not None and all(np.array_equal(params[name].view(bits.dtype), bits) for name, (_, bits) in tensors.items())
