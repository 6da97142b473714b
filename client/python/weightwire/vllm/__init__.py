"""weightwire in vLLM: `weight_transfer_config={"backend": "weightwire"}` and an `EngineDriver`. See docs/vllm.md."""

from __future__ import annotations

from typing import Any

__all__ = ["Deadlines", "EngineDriver", "InstallError", "Serving", "register"]


def register() -> None:
    """Entry point of vLLM's plug-in group `vllm.general_plugins`; called in each of its processes, any number of
    times. Names the back end and imports nothing of it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    try:
        WeightTransferEngineFactory.register_engine("weightwire", "weightwire.vllm.engine", "WeightwireEngine")
    except ValueError:  # already registered
        pass


def __getattr__(name: str) -> Any:
    if name in __all__:
        from weightwire.vllm import driver
        return getattr(driver, name)
    raise AttributeError(name)
