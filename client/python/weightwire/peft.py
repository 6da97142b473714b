"""PEFT models: what transformers would load after a merge, without merging.

>>> publisher = weightwire.peft.Publisher(model)           # a PeftModel; on every rank of a DDP trainer, or on one
>>> publisher.publish(step).wait_released(timeout=60)

For each version every adapted layer is merged by PEFT's own code into a copy, one at a time, under the checkpoint's names.
The model is as it was afterwards, bit for bit: no unmerge, which rounds. Adapters by themselves, for engines that apply them,
are tensors like others: `weightwire.torch.Publisher(lambda: peft.get_peft_model_state_dict(model).items())`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Iterator

import torch

from weightwire import boxes, hf_export
from weightwire.adapter import Live, clean_name, is_sharded, meta_of, persistent_buffers, refuse
from weightwire.device_choice import DeviceChoice
from weightwire.publisher import DeltaMode, Lineage
from weightwire.torch import BoxPublisher, Names, Reading, unwrapped


def read_merged(model: torch.nn.Module, names: Names | None = None) -> Reading:
    """The layout of a PeftModel's base model, whole; adapters that are active are merged when a tensor is written.

    RefusedError: no PeftModel, an adapter that cannot be merged, a parameter that is sharded
    """
    lives = []
    for module_name, tensor, layer in _tensors(model):
        name = names(module_name) if names else module_name
        if name is None:
            continue
        if is_sharded(tensor):
            raise refuse("the parameter is sharded, and merging needs it whole", tensor=name,
                         remedy="publish what your trainer exports, merged, through weightwire.torch")
        write = partial(_write_merged, layer, module_name.rpartition(".")[2]) if layer is not None else None
        lives.append(Live(boxes.whole(meta_of(name, tensor)), tensor.detach(), write))
    canonical = {live.held.meta.name: live.held.meta for live in lives}
    return hf_export.exported(unwrapped(model).get_base_model(), canonical, lives) if names is None else (canonical, lives)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """(the checkpoint's name, tensor, the layer whose active adapters belong into it)."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

    model = unwrapped(model)
    if not isinstance(model, PeftModel):
        raise refuse(f"a {type(model).__name__} is no PeftModel", remedy="use weightwire.torch or weightwire.fsdp")
    inner = model.get_base_model()
    layers = {name: module for name, module in inner.named_modules() if isinstance(module, BaseTunerLayer)}
    saved = {name: module for name, module in inner.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)}
    if not layers and not saved:
        raise refuse(f"{type(model).__name__} has no layer that could be merged (prompt tuning?)",
                     remedy="engines need the adapter itself: publish peft.get_peft_model_state_dict(model)")
    _check_apart(layers)
    for name, module in saved.items():
        if not isinstance(module, ModulesToSaveWrapper):
            raise refuse(f"its wrapper {type(module).__name__} is not read", tensor=name, remedy="merge_and_unload() a copy")
        _check_tied(inner, name, module)
    for name, tensor in [*inner.named_parameters(), *persistent_buffers(inner)]:
        wanted = _name(name, layers, saved)
        if wanted is None:
            continue
        at, base, _ = name.rpartition(".base_layer.")
        layer = layers.get(at) if base else None
        yield clean_name(wanted), tensor, layer if layer is not None and _has_adapter(layer) else None


def _check_apart(layers: dict[str, Any]) -> None:
    """One layer's merge must be all that there is to be merged into a parameter."""
    for at in layers:
        outer, within, _ = at.partition(".base_layer")
        if within and outer in layers:
            raise refuse(f"its adapter lies within that of {outer} ({type(layers[outer].get_base_layer()).__name__})", tensor=at,
                         remedy="publish the tensors of merge_and_unload() of a copy through weightwire.torch")


def _name(name: str, layers: dict[str, Any], saved: dict[str, Any]) -> str | None:
    """The checkpoint's name; None for what belongs to an adapter, or is not the one in use."""
    for at, wrapper in saved.items():
        if not name.startswith(at + "."):
            continue
        active = wrapper.active_adapters[:1] if not wrapper.disable_adapters else []
        used = f"{at}.modules_to_save.{active[0]}." if active and active[0] in wrapper.modules_to_save else f"{at}.original_module."
        return f"{at}.{name.removeprefix(used)}" if name.startswith(used) else None
    for at in layers:
        if name.startswith(at + ".") and not name.startswith(at + ".base_layer."):
            return None
    return name.replace(".base_layer.", ".")


def _check_tied(inner: Any, name: str, wrapper: Any) -> None:
    head: Any = getattr(inner, "get_output_embeddings", lambda: None)()
    if head is wrapper and getattr(getattr(inner, "config", None), "tie_word_embeddings", False) and not wrapper.disable_adapters:
        raise refuse("it was trained apart from the input embeddings (modules_to_save), and config.json says that they are tied: "
                     "engines have one of them", tensor=name, remedy="train both, or untie them (tie_word_embeddings: false)")


def _has_adapter(layer: Any) -> bool:
    """Is there one to be merged?"""
    return not layer.disable_adapters and any(adapter not in layer.merged_adapters for adapter in layer.active_adapters)


def _write_merged(layer: Any, parameter: str, into: torch.Tensor, tensor: torch.Tensor) -> None:
    base = layer.get_base_layer()
    before, merged = {name: p.data for name, p in base.named_parameters(recurse=False)}, list(layer.merged_adapters)
    try:
        for name, data in before.items():
            getattr(base, name).data = data.clone()
        layer.merge()  # as merge_and_unload does; PEFT's safe merge rounds once more
        into.copy_(getattr(base, parameter).detach())
    finally:
        for name, data in before.items():
            getattr(base, name).data = data
        layer.merged_adapters[:] = merged


class Publisher(BoxPublisher):
    """Publishes a PeftModel with its active adapters merged. See LivePublisher for what `publish` promises.

    names: from the base model's names to Hugging Face's, where they differ; None leaves a tensor out
    rank, world_size: torch.distributed's when not given; all ranks must then open one, and share the sending
    """

    def __init__(self, model: torch.nn.Module, *, rank: int | None = None, world_size: int | None = None,
                 group: str = "trainer", job: str = "", agent: str | None = None, timeout: float = 30.0,
                 names: Names | None = None, lineage: Lineage = None, device: DeviceChoice = None,
                 delta: DeltaMode = None):
        super().__init__(lambda: read_merged(model, names), rank=rank, world_size=world_size, group=group, job=job,
                         agent=agent, timeout=timeout, lineage=lineage, device=device, delta=delta)
