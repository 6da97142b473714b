"""The engine's side."""

from __future__ import annotations

import collections
import json
import logging
import threading
from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

import numpy as np

from weightwire import boxes, errors
from weightwire.device import Device, DeviceArray
from weightwire.memory import TensorMeta, array_at
from weightwire.session import Session, default_agent_socket
from weightwire.stage_memory import StageMemory
from weightwire.trace import trace_row
from weightwire.v1 import agent_pb2, types_pb2

log = logging.getLogger("weightwire")
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 0.1, 1.0  # before attaching again; doubled for each failure
_FAILING_SECONDS_MAX = 30.0  # the same, where what fails is `on_offer`


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
    #: Of `version`: one of a later lineage is newer whatever its number, see `Publisher.publish`. 0: not known, after a
    #: rollback to an older commit than the coordinator remembers.
    lineage: int = 1

    @property
    def order(self) -> tuple[int, int]:
        """Greater for what is newer; smaller than all that is known where the lineage is not."""
        return self.lineage, self.version


@dataclass
class _Buffer:
    """Of the stage."""

    arrays: Mapping[str, np.ndarray] | Mapping[str, DeviceArray]
    memory: StageMemory | None = None  #: None: on a device
    places: tuple[tuple[str, int, int], ...] = ()  #: of each tensor: name, begin and end in bytes
    looked: int = 0  #: the newest offer's epoch for which it was looked at

    def written(self) -> list[str]:
        """Tensors in whose pages this process has written."""
        pages = self.memory.written() if self.memory else []
        return [name for name, begin, end in self.places if any(first < end and begin < last for first, last in pages)]


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
                 device: Device | None = None, model_name: str = "",
                 on_copy_check: Callable[[], errors.WeightwireError | None] | None = None):
        """`model_name`: which of the trainer's models this engine holds, where it publishes several (weightwire.models).
        `buffers`: of the stage, 1 to 8; None: as many as the agent's `retain_versions` asks for.
        `on_offer`: called, on a thread of this subscriber, whenever wait_offer or wait_event has something new. When it
        raises, that is logged and the engine leaves as by `fail`.
        `on_copy_check`, of an engine that serves from copies of its stage: called, on a thread of its own, when somebody
        verifies what is served. It returns None when what it made of the stage is still so, else why not (reason
        "digest_mismatch": `tensor` is not; "stale_epoch": another version is being installed)."""
        self._device = device
        self._place = dict(agent=agent or default_agent_socket(), role=types_pb2.GROUP_ROLE_ENGINE, group=group,
                           rank=rank, world_size=world_size, job=job, timeout=timeout, buffers=buffers or 0,
                           device=device.uuid if device else "")
        self._model_name = model_name
        self._layout: types_pb2.LayoutSubmission | None = None
        self._buffers: list[_Buffer] = []
        self._events: collections.deque[Offer | RoomWanted] = collections.deque()
        self._lock = threading.Condition()
        self._generation = 0
        self._closed = threading.Event()
        self._reattacher: threading.Thread | None = None
        self._on_offer, self._on_copy_check = on_offer, on_copy_check
        self._failing = 0  # offers in a row for which on_offer raised
        self.serving: Offer | None = None
        self.params: Mapping[str, np.ndarray] | Mapping[str, DeviceArray] | None = None
        #: Why the last incarnation ended; None if it never did.
        self.last_fence: errors.WeightwireError | None = None
        self._incarnation = 0  #: that this subscriber was attached as last: the next one gives its place up
        self._attach()

    @property
    def device_refused(self) -> errors.WeightwireError | None:
        """Why the stage lies in host memory though a device was asked for; None otherwise."""
        return self._session.device_refused

    def _attach(self) -> Session:
        """A new incarnation; `close` ends it while it is being attached, too."""
        with self._lock:
            self._drop()
            generation = self._generation
        session = Session(**self._place, previous=self._incarnation, checks_copies=self._on_copy_check is not None,
                          on_event=lambda event: self._on_event(event, generation),
                          on_end=lambda error: self._on_end(error, generation))
        with self._lock:
            self._session = session
        if self._closed.is_set():
            session.close()
        session.open()
        self._incarnation = session.incarnation
        return session

    def _drop(self) -> None:
        """Nothing of the last attachment counts any more; its offers are void."""
        self.serving, self.params, self._buffers = None, None, []
        self._generation += 1
        self._events.clear()
        self._lock.notify_all()

    def bind(self, config: Mapping[str, Any] | str, spec: str, tensors: Sequence[TensorMeta],
             trace: Sequence[Mapping[str, Any]] | None = None,
             checkpoint: Sequence[TensorMeta] = ()) -> list[str]:
        """Negotiates the layout of this rank and maps its stage.

        config, spec, tensors: as Publisher.bind, e.g. spec "vllm:tp2".
        trace: what the engine's own loader did, which then wins over the scheme: one mapping a copy, with
        "src", "ops" ([name, *arguments] each), "param", "offset", "shape", "stride" and "dtype" (torch's name).
        checkpoint: with a trace, all tensors of the checkpoint that the loader was recorded with, the same on every
        rank: they are the model where no family describes it. They are sent only then.
        Returns where trace and scheme disagree, as lines for people; spec "" compares with nothing.
        """
        text = config if isinstance(config, str) else json.dumps(config)
        common = dict(config_json=text, topology=types_pb2.ParallelTopology(spec=spec),
                      observed=[meta.to_proto() for meta in tensors])
        if trace is None:
            return self.bind_submission(types_pb2.LayoutSubmission(
                scheme=types_pb2.LayoutSubmission.Scheme(**common)))
        traced = types_pb2.LayoutSubmission.Traced(rows=[trace_row(copy) for copy in trace], **common)
        try:
            return self.bind_submission(types_pb2.LayoutSubmission(traced=traced))
        except errors.RefusedError as why:
            if why.reason != "unknown_model" or not checkpoint:
                raise
        traced.checkpoint.extend(meta.to_proto() for meta in checkpoint)
        return self.bind_submission(types_pb2.LayoutSubmission(traced=traced))

    def bind_submission(self, layout: types_pb2.LayoutSubmission) -> list[str]:
        """As `bind`, for any layout (explicit boxes included)."""
        if self._model_name:
            layout = boxes.of_models([(self._model_name, layout, self._place["rank"], self._place["world_size"])])
        self._layout = layout
        return self._map_stage(self._session)

    def _map_stage(self, session: Session) -> list[str]:
        agreed, notes = session.submit(self._layout)
        stage = session.call("Subscribe", agent_pb2.SubscribeRequest())
        if self._place["buffers"] not in (0, len(stage.fd_tokens)):
            raise errors.RefusedError(f"the agent made {len(stage.fd_tokens)} buffers instead of "
                                      f"{self._place['buffers']}", code="UNIMPLEMENTED", reason="protocol_version",
                                      remedy="use an agent of the client library's version")
        buffers: list[_Buffer] = []
        places = tuple((meta.name, offset, offset + meta.nbytes) for meta, offset in zip(agreed, stage.offsets))
        for index, token in enumerate(stage.fd_tokens):
            fd = session.get_fd(token)
            if self._device is not None and stage.on_device:
                memory = stage.on_device[index]
                slab = self._device._map(memory.ipc_handle, memory.offset, fd)
                buffers.append(_Buffer(slab.arrays(agreed, stage.offsets)))
                continue
            memory = StageMemory(fd, stage.bytes_total)
            arrays = {meta.name: array_at(memory.map, offset, meta) for meta, offset in zip(agreed, stage.offsets)}
            buffers.append(_Buffer(arrays, memory, places))
        with self._lock:
            if session is not self._session:  # fenced meanwhile: its successor maps its own
                raise _stale(0)
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
        with self._lock:
            return self._events.popleft() if self._lock.wait_for(lambda: self._events, timeout) else None

    def is_current(self, event: Offer | RoomWanted) -> bool:
        """False once this incarnation was fenced: the offer, or the wish, is void, and comes again."""
        with self._lock:
            return event.generation == self._generation

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
        change. A write is numpy's ValueError. torch.from_numpy, and whatever else drops numpy's flag, gives views through
        which a write changes this process's bytes alone. It is found, logged and given up before the buffer is used for
        another version. Memory that is to be registered: see `share_stage`.

        Raises StaleError when this incarnation was fenced after the offer, or leaves because memory was registered.
        """
        with self._lock:
            return self._staged(offer)

    def share_stage(self) -> None:
        """To be called before staged memory is registered with a device or a network card (cudaHostRegister, ibv_reg_mr),
        which would take copies of its pages, and go on reading these when the agent writes the next version: from now on this
        process has no right to write there, and a write is SIGSEGV. Until the next attachment."""
        with self._lock:
            for buffer in self._buffers:
                if buffer.memory is not None:
                    buffer.memory.share()

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
        buffer = self._buffers[offer.buffer]
        if buffer.looked != offer.epoch and buffer.memory is not None and (written := buffer.written()):
            self._found_written(offer, buffer.memory, written)
        buffer.looked = offer.epoch
        return buffer.arrays

    def _found_written(self, offer: Offer, memory: StageMemory, written: list[str]) -> None:
        """What was written is given up; but not where a device may go on reading it."""
        named = ", ".join(written[:3]) + (f" and {len(written) - 3} more" if len(written) > 3 else "")
        if not memory.registered():
            log.warning("weightwire: %s: this process wrote into its stage (%s), where only the agent writes; that is given up "
                        "for version %d. Copy what is to be written", self._session.rank_name, named, offer.version)
            return memory.refresh()
        why = (f"the stage was registered with a device, which would read other bytes than were published ({named}); call "
               "share_stage before that")
        log.error("weightwire: %s: version %d: %s", self._session.rank_name, offer.version, why)
        self.fail(offer, why)
        raise errors.StaleError(why, code="ABORTED", reason="stale_incarnation", rank=self._session.rank_name,
                                epoch=offer.epoch)

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

    def fail(self, offer: Offer, why: str) -> None:
        """Any rank, in place of `acknowledge`: this engine cannot take the version, which says nothing of the version. The
        engine leaves with `why`, so that nobody waits for it, and attaches again: it is offered what is committed then. No
        other engine is touched. Does nothing when the offer is not of this incarnation any more."""
        with self._lock:
            if offer.generation != self._generation:
                return
            session = self._session
        session.leave(errors.AbortedError(f"version {offer.version} cannot be taken: {why}", code="ABORTED",
                                          rank=session.rank_name, epoch=offer.epoch))

    def _on_event(self, event: agent_pb2.AttachEvent, generation: int) -> None:
        kind = event.WhichOneof("kind")
        if kind == "swap_offer":
            o = event.swap_offer
            told: Offer | RoomWanted = Offer(o.epoch, o.content, o.version, o.buffer, o.leader, generation, o.trace_id.hex(),
                                            o.lineage if self._session.lineage else 1)
        elif kind == "room_wanted":
            told = RoomWanted(event.room_wanted.epoch, event.room_wanted.version, generation)
        elif kind == "copy_check" and self._on_copy_check is not None:
            threading.Thread(target=self._check_copies, args=(self._session, event.copy_check.verification, self._on_copy_check),
                             name="weightwire-copies", daemon=True).start()
            return
        else:
            return
        with self._lock:
            if generation != self._generation:
                return
            self._events.append(told)
            self._lock.notify_all()
        if self._on_offer is None:
            return
        try:
            self._on_offer()
            self._failing = 0
        except Exception as error:  # the caller's: it ends no thread of ours
            log.exception("weightwire: %s: on_offer for version %d", self._session.rank_name, told.version)
            if isinstance(told, Offer):
                self._failing += 1
                self.fail(told, f"on_offer: {type(error).__name__}: {error}")

    def _check_copies(self, session: Session, verification: int, check: Callable[[], errors.WeightwireError | None]) -> None:
        try:
            why = check()
        except Exception as error:  # the caller's
            log.exception("weightwire: %s: on_copy_check", session.rank_name)
            why = errors.WeightwireError(f"its copies could not be looked at: {type(error).__name__}: {error}", code="INTERNAL",
                                         reason="internal", rank=session.rank_name)
        try:
            session.call("CopyChecked", agent_pb2.CopyCheckedRequest(verification=verification, why=errors.to_outcome(why)))
        except errors.WeightwireError as error:  # whoever verifies hears nothing, until its deadline
            log.warning("weightwire: %s: %s", session.rank_name, error)

    def _on_end(self, error: errors.WeightwireError, generation: int) -> None:
        with self._lock:
            if generation == self._generation:
                self._drop()
                self.last_fence = error
            if self._reattacher is not None or self._closed.is_set():
                return  # who attaches again sees that this session has ended
            self._reattacher = threading.current_thread()
        self._reattach()  # on this thread, which has nothing else to do: a new one may not be had

    def _reattach(self) -> None:
        """Comes back as a new incarnation. Waits longer after each failure; whatever that is (no memory and no descriptors
        included), the next attempt may do better."""
        self._session.close()
        pause = min(_PAUSE_SECONDS * 2 ** min(self._failing, 16), _FAILING_SECONDS_MAX)
        while not self._closed.wait(pause):
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)
            try:
                session = self._attach()
                if self._layout is not None:
                    self._map_stage(session)
            except Exception as error:
                self._session.close()
                if not isinstance(error, errors.WeightwireError):
                    log.warning("weightwire: %s: attaching again", self._session.rank_name, exc_info=True)
                    error = errors.UnavailableError(f"attaching again: {type(error).__name__}: {error}", code="UNAVAILABLE",
                                                    reason="io_error", rank=self._session.rank_name)
                self.last_fence = error
                continue
            with self._lock:
                if session.attached:
                    self._reattacher = None
                    return

    def close(self) -> None:
        """Leaves, whatever is under way: no session of this subscriber is left."""
        self._closed.set()
        with self._lock:
            session, reattacher = self._session, self._reattacher
        session.close()
        if reattacher is not None and reattacher is not threading.current_thread():
            reattacher.join(self._place["timeout"])

    def __enter__(self) -> "Subscriber":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _stale(epoch: int) -> errors.StaleError:
    return errors.StaleError("it belongs to an incarnation that was fenced", code="ABORTED",
                             reason="stale_incarnation", epoch=epoch)
