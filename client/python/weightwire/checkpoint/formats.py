"""What a format is to the rest: a way to open a checkpoint, and a way to lay one out before it is filled."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Container, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from weightwire.boxes import Held
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.stored import CheckpointError, Files, Stored, check_cover
from weightwire.memory import TensorMeta

CONFIG = "config.json"
#: Heads of reward, value and classification models, as transformers, TRL, verl and Megatron call them.
_HEAD = re.compile(r"(.*\.)?(score|classifier|classification_head|value_head|v_head|reward_head|rm_head|qa_outputs|regression_head)"
                   r"(\.[a-z0-9_]+)*\.(weight|bias)")
_LM_HEAD = re.compile(r"(.*\.)?(lm_head|output_layer)\.weight")


@dataclass
class Opened:
    """A checkpoint that was found and read through, its tensors by the names of the layout `spec`."""

    format: str
    spec: str
    files: Files
    ranks: List[Dict[str, Stored]]
    #: Names in the checkpoint that are no weights (optimizer, random state): they are left out, and said so.
    left_out: List[str] = field(default_factory=list)
    #: Torch zips (file, offset, bytes) that hold the tensors, where the format has them.
    zips: List[Tuple[str, int, int]] = field(default_factory=list)
    #: What each rank's tensors hold, where `spec` is no words but boxes.
    boxes: Optional[List[List[Held]]] = None
    #: What was chosen where there was a choice, or taken or left in a way that somebody should know.
    notes: List[str] = field(default_factory=list)
    #: Of weightwire's own format: what its manifest says.
    manifest: Dict[str, Any] = field(default_factory=dict)

    def config(self) -> Optional[Path]:
        path = self.files.folder / CONFIG
        return path if path.is_file() else None


@dataclass(frozen=True)
class Wanted:
    """A target's tensors before it exists."""

    format: str
    #: As the caller said it.
    to: str
    #: The layout, in the words of `wwctl layout`.
    spec: str
    #: By rank, in the layout's order; dtypes are the source's.
    ranks: Sequence[Sequence[TensorMeta]]
    shard_bytes: int
    config: Path
    #: What `torch_dist` keeps beside tensors, the same on all ranks.
    common: Mapping[str, Any] = field(default_factory=dict)
    #: Of the target, where it is not the source's.
    config_text: Optional[str] = None


@dataclass
class Lenience:
    """What may be absent from a checkpoint, by rank; `lacking` is told the numbers of those that were."""

    #: Names that only=/skip= leave out altogether: they may be there, and are not read.
    skipped: Sequence[Container[str]] = ()
    #: A tensor that may be absent -> the one of the same rank that has the same content.
    copies: Sequence[Mapping[str, str]] = ()
    #: Others may be absent, too, and are then found here.
    lacking: Optional[Set[Tuple[int, int]]] = None
    #: Tensors of no layout are ignored.
    more: bool = False


def bind(opened: Opened, layout: Sequence[Sequence[TensorMeta]], role: str, may: Lenience = Lenience()) -> Bound:
    """Finds every tensor of the layout.

    CheckpointError: one is missing, has another shape, or is there and in no layout; names rank and tensor.
    """
    if len(layout) != len(opened.ranks):
        raise CheckpointError(f"{role}: {opened.spec} has {len(layout)} ranks, the checkpoint {len(opened.ranks)}",
                              code="FAILED_PRECONDITION", remedy="say what it holds with --from")
    bound: List[List[Stored]] = []
    for rank, (wanted, have) in enumerate(zip(layout, opened.ranks)):
        bound.append([])
        skipped = may.skipped[rank] if may.skipped else ()
        copies = may.copies[rank] if may.copies else {}
        for number, local in enumerate(wanted):
            found = have.get(local.name)
            if local.name in skipped:
                if found is not None:
                    opened.left_out = [*opened.left_out, local.name]
                found = Stored(local.name, local.dtype, local.shape, ())  # its place in the numbering; no copy reads it
            elif found is None and local.name in copies:
                found = have.get(copies[local.name])
            elif found is None and may.lacking is not None:
                may.lacking.add((rank, number))
                found = Stored(local.name, local.dtype, local.shape, ())
            if found is None or found.shape != local.shape:
                raise _unfit(opened, wanted, role, rank, local, found)
            if found.regions or found.count == 0:
                check_cover(found)
            bound[-1].append(found)
        extra = sorted(have.keys() - {local.name for local in wanted})
        if extra and not may.more:
            raise _unknown(opened, role, rank, extra)
    return Bound(opened.files, bound)


def _unfit(opened: Opened, wanted: Sequence[TensorMeta], role: str, rank: int, local: TensorMeta,
           found: Optional[Stored]) -> CheckpointError:
    """That a tensor is missing or has another shape, and the likeliest reason."""
    have = opened.ranks[rank]
    extra = sorted(have.keys() - {one.name for one in wanted})
    heads = [name for name in extra if _HEAD.fullmatch(name)]
    other = found if found is not None and _LM_HEAD.fullmatch(local.name) and found.shape[-1:] == local.shape[-1:] else None
    prefix = _prefix([one.name for one in wanted if one.name not in have], extra)
    remedy = f"compare config.json and '{opened.spec}' with what the checkpoint holds"
    if _LM_HEAD.fullmatch(local.name) and (heads or other):
        head = other.name if other else heads[0]
        remedy = (f"{head} {list(have[head].shape)} is the head of a reward, value or classification model; to move the rest, say "
                  f"--from skip=lm_head.weight (with the model's prefix, if it has one), the same word in --to"
                  + (f", and --leave-out '{head}'" if head in extra else ""))
    elif prefix:
        remedy = f"the checkpoint's names begin otherwise: {prefix}; save the model itself, not what wraps it or lies in it"
    elif found is None and role == "source":
        remedy += ("; what is meant to be missing is left out with skip=NAME in --from and in --to, or is taken from the model that "
                   "it was made of with --missing-from FOLDER")
    said = "".join(f"; {note}" for note in opened.notes)
    return CheckpointError(f"{role}: expected {list(local.shape)}, found {list(found.shape) if found else 'none'}{said}",
                           code="FAILED_PRECONDITION", reason="shape_mismatch" if found else "tensor_missing", rank=str(rank),
                           tensor=local.name, remedy=remedy)


def _prefix(missing: Sequence[str], extra: Sequence[str]) -> str:
    """How the checkpoint calls a tensor of a layer that is missing, where what is before the layers differs."""
    tails = {name[name.index("layers."):]: name for name in missing if "layers." in name}
    return next((f"{name} for {tails[name[name.index('layers.'):]]}" for name in extra
                 if "layers." in name and name[name.index("layers."):] in tails), "")


def _unknown(opened: Opened, role: str, rank: int, extra: Sequence[str]) -> CheckpointError:
    heads = [name for name in extra if _HEAD.fullmatch(name)]
    first = heads[0] if heads else extra[0]
    return CheckpointError(
        f"{role}: {len(extra)} tensors that '{opened.spec}' does not know, first this one",
        code="FAILED_PRECONDITION", reason="tensor_unexpected", rank=str(rank), tensor=first,
        remedy=("it is the head of a reward, value or classification model, which the model's layout does not have" if heads
                else _mtp_words(opened.spec, extra) or "compare config.json") + "; --leave-out GLOB drops them")


def _mtp_words(spec: str, extra: Sequence[str]) -> str:
    """What says of a layout that it has these MTP layers, as their names show."""
    if not all(name.startswith("mtp.") for name in extra) or "mtp=" in spec:
        return ""
    word = "fused" if any(name.endswith(".experts.gate_up_proj") for name in extra) else "single"
    return f"'{spec}{',' if ':' in spec else ':'}mtp={word}' in --from takes the MTP layers, in --to has them made"


def padding(name: str, tensors: Dict[str, Stored], shards: int) -> str:
    """The word that says how many rows the vocabulary was padded to."""
    table = tensors.get(name)
    return f",vocab_pad={table.shape[0] * shards}" if table is not None and table.shape else ""


def parse_target(text: str) -> Tuple[str, str]:
    """`hf`, `torch_dist`, `megatron:tp4,pp1`, `weightwire`, `weightwire:megatron:tp2` -> format and layout."""
    name, _, words = text.partition(":")
    if name == "hf":
        return name, text
    if name == "torch_dist":
        chosen = [word for word in words.split(",") if word not in ("", "spec=local", "spec=te")]
        return name, "megatron:" + ",".join(["spec=te", "experts=sequential", *chosen])
    if name == "megatron":
        return name, text if words else "megatron:tp1"
    if name == "weightwire":
        return name, words or "hf"
    raise CheckpointError(f"--to {text[:80]}: no such format",
                          remedy="one of hf, torch_dist, megatron:tp4,pp1, weightwire, weightwire:SPEC")
