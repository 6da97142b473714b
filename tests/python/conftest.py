"""Shared pieces of the Python tests: a running daemon, checkpoints, and both sides of a group."""

from __future__ import annotations

import functools
import importlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Sequence

import numpy as np
import pytest

from demo.fleet import Daemon
from weightwire import Device, DeviceArray, Publisher, StaleError, Subscriber, TensorMeta

# Whoever starts this in the background may have SIGINT ignored, and so has every process of a test: then nobody is interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files that take half a minute or longer, and so go first where several run side by side.
_LONGEST = ("test_soak", "test_shutdown", "test_load", "test_vllm_driver", "test_exclude", "test_kills", "test_partition", "test_etcd",
            "test_doctor", "test_reported_faults", "test_delta", "test_store_sim", "test_checkpoint_sharded_chain", "test_vllm_link", "test_deploy_observability")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _LONGEST.index(item.path.stem) if item.path.stem in _LONGEST else len(_LONGEST))


ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = ROOT / "tests/data"
BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))
_BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32, "F8_E4M3": np.uint8, "U8": np.uint8,
         "I32": np.uint32, "I64": np.uint64}


def until(what: str, condition, timeout: float = 60):
    """The first true answer of `condition`, asked again and again: other processes tell no events."""
    end = time.monotonic() + timeout
    while not (answer := condition()):
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        time.sleep(0.02)
    return answer


def read_safetensors(path) -> dict[str, tuple[TensorMeta, np.ndarray]]:
    """name -> (meta, bits)."""
    data = pathlib.Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    out = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[8 + length + begin:8 + length + end], _BITS[entry["dtype"]])
        out[name] = TensorMeta(name, entry["dtype"], tuple(entry["shape"])), bits.reshape(entry["shape"])
    return out


def stand_still(pid: int) -> None:
    """SIGSTOP, until no thread of the process runs: kill() returns before, and on a busy machine they may go on for a while."""
    os.kill(pid, signal.SIGSTOP)
    until(f"process {pid} stands still", lambda: all(
        stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")))


@pytest.fixture
def daemon(tmp_path):
    """A `weightwired --role all` with a journal in memory; its exit code must be 0."""
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


class Trainer:
    """All ranks of a trainer in this process: one Publisher each, filled from `shards`."""

    def __init__(self, agent: str, config: dict, spec: str, shards: list[dict], device: Device | None = None):
        self.publishers = []
        self.params = []
        for rank, shard in enumerate(shards):
            publisher = Publisher(rank=rank, world_size=len(shards), agent=agent, device=device)
            self.publishers.append(publisher)
            self.params.append(publisher.bind(config, spec, [meta for meta, _ in shard.values()]))
        self.fill(shards)

    def fill(self, shards: list[dict]):
        for params, shard in zip(self.params, shards):
            for name, (_, bits) in shard.items():
                if isinstance(params[name], DeviceArray):
                    params[name].write(bits)
                else:
                    params[name].view(bits.dtype)[...] = bits

    def publish(self, version: int, **options):
        releases = [p.publish(version, **options) for p in self.publishers]
        return [r.wait_released(60) for r in releases]

    def close(self):
        with ThreadPoolExecutor(len(self.publishers)) as pool:
            list(pool.map(Publisher.close, self.publishers))


def golden_script(name: str):
    """A script of tests/golden: what of it needs no library."""
    folder = str(ROOT / "tests/golden")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


class EngineRanks:
    """All ranks of an engine in this process; `follow` flips and acknowledges as a leader would."""

    def __init__(self, agent: str, name: str, config: dict, spec: str, shapes: list[list[TensorMeta]],
                 traces: list | None = None, device: Device | None = None, checkpoint: Sequence[TensorMeta] = (),
                 on_copy_check=None, model_name: str = ""):
        """`on_copy_check(rank)`, of ranks that serve from copies."""
        self.ranks = []
        self.notes = []
        for rank, tensors in enumerate(shapes):
            subscriber = Subscriber(group=name, rank=rank, world_size=len(shapes), agent=agent, device=device, model_name=model_name,
                                    on_copy_check=on_copy_check and functools.partial(on_copy_check, rank))
            self.ranks.append(subscriber)
            self.notes.append(self.bind(subscriber, config, spec, tensors, traces[rank] if traces else None, checkpoint))
        self._stop = threading.Event()
        self.flipped = threading.Condition()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def bind(self, subscriber: Subscriber, *layout) -> list[str]:
        return subscriber.bind(*layout)

    def _follow(self):
        while not self._stop.is_set():
            offers = [self.ranks[0].wait_offer(0.2)]
            if offers[0] is None:
                continue
            offers += [rank.wait_offer(20) for rank in self.ranks[1:]]
            assert len({o.epoch for o in offers}) == 1
            try:
                for rank, offer in zip(self.ranks, offers):
                    rank.flip(offer)
                self.ranks[0].acknowledge(offers[0])
            except StaleError:  # fenced meanwhile: what is offered again comes to the new incarnation
                continue
            with self.flipped:
                self.flipped.notify_all()

    def wait_version(self, version: int, timeout: float = 30):
        with self.flipped:
            ok = self.flipped.wait_for(lambda: all(r.serving and r.serving.version == version for r in self.ranks),
                                       timeout)
        assert ok, f"version {version} did not arrive; serving {[r.serving for r in self.ranks]}, " \
                   f"fenced: {[r.last_fence for r in self.ranks]}"

    def close(self):
        self._stop.set()
        self._thread.join(30)
        for rank in self.ranks:
            rank.close()


_crashed: list[str] = []


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_handlecrashitem(crashitem, report, sched):
    _crashed.append(crashitem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """A process that ended in a test leaves the rest of its file untested: that is more than a failed test, which `./dev test` runs again."""
    if _crashed:
        session.exitstatus = pytest.ExitCode.INTERNAL_ERROR


@pytest.fixture
def groups():
    """Collects groups and closes them at the end, engines first."""
    opened = []
    yield opened
    for group in reversed(opened):
        group.close()


@pytest.fixture
def coordinator_job(tmp_path):
    """Starts a coordinator_job.Job, with options for its coordinator."""
    from coordinator_job import Job  # imports this file
    jobs = []

    def start(**options) -> Job:
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]
    yield start
    for job in jobs:
        job.close()


@pytest.fixture(scope="session")
def s3():
    from store_server import S3
    server = S3()
    yield server
    server.stop()


@pytest.fixture
def store_environment(monkeypatch):
    """Where the library lies that codes changes, and keys of `s3`."""
    from store_server import KEYS
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
