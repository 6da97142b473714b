"""Checkpoints of a whole trainer, composed of contents: every rank saves its part of each, and all of it exists or none.

>>> state = checkpoint.State(checkpoint.Options.read(config), contents, rank=rank, world_size=4)
>>> state.save("run/global_step_100", attempt="a1").result()
>>> state.load("run/global_step_100")

A folder of it holds a checkpoint for each content (`model`, `hf_model`, `optimizer/exp_avg`, …), each of which is read
and converted like any other, and `weightwire_state.json`, written last.
"""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, List, Mapping, Optional

from weightwire.checkpoint import composed, export, native, restore, sharded, trees
from weightwire.checkpoint.attempts import Attempt, prune
from weightwire.checkpoint.contents import STATE, Contents, Tensors, described, group_names
from weightwire.checkpoint.layouts import Layout
from weightwire.checkpoint.options import Options
from weightwire.checkpoint.sharded import Held
from weightwire.checkpoint.sources import PathLike
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import check_free


@dataclass(frozen=True)
class _Part:
    """One checkpoint of the composed one, as this rank has it."""

    name: str
    layout: Layout
    tensors: Mapping[str, Held]
    config: str

    @property
    def coded(self) -> bool:
        """Whether it is kept as what changed since a base: not trees, whose texts grow and shrink, nor what others read."""
        return self.layout != composed.PER_RANK and self.name != "hf_model"


class State:
    """What a trainer saves and loads by. CheckpointError: the options name a content that `contents` has not."""

    def __init__(self, options: Options, contents: Contents, *, rank: int, world_size: int, timeout: float = 600.0,
                 shard_bytes: int = 5_000_000_000, wwctl: Optional[str] = None):
        contents.check(options.save_contents, "save_contents")
        contents.check(options.load_contents, "load_contents")
        self._options, self._contents, self._rank, self._world_size = options, contents, rank, world_size
        self._timeout, self._shard_bytes, self._wwctl = timeout, shard_bytes, wwctl

    def save(self, folder: PathLike, *, attempt: str, resume: bool = False, base: Optional[PathLike] = None) -> "Future[None]":
        """Every rank calls it, and awaits what it returns. Without `async_save` that is done already; with it the tensors are
        copied (once this rank's bytes) and may change, and it must be awaited before the process ends.

        attempt, resume: as those of `save_rank`. On rank 0 it is done when the checkpoint is whole.
        base: an earlier save of such contents under the same layout: of `model` and the optimizer's groups what changed since
        it is kept; `hf_model` and trees are kept whole.
        CheckpointError, DeadlineError, OSError: nothing has the folder's name; what was saved before is as it was.
        """
        one = Attempt(Path(os.path.abspath(folder)), attempt, self._rank, time.monotonic() + self._timeout)
        older = native.base_at(base, one.final)
        parts = self._parts()
        if self._options.async_save:
            parts = [replace(part, tensors={name: sharded.copied(t) for name, t in part.tensors.items()}) for part in parts]
            return sharded.later(self._write, one, parts, resume, older)
        self._write(one, parts, resume, older)
        done: "Future[None]" = Future()
        done.set_result(None)
        return done

    def load(self, folder: PathLike) -> restore.Loaded:
        """Every rank calls it, for itself: fills the tensors of `load_contents` in place, whatever layout they were saved
        under, then gives back what is no tensor. Nothing is sent between ranks.

        CheckpointError: refused, a content before its first byte; names rank and tensor.
        """
        return restore.load_contents(Path(os.path.abspath(folder)), self._options, self._contents, self._rank,
                                     self._world_size, self._wwctl)

    def _parts(self) -> List[_Part]:
        """What this rank saves, as it is now. The model's config has its own attributes again afterwards."""
        made: List[_Part] = []
        save, contents, config = self._options.save_contents, self._contents, "{}"
        if contents.model:
            with described(contents.model) as config:
                tensors = self._held(contents.model.tensors()) if {"model", "hf_model"} & set(save) else {}
            made += [_Part(self._options.folder(name), contents.model.layout, tensors, config)
                     for name in ("model", "hf_model") if name in save]
        if contents.optimizer and "optimizer" in save:
            groups = contents.optimizer.groups()
            made += [_Part(f"optimizer/{name}", contents.optimizer.layout, self._held(groups[name]), config)
                     for name in group_names(groups)]
            made.append(self._tree(f"optimizer/{STATE}", contents.optimizer.state() if self._rank == 0 else None))
        if contents.extra and "extra" in save:
            made.append(self._tree(composed.SHARED, contents.extra.shared() if self._rank == 0 else None))
            made.append(self._tree(composed.OWN, contents.extra.own()))
        return made

    def _held(self, tensors: Tensors) -> Mapping[str, Held]:
        return {name: sharded.held(name, tensor, self._rank) for name, tensor in tensors.items()}

    def _tree(self, name: str, tree: Any) -> _Part:
        return _Part(name, composed.PER_RANK, self._held(trees.encode(tree)), "{}")

    def _write(self, one: Attempt, parts: List[_Part], resume: bool, base: Optional[Path]) -> None:
        begun = resume and one.rank != 0 and one.partial.is_dir()  # looked at first: rank 0 may give it the other name at any time
        if not begun and resume and composed.found_at(one.final):
            self._write_parts(one.final, one, parts, resume, base)  # there is nothing to do but to compare
        else:
            if not begun:
                check_free(one.final)
                if base is not None and one.rank == 0:
                    self._check_base(one, parts, base)
                one.begin(resume)
            self._write_parts(one.partial, one, parts, resume, base)
            if one.rank == 0:
                manifest = composed.manifest(one.partial, [part.name for part in parts], self._world_size)
                one.put(one.partial / composed.MANIFEST, json.dumps(manifest, indent=1))
                one.finish()
        if one.rank == 0 and self._options.keep_last:
            prune(one.final, self._options.keep_last, composed.MANIFEST)

    def _check_base(self, one: Attempt, parts: List[_Part], base: Path) -> None:
        """CheckpointError: before anything of the save is there."""
        if not composed.found_at(base):
            raise CheckpointError(f"{base} has no {composed.MANIFEST}: State.save did not write it, or it is not complete",
                                  code="FAILED_PRECONDITION", remedy="wait for its own save on rank 0 before one that names it begins")
        there, coded = composed.read(base)[0], [part for part in parts if part.coded]
        missing = [part.name for part in coded if part.name not in there]
        if missing or not coded:
            raise CheckpointError(f"{base} was saved without {missing[0]}" if missing else
                                  "nothing of save_contents is kept as what changed", code="FAILED_PRECONDITION",
                                  remedy="save without a base")
        for part in coded:
            sharded.open_base(one, part.layout, self._world_size, part.tensors, base / part.name)

    def _write_parts(self, where: Path, whole: Attempt, parts: List[_Part], resume: bool, base: Optional[Path]) -> None:
        attempts = [Attempt(where / part.name, whole.name, whole.rank, whole.end, whole.final / part.name) for part in parts]
        for part, one in zip(parts, attempts):
            if part.name == "hf_model":
                export.export_rank(one, part.layout, self._world_size, part.tensors, part.config, resume, self._shard_bytes,
                                   self._wwctl)
            else:
                sharded.write_part(one, part.layout, self._world_size, part.tensors, resume,
                                   base / part.name if base is not None and part.coded else None)
        for part, one in zip(parts, attempts):  # the others are waited for when everything of this rank is written
            if whole.rank == 0 and part.name != "hf_model":
                sharded.finish(one, part.layout, self._world_size, part.config, resume)
