"""The parts that a checkpoint is composed of, each described by functions of the trainer: what a content is made of is asked
for when it is saved or loaded, and not before."""

from __future__ import annotations

import copy
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple, Union

from weightwire.checkpoint.layouts import Layout
from weightwire.checkpoint.stored import CheckpointError, plain

Tensors = Mapping[str, Any]
Config = Union[str, Mapping[str, Any], Any]


@dataclass(frozen=True)
class Model:
    """`model` and `hf_model`.

    layout:  how this rank holds it, in words ("megatron:tp2,pp2") or box by box (Explicit)
    tensors: gives this rank's tensors by local name; a load fills them in place
    config:  of the model: config.json as text, a mapping, or an object with `to_dict` such as transformers' own
    changes: attributes of that object that the saved config.json has otherwise; the object itself has its own again when
             the save returns, whether it failed or not
    """

    layout: Layout
    tensors: Callable[[], Tensors]
    config: Config
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer:
    """`optimizer`: groups of tensors, each laid out like the parameters (or box by box), and what there is besides.

    groups:  {"exp_avg": {local name: tensor}, …}; a load asks for them, and fills them in place, so it makes those that
             do not exist before the first step
    state:   of what is no such tensor (hyperparameters, step): the same on all ranks, kept from rank 0
    restore: takes what `state` gave, after the groups are filled
    adopt:   takes what megatron-core keeps beside tensors instead, of each chained optimizer its state_dict without them;
             None: this optimizer is not megatron-core's
    """

    layout: Layout
    groups: Callable[[], Mapping[str, Tensors]]
    state: Callable[[], Any] = lambda: None
    restore: Callable[[Any], None] = lambda state: None
    adopt: Optional[Callable[[Any], None]] = None


@dataclass(frozen=True)
class Extra:
    """`extra`: schedules, random states, counters; trees as trees.py has them.

    shared, restore_shared: the same on all ranks, kept from rank 0; goes to any number of ranks
    own, restore_own:       of each rank; given back only where there are as many ranks as when it was saved
    """

    shared: Callable[[], Any] = lambda: None
    restore_shared: Callable[[Any], None] = lambda state: None
    own: Callable[[], Any] = lambda: None
    restore_own: Callable[[Any], None] = lambda state: None


@dataclass(frozen=True)
class Contents:
    """What a trainer has; None is what it has not."""

    model: Union[Model, None] = None
    optimizer: Union[Optimizer, None] = None
    extra: Union[Extra, None] = None

    def check(self, wanted: Tuple[str, ...], what: str) -> None:
        """CheckpointError: one of the wanted contents is not there."""
        for content in wanted:
            if getattr(self, "model" if content == "hf_model" else content) is None:
                raise CheckpointError(f"{what} has {content}, and there is none", code="FAILED_PRECONDITION",
                                      remedy="give it, or take it out of the options")


def group_names(groups: Mapping[str, Tensors]) -> List[str]:
    """In the order that all ranks save them in. CheckpointError: a name is none for a folder, or is taken."""
    for name in groups:
        if plain(name, "optimizer groups") == STATE:
            raise CheckpointError(f"a group of the optimizer cannot be called {STATE!r}")
    return sorted(groups)


#: Where what is no tensor of a parameter lies beside the optimizer's groups.
STATE = "state"


@contextmanager
def described(model: Model) -> Iterator[str]:
    """config.json's text with the model's `changes`. Whatever happens inside, the config's objects are as they were."""
    if isinstance(model.config, str):
        yield model.config
        return
    if isinstance(model.config, Mapping):
        yield json.dumps({**model.config, **model.changes}, indent=1)
        return
    kept = list(_kept(model.config))
    try:
        for name, value in model.changes.items():
            setattr(model.config, name, value)
        yield json.dumps(model.config.to_dict(), indent=1)
    finally:
        for owner, values in kept:
            vars(owner).clear()
            vars(owner).update(values)


def _kept(config: Any) -> Iterator[Tuple[Any, Dict[str, Any]]]:
    """A config, and those inside it, with the attributes that they have now."""
    yield config, {name: copy.deepcopy(value) if isinstance(value, (dict, list)) else value
                   for name, value in vars(config).items()}
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "__dict__"):
            yield from _kept(value)
