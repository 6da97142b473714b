#!/usr/bin/env python3
"""One contender of ./dev bench sync --peers, in the environment that has it (tests/envs/peers*.txt).

    peers.py NAME --rounds N [--small]       NAME: gloo, safetensors, nixl-shm, nixl-tcp, mooncake

Moves the tensors of a Hugging Face checkpoint, bf16, from one process into memory of another, tensor by tensor as each
contender's own users do, on one host. Nothing is resharded, verified or committed. Prints one line of JSON: seconds of
each round, the first of which paid for connections and registration, and whether the bytes arrived.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import multiprocessing
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "client/python"))

SECONDS = 300
_SEED = 7


def places(small: bool) -> list[tuple[str, int, int]]:
    """(name, offset, bytes) of each tensor in one buffer."""
    from demo import checkpoint
    out, end = [], 0
    for name, shape in checkpoint.hf_shapes(checkpoint.SMALL if small else checkpoint.QWEN25_05B).items():
        nbytes = 2 * int(np.prod(shape))
        out.append((name, end, nbytes))
        end += nbytes
    return out


def total(tensors) -> int:
    return tensors[-1][1] + tensors[-1][2]


def pattern(nbytes: int) -> np.ndarray:
    return np.random.Generator(np.random.SFC64(_SEED)).integers(0, 256, nbytes, dtype=np.uint8)


def pair(sender, receiver, *args) -> tuple[list[float], bool]:
    """Runs both in processes of their own, with a pipe between them; what they return: (seconds, bytes are right)."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    results = context.Queue()
    processes = [context.Process(target=_run, args=(function, end, results, args))
                 for function, end in ((sender, here), (receiver, there))]
    for process in processes:
        process.start()
    try:
        answers = dict(results.get(timeout=SECONDS) for _ in processes)
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    for name, answer in answers.items():
        if isinstance(answer, str):
            raise RuntimeError(f"{name}: {answer}")
    return answers[sender.__name__], answers[receiver.__name__]


def _run(function, pipe, results, args) -> None:
    try:
        results.put((function.__name__, function(pipe, *args)))
    except BaseException as error:
        results.put((function.__name__, f"{type(error).__name__}: {error}"))
        raise


def timed(rounds: int, once) -> list[float]:
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        once()
        times.append(time.perf_counter() - started)
    return times


# ---- gloo: a broadcast of each tensor, as trainers without NCCL do

def _gloo(rank: int, tensors, rounds: int, port: int):
    import torch
    import torch.distributed as dist
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    buffer = pattern(total(tensors)) if rank == 0 else np.zeros(total(tensors), np.uint8)
    views = [torch.from_numpy(buffer[at:at + size]) for _, at, size in tensors]

    def once():
        for view in views:
            dist.broadcast(view, 0)
        dist.barrier()
    dist.barrier()
    times = timed(rounds, once)
    dist.destroy_process_group()
    return times if rank == 0 else bool(np.array_equal(buffer, pattern(buffer.size)))


def gloo_sender(pipe, tensors, rounds, port):
    return _gloo(0, tensors, rounds, port)


def gloo_receiver(pipe, tensors, rounds, port):
    return _gloo(1, tensors, rounds, port)


# ---- safetensors: a file in memory, written and read

def file_sender(pipe, tensors, rounds):
    from safetensors.numpy import save_file
    buffer = pattern(total(tensors))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/model.safetensors"

        def once():
            save_file({name: buffer[at:at + size].view(np.uint16) for name, at, size in tensors}, path)
            pipe.send(path)
            pipe.recv()
        times = timed(rounds, once)
        pipe.send(None)
        return times


def file_receiver(pipe, tensors, rounds):
    from safetensors import safe_open
    buffer = np.zeros(total(tensors), np.uint8)
    while (path := pipe.recv()) is not None:
        with safe_open(path, framework="np") as file:
            for name, at, size in tensors:
                buffer[at:at + size] = file.get_tensor(name).view(np.uint8)
        pipe.send(True)
    return bool(np.array_equal(buffer, pattern(buffer.size)))


# ---- NIXL: descriptors of every tensor, one WRITE of all of them

def _nixl(name: str, transports: str, data: np.ndarray, tensors):
    os.environ["UCX_TLS"] = transports
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    import torch
    from nixl_cu13._api import nixl_agent, nixl_agent_config
    agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    buffer = torch.from_numpy(data)
    if not agent.register_memory([buffer]):
        raise RuntimeError("NIXL refused the memory")
    return agent, buffer, agent.get_xfer_descs([buffer[at:at + size] for _, at, size in tensors])


def nixl_sender(pipe, tensors, rounds, transports):
    agent, _buffer, local = _nixl("sender", transports, pattern(total(tensors)), tensors)
    metadata, described = pipe.recv()
    peer = agent.add_remote_agent(metadata)
    remote = agent.deserialize_descs(described)

    def once():
        handle = agent.initialize_xfer("WRITE", local, remote, peer, b"done")
        state = agent.transfer(handle)
        while state not in ("DONE", "ERR"):
            state = agent.check_xfer_state(handle)
        if state == "ERR":
            raise RuntimeError("NIXL's transfer failed")
        agent.release_xfer_handle(handle)
    times = timed(rounds, once)
    pipe.send(True)
    return times


def nixl_receiver(pipe, tensors, rounds, transports):
    agent, buffer, local = _nixl("receiver", transports, np.zeros(total(tensors), np.uint8), tensors)
    pipe.send((agent.get_agent_metadata(), agent.get_serialized_descs(local)))
    pipe.recv()
    return bool(np.array_equal(buffer.numpy(), pattern(total(tensors))))


# ---- Mooncake's transfer engine over tcp: a batch of writes

def _mooncake(data: np.ndarray):
    os.environ["MC_LOG_LEVEL"] = "ERROR"
    # Its library wants CUDA 12's runtime and a driver, of which it uses nothing here: the toolkit's stub will do.
    import nvidia.cuda_runtime
    ctypes.CDLL(f"{list(nvidia.cuda_runtime.__path__)[0]}/lib/libcudart.so.12", ctypes.RTLD_GLOBAL)
    for stub in glob.glob("/usr/local/cuda*/lib64/stubs/libcuda.so")[:1]:
        if not shutil.which("nvidia-smi"):
            ctypes.CDLL(stub, ctypes.RTLD_GLOBAL)
    from mooncake.engine import TransferEngine
    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0 or \
            engine.register_memory(data.ctypes.data, data.size) != 0:
        raise RuntimeError("Mooncake's engine did not start")
    return engine


def mooncake_sender(pipe, tensors, rounds):
    data = pattern(total(tensors))
    engine = _mooncake(data)
    session, base = pipe.recv()
    places_here = [data.ctypes.data + at for _, at, _ in tensors]
    places_there = [base + at for _, at, _ in tensors]
    sizes = [size for _, _, size in tensors]

    def once():
        if code := engine.batch_transfer_sync_write(session, places_here, places_there, sizes):
            raise RuntimeError(f"Mooncake's write failed with {code}")
    times = timed(rounds, once)
    pipe.send(True)
    return times


def mooncake_receiver(pipe, tensors, rounds):
    data = np.zeros(total(tensors), np.uint8)
    engine = _mooncake(data)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", data.ctypes.data))
    pipe.recv()
    return bool(np.array_equal(data, pattern(data.size)))


def run(name: str, tensors, rounds: int) -> tuple[list[float], bool]:
    if name == "gloo":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        return pair(gloo_sender, gloo_receiver, tensors, rounds, port)
    if name == "safetensors":
        return pair(file_sender, file_receiver, tensors, rounds)
    if name == "mooncake":
        return pair(mooncake_sender, mooncake_receiver, tensors, rounds)
    return pair(nixl_sender, nixl_receiver, tensors, rounds, {"nixl-shm": "sm,self,cma,tcp", "nixl-tcp": "tcp"}[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=["gloo", "safetensors", "nixl-shm", "nixl-tcp", "mooncake"])
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    tensors = places(args.small)
    times, checked = run(args.name, tensors, args.rounds)
    print(json.dumps({"bytes": total(tensors), "seconds": times, "checked": checked}))


if __name__ == "__main__":
    main()
