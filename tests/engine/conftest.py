"""Fixtures of the real-engine suite: checkpoints, a daemon, and answers of freshly started engines."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from demo.fleet import Daemon
from tests.engine import models, rig

BINARIES = Path(os.environ["WEIGHTWIRE_BIN_DIR"])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind, seed) -> folder; made once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(kind: str, seed: int) -> Path:
        path = folder / f"{kind}-{seed}"
        return path if path.exists() else models.make(path, kind, seed)
    return get


@pytest.fixture(scope="session")
def fresh(checkpoint):
    """fresh(kind, tp, seed) -> what an engine answers that was started on this checkpoint and never updated."""
    known: dict[tuple, list] = {}

    def get(kind: str, tp: int, seed: int) -> list[dict]:
        key = (kind, tp, seed)
        if key not in known:
            with contextlib.closing(rig.Engine(checkpoint(kind, seed), tp)) as engine:
                known[key] = engine.answers()
        return known[key]
    return get


class Stack:
    """A daemon, and whatever is opened beside it; closed last first."""

    def __init__(self, folder: Path, **config):
        self._opened = contextlib.ExitStack()
        self.daemon = Daemon(str(BINARIES / "weightwired"), str(folder), "hub", role="all", listen="127.0.0.1:0",
                             **config)
        self.agent = self.daemon.agent_socket

    def add(self, thing):
        return self._opened.enter_context(contextlib.closing(thing))

    def close(self):
        try:
            self._opened.close()
        finally:
            code = self.daemon.stop()
        assert code == 0


@pytest.fixture
def stack(tmp_path):
    with contextlib.closing(Stack(tmp_path / "daemon")) as opened:
        yield opened


@pytest.fixture(scope="module")
def module_stack(tmp_path_factory):
    with contextlib.closing(Stack(tmp_path_factory.mktemp("daemon"))) as opened:
        yield opened


class Faults:
    """Arms weightwire_faults in the workers of engines that are started after it."""

    def __init__(self, path: Path):
        self._path, self._count = path, 0
        path.write_text("")
        os.environ["WEIGHTWIRE_ENGINE_FAULTS"] = str(path)

    def arm(self, step: str, rank: int, times: int) -> None:
        self._count += 1
        self._path.write_text(json.dumps({"id": self._count, "step": step, "rank": rank, "times": times}))

    def clear(self) -> None:
        self._path.write_text("")

    def close(self) -> None:
        del os.environ["WEIGHTWIRE_ENGINE_FAULTS"]


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    with contextlib.closing(Faults(tmp_path_factory.mktemp("faults") / "armed")) as armed:
        yield armed
