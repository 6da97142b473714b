"""Whole Hugging Face tensors of what a trainer publishes, one at a time: (name, tensor), as verl's sharding
managers and other loaders consume them. No collective, no gather on the trainer's devices.

>>> reader = HfReader(checkpoint_tensors("path/to/checkpoint")) if rank == 0 else None
>>> for name, tensor in iter_hf_tensors(publisher, step, reader):          # on every rank
...     engine.load(name, tensor)

The reader is an engine of one rank beside an agent: the agent assembles every tensor in its stage, by default in host
memory (two buffers of the whole model on the reader's host, shared, not per process), and each is copied out when its turn
comes. Ranks without a reader only publish.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Iterator, Sequence, TypeVar, Union, cast

import torch

from weightwire import boxes, errors, subscriber, torch_cuda
from weightwire.adapter import LivePublisher, as_tensor
from weightwire.checkpoint import hf
from weightwire.device_choice import DeviceChoice, device_for, open_subscriber, wanted_device
from weightwire.memory import Arrays, TensorMeta

log = logging.getLogger("weightwire")
Self = TypeVar("Self", bound="HfReader")


def checkpoint_tensors(folder: Union[str, "os.PathLike[str]"]) -> list[TensorMeta]:
    """Names, dtypes and shapes of a folder of safetensors, file by file; reads the files' headers only.

    Which files these are is decided as `wwctl convert` decides it (model.safetensors, or what its index names), and logged where
    there was a choice. FileNotFoundError: there are none. CheckpointError: one is damaged, or a tensor is in two of them; names it.
    """
    path = Path(folder)
    if not hf.found_at(path):
        other = hf.other_weights(path)
        raise FileNotFoundError(f"no safetensors of a model in {folder}" + (f": {other[0]}; {other[1]}" if other else ""))
    opened = hf.open_at(path)
    for note in opened.notes:
        log.warning("%s: %s", folder, note)
    return [TensorMeta(tensor.name, tensor.dtype, tensor.shape) for tensor in opened.ranks[0].values()]


class HfReader:
    """Receives whole tensors. `tensors` are those that it wants, in the order in which it yields them; their
    dtypes may differ from the trainer's (bf16, fp16, fp32).

    device: where versions arrive: "cpu", or "cuda" (the current one), "cuda:1", a weightwire.Device: memory of that GPU that the agent
            lends, in which the whole model lies as often as the agent has buffers. Untested on hardware
    """

    def __init__(self, tensors: Sequence[TensorMeta], *, group: str = "hf-reader", job: str = "",
                 agent: str | None = None, timeout: float = 30.0, device: DeviceChoice = "cpu"):
        self._tensors = list(tensors)
        self._offer: subscriber.Offer | None = None  # that is not acknowledged: the next call begins with it
        wanted = wanted_device(device)
        self._subscriber, _ = open_subscriber(
            wanted, lambda: device_for(wanted, []),
            lambda place: subscriber.Subscriber(group=group, rank=0, world_size=1, job=job, agent=agent, timeout=timeout, device=place),
            lambda made: made.bind_submission(boxes.submission({meta.name: meta for meta in self._tensors},
                                                               [boxes.whole(meta) for meta in self._tensors])))

    def tensors(self, version: int, *, timeout: float, device: Union[torch.device, str] = "cpu", lineage: int = 1
                ) -> Iterator[tuple[str, torch.Tensor]]:
        """Waits for `version` of `lineage` (Publisher.lineage) and yields its tensors; each is a new tensor on `device`.

        The version is acknowledged when the last tensor was taken; until then no other is installed. When the consumer
        stops or fails before that, the next call yields it again, or acknowledges it where it asks for a newer one; without
        a next call the coordinator fences the reader at its commit deadline.
        DeadlineError: it did not come within `timeout` seconds. StaleError: a newer one was committed already, which the
        next call may ask for.
        """
        end, wanted = time.monotonic() + timeout, (lineage, version)
        while True:
            offer = self._offer or self._subscriber.wait_offer(max(0.0, end - time.monotonic()))
            if offer is None:
                raise errors.DeadlineError(f"version {version} did not arrive within {timeout} s",
                                           code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                           remedy="`wwctl status` says what everyone waits for")
            try:
                arrays = cast(Arrays, self._subscriber.stage(offer))
            except errors.StaleError:
                self._offer = None
                continue  # fenced meanwhile: it is offered again
            self._offer = offer
            if offer.order > wanted:
                raise errors.StaleError(f"version {offer.version} is committed, {version} was asked for",
                                        code="ABORTED", reason="stale_version", remedy=f"ask for {offer.version}")
            if offer.order == wanted:
                for meta in self._tensors:
                    yield meta.name, as_tensor(arrays[meta.name], meta).to(device, copy=True)
                torch_cuda.wait_for_copies([torch.empty(0, device=device)])
            self._offer = None
            self._subscriber.flip(offer)
            self._subscriber.acknowledge(offer)
            if offer.order == wanted:
                return

    def close(self) -> None:
        self._subscriber.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def iter_hf_tensors(publisher: LivePublisher, version: int, reader: HfReader | None, *, deadline: float = 120.0,
                    device: Union[torch.device, str] = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """Publishes `version` and, where there is a reader, yields what was published. Every rank must iterate.

    Other engines of the job get the version too. Errors: those of `publish`, `HfReader.tensors` and
    `Release.wait_released`.
    """
    release = publisher.publish(version, deadline=deadline)
    if reader is not None:
        yield from reader.tensors(version, timeout=deadline, device=device, lineage=publisher.lineage)
    release.wait_released(deadline)
