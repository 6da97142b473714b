"""A checkpoint that is read: found, opened, its tensors in the order of its layout, and planned from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Container, Dict, List, Optional, Sequence, Tuple, Union

from weightwire.checkpoint import hf, megatron_files, native, torch_dist
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.formats import Opened, bind
from weightwire.checkpoint.layouts import Explicit, Layout, plan_boxes
from weightwire.checkpoint.planner import Plan, Planner, planner_of
from weightwire.checkpoint.stored import CheckpointError
from weightwire.checkpoint.writing import FORMATS
from weightwire.memory import TensorMeta

PathLike = Union[str, "os.PathLike[str]"]


def open_checkpoint(folder: PathLike, group: str = "") -> Opened:
    """Recognises the format and reads descriptions and headers, no weights.

    group: instead of the weights, states of their optimizer by this name ("exp_avg"), where the format has such

    CheckpointError: it is no checkpoint, or a damaged one; sizes are always checked.
    """
    path = Path(folder)
    for module in FORMATS.values():
        if module.found_at(path):
            opened: Opened = module.open_group(path, group) if group and module is torch_dist else module.open_at(path)
            if group and module is not torch_dist:
                raise CheckpointError(f"{path}: {opened.format} has no groups, and so no {group!r}", code="NOT_FOUND",
                                      remedy="name the folder of that group")
            return opened
    raise CheckpointError(f"{path}: no checkpoint", code="NOT_FOUND",
                          remedy="expected model.safetensors or its index, .metadata, mp_rank folders or weightwire.json")


def check(folder: PathLike, group: str = "") -> Opened:
    """Reads every byte and compares with the digests or checksums that the format keeps; safetensors keeps none."""
    opened = open_checkpoint(folder, group)
    if opened.format == "weightwire":
        native.check(opened)
    for tensors in opened.ranks:
        for tensor in tensors.values():
            opened.files.check_crc(tensor)
    return opened


@dataclass
class Source:
    opened: Opened
    bound: Bound
    config: Optional[Path]
    wwctl: Optional[str]

    def described(self) -> Path:
        """The model's config.json."""
        if self.config is None:
            raise CheckpointError(f"{self.opened.files.folder}: no config.json", code="FAILED_PRECONDITION",
                                  remedy="pass it with --config")
        return self.config

    def planner(self) -> Planner:
        return planner_of(self.described().read_text(), self.wwctl)

    def plan(self, spec: str, only: Optional[Container[str]] = None) -> Tuple[Plan, List[List[TensorMeta]]]:
        """From here to all ranks of `spec`; and what they will hold, with the dtypes that are really there. `only`: of boxes,
        the targets that are made of these whole tensors."""
        if not self.opened.boxes:
            plan, layout = self.planner().plan(self.opened.spec, spec), self.planner().layout(spec)
        else:
            boxes = [[held for held in rank if only is None or all(box.name in only for box in held.boxes)]
                     for rank in self.planner().boxes(spec)]
            plan = plan_boxes(self.opened.boxes, dict(enumerate(boxes)))
            layout = [[held.meta for held in rank] for rank in boxes]
        return plan, self._with_dtypes(dict(enumerate(layout)), plan)

    def plan_for(self, layout: Layout, rank: int) -> Tuple[Plan, List[TensorMeta]]:
        """The same for one rank, which plans its own part alone: a fleet's whole plan is no rank's business."""
        if isinstance(layout, str) and not self.opened.boxes:
            plan, metas = self.planner().plan(self.opened.spec, layout, rank), self.planner().rank_layout(layout, rank)
        else:
            held = layout.held if isinstance(layout, Explicit) else self.planner().rank_boxes(layout, rank)
            plan = plan_boxes(self.opened.boxes or self.planner().boxes(self.opened.spec), {rank: held})
            metas = [one.meta for one in held]
        return plan, self._with_dtypes({rank: metas}, plan)[0]

    def _with_dtypes(self, ranks: Dict[int, List[TensorMeta]], plan: Plan) -> List[List[TensorMeta]]:
        dtypes: Dict[Any, str] = {}
        named: Dict[str, str] = {}  # a rank may hold nothing but padding of a tensor
        for copy in plan.copies:
            dtype = self.bound.tensor(copy.source_rank, copy.source_tensor).dtype
            named.setdefault(ranks[copy.target_rank][copy.target_tensor].name, dtype)
            if dtypes.setdefault((copy.target_rank, copy.target_tensor), dtype) != dtype:
                name = ranks[copy.target_rank][copy.target_tensor].name
                raise CheckpointError(f"its parts have different dtypes, {dtype} in {copy.canonical}", tensor=name,
                                      reason="dtype_mismatch", remedy="a conversion copies bits and casts nothing")
        return [[replace(local, dtype=dtypes.get((rank, number), named.get(local.name, local.dtype)))
                 for number, local in enumerate(tensors)] for rank, tensors in ranks.items()]


def find(folder: PathLike, *, spec: Optional[str], config: Optional[PathLike], leave_out: Sequence[str] = (),
         wwctl: Optional[str] = None, verify: bool = False, group: str = "") -> Source:
    """Opens a checkpoint and finds every tensor of its layout. CheckpointError: it has others, or none there."""
    opened = check(folder, group) if verify else open_checkpoint(folder, group)
    described = Path(config) if config else opened.config()
    opened.spec = spec or _without_mtp(opened, described)
    if opened.format == "megatron":
        opened.spec, _ = megatron_files.rank_spec(opened.spec)
    for tensors in opened.ranks:
        for name in [name for name in tensors if any(fnmatchcase(name, glob) for glob in leave_out)]:
            opened.left_out = [*opened.left_out, name]
            del tensors[name]
    made = Source(opened, Bound(opened.files, []), described, wwctl)
    layout = ([[held.meta for held in rank if held.meta.name in tensors] for rank, tensors in zip(opened.boxes, opened.ranks)]
              if opened.boxes else made.planner().layout(opened.spec))
    if opened.boxes:
        opened.boxes = [[held for held in rank if held.meta.name in tensors]
                        for rank, tensors in zip(opened.boxes, opened.ranks)]
    made.bound = bind(opened, layout, "source")
    return made


def _without_mtp(opened: Opened, config: Optional[Path]) -> str:
    """The layout, and that it has no MTP layers where config.json has some and the files none: what transformers saves, and
    trainers that do not train them."""
    words = opened.spec.partition(":")[2].split(",")
    if config is None or opened.boxes or opened.format == "weightwire" or any(word.startswith("mtp=") for word in words):
        return opened.spec
    said = hf.read_json(config)
    layers, extra = said.get("num_hidden_layers"), said.get("num_nextn_predict_layers")
    here = "mtp." if opened.format != "hf" else f"model.layers.{layers}."
    if not extra or any(here in name for tensors in opened.ranks for name in tensors):
        return opened.spec
    return f"{opened.spec}{',' if ':' in opened.spec else ':'}mtp=none"
