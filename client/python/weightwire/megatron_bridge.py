"""Models that NVIDIA's Megatron-Bridge built, by its own conversion tasks. No gather.

>>> publisher = weightwire.megatron_bridge.Publisher(bridge, models)       # on every rank
>>> publisher.publish(step).wait_released(timeout=60)

The tasks say which Hugging Face tensors a parameter is made of and how it is cut; what they do is recorded (recorded.py) and
becomes explicit boxes. So a model goes that Megatron-Bridge knows and weightwire's `megatron` scheme does not. For one that both know,
`weightwire.megatron.Publisher(models, bridge.hf_pretrained.config)` does the same and is compared with config.json.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Iterator, Literal, Mapping, Sequence, Union

import torch

from weightwire import boxes, errors, megatron_options
from weightwire.adapter import Live, frozen_places, meta_of, persistent_buffers, refuse
from weightwire.boxes import Box, Held
from weightwire.device_choice import DeviceChoice
from weightwire.export_check import Export
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.megatron import config_of, local_tensors
from weightwire.memory import TensorMeta
from weightwire.publisher import DeltaMode, Lineage
from weightwire.recorded import record
from weightwire.torch import BoxPublisher, Reading

_REMEDY = "use weightwire.megatron, or publish bridge.export_hf_weights() through weightwire.torch"
_EXPERT = re.compile(r"\.(?:weight|bias)(\d+)$|\.local_experts\.(\d+)\.")
#: Mappings that take one tensor as it is, whole or in equal parts of one dimension.
_PLAIN = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "DirectMapping")


@dataclass(frozen=True)
class Converted:
    """Where a parameter of this rank lies in the Hugging Face tensors, and what is added to it on the way there."""

    boxes: list[Box]
    added: int = 0
    head: str | None = None  #: the checkpoint's tensor for a head that the model shares with this embedding


def convert(task: Any, local: Sequence[int], whole: Mapping[str, TensorMeta], bridge: Any = None) -> Converted:
    """`local`: the shape on this rank of the parameter of a conversion task; `bridge`: whose task it is, for what it does
    after the mapping. RefusedError for a mapping that does more than move elements (and add a number), and for a shape
    that is not the checkpoint's.
    """
    mapping = task.mapping
    if type(mapping).__name__ in _PLAIN and getattr(mapping, "permute_dims", None) is None and not _modifies(bridge):
        return Converted(_plain(task, local, _whole(task, whole, mapping.hf_param), mapping.tp_rank, mapping.tp_size))
    own, names = str(mapping.tp_rank), [str(rank) for rank in range(mapping.tp_size)]

    def export(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        with _alone(type(mapping), tensors, own):
            out = mapping.megatron_to_hf(tensors[own], task.megatron_module)
            return dict(_apart(bridge).maybe_modify_converted_hf_weight(task, out, {}) if _modifies(bridge) else out)

    try:
        recording = record(export, {name: tuple(local) for name in names})
    except errors.RefusedError as error:
        raise _refuse(task, f"a {type(mapping).__name__}: {error}") from error
    except Exception as error:  # of the mapping's own, on numbers that are no weights
        raise _refuse(task, f"a {type(mapping).__name__} that fails on numbers: {type(error).__name__}: {error}") from error
    if not recording.shapes:
        raise _refuse(task, f"a {type(mapping).__name__} that gives nothing for this parameter alone")
    held = recording.held(Held(TensorMeta(own, "BF16", tuple(local)), boxes.block(own, "BF16", [0] * len(local), local).boxes))
    found: list[Box] = []
    for name, shape in recording.shapes.items():
        meta = _whole(task, whole, name)
        its = [box for box in held.boxes if box.name == name]
        if getattr(mapping, "is_grouped_export", False):
            found += _of_expert(task, meta, shape, its)
            continue
        if meta.shape != shape and not (_is_vocabulary(task) and meta.shape[1:] == shape[1:] and meta.shape[0] < shape[0]):
            raise _refuse(task, f"the shape {list(shape)} of {list(meta.shape)} for {name}")
        found += [box for box in (_within(box, meta) for box in its) if box is not None]
    return Converted(found, recording.added.get(own, 0))


def _of_expert(task: Any, meta: TensorMeta, shape: tuple[int, ...], its: Sequence[Box]) -> list[Box]:
    """Boxes of one expert, in the tensor that has all of them: as Megatron-Bridge stacks what mappings with is_grouped_export
    give, and transposes it where only that has the checkpoint's shape."""
    number = _EXPERT.search(task.global_param_name)
    if number is None:
        raise _refuse(task, f"a {type(task.mapping).__name__} for a parameter that names no expert")
    expert = int(number.group(1) or number.group(2))
    turned = meta.shape[1:] != shape and bool(getattr(task.mapping, "transpose_on_export", False))
    expected = (*shape[:-2], shape[-1], shape[-2]) if turned and len(shape) > 1 else shape
    if meta.shape[1:] != expected or not 0 <= expert < meta.shape[0]:
        raise _refuse(task, f"the shape {list(expected)} of expert {expert} of {list(meta.shape)} for {meta.name}")

    def order(values: Sequence[int]) -> tuple[int, ...]:
        return (*values[:-2], values[-1], values[-2]) if turned and len(values) > 1 else tuple(values)

    return [Box(box.name, (expert, *order(box.begin)), (1, *order(box.extent)), box.offset, (1, *order(box.stride))) for box in its]


def _modifies(bridge: Any) -> bool:
    """Has the model's bridge something to do after the mapping?"""
    method = getattr(type(bridge), "maybe_modify_converted_hf_weight", None)
    return method is not None and method.__qualname__.split(".")[0] != "MegatronModelBridge"


def _apart(bridge: Any) -> Any:
    """A bridge that collects several tensors (experts of one) must not keep our numbers for its next export."""
    made = copy.copy(bridge)
    for name, value in vars(bridge).items():
        if isinstance(value, dict):
            setattr(made, name, dict(value))
    return made


@contextlib.contextmanager
def _alone(kind: type, tensors: Mapping[str, torch.Tensor], own: str) -> Iterator[None]:
    """A mapping that runs on numbers asks no other rank: what the others of its tensor-parallel group hold differs in the number
    that says whose it is."""
    base = next(k for k in kind.__mro__ if k.__name__ == "MegatronParamMapping")

    def first(name: str) -> torch.Tensor:
        return tensors[name].reshape(-1)[:1].sum()

    def gather(self: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
        ranks = range(self.tp_size) if self.tp_size > 1 else (int(own),)
        return [tensor if str(rank) == own else tensor + (first(str(rank)) - first(own)) for rank in ranks]

    replaced = dict(gather_from_tp_ranks=gather, broadcast_from_pp_rank=lambda self, tensor, *_, **__: tensor,
                    broadcast_obj_from_pp_rank=lambda self, value, *_, **__: value,
                    gather_from_ep_ranks=lambda self, weights, module, name, *_, **__: {str(name): weights})
    before = {name: base.__dict__[name] for name in replaced if name in base.__dict__}
    try:
        for name in before:
            setattr(base, name, replaced[name])
        yield
    finally:
        for name, method in before.items():
            setattr(base, name, method)


def _within(box: Box, meta: TensorMeta) -> Box | None:
    """Rows beyond the vocabulary are padding."""
    rows = min(box.extent[0], meta.shape[0] - box.begin[0]) if box.extent else 1
    return box if not box.extent or rows == box.extent[0] else (
        Box(box.name, box.begin, (rows, *box.extent[1:]), box.offset, box.stride) if rows > 0 else None)


def _whole(task: Any, whole: Mapping[str, TensorMeta], name: str) -> TensorMeta:
    if name not in whole:
        raise refuse("the checkpoint has no such tensor", tensor=name,
                     remedy=f"Megatron-Bridge maps {task.global_param_name} to it: pass the model's own checkpoint")
    return whole[name]


_EMBEDDING = "embedding.word_embeddings.weight"


def _head_of(task: Any) -> str:
    return str(task.global_param_name[:-len(_EMBEDDING)]) + "output_layer.weight"


def shares_head(model: Any) -> bool:
    """Has the model, or its text part, one matrix for the embedding and the head?"""
    parts = (model, getattr(model, "config", None), getattr(model, "language_model", None))
    return any(getattr(part, "share_embeddings_and_output_weights", False) for part in parts)


def _tied_head(task: Any, model: Any, bridge: Any, whole: Mapping[str, TensorMeta]) -> str | None:
    """The checkpoint's tensor for the head, where the model has none of its own and the checkpoint holds one all the same, as some
    tied ones do: the bridge's export gives it the embedding's rows."""
    if bridge is None or not task.global_param_name.endswith(_EMBEDDING) or not shares_head(model):
        return None
    mapping = bridge.mapping_registry().megatron_to_hf_lookup(_head_of(task))
    name = getattr(mapping, "hf_param", None)
    return name if isinstance(name, str) and name in whole and name != task.mapping.hf_param else None


def _is_vocabulary(task: Any) -> bool:
    return "word_embeddings" in task.global_param_name or "output_layer" in task.global_param_name


def _plain(task: Any, local: Sequence[int], meta: TensorMeta, rank: int, size: int) -> list[Box]:
    """One tensor, whole or the `rank`-th of `size` equal parts along the dimension in which the shapes differ."""
    if tuple(local) == meta.shape:
        return [Box(meta.name, (0,) * len(local), tuple(local), 0, boxes.row_major(local))]
    differ = [d for d, (mine, all_) in enumerate(zip(local, meta.shape)) if mine != all_]
    if len(local) != len(meta.shape) or len(differ) != 1:
        raise _refuse(task, f"the shape {list(local)} of {list(meta.shape)}")
    d = differ[0]
    if local[d] * size != meta.shape[d] and not (_is_vocabulary(task) and d == 0 and local[0] * size > meta.shape[0]):
        raise _refuse(task, f"the shape {list(local)} of {list(meta.shape)} on {size} ranks")
    begin = [rank * local[d] if k == d else 0 for k in range(len(local))]
    extent = list(local)
    extent[d] = min(local[d], meta.shape[d] - begin[d])  # the vocabulary's padding is nobody's
    if extent[d] <= 0:
        return []
    return [Box(meta.name, tuple(begin), tuple(extent), 0, boxes.row_major(local))]


def _refuse(task: Any, what: str) -> errors.RefusedError:
    return refuse(f"Megatron-Bridge's conversion has {what}, which weightwire does not read",
                  tensor=task.global_param_name, remedy=_REMEDY)


def writes(added: int, permute: megatron_options.Write | None) -> megatron_options.Write | None:
    """What makes the checkpoint's elements of a parameter: a conversion that adds a number, or what options of mcore ask for."""
    if added and permute:
        raise refuse("it is permuted and added to", remedy=_REMEDY)
    return partial(_add, added) if added else permute


def _add(number: int, into: torch.Tensor, tensor: torch.Tensor) -> None:
    into.copy_(tensor + number)  # in the parameter's dtype, as the mapping does


class Publisher(BoxPublisher):
    """Publishes a model of Megatron-Bridge from every rank, each its own shards; replicas share the sending.

    bridge: the AutoBridge; models: this rank's chunks, wrapped or not
    checkpoint: the folder of safetensors whose names and shapes engines use; the bridge's own when not given
    Opening it is one collective of Megatron-Bridge. See LivePublisher for what `publish` promises, and
    weightwire.megatron.Publisher for options of megatron-core and for `verify`; "export" is the bridge's own.
    """

    def __init__(self, bridge: Any, models: Union[torch.nn.Module, Sequence[torch.nn.Module]], *,
                 checkpoint: Union[str, "os.PathLike[str]", None] = None, group: str = "trainer", job: str = "",
                 agent: str | None = None, timeout: float = 30.0, lineage: Lineage = None,
                 verify: Export | Literal["export"] | None = None, verify_every: int = 0, device: DeviceChoice = None,
                 delta: DeltaMode = None):
        chunks, inner = megatron_options.checked(models)
        config = config_of(bridge.hf_pretrained.config)
        folder = checkpoint or bridge.hf_pretrained.model_name_or_path
        whole = {meta.name: meta for meta in checkpoint_tensors(folder)}
        tasks = [task for task in bridge.get_conversion_tasks(chunks, hf_path=checkpoint)
                 if task is not None and task.param_weight is not None]

        model_bridge = getattr(bridge, "_model_bridge", None)
        if model_bridge is not None and not hasattr(model_bridge, "hf_config"):  # the bridge's own loader and export set it first
            model_bridge.hf_config = bridge.hf_pretrained.config
        found: dict[tuple[int, str, tuple[int, ...]], Converted] = {}  # for each version the same

        def read() -> Reading:
            # Bridges map buffers, too: gemma4's scalar of a layer.
            local = [{**dict(persistent_buffers(model)), **dict(local_tensors(chunk))} for chunk, model in zip(chunks, inner)]
            frozen = frozen_places(inner)
            lives = []
            for task in tasks:
                tensor = local[task.vp_stage].get(task.param_name)
                if tensor is None:
                    raise _refuse(task, f"a task for {task.param_name}, no parameter and no buffer of the model,")
                key = task.vp_stage, task.param_name, tuple(tensor.shape)
                if key not in found:
                    found[key] = replace(convert(task, tensor.shape, whole, model_bridge),
                                         head=_tied_head(task, inner[task.vp_stage], model_bridge, whole))
                # A mapping that adds has seen to norms that are held less one.
                own = None if found[key].added else megatron_options.transform_exported(
                    inner[task.vp_stage], config, task.param_name, tensor.shape)
                live = Live(Held(meta_of(task.global_param_name, tensor), found[key].boxes), tensor,
                            writes(found[key].added, own), tensor.data_ptr() in frozen)
                lives.append(live)
                head = found[key].head
                if head is not None:
                    held = Held(replace(live.held.meta, name=_head_of(task)), [replace(box, name=head) for box in found[key].boxes])
                    lives.append(replace(live, held=held))
            return whole, lives

        super().__init__(read, rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage, before=lambda: megatron_options.gather_delayed(chunks),
                         verify=(lambda: bridge.export_hf_weights(chunks, cpu=True, show_progress=False)) if verify == "export"
                         else verify, verify_every=verify_every, device=device, delta=delta)
