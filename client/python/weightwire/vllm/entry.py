"""What vLLM makes for `weight_transfer_config={"backend": "weightwire"}`. It never raises: a vLLM that lacks something that weightwire
needs starts and serves, and the driver's `init` is told what is missing."""

from __future__ import annotations

import logging
from typing import Any, Mapping

from weightwire import errors
from weightwire.vllm.link import Link

log = logging.getLogger("weightwire.vllm")


def WeightwireEngine(*made_with: Any, **named: Any) -> Any:  # It stands in the place of a class
    """The engine's side, or, where that cannot be made, one that only says why."""
    try:
        from weightwire.vllm import engine
        return engine.WeightwireEngine(*made_with, **named)
    except Exception as error:
        why = _why(error)
        log.error("weightwire: this engine takes no weights from weightwire, and starts without it: %s", why)
        return Unsupported(why)


def _why(error: Exception) -> str:
    """The names of all that changed, rather than the first that an import met."""
    try:
        from weightwire.vllm import features
        if features.changed():
            return f"vLLM {features.version()}: {'; '.join(features.changed())}"
    except Exception as probing:
        log.debug("weightwire: %s", probing)
    return f"{type(error).__name__}: {error}"


class Unsupported:
    """In the place of an engine: every driver is told `why`, and every update refused with it. Uses nothing of vLLM."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, why: str):
        self.why = why

    def parse_init_info(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return given

    def init_transfer_engine(self, given: Mapping[str, Any]) -> None:
        """As a rank's first word to its driver (weightwire.vllm.link); rank 0's refusal is that of all."""
        try:
            self._link = Link(given["link"], given["link_key"], lambda do, message: {}, timeout=5)
            self._link.send({"rank": 0, "hello": {"world_size": 1, "interrupted": False, "unsupported": True, "error": self.why}})
        except (errors.WeightwireError, KeyError) as error:
            log.warning("weightwire: the driver was not told: %s", error)

    def _refuse(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"weightwire: {self.why}")

    start_weight_update = update_weights = receive_weights = finish_weight_update = _refuse

    def set_weight_update_target(self, *_: Any, **__: Any) -> None:
        """Nothing is ever updated."""

    reset_weight_update_target = drain_pending = shutdown = set_weight_update_target
