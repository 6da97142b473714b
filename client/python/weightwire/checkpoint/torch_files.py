"""Files of pickled formats, laid out by torch itself and left empty: tensors are written into them afterwards.

The one module that imports torch, and only when it writes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from weightwire.checkpoint.stored import CheckpointError
from weightwire.memory import FROM_TORCH, TensorMeta, dtype_bytes

#: Larger tensors are stored in blocks of rows: a reader loads whole blocks.
_BLOCK_BYTES = 64 << 20


@dataclass
class Stack:
    """Equal tensors under one name of torch_dist, each at its place on the leading axes (none: the tensor itself)."""

    key: str
    dtype: str
    shape: Tuple[int, ...]
    places: List[Tuple[int, ...]]

    @property
    def lead(self) -> Tuple[int, ...]:
        return tuple(max(axis) + 1 for axis in zip(*self.places))


def _torch() -> Any:
    try:
        import torch
        from torch.serialization import skip_data  # noqa: F401
    except ImportError as error:
        raise CheckpointError(f"torch_dist and megatron files are written by torch 2.6 or newer: {error}",
                              code="FAILED_PRECONDITION", remedy="run this where torch is installed") from error
    return torch


def _empty(torch: Any, dtype: str, shape: Sequence[int]) -> Any:
    """A tensor whose memory nobody touches."""
    names = {ours: theirs for theirs, ours in FROM_TORCH.items()}
    return torch.empty(tuple(shape), dtype=getattr(torch, names[dtype]))


def write_megatron(path: Path, chunks: Mapping[str, Sequence[TensorMeta]]) -> None:
    """One rank's file; `chunks` are "model", or "model0", "model1"…"""
    torch = _torch()
    state: Dict[str, Any] = {"checkpoint_version": 3.0, "iteration": 0}
    for chunk, tensors in chunks.items():
        state[chunk] = OrderedDict((t.name, _empty(torch, t.dtype, t.shape)) for t in tensors)
    with torch.serialization.skip_data():
        torch.save(state, path)


def write_torch_dist(folder: Path, stacks: Sequence[Stack], common: Mapping[str, Any]) -> None:
    """All files of a torch_dist checkpoint."""
    torch = _torch()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import metadata, planner

    def empty(stack: Stack, begin: Tuple[int, ...], extent: Tuple[int, ...]) -> Any:
        chunk = metadata.ChunkStorageMetadata(offsets=torch.Size(begin), sizes=torch.Size(extent))
        properties = metadata.TensorProperties(dtype=_empty(torch, stack.dtype, ()).dtype)
        data = planner.TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(stack.lead + stack.shape))
        index = metadata.MetadataIndex(stack.key, torch.Size(begin))
        return planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data)

    items = [empty(stack, *block) for stack in stacks for block in _blocks(stack)]
    dtypes = {stack.key: stack.dtype for stack in stacks}
    items += [planner.WriteItem(index=metadata.MetadataIndex(key), type=planner.WriteItemType.BYTE_IO)
              for key in _extra_states(stacks)]
    nothing = io.BytesIO()
    torch.save([torch.empty(0, dtype=torch.uint8)], nothing)  # what modules without an extra state have there

    class Planner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        def create_local_plan(self) -> Any:
            self.plan = planner.SavePlan(items)
            return self.plan

        def resolve_data(self, item: Any) -> Any:
            if item.type == planner.WriteItemType.BYTE_IO:
                return io.BytesIO(nothing.getvalue())
            # Streams cannot skip data as files can: blocks are written as zeros first, one at a time.
            return _empty(torch, dtypes[item.index.fqn], item.tensor_data.chunk.sizes).zero_()

    writer = dcp.FileSystemWriter(folder, thread_count=1, sync_files=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save({}, storage_writer=writer, planner=Planner(flatten_state_dict=False), no_dist=True)
    torch.save(dict(common), folder / "common.pt")
    (folder / "metadata.json").write_text('{"sharded_backend":"torch_dist","sharded_backend_version":1,'
                                          '"common_backend":"torch","common_backend_version":1}')


def _blocks(stack: Stack) -> List[Tuple[Tuple[int, ...], Tuple[int, ...]]]:
    """(begin, extent) of what is stored in one piece."""
    blocks = []
    row = math.prod(stack.shape[1:]) * dtype_bytes(stack.dtype)
    rows = stack.shape[0] if stack.shape else 1
    step = max(1, _BLOCK_BYTES // max(1, row))
    for place in stack.places:
        ones = (1,) * len(place)
        if not stack.shape:
            blocks.append((place, ones))
        for first in range(0, rows if stack.shape else 0, step):
            rest = stack.shape[1:]
            blocks.append(((*place, first, *(0 for _ in rest)), (*ones, min(step, rows - first), *rest)))
    return blocks


def _extra_states(stacks: Sequence[Stack]) -> List[str]:
    """Where mcore looks for modules' extra states. It takes ones that it did not ask for, but misses none in silence."""
    keys = []
    for stack in stacks:
        module, _, leaf = stack.key.rpartition(".")
        if leaf != "weight" or re.match(r"embedding\.|output_layer\.|optimizer\.", stack.key) or module.endswith(".router"):
            continue
        lead = ".".join(map(str, stack.lead or (1,)))
        modules = [module] + ([module.replace("linear_proj", "core_attention")] if "linear_proj" in module else [])
        keys += [f"{name}._extra_state/shard_{'.'.join(map(str, place or (0,)))}_{lead}"
                 for name in modules for place in stack.places]
    return keys
