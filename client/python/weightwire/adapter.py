"""What the trainer adapters share: parameters of a live trainer, copied into shared memory and published.

Needs torch. Users take `weightwire.torch`, `weightwire.fsdp` or `weightwire.megatron`.
"""

from __future__ import annotations

import logging
import time
import warnings
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator, Mapping, Sequence, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist

from weightwire import errors, export_check, publisher, torch_cuda
from weightwire.boxes import Held
from weightwire.device import Device, DeviceArray
from weightwire.device_choice import DeviceChoice, device_for, open_with_fallback, wanted_device
from weightwire.gpu_copy import GpuCopies, Piece
from weightwire.host_copy import HostCopies, is_plain
from weightwire.memory import TensorMeta
from weightwire.publisher import Release
from weightwire.torch_dtypes import NAMES, TORCH
from weightwire.v1 import types_pb2

log = logging.getLogger("weightwire")

Self = TypeVar("Self", bound="LivePublisher")
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Live:
    """A local tensor as it is at this moment, and what lies in it. `tensor` has the shape `held.meta.shape`."""

    held: Held
    tensor: torch.Tensor
    #: What is published is not what `tensor` holds: write(into, tensor) makes it, `into` of the same shape. None: a copy.
    write: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    #: A parameter that the trainer does not train, so that what was published is still so (LivePublisher looks after it); None:
    #: no parameter.
    frozen: bool | None = None


@dataclass(frozen=True)
class Model:
    """One model of a trainer as an adapter reads it, for `weightwire.models.Publisher`. Adapters make them: `weightwire.megatron.model`,
    `weightwire.fsdp.model`, `weightwire.torch.model`."""

    #: This rank's tensors, as they are now.
    read: Callable[[], Sequence[Live]]
    #: What the rank submits of them.
    layout: Callable[[Sequence[Live]], types_pb2.LayoutSubmission]
    #: Of the ranks that share the model; world_size 0: this rank has nothing of it.
    rank: int
    world_size: int
    #: Called before `read`, on every rank of the trainer: it may be a collective.
    before: Callable[[], None] = lambda: None
    #: The trainer's own export of the model, which every rank that shares it calls to its end; other ranks give one, too.
    export: export_check.Export | None = None
    #: What lies where, in boxes of the checkpoint's tensors.
    held: Callable[[Sequence[Live]], list[Held]] = lambda lives: [live.held for live in lives]


def refuse(message: str, *, tensor: str = "", remedy: str = "") -> errors.RefusedError:
    """The error for a module that an adapter cannot read; names this rank when torch.distributed knows it."""
    rank = f"{dist.get_rank()}" if dist.is_available() and dist.is_initialized() else ""
    return errors.RefusedError(message, code="INVALID_ARGUMENT", reason="invalid_request", rank=rank, tensor=tensor,
                               remedy=remedy)


def meta_of(name: str, tensor: torch.Tensor, shape: Sequence[int] | None = None) -> TensorMeta:
    """`tensor` under `name`, in safetensors' words; `shape` where it is not the tensor's own."""
    if tensor.dtype not in NAMES:
        raise refuse(f"dtype {tensor.dtype} cannot be published", tensor=name, remedy="leave the tensor out by `names`")
    return TensorMeta(name, NAMES[tensor.dtype], tuple(tensor.shape if shape is None else shape))


def clean_name(name: str) -> str:
    """`name` without what FSDP1, activation checkpointing and torch.compile put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def persistent_buffers(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """The buffers that a state dict has: model state, not caches such as rotary frequencies."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def as_tensor(array: np.ndarray | DeviceArray, meta: TensorMeta) -> torch.Tensor:
    """The shared array as a tensor of its real dtype; shares memory. Read-only arrays must not be written, nor a stage on a device."""
    if isinstance(array, DeviceArray):
        return torch_cuda.over(array, TORCH[meta.dtype])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    return flat.view(TORCH[meta.dtype]).view(meta.shape)


def is_freed(tensor: torch.Tensor) -> bool:
    """Has its storage been taken away (offloading by resize, meta device)?"""
    return bool(tensor.device.type == "meta" or (tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0))


def is_frozen(tensor: torch.Tensor) -> bool | None:
    """Is it a parameter without a gradient? None for a buffer: they have none either, and change all the same."""
    return not tensor.requires_grad if isinstance(tensor, torch.nn.Parameter) else None


def frozen_places(modules: Iterable[torch.nn.Module]) -> set[int]:
    """Where the frozen parameters lie, for adapters that hand on parts and views of them."""
    return {parameter.data_ptr() for module in modules for parameter in module.parameters() if is_frozen(parameter)} - {0}


def is_sharded(tensor: torch.Tensor) -> bool:
    """Is it a part of a whole one: a DTensor, FSDP1's flat parameter, a parameter that ZeRO-3 has cut?"""
    return any(hasattr(tensor, mark) for mark in ("device_mesh", "_fqns", "ds_id"))


def publish_together(world_size: int | None) -> bool:
    """Are torch.distributed's ranks, and more than one, those that publish? None: they are all."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    ranks = dist.get_world_size()
    return ranks > 1 and world_size in (None, ranks)


def place(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """(rank, world size): what is given, else torch.distributed's, else the only rank of one."""
    if rank is not None and world_size is not None:
        return rank, world_size
    if rank is not None or world_size is not None:
        raise refuse("rank and world_size belong together", remedy="give both or none")
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class LivePublisher:
    """One trainer rank whose parameters are read anew for every version.

    The values are copied into memory that is shared with the agent; the trainer may change, offload, free or
    move its parameters as soon as `publish` returns. Parameters are looked up again each time, so that they may
    have been moved to another device or replaced in between; only names, shapes and dtypes must stay. A rank that the
    agent lost (a restart of the sidecar) attaches again at its next version.

    `lineage`, as in Publisher.publish, is for a trainer that starts anew from an earlier step than what is committed: None
    is refused then, and the error says what to set; "resume" may always be set.

    `delta`, as in Publisher, says whether only what changed since earlier versions is sent.

    Costs one copy of this rank's tensors, kept for all versions. `device` says where:

    "auto"          where most of the parameters lie when it is opened. On a GPU: in memory of that GPU that the agent lends (`gpu`,
                    `gpu_slab_bytes`), which kernels pack and cast them into in one launch; nothing goes by the host. Where it lends
                    none there, a warning says why, once, and it is host memory, page-locked
    "cpu"           host memory; page-locked where parameters come from a GPU
    "cuda", "cuda:1", a weightwire.Device  that GPU ("cuda": where most parameters lie, else the first). What cannot be had is an error
    None            WEIGHTWIRE_DEVICE, else "auto"

    Of parameters on a GPU, a version is what the stream that is current when `publish` is called will have made of them: it waits
    for that, and for the copy. Paths to a GPU are untested on hardware.

    A part that is frozen (parameters with `requires_grad=False`, whenever that was set, beside others that are trained) is copied
    for the first version. Neither this nor the agent reads it again until something writes to it. torch sees most writes, and then
    it is copied anew; those through `.data` it does not: for each version one frozen parameter in turn is compared byte for byte
    (on a GPU by sums) with what was published, and with `publish(verify=True)`, and where `verify` comes, all of them. One that has
    changed unseen is named by a RefusedError, for versions before may have been published without the change, and from then on it
    is copied for every version.

    With `verify`, a function that gives (name, whole tensor) pairs on every rank, the first version, every `verify_every`-th
    and those that `publish(verify=True)` asks for are compared with what the trainer's framework exports, before anything is
    published. It needs libweightwire_checkpoint.so beside `wwctl`.
    """

    def __init__(self, read: Callable[[], Sequence[Live]],
                 bind: Callable[[publisher.Publisher, Sequence[Live]], Mapping[str, np.ndarray]], *,
                 rank: int | None, world_size: int | None, group: str, job: str, agent: str | None, timeout: float,
                 lineage: publisher.Lineage = None, before: Callable[[], None] = lambda: None,
                 verify: export_check.Export | None = None, verify_every: int = 0, device: DeviceChoice = None,
                 delta: publisher.DeltaMode = None):
        """`before` is called before parameters are read, and before anything that may fail: it may be a collective."""
        if not (verify is None or callable(verify)):
            raise refuse(f"verify={verify!r}: this publisher knows no export of that name",
                         remedy="pass a function that gives the trainer's own export as (name, whole tensor) pairs")
        self._read, self._bind, self._before = read, bind, before
        self._export, self._verify_every = verify, verify_every
        self._published = 0  # versions, since it was opened
        self._last: Release | None = None
        self._frozen: dict[str, tuple[int, int]] = {}  # which bytes were copied, of what is frozen, by name
        self._written: set[str] = set()  # since the last version
        self._melted: set[str] = set()  # what changed although it was frozen
        self._looked_at = ""  # of the frozen ones, last
        self._wanted = wanted_device(device)
        self._said = ""  # why it is not the GPU, as last warned
        self._place: _OnGpu | _InHost | None = None
        #: Seconds for which the last `publish` blocked the trainer: waiting for the version before, and the copy.
        self.blocked_seconds = 0.0
        before()
        lives = read()
        self.rank, self.world_size = place(rank, world_size)
        self._open_publisher: Callable[[Device | None], publisher.Publisher] = lambda on: publisher.Publisher(
            rank=self.rank, world_size=self.world_size, group=group, job=job, agent=agent, timeout=timeout, lineage=lineage, device=on,
            delta=delta)
        self._bound = {live.held.meta.name: live.held for live in lives}
        self._open(lives)

    def _open(self, lives: Sequence[Live]) -> None:
        open_with_fallback(self._wanted, lambda: device_for(self._wanted, (live.tensor for live in lives)),
                           lambda device: self._open_in(device, lives), self._warn)

    def _open_in(self, device: Device | None, lives: Sequence[Live]) -> None:
        if self._place is not None:
            self._place.close()  # before the agent is asked for the same memory again
            self._place = None
        opened = self._open_publisher(device)
        try:
            if device is not None and opened.device_refused is not None:
                if self._wanted != "auto":
                    raise opened.device_refused
                self._warn(opened.device_refused)
            arrays: Mapping[str, Any] = self._bind(opened, lives)
            held = {name: array for name, array in arrays.items() if array.nbytes > 0}
            if device is not None and opened.device_refused is None:
                self._place = _OnGpu(device, held)
            else:
                self._place = _InHost({name: as_tensor(array, self._bound[name].meta) for name, array in held.items()})
        except BaseException:
            opened.close()
            raise
        self._publisher = opened
        self._frozen = {}

    def _warn(self, why: errors.WeightwireError) -> None:
        if str(why) != self._said:
            log.warning("weightwire: rank %d: parameters go by host memory, not by the GPU's: %s (device=\"cpu\" says that this is meant)",
                        self.rank, why)
        self._said = str(why)

    @property
    def device(self) -> str:
        """Where versions lie: the GPU's UUID, or "cpu"."""
        return self._place.uuid if isinstance(self._place, _OnGpu) else "cpu"

    def _open_again(self, lives: Sequence[Live], end: float) -> None:
        """The agent may be starting, and then look for its coordinator. Waits longer after each failure, up to 2 s."""
        self._publisher.close()
        pause = 0.1
        while True:
            try:
                return self._open(lives)
            except errors.UnavailableError:
                if time.perf_counter() + pause > end:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 2.0)

    @property
    def attached(self) -> bool:
        """As Publisher.attached."""
        return self._publisher.attached

    @property
    def lineage(self) -> int:
        """As Publisher.lineage."""
        return self._publisher.lineage

    @property
    def committed(self) -> int:
        """As Publisher.committed."""
        return self._publisher.committed

    @property
    def committed_lineage(self) -> int:
        """As Publisher.committed_lineage."""
        return self._publisher.committed_lineage

    def publish(self, version: int, *, deadline: float = 120.0, manual_commit: bool = False, verify: bool = False) -> Release:
        """Copies the parameters as they are now and publishes them as `version` (greater than the last one).

        Every rank of the group must call it. When the version before is not released yet it is waited for, since
        it is still read from the shared memory; `deadline` (seconds) bounds that wait with the one for an agent that
        is away, and then the version.
        Returns at once after the copy; the release tells when the version is staged everywhere.

        DeadlineError     the version before is still not released
        UnavailableError  the agent is away
        RefusedError      a parameter's storage is freed, or its name, shape or dtype is not what was bound; or, where it is
                          verified, it is not what the trainer exports; or one changed although it was frozen: nothing was
                          published
        """
        started = time.perf_counter()
        self._before()
        self._wait_for_last(deadline)
        lives = self._read()
        self._check_same(lives)
        if not self._publisher.attached:
            self._open_again(lives, started + deadline)
        assert self._place is not None
        for live in lives:
            if is_freed(live.tensor):
                raise refuse("the parameter's storage is freed", tensor=live.held.meta.name,
                             remedy="load the parameters back before publish()")
        still = self._still_frozen(lives)
        moved = [live for live in lives if live.held.meta.name in self._place.names and live.held.meta.name not in still]
        with torch.no_grad():
            for live in moved:
                self._written.add(live.held.meta.name)
                self._frozen.pop(live.held.meta.name, None)  # half of it is new, if copying fails
            self._place.write(moved)
            for live in moved:
                if live.frozen and (mark := _mark(live.tensor)) is not None:
                    self._frozen[live.held.meta.name] = mark
            self._compare_frozen(self._place, still, self._verifies(verify))
        self._verify(version, lives, verify)
        self._published += 1
        self._last = self._publisher.publish(version, deadline=deadline, manual_commit=manual_commit,
                                             unchanged=self._place.names - self._written)
        self._written.clear()
        self.blocked_seconds = time.perf_counter() - started
        return self._last

    def _still_frozen(self, lives: Sequence[Live]) -> dict[str, Live]:
        """What was copied and, as far as torch knows, not written to since. Where nothing is trained nothing is frozen either: that
        is a copy of a model (an average of it, say), which changes by other means."""
        if not any(live.frozen is False for live in lives):
            return {}
        return {live.held.meta.name: live for live in lives
                if live.frozen and live.held.meta.name not in self._melted
                and self._frozen.get(live.held.meta.name, ()) == _mark(live.tensor) and not is_freed(live.tensor)}

    def _compare_frozen(self, place: "_OnGpu | _InHost", still: Mapping[str, Live], everything: bool) -> None:
        names = sorted(still)
        if not everything and names:
            names = [next((name for name in names if name > self._looked_at), names[0])]
            self._looked_at = names[0]
        changed = [name for name in names if not place.holds(still[name])]
        if changed:
            self._melted |= set(changed)
            raise refuse(f"{len(changed)} parameters changed although they require no gradient, and torch was not told "
                         "(writes through .data)", tensor=changed[0],
                         remedy="publish again: they are copied for every version from now on; versions before may lack the change")

    def _exports(self) -> bool:
        """Is there something to compare with? All ranks say the same."""
        return self._export is not None

    def _differences(self, lives: Sequence[Live], local: Mapping[str, torch.Tensor]) -> dict[str, export_check.Difference]:
        assert self._export is not None
        return export_check.differences(self._export, self._held(lives), local)

    def _verifies(self, asked: bool) -> bool:
        return asked or (self._exports() and bool(
            self._published == 0 or (self._verify_every and self._published % self._verify_every == 0)))

    def _verify(self, version: int, lives: Sequence[Live], asked: bool) -> None:
        if not self._exports():
            if asked and not self._frozen:
                raise refuse("this publisher was opened without `verify`", remedy="open it with verify=, the trainer's own export")
            return
        if self._verifies(asked) and self._place is not None:
            found: dict[str, export_check.Difference] = {}
            failed = ""
            try:
                with torch.no_grad():
                    found = self._differences(lives, self._place.tensors())
            except Exception as error:  # of the trainer's export: the other ranks must hear of it
                failed = f"{type(error).__name__}: {error}"
            export_check.check(version, found, publish_together(self.world_size), failed)

    def _held(self, lives: Sequence[Live]) -> list[Held]:
        """What lies where, in boxes of the checkpoint's tensors."""
        return [live.held for live in lives]

    def _wait_for_last(self, deadline: float) -> None:
        if self._last is not None and not self._last.released:
            try:
                self._last.wait_released(deadline)
            except errors.WeightwireError:
                # How it ended is for whoever holds that release; here only the memory matters.
                if not self._last.released:
                    raise
        self._publisher.reclaim()  # what a publish that failed left in doubt

    def _expected(self) -> Mapping[str, Held]:
        """What was bound of that which is published now."""
        return self._bound

    def _check_same(self, lives: Sequence[Live]) -> None:
        found = {live.held.meta.name: live.held for live in lives}
        expected = self._expected()
        for name in [*expected, *found]:
            bound, now = expected.get(name), found.get(name)
            if bound != now:
                raise refuse(f"bound as {_text(bound)}, found {_text(now)}", tensor=name,
                             remedy="close this publisher and open a new one when the model's layout changes")

    def close(self) -> None:
        """Leaves the group. A version that is not released yet is given up."""
        self._publisher.close()
        if self._place is not None:
            self._place.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _InHost:
    """Memory of the host that is shared with the agent. Page-locked from the first version on that comes from a GPU."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]):
        self._tensors = dict(tensors)
        self.names = self._tensors.keys()
        self._copies = HostCopies()
        self._locks: torch_cuda.PageLocks | None = None

    def write(self, lives: Sequence[Live]) -> None:
        """All of them in one pass; returns when they are there."""
        pairs, by_gpu = [], cast("dict[int, list[Live]]", {})
        for live in lives:
            into, gpu = self._tensors[live.held.meta.name], torch_cuda.gpu_of(live.tensor)
            if gpu is not None:
                by_gpu.setdefault(gpu, []).append(live)
            elif live.write is None and self._copies.takes(into, live.tensor):
                pairs.append((into, live.tensor))
            else:
                _write(into, live)
        for gpu, its in by_gpu.items():
            if self._locks is None:
                self._locks = torch_cuda.PageLocks(gpu)
            self._locks.lock(self._tensors)
            with torch_cuda.side_stream(gpu):
                for live in its:
                    _write(self._tensors[live.held.meta.name], live, non_blocking=True)
        self._copies.run(pairs)

    def holds(self, live: Live) -> bool:
        """Bit for bit; a NaN equals itself."""
        shared = self._tensors[live.held.meta.name]
        copy = torch.empty_like(shared)
        _write(copy, live)
        return bool(torch.equal(copy.reshape(-1).view(torch.uint8), shared.reshape(-1).view(torch.uint8)))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def close(self) -> None:
        self._copies.close()
        if self._locks is not None:
            self._locks.close()


class _OnGpu:
    """Memory of a GPU that the agent lends."""

    def __init__(self, device: Device, arrays: Mapping[str, DeviceArray]):
        self.uuid = device.uuid
        self._arrays = dict(arrays)
        self.names = self._arrays.keys()
        self._copies = GpuCopies(device)

    def _piece(self, live: Live) -> Piece:
        return Piece(self._arrays[live.held.meta.name], live.tensor, lambda into, _: _write(into, live),
                     live.write is None and is_plain(live.tensor))

    def write(self, lives: Sequence[Live]) -> None:
        """All of them in one launch; returns when they are there."""
        self._copies.pack(map(self._piece, lives))

    def holds(self, live: Live) -> bool:
        """By XXH3 sums of what lies in the GPU's memory."""
        return self._copies.equal(self._piece(live))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Copies in host memory, each made when it is asked for."""
        return _Read(self._arrays)

    def close(self) -> None:
        self._arrays.clear()  # gives the memory back


class _Read(Mapping[str, torch.Tensor]):
    def __init__(self, arrays: Mapping[str, DeviceArray]):
        self._arrays = arrays

    def __getitem__(self, name: str) -> torch.Tensor:
        return as_tensor(self._arrays[name].read(), self._arrays[name].meta)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def _write(into: torch.Tensor, live: Live, non_blocking: bool = False) -> None:
    try:
        if live.write is None:
            into.copy_(live.tensor, non_blocking=non_blocking)
        else:
            live.write(into, live.tensor)
    except (NotImplementedError, RuntimeError, TypeError) as error:
        kind = type(live.tensor).__name__
        if kind in ("Tensor", "Parameter"):
            raise
        raise refuse(f"a {kind} cannot be copied as {live.held.meta.dtype}: {type(error).__name__}: {error}",
                     tensor=live.held.meta.name, remedy="keep the parameter unquantized, or leave it out by `names`") from error


def _mark(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Another one when torch has written to it, or when it lies elsewhere; None: torch does not count."""
    plain = type(tensor) is torch.Tensor and not tensor.is_inference()
    return (tensor.data_ptr(), tensor._version) if plain else None


def _text(held: Held | None) -> str:
    return "nothing" if held is None else f"{held.meta.dtype} {list(held.meta.shape)} with {len(held.boxes)} boxes"
