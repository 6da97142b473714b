"""SGLang: one ticket in place of the weights.

    weightwire.sglang.update(engine, weightwire.sglang.ticket("engine-a", "/models/qwen", version))

Every scheduler process takes the version from the weightwired of its host, when it lies there complete on all ranks, and
copies it into its parameters, or gives it to the model's own `load_weights`. The plug-in (see `register`), which SGLang finds
where weightwire is installed beside it, answers (False, why) when something fails and never waits in the scheduler.
`--custom-weight-loader weightwire.sglang.load` works without it, but then waits there for the version, and what fails ends
the server: SGLang's loaders can only raise. See docs/sglang.md.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import threading
import time
import weakref
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Sequence, cast

import torch
import torch.distributed as dist

from weightwire import boxes, errors, torch_cuda
from weightwire.adapter import as_tensor, meta_of
from weightwire.device_choice import device_for, open_subscriber, wanted_device
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.labels import Span, label, spans
from weightwire.memory import Arrays, TensorMeta
from weightwire.subscriber import Offer, Subscriber
from weightwire.vllm import checkpoint

log = logging.getLogger("weightwire.sglang")
__all__ = ["LOADER", "Span", "Ticket", "load", "payloads", "register", "spans", "ticket", "update"]
LAYOUTS = ("auto", "sglang", "whole")
NOT_YET = "not yet: "  #: in the message of a ticket that may be sent again: nothing is wrong, or it may pass
_BOUND_SECONDS = 0.5  # for which a scheduler waits
_ASK_SECONDS = 0.1  # between two questions whether a version has come
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_tensor"
_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
_NO_VERSION = "The engine is on no version, and answers nothing"
_SERVES = "weightwire serves "  # and the label: SGLang's message when a version was loaded
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
    #: Nothing is loaded: is `version` complete on every rank? With the plug-in only.
    ask: bool = False
    #: What a rank receives: "sglang" its own parameters, "whole" every tensor, which SGLang's loader cuts; "auto": the first
    #: where the model is one that weightwire describes and is not quantized.
    layout: str = "auto"
    #: Which of the trainer's models this is, where it publishes several (weightwire.models).
    model_name: str = ""
    #: Where versions arrive, as in weightwire.torch.Receiver: "auto", "cpu", "cuda", "cuda:1"; "": WEIGHTWIRE_DEVICE of the engine's
    #: processes, else "auto".
    device: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """As Offer.order."""
        return self.lineage, self.version


def ticket(engine: str, checkpoint: str, version: int, **more: Any) -> list[tuple[str, torch.Tensor]]:
    """The named tensors for update_weights_from_tensor; `more` as in Ticket."""
    order = Ticket(engine, checkpoint, version, **more)
    if order.layout not in LAYOUTS:
        raise errors.RefusedError(f"unknown layout {order.layout!r}", code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy=f"one of {', '.join(LAYOUTS)}")
    return [(_TICKET, _tensor_of(order))]


def _tensor_of(order: Ticket) -> torch.Tensor:
    text = json.dumps(asdict(order)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).as_subclass(_ByValue)


def _order_of(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> Ticket:
    if len(named_tensors) != 1 or named_tensors[0][0] != _TICKET:
        raise errors.RefusedError(f"expected one ticket and got {[name for name, _ in named_tensors][:3]}",
                                  code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy="send what weightwire.sglang.ticket() returns")
    return Ticket(**json.loads(bytes(named_tensors[0][1].cpu().numpy())))


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


def update(engine: Any, named_tensors: Sequence[tuple[str, torch.Tensor]], *, pause: str = "") -> None:
    """Has `sglang.Engine` load the version of a ticket, between begin_weight_update and end_weight_update where SGLang
    has those (it refuses weights outside of them then); its cache is flushed, and outputs are labelled with the version.

    Until the version lies complete on every rank, for the ticket's `deadline` at most, the engine goes on answering. `pause`: what
    then happens to requests in flight: "retract" (they go on with the new weights, their cache recomputed), "abort", or ""
    (SGLang waits until they have ended, and admits none meanwhile).

    DeadlineError  the version did not come in time; nothing has changed
    AbortedError   SGLang reports that it did not load it: its message is in the error, and says what the engine serves
    """
    if pause not in ("", "retract", "abort"):
        raise errors.RefusedError(f"unknown pause {pause!r}", code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy="'retract', 'abort' or ''")
    _await(engine, _order_of(named_tensors))
    if pause:
        _pause(engine, pause)
    session, stays = hasattr(engine, "begin_weight_update"), False
    try:
        if session:
            _insist("begin_weight_update", engine.begin_weight_update())
        try:
            message = _insist("update_weights_from_tensor",
                              engine.update_weights_from_tensor(named_tensors, load_format=LOADER))
        finally:
            if session:
                _insist("end_weight_update", engine.end_weight_update())
    except errors.AbortedError as error:
        stays = _NO_VERSION in str(error)
        raise
    finally:
        if pause and not stays:
            _continue(engine)
    log.debug("weightwire: %s", message)


def _await(engine: Any, order: Ticket) -> None:
    """Until every rank has the version. Asks past the lock for which SGLang's own call waits until all requests have ended."""
    manager = getattr(engine, "tokenizer_manager", None)
    if not hasattr(manager, "update_weights_from_tensor_communicator"):
        return  # an older SGLang: its scheduler waits, or says no
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    version = 0 if order.catch_up else order.version
    question = [(_TICKET, _tensor_of(replace(order, ask=True, catch_up=False, version=version)))]
    end = time.monotonic() + order.deadline
    while True:
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=engine._serialize_tensors_per_rank(question, LOADER), load_format=LOADER, flush_cache=False)
        answers = engine.loop.run_until_complete(_ask(manager, request))
        why = "; ".join(sorted({answer.message for answer in answers if not answer.success}))
        if not why or _NO_PLUG_IN in why:
            return
        if NOT_YET not in why:
            raise errors.AbortedError(f"the engine cannot take version {order.version}: {why}", code="ABORTED", rank=order.engine)
        if time.monotonic() >= end:
            raise errors.DeadlineError(f"version {order.version} did not come within {order.deadline:g} s: {why}",
                                       code="DEADLINE_EXCEEDED", reason="deadline_exceeded", rank=order.engine,
                                       remedy="`wwctl status` says what everyone waits for")
        time.sleep(_ASK_SECONDS)


_NO_PLUG_IN = "begin_weight_update()"  # in what SGLang says of a question that only the plug-in would answer


async def _ask(manager: Any, request: Any) -> Any:
    manager.auto_create_handle_loop()
    return await manager.update_weights_from_tensor_communicator(request)


def _pause(engine: Any, mode: str) -> None:
    from sglang.srt.managers.io_struct import PauseGenerationReqInput
    engine.loop.run_until_complete(engine.tokenizer_manager.pause_generation(PauseGenerationReqInput(mode=mode)))


def _continue(engine: Any) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput
    engine.loop.run_until_complete(engine.tokenizer_manager.continue_generation(ContinueGenerationReqInput()))


def _insist(call: str, answer: Any) -> str:
    """SGLang returns (False, why) where others raise. What it says."""
    success, message = answer
    if not success:
        raise errors.AbortedError(f"SGLang's {call} failed: {message}", code="ABORTED", remedy="send the ticket again")
    return str(message)


def load(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """SGLang's loader. Where the plug-in is not, it waits for the version of the ticket in the scheduler, loads it into `model`, and
    ends SGLang's server with what it raises.

    RefusedError       no ticket
    FileNotFoundError  the checkpoint's folder holds no safetensors
    DeadlineError      the version did not come; the model is as it was
    AbortedError       a rank could not load it: the engine must not serve. The same ticket loads it again
    """
    order = _order_of(named_tensors)
    if hasattr(_plugged, "answer"):
        _plugged.answer = _answer(order, model)
        return
    rank = _rank_of(order, model)
    rank.wait_joined(order.deadline)
    if order.catch_up:
        rank.catch_up(model)
    elif order.version > 0:
        rank.wait(order)
        rank.install(model)


def register() -> None:
    """SGLang's plug-in (entry point group sglang.srt.plugins): every engine knows LOADER without its flag, and nothing that
    happens to a ticket is raised in its scheduler, or waited for there."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATER, _around_manager, HookType.AROUND)
    HookRegistry.register(_RUNNER, _around_runner, HookType.AROUND)


def _around_manager(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """The scheduler's call: outside of a session too, where SGLang itself would refuse a question."""
    if request.load_format != LOADER:
        return original(manager, request)
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput
    try:
        order, why = _read(lambda: _order_of(manager.tp_worker.deserialize_own_rank(request.serialized_named_tensors)))
        if order is None:
            return UpdateWeightsFromTensorReqOutput(success=False, message=why)
        if order.ask:
            _, runner = manager.tp_worker.weight_update_runners()[0]
            ready, why = _answer(order, runner.weight_updater.get_model())
            return UpdateWeightsFromTensorReqOutput(success=ready, message=why)
    except Exception as error:  # the same on every rank: they have read the same ticket
        log.exception("weightwire: a ticket")
        return UpdateWeightsFromTensorReqOutput(success=False, message=f"{type(error).__name__}: {error}")
    answer = original(manager, request)
    rank = _ranks.get(order.engine)
    if rank is not None and rank.loaded is not None:
        if answer.success:
            answer.message = _SERVES + rank.loaded
        manager.record_weight_version_after_update(rank.loaded)  # also where its cache was not flushed: the weights changed
    if rank is not None:
        _hold(manager.scheduler, rank)
    return answer


def _read(ticket: Callable[[], Ticket]) -> tuple[Ticket | None, str]:
    """What every rank has read; None, and why, on all ranks where one could not read its own, or was sent another. Each rank is sent a copy, and one
    that went on alone would hold its scheduler until the others come."""
    order, why, sum_of = None, "another rank could not read its ticket, as its log says, or was sent another one", 0
    try:
        order = ticket()
        sum_of = 1 + zlib.crc32(json.dumps(asdict(order)).encode())
    except Exception as error:
        log.exception("weightwire: a ticket")
        why = f"{type(error).__name__}: {error}"
    least, most = _minimum(dist.get_world_size() if dist.is_initialized() else 1, sum_of, -sum_of)
    return (order, "") if least == -most and least else (None, why)


def _minimum(ranks: int, *values: int) -> list[int]:
    """Of each, over the engine's ranks."""
    if ranks == 1:
        return list(values)
    found = torch.tensor(values)
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=_cpu_group())
    return [int(value) for value in found]


def _hold(scheduler: Any, rank: "_Rank") -> None:
    """An engine on no version schedules nothing, until a version was loaded."""
    if rank.broken == rank.held:
        return
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
    try:
        if rank.broken:
            scheduler.pause_generation(PauseGenerationReqInput(mode="in_place"))
        else:
            scheduler.continue_generation(ContinueGenerationReqInput())
        rank.held = rank.broken
    except Exception:
        log.exception("weightwire: the engine is on no version, and goes on answering: stop it")


def _around_runner(original: Callable[..., Any], updater: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
    """SGLang's own call with its own checks; what `load` comes to in it is kept, for there it could only be raised."""
    if load_format != LOADER:
        return cast("tuple[bool, str]", original(updater, named_tensors, load_format))
    if LOADER not in updater.custom_weight_loaders:
        updater.custom_weight_loaders.append(LOADER)
    _plugged.answer = None
    try:
        answer = cast("tuple[bool, str]", original(updater, named_tensors, load_format))
        return _plugged.answer or answer
    except Exception as error:  # not of `load`: SGLang refuses, the same on every rank
        log.exception("weightwire: a ticket")
        return False, f"{type(error).__name__}: {error}"
    finally:
        del _plugged.answer


_plugged = threading.local()  # while the plug-in has SGLang load: `answer`


def _answer(order: Ticket, model: Any) -> tuple[bool, str]:
    """What a ticket comes to, in a scheduler: it waits at most a moment, and every rank hears of every other one's failure. They
    get the same tickets in the same order."""
    rank = _rank_of(order, model)
    if not rank.is_main(model):
        log.warning("weightwire: a draft model takes no weights from weightwire, and stays as it is")
        return True, "Success"
    state, why = rank.look(order, 0.0 if order.ask else _BOUND_SECONDS)
    least = rank.agree(state)
    if least == _READY:
        if order.ask or (order.version == 0 and not order.catch_up):
            return True, "Success"
        return rank.try_install(model)
    if least == _NOTHING and order.catch_up and not rank.broken:
        return True, "Success"
    if rank.broken and least == _NOTHING:
        why = "a version was loaded in part, and there is none now to load in its place"
    return False, why or f"{NOT_YET}another rank of the engine is not as far"


_READY, _NOTHING, _FAILED = 2, 1, 0  # what a ticket asks for; the smallest of all ranks counts


class _Rank:
    """This process as one rank of an engine; it stays attached between tickets."""

    def __init__(self, order: Ticket, model: Any):
        self._order, self._main = order, weakref.ref(model)
        joined = dist.is_initialized()
        self._rank: int = dist.get_rank() if joined else 0
        self._world_size: int = dist.get_world_size() if joined else 1
        self._form: _Form | None = None
        self._subscriber: Subscriber | None = None
        self._failure: Exception | None = None  # to join
        self._staged: tuple[Offer, Arrays] | None = None
        self._acknowledged = False  # what is staged
        self._served: tuple[Offer, Arrays] | None = None  # what the model holds, while it may be read
        self.loaded: str | None = None  #: the label of what the last ticket loaded; None: it loaded nothing
        self.broken = False  #: a version was loaded in part, and none since
        self.held = False  #: its scheduler was paused for that
        self._joining = self._start_joining()

    # ---- joining: on a thread, for an agent that does not answer must not hold the scheduler

    def _start_joining(self) -> threading.Thread:
        thread = threading.Thread(target=self._join, name="weightwire-join", daemon=True)
        thread.start()
        return thread

    def _join(self) -> None:
        order = self._order
        try:
            tensors = checkpoint_tensors(order.checkpoint)
            wanted = wanted_device(order.device or None)

            def bind(subscriber: Subscriber) -> None:
                self._form = _Whole(tensors) if order.layout == "whole" else self._own(subscriber, tensors)
                if isinstance(self._form, _Whole):
                    subscriber.bind_submission(boxes.submission({m.name: m for m in tensors}, [boxes.whole(m) for m in tensors]))

            self._subscriber, _ = open_subscriber(
                wanted, lambda: device_for(wanted, self._parameters().values()),
                lambda place: Subscriber(group=order.engine, rank=self._rank, world_size=self._world_size, job=order.job,
                                         agent=order.agent or None, timeout=order.deadline, model_name=order.model_name, device=place),
                bind)
        except Exception as error:  # told by the next ticket, which tries again
            log.warning("weightwire: joining as %s/%d: %s", order.engine, self._rank, error)
            self._failure = error

    def _parameters(self) -> dict[str, torch.Tensor]:
        model = self._main()
        return dict(model.named_parameters()) if model is not None else {}

    def _own(self, subscriber: Subscriber, tensors: Sequence[TensorMeta]) -> "_Form":
        """The rank's own parameters, as the scheme of SGLang's layout describes them; else whole tensors, with the reason."""
        try:
            text = checkpoint.config_text(Path(self._order.checkpoint))
            if json.loads(text).get("quantization_config"):
                raise errors.RefusedError("a quantized model's parameters are not those of its checkpoint", code="UNIMPLEMENTED")
            own = [meta_of(name, parameter) for name, parameter in self._parameters().items()]
            subscriber.bind(checkpoint.config_of(text), _spec(self._world_size), own)
            return _Own(own)
        except (errors.RefusedError, RuntimeError) as why:
            if self._order.layout == "sglang" or getattr(why, "code", "") == "RESOURCE_EXHAUSTED":
                raise
            log.warning("weightwire: %s/%d takes whole tensors, and SGLang's loader cuts them: %s", self._order.engine, self._rank, why)
            return _Whole(tensors)

    def _not_joined(self, seconds: float) -> tuple[int, str]:
        self._joining.join(seconds)
        if self._joining.is_alive():
            return _FAILED, f"{NOT_YET}rank {self._rank} is joining weightwire"
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._joining = self._start_joining()
            return _FAILED, f"{NOT_YET}rank {self._rank} could not join weightwire: {type(failure).__name__}: {failure}"
        return _READY, ""

    def wait_joined(self, seconds: float) -> None:
        """Raises what kept it from joining."""
        self._joining.join(seconds)
        if self._subscriber is None:
            failure, self._failure = self._failure, None
            if not self._joining.is_alive():
                self._joining = self._start_joining()
            raise failure or errors.DeadlineError(f"joining took more than {seconds:g} s", code="DEADLINE_EXCEEDED",
                                                  rank=self._order.engine)

    def is_main(self, model: Any) -> bool:
        return self._main() is model

    # ---- versions

    def look(self, order: Ticket, seconds: float) -> tuple[int, str]:
        """Whether this rank holds what the ticket asks for, and why not; takes `seconds` at most. Raises nothing."""
        self.loaded = None
        try:
            state, why = self._not_joined(seconds)
            if state != _READY or (order.version == 0 and not order.catch_up):
                return state, why
            return (self._look_for_any if order.catch_up else self._look_for)(order, time.monotonic() + seconds)
        except Exception as error:
            log.exception("weightwire: a ticket")
            return _FAILED, f"{type(error).__name__}: {error}"

    def _look_for(self, order: Ticket, end: float) -> tuple[int, str]:
        """Every rank sees the same offers in the same order."""
        self._forget_fenced()
        while self._staged is None or self._staged[0].order < order.order:
            if self._staged is not None:
                self._acknowledge()  # the engine skips it, also where it failed to load it: its buffer is free for the next
            if not self._take_offer(max(0.0, end - time.monotonic())):
                return _NOTHING, f"{NOT_YET}version {order.version} has not come to rank {self._rank}"
        return _READY, ""

    def _look_for_any(self, order: Ticket, end: float) -> tuple[int, str]:
        self._forget_fenced()
        if self._staged is None or self._acknowledged:
            self._take_offer(0.0)
        waits = self._staged is not None and not self._acknowledged
        return (_READY, "") if waits else (_NOTHING, "")

    def _take_offer(self, seconds: float) -> bool:
        assert self._subscriber is not None
        offer = self._subscriber.wait_offer(seconds)
        if offer is None:
            return False
        try:
            self._staged, self._acknowledged = (offer, cast(Arrays, self._subscriber.flip(offer))), False
        except errors.StaleError:
            pass  # fenced meanwhile: it is offered again
        return True

    def _forget_fenced(self) -> None:
        """Numbers mean nothing across a fence, and what was staged is offered again."""
        assert self._subscriber is not None
        if self._staged is not None and self._subscriber.serving is not self._staged[0]:
            self._staged = None
        if self._served is not None and not self._subscriber.is_current(self._served[0]):
            self._served = None  # nobody goes back there, and a GPU's memory is lent again when all have let it go

    def agree(self, state: int) -> int:
        """The least of all ranks; _NOTHING where they hold different versions: one of them is not as far."""
        epoch = self._staged[0].epoch if self._staged else 0
        least, low, high = _minimum(self._world_size, state, epoch, -epoch)
        return min(least, _NOTHING) if low != -high and least == _READY and low else least

    def try_install(self, model: Any) -> tuple[bool, str]:
        """What is staged on every rank. When a rank fails, all go back to what they had, if they hold that still."""
        assert self._staged is not None and self._subscriber is not None
        offer, arrays = self._staged
        why = self._put(model, arrays)
        if _minimum(self._world_size, int(not why))[0]:
            self._served, self.broken, self.loaded = self._staged, False, label(offer.version, offer.lineage)
            self._acknowledge()
            return True, "Success"
        why = f"version {offer.version} (epoch {offer.epoch}) was not loaded by every rank: {why or 'another rank failed'}"
        before = self._served if self._served and self._subscriber.is_current(self._served[0]) else None
        back = self._put(model, before[1]) if before else "there is none before it"
        if _minimum(self._world_size, int(not back))[0] and before is not None:
            return False, f"{why}. The engine is on version {before[0].version}"
        self.broken = True
        return False, f"{why}. {_NO_VERSION}: {back or 'another rank cannot go back'}"

    def _put(self, model: Any, arrays: Arrays) -> str:
        """Why it failed."""
        assert self._form is not None
        try:
            self._form.put(model, arrays)
            torch_cuda.wait_for_copies(model.parameters())
            return ""
        except Exception as error:  # whatever a model's loader raises, the other ranks must hear of it
            log.exception("weightwire: loading")
            return f"{type(error).__name__}: {error}"

    def _acknowledge(self) -> None:
        """On a thread: an agent that does not answer must not hold the scheduler. It offers again what it has not heard of."""
        assert self._staged is not None and self._subscriber is not None
        offer, subscriber = self._staged[0], self._subscriber
        if offer.leader and not self._acknowledged:
            threading.Thread(target=_acknowledge, args=(subscriber, offer), name="weightwire-acknowledge", daemon=True).start()
        self._acknowledged = True

    # ---- without the plug-in

    def wait(self, order: Ticket) -> None:
        """Until this rank holds it."""
        state, why = self.look(order, order.deadline)
        if state == _NOTHING:
            raise errors.DeadlineError(f"version {order.version} did not come within {order.deadline:g} s", code="DEADLINE_EXCEEDED",
                                       reason="deadline_exceeded", rank=order.engine,
                                       remedy="`wwctl status` says what everyone waits for")
        if state == _FAILED:
            raise errors.AbortedError(why, code="ABORTED", rank=order.engine)

    def install(self, model: Any) -> None:
        loaded, why = self.try_install(model)
        if not loaded:
            raise errors.AbortedError(why, code="ABORTED", remedy="load the same ticket again, or restart the engine")

    def catch_up(self, model: Any) -> None:
        state, _ = self.look(replace(self._order, catch_up=True), 0.0)
        if self.agree(state) == _READY:
            self.install(model)
        elif self.broken:
            raise errors.AbortedError("a version was loaded in part, and there is none now to load in its place",
                                      code="ABORTED", remedy="send the next version's ticket, or restart the engine")

    def close(self) -> None:
        self._joining.join()
        if self._subscriber is not None:
            self._subscriber.close()


class _Form:
    """In which a model takes its weights."""

    def put(self, model: Any, arrays: Arrays) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class _Whole(_Form):
    """Every tensor of the checkpoint, which the model's own loader cuts."""

    tensors: Sequence[TensorMeta]

    def put(self, model: Any, arrays: Arrays) -> None:
        model.load_weights([(meta.name, as_tensor(arrays[meta.name], meta)) for meta in self.tensors])


@dataclass(frozen=True)
class _Own(_Form):
    """The parameters of this rank."""

    own: Sequence[TensorMeta]

    @torch.no_grad()
    def put(self, model: Any, arrays: Arrays) -> None:
        parameters = dict(model.named_parameters())
        for meta in self.own:
            parameters[meta.name].data.copy_(as_tensor(arrays[meta.name], meta))
        from sglang.srt.model_executor.model_runner_components.weight_updater import post_load_weights
        post_load_weights(model)


def _spec(world_size: int) -> str:
    """The engine's layout in weightwire's words. RefusedError where its words are not known."""
    try:
        from sglang.srt.runtime_context import get_parallel
        parallel = get_parallel()
        tp, pp, dp, ep = (int(size) for size in (parallel.tp_size, parallel.pp_size, parallel.dp_size, parallel.ep_size))
    except (ImportError, AttributeError) as error:  # of another version
        raise errors.RefusedError(f"this SGLang does not say how its ranks share the model: {error}", code="UNIMPLEMENTED") from error
    if tp * pp != world_size or dp != 1 or ep != 1:
        raise errors.RefusedError(f"dp {dp}, ep {ep} of {world_size} ranks is not tried", code="UNIMPLEMENTED")
    return f"sglang:tp{tp}" + (f",pp{pp}" if pp > 1 else "")


def _acknowledge(subscriber: Subscriber, offer: Offer) -> None:
    try:
        subscriber.acknowledge(offer)
    except errors.WeightwireError as error:
        log.warning("weightwire: version %d is served, and the agent was not told: %s", offer.version, error)


_ranks: dict[str, _Rank] = {}


def _rank_of(order: Ticket, model: Any) -> _Rank:
    rank = _ranks.get(order.engine)
    if rank is None:
        rank = _ranks[order.engine] = _Rank(order, model)
    return rank


def _cpu_group() -> Any:
    from sglang.srt.distributed.parallel_state import get_world_group

    return get_world_group().cpu_group
