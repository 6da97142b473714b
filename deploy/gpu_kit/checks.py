"""The checks of a GPU machine that need weightwire's Python package: `checks.py NAME --library LIB [--small]` prints one line of JSON.

Every check compares bytes with what NumPy says they must be. Speeds are ratios to a copy within the device in the same process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from weightwire import Client, Device, Publisher, Subscriber, TensorMeta, WeightwireError, local
from weightwire.v1 import types_pb2

ROUNDS = 5
BF16, F32, OPAQUE1 = 4, 6, 0


class Skipped(Exception):
    """It cannot be done here; the text says why."""


class _Box(ctypes.Structure):
    _fields_ = [("ndim", ctypes.c_int32), ("extent", ctypes.c_int64 * 8), ("source_stride", ctypes.c_int64 * 8),
                ("target_stride", ctypes.c_int64 * 8)]


class _CopyJob(ctypes.Structure):
    _fields_ = [("target", ctypes.c_void_p), ("source", ctypes.c_void_p), ("box", _Box), ("from_", ctypes.c_int32), ("to", ctypes.c_int32)]


class _QuantizeJob(ctypes.Structure):
    _fields_ = [("codes", ctypes.c_void_p), ("scale_inv", ctypes.c_void_p), ("source", ctypes.c_void_p), ("rows", ctypes.c_int64),
                ("columns", ctypes.c_int64), ("block_rows", ctypes.c_int64), ("block_columns", ctypes.c_int64),
                ("source_stride", ctypes.c_int64 * 2), ("target_stride", ctypes.c_int64 * 2), ("scale_stride", ctypes.c_int64 * 2),
                ("from_", ctypes.c_int32)]


class Gpu:
    """Device 0, through the C interface of libweightwire_cuda.so (kernels/cuda.h)."""

    def __init__(self, path: str):
        self._library = ctypes.CDLL(path)
        self._library.ww_cuda_error.restype = ctypes.c_char_p
        self.fake = hasattr(self._library, "fake_cuda_write")
        self._stream, self._event = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("stream_create", 0, ctypes.byref(self._stream))
        self.call("event_create", 0, ctypes.byref(self._event))

    def call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, "ww_cuda_" + name)(*arguments) != 0:
            raise RuntimeError(f"ww_cuda_{name}: {self._library.ww_cuda_error().decode(errors='replace')}")

    def allocate(self, size: int) -> ctypes.c_void_p:
        memory = ctypes.c_void_p()
        self.call("alloc", 0, ctypes.c_size_t(size), ctypes.byref(memory))
        return memory

    def free(self, *memories: ctypes.c_void_p) -> None:
        for memory in memories:
            self.call("free", 0, memory)

    def wait(self) -> None:
        self.call("event_record", 0, self._event, self._stream)
        self.call("event_wait", 0, self._event)

    def move(self, target: object, source: object, size: int) -> None:
        self.call("copy_bytes", 0, self._stream, target, source, ctypes.c_size_t(size))

    def upload(self, values: np.ndarray) -> ctypes.c_void_p:
        memory = self.allocate(values.nbytes)
        self.move(memory, ctypes.c_void_p(values.ctypes.data), values.nbytes)
        self.wait()
        return memory

    def download(self, memory: ctypes.c_void_p, like: np.ndarray) -> np.ndarray:
        out = np.empty_like(like)
        self.move(ctypes.c_void_p(out.ctypes.data), memory, out.nbytes)
        self.wait()
        return out

    def copy(self, target: ctypes.c_void_p, source: ctypes.c_void_p, rows: int, columns: int, source_row: int, target_row: int,
             element: int) -> None:
        job = _CopyJob(target, source, _Box(2), element, element)
        job.box.extent[:2], job.box.source_stride[:2], job.box.target_stride[:2] = (rows, columns), (source_row, 1), (target_row, 1)
        self.call("copy", 0, self._stream, ctypes.byref(job), ctypes.c_size_t(1))

    def quantize(self, codes: ctypes.c_void_p, scales: ctypes.c_void_p, source: ctypes.c_void_p, rows: int, columns: int) -> None:
        job = _QuantizeJob(codes, scales, source, rows, columns, 128, 128)
        job.source_stride[:], job.target_stride[:], job.scale_stride[:] = (columns, 1), (columns, 1), (-(-columns // 128), 1)
        job.from_ = BF16
        self.call("quantize", 0, self._stream, ctypes.byref(job), ctypes.c_size_t(1))

    def seconds(self, work: Callable[[], None]) -> float:
        """Median of rounds; the first one is not counted."""
        times = []
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])


def bits(shape: tuple, seed: int) -> np.ndarray:
    """Finite bf16, as bits."""
    return np.random.default_rng(seed).integers(0, 0x7F00, shape, dtype=np.uint16)


def kernels(gpu: Gpu, small: bool) -> Dict[str, object]:
    """Copy within the device, pack (columns of a wider matrix), unpack, and quantization to fp8 with blocks of 128 x 128."""
    rows, columns = (512, 1024) if small else (16384, 16384)
    wide = 2 * columns
    values = bits((rows, wide), 1)
    source, packed = gpu.upload(values), gpu.allocate(rows * columns * 2)
    back = gpu.upload(np.zeros((rows, wide), np.uint16))
    size = rows * columns * 2
    base = gpu.seconds(lambda: gpu.move(packed, source, size))
    pack = gpu.seconds(lambda: gpu.copy(packed, source, rows, columns, wide, columns, BF16))
    assert np.array_equal(gpu.download(packed, values[:, :columns].copy()), values[:, :columns]), "pack: the bytes are wrong"
    unpack = gpu.seconds(lambda: gpu.copy(back, packed, rows, columns, columns, wide, BF16))
    got = gpu.download(back, values)
    assert np.array_equal(got[:, :columns], values[:, :columns]) and not got[:, columns:].any(), "unpack: the bytes are wrong"
    codes, scales = gpu.allocate(rows * columns), gpu.allocate(4 * -(-rows // 128) * -(-columns // 128))
    quantize = gpu.seconds(lambda: gpu.quantize(codes, scales, packed, rows, columns))
    floats = (values[:, :columns].astype(np.uint32) << 16).view(np.float32)
    largest = np.abs(floats).reshape(rows // 128, 128, columns // 128, 128).max(axis=(1, 3))
    wanted = np.maximum(largest / np.float32(448), np.float32(2.0 ** -126))
    assert np.array_equal(gpu.download(scales, wanted), wanted), "quantize: the scales are wrong"
    made = gpu.download(codes, np.empty((rows, columns), np.uint8))
    largest_codes = (made & 0x7F).reshape(rows // 128, 128, columns // 128, 128).max(axis=(1, 3))
    assert (largest_codes == 0x7E).all(), "quantize: the largest of each block is not 448"
    gpu.free(source, packed, back, codes, scales)
    return {"bytes": size, "copy_gb_s": 2 * size / base / 1e9, "pack_over_copy": base / pack, "unpack_over_copy": base / unpack,
            "quantize_over_copy": base * 0.75 / quantize}  # it reads two bytes and writes one


def boxes(tensors: List[TensorMeta], rank: int, ranks: int) -> types_pb2.LayoutSubmission:
    """The columns of each matrix that a rank of `ranks` holds."""
    held = []
    for number, meta in enumerate(tensors):
        rows, columns = meta.shape
        own = columns // ranks
        piece = types_pb2.Piece(tensor=number, begin=[0, rank * own], extent=[rows, own], local_offset=0, local_stride=[own, 1])
        held.append(types_pb2.LocalTensor(spec=TensorMeta(meta.name, meta.dtype, (rows, own)).to_proto(), pieces=[piece]))
    return types_pb2.LayoutSubmission(boxes=types_pb2.LayoutSubmission.Explicit(
        canonical=types_pb2.CanonicalSpace(tensors=[meta.to_proto() for meta in tensors]), layout=types_pb2.RankLayout(tensors=held)))


def model(size: int) -> List[TensorMeta]:
    """Matrices of bf16, `size` bytes in all."""
    count, columns = (4, 1024) if size < 1 << 28 else (16, 8192)
    return [TensorMeta(f"layer.{i}", "BF16", (size // (2 * count * columns), columns)) for i in range(count)]


def settings(library: str, slab: int) -> Dict[str, object]:
    return {"gpu": "required", "gpu_slab_bytes": slab, "gpu_library": library, "transports": "[cuda_ipc, shm, tcp]"}


def versions(numbers: range, trainer: Publisher, params: Any, engines: Sequence[Subscriber], tensors: List[TensorMeta],
             mode: str = "hold") -> Tuple[List[float], int]:
    """Seconds of each version from the trainer to the ranks of one engine, each of which has its share of the columns, and the bytes that
    were compared."""
    times, total = [], 0
    for version in numbers:
        values = {meta.name: bits(meta.shape, 100 * version + i) for i, meta in enumerate(tensors)}
        for name, value in values.items():
            params[name].write(value)
        began = time.perf_counter()
        release = trainer.publish(version, mode=mode)
        if mode == "snapshot":  # from here on the trainer goes on with its arrays
            release.wait_released(120)
            for name, value in values.items():
                params[name].write(np.zeros_like(value))
        offers = [engine.wait_offer(120) for engine in engines]
        times.append(time.perf_counter() - began)
        got = [engine.flip(offer) for engine, offer in zip(engines, offers)]
        engines[0].acknowledge(offers[0])
        release.wait_released(120)
        for rank, held in enumerate(got):
            for meta in tensors:
                own = meta.shape[1] // len(engines)
                if not np.array_equal(held[meta.name].read(), values[meta.name][:, rank * own:(rank + 1) * own]):
                    raise RuntimeError(f"version {version}: {meta.name} of rank {rank} is wrong")
        total += sum(value.nbytes for value in values.values())
    return times, total


def publish(gpu: Gpu, small: bool, library: str, size: int, mode: str = "hold") -> Dict[str, object]:
    """Whole versions from one GPU process to an engine of two ranks, each of which takes half of the columns."""
    size = 8 << 20 if small else size
    tensors = model(size)
    scratch = [gpu.allocate(size), gpu.allocate(size)]
    base = gpu.seconds(lambda: gpu.move(scratch[0], scratch[1], size))
    gpu.free(*scratch)
    # Of the parameters, of two buffers of the stage, of slots, and in mode snapshot of the copy.
    slab = int(size * (4.2 if mode == "snapshot" else 3.2)) + (256 << 20)
    with local(timeout=120, **settings(library, slab)):
        device = Device(0, library)
        with Publisher(rank=0, world_size=1, device=device) as trainer, Subscriber(group="engine", rank=0, world_size=2, device=device) as first, \
                Subscriber(group="engine", rank=1, world_size=2, device=device) as second:
            params = trainer.bind_boxes(boxes(tensors, 0, 1))
            for rank, engine in enumerate((first, second)):
                engine.bind_submission(boxes(tensors, rank, 2))
            if trainer.device_refused or first.device_refused:
                raise RuntimeError(f"no GPU memory was lent: {trainer.device_refused or first.device_refused}")
            times, total = versions(range(1, 4), trainer, params, (first, second), tensors, mode)
    return {"bytes": size, "versions": len(times), "bytes_checked": total, "seconds": statistics.median(times),
            "over_device_copy": statistics.median(times) / base}


def over_nccl(gpu: Gpu, small: bool, library: str) -> Dict[str, object]:
    """Versions from one agent's GPU memory to another's by NCCL's send and receive: two processes that NCCL takes for two hosts, on one GPU."""
    from weightwire.local_daemon import running
    size = 8 << 20 if small else 1 << 30
    tensors = model(size)
    scratch = [gpu.allocate(size), gpu.allocate(size)]
    base = gpu.seconds(lambda: gpu.move(scratch[0], scratch[1], size))
    gpu.free(*scratch)
    common = {**settings(library, int(size * 3.2) + (512 << 20)), "transports": "[nccl, tcp]", "nccl_form_timeout_ms": 30_000}
    if gpu.fake:
        common["nccl_library"] = os.path.join(os.path.dirname(library), "libfake_nccl_pair.so")
        os.environ["FAKE_NCCL_EVENTS_ELSEWHERE"] = "1"
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_HOSTID="weightwire-kit-0")
    with local(timeout=120, **common) as first, tempfile.TemporaryDirectory() as place:
        os.environ["NCCL_HOSTID"] = "weightwire-kit-1"
        socket = f"{place}/agent.sock"
        second = {**common, "role": "agent", "name": "second", "coordinator": first.address, "agent_socket": socket, "http": "127.0.0.1:0"}
        with running(second, place, 120) as said:
            with open(first.log) as log:
                why = log.read().partition("transport nccl cannot run here: ")[2]
            if why:
                raise Skipped(why.splitlines()[0][:400])
            device = Device(0, library)
            with Publisher(rank=0, world_size=1, device=device) as trainer, \
                    Subscriber(group="engine", rank=0, world_size=1, device=device, agent=socket) as engine:
                params = trainer.bind_boxes(boxes(tensors, 0, 1))
                engine.bind_submission(boxes(tensors, 0, 1))
                times, total = versions(range(1, 6), trainer, params, (engine,), tensors)
                with Client() as client:
                    went = dict(client.status().epochs[0].bytes_by_transport)
                if set(went) != {"nccl-gpu"}:
                    raise RuntimeError(f"the bytes went otherwise: {went}; see {said}")
    return {"bytes": size, "bytes_checked": total, "seconds": statistics.median(times[1:]), "first_seconds": times[0],
            "over_device_copy": statistics.median(times[1:]) / base}


def torch_ipc(gpu: Gpu, small: bool, library: str) -> Dict[str, object]:
    """A torch tensor over the agent's memory: torch writes a version, another torch tensor reads what arrived."""
    if gpu.fake:
        raise Skipped("the fake library has no memory that torch can reach")
    import torch
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    tensors = model(8 << 20)
    with local(timeout=120, **settings(library, 256 << 20)):
        device = Device(0, library)
        with Publisher(rank=0, world_size=1, device=device) as trainer, Subscriber(group="engine", rank=0, world_size=1, device=device) as engine:
            params = trainer.bind_boxes(boxes(tensors, 0, 1))
            engine.bind_submission(boxes(tensors, 0, 1))
            for i, meta in enumerate(tensors):
                torch.as_tensor(params[meta.name], device="cuda").copy_(torch.from_numpy(bits(meta.shape, i)).cuda())
            torch.cuda.synchronize()
            release = trainer.publish(1)
            offer = engine.wait_offer(60)
            got = engine.flip(offer)
            engine.acknowledge(offer)
            release.wait_released(60)
            for i, meta in enumerate(tensors):
                if not torch.equal(torch.as_tensor(got[meta.name], device="cuda").cpu(), torch.from_numpy(bits(meta.shape, i))):
                    raise RuntimeError(f"{meta.name} is wrong")
    return {"bytes_checked": sum(meta.nbytes for meta in tensors)}


def torch_adapter(gpu: Gpu, small: bool, library: str) -> Dict[str, object]:
    """A torch module on the GPU through weightwire.torch: packed and cast by one launch into the agent's memory, strides and frozen
    parameters included; how long `publish` blocks, beside a copy of as many bytes within the device."""
    if gpu.fake:
        raise Skipped("the fake library has no memory that torch can reach")
    import torch
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU")
    import weightwire.torch
    os.environ["WEIGHTWIRE_CUDA"] = library
    rows, layers = (256, 3) if small else (8192, 8)
    module = torch.nn.ModuleList(torch.nn.Linear(rows, rows, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(layers))
    module[1].weight.data = torch.empty(rows, rows, dtype=torch.bfloat16, device="cuda").t()
    module[2].weight.requires_grad_(False)
    size = sum(tensor.nbytes for tensor in module.state_dict().values())
    tensors = [TensorMeta(name, "BF16", tuple(tensor.shape)) for name, tensor in module.state_dict().items()]
    scratch = [gpu.allocate(size), gpu.allocate(size)]
    base = gpu.seconds(lambda: gpu.move(scratch[0], scratch[1], size))
    gpu.free(*scratch)
    blocked, received, total = [], [], 0
    follower = torch.nn.ModuleList(torch.nn.Linear(rows, rows, bias=False, dtype=torch.bfloat16, device="cuda") for _ in range(layers))
    with local(timeout=120, **settings(library, int(size * 5.2) + (256 << 20))):
        with weightwire.torch.Publisher(module, device="cuda") as trainer, \
                weightwire.torch.Receiver(follower, group="follower", device="cuda") as receiver, \
                Subscriber(group="engine", rank=0, world_size=1, device=Device(0, library)) as engine:
            engine.bind_submission(boxes(tensors, 0, 1))
            for version in range(1, 6):
                with torch.no_grad():
                    for parameter in module.parameters():
                        if version == 1 or parameter.requires_grad:
                            parameter.normal_()
                if version > 2:  # of the first two, publish itself waits for what is enqueued
                    torch.cuda.synchronize()
                release = trainer.publish(version)
                blocked.append(trainer.blocked_seconds)
                want = {name: tensor.cpu().view(torch.uint16).numpy() for name, tensor in module.state_dict().items()}
                with torch.no_grad():
                    module[0].weight.zero_()
                offer = engine.wait_offer(120)
                got = engine.flip(offer)
                engine.acknowledge(offer)
                release.wait_released(120)
                began = time.monotonic()
                if receiver.receive(120) is None:
                    raise RuntimeError(f"version {version} was not received")
                received.append(time.monotonic() - began)
                followed = {name: tensor.cpu().view(torch.uint16).numpy() for name, tensor in follower.state_dict().items()}
                for name, value in want.items():
                    if not np.array_equal(got[name].read(), value) or not np.array_equal(followed[name], value):
                        raise RuntimeError(f"version {version}: {name} is wrong")
                    total += 2 * value.nbytes
            module[2].weight.data[-1, -1] += 1
            try:
                trainer.publish(9, verify=True)
                raise RuntimeError("a frozen parameter that changed unseen was not found")
            except WeightwireError as found:
                if found.tensor != "2.weight":
                    raise
    return {"bytes": size, "bytes_checked": total, "blocked_seconds": statistics.median(blocked[2:]),
            "blocked_over_device_copy": statistics.median(blocked[2:]) / base, "received_over_device_copy": statistics.median(received[2:]) / base}


_HOLDER = """
import sys
sys.path.insert(0, sys.argv[1])
from checks import *
engine = Subscriber(group="a", rank=0, world_size=1, device=Device(0, sys.argv[2]))
engine.bind_submission(boxes(model(8 << 20), 0, 1))
print("bound" if not engine.device_refused else engine.device_refused, flush=True)
sys.stdin.read()
"""


def killed_holder(gpu: Gpu, small: bool, library: str) -> Dict[str, object]:
    """GPU memory that a process holds is in use; when it is killed, it is lent again."""
    with local(timeout=120, **settings(library, 20 << 20)):  # one stage of two buffers
        def bind() -> Optional[str]:
            with Subscriber(group="b", rank=0, world_size=1, device=Device(0, library)) as other:
                try:
                    other.bind_submission(boxes(model(8 << 20), 0, 1))
                    return None
                except WeightwireError as error:
                    return str(error)
        holder = subprocess.Popen([sys.executable, "-c", _HOLDER, os.path.dirname(os.path.abspath(__file__)), library], stdin=subprocess.PIPE,
                                  stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        if (said := holder.stdout.readline()) != "bound\n":
            raise RuntimeError(f"the holder did not bind: {said}")
        refused = bind()
        if refused is None or "are in use" not in refused:
            raise RuntimeError(f"memory that is held was lent a second time: {refused}")
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        began = time.monotonic()
        while (why := bind()) is not None:
            if time.monotonic() - began > 30:
                raise RuntimeError(f"memory of a killed process is not lent again: {why}")
        Client().status()
        return {"seconds_until_lent": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("check", choices=["kernels", "publish-1g", "publish-8g", "snapshot", "over-nccl", "torch-ipc", "torch-adapter", "killed-holder"])
    parser.add_argument("--library", required=True)
    parser.add_argument("--small", action="store_true")
    asked = parser.parse_args()
    try:
        gpu = Gpu(asked.library)
        work: Dict[str, Callable[[], Dict[str, object]]] = {
            "kernels": lambda: kernels(gpu, asked.small),
            "publish-1g": lambda: publish(gpu, asked.small, asked.library, 1 << 30),
            "publish-8g": lambda: publish(gpu, asked.small, asked.library, 8 << 30),
            "snapshot": lambda: publish(gpu, asked.small, asked.library, 1 << 30, mode="snapshot"),
            "over-nccl": lambda: over_nccl(gpu, asked.small, asked.library),
            "torch-ipc": lambda: torch_ipc(gpu, asked.small, asked.library),
            "torch-adapter": lambda: torch_adapter(gpu, asked.small, asked.library),
            "killed-holder": lambda: killed_holder(gpu, asked.small, asked.library)}
        print(json.dumps({"passed": True, **work[asked.check]()}))
    except Skipped as why:
        print(json.dumps({"skipped": str(why)}))
    except Exception as error:
        print(json.dumps({"passed": False, "error": f"{type(error).__name__}: {error}"[-1500:]}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
