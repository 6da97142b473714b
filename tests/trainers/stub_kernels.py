"""Stands in for packages of CUDA kernels (flash-linear-attention, mamba_ssm): what a model without a forward pass never calls.
`install()` before megatron is imported."""

from __future__ import annotations

import importlib.machinery
import sys
import types

PACKAGES = ("fla", "mamba_ssm", "causal_conv1d")


class _Kernels(types.ModuleType):
    """A package of kernels that are never called; its RMSNorm has a weight."""
    __path__: list = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        import torch

        class RMSNorm(torch.nn.Module):
            def __init__(self, hidden_size, *_, device=None, dtype=None, **__):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))

        def kernel(*_, state_dtype=None, **__):
            raise AssertionError("kernels are not here")

        return RMSNorm if name == "RMSNorm" else kernel


class _Finder:
    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Kernels(spec.name)

    def exec_module(self, module):
        pass


def install(packages=PACKAGES) -> None:
    sys.meta_path.insert(0, _Finder(packages))
