"""Records what a model's `load_weights` does, with tensors that have no storage.

A loader takes views of a checkpoint tensor and copies them into parameters. A `Probe` stands for the checkpoint
tensor: torch itself computes the geometry of every view of it, so that any chain of narrow, view, chunk, unbind,
transpose… is known by (size, stride, offset) alone. `Recorder` sees every operation that writes, and turns a copy
of a probe into a row; it moves no data and changes no parameter. What is no view and no copy raises `Unrecordable`
and names the tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from weightwire.vllm.geometry import Block, Unrecordable, block_of

_aten = torch.ops.aten
# Their result has the elements of their argument, in the same order: on a probe they change nothing.
_SAME = {_aten.clone.default, _aten.contiguous.default, _aten.detach.default, _aten.alias.default,
         _aten.lift_fresh.default, _aten._to_copy.default}


class UnrecordableTensor(Unrecordable):
    """As Unrecordable, with the checkpoint tensor that it happened to."""

    def __init__(self, source: str, why: str):
        super().__init__(f"{source}: {why}")
        self.source = source


class Probe(torch.Tensor):
    """A view of checkpoint tensor `source`, whose contiguous shape is `whole`; it has no elements."""

    source: str
    whole: tuple[int, ...]
    fetch: Callable[[Block], torch.Tensor] | None

    @staticmethod
    def __new__(cls, source: str, whole: Iterable[int], dtype: torch.dtype, like: torch.Tensor | None = None,
                fetch: Callable[[Block], torch.Tensor] | None = None) -> Probe:
        """fetch: gives the elements of a block, for a probe whose copies really happen (hf_sharded)."""
        whole = tuple(whole)
        view = torch.empty(whole, dtype=dtype, device="meta") if like is None else like
        self: Probe = torch.Tensor._make_wrapper_subclass(cls, view.size(), strides=view.stride(),
                                                          storage_offset=view.storage_offset(), dtype=dtype, device="cpu")
        self.source, self.whole, self.fetch = source, whole, fetch
        return self

    def block(self) -> Block:
        try:
            return block_of(self.whole, self.size(), self.stride(), self.storage_offset())
        except Unrecordable as why:
            raise UnrecordableTensor(self.source, str(why)) from None

    def elements(self) -> torch.Tensor:
        """The elements of this view, with its dimensions; needs `fetch`."""
        block = self.block()
        order = [dim for joined in block.dims for dim in joined]
        rest = [dim for dim in range(len(block.shape)) if dim not in order]
        assert self.fetch is not None
        return self.fetch(block).permute(order + rest).reshape(self.size())

    def _twin(self) -> torch.Tensor:
        base = torch.empty(self.whole, dtype=self.dtype, device="meta")
        return base.as_strided(self.size(), self.stride(), self.storage_offset())

    def __repr__(self, **_: Any) -> str:
        return f"Probe({self.source}, {tuple(self.size())})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first: Any = args[0] if args else None
        if func is _aten.copy_.default and not isinstance(first, cls) and args[1].fetch:
            return first.copy_(args[1].elements())
        if isinstance(first, cls) and not any(isinstance(a, cls) for a in (*args[1:], *kwargs.values())):
            if func in _SAME and kwargs.get("dtype", first.dtype) == first.dtype:
                return cls(first.source, first.whole, first.dtype, first._twin(), first.fetch)
            if func.is_view:
                out = func(first._twin(), *args[1:], **kwargs)
                return tree_map_only(torch.Tensor, lambda view: cls(first.source, first.whole, view.dtype, view,
                                                                    first.fetch), out)
        probe = next(a for a in (*args, *kwargs.values()) if isinstance(a, cls)) if not isinstance(first, list) \
            else next(a for a in first if isinstance(a, cls))
        raise UnrecordableTensor(probe.source, f"the loader calls {func} on it")


@dataclass
class Recorder(TorchDispatchMode):
    """While entered, copies of probes into `params` become `rows`; nothing is written.

    params: by storage identity (`storage_of`), the name of the parameter that owns the storage
    refused: parameters that something else than a probe or zero was written to, with the operation's name
    """

    params: Mapping[int, str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target: Any = args[0] if args and func._schema.is_mutable else None
        name = self.params.get(storage_of(target)) if isinstance(target, torch.Tensor) else None
        if func is _aten.copy_.default and isinstance(args[1], Probe):
            self._row(target, args[1], name)
            return target
        if name is None:
            return func(*args, **kwargs)
        zero = func is _aten.zero_.default or (func is _aten.fill_.Scalar and args[1] == 0)
        if not zero and target.numel() > 0:
            self.refused[name] = str(func)
        return target

    def _row(self, target: torch.Tensor, probe: Probe, name: str | None) -> None:
        if name is None:
            raise UnrecordableTensor(probe.source, "the loader copies it to memory that is no parameter")
        if target.size() != probe.size():
            raise UnrecordableTensor(probe.source, f"a copy of {tuple(probe.size())} into {tuple(target.size())} of "
                                                   f"{name}")
        block = probe.block()
        self.rows.append(dict(
            src=probe.source,
            ops=[("narrow", dim, start, size) for dim, (start, size, whole)
                 in enumerate(zip(block.start, block.size, block.shape)) if size != whole],
            param=name, offset=target.storage_offset(), shape=list(block.size),
            stride=list(block.target_strides(target.stride())), dtype=str(target.dtype).removeprefix("torch.")))


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, meta tensors included; 0 for one without."""
    return 0 if isinstance(tensor, Probe) else tensor.untyped_storage()._cdata
