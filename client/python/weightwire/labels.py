"""Which version answered: the engines' own labels of output tokens, written and read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Iterable

from weightwire import errors

_STARTED_WITH = "default"  # what vLLM and SGLang say before anybody has set a label


@dataclass(frozen=True)
class Span:
    """Output tokens `begin` to `end` (not included) were computed with the weights of `version`."""

    version: int | None  #: None: the weights that the engine was started with
    begin: int
    end: int
    lineage: int = 1  #: of `version`, as Offer.lineage


def label(version: int, lineage: int = 1) -> str:
    """What an engine is told: "7", or "2/7" where a trainer that went back to an earlier step publishes 7 again."""
    return str(version) if lineage == 1 else f"{lineage}/{version}"


def spans(completion: Any) -> tuple[Span, ...]:
    """The versions that a finished request was answered by, in order; its tokens are covered without a gap. One span, unless
    requests go on over an update.

    completion: vLLM's CompletionOutput, or the `meta_info` of an answer of SGLang

    RefusedError   this engine's version labels no outputs
    NotReadyError  the request has not ended, or a label is none of weightwire's
    """
    of_vllm = not isinstance(completion, dict)
    if of_vllm and not hasattr(completion, "weight_versions"):
        raise errors.RefusedError(f"this engine labels no outputs: {type(completion).__name__} has no weight_versions",
                                  code="UNIMPLEMENTED", reason="protocol_version",
                                  remedy="docs/vllm.md and docs/sglang.md name the versions that do")
    found: Iterable[Any] | None = completion.weight_versions if of_vllm else completion.get("weight_versions")
    if found is None:
        raise errors.NotReadyError("an output is labelled when its request ends", code="FAILED_PRECONDITION",
                                   remedy="ask the last output of the request; of SGLang, since 0.5.23")
    return tuple(_span(span) for span in found)


def _span(span: Any) -> Span:
    text, begin, end = (span["version"], span["start"], span["end"]) if isinstance(span, dict) else \
        (span.version, span.start, span.end)
    if text == _STARTED_WITH:
        return Span(None, begin, end)
    named = re.fullmatch(r"(?:([0-9]+)/)?([0-9]+)", text)
    if named is None:
        raise errors.NotReadyError(f"label {text!r} is none of weightwire's: somebody else has set it", code="FAILED_PRECONDITION",
                                   remedy="let weightwire alone set the engine's weight version")
    return Span(int(named[2]), begin, end, int(named[1] or 1))
