"""GPUs for torch without a GPU: tensors of the host that the fake library takes for memory of a GPU (fake_cuda_adopt), tensors over its
device memory, and what weightwire.torch_cuda asks of torch. Kernels reach the former; a copy of the library between a GPU and the host's
memory is counted. torch's own copies are not: here they stand for those within a GPU."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import pathlib
import weakref

import torch

import weightwire.torch_cuda

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAKE = str(pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin")).parent / "lib/libfake_cuda.so")
REPLACED = ("gpu_of", "current_stream", "beside", "side_stream", "host_register", "host_unregister", "over", "current_gpu", "wait_for_copies")
GPUS = [f"GPU-fafafafa-fafa-fafa-fafa-fafafafafa0{number}" for number in (0, 1)]


class FakeTorchCuda:
    """Its methods are put in the place of weightwire.torch_cuda's functions."""

    def __init__(self):
        os.environ.update(FAKE_CUDA_DEVICES="0,1", WEIGHTWIRE_CUDA=FAKE)
        self.library = ctypes.CDLL(FAKE)
        for name in ("fake_cuda_host_bytes", "fake_cuda_launches", "fake_cuda_registered", "fake_cuda_bytes_opened"):
            getattr(self.library, name).restype = ctypes.c_uint64
        self.library.fake_cuda_alias.restype = ctypes.c_void_p
        self._on = {}  # address of a storage -> (gpu, the storage)
        self._streams = [ctypes.c_void_p() for _ in GPUS]
        for gpu, stream in enumerate(self._streams):
            assert self.library.ww_cuda_stream_create(gpu, ctypes.byref(stream)) == 0
        self._over = collections.defaultdict(list)  # address of tensors over device memory -> gpu, once for each
        self.registrations = []  # (gpu, bytes, read only)

    def move(self, tensor: torch.Tensor, gpu: int = 0) -> torch.Tensor:
        """Its storage is the GPU's from now on."""
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self._on:
            assert self.library.fake_cuda_adopt(gpu, ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes())) == 1
            self._on[storage.data_ptr()] = gpu, storage
        return tensor

    def move_all(self, module: torch.nn.Module, gpu: int = 0) -> torch.nn.Module:
        for tensor in [*module.parameters(), *module.buffers()]:
            self.move(getattr(tensor, "_local_tensor", tensor).data, gpu)
        return module

    def back(self) -> None:
        """All of it is the host's again."""
        for address in self._on:
            assert self.library.fake_cuda_forget(ctypes.c_void_p(address)) == 1
        self._on.clear()

    def count(self, what: str) -> int:
        """ "host_bytes", "launches", "registered"."""
        return getattr(self.library, f"fake_cuda_{what}")()

    def enqueue(self, gpu: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy on the current stream, which runs when somebody waits for it and not before."""
        assert self.library.ww_cuda_copy_bytes(gpu, self._streams[gpu], ctypes.c_void_p(target.data_ptr()),
                                               ctypes.c_void_p(source.data_ptr()), ctypes.c_size_t(target.nbytes)) == 0

    # ---- in the place of weightwire.torch_cuda's

    def gpu_of(self, tensor):
        if tensor.device.type == "meta":
            return None
        at = tensor.untyped_storage().data_ptr()
        return self._over[at][0] if self._over.get(at) else self._on.get(at, (None, None))[0]

    def over(self, array, dtype):
        if array.nbytes == 0:
            return torch.empty(array.meta.shape, dtype=dtype)
        at = self.library.fake_cuda_alias(ctypes.c_void_p(array.pointer), ctypes.c_size_t(array.nbytes))
        assert at is not None
        held = (ctypes.c_uint8 * array.nbytes).from_address(at)
        held.array = array  # lent for as long as the tensor is there
        self._over[at].append(array.gpu)
        weakref.finalize(held, self._over[at].pop)
        return torch.frombuffer(held, dtype=torch.uint8).view(dtype).view(array.meta.shape)

    def current_gpu(self):
        return 0

    def wait_for_copies(self, tensors):
        pass  # torch's copies are done when they return here

    def current_stream(self, gpu):
        return self._streams[gpu].value

    def beside(self, tensor, dtype):
        made = torch.empty(tensor.shape, dtype=dtype)
        gpu = self.gpu_of(tensor)
        return made if gpu is None else self.move(made, gpu)

    @contextlib.contextmanager
    def side_stream(self, gpu):
        yield

    def host_register(self, gpu, address, nbytes, read_only):
        self.registrations.append((gpu, nbytes, read_only))
        return self.library.ww_cuda_host_register(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))

    def host_unregister(self, gpu, address):
        return self.library.ww_cuda_host_unregister(ctypes.c_void_p(address))

    def install(self) -> "FakeTorchCuda":
        for name in REPLACED:
            setattr(weightwire.torch_cuda, name, getattr(self, name))
        return self


class ParametersOnGpus(FakeTorchCuda):
    """In a worker of a real engine on a CPU: each of its parameters stands for one on the GPU of the worker's rank."""

    installed = None

    @classmethod
    def install_once(cls) -> None:
        cls.installed = cls.installed or cls().install()

    def gpu_of(self, tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            return super().gpu_of(tensor)
        return torch.distributed.get_rank() % len(GPUS) if torch.distributed.is_initialized() else 0
