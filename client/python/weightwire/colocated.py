"""Trainer and engine on the same GPUs: weights go from the trainer's parameters straight into the engine's. There is no agent, no
stage and no copy of the model: an engine's process opens the trainer's memory (CUDA IPC between processes, itself within one),
and every element is read from the rank that holds it and written once, cast on the way.

>>> mine = weightwire.colocated.export(shards, config=config_json, layout="fsdp:dp4", rank=rank)   # each trainer rank, once
>>> hand_over = weightwire.colocated.HandOver(held, exports)                                      # the engine's process, once
>>> mine.ready(); hand_over.install(parameters, version=7)                                        # each version

The caller keeps order: the engine answers nothing while a version is installed, and trainers leave their parameters alone until
`install` returns. vLLM's side is weightwire.vllm.colocated. Trainers on other hosts cannot hand over: there agents move weights
(weightwire.torch, weightwire.fsdp). Between GPUs untested on hardware.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import socket
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Iterable, Iterator, Mapping, Sequence

import torch
import torch.multiprocessing


from weightwire import errors
from weightwire.boxes import Box, Held
from weightwire.checkpoint.planner import planner_of
from weightwire.memory import TensorMeta
from weightwire.torch_dtypes import TORCH as _TORCH

#: What is cast into one another, as torch's copy_ does: to the nearest, ties to even.
_CASTS = {torch.bfloat16, torch.float16, torch.float32}
_AGENTS = "weights of trainers on other hosts are moved by agents: weightwire.torch, weightwire.fsdp, weightwire.megatron"


def _refuse(why: str, *, tensor: str = "", rank: str = "", remedy: str = "", reason: str = "invalid_request") -> errors.RefusedError:
    return errors.RefusedError(why, code="INVALID_ARGUMENT", reason=reason, tensor=tensor, rank=rank, remedy=remedy)


def host() -> str:
    """This host, as memory is shared on it: the machine's boot and the IPC namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/ipc').st_ino}"


@dataclass(frozen=True)
class Export:
    """What one trainer rank hands over: handles of its tensors' memory, and what lies where in them. Picklable, for a process of the
    same host and user; good as long as the trainer keeps the tensors where they are. The values are those of the moment of reading."""

    rank: int
    ranks: int
    host: str
    name: str  #: of the process, for people
    held: list[Held]
    handles: bytes = field(repr=False)

    def open(self) -> dict[str, torch.Tensor]:
        """The tensors, in this process: views of the trainer's own memory."""
        if self.host != host():
            raise _refuse(f"trainer rank {self.rank} ({self.name}) is on another host, or in another IPC namespace", rank=f"trainer/{self.rank}",
                          remedy=f"let both share the host's IPC namespace (one pod, or hostIPC); {_AGENTS}", reason="memory_invalid")
        try:
            opened: dict[str, torch.Tensor] = pickle.loads(self.handles)
        except Exception as error:
            raise errors.UnavailableError(f"the memory of trainer rank {self.rank} ({self.name}) cannot be opened: {error}", code="UNAVAILABLE",
                                          reason="memory_invalid", rank=f"trainer/{self.rank}",
                                          remedy="does the trainer live, and does this process see its GPU? Export again after a restart") from error
        return opened


class Exporter:
    """One trainer rank's Export, and when its values may be read."""

    def __init__(self, export: Export, devices: set[torch.device]):
        self.export = export
        self._devices = devices

    def ready(self) -> None:
        """Waits until what was enqueued on the tensors' GPUs is done: from here on another process reads the values of now."""
        for device in self._devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)


def export(tensors: Mapping[str, torch.Tensor], *, config: str, layout: str, rank: int) -> Exporter:
    """What this rank of a trainer hands over.

    tensors: by the names of the layout, as its rank holds them; memory that stays: parameters, not copies of them
    config:  text of the model's config.json
    layout:  the trainer's, as everywhere: "hf", "fsdp:dp4", "megatron:tp2,pp2"; or the layout's ranks given by `export_boxes`
    """
    ranks = planner_of(config).boxes(layout)
    if not 0 <= rank < len(ranks):
        raise _refuse(f"layout {layout} has no rank {rank}: it has {len(ranks)}")
    return export_boxes(tensors, ranks[rank], rank=rank, ranks=len(ranks))


def export_boxes(tensors: Mapping[str, torch.Tensor], held: Sequence[Held], *, rank: int, ranks: int) -> Exporter:
    """The same of a layout that is given as boxes: which parts of which whole tensors lie where in this rank's."""
    taken: dict[str, torch.Tensor] = {}
    for one in held:
        if not one.boxes:
            continue
        tensor = tensors.get(one.meta.name)
        if tensor is None:
            raise _refuse(f"rank {rank} gives no {one.meta.name}", tensor=one.meta.name, rank=f"trainer/{rank}",
                          remedy="give what the layout says that the rank holds; `wwctl layout show` lists it")
        if tuple(tensor.shape) != tuple(one.meta.shape):
            raise _refuse(f"{one.meta.name} is {list(tensor.shape)}; by the layout rank {rank} holds {list(one.meta.shape)}", tensor=one.meta.name,
                          rank=f"trainer/{rank}", reason="shape_mismatch")
        if tensor.device.type not in ("cuda", "cpu"):
            raise _refuse(f"{one.meta.name} is on {tensor.device}, which is no memory", tensor=one.meta.name, rank=f"trainer/{rank}",
                          remedy="hand over once the trainer's parameters are loaded")
        if not tensor.is_contiguous():
            raise _refuse(f"{one.meta.name} is not contiguous", tensor=one.meta.name, rank=f"trainer/{rank}",
                          remedy="hand over the storage itself, in the layout's shape")
        taken[one.meta.name] = tensor.detach()
    made = Export(rank, ranks, host(), f"pid {os.getpid()} on {socket.gethostname()}", [one for one in held if one.boxes], _handles(taken, rank))
    return Exporter(made, {tensor.device for tensor in taken.values()})


def _handles(tensors: Mapping[str, torch.Tensor], rank: int) -> bytes:
    """As torch shares tensors between processes. Host memory goes by a file's name: the other process need not be our child."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        out = io.BytesIO()
        ForkingPickler(out, pickle.HIGHEST_PROTOCOL).dump(dict(tensors))
        return out.getvalue()
    except RuntimeError as error:
        raise errors.UnavailableError(f"torch does not share the memory of rank {rank}: {error}", code="UNAVAILABLE", reason="memory_invalid",
                                      rank=f"trainer/{rank}", remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the trainer") from error
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@dataclass(frozen=True)
class _Copy:
    """A block, in elements of both sides' storage from their tensors' first."""

    source: torch.Tensor
    source_offset: int
    source_stride: tuple[int, ...]
    offset: int
    stride: tuple[int, ...]
    extent: tuple[int, ...]


_Region = tuple[tuple[int, ...], tuple[int, ...]]  # begin, end


class HandOver:
    """One engine rank's reads, planned once. RefusedError where an element has no source, names it, and says which rank is missing.

    held:    the engine rank's parameters and what lies where in them (weightwire.boxes); padding is what no box covers
    exports: of the trainer's ranks, of all that hold something of it
    """

    def __init__(self, held: Sequence[Held], exports: Sequence[Export]):
        self.held = {one.meta.name: one for one in held}
        #: The version that the parameters hold; None: none, or a mixture, because an install failed.
        self.version: int | None = None
        #: Bytes that an install writes.
        self.bytes = 0
        by_rank = {one.rank: one for one in exports}
        if len(by_rank) != len(exports) or len({one.ranks for one in exports}) > 1:
            raise _refuse("the exports are not those of the ranks of one trainer: " + ", ".join(f"{e.rank} of {e.ranks}" for e in exports))
        self._missing = sorted(set(range(exports[0].ranks)) - by_rank.keys()) if exports else []
        opened = {rank: one.open() for rank, one in by_rank.items()}
        sources: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for rank, one in sorted(by_rank.items()):
            for local in one.held:
                for box in local.boxes:
                    sources.setdefault(box.name, []).append((box, opened[rank][local.meta.name]))
        self._copies = {name: list(self._plan(one, sources)) for name, one in self.held.items()}

    def _plan(self, held: Held, sources: Mapping[str, list[tuple[Box, torch.Tensor]]]) -> Iterator[_Copy]:
        wanted = _TORCH[held.meta.dtype]
        for box in held.boxes:
            left: list[_Region] = [(box.begin, tuple(b + n for b, n in zip(box.begin, box.extent)))]
            for source, tensor in sources.get(box.name, []):
                if not left:
                    break
                rest: list[_Region] = []
                for region in left:
                    both = _intersection(region, source)
                    if both is None:
                        rest.append(region)
                        continue
                    if tensor.dtype != wanted and not {tensor.dtype, wanted} <= _CASTS:
                        raise _refuse(f"{box.name} is {tensor.dtype} in the trainer, and {held.meta.name} of the engine {wanted}", tensor=held.meta.name,
                                      reason="dtype_mismatch", remedy="quantized weights are made on the way by agents (weightwire.torch)")
                    extent = tuple(e - b for b, e in zip(*both))
                    copy = _Copy(tensor, _offset(source, both[0]), source.stride, _offset(box, both[0]), box.stride, extent)
                    _check_inside(copy.source_offset, extent, source.stride, tensor.numel(), box.name)
                    _check_inside(copy.offset, extent, box.stride, math.prod(held.meta.shape), held.meta.name)
                    yield copy
                    rest += _without(region, both)
                left = rest
            if left:
                missing = f"; no export of rank {', '.join(map(str, self._missing))} was given" if self._missing else ""
                raise _refuse(f"nobody hands over {box.name}[{', '.join(f'{b}:{e}' for b, e in zip(*left[0]))}], which {held.meta.name} needs{missing}",
                              tensor=held.meta.name, reason="missing_rank" if self._missing else "invalid_request", remedy=_AGENTS if self._missing else "")

    def fill(self, name: str, into: torch.Tensor, verify: bool = False) -> int:
        """Brings the parameter `name` into `into`, of its shape; elements that are padding stay. Bytes written."""
        held = self.held[name]
        if tuple(into.shape) != tuple(held.meta.shape) or into.dtype != _TORCH[held.meta.dtype]:
            raise _refuse(f"{name} of the engine is {into.dtype} {list(into.shape)}; planned was {held.meta.dtype} {list(held.meta.shape)}",
                          tensor=name, reason="shape_mismatch", remedy="plan anew: the engine's parameters are others than they were")
        if not into.is_contiguous():
            raise _refuse(f"{name} of the engine is not contiguous", tensor=name)
        written = 0
        with torch.no_grad():
            for copy in self._copies[name]:
                source = copy.source.as_strided(copy.extent, copy.source_stride, copy.source.storage_offset() + copy.source_offset)
                target = into.as_strided(copy.extent, copy.stride, into.storage_offset() + copy.offset)
                target.copy_(source)
                if verify and not torch.equal(target, source.to(device=target.device, dtype=target.dtype)):
                    raise errors.WeightwireError(f"{name} differs from the trainer's after it was copied", code="DATA_LOSS", reason="digest_mismatch",
                                                 tensor=name, remedy="did the trainer change its parameters meanwhile? Hand over again")
                written += target.numel() * target.element_size()
        return written

    def install(self, params: Mapping[str, torch.Tensor], version: int, *, verify: bool = False) -> int:
        """Brings a version into the engine's parameters, and waits until it is there. `version` says which one they hold from then on; when
        it raises they are of none: install again before the engine answers. `verify` compares each block after its copy. Bytes written."""
        for name in self.held:
            if name not in params:
                raise _refuse(f"the engine has no parameter {name}", tensor=name)
        self.version = None
        self.bytes = sum(self.fill(name, params[name].detach(), verify) for name in self.held)
        for device in {params[name].device for name in self.held}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        self.version = version
        return self.bytes


def dtype_of(meta: TensorMeta) -> torch.dtype:
    return _TORCH[meta.dtype]


def held_by(config: str, layout: str, rank: int) -> list[Held]:
    """What a rank of an engine's layout holds ("vllm:tp2", "sglang:tp2", "hf"), for HandOver."""
    return planner_of(config).rank_boxes(layout, rank)


def held_of_rows(rows: Iterable[Mapping[str, Any]], params: Sequence[TensorMeta]) -> list[Held]:
    """The same of what a loader was seen to do (weightwire.trace)."""
    made = {meta.name: Held(meta) for meta in params}
    for row in rows:
        extent = tuple(row["shape"])
        begin = [0] * len(extent)
        for name, *arguments in row["ops"]:
            if name != "narrow":
                raise _refuse(f"the loader's {name} of {row['src']} is no block of it", tensor=row["param"])
            begin[arguments[0]] = arguments[1]
        made[row["param"]].boxes.append(Box(row["src"], tuple(begin), extent, row["offset"], tuple(row["stride"])))
    return list(made.values())


def _intersection(region: _Region, box: Box) -> _Region | None:
    begin = tuple(max(a, b) for a, b in zip(region[0], box.begin))
    end = tuple(min(a, b + n) for a, b, n in zip(region[1], box.begin, box.extent))
    if len(box.begin) != len(region[0]) or any(b >= e for b, e in zip(begin, end)):
        return None
    return begin, end


def _without(region: _Region, inner: _Region) -> Iterator[_Region]:
    """What of a region lies outside of one that lies inside of it."""
    begin, end = list(region[0]), list(region[1])
    for d in range(len(begin)):
        if begin[d] < inner[0][d]:
            yield tuple(begin), (*end[:d], inner[0][d], *end[d + 1:])
        if inner[1][d] < end[d]:
            yield (*begin[:d], inner[1][d], *begin[d + 1:]), tuple(end)
        begin[d], end[d] = inner[0][d], inner[1][d]


def _check_inside(offset: int, extent: Sequence[int], stride: Sequence[int], elements: int, name: str) -> None:
    """Storage may go on behind a tensor: what lies there is another one's."""
    if offset < 0 or any(s < 0 for s in stride) or offset + sum((n - 1) * s for n, s in zip(extent, stride)) >= elements:
        raise _refuse(f"a box of {name} leaves its tensor", tensor=name)


def _offset(box: Box, at: Sequence[int]) -> int:
    return box.offset + sum((a - b) * s for a, b, s in zip(at, box.begin, box.stride))
