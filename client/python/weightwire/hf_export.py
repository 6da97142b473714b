"""What transformers writes for a live model: names and shapes of the checkpoint, where they are not the module's.

transformers 5 holds models otherwise than their checkpoints do (experts of a layer in one tensor, prefixes of models with
vision) and turns that back when it saves. Its own conversion is recorded (recorded.py), so every model that it can save can be
published, in its checkpoint's names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterator, Literal, Mapping, Sequence

import torch

from weightwire.adapter import Live, clean_name, persistent_buffers, refuse
from weightwire.export_check import Export
from weightwire.memory import TensorMeta
from weightwire.recorded import Recording, layers, record

_cache: dict[Any, Recording] = {}


def exported(module: Any, canonical: Mapping[str, TensorMeta], lives: Sequence[Live]) -> tuple[Mapping[str, TensorMeta], Sequence[Live]]:
    """`canonical` and `lives` as they were read, in the checkpoint's names and shapes; as they are where those are the module's,
    and where it is no model of transformers 5.

    RefusedError: transformers computes a tensor when it saves; names it
    """
    model = _model_of(module)
    if model is None:
        return canonical, lives
    recording = _recording(model, canonical)
    if recording is None:
        return canonical, lives
    if recording.added:
        name, plus = next(iter(recording.added.items()))
        raise refuse(f"transformers adds {plus} to it when it saves", tensor=name,
                     remedy="give checkpoint names by `names`, and leave it out there")
    return recording.whole(canonical), [replace(live, held=recording.held(live.held)) for live in lives]


def export_of(module: Any, verify: Export | Literal["export"] | None) -> Export | None:
    """"export": what transformers saves of a live model, gathered a layer at a time on every rank; of None nothing."""
    if verify != "export":
        return verify
    if module is None:
        return lambda: ()
    model = _model_of(module)
    if model is None:
        raise refuse(f"verify=\"export\" needs a model of transformers 5 or newer, and this is a {type(module).__name__}",
                     remedy="pass a function that gives the trainer's own export as (name, whole tensor) pairs")

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        from transformers.core_model_loading import revert_weight_conversion

        held = {clean_name(name): tensor for name, tensor in [*model.named_parameters(), *persistent_buffers(model)]}
        for names in layers(held):
            yield from revert_weight_conversion(model, {name: _gathered(name, held[name]) for name in names}).items()

    return export


def _gathered(name: str, tensor: Any) -> torch.Tensor:
    if hasattr(tensor, "_fqns"):
        raise refuse("FSDP1 keeps it in a flat parameter, which verify=\"export\" does not gather", tensor=name,
                     remedy="use FSDP2, or pass a function that gives the trainer's own export")
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def _model_of(module: Any) -> Any:
    """The model inside DDP, FSDP1 and torch.compile; None for what transformers 5 did not build."""
    try:
        from transformers import PreTrainedModel
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401  not in 4.x
    except ImportError:
        return None
    while not isinstance(module, PreTrainedModel):
        for attribute in ("module", "_fsdp_wrapped_module", "_orig_mod"):
            inner = getattr(module, attribute, None) if isinstance(module, torch.nn.Module) else None
            if isinstance(inner, torch.nn.Module):
                module = inner
                break
        else:
            return None
    return module


def _recording(model: Any, canonical: Mapping[str, TensorMeta]) -> Recording | None:
    """None: the checkpoint's names and shapes are the module's."""
    from transformers.core_model_loading import revert_weight_conversion

    shapes = {name: tuple(meta.shape) for name, meta in canonical.items()}
    key = (type(model), repr(getattr(model, "_weight_conversions", None)), repr(getattr(model, "config", None)),
           tuple(sorted(shapes.items())))
    if key not in _cache:
        def export(tensors: dict[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
            try:
                out: Mapping[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
            except Exception as error:  # of any operation, on numbers that are no weights
                raise refuse(f"transformers' own conversion of {type(model).__name__} fails on tensors that hold numbers: "
                             f"{type(error).__name__}: {error}",
                             remedy="give checkpoint names by `names`, or publish model.state_dict() as transformers saves it") from error
            return out
        _cache[key] = record(export, shapes)
    found = _cache[key]
    same = found.shapes == shapes and all(_as_it_is(name, shape, found) for name, shape in shapes.items())
    return None if same else found


def _as_it_is(name: str, shape: tuple[int, ...], recording: Recording) -> bool:
    pieces = recording.pieces[name]
    return len(pieces) == (0 not in shape) and all(
        p.name == name and p.extent == shape and not any(p.at) and all(a in (-1, d) for d, a in enumerate(p.axis)) for p in pieces)
