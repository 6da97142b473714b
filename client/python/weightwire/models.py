"""Several models of one trainer (actor, reward, draft), published together. Each is parallel in its own way.

>>> publisher = weightwire.models.Publisher({                       # on every rank
...     "actor": weightwire.megatron.model(actor, "actor/config.json"),
...     "reward": weightwire.megatron.model(reward, "reward/config.json")})
>>> publisher.publish(step).wait_released(timeout=60)               # one decision for both
>>> publisher.publish(step + 1, models=["actor"])                   # the reward model stays as it was

An engine holds one of them and says which: Subscriber(model_name="reward").
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Collection, Mapping, Sequence

import torch

from weightwire.adapter import Live, LivePublisher, Model, refuse
from weightwire.boxes import Held, of_models
from weightwire.device_choice import DeviceChoice
from weightwire.export_check import Difference, differences
from weightwire.publisher import DeltaMode, Lineage, Publisher as BasePublisher, Release

__all__ = ["Model", "Publisher"]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Publisher(LivePublisher):
    """Publishes several models as the versions of one trainer, from every rank each its own shards.

    models: by the names that engines give; made on every rank by `megatron.model`, `fsdp.model` or `torch.model`, all with
            the same names

    A version is one decision: engines of all models serve it, or none does. See LivePublisher for what `publish` promises. With
    `verify_every` those models are compared that were made with `verify`, as LivePublisher says.
    """

    def __init__(self, models: Mapping[str, Model], *, group: str = "trainer", job: str = "", agent: str | None = None,
                 timeout: float = 30.0, lineage: Lineage = None, verify_every: int = 0, device: DeviceChoice = None,
                 delta: DeltaMode = None):
        for name in models:
            if not _NAME.fullmatch(name):
                raise refuse(f"no model can be called {name!r}", remedy="use letters, digits, '.', '_' and '-', at most 64")
        if not models:
            raise refuse("no model was given")
        # Sorted: what ranks do before they read may be collectives, in one order on all of them.
        self._models = {name: models[name] for name in sorted(models)}
        self._chosen: Collection[str] = self._models
        self._whole: set[str] = set()  # models that lie in the shared memory as they were published last
        self._lives: dict[str, Sequence[Live]] = {}  # as read last, by their own names
        super().__init__(self._read_chosen, self._bind_all, rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage, before=self._before_chosen, verify_every=verify_every, device=device, delta=delta)

    def publish(self, version: int, *, models: Collection[str] | None = None, deadline: float = 120.0,
                manual_commit: bool = False, verify: bool = False) -> Release:
        """As LivePublisher.publish. `models`: those that are copied; the others are in this version what they were when they were
        published last, whatever their modules hold now. None: all. Every rank must say the same.

        RefusedError, besides: one of the others was not published since this publisher was opened, or its agent went away
        """
        chosen = self._models.keys() if models is None else set(models)
        if unknown := sorted(set(chosen) - self._models.keys()):
            raise refuse(f"there is no model {unknown[0]!r}", remedy=f"one of {', '.join(self._models)}")
        if missing := sorted(self._models.keys() - chosen - self._whole):
            raise refuse(f"the model {missing[0]!r} was not published yet", remedy="publish all models first: without `models`")
        self._chosen = [name for name in self._models if name in chosen]
        self._whole.difference_update(chosen)  # while they are copied
        try:
            release = super().publish(version, deadline=deadline, manual_commit=manual_commit, verify=verify)
        finally:
            self._chosen = self._models
        self._whole.update(chosen)
        return release

    def _before_chosen(self) -> None:
        for name in self._chosen:
            self._models[name].before()

    def _read_chosen(self) -> list[Live]:
        for name in self._chosen:
            self._lives[name] = self._models[name].read()
        return [replace(live, held=_in_model(self._local(name), live.held)) for name in self._chosen for live in self._lives[name]]

    def _local(self, model: str) -> str:
        """What stands before its local names, as the coordinator has them: nothing where there is one model only."""
        return f"{model}::" if len(self._models) > 1 else ""

    def _bind_all(self, base: BasePublisher, _: Sequence[Live]) -> Any:
        return base.bind_boxes(of_models((name, model.layout(self._lives[name]), model.rank, model.world_size)
                                         for name, model in self._models.items()))

    def _open_again(self, lives: Sequence[Live], end: float) -> None:
        self._whole.clear()
        if len(self._chosen) < len(self._models):
            raise refuse("the agent went away, and with it what the other models held", remedy="publish all models: without `models`")
        super()._open_again(lives, end)

    def _expected(self) -> Mapping[str, Held]:
        if len(self._chosen) == len(self._models):
            return self._bound
        of = tuple(map(self._local, self._chosen))
        return {name: held for name, held in self._bound.items() if name.startswith(of)}

    def _exports(self) -> bool:
        return any(self._models[name].export is not None for name in self._chosen)

    def _differences(self, lives: Sequence[Live], local: Mapping[str, torch.Tensor]) -> dict[str, Difference]:
        found: dict[str, Difference] = {}
        for name in self._chosen:
            model, prefix = self._models[name], self._local(name)
            if model.export is None or model.world_size == 0:
                continue
            its = {tensor.removeprefix(prefix): array for tensor, array in local.items() if tensor.startswith(prefix)}
            of = differences(model.export, model.held(self._lives[name]), its)
            found |= {prefix + tensor: replace(one, tensor=prefix + tensor) for tensor, one in of.items()}
        return found

    def _still_frozen(self, lives: Sequence[Live]) -> dict[str, Live]:
        """By model: one of which nothing is trained changes by other means."""
        still: dict[str, Live] = {}
        for name in self._chosen:
            still |= super()._still_frozen([live for live in lives if live.held.meta.name.startswith(self._local(name))])
        return still


def _in_model(prefix: str, held: Held) -> Held:
    return replace(held, meta=replace(held.meta, name=prefix + held.meta.name))
