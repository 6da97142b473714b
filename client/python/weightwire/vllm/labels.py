"""Which version answered: vLLM's own labels of output tokens, read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from weightwire import errors

_STARTED_WITH = "default"  # vLLM's label before anybody has set one


@dataclass(frozen=True)
class Span:
    """Output tokens `begin` to `end` (not included) were computed with the weights of `version`."""

    version: int | None  #: None: the weights that the engine was started with
    begin: int
    end: int
    lineage: int = 1  #: of `version`, as Offer.lineage


def label(version: int, lineage: int = 1) -> str:
    """What EngineDriver tells vLLM: "7", or "2/7" where a trainer that went back to an earlier step publishes 7 again."""
    return str(version) if lineage == 1 else f"{lineage}/{version}"


def spans(completion: Any) -> tuple[Span, ...]:
    """The versions that a finished `CompletionOutput` was answered by, in order; its tokens are covered without a gap. One
    span, unless requests go on over an update (pause mode "keep").

    RefusedError   this vLLM labels no outputs
    NotReadyError  the request has not ended, or its label is none of EngineDriver's
    """
    if not hasattr(completion, "weight_versions"):
        raise errors.RefusedError("this vLLM labels no outputs: CompletionOutput has no weight_versions", code="UNIMPLEMENTED",
                                  reason="protocol_version", remedy="see docs/vllm.md for the versions that do")
    if completion.weight_versions is None:
        raise errors.NotReadyError("vLLM labels an output when its request ends", code="FAILED_PRECONDITION",
                                   remedy="ask the last output of the request")
    return tuple(_span(span.version, span.start, span.end) for span in completion.weight_versions)


def _span(text: str, begin: int, end: int) -> Span:
    if text == _STARTED_WITH:
        return Span(None, begin, end)
    named = re.fullmatch(r"(?:([0-9]+)/)?([0-9]+)", text)
    if named is None:
        raise errors.NotReadyError(f"label {text!r} is none of weightwire's: somebody else has set it", code="FAILED_PRECONDITION",
                                   remedy="let the EngineDriver alone call update_weight_version")
    return Span(int(named[2]), begin, end, int(named[1] or 1))
