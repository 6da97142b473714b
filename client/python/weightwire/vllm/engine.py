"""The worker's side of the plug-in: one object in every vLLM worker process.

It attaches as one rank of an engine group, keeps what its loader was seen to do as its layout, and holds the stage.
vLLM's calls carry tickets (epoch, version); bytes come from the stage, which the agent filled and verified before
anything here starts.

No call of vLLM ever raises here. When one rank of several raises, vLLM 0.32's executor leaves the answers of the ranks
behind it in their queues, and from then on every call returns before those ranks have done it. So a failure is kept
and told to the driver on its own line, together with a count of the calls that are done.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Callable, cast

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from weightwire import errors, torch_cuda
from weightwire.device import Device
from weightwire.device_choice import open_subscriber
from weightwire.memory import Arrays
from weightwire.subscriber import Offer, RoomWanted, Subscriber
from weightwire.vllm import checkpoint, copies, features, loading, stage
from weightwire.vllm.channel import Message
from weightwire.vllm.driver import INSTALLS, MODES, check_known
from weightwire.vllm.link import Link


#: Where an install mode has its stage, but for host memory.
_WANTED = {"auto": "auto", "device-stage": "cuda"}
_LEFT_FREE = 1 << 30  # bytes of a GPU, for what it takes besides while an update is installed


@dataclass
class Settings(WeightTransferInitInfo):
    """What EngineDriver sends to every worker; see its constructor."""

    engine: str
    link: str
    link_key: str
    agent: str | None = None
    job: str = ""
    mode: str = "fused"
    install: str = "auto"
    checkpoint: str | None = None
    draft: bool = False
    timeout: float = 60.0
    model_name: str = ""
    replicas: list[int] | None = None  # data parallel indices of the engine's ranks


@dataclass
class Ticket(WeightTransferUpdateInfo):
    """Which staged epoch to install."""

    epoch: int
    version: int


@dataclass
class _Update:
    """From vLLM's start to its finish."""

    draft: bool
    target: stage.Target | None  # None: the draft registers itself
    install: Any = None
    epoch: int | None = None  # set when a whole version was received
    model: Any = None


@dataclass(frozen=True)
class _Seal:
    """What a model's parameters were when `epoch` had been installed."""

    epoch: int
    model: torch.nn.Module
    sums: dict[str, bytes]


class WeightwireEngine(WeightTransferEngine[Settings, Ticket]):
    """Calls of vLLM run on the worker's thread; offers and questions of the driver on others.

    A vLLM without sessions (`features.has_sessions`) calls `receive_weights` alone: that is then the whole of an update."""

    init_info_cls = Settings
    update_info_cls = Ticket

    def __init__(self, *made_with: Any):
        super().__init__(*made_with)
        self._sessions = features.has_sessions()
        if not hasattr(self, "model_config"):  # vLLM 0.24 gives the engine its parallel_config and its model alone
            self.model_config = features.config_of(self.model).model_config
            self.device = next(self.model.parameters()).device
        self._main = self.model
        self._rank = self._world_size = self._replicas = 0  # `_place`
        gpus = (torch_cuda.gpu_of(tensor) for tensor in self.model.parameters())  # some may be offloaded
        self._gpu = next((gpu for gpu in gpus if gpu is not None), None)
        #: Of the stage's buffers, for copies to this engine's GPU.
        self._pages = torch_cuda.PageLocks(self._gpu, read_only=True) if self._gpu is not None else None
        self._staged_on: Device | None = None  # where the stage lies; None: in host memory
        self._lock = threading.Condition()
        self._calls = 0  # of vLLM that are done, well or not
        self._failure: str | None = None  # of the update under way, or of the last one
        self._settings = Settings(engine="", link="", link_key="")
        self._subscriber: Subscriber | None = None
        self._link: Link | None = None
        self._targets: dict[bool, stage.Target] = {}  # by "is it the draft"
        self._pending: Offer | None = None
        self._room: RoomWanted | None = None  # paused-live: not made yet
        self._shadow: tuple[int, dict[str, torch.Tensor]] | None = None  # device-shadow: (epoch, what is not taken yet)
        self._held: dict[int, dict[str, torch.Tensor]] = {}  # stages that may be replayed, by epoch
        self._serving: int | None = None  # epoch whose weights the model holds; None: from disk, or broken
        self._update: _Update | None = None
        self._updates = 0  # of vLLM's calls that began
        self._seals: dict[bool, _Seal] = {}  # by "is it the draft"
        self._sealing = 0  # seals that are being taken
        self._hopeless: set[str] = set()  # parameters that an install of the same version did not bring back
        self._broken: str | None = None
        self._interrupted = False  # a driver began an update and has not said how it ended
        self._closed = threading.Event()

    # ---- registration

    def init_transfer_engine(self, init_info: Settings) -> None:
        self.shutdown()
        self._settings = init_info
        self._place()
        self._closed = threading.Event()
        try:
            self._link = Link(init_info.link, init_info.link_key, self._answer, init_info.timeout)
        except errors.WeightwireError:
            if self._world_size == 1:
                raise  # there is no rank whose answer vLLM could lose
            # The driver says which ranks it does not hear.
            stage.log.exception("weightwire: rank %d is not updated", self._rank)
            return
        self._register(self._add_main)

    def _place(self) -> None:
        """Which of the ranks that the driver reaches this is. A dense model's worker knows nothing of other replicas but its index."""
        p, replicas = self.parallel_config, self._settings.replicas
        if replicas is None:
            replicas = list(range(p.world_size_across_dp // p.world_size))
        self._replicas = len(replicas)
        index = p.data_parallel_index  # one that the driver does not know is refused when it registers
        self._rank = (replicas.index(index) if index in replicas else index) * p.world_size + p.rank
        self._world_size = self._replicas * p.world_size

    def _register(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            stage.log.exception("weightwire: registration")
            self._hello({"error": f"{type(error).__name__}: {error}",
                         "unsupported": getattr(error, "code", "") == "UNIMPLEMENTED"})

    def _hello(self, message: Message) -> None:
        assert self._link is not None
        self._link.send({"rank": self._rank, "hello": {"world_size": self._world_size, **message}})

    def _add_main(self) -> None:
        s = self._settings
        check_known("mode", s.mode, MODES)
        check_known("install mode", s.install, INSTALLS)
        folder = checkpoint.folder_of(s.checkpoint or self.model_config.model)
        self._config = checkpoint.config_of(checkpoint.config_text(folder))
        self._checkpoint = checkpoint.tensors(folder)
        self._targets = {False: stage.target_of(self.model, self._checkpoint, s.mode)}
        if not s.draft:
            self._bind()

    def _add_draft(self) -> None:
        """The driver opens one empty draft session right after init: only there vLLM shows its draft model."""
        self._targets[True] = stage.target_of(self.model, self._checkpoint, self._settings.mode, stage.DRAFT)
        self._bind()

    def _bind(self) -> None:
        s = self._settings
        self._observed = [meta for target in self._targets.values() for meta in target.observed]
        rows = [row for target in self._targets.values() for row in target.rows]
        # Not where the driver has some only of the replicas that experts are spread over.
        compare = s.mode == "fused" and len(self._targets) == 1 and self.parallel_config.data_parallel_size in (1, self._replicas)
        notes: list[str] = []

        def bind(subscriber: Subscriber) -> None:
            notes[:] = subscriber.bind(self._config, stage.spec_of(self.parallel_config, self._replicas) if compare else "",
                                       self._observed, rows, stage.originals(self._checkpoint))

        self._subscriber, self._staged_on = open_subscriber(_WANTED.get(s.install, "cpu"), self._device_for_stage, lambda place: Subscriber(
            group=s.engine, rank=self._rank, world_size=self._world_size, job=s.job, agent=s.agent, timeout=s.timeout,
            model_name=s.model_name, buffers=1 if s.install in ("paused-live", "device-stage") else None, device=place,
            on_copy_check=None if self._balances_experts() else self._check_copies), bind, 'install="device-shadow" or "host-shadow"')
        for note in notes:
            stage.log.warning("weightwire: recorded loader and scheme disagree: %s", note)
        self._hello({"mode": self._targets[False].mode, "notes": notes, "rows": len(rows),
                     "bytes": sum(meta.nbytes for meta in self._observed), "interrupted": self._interrupted,
                     "sessions": self._sessions, "stage": self._staged_on.uuid if self._staged_on else "cpu"})
        threading.Thread(target=self._follow, args=(self._subscriber, self._link, self._closed),
                         name="weightwire-offers", daemon=True).start()

    def _device_for_stage(self) -> Device | None:
        if self._settings.install not in _WANTED:
            return None
        if self._gpu is None and self._settings.install == "device-stage":
            raise errors.RefusedError("install mode device-stage: the model is on no GPU", code="INVALID_ARGUMENT", reason="invalid_request",
                                      remedy="another install mode")
        return Device(self._gpu) if self._gpu is not None else None

    def _follow(self, subscriber: Subscriber, link: Link, closed: threading.Event) -> None:
        told = None
        while True:
            event, fence = subscriber.wait_event(0.5), subscriber.last_fence
            if event is not None and not subscriber.is_current(event):
                event = None  # void, and comes again: what is not came after `fence`
            with self._lock:
                if closed.is_set():  # what is here now may be of its successor
                    return
                if fence is not told:  # before an offer of the buffers that come in their place
                    self._let_go()
                if isinstance(event, Offer):
                    self._pending = event
                elif event is not None:
                    self._room = event
            if fence is not told:  # before the offer that ends it: the driver takes what comes last for what is
                told = fence
                link.send({"fenced": str(told)})
            if isinstance(event, Offer):
                link.send({"offer": {"epoch": event.epoch, "version": event.version, "lineage": event.lineage,
                                     "leader": event.leader}})
            elif event is not None:
                link.send({"room": {"epoch": event.epoch, "version": event.version}})

    # ---- questions of the driver

    def _answer(self, do: str, message: Message) -> Message:
        if do == "prepare":
            self._prepare(message["epoch"])
            self._interrupted = True
        elif do == "resumed":
            self._interrupted = False
        elif do == "await":
            with self._lock:
                if not self._lock.wait_for(lambda: self._calls > message["calls"][self._rank], message["seconds"]):
                    raise TimeoutError("vLLM's call has not reached this rank, or is not done")
        elif do == "sealed":  # bounded, and no failure when it takes longer: the version is served already
            with self._lock:
                self._lock.wait_for(lambda: not self._sealing, message["seconds"])
        elif do == "make_room":
            self._interrupted |= self._settings.install == "paused-live"  # else it goes on, and nobody has to resume it
            self._make_room(message["epoch"])
        elif do in ("acknowledge", "refuse"):
            with self._lock:
                offer = self._pending
            if offer is None or self._subscriber is None or offer.epoch != message["epoch"]:
                raise errors.StaleError(f"epoch {message['epoch']} is not the one offered last", code="ABORTED",
                                        reason="stale_epoch")
            if do == "refuse":
                self._subscriber.refuse(offer, message["why"])
            else:
                self._subscriber.acknowledge(offer, message["seconds"])
        elif do == "forget":
            with self._lock:
                self._held = {epoch: held for epoch, held in self._held.items() if epoch == message["epoch"]}
        elif do != "state":
            raise ValueError(f"unknown question {do!r}")
        with self._lock:
            return {"serving": self._serving, "broken": self._broken, "failure": self._failure, "calls": self._calls,
                    "open": self._update is not None}

    def _prepare(self, epoch: int) -> None:
        """Everything that can fail without touching the model, and for device-shadow the copy to the device."""
        tensors = self._staged(epoch)
        with self._lock:
            self._shadow = None  # of a version that was not installed
        if self._on_gpu(tensors):
            return
        if self._pages is not None and self._subscriber is not None and epoch not in self._held:
            self._subscriber.share_stage()
            self._pages.lock(tensors)
        if self._settings.install == "device-shadow" or self._settings.install == "auto" and self._fits(tensors):
            shadow = {name: tensor.to(self.device, copy=True, non_blocking=True) for name, tensor in tensors.items()}
            if self.device.type != "cpu":
                torch.cuda.synchronize(self.device)
            with self._lock:
                self._shadow = (epoch, shadow)

    def _on_gpu(self, tensors: dict[str, torch.Tensor]) -> bool:
        """An agent that has come back may have host memory only, also where the stage was on a GPU before."""
        return self._staged_on is not None and any(torch_cuda.gpu_of(tensor) is not None for tensor in tensors.values())

    def _fits(self, tensors: dict[str, torch.Tensor]) -> bool:
        """Whether this engine's GPU has room for them beside what it uses."""
        if self.device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(self.device)
        return bool(free >= sum(tensor.nbytes for tensor in tensors.values()) + _LEFT_FREE)

    def _let_go(self) -> None:
        """The buffers of an incarnation that was fenced. What the agent lent on a GPU nobody installs again, and it is lent anew when all
        have let it go."""
        self._unlock_pages()
        if self._staged_on is not None:
            self._pending, self._held = None, {}

    def _unlock_pages(self) -> None:
        if self._pages is not None:
            self._pages.close()

    def _make_room(self, epoch: int) -> None:
        """The stage is about to be overwritten: nothing that lies there can be replayed any more."""
        with self._lock:
            room, subscriber = self._room, self._subscriber
        if room is None or subscriber is None or room.epoch != epoch:
            raise errors.StaleError(f"no room is wanted for epoch {epoch}", code="ABORTED", reason="stale_epoch")
        subscriber.make_room(room)
        with self._lock:
            self._room, self._pending, self._held = None, None, {}

    def _staged(self, epoch: int) -> dict[str, torch.Tensor]:
        """The verified bytes of `epoch` on this rank: the offer's, or what is held for a replay."""
        with self._lock:
            offer, held, subscriber = self._pending, self._held.get(epoch), self._subscriber
        if subscriber is not None and offer is not None and offer.epoch == epoch:
            return stage.as_torch(cast(Arrays, subscriber.stage(offer)), self._observed)
        if held is None:
            raise errors.StaleError(f"rank {self._rank} holds no stage of epoch {epoch}", code="ABORTED",
                                    reason="stale_epoch", rank=str(self._rank), epoch=epoch)
        return held

    # ---- vLLM's calls

    def start_weight_update(self) -> None:
        with self._lock:
            self._failure = None
        self._guarded("start", self._start)

    def receive_weights(self, update_info: Ticket, load_weights: Any = None) -> None:
        if self._sessions:
            self._guarded("update", lambda: self._receive(update_info))
            return
        with self._lock:
            self._failure = None
        self._guarded("update", lambda: self._update_whole(update_info))
        with self._lock:
            self._update = None

    def _update_whole(self, ticket: Ticket) -> None:
        self._start()
        try:
            self._receive(ticket)
        finally:
            self._finish()

    def finish_weight_update(self) -> None:
        """Closes the session. An incomplete update is given up: its modules are put in order, and the rank goes on
        saying that it is broken until a whole version was installed."""
        self._guarded("finish", self._finish)
        with self._lock:
            self._update = None

    def _guarded(self, step: str, do: Callable[[], None]) -> None:
        failure = None
        with self._lock:
            self._updates += 1
        try:
            do()
        except Exception as error:
            stage.log.exception("weightwire: %s", step)
            failure = f"{step}: {type(error).__name__}: {error}"
        with self._lock:
            self._failure = self._failure or failure
            self._calls += 1
            self._lock.notify_all()

    def _start(self) -> None:
        draft = self.model is not self._main
        self._update = _Update(draft, self._targets.get(draft))
        if self._subscriber is None and draft and self._settings.draft:
            return self._register(self._add_draft)
        if self._subscriber is None or self._update.target is None:
            raise RuntimeError("no driver has initialised this model; see weightwire.vllm.EngineDriver")
        self._update.model = self.model
        self._update.install = self._update.target.installer(self.model, self.model_config)
        self._update.install.start()

    def _receive(self, ticket: Ticket) -> None:
        update = self._update
        if update is None or update.target is None or self._failure:
            raise RuntimeError("this update did not start")
        tensors = self._staged(ticket.epoch)
        with self._lock:
            self._serving, self._broken = None, f"installing epoch {ticket.epoch} did not end"
            self._held[ticket.epoch] = tensors
            shadow = self._take_shadow(ticket.epoch, update.target)
        update.install.update(update.target.tensors(shadow or tensors), owned=shadow is not None)
        update.epoch = ticket.epoch

    def _take_shadow(self, epoch: int, target: stage.Target) -> dict[str, torch.Tensor] | None:
        """What `_prepare` copied for `target`, once: the model keeps it, or changes it in place."""
        if self._shadow is None or self._shadow[0] != epoch:
            return None
        names = [meta.name for meta in target.observed]
        return {name: self._shadow[1].pop(name) for name in names} if names[0] in self._shadow[1] else None

    def _finish(self) -> None:
        update = self._update
        if update is None or update.install is None:
            return
        if update.epoch is None:
            update.install.abandon()
        else:
            update.install.finish()
            torch_cuda.wait_for_copies(update.model.parameters())
            self._installed(update)

    def _installed(self, update: _Update) -> None:
        with self._lock:
            if len(self._targets) == 2 and not update.draft:
                return  # the draft follows in a session of its own
            self._serving, self._broken, self._shadow = update.epoch, None, None
        if not self._balances_experts():
            for draft in self._targets:
                self._seal(draft, update)

    # ---- what becomes of the parameters between updates

    def _balances_experts(self) -> bool:
        """Then vLLM itself moves parameters while it serves."""
        return bool(getattr(self.parallel_config, "enable_eplb", False))

    def _seal(self, draft: bool, update: _Update) -> None:
        """Sums the parameters as they are now, on a thread of its own: the engine serves meanwhile, and the driver
        acknowledges when that is done."""
        model = update.model if draft else self._main
        if model is None or update.epoch is None:
            return
        with self._lock:
            self._sealing += 1
        threading.Thread(target=self._take_seal, args=(draft, model, update.epoch, self._updates), name="weightwire-seal",
                         daemon=True).start()

    def _take_seal(self, draft: bool, model: torch.nn.Module, epoch: int, updates: int) -> None:
        try:
            sums = copies.sums_of(_parameters(model))
            with self._lock:
                if self._updates != updates:
                    return  # what was summed is being replaced
                before, filled = self._seals.get(draft), self._targets[draft].filled
                if before is not None and before.epoch == epoch:  # installed again
                    kept = {name: value for name, value in before.sums.items() if name not in filled and sums.get(name) != value}
                    if kept:
                        stage.log.error("weightwire: rank %d: no checkpoint holds %s, so what was lost of them stays lost: restart "
                                        "the engine", self._rank, _few(list(kept)))
                    sums, self._hopeless = {**sums, **kept}, self._hopeless | set(kept)
                else:
                    self._hopeless = set()
                self._seals[draft] = _Seal(epoch, model, sums)
        except Exception:
            stage.log.exception("weightwire: the parameters could not be summed")
        finally:
            with self._lock:
                self._sealing -= 1
                self._lock.notify_all()

    def _check_copies(self) -> errors.WeightwireError | None:
        """For `wwctl verify`, on a thread of its own: only reads. The driver installs again what is not as it was."""
        name = f"{self._settings.engine}/{self._rank}"
        with self._lock:
            self._lock.wait_for(lambda: not self._sealing, self._settings.timeout)
            serving, updates, seals = self._serving, self._updates, list(self._seals.items())
            busy = self._update is not None or serving is None or self._sealing > 0
        lost: list[str] = []
        try:
            for draft, seal in ([] if busy else seals):
                now = copies.sums_of(_parameters(seal.model))
                lost += [(stage.DRAFT if draft else "") + name for name, value in seal.sums.items() if now.get(name) != value]
        except Exception:
            with self._lock:
                if self._updates == updates:
                    raise
        with self._lock:
            if busy or self._updates != updates:
                return errors.StaleError("superseded: a version is being installed, or none is served", code="ABORTED",
                                         reason="stale_epoch", rank=name)
            hopeless = self._hopeless
        if not lost:
            return None
        why = f"{len(lost)} parameters of the engine are not what was installed: {_few(lost)}"
        stage.log.error("weightwire: %s: %s", name, why)
        if self._link is not None and not set(lost) <= hopeless:
            self._link.send({"lost": {"epoch": serving, "why": why}})
        return errors.AbortedError(why, code="ABORTED", reason="digest_mismatch", rank=name, tensor=lost[0],
                                   remedy="its driver installs the version again; restart the engine where it has none")

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM before 0.28 asks its engines for a trainer's side, too. Ours is weightwire.vllm_trainer, or any publisher."""
        raise NotImplementedError("weightwire's trainers publish: see weightwire.torch, fsdp, megatron")

    def shutdown(self) -> None:
        with self._lock:
            self._closed.set()
        if self._link:
            self._link.close()
        if self._subscriber:
            self._subscriber.close()
        self._unlock_pages()
        self._link = self._subscriber = self._pending = self._room = self._shadow = self._serving = None
        self._held, self._seals = {}, {}


def _parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor for name, (_, _, tensor) in loading.owners(model).items()}


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
