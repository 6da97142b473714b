"""Adam and AdamW of torch as the content `optimizer`. Needs torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Mapping

import torch

from weightwire.adapter import meta_of
from weightwire.checkpoint.contents import Optimizer
from weightwire.checkpoint.layouts import Explicit, Layout
from weightwire.checkpoint.stored import CheckpointError

_GROUPS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def adam(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], layout: Layout) -> Optimizer:
    """The moments lie as the parameters do: `layout` is the model's. States that do not exist before the first step are made
    when they are loaded.

    parameters: those that the optimizer steps, by local name; sharded ones (DTensor) are saved by what is local
    CheckpointError: parameters were stepped differently often, which no one number says
    """
    shard: Dict[str, torch.Tensor] = {}

    def states() -> Dict[str, Dict[str, Any]]:
        amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
        for parameter in parameters.values():
            state = optimizer.state[parameter]
            state.setdefault("step", torch.zeros((), dtype=torch.float32))
            for group in _GROUPS[:3 if amsgrad else 2]:
                if group not in state:
                    state[group] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
        return {group: {name: _local(optimizer.state[parameter][group]) for name, parameter in parameters.items()}
                for group in _GROUPS[:3 if amsgrad else 2]}

    def scalars() -> Any:
        steps = {name: float(optimizer.state[parameter]["step"]) for name, parameter in parameters.items()}
        if len(set(steps.values())) > 1:
            name = min(steps, key=lambda one: steps[one])
            raise CheckpointError(f"it was stepped {steps[name]:g} times, others {max(steps.values()):g}", tensor=name,
                                  code="FAILED_PRECONDITION", remedy="leave parameters that have no gradient out of the optimizer")
        groups: List[Any] = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return {"step": max(steps.values(), default=0.0), "param_groups": groups}

    def restore(state: Any) -> None:
        if len(state["param_groups"]) != len(optimizer.param_groups):
            raise CheckpointError(f"{len(state['param_groups'])} groups of parameters were saved, the optimizer has "
                                  f"{len(optimizer.param_groups)}", code="FAILED_PRECONDITION", remedy="group them as before")
        for group, saved in zip(optimizer.param_groups, state["param_groups"]):
            group.update(saved)
        for parameter in parameters.values():
            optimizer.state[parameter]["step"] = torch.tensor(state["step"], dtype=torch.float32)

    shard.update({name: _local(parameter) for name, parameter in parameters.items()})
    if isinstance(layout, Explicit):
        held = [one for one in layout.held if one.meta.name in parameters]
        layout = Explicit({one.meta.name: layout.canonical[one.meta.name] for one in held},
                          [replace(one, meta=meta_of(one.meta.name, shard[one.meta.name])) for one in held])
    return Optimizer(layout, states, scalars, restore)


def _local(tensor: Any) -> torch.Tensor:
    """What this rank has of it."""
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()
