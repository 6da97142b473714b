"""Puts the tensors of a version into a live vLLM model.

`Fused` writes parameters of load format module by module: the module gets fresh tensors of load format with the staged
bytes (copied there, or the very tensors that were given, where nobody else uses them), the engine's own processing runs
on them, and the result is copied into the tensors that were there before (captured graphs and kernels hold on to those). `Loader` gives checkpoint tensors to the model's own
`load_weights` inside vLLM's reload; the tensors may be windows that hold only what this rank reads.

Both leave a model whose every module is whole even when they fail, but then of mixed versions: nothing but another
complete run may follow. Both repair what vLLM's reload forgets on CPUs: a packed copy of tied weights, the
packing of experts, and the convolution of Mamba that its mixer keeps beside the packed one.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import torch

from weightwire.vllm.features import is_deferred_attention_layer
from weightwire.vllm.geometry import Block
from weightwire.vllm.loading import place_kernel_tensors


class Fused:
    """Tensors by the names of the engine's own parameters."""

    def __init__(self, model: torch.nn.Module, model_config: Any):
        self._model, self._config = model, model_config

    def start(self) -> None:
        pass

    @torch.no_grad()
    def update(self, staged: Mapping[str, torch.Tensor], owned: bool = False) -> None:
        """`owned`: nobody else reads or writes these tensors, now or later."""
        by_module: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in staged.items():
            path, _, attribute = name.rpartition(".")
            by_module.setdefault(path, {})[attribute] = tensor
        for path, tensors in by_module.items():
            module = self._model.get_submodule(path)
            if is_deferred_attention_layer(module) and not any(hasattr(module, name) for name in tensors):
                _install_scales(module, tensors)
            else:
                _install_module(path, module, tensors, owned)

    @torch.no_grad()
    def finish(self) -> None:
        for module in self._model.modules():
            if is_deferred_attention_layer(module):
                module.process_weights_after_loading(self._config.dtype)
        _process_tied(self._model)
        _copy_convolutions(self._model)

    def abandon(self) -> None:
        pass


def _install_module(path: str, module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], owned: bool) -> None:
    from vllm.model_executor.model_loader.reload import layerwise, meta, utils
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = utils.get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    info.loaded_weights = [(name, None) for name in tensors]
    before = {**info.kernel_tensors[0], **info.kernel_tensors[1]}
    try:
        meta.restore_layer_on_meta(module, info)
        placed = _place(module, utils.get_layer_tensors(module), tensors) if owned else set()
        meta.materialize_layer(module, info)
        for name, tensor in utils.get_layer_tensors(module).items():
            if name in placed:
                continue
            if name in tensors:
                tensor.data.copy_(tensors[name])
            elif tensor is not before.get(name):  # no part of a checkpoint: keep its value
                if name not in before or before[name].shape != tensor.shape:
                    raise RuntimeError(f"{path}.{name} is neither in the checkpoint nor can its value be kept; use "
                                       "mode hf_sharded")
                tensor.data.copy_(before[name])
        _process(module)
        non_persistent = set(info.kernel_non_persistent_buffers)
        layerwise._copy_and_restore_kernel_tensors(module, info)
        module._non_persistent_buffers_set |= non_persistent & set(module._buffers)  # vLLM before 0.26 forgets it
    except BaseException:
        place_kernel_tensors(module, info)
        raise
    finally:
        info.reset()


def _install_scales(module: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Scales of the KV cache, which attention folds into buffers and gives up: all are made anew, as vLLM's own reload does, for those
    that no checkpoint has mean something too."""
    before = set(module._parameters)
    try:
        module.quant_method.create_weights(module)
        for name, tensor in tensors.items():
            parameter = getattr(module, name)
            parameter.data.copy_(tensor.reshape(parameter.shape))
        module.quant_method.process_weights_after_loading(module)
    finally:
        for name in set(module._parameters) - before:  # after a failure
            delattr(module, name)


def _place(module: torch.nn.Module, wanted: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Makes `tensors` themselves the module's, as vLLM would make new ones from its meta tensors; which ones."""
    placed = set()
    for name, like in wanted.items():
        if name in tensors and like.is_meta:
            made = tensors[name]
            made.__class__, made.__dict__ = like.__class__, like.__dict__.copy()
            setattr(module, name, made)
            placed.add(name)
    return placed


def _process(module: torch.nn.Module) -> None:
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    module.__dict__.pop("_already_called_process_weights_after_loading", None)
    method = getattr(module, "quant_method", None)
    if isinstance(method, QuantizeMethodBase):
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            module.update_param_tp_status()
        _pack_experts(module)


def _pack_experts(module: torch.nn.Module) -> bool:
    """On CPUs vLLM packs experts when it builds their kernel, and not again when weights change."""
    from vllm.platforms import current_platform
    kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
    if not hasattr(kernel, "fused_experts") or not current_platform.is_cpu():
        return False
    kernel.fused_experts.process_weights_after_loading(module)
    return True


def _process_tied(model: torch.nn.Module) -> None:
    """Modules that share a parameter with an earlier one (a tied lm_head) keep a packed copy of their own."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    seen: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is None or parameter.numel() == 0:
                continue
            first = seen.setdefault(id(parameter), module)
            method = getattr(module, "quant_method", None)
            if first is not module and isinstance(method, QuantizeMethodBase):
                method.process_weights_after_loading(module)


def _copy_convolutions(model: torch.nn.Module) -> None:
    """Mamba 2's mixer reads `conv_weights`, a view of its convolution's weights as they were loaded. Where a CPU has packed
    these since, the view is a copy that nobody writes any more."""
    for path, module in model.named_modules():
        copy, conv = module._buffers.get("conv_weights"), getattr(module, "conv1d", None)
        if copy is None or conv is None:
            continue
        unpacked = getattr(conv, "_cpu_unpacked_conv_weight", None)
        loaded = conv.weight if unpacked is None else unpacked
        if loaded.data_ptr() == copy.data_ptr():
            continue
        if loaded.numel() != copy.numel():
            raise RuntimeError(f"{path}.conv_weights cannot be brought up to date: its convolution is packed in an unknown way")
        copy.copy_(loaded.reshape(copy.shape))


class Loader:
    """Tensors by the names of the checkpoint, or probes of them that hold a window."""

    def __init__(self, model: torch.nn.Module, model_config: Any):
        self._model, self._config = model, model_config
        self._non_persistent: list[tuple[torch.nn.Module, set[str]]] = []

    def start(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload
        self._non_persistent = [(module, set(module._non_persistent_buffers_set)) for module in self._model.modules()]
        initialize_layerwise_reload(self._model)

    @torch.no_grad()
    def update(self, tensors: Mapping[str, torch.Tensor], owned: bool = False) -> None:
        self._model.load_weights(iter(tensors.items()))

    @torch.no_grad()
    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        finalize_layerwise_reload(self._model, self._config)
        for module in self._model.modules():
            before = dict(module._parameters)
            if _pack_experts(module):
                for name, parameter in before.items():
                    if parameter is not None and module._parameters[name] is not parameter:
                        parameter.data.copy_(module._parameters[name])
                        module._parameters[name] = parameter
        _process_tied(self._model)
        _copy_convolutions(self._model)
        self._mend_buffers()

    def _mend_buffers(self) -> None:
        """vLLM before 0.26 makes every buffer persistent when it reloads."""
        for module, names in self._non_persistent:
            module._non_persistent_buffers_set |= names & set(module._buffers)

    def abandon(self) -> None:
        """Gives every module its tensors back after a failure between start and finish."""
        from vllm.model_executor.model_loader.reload import layerwise
        for module in self._model.modules():
            info = layerwise.get_layerwise_info(module)
            if info.can_load():
                layerwise._place_kernel_tensors(module, info)
                info.reset()
        self._mend_buffers()


def windows(rows: Sequence[Mapping[str, Any]], shapes: Mapping[str, Sequence[int]]) -> dict[str, list[tuple[int, int]]]:
    """For each checkpoint tensor that `rows` read, the smallest block that holds all of it: (start, size) a dimension."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        block = [(0, extent) for extent in shapes[row["src"]]]
        for _, dim, start, size in row["ops"]:
            block[dim] = (start, size)
        known = found.setdefault(row["src"], block)
        found[row["src"]] = [(min(a, b), max(a + n, b + m) - min(a, b)) for (a, n), (b, m) in zip(known, block)]
    return found


def fetch_window(tensor: torch.Tensor, window: Sequence[tuple[int, int]]) -> Callable[[Block], torch.Tensor]:
    """A `Probe.fetch` that reads from a tensor that holds `window` only."""
    def fetch(block: Block) -> torch.Tensor:
        view = tensor
        for dim, ((low, _), start, size) in enumerate(zip(window, block.start, block.size)):
            view = view.narrow(dim, start - low, size)
        return view
    return fetch
