"""What is about to be published, compared with what the trainer's own framework exports, before anybody has it.

The framework's export (a gather, tensor by tensor) is the oracle: each rank compares its own parts with it bit for bit, and all
ranks hear of a difference. It costs that export, and one pass over the parameters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from weightwire import errors
from weightwire.boxes import Box, Held

#: The framework's own export: (checkpoint name, whole tensor), one after another. Every rank must call it to its end.
Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]

_NAMED = 5  # tensors in a message
_COLUMNS = 32  # that a guess looks at
_ALL = 0.9  # of the elements differ: some are equal by chance


@dataclass
class Difference:
    """Of one tensor of the checkpoint, on the ranks that hold parts of it."""

    tensor: str
    different: int = 0  #: elements
    compared: int = 0
    guess: str = ""

    def __str__(self) -> str:
        if not self.compared:
            return f"{self.tensor}: {self.guess}"
        return f"{self.tensor}: {self.different / self.compared:.3g} of {self.compared} elements" + (f", {self.guess}" if self.guess else "")


def differences(export: Export, held: Sequence[Held], local: Mapping[str, torch.Tensor]) -> dict[str, Difference]:
    """held: what lies where in this rank's tensors; local: these tensors, as they are published."""
    wanted: dict[str, list[tuple[Box, torch.Tensor]]] = {}
    for one in held:
        for box in one.boxes:
            if one.meta.name in local:
                wanted.setdefault(box.name, []).append((box, local[one.meta.name]))
    found: dict[str, Difference] = {}
    seen = set()
    for name, whole in export():
        seen.add(name)
        for box, tensor in wanted.get(name, ()):
            _compare(found.setdefault(name, Difference(name)), box, tensor, whole)
    for name in wanted:
        if name not in seen:
            found[name] = Difference(name, guess="the export does not give it")
    return found


def check(version: int, found: Mapping[str, Difference], world: bool, failed: str = "") -> None:
    """world: torch.distributed's ranks are those that publish. failed: why this rank could not compare. RefusedError, on all
    ranks, when one found a difference or failed."""
    everyone = [(dict(found), failed)]
    if world:
        everyone = everyone * dist.get_world_size()
        dist.all_gather_object(everyone, (dict(found), failed))
    for rank, (_, why) in enumerate(everyone):
        if why:
            raise errors.RefusedError(f"version {version} could not be compared with the trainer's own export: {why}",
                                      code="FAILED_PRECONDITION", reason="invalid_request", rank=str(rank),
                                      remedy="nothing was published; mend the export, or publish without verify")
    total: dict[str, Difference] = {}
    for one, _ in everyone:
        for name, difference in one.items():
            sum_ = total.setdefault(name, Difference(name))
            sum_.different += difference.different
            sum_.compared += difference.compared
            sum_.guess = sum_.guess or difference.guess
    bad = [one for one in total.values() if one.different or not one.compared]
    if bad:
        named = "; ".join(str(one) for one in bad[:_NAMED]) + (f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else "")
        raise errors.RefusedError(
            f"version {version} is not what the trainer's own export gives: {len(bad)} of {len(total)} tensors differ: {named}",
            code="FAILED_PRECONDITION", reason="invalid_request", tensor=bad[0].tensor,
            remedy="nothing was published; an option of the trainer moves, shifts or delays parameters in a way that weightwire "
                   "does not know: report it, and publish the export through weightwire.torch meanwhile")


def _compare(into: Difference, box: Box, tensor: torch.Tensor, whole: torch.Tensor) -> None:
    if any(b + e > n for b, e, n in zip(box.begin, box.extent, whole.shape)) or len(box.extent) != whole.dim():
        into.guess = f"the export has the shape {list(whole.shape)}"
        return
    theirs = whole[tuple(slice(b, b + e) for b, e in zip(box.begin, box.extent))].detach().cpu()
    flat = tensor.reshape(-1)
    mine = flat.as_strided(box.extent, box.stride, flat.storage_offset() + box.offset)
    if mine.dtype != theirs.dtype:  # a float32 shard and an export in bf16: what both can say
        narrow = min((mine.dtype, theirs.dtype), key=lambda dtype: dtype.itemsize)
        mine, theirs = mine.to(narrow), theirs.to(narrow)
    wrong = _bits(mine) != _bits(theirs)
    into.compared += wrong.numel()
    count = int(wrong.sum())
    if count:
        into.different += count
        into.guess = into.guess or _guess(mine, theirs, wrong)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.contiguous().view(kind)


def _guess(mine: torch.Tensor, theirs: torch.Tensor, wrong: torch.Tensor) -> str:
    """For people: what the difference looks like, in the first columns."""
    if mine.dim() == 2 and mine.shape[0] == mine.shape[1] and torch.equal(_bits(mine.t()), _bits(theirs)):
        return "transposed"
    one, other = _columns(mine), _columns(theirs)
    for number in (1, -1):
        if torch.equal((one.to(mine.dtype) + number).float() if mine.dtype.itemsize > 1 else one + number, other):
            return f"{'less' if number > 0 else 'more'} by one: norms that are held less one?"
    alike = torch.equal(one, other)  # as far as is looked
    if not alike and len(one) > 1 and len(one) % 2 == 0:
        half = len(one) // 2
        if torch.equal(torch.cat([one[half:], one[:half]]), other):
            return "its halves are swapped"
        for size in _divisors(half):
            if torch.equal(_apart(one, size), other):
                return f"gate and up alternate in blocks of {size} rows"
    if not alike and torch.equal(_ordered(one), _ordered(other)):
        return "its rows are in another order"
    if float(wrong.float().mean()) < _ALL:
        return "a part is of another step: a stale shard?"
    return "all of it is other values: another step?"


def _columns(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(len(tensor) if tensor.dim() else 1, -1)[:, :_COLUMNS].float()


def _divisors(number: int) -> Iterator[int]:
    return (size for size in range(1, number) if number % size == 0)


def _apart(rows: torch.Tensor, size: int) -> torch.Tensor:
    return rows.reshape(-1, 2, size, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _ordered(rows: torch.Tensor) -> torch.Tensor:
    return torch.unique(rows, dim=0)
