"""The trainer's half: what verl's actor hands over becomes a published version."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Protocol, Sequence

from weightwire import aio, errors
from weightwire.memory import TensorMeta
from weightwire.publisher import Release


class Source(Protocol):
    """Holds one version at a time, ready to be published."""

    model_type: str  #: see rendezvous.Announcement

    def load(self, weights: Any, timeout: float) -> list[TensorMeta]:
        """Takes the next version; returns the whole tensors that it consists of, sorted by name.
        DeadlineError: the version before is still read from our memory after `timeout` seconds."""

    def publish(self, version: int, deadline: float) -> Release: ...

    def close(self) -> None: ...


async def next_version(coordinator: str, asked: int | None) -> int:
    """`asked` (verl's step), or the first number above all that the coordinator remembers."""
    async with aio.Client(coordinator) as client:
        status = await client.status()
    return max(status.unused_version, asked or 0)


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
