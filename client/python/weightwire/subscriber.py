"""The engine's side."""

from __future__ import annotations

import json
import mmap
import os
import queue
import threading
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from weightwire import errors
from weightwire.device import Device, DeviceArray
from weightwire.memory import TensorMeta, array_at
from weightwire.session import Session, default_agent_socket
from weightwire.trace import trace_row
from weightwire.v1 import agent_pb2, types_pb2

# Linux's number; Python has the name from 3.10 on. The agent has made the pages: mapping them now keeps a fault for each
# of them out of the first reads, when an engine may stand still.
_MAP_POPULATE = 0x8000


@dataclass(frozen=True)
class Offer:
    """A committed version, verified and complete in a buffer of this rank."""

    epoch: int  #: names the transfer; for acknowledge()
    content: int  #: the committed epoch to serve from now on
    version: int
    buffer: int
    leader: bool
    generation: int  #: which attachment of this process it belongs to
    trace_id: str = ""  #: W3C, 32 hex digits: of the version, the same in every process that it passes


@dataclass(frozen=True)
class RoomWanted:
    """With one buffer: `version` is about to be moved to where the served version lies."""

    epoch: int  #: for make_room()
    version: int
    generation: int


class Subscriber:
    """One rank of an engine.

    Every rank gets the same offers in the same order. The leader (rank 0) makes all ranks call
    `flip` at one scheduler-step boundary by the engine's own means and then calls `acknowledge` once.

    `serving` is None until the first flip and again from the moment this engine is fenced (a rank or
    the agent was lost, or the coordinator had lost it; not when the coordinator goes away and comes back): an engine whose `serving` is None must not answer
    requests. After a fence the subscriber attaches again by itself and is brought up to date.

    With `buffers=1` the rank has no second copy: before each version but the first `wait_event` returns a
    `RoomWanted`. Stop serving on every rank, then call `make_room` with it; the offer follows, or, when the
    version was not moved and none follows it, a fence.

    >>> with Subscriber(group="engine-a", rank=0, world_size=2) as s:
    ...     s.bind(config, "vllm:tp2", tensors)
    ...     offer = s.wait_offer(timeout=60)
    ...     params = s.flip(offer)          # read-only arrays by name
    ...     s.acknowledge(offer)
    """

    def __init__(self, *, group: str, rank: int, world_size: int, job: str = "", agent: str | None = None,
                 timeout: float = 30.0, buffers: int | None = None, on_offer: Callable[[], None] | None = None,
                 device: Device | None = None):
        """`buffers`: of the stage, 1 to 8; None: as many as the agent's `retain_versions` asks for. `on_offer` is called, on a thread of this subscriber, whenever
        wait_offer or wait_event has something new. `device`: where the stage is to lie, if the agent has memory of it to
        lend; see `device_refused`."""
        self._device = device
        self._place = dict(agent=agent or default_agent_socket(), role=types_pb2.GROUP_ROLE_ENGINE, group=group,
                           rank=rank, world_size=world_size, job=job, timeout=timeout, buffers=buffers or 0,
                           device=device.uuid if device else "")
        self._layout: types_pb2.LayoutSubmission | None = None
        self._buffers: list[Mapping[str, np.ndarray] | Mapping[str, DeviceArray]] = []
        self._events: queue.Queue[Offer | RoomWanted] = queue.Queue()
        self._lock = threading.Condition()
        self._generation = 0
        self._closed = threading.Event()
        self._on_offer = on_offer
        self.serving: Offer | None = None
        self.params: Mapping[str, np.ndarray] | Mapping[str, DeviceArray] | None = None
        #: Why the last incarnation ended; None if it never did.
        self.last_fence: errors.WeightwireError | None = None
        self._incarnation = 0  #: that this subscriber attached with last: its place is given up by the next one
        self._session = self._attach()

    @property
    def device_refused(self) -> errors.WeightwireError | None:
        """Why the stage lies in host memory though a device was asked for; None otherwise."""
        return self._session.device_refused

    def _attach(self) -> Session:
        with self._lock:
            self._generation += 1
            generation = self._generation
        session = Session(**self._place, previous=self._incarnation, on_event=lambda event: self._on_event(event, generation),
                          on_end=self._on_end)
        self._incarnation = session.incarnation
        return session

    def bind(self, config: Mapping[str, Any] | str, spec: str, tensors: Sequence[TensorMeta],
             trace: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
        """Negotiates the layout of this rank and maps its stage.

        config, spec, tensors: as Publisher.bind, e.g. spec "vllm:tp2".
        trace: what the engine's own loader did, which then wins over the scheme: one mapping a copy, with
        "src", "ops" ([name, *arguments] each), "param", "offset", "shape", "stride" and "dtype" (torch's name).
        Returns where trace and scheme disagree, as lines for people; spec "" compares with nothing.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        common = dict(config_json=text, topology=types_pb2.ParallelTopology(spec=spec),
                      observed=[meta.to_proto() for meta in tensors])
        if trace is None:
            return self.bind_submission(types_pb2.LayoutSubmission(
                scheme=types_pb2.LayoutSubmission.Scheme(**common)))
        return self.bind_submission(types_pb2.LayoutSubmission(traced=types_pb2.LayoutSubmission.Traced(
            rows=[trace_row(copy) for copy in trace], **common)))

    def bind_submission(self, layout: types_pb2.LayoutSubmission) -> list[str]:
        """As `bind`, for any layout (explicit boxes included)."""
        self._layout = layout
        return self._map_stage(self._session)

    def _map_stage(self, session: Session) -> list[str]:
        agreed, notes = session.submit(self._layout)
        stage = session.call("Subscribe", agent_pb2.SubscribeRequest())
        if self._place["buffers"] not in (0, len(stage.fd_tokens)):
            raise errors.RefusedError(f"the agent made {len(stage.fd_tokens)} buffers instead of "
                                      f"{self._place['buffers']}", code="UNIMPLEMENTED", reason="protocol_version",
                                      remedy="use an agent of the client library's version")
        buffers: list[Mapping[str, np.ndarray] | Mapping[str, DeviceArray]] = []
        for index, token in enumerate(stage.fd_tokens):
            fd = session.get_fd(token)
            if self._device is not None and stage.on_device:
                memory = stage.on_device[index]
                slab = self._device._map(memory.ipc_handle, memory.offset, fd)
                buffers.append(slab.arrays(agreed, stage.offsets))
                continue
            try:
                mapped = mmap.mmap(fd, stage.bytes_total, mmap.MAP_SHARED | _MAP_POPULATE, mmap.PROT_READ)
            finally:
                os.close(fd)
            buffers.append({meta.name: array_at(mapped, offset, meta)
                            for meta, offset in zip(agreed, stage.offsets)})
        with self._lock:
            self._buffers = buffers
            self._lock.notify_all()
        return notes

    def wait_offer(self, timeout: float) -> Offer | None:
        """The next committed version; None after `timeout` seconds. For two buffers or more: with one, `wait_event`."""
        event = self.wait_event(timeout)
        if isinstance(event, RoomWanted):
            raise errors.RefusedError("with one buffer room must be made before the next version",
                                      code="FAILED_PRECONDITION", epoch=event.epoch,
                                      remedy="call wait_event, and make_room with its RoomWanted")
        return event

    def wait_event(self, timeout: float) -> Offer | RoomWanted | None:
        """The next committed version, or the wish for room for one; None after `timeout` seconds."""
        try:
            return self._events.get(timeout=timeout)
        except queue.Empty:
            return None

    def make_room(self, wanted: RoomWanted) -> None:
        """Gives the served version up: its bytes may change from now on. `serving` is None until the next flip.

        Raises StaleError when the epoch has ended meanwhile, or this incarnation was fenced; unless it was
        fenced, what is served stays."""
        with self._lock:
            if wanted.generation != self._generation:
                raise _stale(wanted.epoch)
            before = self.serving, self.params
            self.serving, self.params = None, None
        try:
            self._session.call("MakeRoom", agent_pb2.MakeRoomRequest(epoch=wanted.epoch))
        except errors.StaleError:
            with self._lock:
                if wanted.generation == self._generation:
                    self.serving, self.params = before
            raise

    def stage(self, offer: Offer) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        """The staged bytes of `offer`, read-only (on a device: not to be written), by name; what is served does not
        change.

        Raises StaleError when this incarnation was fenced after the offer.
        """
        with self._lock:
            return self._staged(offer)

    def flip(self, offer: Offer) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        """Serves `offer` from now on: a change of pointers. Returns and raises as `stage`."""
        with self._lock:
            self.params, self.serving = self._staged(offer), offer
            return self.params

    def _staged(self, offer: Offer) -> Mapping[str, np.ndarray] | Mapping[str, DeviceArray]:
        def current() -> bool:
            return offer.generation == self._generation

        self._lock.wait_for(lambda: self._buffers or not current(), self._place["timeout"])
        if not current() or not self._buffers:
            raise _stale(offer.epoch)
        return self._buffers[offer.buffer]

    def acknowledge(self, offer: Offer, flip_seconds: float = 0.0) -> None:
        """Leader: every rank has flipped to `offer`."""
        self._session.call("AcknowledgeSwap", agent_pb2.AcknowledgeSwapRequest(epoch=offer.epoch,
                                                                               flip_seconds=flip_seconds))

    def refuse(self, offer: Offer, why: str) -> None:
        """Leader, in place of `acknowledge`: the engine does not want the version, and every rank is back on what it
        served. The engine is fenced; the fleet goes back to the version before where the coordinator is configured so
        (`rollback_refused`, the default)."""
        self._session.call("AcknowledgeSwap", agent_pb2.AcknowledgeSwapRequest(
            epoch=offer.epoch, refused_why=why.encode()[:1000].decode(errors="ignore") or "no reason given"))

    def _on_event(self, event: agent_pb2.AttachEvent, generation: int) -> None:
        kind = event.WhichOneof("kind")
        if kind == "swap_offer":
            o = event.swap_offer
            self._events.put(Offer(o.epoch, o.content, o.version, o.buffer, o.leader, generation, o.trace_id.hex()))
        elif kind == "room_wanted":
            self._events.put(RoomWanted(event.room_wanted.epoch, event.room_wanted.version, generation))
        else:
            return
        if self._on_offer is not None:
            self._on_offer()

    def _on_end(self, error: errors.WeightwireError) -> None:
        with self._lock:
            self.serving, self.params, self._buffers = None, None, []
            self.last_fence = error
            self._generation += 1  # offers of this attachment are void
            self._lock.notify_all()
        if not self._closed.is_set():
            threading.Thread(target=self._reattach, name="weightwire-reattach", daemon=True).start()

    def _reattach(self) -> None:
        """Comes back as a new incarnation. Waits longer after each failure, up to 1 s."""
        self._session.close()
        pause = 0.1
        while not self._closed.wait(pause):
            try:
                session = self._attach()
            except errors.WeightwireError as error:
                self.last_fence = error
                pause = min(2 * pause, 1.0)
                continue
            self._session = session
            try:
                if self._layout is not None:
                    self._map_stage(session)
                return
            except errors.WeightwireError as error:
                # The new session fences itself when it fails; _on_end starts the next attempt.
                self.last_fence = error
                session.close()
                return

    def close(self) -> None:
        self._closed.set()
        self._session.close()

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stale(epoch: int) -> errors.StaleError:
    return errors.StaleError("it belongs to an incarnation that was fenced", code="ABORTED",
                             reason="stale_incarnation", epoch=epoch)
