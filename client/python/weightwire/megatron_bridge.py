"""Models that NVIDIA's Megatron-Bridge built, by its own conversion tasks. No gather.

>>> publisher = weightwire.megatron_bridge.Publisher(bridge, models)       # on every rank
>>> publisher.publish(step).wait_released(timeout=60)

The tasks say which Hugging Face tensors a parameter is made of and how it is cut; they become explicit boxes. So a
model goes that Megatron-Bridge knows and weightwire's `megatron` scheme does not. For one that both know,
`weightwire.megatron.Publisher(models, bridge.hf_pretrained.config)` does the same and is compared with config.json.
"""

from __future__ import annotations

import os
from typing import Any, Iterator, Mapping, Sequence, Union

import torch

from weightwire import boxes, megatron_options
from weightwire.adapter import Live, meta_of, refuse
from weightwire.boxes import Box, Held
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.megatron import config_of, local_tensors
from weightwire.megatron_state import unwrap
from weightwire.memory import TensorMeta
from weightwire.publisher import Lineage
from weightwire.torch import BoxPublisher, Reading

_REMEDY = "use weightwire.megatron, or publish bridge.export_hf_weights() through weightwire.torch"
#: Mappings that take one tensor as it is, whole or in equal parts of one dimension.
_PLAIN = ("AutoMapping", "ColumnParallelMapping", "RowParallelMapping", "ReplicatedMapping", "DirectMapping")


def task_boxes(task: Any, local: Sequence[int], whole: Mapping[str, TensorMeta]) -> list[Box]:
    """Where the parameter of a conversion task lies in the Hugging Face tensors.

    `local`: the parameter's shape on this rank. RefusedError for a mapping that does more than cut and join, and
    for a shape that does not follow from it.
    """
    mapping, kind = task.mapping, type(task.mapping).__name__
    rank, size = mapping.tp_rank, mapping.tp_size
    if kind == "QKVMapping":
        config = task.megatron_module.config
        if getattr(config, "attention_output_gate", False):
            raise _refuse(task, "an attention with an output gate")
        q, k, v = (_whole(task, whole, mapping.hf_param[part]) for part in "qkv")
        groups = config.num_query_groups
        runs = [(meta, group * (meta.shape[0] // groups), meta.shape[0] // groups)
                for group in range(groups) for meta in (q, k, v)]
        found = list(_rows(runs, rank * local[0]))
    elif kind == "GatedMLPMapping":
        gate, up = (_whole(task, whole, mapping.hf_param[part]) for part in ("gate", "up"))
        found = list(_rows([(meta, rank * (meta.shape[0] // size), meta.shape[0] // size) for meta in (gate, up)], 0))
    elif kind in _PLAIN and getattr(mapping, "permute_dims", None) is None:
        return _plain(task, local, _whole(task, whole, mapping.hf_param), rank, size)
    else:
        raise _refuse(task, f"a {kind}")
    # Rows that lie beyond this rank's part, or before it, belong to its neighbours.
    found = [box for box in (_clip(box, local[0]) for box in found) if box is not None]
    if sum(box.extent[0] for box in found) != local[0] or any(box.extent[1:] != tuple(local[1:]) for box in found):
        raise _refuse(task, f"the shape {list(local)} for a {kind}")
    return found


def _whole(task: Any, whole: Mapping[str, TensorMeta], name: str) -> TensorMeta:
    if name not in whole:
        raise refuse("the checkpoint has no such tensor", tensor=name,
                     remedy=f"Megatron-Bridge maps {task.global_param_name} to it: pass the model's own checkpoint")
    return whole[name]


def _rows(runs: Sequence[tuple[TensorMeta, int, int]], skip: int) -> Iterator[Box]:
    """Runs of rows (tensor, first, count), one behind another; the local tensor begins `skip` rows into them."""
    at = -skip
    for meta, first, count in runs:
        width = boxes.row_major(meta.shape)[0]
        yield Box(meta.name, (first, *[0] * (len(meta.shape) - 1)), (count, *meta.shape[1:]), at * width,
                  boxes.row_major(meta.shape))
        at += count


def _clip(box: Box, rows: int) -> Box | None:
    """The part of a run that lies in the local tensor's `rows` rows."""
    width = box.stride[0]
    at = box.offset // width
    begin, end = max(at, 0), min(at + box.extent[0], rows)
    if begin >= end:
        return None
    return Box(box.name, (box.begin[0] + begin - at, *box.begin[1:]), (end - begin, *box.extent[1:]), begin * width,
               box.stride)


def _plain(task: Any, local: Sequence[int], meta: TensorMeta, rank: int, size: int) -> list[Box]:
    """One tensor, whole or the `rank`-th of `size` equal parts along the dimension in which the shapes differ."""
    if tuple(local) == meta.shape:
        return [Box(meta.name, (0,) * len(local), tuple(local), 0, boxes.row_major(local))]
    differ = [d for d, (mine, all_) in enumerate(zip(local, meta.shape)) if mine != all_]
    vocabulary = "word_embeddings" in task.global_param_name or "output_layer" in task.global_param_name
    if len(local) != len(meta.shape) or len(differ) != 1:
        raise _refuse(task, f"the shape {list(local)} of {list(meta.shape)}")
    d = differ[0]
    if local[d] * size != meta.shape[d] and not (vocabulary and d == 0 and local[0] * size > meta.shape[0]):
        raise _refuse(task, f"the shape {list(local)} of {list(meta.shape)} on {size} ranks")
    begin = [rank * local[d] if k == d else 0 for k in range(len(local))]
    extent = list(local)
    extent[d] = min(local[d], meta.shape[d] - begin[d])  # the vocabulary's padding is nobody's
    if extent[d] <= 0:
        return []
    return [Box(meta.name, tuple(begin), tuple(extent), 0, boxes.row_major(local))]


def _refuse(task: Any, what: str) -> Exception:
    return refuse(f"Megatron-Bridge's conversion has {what}, which weightwire does not read",
                  tensor=task.global_param_name, remedy=_REMEDY)


class Publisher(BoxPublisher):
    """Publishes a model of Megatron-Bridge from every rank, each its own shards; replicas share the sending.

    bridge: the AutoBridge; models: this rank's chunks, wrapped or not
    checkpoint: the folder of safetensors whose names and shapes engines use; the bridge's own when not given
    Opening it is one collective of Megatron-Bridge. See LivePublisher for what `publish` promises, and
    weightwire.megatron.Publisher for options of megatron-core.
    """

    def __init__(self, bridge: Any, models: Union[torch.nn.Module, Sequence[torch.nn.Module]], *,
                 checkpoint: Union[str, "os.PathLike[str]", None] = None, group: str = "trainer", job: str = "",
                 agent: str | None = None, timeout: float = 30.0, lineage: Lineage = None):
        chunks = [models] if isinstance(models, torch.nn.Module) else list(models)
        inner = [unwrap(chunk) for chunk in chunks]
        megatron_options.check(chunks, inner)
        config = config_of(bridge.hf_pretrained.config)
        folder = checkpoint or bridge.hf_pretrained.model_name_or_path
        whole = {meta.name: meta for meta in checkpoint_tensors(folder)}
        tasks = [task for task in bridge.get_conversion_tasks(chunks, hf_path=checkpoint)
                 if task is not None and task.param_weight is not None]

        def read() -> Reading:
            local = [dict(local_tensors(chunk)) for chunk in chunks]
            lives = []
            for task in tasks:
                tensor = local[task.vp_stage][task.param_name]
                lives.append(Live(Held(meta_of(task.global_param_name, tensor), task_boxes(task, tensor.shape, whole)), tensor,
                                  megatron_options.transform(inner[task.vp_stage].config, config, task.param_name,
                                                             tensor.shape)))
            return whole, lives

        super().__init__(read, rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage, before=lambda: megatron_options.gather_delayed(chunks))
