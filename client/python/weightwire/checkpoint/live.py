"""Checkpoints in a running job: one is published as a version, engines are started from one or from a peer, and a version
that engines have is written out.

All are ordinary participants beside an agent. `push` is the trainer, of the checkpoint's own layout; `save` is an engine
of the target's layout, which, joining late, is filled by its peers and takes nothing from the trainer.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Optional, Sequence, cast

from weightwire import errors
from weightwire.checkpoint.execute import memory_bits
from weightwire.checkpoint.formats import Wanted
from weightwire.checkpoint.loading import fill_rest
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.sources import PathLike, find, open_checkpoint
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import Writing, base_folder, check_free, target_layout
from weightwire.client import Client
from weightwire.memory import Arrays
from weightwire.publisher import Lineage, Publisher
from weightwire.subscriber import Offer, Subscriber

_STEP_BYTES = 64 << 20


def push(folder: PathLike, version: int, *, source_spec: Optional[str] = None, config: Optional[PathLike] = None,
         agent: Optional[str] = None, coordinator: Optional[str] = None, group: str = "trainer", job: str = "",
         timeout: float = 600.0, lineage: Lineage = None, leave_out: Sequence[str] = (),
         missing_from: Optional[PathLike] = None) -> None:
    """Publishes the checkpoint as `version`; returns when every complete engine serves it. `lineage`: Publisher.publish's;
    `leave_out`, `missing_from`: as convert's.

    All its ranks are of this process, their weights in memory shared with the agent: one model's size on this host.
    CheckpointError: the checkpoint; errors.WeightwireError: as Publisher's and Client.wait_version's.
    """
    opened = open_checkpoint(folder)
    if opened.boxes:
        raise CheckpointError(f"{folder} has a layout of boxes, not of words", code="FAILED_PRECONDITION",
                              remedy="convert it first, for example with --to hf")
    found = find(folder, spec=source_spec, config=config, leave_out=leave_out, missing_from=missing_from, opened=opened)
    text, spec = found.described().read_text(), opened.spec
    end = time.monotonic() + timeout
    publishers: list[Publisher] = []
    with ExitStack() as stack, Client(coordinator) as client:
        stack.callback(opened.files.close)
        pool = stack.enter_context(ThreadPoolExecutor(len(opened.ranks)))
        stack.callback(lambda: list(pool.map(Publisher.close, publishers)))  # together: a rank alone is a lost one
        for rank in range(len(opened.ranks)):
            publishers.append(Publisher(rank=rank, world_size=len(opened.ranks), group=group, job=job, agent=agent, lineage=lineage))
        for rank, (publisher, layout, tensors) in enumerate(zip(publishers, found.planner().layout(spec), found.bound.ranks)):
            metas = [replace(meta, dtype=tensor.dtype) for meta, tensor in zip(layout, tensors)]
            params = publisher.bind(text, spec, metas)
            for meta, tensor in zip(metas, tensors):
                into = memory_bits(params[meta.name], meta, rank)
                step = max(1, _STEP_BYTES // into.itemsize)
                for begin in range(0, tensor.count if tensor.regions else 0, step):
                    last = min(tensor.count, begin + step)
                    opened.files.flat(tensor, begin, last, into[begin:last])
            if found.rest:
                fill_rest(found, rank, metas, params)
        opened.files.check_unchanged()
        releases = [publisher.publish(version, deadline=max(1.0, end - time.monotonic())) for publisher in publishers]
        for release in releases:
            release.wait_released(max(0.0, end - time.monotonic()))
        client.wait_version(version, max(0.0, end - time.monotonic()), lineage=publishers[0].lineage)


def start_engines(folder: PathLike, version: int, *, source_spec: Optional[str] = None, config: Optional[PathLike] = None,
                  agent: Optional[str] = None, coordinator: Optional[str] = None, job: str = "",
                  timeout: float = 600.0, leave_out: Sequence[str] = (), missing_from: Optional[PathLike] = None) -> bool:
    """A cold start: returns when every complete engine serves `version` or a newer one. True: it came from a peer that
    serves it, False: nobody did, and the checkpoint was published as `version`. To be called by as many as like to, at
    the same time: one of them publishes.

    CheckpointError, errors.WeightwireError: as those of `push`; errors.DeadlineError says what everyone waits for.
    """
    end = time.monotonic() + timeout
    refused: Optional[errors.WeightwireError] = None
    with Client(coordinator) as client:
        peer = any(engine.epoch and engine.version >= version for engine in client.status().engines)
        if not peer:
            try:
                push(folder, version, source_spec=source_spec, config=config, agent=agent, coordinator=coordinator, job=job,
                     timeout=timeout, leave_out=leave_out, missing_from=missing_from)
            except errors.WeightwireError as error:
                if error.reason not in ("duplicate_rank", "stale_version"):  # somebody else is publishing, or has
                    raise
                refused = error
        try:
            client.wait_version(version, max(0.0, end - time.monotonic()))
        except errors.DeadlineError as late:
            if refused is None:
                raise
            raise errors.DeadlineError(f"{late}; the checkpoint was not published: {refused}", code=late.code,
                                       reason=late.reason) from refused
    return peer or refused is not None


def save(target: PathLike, to: str, config: PathLike, *, version: int = 0, agent: Optional[str] = None,
         group: str = "checkpoint", job: str = "", shard_bytes: int = 5_000_000_000, wwctl: Optional[str] = None,
         timeout: float = 600.0, base: Optional[PathLike] = None, model_name: str = "") -> int:
    """Writes the version that engines serve as a checkpoint, as `convert` would; returns its number.

    `version`: wait for this one or a newer one; 0 takes the first that comes. Its bytes were verified on arrival and stay
    in this engine's stage (two buffers of the target's size, on this host) while they are written; the fleet waits for
    this engine in at most the commit after the next. `base`: as for `convert`; `model_name`: as for Subscriber.
    CheckpointError: refused; errors.DeadlineError: no version came within `timeout` seconds.
    """
    final, end = Path(os.path.abspath(target)), time.monotonic() + timeout
    check_free(final)
    kind, spec = target_layout(to)
    older = base_folder(base, kind, final)
    planner = planner_of(Path(config).read_text(), wwctl)
    layout, gone = planner.layout(spec), planner.filtered(spec).gone
    kept = [[meta for meta in rank if not gone or meta.name not in gone[number]] for number, rank in enumerate(layout)]
    with ExitStack() as stack:
        ranks = [stack.enter_context(Subscriber(group=group, rank=rank, world_size=len(layout), job=job, agent=agent,
                                                model_name=model_name)) for rank in range(len(layout))]
        text = Path(config).read_text()
        for subscriber, tensors in zip(ranks, layout):
            subscriber.bind(text, spec, tensors)
        while True:
            offers = [_offer(subscriber, end) for subscriber in ranks]
            staged = [cast(Arrays, subscriber.flip(offer)) for subscriber, offer in zip(ranks, offers)]
            ranks[0].acknowledge(offers[0])
            if offers[0].version >= version:
                break
        with Writing(final, Wanted(kind, to, spec, kept, shard_bytes, Path(config)), None, older) as writing:
            for rank, (tensors, params) in enumerate(zip(kept, staged)):
                for number, local in enumerate(tensors):
                    stored = writing.target.tensor(rank, number)
                    writing.target.files.write(stored, 0, params[local.name].reshape(-1))
                    writing.wrote(stored.bytes)
            lost = [s.last_fence for s, offer in zip(ranks, offers) if s.serving is not offer]
            if lost:  # the stage may have changed under the writer
                raise lost[0] or errors.AbortedError("a newer version came while this one was written", code="ABORTED")
            writing.seal()
            writing.finish()
    return offers[0].version


def _offer(subscriber: Subscriber, end: float) -> Offer:
    offer = subscriber.wait_offer(max(0.0, end - time.monotonic()))
    if offer is None:
        raise errors.DeadlineError("no version came to be saved", code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                   remedy="`wwctl status` says what everyone waits for")
    return offer
