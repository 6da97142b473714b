"""megatron-core's distributed optimizer as the content `optimizer`: every rank saves the ranges that it owns, nothing is
gathered, and they load under any other layout, data-parallel size included. Needs torch and megatron-core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import torch

from weightwire.boxes import Held, cut
from weightwire.checkpoint.contents import Optimizer
from weightwire.checkpoint.layouts import Explicit
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.stored import CheckpointError
from weightwire.megatron_state import unwrap
from weightwire.memory import TensorMeta

#: By these mcore finds a group of parameters again; NeMo puts pre_ before some.
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
#: As mcore calls them in a torch_dist checkpoint of `fully_reshardable` optimizers; `param` is the fp32 master.
MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")


def distributed(optimizer: Any, models: Any, spec: str, rank: int, config: str, *, wwctl: Optional[str] = None) -> Optimizer:
    """optimizer: what `get_megatron_optimizer` gave, of `use_distributed_optimizer`; models: this rank's chunks
    spec:      of the model, e.g. `weightwire.megatron.parallel_spec(models, config)`; config: config.json's text

    Groups are `param` (the fp32 masters), `exp_avg` and `exp_avg_sq`; besides, mcore's own `state_dict` (step, groups'
    hyperparameters). Padding rows of the vocabulary are not carried.
    CheckpointError: an optimizer of another kind; says which.
    """
    chained = list(getattr(optimizer, "chained_optimizers", [optimizer]))
    for one in chained:
        _check(one)
    names = {id(parameter): name for name, parameter in _parameters(models)}
    layout = {held.meta.name: held for held in planner_of(config, wwctl).rank_boxes(spec, rank)}
    owned: Dict[str, Tuple[Any, Any]] = {}
    held: List[Held] = []
    for one in chained:
        for parameter, begin, end, master in _ranges(one):
            name = names[id(parameter)]
            part = cut(layout[name], begin, end)
            held.append(replace(part, meta=replace(part.meta, dtype="F32")))
            owned[name] = (one, master)

    def groups() -> Mapping[str, Mapping[str, torch.Tensor]]:
        made: Dict[str, Dict[str, torch.Tensor]] = {group: {} for group in (MASTER, *MOMENTS)}
        for name, (one, master) in owned.items():
            state = one.optimizer.state[master]
            if _steps_by_parameter(one):
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
            made[MASTER][name] = master.detach()
            for group in MOMENTS:
                made[group][name] = state.setdefault(group, torch.zeros_like(master).detach())
        return made

    def restore(saved: Any) -> None:
        if len(saved) != len(chained):
            raise CheckpointError(f"{len(saved)} chained optimizers were saved, this rank has {len(chained)}",
                                  code="FAILED_PRECONDITION", rank=str(rank), remedy="group experts' parameters as before")
        for one, state in zip(chained, saved):
            _restore(one, state, rank)

    return Optimizer(Explicit(_canonical(config, wwctl, spec), held), groups,
                     lambda: [one.state_dict() for one in chained], restore, restore)


def _check(one: Any) -> None:
    """CheckpointError: this is no plain distributed optimizer."""
    settings = getattr(one, "config", None)
    if not hasattr(one, "gbuf_ranges") or getattr(one.ddp_config, "use_megatron_fsdp", False):
        why = f"a {type(one).__name__} shards no flat buffers"
    elif getattr(settings, "use_precision_aware_optimizer", False):
        why = "its states are scaled (use_precision_aware_optimizer)"
    elif getattr(settings, "optimizer_cpu_offload", False):
        why = "a part of its states lies in another optimizer (optimizer_cpu_offload)"
    else:
        return
    raise CheckpointError(f"megatron-core's optimizer cannot be saved: {why}", code="UNIMPLEMENTED",
                          remedy="use_distributed_optimizer with full-precision states, or save it with mcore's own "
                                 "dist_checkpointing")


def _parameters(models: Any) -> Iterator[Tuple[str, Any]]:
    """Themselves (an optimizer knows them by identity), by the scheme's names."""
    chunks = [models] if isinstance(models, torch.nn.Module) else list(models)
    for v, chunk in enumerate(chunks):
        for name, parameter in unwrap(chunk).named_parameters():
            yield (f"vpp{v}." if len(chunks) > 1 else "") + name, parameter


def _ranges(one: Any) -> Iterator[Tuple[Any, int, int, Any]]:
    """(parameter, first and last element of it that this rank owns, the fp32 master of those)."""
    for buckets in (buckets for by_dtype in one.gbuf_ranges for buckets in by_dtype.values()):
        for parameter, found in ((p, f) for bucket in buckets for p, f in bucket["param_map"].items()):
            group, order = one.model_param_group_index_map[parameter]
            yield parameter, found["param"].start, found["param"].end, one.optimizer.param_groups[group]["params"][order]


def _steps_by_parameter(one: Any) -> bool:
    """torch's Adam counts steps in each state, Apex's and Transformer Engine's in the groups."""
    return isinstance(one.optimizer, (torch.optim.Adam, torch.optim.AdamW))


def _restore(one: Any, saved: Any, rank: int) -> None:
    groups: Sequence[Any] = saved["optimizer"]["param_groups"]
    known = {_kind(group): group for group in groups}  # in whatever order, and with those that this rank does not need
    for group in one.optimizer.param_groups:
        values = known.get(_kind(group))
        if values is None or len(known) < len(groups):
            raise CheckpointError(f"no group of parameters was saved, or several were, that are to the optimizer what "
                                  f"{dict(zip(_IDENTIFIERS, _kind(group)))} are", code="FAILED_PRECONDITION", rank=str(rank),
                                  remedy="group them as before")
        by_parameter = _steps_by_parameter(one)
        group.update({key: value for key, value in values.items() if key != "params" and not (by_parameter and key == "step")})
        for master in group["params"] if by_parameter else ():
            one.optimizer.state[master]["step"] = torch.tensor(float(values["step"]), dtype=torch.float32)
    if saved.get("grad_scaler") and one.grad_scaler:
        one.grad_scaler.load_state_dict(saved["grad_scaler"])


def _kind(group: Mapping[str, Any]) -> Tuple[Any, ...]:
    return tuple(group.get(key, group.get(f"pre_{key}")) for key in _IDENTIFIERS)


def _canonical(config: str, wwctl: Optional[str], spec: str) -> Dict[str, TensorMeta]:
    """The whole tensors that an optimizer steps, the same on every rank: no buffers."""
    planner = planner_of(config, wwctl)
    stepped = {box.name for rank in planner.boxes(spec) for held in rank if not held.meta.name.endswith(".expert_bias")
               for box in held.boxes}
    return {meta.name: replace(meta, dtype="F32") for meta in planner.layout("hf")[0] if meta.name in stepped}
