"""A whole model in Hugging Face's files, written by the ranks that hold its parts, all at once: no gather, no merger.

Every rank says what it holds; rank 0 lays the files out, empty, and reserves their space; every rank writes the blocks that
the plan takes from it into their places. Blocks of different ranks lie in the same pages of a file, so that all ranks must
see one coherent file: those of one host, or of a file system such as Lustre or GPFS, not of NFS.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from weightwire.boxes import Held, whole
from weightwire.checkpoint import disk, hf, layouts
from weightwire.checkpoint.attempts import Attempt
from weightwire.checkpoint.execute import strided
from weightwire.checkpoint.formats import CONFIG, Wanted
from weightwire.checkpoint.layouts import Explicit, Layout
from weightwire.checkpoint.planner import Copy, Plan, planner_of
from weightwire.checkpoint.stored import Bits, CheckpointError, Files, Stored, raw
from weightwire.memory import TensorMeta, dtype_bytes

Tensors = Mapping[str, Tuple[str, Tuple[int, ...], Bits]]
_HOLDS, _DONE, _READY = "holds", "done", "ready.json"
#: Of one write that must be put together first.
_STEP_BYTES = 16 << 20


def export_rank(one: Attempt, layout: Layout, world_size: int, tensors: Tensors, config: str, resume: bool,
                shard_bytes: int, wwctl: Optional[str] = None) -> None:
    """On rank 0, returns when the checkpoint is whole, elsewhere when this rank's blocks are written and durable.

    CheckpointError: the ranks do not hold what the layout says; DeadlineError: a rank did not come.
    """
    if resume and one.rank != 0 and _file(one, one.rank, _DONE).exists():
        return None  # rank 0 may give the folder its name at any time
    if resume and any(hf.found_at(folder) for folder in one.finals):
        return _clean(one, world_size)
    one.begin(resume)
    said: Dict[str, Any] = {"spec": layouts.words(layout), "tensors": {name: [dtype, list(shape)] for name, (dtype, shape, _)
                                                                      in tensors.items()}}
    if isinstance(layout, Explicit):
        said.update(layouts.to_json(layout))
    one.put(_file(one, one.rank, _HOLDS), json.dumps(said))
    one.wait_for_all(lambda rank: _file(one, rank, _HOLDS), world_size)
    parts = [json.loads(_file(one, rank, _HOLDS).read_text()) for rank in range(world_size)]
    plan, metas = _plan(one, parts, config, wwctl)
    ready = one.partial / _READY
    if one.rank == 0 and not ready.exists():
        for path in one.partial.glob("*.safetensors*"):  # of a rank 0 that was killed while it laid them out
            path.unlink()
        hf.lay_out(one.partial, Wanted("hf", "hf", "hf", [metas], shard_bytes, one.partial / CONFIG))
        disk.allocate(one.partial)
        one.put(ready, json.dumps({"plan": plan.id}))
    one.wait(ready.exists, "rank 0 did not lay the files out")
    if json.loads(ready.read_text()) != {"plan": plan.id}:
        raise CheckpointError("this rank's plan is not rank 0's", code="FAILED_PRECONDITION", rank=str(one.rank),
                              remedy="the same release of weightwire and the same config.json on every rank")
    _write_blocks(one, plan, metas, [bits for _, _, bits in tensors.values()])
    one.put(_file(one, one.rank, _DONE), "{}")
    if one.rank == 0:
        one.wait_for_all(lambda rank: _file(one, rank, _DONE), world_size)
        (one.partial / CONFIG).write_text(config)
        one.finish()
        _clean(one, world_size)


def _clean(one: Attempt, world_size: int) -> None:
    """Rank 0: what the ranks told each other. Not before the end, so that a rank 0 that is started again finds it."""
    if one.rank == 0:
        for name in [_READY, *(_name(rank, kind) for rank in range(world_size) for kind in (_HOLDS, _DONE))]:
            (one.final / name).unlink(missing_ok=True)


def _name(rank: int, kind: str) -> str:
    return f"rank{rank:05d}.{kind}.json"


def _file(one: Attempt, rank: int, kind: str) -> Path:
    return one.partial / _name(rank, kind)


def _plan(one: Attempt, parts: Sequence[Any], config: str, wwctl: Optional[str]) -> Tuple[Plan, List[TensorMeta]]:
    """From what the ranks hold to whole tensors, the same on every rank; and those, with the dtypes that they have."""
    own = {key: parts[one.rank].get(key) for key in ("spec", "canonical")}
    other = next((rank for rank, part in enumerate(parts) if {key: part.get(key) for key in own} != own), None)
    if other is not None:
        raise CheckpointError(f"this rank saves '{own['spec']}', rank {other} another layout", rank=str(one.rank))
    held_metas = [{name: TensorMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in part["tensors"].items()}
                  for part in parts]
    if own["canonical"] is not None:
        source = [layouts.from_json(own["canonical"], part["boxes"], metas, f"rank {rank}")
                  for rank, (part, metas) in enumerate(zip(parts, held_metas))]
        wanted = [TensorMeta(name, "U8", tuple(shape)) for name, shape in own["canonical"].items()]
        plan = layouts.plan_boxes(source, {0: [whole(meta) for meta in wanted]})
    else:
        planner = planner_of(config, wwctl)
        source, wanted = planner.boxes(own["spec"]), planner.layout("hf")[0]
        plan = planner.plan(own["spec"], "hf")
    _compare(source, held_metas)
    dtypes: Dict[int, str] = {}
    for copy in plan.copies:
        name = source[copy.source_rank][copy.source_tensor].meta.name
        dtype = held_metas[copy.source_rank][name].dtype
        if dtypes.setdefault(copy.target_tensor, dtype) != dtype:
            raise CheckpointError(f"its parts have different dtypes, {dtype} on rank {copy.source_rank}",
                                  tensor=copy.canonical, reason="dtype_mismatch", remedy="nothing is cast in a save")
    numbers = [{name: number for number, name in enumerate(metas)} for metas in held_metas]  # as each rank gave them
    copies = [replace(copy, source_tensor=numbers[copy.source_rank][source[copy.source_rank][copy.source_tensor].meta.name])
              for copy in plan.copies]
    return Plan(plan.id, copies), [TensorMeta(meta.name, dtypes.get(number, meta.dtype), meta.shape)
                                   for number, meta in enumerate(wanted)]


def _compare(source: Sequence[Sequence[Held]], found: Sequence[Mapping[str, TensorMeta]]) -> None:
    if len(source) != len(found):
        raise CheckpointError(f"the layout has {len(source)} ranks, {len(found)} save", code="FAILED_PRECONDITION")
    for rank, (wanted, have) in enumerate(zip(source, found)):
        shapes, shapes_found = {held.meta.name: held.meta.shape for held in wanted}, {n: m.shape for n, m in have.items()}
        if shapes != shapes_found:
            name = min(n for n in shapes.keys() | shapes_found.keys() if shapes.get(n) != shapes_found.get(n))
            raise CheckpointError(f"expected {shapes.get(name)}, found {shapes_found.get(name)}", rank=str(rank), tensor=name,
                                  reason="shape_mismatch", remedy="compare config.json and the spec with the model")


def _write_blocks(one: Attempt, plan: Plan, metas: Sequence[TensorMeta], held: Sequence[Bits]) -> None:
    opened = hf.open_at(one.partial)
    opened.files.writable = True
    written: Set[str] = set()
    for copy in plan.copies:
        if copy.source_rank == one.rank:
            target = opened.ranks[0][metas[copy.target_tensor].name]
            write_block(opened.files, target, copy, held[copy.source_tensor])
            written.add(target.regions[0].file)
    for file in written:
        os.fsync(opened.files.fd(file))
    opened.files.close()


def write_block(files: Files, target: Stored, copy: Copy, bits: Bits) -> None:
    """One copy out of memory, into its place in a tensor that one region holds."""
    item, region = dtype_bytes(target.dtype), target.regions[0]
    dims = sorted((d for d in range(len(copy.extent)) if copy.extent[d] > 1), key=lambda d: -copy.target_stride[d])
    extent = [copy.extent[d] for d in dims]
    values = strided(bits, copy.source_offset, extent, [copy.source_stride[d] for d in dims])
    strides, run, inner = [copy.target_stride[d] for d in dims], 1, len(dims)
    while inner and strides[inner - 1] == run:
        inner -= 1
        run *= extent[inner]
    rows = extent[inner] if inner < len(dims) else 1
    step = max(1, _STEP_BYTES // (run // rows * item))
    for index in product(*map(range, extent[:inner])):
        first = region.offset + (copy.target_offset + sum(i * s for i, s in zip(index, strides))) * item
        block = values[index].reshape(rows, -1) if inner == len(dims) else values[index]
        for row in range(0, rows, step):
            data, offset = raw(block[row:row + step]), first + row * (run // rows) * item
            while data:
                done = os.pwrite(files.fd(region.file), data, offset)
                data, offset = data[done:], offset + done
