"""The trainer's half: what verl's actor hands over becomes a published version."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Iterable, Protocol, Sequence

from weightwire import aio, boxes, errors
from weightwire.memory import TensorMeta
from weightwire.publisher import Publisher, Release
from weightwire.verl.buckets import Buckets


class Source(Protocol):
    """Holds one version at a time, ready to be published."""

    model_type: str  #: see rendezvous.Announcement

    def load(self, weights: Any, timeout: float) -> list[TensorMeta]:
        """Takes the next version; returns the whole tensors that it consists of, sorted by name.
        DeadlineError: the version before is still read from our memory after `timeout` seconds."""

    def publish(self, version: int, deadline: float) -> Release: ...

    def close(self) -> None: ...


class TensorSource:
    """verl's stream of whole tensors, copied into shared memory by the actor's first rank."""

    model_type = ""

    def __init__(self, bucket_bytes: int, **where: Any):
        self._buckets = Buckets(bucket_bytes)
        self._where = where
        self._publisher: Publisher | None = None
        self._tensors: list[TensorMeta] = []
        self._last: Release | None = None

    def load(self, weights: Iterable[tuple[str, Any]], timeout: float) -> list[TensorMeta]:
        stream = iter(weights)
        try:
            self._wait_for_last(timeout)
            self._buckets.begin()
            for name, tensor in stream:
                self._buckets.put(name, tensor)
            self._tensors = self._buckets.end()
        except BaseException:
            for _ in stream:  # its collectives need every rank to the end
                pass
            raise
        return self._tensors

    def _wait_for_last(self, timeout: float) -> None:
        """After a round that failed its version may still be read from the buckets."""
        if self._last is not None:
            try:
                self._last.wait_released(timeout)
            except errors.WeightwireError:
                if not self._last.released:
                    raise
        if self._publisher is not None:
            self._publisher.reclaim()  # what a publish that failed left in doubt

    def publish(self, version: int, deadline: float) -> Release:
        if self._publisher is not None and not self._publisher.attached:
            self._reset()
        if self._publisher is None:
            self._publisher = self._open()
        self._last = self._publisher.publish(version, deadline=deadline)
        return self._last

    def _open(self) -> Publisher:
        publisher = Publisher(rank=0, world_size=1, **self._where)
        try:
            publisher.bind_places(
                boxes.submission({m.name: m for m in self._tensors}, [boxes.whole(m) for m in self._tensors]),
                self._buckets.arenas, self._buckets.places)
        except BaseException:
            publisher.close()
            raise
        return publisher

    def _reset(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def close(self) -> None:
        self._reset()
        self._buckets.close()


async def next_version(coordinator: str, asked: int | None) -> int:
    """`asked` (verl's step), or the first number above all that the coordinator remembers."""
    async with aio.Client(coordinator) as client:
        status = await client.status()
    taken = max([status.committed_version, *(epoch.version for epoch in status.epochs)])
    return max(taken + 1, asked or 0)


async def wait_for_engines(coordinator: str, names: Sequence[str], timeout: float) -> None:
    """Until every engine of `names` has registered with its layout. DeadlineError names who is missing."""
    missing = set(names)
    async with aio.Client(coordinator) as client:
        async for status in client.watch(timeout):
            missing = set(names) - {e.name for e in status.engines if e.state != "incomplete"}
            if not missing:
                return
    raise errors.DeadlineError(f"rollout workers {sorted(missing)} did not register within {timeout:g} s",
                               code="DEADLINE_EXCEEDED", reason="missing_rank",
                               remedy="is a weightwired running beside each of them?")


async def wait_for_trainers(coordinator: str, world_size: int, timeout: float) -> None:
    """Until every rank of the trainer group has registered with its layout."""
    ready: set[int] = set()
    async with aio.Client(coordinator) as client:
        async for status in client.watch(timeout):
            ready = {p.rank for p in status.participants if p.role == "trainer" and p.has_layout}
            if len(ready) == world_size:
                return
    raise errors.DeadlineError(f"actor ranks {sorted(set(range(world_size)) - ready)} did not register within "
                               f"{timeout:g} s", code="DEADLINE_EXCEEDED", reason="missing_rank",
                               remedy="is a weightwired running beside each of them?")


async def publish(source: Source, version: int, deadline: float) -> dict[str, float]:
    """Publishes what `source` holds and waits until every engine has staged it; verl's metrics of the round."""
    started = time.monotonic()
    release = await asyncio.to_thread(source.publish, version, deadline)
    await asyncio.to_thread(release.wait_released, max(0.0, started + deadline - time.monotonic()))
    return {"weightwire/version": float(version), "weightwire/epoch": float(release.epoch),
            "weightwire/blocked_seconds": float(release.blocked_seconds or 0.0),
            "weightwire/failures": 0.0}
