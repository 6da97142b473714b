"""The contents of a composed checkpoint, given back to the ranks of a trainer."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

from weightwire.checkpoint import composed, megatron_common, native, torch_dist, trees
from weightwire.checkpoint.contents import STATE, Contents, Extra, Model, Optimizer, Tensors, described, group_names
from weightwire.checkpoint.formats import CONFIG
from weightwire.checkpoint.layouts import Layout
from weightwire.checkpoint.loading import load
from weightwire.checkpoint.options import Options
from weightwire.checkpoint.sources import check
from weightwire.checkpoint.stored import CheckpointError


@dataclass(frozen=True)
class Loaded:
    """What a load filled, in bytes by content; and what it did not give back, with the reason."""

    bytes: Dict[str, int]
    left: Dict[str, str]
    #: That megatron-core's checkpoint names from which the optimizer came.
    iteration: Optional[int] = None


def load_contents(folder: Path, options: Options, contents: Contents, rank: int, world_size: int,
                  wwctl: Optional[str]) -> Loaded:
    own = [content for content in options.load_contents if content not in options.load_from]
    parts, saved_by = composed.read(folder) if own else ([], 0)
    for content in own:
        if not any(part.split("/")[0] == options.folder(content) for part in parts):
            raise CheckpointError(f"{folder} was saved without {content}", code="NOT_FOUND",
                                  remedy="take it out of load_contents, or name a load_from")
    loading = _Loading(contents.model, rank, wwctl, options.verify)
    done, iteration = Loaded({}, {}), None
    after: List[Callable[[], None]] = []
    for content in options.load_contents:
        place = Path(options.load_from.get(content, folder / options.folder(content)))
        if content == "optimizer" and contents.optimizer:
            common = _common(place) if content not in own and torch_dist.found_at(place) else {}
            done.bytes[content] = loading.optimizer(place, contents.optimizer, content in own, after)
            if content not in own:
                iteration = megatron_common.iteration(common)
                loading.adopt(place, common, contents.optimizer, after, done.left)
        elif content == "extra" and contents.extra:
            loading.extra(folder, contents.extra, saved_by == world_size, after)
            if saved_by != world_size:
                done.left["extra/own"] = f"{saved_by} ranks saved their own, {world_size} load"
        elif contents.model:
            done.bytes[content] = loading.tensors(place, contents.model.layout, contents.model.tensors())
    for give_back in after:  # when every tensor is there
        give_back()
    return replace(done, iteration=iteration)


def _common(place: Path) -> Dict[Any, Any]:
    """CheckpointError: moments without the step that they are of would be scaled wrongly from the first step on."""
    common = torch_dist.read_common(place)
    if common is None:
        raise CheckpointError(f"{place} has neither common.pt nor common_state, and so no step and no iteration of its optimizer",
                              code="FAILED_PRECONDITION", remedy="load the model alone (load_contents: [model]), or copy the "
                                                                 "checkpoint again with all its files")
    return common


@dataclass(frozen=True)
class _Loading:
    model: Optional[Model]
    rank: int
    wwctl: Optional[str]
    verify: bool

    def tensors(self, place: Path, layout: Layout, into: Tensors, group: str = "") -> int:
        if self.verify:
            check(place, group)
        with self._config(place) as config:
            return load(place, layout, self.rank, into, config=config, wwctl=self.wwctl, group=group).bytes

    def optimizer(self, place: Path, optimizer: Optimizer, own: bool, after: List[Callable[[], None]]) -> int:
        groups, done = optimizer.groups(), 0
        if own:
            saved = {path.name for path in place.iterdir()} - {STATE}
            if saved != groups.keys():
                raise CheckpointError(f"{place} has {', '.join(sorted(saved))}, the optimizer {', '.join(sorted(groups))}",
                                      code="FAILED_PRECONDITION", rank=str(self.rank), remedy="the same kind of optimizer")
        for name in group_names(groups):
            done += self.tensors(place / name if own else place, optimizer.layout, groups[name], "" if own else name)
        if own:
            state = self.tree(place / STATE, 0)
            after.append(lambda: optimizer.restore(state))
        return done

    def adopt(self, place: Path, common: Dict[Any, Any], optimizer: Optimizer, after: List[Callable[[], None]],
              left: Dict[str, str]) -> None:
        """Step and hyperparameters out of what megatron-core saved."""
        take, states = optimizer.adopt, megatron_common.optimizers(common)
        if take is None or states is None:
            left["optimizer/state"] = (f"{place} has none that is known" if states is None else
                                       f"{place} has megatron-core's, and this optimizer is another one")
            return
        after.append(lambda: take(states))

    def extra(self, folder: Path, extra: Extra, same_size: bool, after: List[Callable[[], None]]) -> None:
        shared = self.tree(folder / composed.SHARED, 0)
        after.append(lambda: extra.restore_shared(shared))
        if same_size:
            own = self.tree(folder / composed.OWN, self.rank)
            after.append(lambda: extra.restore_own(own))

    def tree(self, place: Path, rank: int) -> Any:
        opened = check(place) if self.verify else native.open_at(place)
        arrays = {name: opened.files.flat(tensor, 0, tensor.count).copy() for name, tensor in opened.ranks[rank].items()}
        opened.files.close()
        return trees.decode(arrays, str(place))

    @contextmanager
    def _config(self, place: Path) -> Iterator[Optional[Path]]:
        """The config.json that lies with the checkpoint, else the model's own."""
        if (place / CONFIG).is_file() or self.model is None:
            yield None
            return
        with described(self.model) as text, tempfile.TemporaryDirectory() as folder:
            path = Path(os.path.join(folder, CONFIG))
            path.write_text(text)
            yield path
