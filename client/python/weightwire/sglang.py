"""SGLang: one ticket in place of the weights.

    --custom-weight-loader weightwire.sglang.load          (not needed where the plug-in is loaded, see `register`)

    weightwire.sglang.update(engine, weightwire.sglang.ticket("engine-a", "/models/qwen", version))

Every scheduler process then waits for the version at the weightwired of its host, checks that it is complete, and
gives it to the model's own `load_weights`. Every rank receives every tensor whole, and keeps two of each in host
memory: SGLang's loader cuts its part. Only `load`, `ticket` and the plug-in were run against SGLang's own code on a
CPU; no SGLang engine runs without a GPU. See docs/sglang.md.
"""

from __future__ import annotations

import base64
import json
import pickle
import time
from dataclasses import asdict, dataclass
from typing import Any, Sequence, cast

import torch
import torch.distributed as dist

from weightwire import boxes, errors
from weightwire.adapter import as_tensor
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.memory import Arrays
from weightwire.subscriber import Offer, Subscriber

LOADER = "weightwire.sglang.load"
_TICKET = "weightwire.ticket"


@dataclass(frozen=True)
class Ticket:
    """What every rank is told."""

    engine: str  #: name of the engine in weightwire, the same on all its ranks
    checkpoint: str  #: folder with the safetensors (or their headers alone) that name the model's tensors
    version: int  #: this one or a newer one is loaded; 0: the rank only joins, and the model stays as it is
    agent: str = ""  #: socket of the weightwired; empty: WEIGHTWIRE_AGENT_SOCKET
    job: str = ""
    deadline: float = 120.0  #: seconds, everything included
    lineage: int = 1  #: of `version`, Publisher.lineage: what is newer in an earlier one is not loaded
    #: Instead of waiting for `version`: a version is loaded if one has come that was not loaded, and lies where the next one
    #: is to go.
    catch_up: bool = False

    @property
    def order(self) -> tuple[int, int]:
        """As Offer.order."""
        return self.lineage, self.version


def ticket(engine: str, checkpoint: str, version: int, **more: Any) -> list[tuple[str, torch.Tensor]]:
    """The named tensors for update_weights_from_tensor; `more` as in Ticket."""
    text = json.dumps(asdict(Ticket(engine, checkpoint, version, **more))).encode()
    return [(_TICKET, torch.frombuffer(bytearray(text), dtype=torch.uint8).as_subclass(_ByValue))]


class _ByValue(torch.Tensor):
    """Is pickled with its bytes, as a plain tensor. torch's way between processes, which SGLang uses, shares a file
    descriptor on one host; and once SGLang has patched that in a process, it fails for CPU tensors."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, (storage, *rest) = self.as_subclass(torch.Tensor).__reduce_ex__(protocol)
        return rebuild, (_Storage(storage), *rest)


class _Storage:
    def __init__(self, storage: Any):
        self._storage = storage

    def __reduce__(self) -> Any:
        return self._storage.__reduce__()


def payloads(named_tensors: Sequence[tuple[str, torch.Tensor]], ranks: int) -> list[str]:
    """A ticket as SGLang's HTTP call /update_weights_from_tensor takes it, in `serialized_named_tensors`: one for each
    TP rank."""
    return [base64.b64encode(pickle.dumps(list(named_tensors), protocol=4)).decode()] * ranks


def update(engine: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Has `sglang.Engine` load the version of a ticket, between begin_weight_update and end_weight_update where SGLang
    has those (it refuses weights outside of them then); its cache is flushed. No request may be running.

    AbortedError  SGLang reports that it did not: its message is in the error. The weights may have changed
    """
    session = hasattr(engine, "begin_weight_update")
    if session:
        _insist("begin_weight_update", engine.begin_weight_update())
    try:
        _insist("update_weights_from_tensor", engine.update_weights_from_tensor(named_tensors, load_format=LOADER))
    finally:
        if session:
            _insist("end_weight_update", engine.end_weight_update())


def _insist(call: str, answer: Any) -> None:
    """SGLang returns (False, why) where others raise."""
    success, message = answer
    if not success:
        raise errors.AbortedError(f"SGLang's {call} failed: {message}", code="ABORTED",
                                  remedy="send the ticket again before the engine serves")


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's hook: loads the version of the ticket into `model`.

    RefusedError       no ticket
    FileNotFoundError  the checkpoint's folder holds no safetensors
    DeadlineError      the version did not come; the model is as it was
    AbortedError       a rank could not load it: the engine must not serve. The same ticket loads it again
    """
    if len(named_tensors) != 1 or named_tensors[0][0] != _TICKET:
        raise errors.RefusedError(f"expected one ticket and got {[name for name, _ in named_tensors][:3]}",
                                  code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy="send what weightwire.sglang.ticket() returns")
    order = Ticket(**json.loads(bytes(named_tensors[0][1].cpu().numpy())))
    rank = _ranks.get(order.engine)
    if rank is None:
        rank = _ranks[order.engine] = _Rank(order)
    if order.catch_up:
        rank.catch_up(model)
    elif order.version > 0:
        rank.load(model, order)


def register() -> None:
    """SGLang's plug-in (entry point group sglang.srt.plugins): lets every engine know LOADER without its flag."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater."
                          "update_weights_from_tensor", _know_loader, HookType.BEFORE)


def _know_loader(updater: Any, *_: Any, **__: Any) -> None:
    if LOADER not in updater.custom_weight_loaders:
        updater.custom_weight_loaders.append(LOADER)


class _Rank:
    """This process as one rank of an engine; it stays attached between tickets."""

    def __init__(self, order: Ticket):
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._tensors = checkpoint_tensors(order.checkpoint)
        self._subscriber = Subscriber(group=order.engine, rank=rank, world_size=world_size, job=order.job,
                                      agent=order.agent or None, timeout=order.deadline)
        self._world_size = world_size
        self._staged: tuple[Offer, Arrays] | None = None
        self._acknowledged = False  # what is staged
        self._broken = False  # a rank failed to load a version, and none was loaded since
        try:
            self._subscriber.bind_submission(
                boxes.submission({m.name: m for m in self._tensors}, [boxes.whole(m) for m in self._tensors]))
        except BaseException:
            self._subscriber.close()
            raise

    def load(self, model: Any, order: Ticket) -> None:
        self._install(model, *self._wait(order))

    def catch_up(self, model: Any) -> None:
        self._forget_fenced()
        if self._staged is None or self._acknowledged:
            offer = self._subscriber.wait_offer(0.0)
            if offer is not None:
                self._stage(offer)
        waits = self._staged is not None and not self._acknowledged
        if self._all(waits):  # a rank that has not heard of it yet has room for the next one until it has
            assert self._staged is not None
            self._install(model, *self._staged)
        elif self._broken:
            raise errors.AbortedError("a version was loaded in part, and there is none now to load in its place",
                                      code="ABORTED", remedy="send the next version's ticket, or restart the engine")

    def _install(self, model: Any, offer: Offer, arrays: Arrays) -> None:
        why, self._broken = "", True
        try:
            model.load_weights([(m.name, as_tensor(arrays[m.name], m)) for m in self._tensors])
        except Exception as error:  # whatever a model's loader raises, the other ranks must hear of it
            why = f"{type(error).__name__}: {error}"
        if not self._all(not why):
            raise errors.AbortedError(f"version {offer.version} was not loaded by every rank: "
                                      f"{why or 'another rank failed'}", code="ABORTED", epoch=offer.epoch,
                                      remedy="load the same ticket again, or restart the engine")
        self._broken = False
        self._acknowledge()

    def _wait(self, order: Ticket) -> tuple[Offer, Arrays]:
        """Every rank sees the same offers in the same order, so that all go on with the same one."""
        end = time.monotonic() + order.deadline
        self._forget_fenced()
        while self._staged is None or self._staged[0].order < order.order:
            if self._staged is not None:
                self._acknowledge()  # the engine skips it, also where it failed to load it: its buffer is free for the next
            offer = self._subscriber.wait_offer(max(0.0, end - time.monotonic()))
            if offer is None:
                raise errors.DeadlineError(f"version {order.version} did not come within {order.deadline:g} s",
                                           code="DEADLINE_EXCEEDED", reason="deadline_exceeded",
                                           rank=f"{order.engine}", remedy="`wwctl status` says what everyone waits for")
            self._stage(offer)
        return self._staged

    def _forget_fenced(self) -> None:
        """Numbers mean nothing across a fence, and what was staged is offered again."""
        if self._staged is not None and self._subscriber.serving is not self._staged[0]:
            self._staged = None

    def _stage(self, offer: Offer) -> None:
        try:
            self._staged, self._acknowledged = (offer, cast(Arrays, self._subscriber.flip(offer))), False
        except errors.StaleError:
            pass  # fenced meanwhile: it is offered again

    def _acknowledge(self) -> None:
        assert self._staged is not None
        if self._staged[0].leader and not self._acknowledged:
            self._subscriber.acknowledge(self._staged[0])
        self._acknowledged = True

    def _all(self, ok: bool) -> bool:
        if self._world_size == 1:
            return ok
        flag = torch.tensor([int(ok)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=_cpu_group())
        return bool(flag.item())

    def close(self) -> None:
        self._subscriber.close()


_ranks: dict[str, _Rank] = {}


def _cpu_group() -> Any:
    from sglang.srt.distributed import get_world_group

    return get_world_group().cpu_group
