"""Modules that hold whole tensors: one rank, or data-parallel replicas.

>>> publisher = weightwire.torch.Publisher(model)          # on every rank of a DDP trainer, or on one
>>> publisher.publish(step).wait_released(timeout=60)

>>> receiver = weightwire.torch.Receiver(model)            # anywhere else
>>> receiver.receive(timeout=60)                           # in place; returns the offer
"""

from __future__ import annotations

import re
import zlib
from datetime import timedelta
from typing import Any, Callable, Iterable, Literal, Mapping, Sequence, Union, cast

import torch
import torch.distributed as dist

from weightwire import boxes, errors, hf_export, subscriber, torch_cuda
from weightwire.adapter import (Live, LivePublisher, Model, as_tensor, clean_name, is_freed, is_frozen, is_sharded, meta_of,
                                persistent_buffers, place, publish_together, refuse)
from weightwire.device_choice import DeviceChoice, device_for, open_subscriber, wanted_device
from weightwire.export_check import Export
from weightwire.memory import Arrays, TensorMeta
from weightwire.publisher import DeltaMode, Lineage

#: A module, tensors by name, or a function that gives (name, tensor) pairs anew for each version.
Source = Union[torch.nn.Module, Mapping[str, torch.Tensor], Callable[[], Iterable[tuple[str, torch.Tensor]]]]
#: Hugging Face name for a module's name; None leaves the tensor out.
Names = Callable[[str], Union[str, None]]
#: What a rank holds, and the whole tensors that it is part of.
Reading = tuple[Mapping[str, TensorMeta], Sequence[Live]]


def unwrapped(source: Any) -> Any:
    """What DDP or a DeepSpeed engine holds."""
    if isinstance(source, torch.nn.parallel.DistributedDataParallel) or (
            isinstance(source, torch.nn.Module) and hasattr(source, "zero_optimization_stage")):
        return source.module
    return source


#: Parts of names that adapters have which lie beside the weight that they change (loralib, torchtune, NeMo AutoModel).
_ADAPTER = re.compile(r"(?:^|\.)lora_[^.]*(?:\.|$)", re.IGNORECASE)


def parameters_and_buffers(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """What its state dict has, each once and without what wrappers put into names."""
    return [(clean_name(name), tensor) for name, tensor in [*module.named_parameters(), *persistent_buffers(module)]]


def check_adapter(name: str) -> None:
    """RefusedError where `name`, by which a module's tensor is published, is that of an adapter or of what one is around."""
    if ".base_layer." in name or name.startswith("base_model.model."):
        raise refuse("it is a PEFT model's: engines that do not know its adapters would have other weights", tensor=name,
                     remedy="use weightwire.peft, which merges them, or give checkpoint names by `names`")
    if _ADAPTER.search(name):
        raise refuse("it is an adapter's (LoRA): engines would have the weight beside it without the adapter", tensor=name,
                     remedy="merge adapters into what you publish; or leave them out by `names`, where they do not count")


def named_tensors(source: Source, names: Names | None = None) -> list[tuple[str, torch.Tensor]]:
    """Parameters (a tied one once, under its first name) and persistent buffers, by Hugging Face name."""
    source = unwrapped(source)
    if isinstance(source, torch.nn.Module):
        return of_module(parameters_and_buffers(source), names)
    return _renamed(source.items() if isinstance(source, Mapping) else source(), names)


def of_module(pairs: Iterable[tuple[str, torch.Tensor]], names: Names | None = None) -> list[tuple[str, torch.Tensor]]:
    """`pairs` by Hugging Face name. RefusedError: one is an adapter's."""
    found = _renamed(pairs, names)
    for name, _ in found:
        check_adapter(name)
    return found


def _renamed(pairs: Iterable[tuple[str, torch.Tensor]], names: Names | None) -> list[tuple[str, torch.Tensor]]:
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
        if is_sharded(tensor):
            raise refuse("the parameter is sharded", tensor=name, remedy="use weightwire.fsdp")
        lives.append(Live(boxes.whole(meta_of(name, tensor)), tensor.detach(), frozen=is_frozen(tensor)))
    canonical = {live.held.meta.name: live.held.meta for live in lives}
    return hf_export.exported(source, canonical, lives) if names is None else (canonical, lives)


_SAMPLE = 4_096  # elements of a tensor that are compared with its replicas
_COMPARED = 3  # when it is opened, and for two versions: parts that begin alike differ after a step


def _sample(tensor: torch.Tensor) -> int:
    flat = tensor.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _SAMPLE)].clone().cpu()  # numpy must not have the trainer's storage: it pins its size
    return zlib.crc32(some.view(torch.uint8).numpy())


def _samples(lives: Sequence[Live]) -> dict[str, tuple[str, int]]:
    """By what they hold: name and digest."""
    return {repr((live.held.meta, live.held.boxes)): (live.held.meta.name, _sample(live.tensor)) for live in lives
            if live.held.boxes and type(live.tensor) is torch.Tensor and not is_freed(live.tensor)}


def _compare_replicas(read: Callable[[], Reading]) -> None:
    """Ranks that hold the same elements share the sending, so they must hold the same bytes; every K-th element is looked at.
    A collective of torch.distributed.

    RefusedError, on all ranks: two hold different bytes of one name, or one cannot read its module
    """
    failed: errors.WeightwireError | None = None
    mine: dict[str, tuple[str, int]] = {}
    try:
        mine = _samples(read()[1])
    except errors.WeightwireError as error:
        failed = error
    everyone: list[tuple[dict[str, tuple[str, int]], str]] = [(mine, "")] * dist.get_world_size()
    dist.all_gather_object(everyone, (mine, str(failed or "")))
    if failed is not None:
        raise failed
    first: dict[str, tuple[int, int]] = {}
    for rank, (held, why) in enumerate(everyone):
        if why:
            raise refuse(f"rank {rank} cannot publish: {why}")
        for what, (name, digest) in held.items():
            other, theirs = first.setdefault(what, (rank, digest))
            if theirs != digest:
                raise refuse(f"ranks {other} and {rank} hold different bytes under this name", tensor=name,
                             remedy="where each rank has its own part (expert parallelism), give the parts different names by "
                                    "`names`, or hold them as DTensors; where they should be copies, see why they are not")


def _comparing(read: Callable[[], Reading], world_size: int | None, before: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """What is called before versions: `before`, and for the first few of them `_compare_replicas`."""
    compared = 0

    def prepare() -> None:
        nonlocal compared
        before()
        if compared < _COMPARED and publish_together(world_size):
            _compare_replicas(read)
            compared += 1

    return prepare


class BoxPublisher(LivePublisher):
    """A publisher whose layout is what `read` finds, as explicit boxes."""

    def __init__(self, read: Callable[[], Reading], *, world_size: int | None, before: Callable[[], None] = lambda: None,
                 **where: Any):
        super().__init__(lambda: read()[1], lambda base, lives: cast(Arrays, base.bind_boxes(
            boxes.submission(read()[0], [live.held for live in lives]))), world_size=world_size,
            before=_comparing(read, world_size, before), **where)


def box_model(read: Callable[[], Reading] | None, export: Export | None) -> Model:
    """What `read` finds as one of several models; None: this rank has nothing of it. A collective of torch.distributed.

    RefusedError, on all ranks: one cannot read its module, no rank has any of it, or two describe other whole tensors
    """
    failed: errors.WeightwireError | None = None
    mine: Mapping[str, TensorMeta] | str | None = None
    try:
        mine = dict(read()[0]) if read is not None else None
    except errors.WeightwireError as error:
        failed, mine = error, str(error)
    rank, world_size = place(None, None)
    everyone: list[Mapping[str, TensorMeta] | str | None] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine)
    if failed is not None:
        raise failed
    shares = [other for other, whole in enumerate(everyone) if whole is not None]
    if not shares:
        raise refuse("no rank has anything of the model", remedy="give the module on the ranks that hold it, None on the others")
    for other in shares:
        whole = everyone[other]
        if isinstance(whole, str):
            raise refuse(f"rank {other} cannot publish: {whole}")
        if whole != everyone[shares[0]]:
            raise refuse(f"ranks {shares[0]} and {other} describe different models",
                         remedy="give the same module, and the same `names`, on every rank that has any of it")
    canonical = cast("Mapping[str, TensorMeta]", everyone[shares[0]])
    reads: Callable[[], Reading] = read if read is not None else lambda: (canonical, [])
    at, count = (shares.index(rank), len(shares)) if read is not None else (0, 0)
    return Model(lambda: reads()[1], lambda lives: boxes.submission(canonical, [live.held for live in lives]), at, count,
                 _comparing(reads, None), export)


def model(source: Source | None, *, names: Names | None = None, verify: Export | Literal["export"] | None = None) -> Model:
    """A module with whole tensors as one of the models of a `weightwire.models.Publisher`. Every rank of torch.distributed calls it;
    source: as Publisher's, None on ranks that have nothing of it. verify: as Publisher's, on every rank; called where `source` is."""
    return box_model((lambda: read_whole(source, names)) if source is not None else None, hf_export.export_of(source, verify))


class Publisher(BoxPublisher):
    """Publishes a module's parameters and persistent buffers. See LivePublisher for what `publish` promises.

    source: a module (DDP is looked through), tensors by name, or a function that yields (name, tensor) pairs
    verify: "export" is transformers'
    device: where versions lie, "auto", "cpu", "cuda", "cuda:1"; see LivePublisher
    Ranks of torch.distributed must all open one; they share the sending.
    """

    def __init__(self, source: Source, *, rank: int | None = None, world_size: int | None = None,
                 group: str = "trainer", job: str = "", agent: str | None = None, timeout: float = 30.0,
                 names: Names | None = None, lineage: Lineage = None, verify: Export | Literal["export"] | None = None,
                 verify_every: int = 0, device: DeviceChoice = None, delta: DeltaMode = None):
        super().__init__(lambda: read_whole(source, names), rank=rank, world_size=world_size, group=group, job=job,
                         agent=agent, timeout=timeout, lineage=lineage, verify=hf_export.export_of(source, verify),
                         verify_every=verify_every, device=device, delta=delta)


class Receiver:
    """A module that follows what a trainer publishes: a reference model, an evaluator, an engine of one's own.

    model_name: as Subscriber. source, names, rank, world_size: as Publisher; with several ranks, which are then those of
    torch.distributed, all must make one, and call `receive` together.
    device: where versions arrive. "auto": on the GPU where most of the tensors lie, in memory that the agent lends (`gpu`,
    `gpu_slab_bytes`: as often as the agent has buffers), so that no byte goes by the host; where it lends none there, in host memory,
    and one warning says why. "cpu", "cuda", "cuda:1", None: as LivePublisher. Paths to a GPU are untested on hardware.
    """

    #: Seconds for which ranks wait for one another beyond the timeout of `receive`: calls do not begin at one moment.
    together_seconds = 30.0

    def __init__(self, source: Source, *, group: str, rank: int | None = None, world_size: int | None = None,
                 job: str = "", agent: str | None = None, timeout: float = 30.0, names: Names | None = None, model_name: str = "",
                 device: DeviceChoice = None):
        self._open(lambda: read_whole(source, names), group, rank, world_size, job, agent, timeout, model_name, device)

    def _open(self, read: Callable[[], Reading], group: str, rank: int | None, world_size: int | None, job: str,
              agent: str | None, timeout: float, model_name: str, device: DeviceChoice) -> None:
        self._read = read
        self.rank, self.world_size = place(rank, world_size)
        self._offer: subscriber.Offer | None = None  # that not every rank has yet
        self._ranks = self._group(timeout) if self.world_size > 1 else None
        canonical, lives = read()
        wanted = wanted_device(device)
        self._subscriber, on = open_subscriber(
            wanted, lambda: device_for(wanted, (live.tensor for live in lives)),
            lambda place: subscriber.Subscriber(group=group, rank=self.rank, world_size=self.world_size, job=job, agent=agent,
                                                timeout=timeout, model_name=model_name, device=place),
            lambda made: made.bind_submission(boxes.submission(canonical, [live.held for live in lives])))
        #: Where versions arrive: the GPU's UUID, or "cpu".
        self.device = on.uuid if on is not None else "cpu"

    def _group(self, timeout: float) -> Any:
        """The ranks' own line, of gloo: its waits end, whatever the default group does."""
        if not dist.is_available() or not dist.is_initialized():
            raise refuse(f"{self.world_size} ranks without torch.distributed cannot agree on a version",
                         remedy="call torch.distributed.init_process_group() first")
        return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def receive(self, timeout: float) -> subscriber.Offer | None:
        """Waits for the next committed version and writes it into the tensors, in place.

        None after `timeout` seconds, or when this receiver was fenced meanwhile: the version is offered again. With
        several ranks all return it or none does: one that has no offer yet leaves all of them as they are, and the next
        call takes it.
        RefusedError when a parameter's storage is freed; nothing is written then. AbortedError on the ranks whose own part
        is well when another rank failed, or did not call `receive` within `together_seconds` of their timeout: it says which.
        """
        offer = self._next_offer(timeout)
        failure: Exception | None = None
        arrays: Arrays = {}
        lives: Sequence[Live] = []
        try:
            if offer is not None:
                arrays, lives = cast(Arrays, self._subscriber.stage(offer)), self._read()[1]
                for live in lives:
                    if is_freed(live.tensor):
                        raise refuse("the parameter's storage is freed", tensor=live.held.meta.name,
                                     remedy="load the parameters back before receive()")
        except errors.StaleError:
            offer = None
        except Exception as error:
            failure = error
        self._offer = offer
        if len(set(self._agree(offer.epoch if offer else 0, failure, timeout))) > 1 or offer is None:
            return None
        try:
            self._subscriber.flip(offer)
            with torch.no_grad():
                for live in lives:
                    if live.tensor.numel() > 0:
                        live.tensor.copy_(as_tensor(arrays[live.held.meta.name], live.held.meta))
            torch_cuda.wait_for_copies(live.tensor for live in lives)
        except errors.StaleError:
            offer = None
        except Exception as error:
            failure = error
        if 0 in self._agree(offer.epoch if offer else 0, failure, timeout) or offer is None:
            return None
        self._offer = None
        if offer.leader:
            self._subscriber.acknowledge(offer)
        return offer

    def _next_offer(self, timeout: float) -> subscriber.Offer | None:
        kept = self._offer
        if kept is not None and self._subscriber.is_current(kept):
            return kept
        return self._subscriber.wait_offer(timeout)

    def _agree(self, epoch: int, failure: Exception | None, timeout: float) -> list[int]:
        """Every rank's `epoch`. Raises on all of them when one failed, or did not come."""
        if self._ranks is None:
            if failure is not None:
                raise failure
            return [epoch]
        answers: list[Any] = [None] * self.world_size
        try:
            # First what takes a timeout of its own, and names the rank that is missing.
            dist.monitored_barrier(self._ranks, timeout=timedelta(seconds=timeout + self.together_seconds))
            dist.all_gather_object(answers, (epoch, f"{type(failure).__name__}: {failure}" if failure else ""),
                                   group=self._ranks)
        except RuntimeError as error:  # gloo's
            if failure is None:
                failure = errors.AbortedError(f"the ranks of this receiver did not all come: {error}", code="ABORTED",
                                              rank=str(self.rank), remedy="every rank must call receive(); once one has not, make the receivers anew")
            raise failure from error
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why]
        if failed:
            raise errors.AbortedError(f"not every rank of this receiver took the version: {'; '.join(failed)}",
                                      code="ABORTED", rank=str(self.rank), remedy="mend that rank and call receive() again")
        return [epoch for epoch, _ in answers]

    def close(self) -> None:
        self._subscriber.close()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
