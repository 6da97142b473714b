"""A checkpoint that is read: found, opened, its tensors in the order of its layout, and planned from."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Container, Dict, List, Optional, Sequence, Set, Tuple, Union

import numpy as np

from weightwire.checkpoint import hf, megatron_files, native, torch_dist
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.formats import CONFIG, Lenience, Opened, bind
from weightwire.checkpoint.layouts import Explicit, Layout, plan_boxes
from weightwire.checkpoint.library import ALL_RANKS
from weightwire.checkpoint.planner import Plan, Planner, planner_of
from weightwire.checkpoint.rest import Rest, joined, lacking_names, layers_of, summary
from weightwire.checkpoint.stored import CheckpointError, Stored
from weightwire.checkpoint.writing import FORMATS
from weightwire.memory import TensorMeta, dtype_bytes

PathLike = Union[str, "os.PathLike[str]"]
log = logging.getLogger("weightwire")
_COPY = re.compile(r".*layers\.\d+\.(embed_tokens|shared_head\.head)\.weight")
_COMPARED_BYTES = 8 << 20


def open_checkpoint(folder: PathLike, group: str = "") -> Opened:
    """Recognises the format and reads descriptions and headers, no weights.

    group: instead of the weights, states of their optimizer by this name ("exp_avg"), where the format has such

    CheckpointError: it is no checkpoint, or a damaged one; sizes are always checked.
    """
    path = Path(folder)
    for name, module in FORMATS.items():
        if module.found_at(path):
            opened: Opened = module.open_group(path, group) if group and module is torch_dist else module.open_at(path)
            if group and module is not torch_dist:
                raise CheckpointError(f"{path}: {opened.format} has no groups, and so no {group!r}", code="NOT_FOUND",
                                      remedy="name the folder of that group")
            others = [other for other, one in FORMATS.items() if other != name and one.found_at(path)]
            if others:
                opened.notes.append(f"the folder holds a checkpoint in {name} and one in {', '.join(others)}: {name} is read")
            return opened
    if (other := hf.other_weights(path)) is not None:
        raise CheckpointError(f"{path}: no checkpoint that is read here: {other[0]}", code="NOT_FOUND", remedy=other[1])
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
    opened.files.check_unchanged()
    return opened


@dataclass
class Source:
    opened: Opened
    bound: Bound
    config: Optional[Path]
    wwctl: Optional[str]
    #: Where that is taken from which the checkpoint lacks.
    rest: Optional[Rest] = None

    def described(self) -> Path:
        """The model's config.json."""
        if self.config is None:
            raise CheckpointError(f"{self.opened.files.folder}: no config.json", code="FAILED_PRECONDITION",
                                  remedy="pass it with --config")
        return self.config

    def planner(self) -> Planner:
        return planner_of(self.described().read_text(), self.wwctl)

    def plan(self, spec: str, only: Optional[Container[str]] = None) -> Tuple[Plan, List[List[TensorMeta]]]:
        """From here to all ranks of `spec`; and what they will hold, with the dtypes that are really there: without what
        `spec` leaves out. `only`: of boxes, the targets that are made of these whole tensors."""
        gone, partly = self._filtered(spec)
        for rank, names in enumerate(partly):
            for name, part in names.items():
                raise CheckpointError(f"'{spec}' leaves {part} out of it, and keeps the rest: what would be written there?",
                                      code="FAILED_PRECONDITION", rank=str(rank), tensor=name,
                                      remedy="leave out all that lies in one tensor of the target, or nothing")
        if not self.opened.boxes:
            plan, layout = self._planned(spec), self.planner().layout(spec)
        else:
            boxes = [[held for held in rank if only is None or all(box.name in only for box in held.boxes)]
                     for rank in self.planner().boxes(spec)]
            plan = plan_boxes(self.opened.boxes, dict(enumerate(boxes)))
            layout = [[held.meta for held in rank] for rank in boxes]
        return _without(plan, self._with_dtypes(dict(enumerate(layout)), plan), gone)

    def plan_for(self, layout: Layout, rank: int) -> Tuple[Plan, List[TensorMeta]]:
        """The same for one rank, which plans its own part alone: a fleet's whole plan is no rank's business. What the layout
        leaves out is there, and nothing is copied to it."""
        if isinstance(layout, str) and not self.opened.boxes:
            plan, metas = self._planned(layout, rank), self.planner().rank_layout(layout, rank)
        else:
            held = layout.held if isinstance(layout, Explicit) else self.planner().rank_boxes(layout, rank)
            if self.rest:
                raise _no_boxes(self.opened)
            plan = plan_boxes(self.opened.boxes or self.planner().boxes(self.opened.spec), {rank: held})
            metas = [one.meta for one in held]
        return plan, self._with_dtypes({rank: metas}, plan)[0]

    def skipped(self, layout: Layout, rank: int) -> Container[str]:
        """The rank's tensors that the layout leaves out."""
        gone, _ = self._filtered(layout)
        return gone[rank] if gone else ()

    def _filtered(self, layout: Layout) -> Tuple[List[Set[str]], List[Dict[str, str]]]:
        if not isinstance(layout, str):
            return [], []
        found = self.planner().filtered(layout)
        return found.gone, found.partly

    def _planned(self, spec: str, rank: int = ALL_RANKS) -> Plan:
        try:
            own = self.planner().plan(self.opened.spec, spec, rank)
        except CheckpointError as error:
            if error.reason == "unowned_element":
                error.remedy = (f"'{self.opened.spec}' does not hold it: leave the same out of the target (mtp=none, skip=NAME), "
                                "or take it from the original model with --missing-from FOLDER")
            raise
        return self.rest.completed(own, self.planner().plan(self.rest.spec, spec, rank)) if self.rest else own

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


def _without(plan: Plan, ranks: List[List[TensorMeta]], gone: Sequence[Container[str]]) -> Tuple[Plan, List[List[TensorMeta]]]:
    """Without the targets that are `gone`, and numbered anew."""
    if not gone:
        return plan, ranks
    kept = [[number for number, meta in enumerate(rank) if meta.name not in out] for rank, out in zip(ranks, gone)]
    places = [{old: new for new, old in enumerate(numbers)} for numbers in kept]
    copies = [replace(copy, target_tensor=places[copy.target_rank][copy.target_tensor]) for copy in plan.copies]
    return Plan(plan.id, copies), [[rank[number] for number in numbers] for rank, numbers in zip(ranks, kept)]


def _no_boxes(opened: Opened) -> CheckpointError:
    return CheckpointError(f"{opened.files.folder}: --missing-from, and a layout of boxes on one side", code="UNIMPLEMENTED",
                           remedy="convert to --to hf with --missing-from first")


def find(folder: PathLike, *, spec: Optional[str], config: Optional[PathLike], leave_out: Sequence[str] = (),
         wwctl: Optional[str] = None, verify: bool = False, group: str = "", missing_from: Optional[PathLike] = None,
         opened: Optional[Opened] = None) -> Source:
    """Opens a checkpoint (or takes it `opened`) and finds every tensor of its layout. What was chosen on the way is logged and
    in `opened.notes`.

    missing_from: another one, of the whole model, from which all tensors are taken that this one lacks
    CheckpointError: it has others, or none there; two copies of a tensor differ.
    """
    opened = opened or (check(folder, group) if verify else open_checkpoint(folder, group))
    described = Path(config) if config else opened.config()
    if described is None and missing_from and (Path(missing_from) / CONFIG).is_file():
        described = Path(missing_from) / CONFIG
    for glob in leave_out:
        if not any(fnmatchcase(name, glob) for tensors in opened.ranks for name in tensors):
            opened.notes.append(f"--leave-out {glob} matches nothing")
    for tensors in opened.ranks:
        for name in [name for name in tensors if any(fnmatchcase(name, glob) for glob in leave_out)]:
            opened.left_out = [*opened.left_out, name]
            del tensors[name]
    made = Source(opened, Bound(opened.files, []), described, wwctl)
    if opened.boxes:
        if missing_from:
            raise _no_boxes(opened)
        opened.spec = spec or opened.spec
        opened.boxes = [[held for held in rank if held.meta.name in tensors]
                        for rank, tensors in zip(opened.boxes, opened.ranks)]
        made.bound = bind(opened, [[held.meta for held in rank] for rank in opened.boxes], "source")
    else:
        opened.spec = _spec(opened, spec, made, bool(missing_from))
        planner, may = made.planner(), Lenience(lacking=set() if missing_from else None)
        asked = planner.filtered(opened.spec).gone
        if missing_from:
            _forget(opened, planner, asked)
        may.skipped, may.copies = [] if missing_from else asked, _copies(opened, planner)
        if opened.format == "hf":
            _drop_tied_head(opened, planner.layout(opened.spec)[0])
        made.bound = bind(opened, planner.layout(opened.spec), "source", may)
        _compare_copies(opened, may.copies)
        if missing_from and may.lacking is not None:
            _complete(made, Path(missing_from), may.lacking, asked, verify)
    for note in opened.notes:
        log.warning("%s: %s", folder, note)
    return made


def _forget(opened: Opened, planner: Planner, asked: Sequence[Container[str]]) -> None:
    """What the source's layout leaves out counts as missing, and the layout is the whole one."""
    for rank, names in enumerate(planner.filtered(opened.spec).partly):
        for name, part in names.items():
            raise CheckpointError(f"'{opened.spec}' leaves {part} out of it, and reads the rest", code="FAILED_PRECONDITION",
                                  rank=str(rank), tensor=name, remedy="leave out all that lies in one tensor, or nothing")
    opened.spec = planner.unfiltered(opened.spec)
    for tensors, out in zip(opened.ranks, asked):
        for name in [name for name in tensors if name in out]:
            opened.left_out = [*opened.left_out, name]
            del tensors[name]


def _complete(made: Source, folder: Path, lacking: Set[Tuple[int, int]], asked: Sequence[Container[str]], verify: bool) -> None:
    """Finds in `folder` what is not there."""
    opened, planner = made.opened, made.planner()
    if not lacking:
        own, its = (hf.read_json(path).get("model_type") if path.is_file() else None for path in (made.described(), folder / CONFIG))
        if its is not None and its != own:
            raise CheckpointError(f"nothing is missing of the model of {made.described()} ({own}), and {folder} holds another one "
                                  f"({its})", code="FAILED_PRECONDITION", remedy=f"pass --config {folder / CONFIG}, if that is meant")
        opened.notes.append(f"nothing is missing: {folder} is not read")
        return
    names = lacking_names(planner.boxes(opened.spec), lacking, asked, layers_of(hf.read_json(made.described())), folder)
    other = check(folder) if verify else open_checkpoint(folder)
    if other.boxes:
        raise _no_boxes(other)
    if other.format == "megatron":
        other.spec, _ = megatron_files.rank_spec(other.spec)
    may = Lenience(lacking=set(), more=True, copies=_copies(other, planner))
    there = bind(other, planner.layout(other.spec), str(folder), may)
    made.rest = Rest(folder, other.spec, len(made.bound.ranks), names, frozenset(lacking), frozenset(may.lacking or ()))
    made.bound = joined(made.bound, there)
    opened.notes += [*other.notes, f"taken from {folder}: {len(names)} tensors, {summary(names)}"]


def _spec(opened: Opened, said: Optional[str], made: Source, complete: bool) -> str:
    """The layout of the files: as `said`, or as they show. Words alone (`skip=NAME`) are added to what they show."""
    spec = said or opened.spec
    if said and "=" in said.partition(":")[0]:
        spec = f"{opened.spec}{',' if ':' in opened.spec else ':'}{said}"
    elif said and opened.format == "torch_dist":  # these are the reader's own, whatever the trainer's layout was
        known = [word for word in opened.spec.partition(":")[2].split(",") if word.partition("=")[0] + "=" not in said]
        spec = ",".join([said if ":" in said else f"{said}:tp1", *known])
    if opened.format == "megatron":
        spec, _ = megatron_files.rank_spec(spec)
    return spec if said or complete else _without_mtp(opened, spec, made)


def _without_mtp(opened: Opened, spec: str, made: Source) -> str:
    """The layout, and that it has no MTP layers where config.json has some and the files none: what transformers saves, and
    trainers that do not train them."""
    counts = _mtp_counts(hf.read_json(made.described()))
    if opened.format == "weightwire" or "mtp=" in spec or not counts:
        return spec
    short = f"{spec}{',' if ':' in spec else ':'}mtp=none"
    try:
        whole, without = made.planner().layout(spec), made.planner().layout(short)
    except CheckpointError:
        return spec  # what is wrong is said when the layout is used
    theirs = [{meta.name for meta in rank} - {meta.name for meta in rest} for rank, rest in zip(whole, without)]
    if len(whole) != len(opened.ranks) or not any(theirs) or any(map(set.intersection, theirs, map(set, opened.ranks))):
        return spec
    opened.notes.append(f"{counts} in config.json, and no MTP layers in the files: taken without them")
    return short


def _mtp_counts(config: Any) -> str:
    """The key that says how many MTP layers there are, in config.json or in its text's part."""
    for part in (config, config.get("text_config")):
        for key, value in (part.items() if isinstance(part, dict) else ()):
            if ("mtp" in key or "nextn" in key) and type(value) is int and value > 0:
                return f"{key}: {value}"
    return ""


def _copies(opened: Opened, planner: Planner) -> List[Dict[str, str]]:
    """Of each rank the tensors that hold the same as another one: embedding and head that Hugging Face's MTP layers repeat."""
    if opened.format != "hf" or not any(_COPY.fullmatch(meta.name) for meta in planner.layout(opened.spec)[0]):
        return []
    first: Dict[str, str] = {}
    found: Dict[str, str] = {}
    for held in sorted(planner.boxes(opened.spec)[0], key=lambda held: all(box.name != held.meta.name for box in held.boxes)):
        if len(held.boxes) == 1 and first.setdefault(held.boxes[0].name, held.meta.name) != held.meta.name:
            found[held.meta.name] = first[held.boxes[0].name]
    return [found]


def _drop_tied_head(opened: Opened, layout: Sequence[TensorMeta]) -> None:
    """A head that some exporters write although config.json ties it to the embedding. CheckpointError: it is another one."""
    names, (tensors,) = {meta.name for meta in layout}, opened.ranks
    for head in [name for name in tensors if name.rpartition(".lm_head.weight")[1] or name == "lm_head.weight"]:
        main = next((name for name in names if name.endswith("embed_tokens.weight") and name in tensors), None)
        if head in names or main is None:
            continue
        if not _same(opened, tensors[head], tensors[main]):
            raise CheckpointError(f"it differs from {main}, and config.json ties the two (tie_word_embeddings)", reason="digest_mismatch",
                                  code="FAILED_PRECONDITION", tensor=head,
                                  remedy=f"say tie_word_embeddings: false in config.json if the model has a head of its own; "
                                         f"--leave-out '{head}' takes {main} for both")
        opened.notes.append(f"{head} is a copy of {main}, to which config.json ties it: it is left out")
        opened.left_out = [*opened.left_out, head]
        del tensors[head]


def _same(opened: Opened, one: Stored, other: Stored) -> bool:
    step = max(1, _COMPARED_BYTES // dtype_bytes(one.dtype))
    return (one.dtype, one.shape) == (other.dtype, other.shape) and all(
        np.array_equal(opened.files.flat(one, begin, min(one.count, begin + step)),
                       opened.files.flat(other, begin, min(one.count, begin + step))) for begin in range(0, one.count, step))


def _compare_copies(opened: Opened, copies: Sequence[Dict[str, str]]) -> None:
    """CheckpointError: two copies of one tensor differ, and one of them would be lost."""
    for tensors, pairs in zip(opened.ranks, copies):
        for name, main in pairs.items():
            if name not in tensors:
                opened.notes.append(f"there is no {name}: it is {main}")
            elif main in tensors and not _same(opened, tensors[name], tensors[main]):
                raise CheckpointError(f"it differs from {main}, and the model has one tensor for both", code="FAILED_PRECONDITION",
                                      reason="digest_mismatch", tensor=name,
                                      remedy=f"--leave-out '{name}' takes {main} for both; mtp=none in --from, and --leave-out of "
                                             "the MTP layers, takes the model without them")
