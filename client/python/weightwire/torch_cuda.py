"""What weightwire asks of torch's CUDA, in one place, where tests without a GPU put their own. Untested on hardware."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Any, Iterator

import torch

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
    from its first `lock` to `close`. Any thread.

    read_only: this process has no right to write there
    """

    def __init__(self, gpu: int, read_only: bool = False):
        self._gpu, self._read_only = gpu, read_only
        self._mutex = threading.Lock()
        # With what keeps the memory mapped: it must not go before it is unregistered.
        self._locked: dict[int, tuple[Any, int]] = {}
        weakref.finalize(self, _unlock, gpu, self._locked).atexit = False

    def lock(self, address: int, nbytes: int, owner: Any) -> int:
        """`owner` keeps it mapped. Returns cudaHostRegister's error: of the call that tried, 0 from then on."""
        with self._mutex:
            if address in self._locked:
                return 0
            error = host_register(self._gpu, address, nbytes, self._read_only)
            self._locked[address] = owner, error
            return error

    def close(self) -> None:
        """Gives all of it up. It can be used again."""
        with self._mutex:
            _unlock(self._gpu, self._locked)


def _unlock(gpu: int, locked: dict[int, tuple[Any, int]]) -> None:
    while locked:
        address, (owner, error) = locked.popitem()
        if error == 0:
            host_unregister(gpu, address)
        del owner
