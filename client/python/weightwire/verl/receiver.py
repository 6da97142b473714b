"""A rollout worker's half: an engine of its own that receives every tensor whole."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any, Iterator, Mapping, Sequence, cast

from weightwire import aio, boxes, errors, torch_cuda
from weightwire.adapter import as_tensor
from weightwire.device_choice import DeviceChoice, device_here, open_subscriber, wanted_device
from weightwire.memory import Arrays, TensorMeta
from weightwire.subscriber import Offer
from weightwire.verl.rendezvous import Announcement, Round

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 3600.0


class Version:
    """A complete version in this worker's stage. Its tensors are views: read-only, unchanged until the version
    after the next one is written."""

    def __init__(self, offer: Offer, arrays: Arrays, tensors: Sequence[TensorMeta]):
        self.number = offer.version
        self.offer = offer
        self.acknowledged = False
        self._arrays, self._tensors = arrays, tensors

    def named_tensors(self) -> Iterator[tuple[str, Any]]:
        for meta in self._tensors:
            yield meta.name, as_tensor(self._arrays[meta.name], meta)

    def settle(self) -> None:
        """Until whoever took the tensors has read them: on a GPU copies run later."""
        torch_cuda.wait_for_copies(tensor for _, tensor in itertools.islice(self.named_tensors(), 1))  # all are in one stage


def _give_up(arrived: asyncio.Future[Version], over: asyncio.Task[None]) -> None:
    """The round ended without a version. When it ended well, the commit is on its way."""
    if not over.cancelled() and over.exception() is not None and not arrived.done():
        arrived.set_exception(over.exception())  # type: ignore[arg-type]


class Receiver:
    """One rollout worker. It stays subscribed between rounds: a round has nothing to set up, and a worker that verl
    left out of some rounds is up to date when it is taken in again. To be used in one event loop."""

    def __init__(self, name: str, *, agent: str | None, job: str, timeout: float, device: DeviceChoice = "cpu"):
        """`device`: where versions arrive, as in weightwire.torch.Receiver; "auto" is the GPU that this process uses."""
        self.name = name
        self._device = wanted_device(device)
        self._where = dict(group=name, rank=0, world_size=1, agent=agent, job=job, timeout=timeout)
        self._subscriber: aio.Subscriber | None = None
        self._follower: asyncio.Task[None] | None = None
        self._tensors: list[TensorMeta] = []
        self._wanted = 0
        self._awaited: asyncio.Future[Version] | None = None
        self._given: Version | None = None
        #: The newest version that this worker has acknowledged.
        self.served: Version | None = None

    @property
    def failed(self) -> bool:
        """Whether the engine did not install what was received last: it may hold some of it."""
        return self._given is not None and not self._given.acknowledged

    async def receive(self, rendezvous: Mapping[str, Any], deadline: float) -> tuple[Announcement, Version]:
        """What the round that `rendezvous` tells of brings, complete and verified; `acknowledge` it when installed.

        AbortedError: the trainer gave it up. UnavailableError: the trainer is gone. DeadlineError.
        """
        try:
            announced, version = await asyncio.wait_for(self._receive(rendezvous), deadline)
            self._given = version
            return announced, version
        except asyncio.TimeoutError:
            raise errors.DeadlineError(f"no new weights within {deadline:g} s", code="DEADLINE_EXCEEDED",
                                       reason="deadline_exceeded", rank=f"{self.name}/0",
                                       remedy="`wwctl status` says what everyone waits for") from None

    async def _receive(self, rendezvous: Mapping[str, Any]) -> tuple[Announcement, Version]:
        told = await Round.ask(rendezvous)
        try:
            announced = await told.announced()
            subscriber = await self._subscribe(announced.tensors)
            # Numbers mean nothing across a fence: a coordinator that forgot everything counts from 1 again.
            if self.served is not None and subscriber.serving is self.served.offer and \
                    self.served.number >= announced.version:
                return announced, self.served
            return announced, await self._arrival(told, announced.version)
        finally:
            told.close()

    async def _arrival(self, told: Round, wanted: int) -> Version:
        arrived: asyncio.Future[Version] = asyncio.get_running_loop().create_future()
        self._wanted, self._awaited = wanted, arrived
        over = asyncio.create_task(told.published())
        over.add_done_callback(lambda task: _give_up(arrived, task))
        try:
            return await arrived
        except asyncio.CancelledError:
            if arrived.done() and not arrived.cancelled() and arrived.exception() is None:
                await self.acknowledge(arrived.result())  # it came in the moment of the deadline
            raise
        finally:
            self._awaited = None
            over.cancel()

    async def _subscribe(self, tensors: list[TensorMeta]) -> aio.Subscriber:
        if self._subscriber is not None and tensors == self._tensors:
            return self._subscriber
        await self.close()  # another set of tensors is another layout
        layout = boxes.submission({m.name: m for m in tensors}, [boxes.whole(m) for m in tensors])
        subscriber = await aio.Subscriber(**self._where)._open_by(lambda make: open_subscriber(
            self._device, lambda: device_here(self._device), lambda place: make(device=place), lambda made: made.bind_submission(layout))[0])
        self._subscriber, self._tensors = subscriber, tensors
        self._follower = asyncio.create_task(self._follow(subscriber))
        return subscriber

    async def _follow(self, subscriber: aio.Subscriber) -> None:
        """Hands the awaited version to the round, and takes every other one (a fill, a version of a round without
        this worker) so that the fleet need not wait for us."""
        while True:
            offer = await subscriber.wait_offer(_IDLE_SECONDS)
            if offer is None:
                continue
            try:
                arrays = cast(Arrays, await asyncio.to_thread(subscriber.flip, offer))
                version = Version(offer, arrays, self._tensors)
            except errors.StaleError:
                continue  # fenced meanwhile: it is offered again to the new incarnation
            if self._awaited is not None and not self._awaited.done() and version.number >= self._wanted:
                self._awaited.set_result(version)
            else:
                await self.acknowledge(version)

    async def acknowledge(self, version: Version) -> None:
        """The engine runs `version`, or does not need it: the other buffer may be written."""
        if version.acknowledged or self._subscriber is None:
            return
        self.served = version
        await asyncio.to_thread(version.settle)
        try:
            await self._subscriber.acknowledge(version.offer)
            version.acknowledged = True
        except errors.WeightwireError as error:
            # The bytes are complete whatever the agent thinks of us; after a fence it offers them again.
            logger.warning("version %d could not be acknowledged: %s", version.number, error)

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._follower
            self._follower = None
        if self._subscriber is not None:
            await self._subscriber.close()
            self._subscriber = None
