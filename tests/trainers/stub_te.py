"""Stands in for transformer_engine, which exists for CUDA alone: allocates parameters with Transformer Engine's names
and shapes, computes nothing. `install()` before megatron is imported.

What is not listed here becomes an empty class when it is asked for: mcore and the bridges import many names that a
model without a forward pass never calls.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types

import torch

VERSION = "2.10.0"


def _weight(*shape, params_dtype=torch.bfloat16, **_):
    return torch.nn.Parameter(torch.zeros(shape, dtype=params_dtype))


def _mark(layer, names, biases):
    """As reset_parameters() of Transformer Engine's linear layers: their weights are parallel, whether they are cut or not, and
    biases where columns are."""
    for name in [*names, *(biases if layer.parallel_mode == "column" else ())]:
        parameter = getattr(layer, name)
        parameter.tensor_model_parallel, parameter.partition_stride = True, 1
        parameter.partition_dim = 1 if layer.parallel_mode == "row" and name in names else 0


def _cut(in_features, out_features, parallel_mode, tp_size):
    """Transformer Engine divides by the tensor-parallel size itself."""
    rows = out_features // tp_size if parallel_mode == "column" else out_features
    return rows, in_features // tp_size if parallel_mode == "row" else in_features


class Linear(torch.nn.Module):
    def __init__(self, in_features, out_features, *, bias=True, parallel_mode=None, tp_size=1, **options):
        super().__init__()
        rows, columns = _cut(in_features, out_features, parallel_mode, tp_size)
        self.weight = _weight(rows, columns, **options)
        self.in_features, self.out_features = columns, rows
        self.use_bias, self.parallel_mode = bias, parallel_mode
        if bias:
            self.bias = _weight(rows, **options)
        else:
            self.bias = torch.empty(0)
        _mark(self, ["weight"], ["bias"] if bias else [])


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, normalization="LayerNorm", zero_centered_gamma=False, **options):
        super().__init__(in_features, out_features, **options)
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = _weight(in_features, params_dtype=options["params_dtype"])
        if normalization == "LayerNorm":
            self.layer_norm_bias = _weight(in_features, params_dtype=options["params_dtype"])


class GroupedLinear(torch.nn.Module):
    def __init__(self, num_gemms, in_features, out_features, *, bias=True, parallel_mode=None, tp_size=1, **options):
        super().__init__()
        self.num_gemms, self.use_bias, self.parallel_mode = num_gemms, bias, parallel_mode
        rows, columns = _cut(in_features, out_features, parallel_mode, tp_size)
        for i in range(num_gemms):
            self.register_parameter(f"weight{i}", _weight(rows, columns, **options))
            if bias:
                self.register_parameter(f"bias{i}", _weight(rows, **options))
        _mark(self, [f"weight{i}" for i in range(num_gemms)], [f"bias{i}" for i in range(num_gemms)] if bias else [])

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        pass


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size=None, eps=1e-5, *, normalized_shape=None, **options):  # by the name that mcore's version uses
        super().__init__()
        self.zero_centered_gamma = options.get("zero_centered_gamma", False)
        self.weight = _weight(hidden_size or normalized_shape, **options)


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size=None, eps=1e-5, *, normalized_shape=None, **options):
        super().__init__(hidden_size, eps, normalized_shape=normalized_shape, **options)
        self.bias = _weight(hidden_size or normalized_shape, **options)


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads=0, *_, softmax_type="vanilla", tp_size=1, **__):
        super().__init__()
        if softmax_type == "learnable":
            self.softmax_offset = _weight(num_attention_heads // tp_size)


def get_cpu_offload_context(*_, **__):
    return None, None


_REAL = {c.__name__: c for c in (Linear, LayerNormLinear, GroupedLinear, RMSNorm, LayerNorm, DotProductAttention,
                                 get_cpu_offload_context)}


class _Module(types.ModuleType):
    __path__: list = []
    __version__ = VERSION

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if name in _REAL:
            value = _REAL[name]
        elif name.islower() and full in sys.modules:
            value = sys.modules[full]
        else:
            value = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        parent, _, leaf = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)


def install() -> None:
    assert not any(name.split(".")[0] == "megatron" for name in sys.modules), "megatron was imported already"
    sys.meta_path.insert(0, _Finder())
    import transformer_engine.common.recipe  # noqa: F401
    import transformer_engine.pytorch.distributed  # noqa: F401
    import transformer_engine.pytorch.ops  # noqa: F401


def keep_extra_state_whole() -> None:
    """After megatron was imported. Without fp8 there is none to be split over the experts of a grouped layer."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear
    TEGroupedLinear._split_extra_state = lambda self, state: [state] * self.num_gemms
