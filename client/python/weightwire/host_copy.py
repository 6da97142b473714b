"""Copies between tensors in host memory, by several threads, without Python's lock and past the caches."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Iterator, Sequence

import torch

_THREADS_MAX = 8
_TASK_BYTES = 8 << 20

#: target, source, bytes of an element, extent, strides of the source and of the target in elements
_Block = tuple[int, int, int, Sequence[int], Sequence[int], Sequence[int]]


def is_plain(tensor: torch.Tensor) -> bool:
    """Are its elements what lies in its memory, by its strides?"""
    return (type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_conj()
            and not tensor.is_neg())


def _is_copied(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and tensor.device.type == "cpu" and tensor.element_size() <= 8


class HostCopies:
    """Without the library beside wwctl: torch's copies, on torch's threads."""

    def __init__(self) -> None:
        from weightwire.checkpoint.library import Library, library_of  # here: it is all of weightwire.checkpoint
        from weightwire.checkpoint.stored import CheckpointError

        self._pool: ThreadPoolExecutor | None = None
        self._library: Library | None = None
        try:
            self._library = library_of(None)
        except CheckpointError:
            return
        threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
        if threads > 1:
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weightwire-copy")

    def takes(self, into: torch.Tensor, tensor: torch.Tensor) -> bool:
        """Are they plain ones that differ in strides at most?"""
        return (self._library is not None and _is_copied(into) and _is_copied(tensor) and into.dtype == tensor.dtype
                and into.shape == tensor.shape)

    def run(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies each (into, tensor) that `takes` has agreed to. None may touch what another one writes."""
        tasks = list(_tasks(block for into, tensor in pairs for block in _blocks(into, tensor)))
        if self._pool is None or len(tasks) < 2:
            for task in tasks:
                self._copy(task)
        else:
            list(self._pool.map(self._copy, tasks))  # what fails is raised here

    def _copy(self, task: Sequence[_Block]) -> None:
        assert self._library is not None
        for block in task:
            self._library.copy_at(*block)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _blocks(into: torch.Tensor, tensor: torch.Tensor) -> Iterator[_Block]:
    """Of at most about _TASK_BYTES, where one dimension can be cut so."""
    size, count = tensor.element_size(), tensor.numel()
    if count == 0:
        return
    extent, source, target = list(tensor.shape), list(tensor.stride()), list(into.stride())
    if tensor.is_contiguous() and into.is_contiguous():
        extent, source, target = [count], [1], [1]
    cut = max(range(len(extent)), key=lambda d: extent[d], default=-1)
    if cut < 0:
        yield into.data_ptr(), tensor.data_ptr(), size, extent, source, target
        return
    step = max(1, _TASK_BYTES // (count // extent[cut] * size))
    for begin in range(0, extent[cut], step):
        part = [*extent[:cut], min(step, extent[cut] - begin), *extent[cut + 1:]]
        yield (into.data_ptr() + begin * target[cut] * size, tensor.data_ptr() + begin * source[cut] * size, size, part, source, target)


def _tasks(blocks: Iterator[_Block]) -> Iterator[list[_Block]]:
    """Small ones together."""
    task: list[_Block] = []
    held = 0
    for block in blocks:
        nbytes = block[2]
        for extent in block[3]:
            nbytes *= extent
        if task and held + nbytes > _TASK_BYTES:
            yield task
            task, held = [], 0
        task.append(block)
        held += nbytes
    if task:
        yield task
