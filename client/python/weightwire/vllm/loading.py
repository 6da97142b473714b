"""A live vLLM model in the format in which checkpoints are loaded, and back.

After start vLLM's parameters may be repacked, padded or empty: kernels prepack them. vLLM keeps, for every module, what
they looked like before ("load format") so that it can reload. This file is the only one that touches those parts of
vLLM, which are not its public interface; `features` says whether they are there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Collection, Iterator, Mapping, Sequence

import torch

from weightwire.errors import RefusedError
from weightwire.memory import TensorMeta
from weightwire.vllm import features
from weightwire.vllm.geometry import row_major
from weightwire.vllm.tracer import Probe, Recorder, UnrecordableTensor, storage_of

TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8,
         "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool,
         "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
         "U16": torch.uint16, "U32": torch.uint32}
SAFETENSORS = {dtype: name for name, dtype in TORCH.items()}
#: What INT4 weights have beside them: no version changes it, and that of a fused parameter is loaded from each of its parts.
_SHAPE = "weight_shape"


@contextmanager
def load_format(model: torch.nn.Module) -> Iterator[None]:
    """Inside, every parameter of `model` is a meta tensor of load format with its own loader; after it, the tensors
    that were there before are there again, untouched."""
    from vllm.model_executor.model_loader.reload import layerwise, meta, utils
    layers = []
    try:
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.kernel_tensors = utils.get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            layers.append((layer, info))
            meta.restore_layer_on_meta(layer, info)
            # A reload leaves its wrappers on these; outside of a reload they load nothing and say nothing.
            for tensor in utils.get_layer_tensors(layer).values():
                if hasattr(tensor, "weight_loader"):
                    tensor.weight_loader = layerwise._get_original_loader(tensor)
        yield
    finally:
        for layer, info in layers:
            place_kernel_tensors(layer, info)
            info.reset()


def place_kernel_tensors(layer: torch.nn.Module, info: Any) -> None:
    """Gives a module the tensors back that it had before its load format. vLLM before 0.26 makes every buffer persistent."""
    from vllm.model_executor.model_loader.reload import layerwise
    non_persistent = set(getattr(info, "kernel_non_persistent_buffers", ()))
    layerwise._place_kernel_tensors(layer, info)
    layer._non_persistent_buffers_set |= non_persistent & set(layer._buffers)


def owners(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str, torch.Tensor]]:
    """(module, attribute, tensor) of every parameter and persistent buffer, by full name."""
    found = {}
    for path, module in model.named_modules():
        own = {**module._parameters, **{k: b for k, b in module._buffers.items()
                                        if k not in module._non_persistent_buffers_set}}
        for attribute, tensor in own.items():
            if tensor is not None:
                found[f"{path}.{attribute}" if path else attribute] = (module, attribute, tensor)
    return found


def _check_complete(found: Mapping[str, Any], live: Mapping[str, Any], filled: Collection[str],
                    whole: Mapping[str, str]) -> None:
    """Every parameter is filled by the checkpoint, or is the same one as a parameter that is (tied weights), a shape, or a scale of
    the KV cache that the checkpoint has not: attention of quantized models gives these up when it has been loaded."""
    tied = {id(live[name][2]) for name in filled if name in live}
    empty = [name for name, (module, _, tensor) in found.items()
             if isinstance(tensor, torch.nn.Parameter) and tensor.numel() and name not in filled
             and not name.endswith(_SHAPE)
             and id(live[name][2] if name in live else None) not in tied
             and not (name not in live and features.is_deferred_attention_layer(module))]
    if empty and not whole:
        raise RefusedError(f"the loader leaves {len(empty)} parameters as they are, {empty[0]} first",
                           code="FAILED_PRECONDITION", tensor=empty[0],
                           remedy="is this checkpoint complete, and of this model?")


class Trace:
    """What the loader does with a checkpoint.

    rows:   the copies, as `Subscriber.bind(trace=)` takes them
    params: the parameters that they fill, in load format
    whole:  checkpoint tensors that the loader treats in a way that no row describes, with the reason
    """

    def __init__(self, rows: list[dict[str, Any]], params: list[TensorMeta], whole: dict[str, str]):
        self.rows, self.params, self.whole = rows, params, whole


@torch.no_grad()
def trace(model: torch.nn.Module, checkpoint: Sequence[TensorMeta]) -> Trace:
    """Drives the model's own `load_weights` with probes. Changes nothing in the model."""
    features.check()
    whole: dict[str, str] = {}
    live = owners(model)
    with load_format(model):
        found = owners(model)
        while True:
            recorder = Recorder({storage_of(t): name for name, (_, _, t) in found.items() if t.numel() or t.is_meta})
            try:
                with recorder:
                    model.load_weights((meta.name, Probe(meta.name, meta.shape, TORCH[meta.dtype]))
                                       for meta in checkpoint if meta.name not in whole and not meta.name.endswith(_SHAPE))
            except UnrecordableTensor as why:
                whole[why.source] = str(why)
                continue
            break
        rows = []
        for row in recorder.rows:
            if row["param"] in recorder.refused:
                whole[row["src"]] = f"{row['param']} is changed after it was copied, by {recorder.refused[row['param']]}"
            else:
                rows.append(row)
        names = dict.fromkeys(row["param"] for row in rows)
        _check_complete(found, live, {*names, *recorder.refused}, whole)
        for name in names:
            tensor = found[name][2]
            if tuple(tensor.stride()) != row_major(tensor.shape) or tensor.storage_offset() != 0:
                raise RefusedError(f"{name} is not contiguous in load format", code="UNIMPLEMENTED", tensor=name)
        params = [TensorMeta(name, SAFETENSORS[found[name][2].dtype], tuple(found[name][2].shape)) for name in names]
    return Trace(rows, params, whole)
