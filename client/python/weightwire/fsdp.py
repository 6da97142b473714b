"""Sharded torch modules: FSDP2 and other DTensors, FSDP1 (use_orig_params both ways), HSDP, DeepSpeed ZeRO-3. No gather.

>>> publisher = weightwire.fsdp.Publisher(model)           # on every rank
>>> publisher.publish(step).wait_released(timeout=60)

Where a shard lies in its whole tensor is read from the live module: from a DTensor's placements, from FSDP1's record of what
its flat parameters hold, and from what ZeRO-3 notes at each parameter (`ds_tensor`, `ds_shape`). torch keeps FSDP1's in
private attributes; every size that follows is compared with the tensor that is there, and a difference is refused.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from weightwire import boxes, hf_export
from weightwire.adapter import Live, Model, clean_name, is_frozen, meta_of, refuse
from weightwire.boxes import Held
from weightwire.device_choice import DeviceChoice
from weightwire.export_check import Export
from weightwire.memory import TensorMeta
from weightwire.publisher import DeltaMode, Lineage
from weightwire.torch import (BoxPublisher, Names, Reading, Receiver as _Receiver, box_model, check_adapter, of_module, parameters_and_buffers,
                              unwrapped)


def chunk(begin: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """(begin, size) of part `index` as torch.chunk cuts: equal parts, the last ones short or empty."""
    step = -(-size // parts)
    first = min(index * step, size)
    return begin + first, min(step, size - first)


def shard_block(name: str, tensor: DTensor) -> Held:
    """Which block of the whole tensor this rank's part of a DTensor is.

    Cuts along the same dimension are made one after another: first the plain ones in the mesh's order, then the
    strided ones from the last to the first, for FSDP2 cuts what tensor parallelism has cut already.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    local = tensor.to_local()
    ranges = [(0, size) for size in tensor.shape]
    if coordinate is None:
        ranges = [(0, 0) for _ in tensor.shape]
    else:
        placements = list(enumerate(tensor.placements))
        strided = [p for p in placements if isinstance(p[1], _StridedShard)]
        plain = [p for p in placements if not isinstance(p[1], _StridedShard)]
        for mesh_dim, placement in plain + strided[::-1]:
            if isinstance(placement, Replicate):
                continue
            if not isinstance(placement, (Shard, _StridedShard)):
                raise refuse(f"placement {placement} is no shard", tensor=name, remedy="redistribute it first")
            begin, size = ranges[placement.dim]
            ranges[placement.dim] = chunk(begin, size, tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim])
    if tuple(local.shape) != tuple(size for _, size in ranges) and local.numel() + _count(ranges) > 0:
        raise refuse(f"placements {tensor.placements} give {[size for _, size in ranges]}, the local tensor has "
                     f"{list(local.shape)}", tensor=name, remedy="report this; publish full_tensor() meanwhile")
    return boxes.block(name, meta_of(name, local).dtype, [begin for begin, _ in ranges], local.shape)


def _count(ranges: list[tuple[int, int]]) -> int:
    count = 1
    for _, size in ranges:
        count *= size
    return count


def read_sharded(module: torch.nn.Module, names: Names | None = None) -> Reading:
    """What this rank holds of `module`, whatever mixture of DTensors, flat parameters and whole tensors it is.

    FSDP2 modules that are gathered (after a forward pass without a backward pass) are sharded again first. Without `names`
    a model of transformers 5 has the names and shapes that transformers saves it with.
    """
    module = unwrapped(module)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()
    canonical: dict[str, TensorMeta] = {}
    lives: list[Live] = []
    in_flat: set[int] = set()
    for prefix, part in module.named_modules():
        if isinstance(part, FullyShardedDataParallel) and part._handle is not None:
            flat = part._handle.flat_param
            in_flat |= {id(flat), *(id(p) for p in flat._params or ())}
            live, whole = read_flat(clean_name(f"{prefix}." if prefix else ""), flat, names)
            canonical |= whole
            lives.append(live)
    others = [(name, tensor) for name, tensor in parameters_and_buffers(module) if id(tensor) not in in_flat]
    for name, tensor in of_module(others, names):
        if hasattr(tensor, "ds_id"):
            live = Live(zero_part(name, tensor), tensor.ds_tensor.detach())
            canonical[name] = meta_of(name, live.tensor, tensor.ds_shape)
            lives.append(live)
            continue
        if isinstance(tensor, DTensor):
            live = Live(shard_block(name, tensor), tensor.to_local().detach(), frozen=is_frozen(tensor))
        else:
            live = Live(boxes.whole(meta_of(name, tensor)), tensor.detach(), frozen=is_frozen(tensor))
        canonical[name] = meta_of(name, live.tensor, tensor.shape)
        lives.append(live)
    return hf_export.exported(module, canonical, lives) if names is None else (canonical, lives)


def zero_part(name: str, parameter: Any) -> Held:
    """Which elements of a parameter that ZeRO-3 has cut this rank has: an equal range of the flat tensor, the last ones short
    and padded. RefusedError: its part is elsewhere (NVMe), quantized, or the parameter is gathered now."""
    part = parameter.ds_tensor
    if part.numel() == 0 and parameter.ds_numel > 0 or getattr(getattr(part, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        raise refuse("DeepSpeed has moved its part away (NVMe offload)", tensor=name, remedy="offload parameters to the CPU instead")
    if hasattr(part, "ds_quant_scale"):
        raise refuse("DeepSpeed holds it quantized (zero_quantized_weights)", tensor=name, remedy="unset zero_quantized_weights")
    if parameter.ds_status.name != "NOT_AVAILABLE" and not parameter.ds_persist:
        raise refuse(f"ZeRO-3 has gathered it (its status is {parameter.ds_status.name}): its part may be older", tensor=name,
                     remedy="publish outside of GatheredParameters, and not during a forward or backward pass")
    size = dist.get_world_size(parameter.ds_process_group)
    if part.numel() != -(-parameter.ds_numel // size):
        raise refuse(f"a part of {part.numel()} elements, where {parameter.ds_numel} on {size} ranks are "
                     f"{-(-parameter.ds_numel // size)} each", tensor=name, remedy="report this with DeepSpeed's version")
    begin = min(dist.get_rank(parameter.ds_process_group) * part.numel(), parameter.ds_numel)
    end = min(begin + part.numel(), parameter.ds_numel)
    return Held(meta_of(name, part), list(boxes.flat_boxes(name, tuple(parameter.ds_shape), begin, end, 0)))


def read_flat(prefix: str, flat: torch.nn.Parameter, names: Names | None) -> tuple[Live, dict[str, TensorMeta]]:
    """FSDP1's flat parameter: this rank's part of it, and the whole tensors that it was made from."""
    local = flat.data if flat.data.shape == flat._sharded_size else flat._local_shard
    canonical: dict[str, TensorMeta] = {}
    held = Held(meta_of(f"{prefix}_flat_param", local))
    for fqn, shape, contiguous, extension, part in zip(flat._fqns, flat._shapes, flat._contiguities,
                                                       flat._param_extensions, flat._shard_param_infos):
        module_name = clean_name(prefix + fqn)
        name = names(module_name) if names else module_name
        if name is None:
            continue
        check_adapter(name)
        if not contiguous or extension is not None:
            raise refuse("FSDP1 flattened a parameter that is not contiguous, or a DTensor", tensor=name,
                         remedy="use FSDP2 (fully_shard)")
        canonical[name] = meta_of(name, local, shape)
        if part.in_shard:
            held.boxes.extend(boxes.flat_boxes(name, shape, part.intra_param_start_idx, part.intra_param_end_idx + 1,
                                               part.offset_in_shard))
    return Live(held, local.detach()), canonical


def model(module: torch.nn.Module | None, *, names: Names | None = None,
          verify: Export | Literal["export"] | None = None) -> Model:
    """A sharded module as one of the models of a `weightwire.models.Publisher`. Every rank of torch.distributed calls it, with None
    where it has nothing of it (the module's mesh is on other ranks). `verify` is given on every rank, and called where the module is."""
    return box_model((lambda: read_sharded(module, names)) if module is not None else None, hf_export.export_of(module, verify))


class Publisher(BoxPublisher):
    """Publishes a sharded module from every rank, each its own shards; replicas (HSDP) share the sending.

    verify: "export" is transformers' (FSDP2, DDP)
    See LivePublisher for what `publish` promises. Float32 shards of a mixed-precision trainer are cast by the
    sending side when the engine holds bf16.
    """

    def __init__(self, module: torch.nn.Module, *, rank: int | None = None, world_size: int | None = None,
                 group: str = "trainer", job: str = "", agent: str | None = None, timeout: float = 30.0,
                 names: Names | None = None, lineage: Lineage = None, verify: Export | Literal["export"] | None = None,
                 verify_every: int = 0, device: DeviceChoice = None, delta: DeltaMode = None):
        super().__init__(lambda: read_sharded(module, names), rank=rank, world_size=world_size, group=group, job=job,
                         agent=agent, timeout=timeout, lineage=lineage, verify=hf_export.export_of(module, verify),
                         verify_every=verify_every, device=device, delta=delta)


class Receiver(_Receiver):
    """A sharded module that follows what a trainer publishes, each rank its own shards. Arguments as Publisher's."""

    def __init__(self, module: torch.nn.Module, *, group: str, rank: int | None = None, world_size: int | None = None,
                 job: str = "", agent: str | None = None, timeout: float = 30.0, names: Names | None = None, model_name: str = "",
                 device: DeviceChoice = None):
        self._open(lambda: read_sharded(module, names), group, rank, world_size, job, agent, timeout, model_name, device)
