"""One small version after another: nothing grows with their number. The coordinator, the trainer (two ranks) and two engines
have daemons of their own; engine-b's reads over tcp. Nobody is killed or cut off: what grows here grows by versions alone.

`./dev test` publishes 500 versions, `./dev test long` 5,000 (`WEIGHTWIRE_VERSIONS`). The table that it prints is the one of
docs/history/performance.md; docs/performance.md has its ends."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conftest import BINARIES, EngineRanks, Trainer, until
from coordinator_job import content, metas
from demo import checkpoint, oracle
from demo.fleet import Daemon
from soak_record import MIB, Sample, look
from weightwire import Client, Subscriber, TensorMeta

VERSIONS = int(os.environ.get("WEIGHTWIRE_VERSIONS", "500"))
ATTACHMENTS = 200
CONFIG = {**checkpoint.SMALL, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 2, "vocab_size": 2003}
#: From the second quarter of the versions to the last one. The coordinator keeps a row for each of the newest 256 epochs, which
#: is some of that; a megabyte for each version, or a descriptor for each tenth, is far more.
RSS_GROWS_MAX, FDS_GROW_MAX, THREADS_GROW_MAX = 6 * MIB, 4, 2


class Row(NamedTuple):
    version: int
    samples: dict[str, Sample]


def looked(pid: int, began: float) -> Sample:
    """Without the threads of gRPC's executor, which grows with the load to twice the cores and never shrinks (its src/core/lib/iomgr/executor.cc)."""
    sample, executors = look(pid, began), 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            executors += (task / "comm").read_text() == "default-executo\n"
    assert executors <= 2 * os.cpu_count()
    return sample._replace(threads=sample.threads - executors)


def shards(version: int) -> list[dict]:
    hf = content(version, CONFIG)
    return [{name: (TensorMeta(name, "BF16", bits.shape), bits) for name, bits in oracle.megatron(CONFIG, hf, 2, 1, rank)}
            for rank in range(2)]


def wrong(engine: EngineRanks, version: int) -> list[str]:
    params = engine.ranks[0].params
    return [name for name, want in oracle.vllm(CONFIG, content(version, CONFIG), 1, 0)
            if not np.array_equal(params[name][:len(want)], want)]


def grown(rows: list[Row], name: str, of: str) -> float:
    quarter = len(rows) // 4
    second, last = (statistics.median(getattr(row.samples[name], of) for row in part)
                    for part in (rows[quarter:2 * quarter], rows[-quarter:]))
    return last - second


def table(rows: list[Row]) -> str:
    names = list(rows[0].samples)
    lines = [f"| version | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    step = max(1, len(rows) // 10)
    for row in rows[step - 1::step]:
        cells = [f"{s.rss / MIB:.1f} / {s.fds} / {s.threads}" for s in row.samples.values()]
        lines.append(f"| {row.version} | {' | '.join(cells)} |")
    return "\n".join(lines)


def descriptors_while_attaching(daemons: list[Daemon], agent: str) -> dict[str, tuple[int, int]]:
    """Another engine comes, binds and leaves, again and again: descriptors after the first time and after the last."""
    def here() -> dict[str, int]:
        return {daemon.name: look(daemon.pid, 0).fds for daemon in daemons} | {"this process": look(os.getpid(), 0).fds}
    counts = []
    for _ in range(ATTACHMENTS):
        with Subscriber(group="guest", rank=0, world_size=1, agent=agent) as guest:
            guest.bind(CONFIG, "vllm:tp1", metas(oracle.vllm_shapes(CONFIG, 1)))
        counts.append(here())
    return {name: (counts[0][name], counts[-1][name]) for name in counts[0]}


def test_many_small_versions_leave_memory_descriptors_and_threads_where_they_were(tmp_path, groups):
    def start(name: str, **options) -> Daemon:
        started.append(Daemon(str(BINARIES / "weightwired"), f"{tmp_path}/{name}", name, **options))
        return started[-1]
    started: list[Daemon] = []
    try:
        coordinator = start("coordinator", role="coordinator", listen="127.0.0.1:0", state_dir=f"{tmp_path}/coordinator")
        agents = {name: start(name, role="agent", coordinator=coordinator.grpc, **options) for name, options in
                  (("trainer", {}), ("engine-a", {}), ("engine-b", {"transports": "[tcp]"}))}
        trainer = Trainer(agents["trainer"].agent_socket, CONFIG, "megatron:tp2", shards(1))
        groups.append(trainer)
        engines = [EngineRanks(agents[name].agent_socket, name, CONFIG, "vllm:tp1", [metas(oracle.vllm_shapes(CONFIG, 1))])
                   for name in ("engine-a", "engine-b")]
        groups += engines
        with Client(coordinator.grpc) as client:
            until("both engines take part", lambda: sum(e.ranks_present for e in client.status().engines) == 2)
        rows, began, moved = [], time.monotonic(), 0
        for version in range(1, VERSIONS + 1):
            published = shards(version)
            moved += sum(bits.nbytes for shard in published for _, bits in shard.values())
            trainer.fill(published)
            trainer.publish(version)
            for engine in engines:
                engine.wait_version(version)
                assert not wrong(engine, version)
            rows.append(Row(version, {daemon.name: looked(daemon.pid, began) for daemon in started}
                            | {"this process": look(os.getpid(), began)}))
        attached = descriptors_while_attaching(started, agents["engine-a"].agent_socket)
        print(f"{VERSIONS} versions of {moved / VERSIONS / 1e6:.1f} MB in {time.monotonic() - began:.0f} s; "
              f"MiB resident / descriptors / threads\n{table(rows)}")
        print(f"descriptors after the first and the last of {ATTACHMENTS} attachments: {attached}")
        for first, last in attached.values():
            assert last - first <= FDS_GROW_MAX, attached
        for name in rows[0].samples:
            assert grown(rows, name, "fds") <= FDS_GROW_MAX, f"{name}: {table(rows)}"
            assert grown(rows, name, "threads") <= THREADS_GROW_MAX, f"{name}: {table(rows)}"
            if name != "this process":  # numpy's, and what the test itself keeps
                assert grown(rows, name, "rss") <= RSS_GROWS_MAX, f"{name}: {table(rows)}"
    finally:
        for group in reversed(groups):
            group.close()
        groups.clear()
        codes = [daemon.stop() for daemon in reversed(started)]
    assert not any(codes), codes
