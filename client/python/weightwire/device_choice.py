"""Which memory an adapter uses: a GPU's that the agent lends, or the host's."""

from __future__ import annotations

import logging
import os
from typing import Callable, Iterable, TypeVar, Union

import torch

from weightwire import errors, torch_cuda
from weightwire.device import Device
from weightwire.device_library import LibraryError
from weightwire.subscriber import Subscriber

log = logging.getLogger("weightwire")

#: Where an adapter puts what it publishes or receives: "auto", "cpu", "cuda", "cuda:1", or a weightwire.Device. None:
#: WEIGHTWIRE_DEVICE, else "auto". See LivePublisher and weightwire.torch.Receiver.
DeviceChoice = Union[Device, str, None]
Opened_ = TypeVar("Opened_")
#: Errors after which host memory is tried. Where the GPU is not their reason, that fails with the same error.
_TRY_THE_HOST = (errors.RefusedError, errors.NotReadyError, LibraryError)


def wanted_device(device: DeviceChoice) -> Device | str:
    """What was chosen. RefusedError: it is no place."""
    wanted = device if device is not None else os.environ.get("WEIGHTWIRE_DEVICE") or "auto"
    if isinstance(wanted, Device) or wanted in ("auto", "cpu", "cuda"):
        return wanted
    kind, _, index = str(wanted).partition(":")
    if kind != "cuda" or not (index.isascii() and index.isdigit()):
        raise errors.RefusedError(f"device={wanted!r} is no place for parameters", code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy='one of "auto", "cpu", "cuda", "cuda:1", or a weightwire.Device')
    return str(wanted)


def device_for(wanted: Device | str, tensors: Iterable[torch.Tensor]) -> Device | None:
    """For parameters that are now `tensors`; None: host memory. Raises where the GPU is not seen."""
    if isinstance(wanted, Device) or wanted == "cpu":
        return wanted if isinstance(wanted, Device) else None
    kind, _, index = wanted.partition(":")
    held: dict[int, int] = {}  # bytes, by GPU; -1: the host
    for tensor in tensors:
        gpu = torch_cuda.gpu_of(tensor)
        held[-1 if gpu is None else gpu] = held.get(-1 if gpu is None else gpu, 0) + tensor.nbytes
    most = max(held, key=lambda gpu: held[gpu], default=-1)
    if kind == "auto" and most < 0:
        return None
    if index:
        return Device(int(index))
    held.pop(-1, None)
    return Device(max(held, key=lambda gpu: held[gpu]) if held else torch_cuda.current_gpu() or 0)


def device_here(wanted: Device | str) -> Device | None:
    """As device_for, where "auto" is the GPU that this process uses."""
    gpu = torch_cuda.current_gpu() if wanted == "auto" else None
    return Device(gpu) if gpu is not None else device_for(wanted, [])


def open_with_fallback(wanted: Device | str, device: Callable[[], Device | None], open_in: Callable[[Device | None], Opened_],
                       warn: Callable[[errors.WeightwireError], None]) -> Opened_:
    """What `open_in` makes on the device. With "auto", where that fails: what it makes in host memory (None), and `warn` is told why."""
    try:
        on = device()
    except errors.WeightwireError as why:
        if wanted != "auto":
            raise
        warn(why)
        on = None
    if on is not None and wanted == "auto":
        try:
            return open_in(on)
        except _TRY_THE_HOST as why:
            opened = open_in(None)
            warn(why)
            return opened
    return open_in(on)


def open_subscriber(wanted: Device | str, device: Callable[[], Device | None], make: Callable[[Device | None], Subscriber],
                    bind: Callable[[Subscriber], object], option: str = 'device="cpu"') -> tuple[Subscriber, Device | None]:
    """A bound subscriber and the device on which its stage lies, None: in host memory, which for "auto" one warning explains. `option`: what
    a user sets to have host memory without that warning."""
    def open_in(device: Device | None) -> tuple[Subscriber, Device | None]:
        opened = make(device)
        try:
            refused = opened.device_refused
            if refused is not None:  # before the host's memory is made in its place
                raise errors.RefusedError(str(refused.args[0]), code=refused.code, reason=refused.reason, rank=refused.rank,
                                          remedy=refused.remedy)
            bind(opened)
        except BaseException:
            opened.close()
            raise
        return opened, device

    def warn(why: errors.WeightwireError) -> None:
        log.warning("weightwire: versions arrive in host memory, not in the GPU's: %s (%s says that this is meant)", why, option)

    return open_with_fallback(wanted, device, open_in, warn)
