"""What a model's parameters were when an update ended, so that it shows later whether they still are.

An engine serves from what it made of its stage: copies, which kernels pack. Their bytes cannot be compared with the stage's; but they
do not change until the next update, so that sums of them, taken when it ended, say all. An engine that was put to sleep (vLLM's level 2
gives the weights' memory away) wakes with other bytes, or with zeros, and nothing in vLLM says so.

The sums find accidents: 64-bit words are added up by column, in pieces of 128 rows of 1,024, and the columns' sums are hashed.
"""

from __future__ import annotations

import hashlib
from typing import Mapping

import numpy as np
import torch

_COLUMNS, _ROWS = 1024, 128
_PIECE = _COLUMNS * _ROWS * 8  # bytes
_TURN = 64 * _PIECE  # bytes that are summed in one call: on a CPU 10 ms or so


def sums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    """By name. Only reads; serving may go on beside it. Whatever is no plain memory on one device is left out: there is nothing to
    sum on the meta device, and an opaque layout shows no bytes."""
    return {name: _sum(tensor) for name, tensor in tensors.items()
            if tensor.numel() > 0 and not tensor.is_meta and tensor.layout is torch.strided}


@torch.no_grad()
def _sum(tensor: torch.Tensor) -> bytes:
    flat = _flat(tensor.detach().as_subclass(torch.Tensor))
    found = hashlib.blake2b(repr((tensor.dtype, tuple(tensor.shape))).encode(), digest_size=16)
    for begin in range(0, flat.numel(), _TURN):
        turn = flat[begin:begin + _TURN]
        whole = turn.numel() // _PIECE * _PIECE
        if whole:
            found.update(_columns(turn[:whole]))
        found.update(turn[whole:].cpu().numpy().tobytes())
    return found.digest()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, without a copy where its elements lie side by side in whatever order."""
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _columns(part: torch.Tensor) -> bytes:
    sums: np.ndarray
    if part.device.type == "cpu":  # numpy: torch would start threads, on the cores that the engine computes on
        words = part.numpy().view(np.uint64) if part.data_ptr() % 8 == 0 else part.clone().numpy().view(np.uint64)
        sums = words.reshape(-1, _ROWS, _COLUMNS).sum(axis=1, dtype=np.uint64)
    else:
        sums = part.view(torch.int64).view(-1, _ROWS, _COLUMNS).sum(1).cpu().numpy()
    return sums.tobytes()
