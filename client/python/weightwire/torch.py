"""Modules that hold whole tensors: one rank, or data-parallel replicas.

>>> publisher = weightwire.torch.Publisher(model)          # on every rank of a DDP trainer, or on one
>>> publisher.publish(step).wait_released(timeout=60)

>>> receiver = weightwire.torch.Receiver(model)            # anywhere else
>>> receiver.receive(timeout=60)                           # in place; returns the offer
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, Sequence, Union

import torch
import torch.distributed as dist

from weightwire import boxes, errors, subscriber
from weightwire.adapter import (Live, LivePublisher, as_tensor, clean_name, is_freed, meta_of, persistent_buffers,
                                place, refuse)
from weightwire.memory import TensorMeta

#: A module, tensors by name, or a function that gives (name, tensor) pairs anew for each version.
Source = Union[torch.nn.Module, Mapping[str, torch.Tensor], Callable[[], Iterable[tuple[str, torch.Tensor]]]]
#: Hugging Face name for a module's name; None leaves the tensor out.
Names = Callable[[str], Union[str, None]]
#: What a rank holds, and the whole tensors that it is part of.
Reading = tuple[Mapping[str, TensorMeta], Sequence[Live]]


def named_tensors(source: Source, names: Names | None = None) -> list[tuple[str, torch.Tensor]]:
    """Parameters (a tied one once, under its first name) and persistent buffers, by Hugging Face name."""
    if isinstance(source, torch.nn.parallel.DistributedDataParallel):
        source = source.module
    if isinstance(source, torch.nn.Module):
        pairs = [*source.named_parameters(), *persistent_buffers(source)]
    else:
        pairs = list(source.items() if isinstance(source, Mapping) else source())
    out: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        name = clean_name(name)
        wanted = names(name) if names else name
        if wanted is None:
            continue
        if wanted in out:
            raise refuse("two tensors have this name", tensor=wanted, remedy="give them different names by `names`")
        out[wanted] = tensor
    return list(out.items())


def read_whole(source: Source, names: Names | None = None) -> Reading:
    """The layout of a process that holds every tensor whole. RefusedError for a sharded one."""
    lives = []
    for name, tensor in named_tensors(source, names):
        if hasattr(tensor, "device_mesh") or hasattr(tensor, "_fqns"):
            raise refuse("the parameter is sharded", tensor=name, remedy="use weightwire.fsdp")
        lives.append(Live(boxes.whole(meta_of(name, tensor)), tensor.detach()))
    return {live.held.meta.name: live.held.meta for live in lives}, lives


class BoxPublisher(LivePublisher):
    """A publisher whose layout is what `read` finds, as explicit boxes."""

    def __init__(self, read: Callable[[], Reading], **where: Any):
        super().__init__(lambda: read()[1], lambda base, lives: base.bind_boxes(
            boxes.submission(read()[0], [live.held for live in lives])), **where)


class Publisher(BoxPublisher):
    """Publishes a module's parameters and persistent buffers. See LivePublisher for what `publish` promises.

    source: a module (DDP is looked through), tensors by name, or a function that yields (name, tensor) pairs
    names:  from the module's names to Hugging Face's, where they differ; None leaves a tensor out
    rank, world_size: torch.distributed's when not given; all ranks must then open one, and share the sending
    """

    def __init__(self, source: Source, *, rank: int | None = None, world_size: int | None = None,
                 group: str = "trainer", job: str = "", agent: str | None = None, timeout: float = 30.0,
                 names: Names | None = None):
        super().__init__(lambda: read_whole(source, names), rank=rank, world_size=world_size, group=group, job=job,
                         agent=agent, timeout=timeout)


class Receiver:
    """A module that follows what a trainer publishes: a reference model, an evaluator, an engine of one's own.

    source, names, rank, world_size: as Publisher; with several ranks, all must call `receive` together.
    """

    def __init__(self, source: Source, *, group: str, rank: int | None = None, world_size: int | None = None,
                 job: str = "", agent: str | None = None, timeout: float = 30.0, names: Names | None = None):
        self._open(lambda: read_whole(source, names), group, rank, world_size, job, agent, timeout)

    def _open(self, read: Callable[[], Reading], group: str, rank: int | None, world_size: int | None, job: str,
              agent: str | None, timeout: float) -> None:
        self._read = read
        self.rank, self.world_size = place(rank, world_size)
        self._subscriber = subscriber.Subscriber(group=group, rank=self.rank, world_size=self.world_size, job=job,
                                                 agent=agent, timeout=timeout)
        try:
            canonical, lives = read()
            self._subscriber.bind_submission(boxes.submission(canonical, [live.held for live in lives]))
        except BaseException:
            self._subscriber.close()
            raise

    def receive(self, timeout: float) -> subscriber.Offer | None:
        """Waits for the next committed version and writes it into the tensors, in place.

        None after `timeout` seconds, or when this receiver was fenced meanwhile: the version is offered again.
        RefusedError when a parameter's storage is freed; nothing is written then.
        """
        offer = self._subscriber.wait_offer(timeout)
        if offer is None:
            return None
        try:
            arrays = self._subscriber.flip(offer)
        except errors.StaleError:
            return None
        lives = self._read()[1]
        for live in lives:
            if is_freed(live.tensor):
                raise refuse("the parameter's storage is freed", tensor=live.held.meta.name,
                             remedy="load the parameters back before receive()")
        with torch.no_grad():
            for live in lives:
                if live.tensor.numel() > 0:
                    live.tensor.copy_(as_tensor(arrays[live.held.meta.name], live.held.meta))
        if self.world_size > 1:
            dist.barrier()
        if offer.leader:
            self._subscriber.acknowledge(offer)
        return offer

    def close(self) -> None:
        self._subscriber.close()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
