"""Worlds of ranks on this machine, over gloo. Ranks are forked from a server that has imported torch already."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import tempfile
import time
import traceback

_CONTEXT = multiprocessing.get_context("forkserver")


# The server is a process of its own and looks for modules where the environment says.
_HERE = pathlib.Path(__file__).resolve().parent
os.environ["PYTHONPATH"] = f"{_HERE.parents[1] / 'client/python'}:{_HERE}"


def preload(*modules: str) -> None:
    """What the server imports before it forks ranks; a process has one server, so call it once, before any World."""
    _CONTEXT.set_forkserver_preload(["world", *modules])


preload("torch_ranks", "mcore_ranks", "checkpoint_ranks", "optimizer_ranks", "option_ranks", "models_ranks")


def _rank(target, rank: int, world_size: int, folder: str, arguments: tuple) -> None:
    """One process: joins the world, runs the target, leaves what went wrong in a file."""
    with open(f"{folder}/{rank}.log", "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        try:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size,
                                    timeout=datetime.timedelta(seconds=40))
            target(rank, world_size, *arguments)
            dist.barrier()
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc()
            log.flush()
            os._exit(1)
        log.flush()
        os._exit(0)  # gloo's and gRPC's threads are not waited for


class World:
    """`world_size` processes that run `target(rank, world_size, *arguments)`; killed at the end of `with`."""

    def __init__(self, target, world_size: int, *arguments):
        self._folder = tempfile.mkdtemp(prefix="weightwire-world-")
        self._ranks = [_CONTEXT.Process(target=_rank, args=(target, rank, world_size, self._folder, arguments),
                                        daemon=True) for rank in range(world_size)]
        for process in self._ranks:
            process.start()

    def logs(self) -> str:
        texts = []
        for rank in range(len(self._ranks)):
            with contextlib.suppress(OSError), open(f"{self._folder}/{rank}.log") as log:
                texts.append(f"--- rank {rank}\n{log.read()[-6000:]}")
        return "\n".join(texts)

    def kill(self, rank: int) -> None:
        """By SIGKILL."""
        self._ranks[rank].kill()
        self._ranks[rank].join(30)

    def check(self) -> None:
        """No rank has failed so far."""
        failed = [rank for rank, process in enumerate(self._ranks) if process.exitcode not in (None, 0)]
        assert not failed, f"ranks {failed} failed\n{self.logs()}"

    def next_offer(self, subscriber, timeout: float = 60):
        """Of an engine of the test's own; fails as soon as a rank has failed."""
        end, offer = time.monotonic() + timeout, None
        while offer is None:
            self.check()
            assert time.monotonic() < end, f"no version arrived within {timeout} s\n{self.logs()}"
            offer = subscriber.wait_offer(0.2)
        return offer

    def join(self, timeout: float = 60) -> None:
        """All ranks ended well; otherwise fails at once with what they wrote."""
        end = time.monotonic() + timeout
        while running := [process for process in self._ranks if process.is_alive()]:
            self.check()
            assert time.monotonic() < end, f"ranks are still running after {timeout} s\n{self.logs()}"
            multiprocessing.connection.wait([process.sentinel for process in running], 1.0)
        self.check()

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._ranks:
            if process.is_alive():
                process.kill()
            process.join(10)
