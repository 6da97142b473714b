#!/usr/bin/env python3
"""./dev bench sync: one weight set, trainer process -> engine process, by every path, in one run.

memcpy-N    N threads copy between two shared-memory buffers
raw-tcp-N   N loopback sockets, one thread each side and socket, blocking, two processes
weightwire  a Megatron TP2 x PP2 trainer (4 processes) to a vLLM TP1 engine with resharding and sums;
            seconds from the publish call to the last STAGED (when the trainer is released)
with --ucx, where the plug-in was built (ucx:TLS the bare transport with UCX_TLS=TLS): the same over ucx
with --peers, in an environment that is made for them (tests/envs, 6 GB), as their users would move the same tensors,
without resharding, sums or commit: gloo broadcasts, a safetensors file in memory, NIXL, Mooncake
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from demo import checkpoint
from demo.fleet import Engine, Fleet
from report import Report, add_options, write
from rounds import cpu_seconds, timed_rounds
from transport import UCX_TLS, Contender
from weightwire.memory import Arena, TensorMeta

_BUFFER = 8 << 20
_HERE = pathlib.Path(__file__).resolve().parent
_PEERS = ("gloo", "safetensors", "nixl-shm", "nixl-tcp", "mooncake")
_PEER_SECONDS = 900


def shared(name: str, nbytes: int) -> np.ndarray:
    return Arena(name, [TensorMeta("w", "U8", (nbytes,))]).arrays["w"]


def pattern(nbytes: int) -> np.ndarray:
    return np.random.Generator(np.random.SFC64(7)).integers(0, 256, nbytes, dtype=np.uint8)


def edges(nbytes: int, parts: int) -> list[tuple[int, int]]:
    cuts = [nbytes * i // parts for i in range(parts + 1)]
    return list(zip(cuts, cuts[1:]))


def memcpy(report: Report, nbytes: int, threads: int, rounds: int) -> None:
    source, target = shared("from", nbytes), shared("to", nbytes)
    source[:] = pattern(nbytes)

    def copy(span):
        ctypes.memmove(target.ctypes.data + span[0], source.ctypes.data + span[0], span[1] - span[0])

    with ThreadPoolExecutor(threads) as pool:
        times, cpu = timed(lambda: list(pool.map(copy, edges(nbytes, threads))), rounds, [os.getpid()])
    report.add(f"memcpy-{threads}", nbytes, times[1:], bool(np.array_equal(source, target)), times[0], cpu[1:])


def timed(work, rounds: int, pids: list[int]) -> tuple[list[float], list[float]]:
    """Seconds, and processor seconds of the processes, of `rounds` + 1 rounds."""
    times, cpu = [], []
    for _ in range(rounds + 1):
        before, started = cpu_seconds(pids), time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
        cpu.append(cpu_seconds(pids) - before)
    return times, cpu


def _receive(ports: list[int], nbytes: int, rounds: int, verdict) -> None:
    target = shared("to", nbytes)
    view = memoryview(target)
    connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]

    def one(connection, span):
        for _ in range(rounds):
            position, end = span
            while position < end:
                position += connection.recv_into(view[position:end], min(_BUFFER, end - position))
            connection.sendall(b"k")

    run_all([lambda c=c, s=s: one(c, s) for c, s in zip(connections, edges(nbytes, len(ports)))])
    verdict.send(bool(np.array_equal(target, pattern(nbytes))))


def run_all(tasks) -> None:
    threads = [threading.Thread(target=task) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def raw_tcp(report: Report, nbytes: int, sockets: int, rounds: int) -> None:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(sockets)]
    inbox, outbox = multiprocessing.Pipe(False)
    ports = [listener.getsockname()[1] for listener in listeners]
    receiver = multiprocessing.Process(target=_receive, args=(ports, nbytes, rounds + 1, outbox))
    receiver.start()
    source = shared("from", nbytes)
    source[:] = pattern(nbytes)
    view = memoryview(source)
    connections = [listener.accept()[0] for listener in listeners]

    def one(connection, span):
        connection.sendall(view[span[0]:span[1]])
        connection.recv(1)

    tasks = [lambda c=c, s=s: one(c, s) for c, s in zip(connections, edges(nbytes, sockets))]
    times, cpu = timed(lambda: run_all(tasks), rounds, [os.getpid(), receiver.pid])
    report.add(f"raw-tcp-{sockets}", nbytes, times[1:], inbox.recv(), times[0], cpu[1:])
    receiver.join()


def weightwire(report: Report, binary: str, config: dict, via: str, rounds: int, name: str = "", hub: dict | None = None,
               agent: dict | None = None) -> dict:
    """`hub`, `agent`: options of the trainer's and of the engine's daemon."""
    with Fleet(config, binary, engines=[Engine("engine", 1, via)], options=hub or {}, agent_options=agent or {}) as fleet:
        times, cpu, nbytes, moved_by = timed_rounds(fleet, config, rounds)
    if set(moved_by) != {via}:
        raise AssertionError(f"moved by {moved_by}, not by {via}")
    return report.add(name or f"weightwire-{via}", nbytes, times[1:], True, times[0], cpu[1:])


def ucx(report: Report, binary: str, config: dict, nbytes: int, rounds: int) -> None:
    """The pipeline over ucx beside the bare transport."""
    for tls in UCX_TLS:
        bare = Contender(str(pathlib.Path(binary).with_name("transport_bench")), f"ucx:{tls}", nbytes)
        seconds = [bare.run()[0] for _ in range(rounds)]
        row = report.add(bare.name, nbytes, seconds, bare.close(), bare.first)
        agent = {"ucx_tls": f'"{tls}"'}
        whole = weightwire(report, binary, config, "ucx", rounds, f"weightwire-ucx-{tls}",
                           {"transports": "[ucx]", **agent}, agent)
        print(f"weightwire-ucx-{tls} is {whole['seconds_median'] / row['seconds_median']:.2f} x the bare transport")


def peers(report: Report, rounds: int, small: bool) -> None:
    """A row for each peer that runs here; the others are named with what they said."""
    python = subprocess.run([_HERE.parent / "tests/envs/make.sh", "peers"], check=True, stdout=subprocess.PIPE,
                            text=True).stdout.strip()
    for name in _PEERS:
        done = subprocess.run([python, _HERE / "peers.py", name, "--rounds", str(rounds), *(["--small"] if small else [])],
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=_PEER_SECONDS)
        if done.returncode != 0:
            print(f"{name:18s} did not run: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        report.add(name, row["bytes"], row["seconds"][1:], row["checked"], row["seconds"][0])


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench sync", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--ucx", action="store_true", help="also over the transport ucx")
    parser.add_argument("--peers", action="store_true", help="also what users would pick instead")
    add_options(parser)
    args = parser.parse_args()
    config = checkpoint.SMALL if args.small else checkpoint.QWEN25_05B
    nbytes = sum(2 * int(np.prod(s)) for s in checkpoint.hf_shapes(config).values())
    report = Report()
    for threads in (1, 2):
        memcpy(report, nbytes, threads, args.rounds)
    for sockets in (1, 2, 4):
        raw_tcp(report, nbytes, sockets, args.rounds)
    for via in ("shm", "tcp"):
        weightwire(report, args.binary, config, via, args.rounds)
    if args.ucx:
        ucx(report, args.binary, config, nbytes, args.rounds)
    if args.peers:
        peers(report, args.rounds, args.small)
    best = min(r["seconds_median"] for r in report.rows if r["name"].startswith("raw-tcp"))
    tcp = next(r["seconds_median"] for r in report.rows if r["name"] == "weightwire-tcp")
    print(f"weightwire-tcp is {tcp / best:.2f} x the best raw socket")
    write(args, f"{nbytes / 1e6:,.0f} MB from trainer to engine", report.rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
