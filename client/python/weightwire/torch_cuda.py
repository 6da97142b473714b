"""What weightwire asks of torch's CUDA, in one place, where tests without a GPU put their own. Untested on hardware."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Mapping

import torch

from weightwire.device import DeviceArray

log = logging.getLogger("weightwire")
_PORTABLE, _READ_ONLY = 0x01, 0x08  # of cudaHostRegister


def gpu_of(tensor: torch.Tensor) -> int | None:
    """The index, in this process, of the GPU in whose memory it lies; None: elsewhere."""
    return tensor.device.index if tensor.device.type == "cuda" else None


def current_stream(gpu: int) -> int:
    """The cudaStream_t on which this thread's work for `gpu` is enqueued."""
    return int(torch.cuda.current_stream(gpu).cuda_stream)


def beside(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A row-major one of its shape, with any content, on its device."""
    return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)


@dataclass(frozen=True)
class _Bytes:
    """Of an array: what torch takes as memory of the GPU, whatever its dtype, and keeps for as long as its tensor is there."""

    array: DeviceArray

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.array.__cuda_array_interface__, "shape": (self.array.nbytes,), "typestr": "|u1"}


def over(array: DeviceArray, dtype: torch.dtype) -> torch.Tensor:
    """The array itself as a tensor of `dtype`, without a copy; its memory stays lent while one of its views is there."""
    where = f"cuda:{array.gpu}"
    if array.nbytes == 0:
        return torch.empty(array.meta.shape, dtype=dtype, device=where)
    return torch.as_tensor(_Bytes(array), device=where).view(dtype).view(array.meta.shape)


def current_gpu() -> int | None:
    """That this process uses; None: it uses none."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def wait_for_copies(tensors: Iterable[torch.Tensor]) -> None:
    """Until all that torch has enqueued on the GPUs of `tensors` is done, by whatever stream: what was copied to or from them may be written
    then."""
    for gpu in {gpu_of(tensor) for tensor in tensors} - {None}:
        torch.cuda.synchronize(gpu)


@contextlib.contextmanager
def side_stream(gpu: int) -> Iterator[None]:
    """torch's work in the block runs behind what the current stream has by now, and is done when the block ends."""
    with torch.cuda.device(gpu):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                yield
        finally:
            side.synchronize()


def host_register(gpu: int, address: int, nbytes: int, read_only: bool) -> int:
    """cudaHostRegister, in the context of `gpu`: its error, 0 for none."""
    with torch.cuda.device(gpu):
        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE | (_READ_ONLY if read_only else 0)))


def host_unregister(gpu: int, address: int) -> int:
    with torch.cuda.device(gpu):
        return int(torch.cuda.cudart().cudaHostUnregister(address))


class PageLocks:
    """Host memory that is page-locked, so that copies between it and `gpu` run at full rate and by themselves: each range once,
    from its first `lock` to `close`; it stays mapped until then. Any thread. Untested on hardware.

    read_only: this process has no right to write there
    """

    def __init__(self, gpu: int, read_only: bool = False):
        self._gpu, self._read_only = gpu, read_only
        self._mutex = threading.Lock()
        # With what keeps the memory mapped: it must not go before it is unregistered.
        self._locked: dict[int, tuple[list[torch.Tensor], int]] = {}
        weakref.finalize(self, _unlock, gpu, self._locked).atexit = False

    def lock(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The range in which all of them lie. What CUDA refuses is logged, once: copies are slower then."""
        if not tensors:
            return
        first = min(tensor.data_ptr() for tensor in tensors.values())
        nbytes = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors.values()) - first
        with self._mutex:
            if first in self._locked:
                return
            error = host_register(self._gpu, first, nbytes, self._read_only)
            self._locked[first] = list(tensors.values()), error
        if error != 0:
            log.warning("weightwire: %d bytes of shared memory could not be page-locked (cuda error %d); copies between them and the GPU "
                        "will be slower", nbytes, error)

    def close(self) -> None:
        """Gives all of it up. It can be used again."""
        with self._mutex:
            _unlock(self._gpu, self._locked)


def _unlock(gpu: int, locked: dict[int, tuple[list[torch.Tensor], int]]) -> None:
    while locked:
        address, (tensors, error) = locked.popitem()
        if error == 0:
            host_unregister(gpu, address)
        del tensors
