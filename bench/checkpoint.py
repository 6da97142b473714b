#!/usr/bin/env python3
"""./dev bench checkpoint: the ranks of one host load one checkpoint at the same time, from Hugging Face's files of 988 MB
into memory that is already there, warm (in the page cache, read once from end to end: how the cache got a file decides how fast
it is mapped) and cold (dropped from it). All rows in turns. A rank is one process that loads in every way, into the same memory;
with 8 ranks and whole-memory they need 13 GB. What does not fit into the memory that is free is said and not run; rows are
written as they come; a rank that ends is named with what it did.

memcpy-1         one thread copies as many bytes from memory to memory
whole-N          every one of N ranks safetensors.torch.load_file's everything, then copies its slices (which slices is not
                 timed). On a CPU that maps the file, and reads no more than the slices;
whole-memory-N   with every tensor in memory of the rank's own before that, as where a file is not mapped
torch-dcp-N      torch.distributed.checkpoint.load into DTensors, from a checkpoint that two ranks of TP2 saved with it
weightwire-N     checkpoint.load, planner included
…-N-cold         the same, the file not in the page cache

All but memcpy in the environment megatron, which is made when it is missing (tests/envs/make.sh). Time is from a word to all ranks to the last one's end;
read: bytes from the disk (/proc/self/io), of all ranks, over the checkpoint's. What each rank holds is compared bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT / "client/python"))
_PYTHON = pathlib.Path(os.environ.get("WEIGHTWIRE_VENVS", pathlib.Path.home() / ".cache/weightwire/venvs")) / "megatron/bin/python"
_SPECS = {4: "megatron:tp2,pp2", 8: "megatron:tp2,pp4"}
_KINDS = ("whole", "whole-memory", "torch-dcp", "weightwire")
_SECONDS = 300


class Worker:
    """One rank: makes the memory, then loads in the way that it is told."""

    def __init__(self, kinds: list, folder: pathlib.Path, rank: int, world_size: int, port: int):
        import torch

        from weightwire.checkpoint.planner import planner_of
        self.folder, self.rank, self.world_size, self.spec = folder, rank, world_size, _SPECS[world_size]
        self.held = planner_of((folder / "hf/config.json").read_text()).boxes(self.spec)[rank]
        self.into = {held.meta.name: torch.zeros(held.meta.shape, dtype=torch.bfloat16) for held in self.held}
        self._moves = [(box.name, tuple(slice(b, b + n) for b, n in zip(box.begin, box.extent)),
                        self.into[held.meta.name].as_strided(box.extent, box.stride, box.offset))
                       for held in self.held for box in held.boxes]
        self._state: dict = {}
        if "torch-dcp" in kinds:  # it holds other blocks
            self._state = dtensors(folder, rank, world_size, port, {box.name for h in self.held for box in h.boxes})

    def load(self, kind: str) -> None:
        {"whole": self._whole, "whole-memory": self._whole, "torch-dcp": self._dcp, "weightwire": self._weightwire}[kind](kind)

    def _whole(self, kind: str) -> None:
        import safetensors.torch
        whole = safetensors.torch.load_file(self.folder / "hf/model.safetensors")
        if kind == "whole-memory":
            whole = {name: tensor.clone() for name, tensor in whole.items()}
        for name, where, place in self._moves:
            place.copy_(whole[name][where])

    def _weightwire(self, _: str) -> None:
        from weightwire import checkpoint
        from weightwire.checkpoint import planner
        planner.forget()
        checkpoint.load(self.folder / "hf", self.spec, self.rank, self.into)

    def _dcp(self, _: str) -> None:
        import torch.distributed.checkpoint as dcp
        dcp.load(self._state, checkpoint_id=str(self.folder / "dcp"))

    def clear(self) -> None:
        for tensor in self.into.values():
            tensor.zero_()

    def digest(self) -> dict:
        import torch
        return {name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy()).hexdigest() for name, tensor in self.into.items()}


def dtensors(folder: pathlib.Path, rank: int, world_size: int, port: int, names: set) -> dict:
    """These tensors of Qwen2 as TP2 cuts them, of stages of two ranks each; zeros."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    from demo import checkpoint
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("pp", "tp"))["tp"]
    columns, whole = ("o_proj.weight", "down_proj.weight"), ("norm.weight",)
    shapes = checkpoint.hf_shapes(checkpoint.read_config(str(folder / "hf")))
    return {name: zeros(*shapes[name], dtype=torch.bfloat16, device_mesh=mesh, placements=[
        Shard(1) if name.endswith(columns) else Replicate() if name.endswith(whole) or "layernorm" in name else Shard(0)])
        for name in shapes if name in names}


def save_dcp(folder: pathlib.Path, rank: int, port: int) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file
    from torch.distributed.tensor import distribute_tensor
    whole = load_file(folder / "hf/model.safetensors")
    state = dtensors(folder, rank, 2, port, set(whole))
    dcp.save({name: distribute_tensor(whole[name], t.device_mesh, t.placements) for name, t in state.items()},
             checkpoint_id=str(folder / "dcp"))


def work(kinds: list, folder: str, rank: int, world_size: int, port: int) -> None:
    if kinds == ["save"]:
        return save_dcp(pathlib.Path(folder), rank, port)
    import torch
    torch.set_num_threads(1)
    worker = Worker(kinds, pathlib.Path(folder), rank, world_size, port)
    print("ready", flush=True)
    for line in sys.stdin:
        what, _, kind = line.strip().partition(" ")
        if what == "load":
            before, started = read_bytes(), time.perf_counter()
            worker.load(kind)
            print(json.dumps([time.perf_counter() - started, read_bytes() - before]), flush=True)
        else:
            print(json.dumps(worker.digest() if what == "digest" else worker.clear()), flush=True)


def read_bytes() -> int:
    """What this process had the disk read."""
    return int(next(line.split()[1] for line in open("/proc/self/io") if line.startswith("read_bytes")))


class RankEnded(Exception):
    """A rank is no more: who, of what, and what it did."""


def killed_for_memory() -> int:
    """Processes that this machine's kernel has killed because memory ran out."""
    return int(next((line.split()[1] for line in open("/proc/vmstat") if line.startswith("oom_kill ")), 0))


class Ranks:
    """One process a rank, for `with`. `program`: what else than this file, for tests."""

    def __init__(self, kinds: list, folder: pathlib.Path, world_size: int, program: tuple = ()):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT / "client/python")}
        self._killed = killed_for_memory()
        self.processes = [subprocess.Popen([*(program or (str(_PYTHON), __file__)), "--work", ",".join(kinds), str(folder), str(rank),
                                            str(world_size), str(port)],
                                           stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
                          for rank in range(world_size)]

    def __enter__(self) -> "Ranks":
        try:
            for rank in range(len(self.processes)):
                self._line(rank, "start")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.processes:
            with contextlib.suppress(BrokenPipeError):
                one.stdin.close()
        for one in self.processes:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:  # another one is gone, and it waits for that one
                one.kill()
                one.wait()

    def _line(self, rank: int, what: str) -> str:
        line = self.processes[rank].stdout.readline().strip()
        if line:
            return line
        code = self.processes[rank].wait(60)
        how = f"ended with {code}" if code >= 0 else f"was killed by signal {-code}"
        if code == -9 and killed_for_memory() > self._killed:
            how = "was killed: out of memory"
        raise RankEnded(f"rank {rank} of {len(self.processes)} {how} in {what}")

    def ask(self, what: str) -> list:
        for rank, one in enumerate(self.processes):
            try:
                one.stdin.write(what + "\n")
                one.stdin.flush()
            except BrokenPipeError:
                self._line(rank, what)  # says how it ended
        return [json.loads(self._line(rank, what)) for rank in range(len(self.processes))]


def memory_free() -> int:
    return 1024 * int(next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemAvailable:")))


#: Of a process that has imported torch: not shared with others.
_PROCESS_BYTES = 330_000_000


def memory_needed(kinds: list, world_size: int, size: int) -> int:
    """Of all ranks: the processes, what they hold, a second time in DCP's blocks, and the whole model in each for whole-memory."""
    held = size * (1.2 + (1.2 if "torch-dcp" in kinds else 0))  # tied embeddings lie in two stages
    return int(world_size * _PROCESS_BYTES + held + (world_size * size if "whole-memory" in kinds else 0))


def drop(folder: pathlib.Path) -> None:
    """Its files are not in the page cache any more."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def cache(folder: pathlib.Path) -> None:
    """Its files are in the page cache, as one reader from their beginning to their end leaves them there."""
    piece = bytearray(4 << 20)
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(piece):
                    pass


def rows(report, folder: pathlib.Path, world_size: int, rounds: int, kinds: list, written) -> None:
    size = (folder / "hf/model.safetensors").stat().st_size
    with Ranks(kinds, folder, world_size) as ranks:
        for kind in kinds:
            ranks.ask(f"load {kind}")  # imports, and pages of the target
        cache(folder)
        for cold in (False, True):
            seconds, read = {kind: [] for kind in kinds}, {kind: [] for kind in kinds}
            for kind in kinds * rounds:  # in turns: a busy moment is nobody's own
                if cold:
                    drop(folder)
                started = time.perf_counter()
                answers = ranks.ask(f"load {kind}")
                seconds[kind].append(time.perf_counter() - started)
                read[kind].append(sum(answer[1] for answer in answers) / size)
            digests = {}
            for kind in kinds:
                if kind != "torch-dcp":  # it holds other blocks
                    ranks.ask("clear")
                    ranks.ask(f"load {kind}")
                    digests[kind] = ranks.ask("digest")
            for kind in kinds:
                same = kind == "torch-dcp" or digests[kind] == next(iter(digests.values()))
                name = f"{kind}-{world_size}{'-cold' if cold else ''}"
                report.add(name, size, seconds[kind], same)["read_over_checkpoint_max"] = max(read[kind])
                print(f"  read {max(read[kind]):.3f} x the checkpoint", flush=True)
                written()


def that_fit(kinds: list, world_size: int, size: int) -> list:
    """Without those that need more memory than there is, the greatest first; says which."""
    kinds = list(kinds)
    for greatest in ("whole-memory", "torch-dcp"):
        need, free = memory_needed(kinds, world_size, size), memory_free()
        if need > free and greatest in kinds:
            kinds.remove(greatest)
            print(f"{greatest}-{world_size}: not run, {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free", flush=True)
    need, free = memory_needed(kinds, world_size, size), memory_free()
    if need > free:
        print(f"{world_size} ranks: not run, {need / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB free", flush=True)
        return []
    return kinds


def main() -> int:
    from demo import checkpoint
    from report import Report, add_options, write
    from sync import memcpy
    parser = argparse.ArgumentParser(prog="./dev bench checkpoint", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wwctl", required=True)
    parser.add_argument("--folder", help="where to work, on a disk; default: a new one in the temporary folder. Needs 2 GB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, choices=sorted(_SPECS), action="append")
    parser.add_argument("--kind", choices=_KINDS, action="append", help="only these rows; default: all")
    parser.add_argument("--small", action="store_true", help="a small model of the same family, to try the benchmark")
    add_options(parser)
    args = parser.parse_args()
    subprocess.run([_ROOT / "tests/envs/make.sh", "megatron"], check=True, stdout=subprocess.DEVNULL)
    os.environ["WEIGHTWIRE_BIN_DIR"] = str(pathlib.Path(args.wwctl).resolve().parent)
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-", dir=args.folder) as work_folder:
        folder = pathlib.Path(work_folder)
        checkpoint.write(str(folder / "hf"), checkpoint.SMALL if args.small else checkpoint.QWEN25_05B, seed=1)
        kinds = args.kind or list(_KINDS)
        for one in Ranks(["save"], folder, 2).processes if "torch-dcp" in kinds else ():
            if one.wait(_SECONDS):
                raise RuntimeError("DCP did not save")
        report = Report()
        size = (folder / "hf/model.safetensors").stat().st_size

        def written() -> None:
            write(args, f"Ranks of one host load a checkpoint of {size / 1e6:.0f} MB", report.rows)
        memcpy(report, size, 1, args.rounds)
        try:
            for world_size in args.ranks or sorted(_SPECS):
                if fit := that_fit(kinds, world_size, size):
                    rows(report, folder, world_size, args.rounds, fit, written)
        except RankEnded as ended:
            print(f"bench checkpoint: {ended}; the rows before it are {'in ' + args.json if args.json else 'above'}", file=sys.stderr)
            return 1
        written()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2].split(","), sys.argv[3], *map(int, sys.argv[4:]))
    else:
        sys.exit(main())
