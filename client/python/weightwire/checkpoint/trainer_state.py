"""A composed checkpoint of a Megatron trainer as one `torch_dist`, weights and optimizer, as megatron-core saves and loads
them: states by parameter (`fully_reshardable`)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from weightwire.checkpoint import composed, native, trees
from weightwire.checkpoint.contents import STATE
from weightwire.checkpoint.formats import Wanted
from weightwire.checkpoint.planner import Plan
from weightwire.checkpoint.sources import PathLike, Source, find
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.torch_dist import STATE_PREFIX
from weightwire.checkpoint.writing import target_layout
from weightwire.memory import TensorMeta

#: By these mcore knows how to load; Megatron-LM reads them out of the checkpoint.
_SHARDING = "fully_reshardable"
_METADATA = {"distrib_optim_sharding_type": _SHARDING, "chained_optim_avoid_prefix": True}
_OPTIMIZER = "optimizer/"


def pieces(folder: Path, to: str, config: Optional[PathLike], leave_out: Sequence[str], wwctl: Optional[str],
           verify: bool) -> Tuple[List[Tuple[Source, Plan]], Wanted]:
    """What to copy out of each part, and the target.

    CheckpointError: another target than torch_dist, or an optimizer that is not megatron-core's.
    """
    parts, _ = composed.read(folder)
    kind, spec = target_layout(to)
    if kind != "torch_dist" or "model" not in parts:
        raise CheckpointError(f"{folder} is composed of {', '.join(parts)}; {kind} holds one of them", code="FAILED_PRECONDITION",
                              remedy=f"convert {folder}/{parts[0]}, or all that Megatron trains by with --to torch_dist")
    model = find(folder / "model", spec=None, config=config, leave_out=leave_out, wwctl=wwctl, verify=verify)
    plan, ranks = model.plan(spec)
    made, metas = [(model, plan)], list(ranks[0])
    for part in parts:
        group = part[len(_OPTIMIZER):]
        if part.startswith(_OPTIMIZER) and group != STATE:
            found = find(folder / part, spec=None, config=model.described(), wwctl=wwctl, verify=verify)
            stepped = {box.name for rank in found.opened.boxes or () for held in rank for box in held.boxes}
            plan, ranks = found.plan(spec, stepped)
            made.append((found, _behind(plan, len(metas))))
            metas += [TensorMeta(f"{STATE_PREFIX}{group}.{meta.name}", meta.dtype, meta.shape) for meta in ranks[0]]
    common = _common(folder / _OPTIMIZER / STATE) if len(made) > 1 else {}
    return made, Wanted(kind, to, spec, [metas], 0, model.described(), common)


def _behind(plan: Plan, first: int) -> Plan:
    """The plan for tensors that come behind `first` others."""
    return Plan(plan.id, [replace(copy, target_tensor=copy.target_tensor + first) for copy in plan.copies])


def _common(place: Path) -> Dict[str, Any]:
    """What mcore keeps beside tensors: of each chained optimizer its own state_dict."""
    opened = native.open_at(place)
    arrays = {name: opened.files.flat(tensor, 0, tensor.count).copy() for name, tensor in opened.ranks[0].items()}
    opened.files.close()
    state = trees.decode(arrays, str(place))
    if not isinstance(state, list) or not state or not all(
            isinstance(one, Mapping) and "param_groups" in one.get("optimizer", {}) for one in state):
        raise CheckpointError(f"{place}: not the state of megatron-core's distributed optimizer", code="FAILED_PRECONDITION",
                              remedy="save it as checkpoint.megatron_optimizer.distributed gives it, or convert the parts")
    saved = [{**one, "param_state_sharding_type": _SHARDING} for one in state]
    return {"optimizer": saved[0] if len(saved) == 1 else dict(enumerate(saved)), "content_metadata": dict(_METADATA)}
