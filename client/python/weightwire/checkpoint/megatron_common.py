"""What megatron-core keeps beside tensors in a `torch_dist` checkpoint, the same on all ranks (`torch_dist.read_common`). Of its
pickle only plain values are taken: numbers, text, and lists and mappings of them."""

from __future__ import annotations

from typing import Any, Dict, List, Optional


def iteration(common: Dict[Any, Any]) -> Optional[int]:
    """That it was saved at, where a trainer said so."""
    found = common.get("iteration")
    return found if type(found) is int else None


def optimizers(common: Dict[Any, Any]) -> Optional[List[Dict[str, Any]]]:
    """Of each chained optimizer its state_dict: parameter groups, and the step in each. None: there are none, or one holds
    what is no plain value, such as a gradient scaler's tensors."""
    found = common.get("optimizer")
    if not isinstance(found, dict) or not found:
        return None
    chained = [found] if "optimizer" in found else [found.get(number) for number in range(len(found))]
    made = [one for one in chained if isinstance(one, dict) and _is_plain(one) and _has_groups(one.get("optimizer"))]
    return made if len(made) == len(chained) else None


def _has_groups(state: Any) -> bool:
    groups = state.get("param_groups") if isinstance(state, dict) else None
    return isinstance(groups, list) and bool(groups) and all(isinstance(group, dict) for group in groups)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) and _is_plain(one) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))
