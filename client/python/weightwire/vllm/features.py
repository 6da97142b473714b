"""Which of the parts of vLLM that weightwire uses this vLLM has.

They are asked for one by one, and never by the number of a version: a newer vLLM is tried, with a warning. Where one is missing or
takes other arguments, `changed` names it. The parts that only some versions have are looked up here, too.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
from typing import Any

from weightwire import errors

log = logging.getLogger("weightwire.vllm")
TRIED = ((0, 24), (0, 33))  #: the oldest and the newest version that tests ran with, see docs/support.md
_RELOAD = "vllm.model_executor.model_loader.reload"
_BASE = "vllm.distributed.weight_transfer.base"
#: module, name, with how many arguments it is called (None: it is not called, or inherited from).
_PARTS: tuple[tuple[str, str, int | None], ...] = (
    (_BASE, "WeightTransferEngine", None),
    (_BASE, "WeightTransferInitInfo", None),
    (_BASE, "WeightTransferUpdateInfo", None),
    (f"{_RELOAD}.layerwise", "get_layerwise_info", 1),
    (f"{_RELOAD}.layerwise", "_get_original_loader", 1),
    (f"{_RELOAD}.layerwise", "_place_kernel_tensors", 2),
    (f"{_RELOAD}.layerwise", "_copy_and_restore_kernel_tensors", 2),
    (f"{_RELOAD}.meta", "restore_layer_on_meta", 2),
    (f"{_RELOAD}.meta", "materialize_layer", 2),
    (f"{_RELOAD}.utils", "get_layer_params_buffers", 1),
    (f"{_RELOAD}.utils", "get_layer_tensors", 1),
    (_RELOAD, "initialize_layerwise_reload", 1),
    (_RELOAD, "finalize_layerwise_reload", 2),
    ("vllm.model_executor.layers.quantization.base_config", "QuantizeMethodBase", None),
    ("vllm.model_executor.layers.attention", "Attention", None),
    ("vllm.platforms", "current_platform", None),
)
#: What is kept for each module between loads.
_INFO = ("restore_metadata", "restore_device", "loaded_weights", "kernel_tensors", "reset", "can_load")


@functools.lru_cache(maxsize=None)
def changed() -> tuple[str, ...]:
    """What weightwire needs for an engine and this vLLM has not, or has otherwise."""
    found = [why for part in _PARTS if (why := _differs(*part))]
    if not found:
        info = importlib.import_module(f"{_RELOAD}.types").LayerReloadingInfo
        known = {*dir(info), *getattr(info, "__dataclass_fields__", {})}
        found = [f"{_RELOAD}.types.LayerReloadingInfo has no {name}" for name in _INFO if name not in known]
    return tuple(found)


def _differs(module: str, name: str, arguments: int | None) -> str:
    try:
        part = getattr(importlib.import_module(module), name)
    except ImportError as error:
        return f"{module} cannot be imported ({error})"
    except AttributeError:
        return f"{module} has no {name}"
    if arguments is not None:
        try:
            inspect.signature(part).bind(*[None] * arguments)
        except TypeError:
            return f"{module}.{name} takes other arguments: {inspect.signature(part)}"
    return ""


def version() -> str:
    """vLLM's own word for it."""
    import vllm
    return str(getattr(vllm, "__version__", "of no version"))


def refusal(why: str) -> errors.RefusedError:
    """UNIMPLEMENTED: no later try can do better."""
    return errors.RefusedError(f"this vLLM ({version()}) is not supported: {why}", code="UNIMPLEMENTED",
                               reason="protocol_version", remedy="see docs/support.md for the versions that are")


def check() -> None:
    """RefusedError, with the name of what changed. Warns where this version was never tried."""
    if changed():
        raise refusal("; ".join(changed()))
    _warn_untried(version())


@functools.lru_cache(maxsize=None)
def _warn_untried(number: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", number)
    if found is None or not TRIED[0] <= (int(found[1]), int(found[2])) <= TRIED[1]:
        low, high = (".".join(map(str, end)) for end in TRIED)
        log.warning("weightwire: vLLM %s was never tried with it (%s to %s were); everything that is needed is there, so it is tried "
                    "now", number, low, high)


def is_deferred_attention_layer(module: Any) -> bool:
    """Whether vLLM processes this module's weights after those of all others. vLLM has a name for it since 0.28."""
    from vllm.model_executor.layers import attention
    named = getattr(attention, "is_deferred_attention_layer", None)
    if named is not None:
        return bool(named(module))
    kinds = tuple(getattr(attention, name) for name in ("Attention", "MLAAttention", "MMEncoderAttention") if hasattr(attention, name))
    return isinstance(module, kinds) and callable(getattr(module, "process_weights_after_loading", None))


def has_sessions() -> bool:
    """Whether vLLM tells the engine when an update starts and ends: since 0.25. Before, the worker reloads by itself, unless it is
    told that the weights need no loading."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    return hasattr(WeightTransferEngine, "start_weight_update")


def config_of(model: Any) -> Any:
    """The VllmConfig of a model that is built, where vLLM (0.24) does not give it to the engine."""
    for module in model.modules():
        if (config := getattr(module, "vllm_config", None)) is not None:
            return config
    raise refusal(f"it gives a weight transfer engine no VllmConfig, and no module of {type(model).__name__} has one")
