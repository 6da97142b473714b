"""Models that mbridge built, by its own export. No gather.

>>> publisher = weightwire.mbridge.Publisher(bridge, models)       # on every rank
>>> publisher.publish(step).wait_released(timeout=60)

`bridge.export_weights` gathers a parameter's tensor-parallel shards, joins them and converts what it gets to Hugging Face tensors.
The joining and the converting are recorded (recorded.py) instead, on tensors that hold their elements' places, and become explicit
boxes of this rank's own shard. So a model goes that mbridge knows and weightwire's `megatron` scheme does not, with its vision tower.
For one that both know, `weightwire.megatron.Publisher(models, bridge.hf_config)` does the same and is compared with config.json.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from dataclasses import dataclass, field, replace
from typing import Any, Iterator, Literal, Mapping, Sequence, Union

import torch

from weightwire import boxes, errors, megatron_options
from weightwire.adapter import Live, frozen_places, meta_of, refuse
from weightwire.boxes import Box, Held
from weightwire.device_choice import DeviceChoice
from weightwire.export_check import Export
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.megatron import config_of, local_tensors
from weightwire.megatron_bridge import shares_head, writes
from weightwire.memory import TensorMeta
from weightwire.publisher import DeltaMode, Lineage
from weightwire.recorded import Piece, Recording, record
from weightwire.torch import BoxPublisher, Reading

log = logging.getLogger("weightwire")

_REMEDY = "use weightwire.megatron, or publish bridge.export_weights() through weightwire.torch"
_EXPERTS = ".mlp.experts.linear_fc"  #: by which mbridge's export knows a routed expert
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_NUMBER = re.compile(r"\d+")
_JOINED = "joined"  # of all tensor-parallel shards
#: Elements of a dimension along which shards are not joined: enough to see that it is left as it is.
_THIN = 6


@dataclass(frozen=True)
class Converted:
    """Where a parameter of this rank lies in the Hugging Face tensors, and what is added to it on the way there."""

    boxes: list[Box]
    added: int = 0
    copies: dict[str, list[Box]] = field(default_factory=dict)  #: tensors that mbridge gives the same elements once more


@dataclass(frozen=True)
class Shard:
    """Of which tensor-parallel ranks the export joins a parameter, and which of them this one is."""

    rank: int
    size: int


#: What was recorded of a conversion, by what is alike in all layers.
Known = dict[Any, Recording]


def convert(bridge: Any, name: str, parameter: torch.Tensor, local: Sequence[int], whole: Mapping[str, TensorMeta],
            known: Known) -> Converted:
    """name: in the whole model; parameter: for the marks that megatron-core puts on it, its elements are not read; local: its
    shape on this rank; whole: the checkpoint's tensors; known: from and for other calls.

    RefusedError names the parameter: mbridge does not map it, or computes it, or gives another shape than the checkpoint has.
    """
    marked = bool(getattr(parameter, "tensor_model_parallel", False))
    shard = _shard(bridge, name, marked)
    found, wrong = _converted(bridge, name, parameter, local, shard, whole, known)
    if wrong and marked and shard is not None and shard.size > 1:
        # Transformer Engine marks every linear layer as parallel, those too of which each rank has a copy.
        found, still = _converted(bridge, name, parameter, local, None, whole, known)
        if not still:
            _export_is_wrong("it joins copies that each tensor-parallel rank has whole, as if they were shards", name)
            wrong = ""
    if wrong:
        raise _refuse(name, wrong)
    if _EXPERTS in name and bridge.mpu.ep_size == 1 and marked and bridge.mpu.tp_size != bridge.mpu.etp_size:
        _export_is_wrong("without expert parallelism it gathers experts from the tensor-parallel ranks of other layers", name)
    return found


def _shard(bridge: Any, name: str, marked: bool) -> Shard | None:
    """None: each rank has all of it."""
    if _EXPERTS in name:
        return Shard(bridge.mpu.etp_rank, bridge.mpu.etp_size)
    return Shard(bridge.mpu.tp_rank, bridge.mpu.tp_size) if marked else None


def _converted(bridge: Any, name: str, parameter: torch.Tensor, local: Sequence[int], shard: Shard | None,
               whole: Mapping[str, TensorMeta], known: Known) -> tuple[Converted, str]:
    """And why it is not what the checkpoint has."""
    try:
        shape, own = _join(bridge, name, parameter, tuple(local), shard)
        names, tensors = bridge._weight_to_hf_format(name, torch.empty(shape, dtype=parameter.dtype, device="meta"))
        first = {other: next(n for n, one in zip(names, tensors) if one is tensor) for other, tensor in zip(names, tensors)}

        def export(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {other: tensor for other, tensor in zip(*bridge._weight_to_hf_format(name, given[_JOINED])) if first[other] == other}

        recording = _recorded(export, name, shape, [other for other in names if first[other] == other], known)
    except errors.RefusedError as error:
        raise _refuse(name, f"a conversion that is not only a move: {error}") from error
    except Exception as error:  # of the bridge's own: a name that it does not map, a number of layers that it does not take
        raise _refuse(name, f"no conversion of it: {type(error).__name__}: {error}") from error
    for other in names:
        if other not in whole:
            raise refuse("the checkpoint has no such tensor", tensor=other,
                         remedy=f"mbridge maps {name} to it: pass the model's own checkpoint")
    for other, its in recording.shapes.items():
        if whole[other].shape != its:
            return Converted([]), f"the shape {list(its)} for {other}, which is {list(whole[other].shape)} in the checkpoint"
    held = recording.held(Held(TensorMeta(name, "BF16", tuple(local)), own)).boxes
    copies = {other: [replace(box, name=other) for box in held if box.name == one] for other, one in first.items() if other != one}
    return Converted(held, recording.added.get(_JOINED, 0), copies), ""


def _recorded(export: Any, name: str, shape: tuple[int, ...], names: Sequence[str], known: Known) -> Recording:
    """Of the conversion of `name` to tensors of these names. To record one that takes heads apart takes seconds, so that one of
    another layer is tried first."""
    key = _NUMBER.sub("#", name), shape, tuple(_NUMBER.sub("#", other) for other in names)
    if key in known:
        to = dict(zip(known[key].shapes, names))
        again = Recording({to[other]: its for other, its in known[key].shapes.items()}, dict.fromkeys(names, _JOINED),
                          {_JOINED: [replace(piece, name=to[piece.name]) for piece in known[key].pieces[_JOINED]]})
        if _is_so(export, shape, again):
            return again
    # Rows beyond the vocabulary are padding. They are nobody's.
    made = record(export, {_JOINED: shape}, partly=(_JOINED,) if name.endswith((_EMBEDDING, _HEAD)) else ())
    if not made.added and len(made.pieces[_JOINED]) > len(names):
        known[key] = made
    return made


def _is_so(export: Any, shape: tuple[int, ...], recording: Recording) -> bool:
    """Does it move random bytes as was recorded?"""
    given = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    out, stride = export({_JOINED: given}), given.stride()
    return {other: tuple(tensor.shape) for other, tensor in out.items()} == recording.shapes and all(torch.equal(
        out[piece.name][tuple(slice(b, b + e) for b, e in zip(piece.begin, piece.extent))],
        given.as_strided(piece.extent, [stride[a] * step if a >= 0 else 1 for a, step in zip(piece.axis, piece.step)],
                         sum(at * one for at, one in zip(piece.at, stride)))) for piece in recording.pieces[_JOINED])


def _join(bridge: Any, name: str, parameter: torch.Tensor, local: tuple[int, ...],
          shard: Shard | None) -> tuple[tuple[int, ...], list[Box]]:
    """The shape of what mbridge makes of all shards, and what this rank's is of it."""
    if shard is None:
        return local, boxes.block(_JOINED, "BF16", [0] * len(local), local).boxes
    like = torch.empty(local, dtype=parameter.dtype, device="meta")
    for mark in ("tensor_model_parallel", "partition_dim", "partition_stride"):  # as mbridge's own stand-in on other stages
        if hasattr(parameter, mark):
            setattr(like, mark, getattr(parameter, mark))

    ranks = [str(rank) for rank in range(shard.size)]

    def export(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {_JOINED: bridge._weight_merge_across_tp(name, [given[rank] for rank in ranks], like)}

    shape = tuple(export(dict.fromkeys(ranks, like))[_JOINED].shape)
    own = Held(TensorMeta(str(shard.rank), "BF16", local), boxes.block(str(shard.rank), "BF16", [0] * len(local), local).boxes)
    thin = _thin(local, shape)
    wide: Recording | None = None
    with contextlib.suppress(Exception):  # of a bridge that looks at a dimension that was cut
        narrow = record(export, dict.fromkeys(ranks, tuple(min(size, _THIN) if d in thin else size for d, size in enumerate(local))))
        if all(_leaves(export, ranks, local, shape, d) for d in thin):
            wide = _widened(narrow, local, shape, thin)
    full = wide or record(export, dict.fromkeys(ranks, local))
    if full.added:
        raise refuse("it adds a number while it joins shards", tensor=_JOINED)
    return shape, full.held(own).boxes


def _thin(local: Sequence[int], joined: Sequence[int]) -> set[int]:
    """Dimensions of which some elements tell how all of them are joined. Numbers of a whole vocabulary would take gigabytes."""
    if len(local) != len(joined):
        return set()
    kept = {d for d, (mine, all_) in enumerate(zip(local, joined)) if mine != all_} or {0}
    return {d for d, size in enumerate(local) if d not in kept and size > _THIN}


def _leaves(export: Any, ranks: Sequence[str], local: tuple[int, ...], joined: tuple[int, ...], d: int) -> bool:
    """Does it leave elements where they are in dimension `d`, in tensors of full size? A byte for each, so that one parameter takes
    less than its weights do."""
    places = (torch.arange(local[d]) % 251).to(torch.uint8).view([-1 if k == d else 1 for k in range(len(local))])
    return bool(torch.equal(export(dict.fromkeys(ranks, places.expand(local)))[_JOINED], places.expand(joined)))


def _widened(narrow: Recording, local: Sequence[int], joined: tuple[int, ...], thin: set[int]) -> Recording | None:
    """The same, along the whole of the dimensions `thin`; None where one of them is not left as it is."""
    if narrow.shapes[_JOINED] != tuple(_THIN if d in thin else size for d, size in enumerate(joined)) or narrow.added:
        return None
    pieces: dict[str, list[Piece]] = {}
    for source, found in narrow.pieces.items():
        for piece in found:
            if any((piece.begin[d], piece.extent[d], piece.at[d], piece.axis[d], piece.step[d]) != (0, _THIN, 0, d, 1) or
                   piece.axis.count(d) > 1 for d in thin):
                return None
            pieces.setdefault(source, []).append(
                replace(piece, extent=tuple(local[d] if d in thin else size for d, size in enumerate(piece.extent))))
    return Recording({_JOINED: joined}, narrow.sources, pieces)


def global_name(bridge: Any, name: str) -> str:
    """`name`, whose layer is that of the whole model, with the expert's number in the whole model, as mbridge's export counts."""
    if _EXPERTS not in name or bridge.mpu.ep_size == 1:
        return name
    before, weight, number = name.rpartition(".weight")
    if not number.isdigit():
        raise _refuse(name, "no number of an expert in the name")
    return f"{before}{weight}{bridge.config.num_moe_experts // bridge.mpu.ep_size * bridge.mpu.ep_rank + int(number)}"


_said: set[str] = set()


def _export_is_wrong(how: str, name: str) -> None:
    if how not in _said:
        log.warning("weightwire: mbridge's own export_weights() is wrong for this model: %s (%s). What is published is as its "
                    "load_weights() has them", how, name)
    _said.add(how)


def _refuse(name: str, what: str) -> errors.RefusedError:
    return refuse(f"mbridge's export has {what}", tensor=name, remedy=_REMEDY)


def _folder(bridge: Any) -> str:
    found = getattr(getattr(bridge, "safetensor_io", None), "hf_dir", "") or getattr(bridge.hf_config, "name_or_path", "")
    if not found:
        raise refuse("mbridge's bridge names no checkpoint", remedy="give checkpoint=, the folder whose names and shapes engines use")
    return str(found)


def dequantized(tensors: Sequence[TensorMeta]) -> dict[str, TensorMeta]:
    """A checkpoint's tensors by name, those in blocks of fp8 as mbridge's loader makes them: bf16, without scales."""
    scales = {f"{meta.name}_scale_inv" for meta in tensors}
    return {meta.name: replace(meta, dtype="BF16") if meta.dtype == "F8_E4M3" else meta for meta in tensors if meta.name not in scales}


class Publisher(BoxPublisher):
    """Publishes a model of mbridge from every rank, each its own shards; replicas share the sending.

    bridge: what AutoBridge gave; models: this rank's chunks, as bridge.get_model returned them, wrapped or not
    checkpoint: the folder of safetensors whose names and shapes engines use; what the bridge loaded when not given
    See LivePublisher for what `publish` promises, and weightwire.megatron.Publisher for options of megatron-core and for `verify`;
    "export" is the bridge's own.

    RefusedError: mbridge does not map a parameter, computes it, or gives another shape than the checkpoint has; names it.
    """

    def __init__(self, bridge: Any, models: Union[torch.nn.Module, Sequence[torch.nn.Module]], *,
                 checkpoint: Union[str, "os.PathLike[str]", None] = None, group: str = "trainer", job: str = "",
                 agent: str | None = None, timeout: float = 30.0, lineage: Lineage = None,
                 verify: Export | Literal["export"] | None = None, verify_every: int = 0, device: DeviceChoice = None,
                 delta: DeltaMode = None):
        chunks, inner = megatron_options.checked(models)
        config = config_of(bridge.hf_config)
        whole = dequantized(checkpoint_tensors(checkpoint or _folder(bridge)))
        names = [bridge._weight_name_mapping_mcore_local_to_global(model, consider_ep=False) for model in inner]
        found: dict[tuple[str, tuple[int, ...]], Converted] = {}  # for each version the same
        known: Known = {}

        def named(number: int) -> Iterator[tuple[str, str, torch.Tensor]]:
            """Of each tensor of a chunk its name there and in the whole model, and itself."""
            for local, tensor in local_tensors(chunks[number]):
                name = global_name(bridge, names[number].get(local, local))
                if not name.endswith(_HEAD) or _has_own(bridge, name, shares_head(inner[number]), whole):
                    yield local, name, tensor

        def read() -> Reading:
            frozen = frozen_places(inner)
            lives = []
            for number, model in enumerate(inner):
                marks = dict(model.named_parameters())
                for local, name, tensor in named(number):
                    key = name, tuple(tensor.shape)
                    if key not in found:
                        found[key] = convert(bridge, name, marks.get(local, tensor), tensor.shape, whole, known)
                    one = found[key]
                    # A conversion that adds has seen to norms that are held less one.
                    own = None if one.added else megatron_options.transform_exported(model, config, local, tensor.shape)
                    meta = megatron_options.fixed_dtype(meta_of(name, tensor))
                    live = Live(Held(meta, one.boxes), tensor, writes(one.added, own),
                                tensor.data_ptr() in frozen if local in marks else None)
                    lives.append(live)
                    lives += [replace(live, held=Held(replace(meta, name=other), its)) for other, its in one.copies.items()]
            return whole, lives

        super().__init__(read, rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage, before=lambda: megatron_options.gather_delayed(chunks),
                         verify=(lambda: bridge.export_weights(chunks)) if verify == "export" else verify,
                         verify_every=verify_every, device=device, delta=delta)


def _has_own(bridge: Any, name: str, shared: bool, whole: Mapping[str, TensorMeta]) -> bool:
    """Is there a tensor of the checkpoint for this head? There need be none for the last stage's copy of an embedding that the
    first stage publishes."""
    head, embedding = (bridge._weight_name_mapping_mcore_to_hf(one) for one in (name, name[:-len(_HEAD)] + _EMBEDDING))
    if not shared and head == embedding:
        raise _refuse(name, f"the name {head[0]} for it, which is the embedding's: mbridge's classes keep that of a tied model of this "
                            "kind that the process had before, and its export would give one for the other")
    return not shared or any(other in whole for other in head)
