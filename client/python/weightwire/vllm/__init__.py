"""weightwire in vLLM: `weight_transfer_config={"backend": "weightwire"}` and an `EngineDriver`. See docs/vllm.md."""

from __future__ import annotations

import importlib
import logging
from typing import Any

_HOME = {"Adapter": "adapter", "AdapterDriver": "adapter", "Colocated": "colocated", "Deadlines": "replace", "EngineDriver": "driver",
         "InstallError": "driver", "Serving": "driver", "Span": "weightwire.labels", "spans": "weightwire.labels"}
__all__ = [*_HOME, "register"]


def register() -> None:
    """Entry point of vLLM's plug-in group `vllm.general_plugins`; called in each of its processes, any number of
    times. Names the back end and imports nothing of it. What it raised would keep vLLM from starting, so it raises nothing."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
        try:
            WeightTransferEngineFactory.register_engine("weightwire", "weightwire.vllm.entry", "WeightwireEngine")
        except ValueError:  # already registered
            pass
    except Exception as error:
        logging.getLogger("weightwire.vllm").error(
            "weightwire: this vLLM is not known to it, and starts without it: %s: %s", type(error).__name__, error)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        home = _HOME[name]
        return getattr(importlib.import_module(home if "." in home else f"weightwire.vllm.{home}"), name)
    raise AttributeError(name)
