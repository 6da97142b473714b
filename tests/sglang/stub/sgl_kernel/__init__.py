"""In the place of SGLang's kernels, which exist for GPUs alone: everything may be imported, and raises when it is called. With
`attention_backend="torch_native"` a CPU engine calls none but one, which binds threads."""

import importlib.abc
import importlib.machinery
import sys

import torch


class _Missing:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"{self._name} needs a GPU")


def _attribute(module):
    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{module}.{name}")
    return get


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """sgl_kernel.anything is a module, too."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = _attribute(module.__name__)


sys.meta_path.append(_Modules())
__getattr__ = _attribute(__name__)
__version__ = "0.0.0"

torch.library.define("sgl_kernel::init_cpu_threads_env", "(str cpu_ids) -> str")


@torch.library.impl("sgl_kernel::init_cpu_threads_env", "CompositeExplicitAutograd")
def _init_cpu_threads_env(cpu_ids):
    return f"threads are left as they are, not bound to {cpu_ids}"
