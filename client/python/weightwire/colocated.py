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

import math
import os
import pickle
import socket
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, Iterable, Mapping, Sequence

import torch
import torch.multiprocessing

from weightwire import errors
from weightwire.boxes import Box, Held
from weightwire.checkpoint.execute import span
from weightwire.checkpoint.layouts import Unheld, plan_boxes
from weightwire.checkpoint.planner import Copy, planner_of
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
        return bytes(ForkingPickler.dumps(dict(tensors)))
    except RuntimeError as error:
        raise errors.UnavailableError(f"torch does not share the memory of rank {rank}: {error}", code="UNAVAILABLE", reason="memory_invalid",
                                      rank=f"trainer/{rank}", remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the trainer") from error
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


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
        if len(by_rank) != len(exports) or len({one.ranks for one in exports}) > 1 or any(one.rank >= one.ranks for one in exports):
            raise _refuse("the exports are not those of the ranks of one trainer: " + ", ".join(f"{e.rank} of {e.ranks}" for e in exports))
        ranks = range(exports[0].ranks if exports else 0)
        opened = {rank: one.open() for rank, one in by_rank.items()}
        try:
            plan = plan_boxes([by_rank[rank].held if rank in by_rank else [] for rank in ranks], {0: held})
        except Unheld as gap:
            missing = [str(rank) for rank in ranks if rank not in by_rank]
            raise _refuse(f"nobody hands over {gap.name}[{', '.join(f'{b}:{e}' for b, e in zip(gap.begin, gap.end))}], which {gap.tensor} needs"
                          + (f"; no export of rank {', '.join(missing)} was given" if missing else ""), tensor=gap.tensor,
                          reason="missing_rank" if missing else "invalid_request", remedy=_AGENTS if missing else "") from gap
        self._copies: dict[str, list[tuple[Copy, torch.Tensor]]] = {name: [] for name in self.held}
        for copy in plan.copies:
            local = by_rank[copy.source_rank].held[copy.source_tensor].meta.name
            source, target = opened[copy.source_rank][local], held[copy.target_tensor].meta
            _check(copy, source, target)
            self._copies[target.name].append((copy, source))

    def fill(self, name: str, into: torch.Tensor, verify: bool = False) -> int:
        """Brings the parameter `name` into `into`, of its shape; elements that are padding stay. Bytes written."""
        held = self.held[name]
        if tuple(into.shape) != tuple(held.meta.shape) or into.dtype != dtype_of(held.meta):
            raise _refuse(f"{name} of the engine is {into.dtype} {list(into.shape)}; planned was {held.meta.dtype} {list(held.meta.shape)}",
                          tensor=name, reason="shape_mismatch", remedy="plan anew: the engine's parameters are others than they were")
        if not into.is_contiguous():
            raise _refuse(f"{name} of the engine is not contiguous", tensor=name)
        written = 0
        with torch.no_grad():
            for copy, tensor in self._copies[name]:
                source = tensor.as_strided(copy.extent, copy.source_stride, tensor.storage_offset() + copy.source_offset)
                target = into.as_strided(copy.extent, copy.target_stride, into.storage_offset() + copy.target_offset)
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


def _check(copy: Copy, source: torch.Tensor, target: TensorMeta) -> None:
    """That dtypes are cast into one another, and that the block lies inside of both: storage may go on behind a tensor, with another
    one's elements."""
    wanted = dtype_of(target)
    if source.dtype != wanted and not {source.dtype, wanted} <= _CASTS:
        raise _refuse(f"{copy.canonical} is {source.dtype} in the trainer, and {target.name} of the engine {wanted}", tensor=target.name,
                      reason="dtype_mismatch", remedy="quantized weights are made on the way by agents (weightwire.torch)")
    for offset, stride, elements, name in ((copy.source_offset, copy.source_stride, source.numel(), copy.canonical),
                                           (copy.target_offset, copy.target_stride, math.prod(target.shape), target.name)):
        if offset < 0 or any(s < 0 for s in stride) or offset + span(copy.extent, stride) > elements:
            raise _refuse(f"a box of {name} leaves its tensor", tensor=name)
