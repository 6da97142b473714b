"""What a format is to the rest: a way to open a checkpoint, and a way to lay one out before it is filled."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from weightwire.boxes import Held
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.stored import CheckpointError, Files, Stored, check_cover
from weightwire.memory import TensorMeta

CONFIG = "config.json"


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


def bind(opened: Opened, layout: Sequence[Sequence[TensorMeta]], role: str) -> Bound:
    """Finds every tensor of the layout.

    CheckpointError: one is missing, has another shape, or is there and in no layout; names rank and tensor.
    """
    if len(layout) != len(opened.ranks):
        raise CheckpointError(f"{role}: {opened.spec} has {len(layout)} ranks, the checkpoint {len(opened.ranks)}",
                              code="FAILED_PRECONDITION", remedy="say what it holds with --from")
    bound: List[List[Stored]] = []
    for rank, (wanted, have) in enumerate(zip(layout, opened.ranks)):
        bound.append([])
        for local in wanted:
            found = have.get(local.name)
            if found is None or found.shape != local.shape:
                raise CheckpointError(
                    f"{role}: expected {list(local.shape)}, found {list(found.shape) if found else 'none'}",
                    code="FAILED_PRECONDITION", reason="shape_mismatch" if found else "tensor_missing", rank=str(rank),
                    tensor=local.name, remedy=f"compare config.json and '{opened.spec}' with what the checkpoint holds")
            check_cover(found)
            bound[-1].append(found)
        extra = sorted(have.keys() - {local.name for local in wanted})
        if extra:
            raise CheckpointError(
                f"{role}: {len(extra)} tensors that '{opened.spec}' does not know, first this one",
                code="FAILED_PRECONDITION", reason="tensor_unexpected", rank=str(rank), tensor=extra[0],
                remedy="compare config.json; --leave-out GLOB drops them")
    return Bound(opened.files, bound)


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
