"""Parameters on a GPU, packed and cast into memory of that GPU that the agent lends: one launch for all of them, on a stream of its
own. No byte goes by the host. Untested on hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterable, Sequence

import numpy as np
import torch

from weightwire import torch_cuda
from weightwire.boxes import row_major
from weightwire.device import Device, DeviceArray
from weightwire.device_library import JOB, Lane, kinds
from weightwire.torch_dtypes import NAMES, TORCH

_MADE_BYTES = 256 << 20  # of temporaries that one launch may wait for
_SUM_BYTES = 256 << 10  # read by one warp: a large tensor's sums keep the GPU busy

#: As torch.Tensor.copy_(into, tensor).
Write = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True)
class Piece:
    """What `tensor` holds belongs into `into`, of the same shape, cast where the dtypes differ. It is `write` that says what it holds
    where `plain` is False: then kernels do not read `tensor` itself."""

    into: DeviceArray
    tensor: torch.Tensor
    write: Write
    plain: bool


class GpuCopies:
    """Into memory that the agent lends on one GPU, and compared with what lies there. For one thread at a time."""

    def __init__(self, device: Device):
        self._library, self._gpu = device._library, device.index
        self._lanes = {device.index: Lane(device._library, device.index)}

    def pack(self, pieces: Iterable[Piece]) -> None:
        """Returns when all is there. Parameters are read as they are behind what the current stream of their GPU has by now."""
        jobs: list[np.ndarray] = []
        made: list[torch.Tensor] = []  # kept until they are read
        made_bytes = 0
        for piece in pieces:
            source = _readable(piece)
            if source is not piece.tensor:
                made.append(source)
                made_bytes += source.nbytes
            if torch_cuda.gpu_of(source) == self._gpu:
                jobs.append(_job(piece, source))
            else:
                self._carry(piece, source)
            if made_bytes > _MADE_BYTES:
                self._launch(jobs)
                jobs, made, made_bytes = [], [], 0
        self._launch(jobs)

    def _launch(self, jobs: Sequence[np.ndarray]) -> None:
        lane = self._lanes[self._gpu]
        if jobs:
            lane.follow(torch_cuda.current_stream(self._gpu))
            lane.copies(np.concatenate(jobs))
        lane.wait()

    def _carry(self, piece: Piece, source: torch.Tensor) -> None:
        """From the host, where the trainer has offloaded it to, or from another GPU."""
        wanted = TORCH[piece.into.meta.dtype]
        if source.dtype != wanted or not source.is_contiguous():
            cast = torch_cuda.beside(source, wanted)
            cast.copy_(source)
            source = cast
        gpu = torch_cuda.gpu_of(source)
        lane = self._lanes[self._gpu]
        if gpu is not None:
            lane = self._lanes.setdefault(gpu, Lane(self._library, gpu))
            lane.follow(torch_cuda.current_stream(gpu))
        lane.bytes(piece.into.pointer, source.data_ptr(), piece.into.nbytes)
        lane.wait()

    def equal(self, piece: Piece) -> bool:
        """Do both hold the same bytes? By XXH3 sums of parts, made where they lie; a NaN equals itself."""
        source = _readable(piece)
        if torch_cuda.gpu_of(source) != self._gpu:
            here = torch.empty(source.shape, dtype=TORCH[piece.into.meta.dtype])
            here.copy_(source)
            return bool(here.reshape(-1).view(torch.uint8).numpy().tobytes() == piece.into.read().tobytes())
        lane = self._lanes[self._gpu]
        lane.follow(torch_cuda.current_stream(self._gpu))
        job = _job(piece, source)
        theirs = _cut(job, source.element_size())
        job["source"], job["from"] = piece.into.pointer, job["to"]
        job["box"]["source_stride"] = job["box"]["target_stride"]
        mine = _cut(job, piece.into.nbytes // source.numel())
        sums = lane.sums(np.concatenate([theirs, mine]))
        return bool(np.array_equal(sums[:len(theirs)], sums[len(theirs):]))


def _readable(piece: Piece) -> torch.Tensor:
    """Itself, where kernels can read it and cast it, else one that torch makes of it on the same GPU."""
    tensor, wanted = piece.tensor, piece.into.meta.dtype
    if piece.plain and kinds(NAMES[tensor.dtype], wanted, tensor.element_size()) is not None:
        return tensor
    made = torch_cuda.beside(tensor, TORCH[wanted])
    piece.write(made, tensor)
    return made


def _job(piece: Piece, source: torch.Tensor) -> np.ndarray:
    """One of JOB, from `source` into the piece's memory."""
    job = np.zeros(1, JOB)
    shape, stride, target = tuple(source.shape), source.stride(), row_major(source.shape)
    if source.is_contiguous():
        shape, stride, target = (source.numel(),), (1,), (1,)
    found = kinds(NAMES[source.dtype], piece.into.meta.dtype, source.element_size())
    assert found is not None  # _readable
    job["target"], job["source"], (job["from"], job["to"]) = piece.into.pointer, source.data_ptr(), found
    box = job["box"]
    box["ndim"] = n = len(shape)
    box["extent"][0, :n], box["source_stride"][0, :n], box["target_stride"][0, :n] = shape, stride, target
    return job


def _cut(job: np.ndarray, size: int) -> np.ndarray:
    """A job for each part of about _SUM_BYTES: ranges of its first dimension."""
    box = job["box"][0]
    rows, inner = int(box["extent"][0]), int(np.prod(box["extent"][1:box["ndim"]]))
    step = max(1, _SUM_BYTES // (inner * 8))  # the same parts for both sides, whatever their dtypes
    begin = np.arange(0, rows, step)
    jobs = np.repeat(job, len(begin))
    jobs["source"] += (begin * int(box["source_stride"][0]) * size).astype(np.uint64)
    jobs["box"]["extent"][:, 0] = np.minimum(step, rows - begin)
    return jobs
