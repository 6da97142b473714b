"""Publishing a stream of whole tensors whose names and sizes are not known in advance."""

from __future__ import annotations

import fnmatch
from typing import Any, Iterable, Sequence

import torch

from weightwire import boxes, errors
from weightwire.adapter import as_tensor, meta_of
from weightwire.memory import Arena, TensorMeta
from weightwire.publisher import Publisher, Release

_ALIGNMENT = 64


def check_cast(cast: str | None, keep: Sequence[str]) -> None:
    """ValueError names what Buckets do not know."""
    if cast not in (None, "bfloat16", "float16"):
        raise ValueError(f"dtype {cast!r} is neither bfloat16 nor float16")
    if isinstance(keep, str):
        raise ValueError(f"keep {keep!r} is a list of patterns")


class Buckets:
    """Shared memory: tensors packed into regions of `bytes_each` in the order in which they come; a larger one has its own.

    The next pass over the same tensors goes into the same places, so that nothing is bound again. A region's
    unused end costs no memory: its pages are never touched.

    cast: "bfloat16" or "float16": wider floating-point tensors are rounded to it on the way, but those whose names match one of `keep`
    (patterns of fnmatch). None: all stay as they are.
    """

    def __init__(self, bytes_each: int, cast: str | None = None, keep: Sequence[str] = ()):
        check_cast(cast, keep)
        self._bytes_each, self._cast, self._keep = bytes_each, getattr(torch, cast) if cast else None, list(keep)
        self.arenas: list[Arena] = []
        self.places: dict[str, tuple[int, int]] = {}  #: (arena, offset) by name
        self._metas: dict[str, TensorMeta] = {}
        self._views: dict[str, Any] = {}
        self._end = 0  # of what is used in the last arena
        self._seen: set[str] = set()

    def begin(self) -> None:
        """A new pass."""
        self._seen = set()

    def put(self, name: str, tensor: Any) -> None:
        """Copies `tensor`, which may change or go away afterwards.
        ValueError: the name came before in this pass, or with another dtype or shape in an earlier one."""
        meta = meta_of(name, torch.empty(0, dtype=self._dtype_of(name, tensor)), tensor.shape)
        if name in self._seen:
            raise ValueError(f"{name} came twice in one version")
        if name not in self._metas:
            self._place(meta)
        elif self._metas[name] != meta:
            raise ValueError(f"{name} was {self._metas[name]} and is {meta} now; restart the job for another model")
        self._seen.add(name)
        self._views[name].copy_(tensor.detach())

    def _dtype_of(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        if self._cast is None or not tensor.dtype.is_floating_point or tensor.element_size() <= self._cast.itemsize or \
                any(fnmatch.fnmatchcase(name, pattern) for pattern in self._keep):
            return tensor.dtype
        return self._cast

    def _place(self, meta: TensorMeta) -> None:
        if not self.arenas or self._end + meta.nbytes > self.arenas[-1].nbytes:
            size = max(self._bytes_each, meta.nbytes)
            self.arenas.append(Arena("weightwire-stream", [TensorMeta("bytes", "U8", (size,))]))
            self._end = 0
        array = self.arenas[-1].arrays["bytes"][self._end:self._end + meta.nbytes]
        self._metas[meta.name], self._views[meta.name] = meta, as_tensor(array, meta)
        self.places[meta.name] = len(self.arenas) - 1, self._end
        self._end += -(-meta.nbytes // _ALIGNMENT) * _ALIGNMENT

    def end(self) -> list[TensorMeta]:
        """The tensors of this pass, by name. ValueError: one of an earlier pass did not come."""
        missing = sorted(self._metas.keys() - self._seen)
        if missing:
            raise ValueError(f"{missing[0]} and {len(missing) - 1} more did not come in this version")
        return [self._metas[name] for name in sorted(self._metas)]

    def close(self) -> None:
        for arena in self.arenas:
            arena.close()


class TensorSource:
    """A stream of whole tensors, copied into shared memory and published from there by one rank. `cast`, `keep`: of Buckets; `where`: of
    Publisher."""

    model_type = ""  # of verl.sender.Source: names are those of the checkpoint

    def __init__(self, bucket_bytes: int, *, cast: str | None = None, keep: Sequence[str] = (), **where: Any):
        self._buckets = Buckets(bucket_bytes, cast, keep)
        self._where = where
        self._publisher: Publisher | None = None
        self._tensors: list[TensorMeta] = []
        self._last: Release | None = None

    def load(self, weights: Iterable[tuple[str, Any]], timeout: float) -> list[TensorMeta]:
        stream = iter(weights)
        try:
            self._wait_for_last(timeout)
            self._buckets.begin()
            for name, tensor in stream:
                self._buckets.put(name, tensor)
            self._tensors = self._buckets.end()
        except BaseException:
            for _ in stream:  # its collectives need every rank to the end
                pass
            raise
        return self._tensors

    def _wait_for_last(self, timeout: float) -> None:
        """After a round that failed its version may still be read from the buckets."""
        if self._last is not None:
            try:
                self._last.wait_released(timeout)
            except errors.WeightwireError:
                if not self._last.released:
                    raise
        if self._publisher is not None:
            self._publisher.reclaim()  # what a publish that failed left in doubt

    def publish(self, version: int, deadline: float) -> Release:
        if self._publisher is not None and not self._publisher.attached:
            self._reset()
        if self._publisher is None:
            self._publisher = self._open()
        self._last = self._publisher.publish(version, deadline=deadline)
        return self._last

    def _open(self) -> Publisher:
        publisher = Publisher(rank=0, world_size=1, **self._where)
        try:
            publisher.bind_places(
                boxes.submission({m.name: m for m in self._tensors}, [boxes.whole(m) for m in self._tensors]),
                self._buckets.arenas, self._buckets.places)
        except BaseException:
            publisher.close()
            raise
        return publisher

    def _reset(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def close(self) -> None:
        self._reset()
        self._buckets.close()
