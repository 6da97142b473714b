"""A checkpoint that holds a part of a model (its text, a model without its head), and the rest from another one: the model that
it was made of."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Container, Dict, FrozenSet, List, Mapping, Sequence, Set, Tuple

from weightwire.boxes import Held
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.planner import Plan
from weightwire.checkpoint.stored import CheckpointError, Stored

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_Places = FrozenSet[Tuple[int, int]]


@dataclass(frozen=True)
class Rest:
    """What `folder` gives: the whole tensors `names`, which the checkpoint lacks at the places `lacking`."""

    folder: Path
    #: Its layout, whose ranks follow the checkpoint's own `first` in what copies are read from.
    spec: str
    first: int
    names: FrozenSet[str]
    lacking: _Places
    #: Places of the other one that it lacks itself.
    lacks: _Places

    def completed(self, own: Plan, other: Plan) -> Plan:
        """Of two plans for the same target, each whole, the copies of what each side has."""
        copies = [copy for copy in own.copies if copy.canonical not in self.names]
        for copy in other.copies:
            if copy.canonical not in self.names:
                continue
            if (copy.source_rank, copy.source_tensor) in self.lacks:
                raise CheckpointError(f"{self.folder} does not hold it either", code="FAILED_PRECONDITION",
                                      reason="tensor_missing", tensor=copy.canonical,
                                      remedy="name the whole model with --missing-from, or leave it out with skip=")
            copies.append(replace(copy, source_rank=copy.source_rank + self.first))
        said = "\n".join([own.id, other.id, *sorted(self.names)])
        return Plan(hashlib.sha256(said.encode()).hexdigest()[:32], copies)


def lacking_names(boxes: Sequence[Sequence[Held]], lacking: Set[Tuple[int, int]], asked: Sequence[Container[str]], layers: int,
                  folder: Path) -> FrozenSet[str]:
    """The whole tensors that lie at `lacking`, and nowhere else. Of those whose local names are `asked` for (by rank) it is known
    that they are not to be read.

    CheckpointError: a part of one is there, or one of a row of layers or experts is missing and others are there: then the
    checkpoint is cut short, and filling it up would mix two models.
    """
    missing: Dict[str, Tuple[int, str]] = {}
    held: Set[str] = set()
    for rank, tensors in enumerate(boxes):
        for number, tensor in enumerate(tensors):
            for box in tensor.boxes:
                if (rank, number) in lacking:
                    missing[box.name] = (rank, tensor.meta.name)
                else:
                    held.add(box.name)
    kinds = {_kind(name, layers): name for name in held}
    for name, (rank, local) in missing.items():
        there = name if name in held else kinds.get(_kind(name, layers))
        if there is not None and not (asked and local in asked[rank]):
            raise CheckpointError(f"the checkpoint holds {there if there != name else 'a part of it'}, and not this: it is cut short, "
                                  f"and is not filled up from {folder}", code="FAILED_PRECONDITION", reason="tensor_missing",
                                  rank=str(rank), tensor=local, remedy="save it again; what may be missing is all tensors of a kind")
    return frozenset(missing)


def _kind(name: str, layers: int) -> str:
    """The name without the numbers of layers and experts. Layers behind the last are MTP's, and of their own kind."""
    def star(match: "re.Match[str]") -> str:
        before = name[:match.start()]
        return match.group() if before.endswith("layers.") and layers and int(match.group()) >= layers else "*"
    return _NUMBER.sub(star, name)


def joined(own: Bound, other: Bound) -> Bound:
    """The ranks of both, one after the other; the files of the second by their whole paths."""
    folder = os.path.abspath(other.files.folder)
    for name, seen in other.files.seen.items():
        own.files.seen[os.path.join(folder, name)] = seen

    def there(tensor: Stored) -> Stored:
        return replace(tensor, regions=tuple(replace(region, file=os.path.join(folder, region.file)) for region in tensor.regions))
    return Bound(own.files, own.ranks + [[there(tensor) for tensor in rank] for rank in other.ranks])


def summary(names: FrozenSet[str]) -> str:
    """visual.* (390), model.layers.61.* (30), lm_head.weight"""
    groups: Dict[str, List[str]] = {}
    for name in sorted(names):
        parts = name.split(".")
        groups.setdefault(".".join(parts[:2]) if parts[1:2] == ["layers"] else parts[0], []).append(name)
    said = []
    for own in groups.values():
        common = os.path.commonprefix(own).rpartition(".")[0]
        said.append(own[0] if len(own) == 1 else f"{common + '.' if common else ''}* ({len(own)})")
    return ", ".join(said)


def layers_of(config: Mapping[str, object]) -> int:
    """The model's own layers, without MTP's; 0 where config.json does not say."""
    text = config.get("text_config")
    found = config.get("num_hidden_layers", text.get("num_hidden_layers") if isinstance(text, dict) else None)
    return found if type(found) is int else 0
