"""What a trainer wants saved and loaded, validated when it is read: a pair of options that cannot work is refused there, and
not at the end of the first epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Mapping, Tuple

from weightwire.checkpoint.stored import CheckpointError

#: The contents of a checkpoint, and the back ends that each can be saved with, the first by default.
BACKENDS: Dict[str, Tuple[str, ...]] = {
    "model": ("weightwire", "hf"), "hf_model": ("hf",), "optimizer": ("weightwire",), "extra": ("weightwire",)}
#: Why a back end cannot save what it is chosen for.
_IMPOSSIBLE = {
    ("optimizer", "hf"): "safetensors of Hugging Face have no place for optimizer states",
    ("extra", "hf"): "safetensors of Hugging Face have no place for schedules and random states",
    ("hf_model", "weightwire"): "hf_model is what Hugging Face's libraries read; the content of weightwire's format is 'model'",
    ("model", "torch_dist"): "torch writes it whole: save as weightwire, and convert",
    ("model", "megatron"): "torch writes it whole: save as weightwire, and convert",
    ("optimizer", "torch_dist"): "it can be loaded from there (load_from), not saved"}
_DEFAULT = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class Options:
    """`read` makes them of what a configuration file says.

    save_contents, load_contents: of `model` (as the ranks hold it), `hf_model` (whole tensors, Hugging Face's names),
                   `optimizer` and `extra`
    backends:      how a content is saved, where not by its first back end
    load_from:     folders, in any format, that contents are loaded from instead of from what this job saved
    async_save:    a save returns when the tensors are copied
    keep_last:     of checkpoints whose names differ in the number at the end, that many are kept, and their bases; 0: all
    verify:        a load checks every digest of what it opens before the first byte
    """

    save_contents: Tuple[str, ...] = _DEFAULT
    load_contents: Tuple[str, ...] = _DEFAULT
    backends: Mapping[str, str] = field(default_factory=dict)
    load_from: Mapping[str, str] = field(default_factory=dict)
    async_save: bool = False
    keep_last: int = 0
    verify: bool = False

    def __post_init__(self) -> None:
        wrong = [*self._kinds(), *self._pairs()]
        if wrong:
            raise CheckpointError("checkpoint options: " + "; ".join(wrong),
                                  remedy="see docs/checkpoints.md, Composed checkpoints")

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> "Options":
        """CheckpointError names every key and every pair that is wrong."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(str(key) for key in options if key not in known)
        if unknown:
            raise CheckpointError(f"checkpoint options: {', '.join(unknown)} not known, known are {', '.join(sorted(known))}")
        made = dict(options)
        for name in ("save_contents", "load_contents"):
            if name in made and not isinstance(made[name], str):
                made[name] = tuple(made[name] or ())
        for name in ("backends", "load_from"):
            made[name] = made.get(name) or {}
        return cls(**made)

    def backend(self, content: str) -> str:
        return self.backends.get(content, BACKENDS[content][0])

    def folder(self, content: str) -> str:
        """Where a content lies below the checkpoint: what is saved as hf is `hf_model`, whichever way it was asked for."""
        return "hf_model" if self.backend(content) == "hf" else content

    def _kinds(self) -> List[str]:
        wrong = []
        for name in ("save_contents", "load_contents"):
            chosen = getattr(self, name)
            if isinstance(chosen, str) or not all(isinstance(content, str) for content in chosen):
                wrong.append(f"{name} must be a list of names")
            else:
                wrong += [f"{name} has {content!r}, known are {', '.join(BACKENDS)}" for content in chosen if content not in BACKENDS]
                wrong += [f"{name} has {content!r} twice" for content in sorted(set(chosen)) if chosen.count(content) > 1]
        wrong += [f"{name} must be true or false" for name in ("async_save", "verify") if not isinstance(getattr(self, name), bool)]
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            wrong.append("keep_last must be a whole number, 0 to keep all")
        for name in ("backends", "load_from"):
            chosen = getattr(self, name)
            if not isinstance(chosen, Mapping) or not all(isinstance(v, str) for v in chosen.values()):
                wrong.append(f"{name} must name one for each content")
            else:
                wrong += [f"{name} has {content!r}, known are {', '.join(BACKENDS)}" for content in chosen if content not in BACKENDS]
        return wrong

    def _pairs(self) -> List[str]:
        if self._kinds():
            return []
        save, load, wrong = set(self.save_contents), set(self.load_contents), []
        for content, backend in self.backends.items():
            if backend not in BACKENDS[content]:
                why = _IMPOSSIBLE.get((content, backend), f"known are {', '.join(BACKENDS[content])}")
                wrong.append(f"{content} cannot be saved as {backend}: {why}")
            elif content not in save:
                wrong.append(f"backends has {content}, which is not in save_contents")
        if wrong:
            return wrong
        if {"model", "hf_model"} <= save and self.backend("model") == "hf":
            wrong.append("model as hf and hf_model are the same files: drop one of them from save_contents")
        if {"model", "hf_model"} <= load:
            wrong.append("load_contents has model and hf_model, and both fill the same parameters: choose one")
        if "optimizer" in load and not {"model", "hf_model"} & load:
            wrong.append("load_contents has the optimizer without a model: its states would belong to other weights")
        saved = {self.folder(content) for content in save}
        for content in self.load_contents:
            if content not in self.load_from and self.folder(content) not in saved:
                wrong.append(f"{content} is to be loaded and never saved: add it to save_contents, or name a load_from")
        wrong += [f"load_from has {content}, which is not in load_contents" for content in self.load_from if content not in load]
        if "extra" in self.load_from:
            wrong.append("extra belongs to the job that saved it: it has no load_from")
        return wrong
