"""./dev demo, weightwire demo: the main job, end to end, on one machine, with every byte checked."""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time

import numpy as np

from demo import checkpoint
from demo.fleet import Engine, Fleet
from weightwire.memory import Arena, TensorMeta
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import types_pb2

_VERSIONS = 3


def memcpy_seconds(nbytes: int, rounds: int = 5) -> float:
    """Median seconds of a one-thread copy of `nbytes` between two warm shared-memory buffers."""
    source, target = (Arena(n, [TensorMeta("w", "U8", (nbytes,))]) for n in ("from", "to"))
    a, b = source.arrays["w"], target.arrays["w"]
    a[:] = np.arange(nbytes, dtype=np.uint64).astype(np.uint8) if nbytes < 1 << 20 else 1
    times = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        ctypes.memmove(b.ctypes.data, a.ctypes.data, nbytes)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


class Progress:
    """Lines with the time since the start; a spinner is for terminals, lines are for everybody."""

    def __init__(self):
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", flush=True)


class Monitor:
    """Asks every engine for an answer all the time and checks that no answer mixes versions."""

    def __init__(self, engines: list[Engine]):
        self.answers = {e.name: 0 for e in engines}
        self.refused = {e.name: 0 for e in engines}
        self.stopped = {e.name: 0 for e in engines}  # of these, after its first answer
        self.mixes: list[str] = []
        self.last = {e.name: "" for e in engines}  # what an engine said, or did, instead of an answer
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(e,), daemon=True) for e in engines]

    def __enter__(self) -> "Monitor":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(10)

    def _watch(self, engine: Engine) -> None:
        while not self._stop.wait(0.02):
            try:
                stamps = engine.ranks[0].ask("serve", timeout=20)
                why = "it does not serve"
            except (OSError, EOFError, TimeoutError, RuntimeError) as error:
                stamps, why = None, f"{type(error).__name__}: {error}"
            if stamps is None:
                self.refused[engine.name] += 1
                self.stopped[engine.name] += self.answers[engine.name] > 0
                self.last[engine.name] = why
                continue
            self.answers[engine.name] += 1
            if any(held != [claimed] for claimed, held in stamps) or len({claimed for claimed, _ in stamps}) != 1:
                self.mixes.append(f"{engine.name} answered with {stamps}")


class Demo:
    def __init__(self, fleet: Fleet, work: str, memcpy: float, progress: Progress):
        self.fleet, self.work, self.memcpy, self.progress = fleet, work, memcpy, progress
        self.rows: list[list[str]] = []
        self.version = 0
        self.verified = 0

    def directory(self, version: int) -> str:
        return f"{self.work}/v{version}"

    def next_version(self) -> int:
        """Makes the next checkpoint and lets the trainers load their shards of it."""
        self.version += 1
        version = self.version
        self.progress.say(f"version {version}: making a Hugging Face checkpoint, loading it into 4 Megatron ranks")
        checkpoint.write(self.directory(version), self.fleet.config, seed=version)
        shutil.rmtree(self.directory(version - 2), ignore_errors=True)
        self.fleet.each(self.fleet.trainers, "load", self.directory(version))
        self.fleet.each(self.fleet.engine_ranks(), "expect", version, self.directory(version))
        return version

    def verify(self, version: int, engines: list[Engine]) -> str:
        """Compares every byte of every rank of `engines` with the oracle's; raises on a difference."""
        self.progress.say(f"version {version}: comparing every byte in {', '.join(e.name for e in engines)}")
        compared = 0
        for engine in engines:
            for rank, (count, wrong, serving) in enumerate(
                    self.fleet.each(engine.ranks, "verify", version, self.directory(version))):
                if serving != version or wrong or not count:
                    raise AssertionError(f"{engine.name}/{rank} serves version {serving}, {wrong} of {count} "
                                         f"elements differ from version {version}")
                compared += 2 * count
        return f"{len(engines)} engine{'s' if len(engines) > 1 else ''}, {compared / 1e6:,.0f} MB equal"

    def row(self, what: str, epoch: pb.StatusResponse.Epoch, seconds: float, verified: str) -> None:
        rate = epoch.bytes / seconds / 1e9 if seconds else 0
        copies = seconds / (self.memcpy * epoch.bytes) if seconds and epoch.bytes else 0
        paths = " + ".join(f"{name} {moved / 1e6:,.0f}" for name, moved in sorted(epoch.bytes_by_transport.items()))
        self.rows.append([what, str(epoch.version), str(epoch.epoch), f"{epoch.bytes / 1e6:,.0f} MB", paths,
                          f"{seconds:.3f}", f"{rate:.2f}", f"{copies:.2f}",
                          f"{epoch.flip_seconds_max * 1e3:.2f} ms", verified])

    def epoch_of(self, epoch: int) -> pb.StatusResponse.Epoch:
        return next(e for e in self.fleet.status().epochs if e.epoch == epoch)

    def publish(self) -> None:
        version = self.next_version()
        epoch, seconds = self.fleet.publish(version)
        self.fleet.wait_serving(version)
        verified = self.verify(version, self.fleet.engines)
        self.row("publish", self.epoch_of(epoch), seconds, verified)
        self.verified += 1

    def kill_during_transfer(self, victim: Engine) -> None:
        """SIGKILL to one rank while the bytes of the next version move. The others commit the version;
        the victim comes back and is filled from their stages."""
        for _ in range(5):
            version = self.next_version()
            hit = self._publish_and_kill(version, victim)
            self._recover(version, victim, f"{victim.name}/1 killed while {hit}")
            if hit == "transferring":
                return
        raise AssertionError("the transfer was over each time before the signal arrived; use a larger model")

    def _publish_and_kill(self, version: int, victim: Engine) -> str:
        done: list = []
        publisher = threading.Thread(target=lambda: done.append(self.fleet.publish(version)))
        states = self.fleet.stub.Watch(pb.WatchRequest(min_interval_ms=1), timeout=60)
        publisher.start()
        for status in states:
            moving = [e for e in status.epochs if e.version == version]
            if moving and moving[0].phase >= types_pb2.EPOCH_PHASE_TRANSFERRING:
                victim.ranks[1].kill()
                states.cancel()
                break
        publisher.join(90)
        if not done:
            raise AssertionError(f"version {version} was not released after the kill")
        self.release = done[0]
        attempts = [e for e in self.fleet.status().epochs if e.version == version and e.kind == types_pb2.EPOCH_KIND_PUBLISH]
        # The attempt goes on without the victim, or is tried again; once it is decided neither happens.
        undecided = any(e.phase == types_pb2.EPOCH_PHASE_ABORTED or victim.name in e.left_out for e in attempts)
        return "transferring" if undecided else "committing"

    def kill_between_flips(self, victim: Engine) -> None:
        """Rank 1 dies at the moment when rank 0 has flipped and it has not."""
        version = self.next_version()
        victim.ranks[1].ask("die_at_flip", version)
        self.release = self.fleet.publish(version)
        victim.ranks[1].wait_dead()
        self._recover(version, victim, f"{victim.name}/1 killed between flips")

    def _recover(self, version: int, victim: Engine, what: str) -> None:
        others = [e for e in self.fleet.engines if e is not victim]
        self.fleet.wait_serving(version, others)
        if any(e.name == victim.name and e.state == pb.ENGINE_STATE_SERVING and e.version == version
               for e in self.fleet.status().engines):
            raise AssertionError(f"{victim.name} is said to serve with a dead rank")
        verified = self.verify(version, others)
        epoch, seconds = self.release
        self.row(what, self.epoch_of(epoch), seconds, verified)
        self.progress.say(f"starting {victim.name}/1 again")
        started = time.perf_counter()
        victim.ranks[1].restart()
        victim.ranks[1].wait_ready()
        victim.ranks[1].ask("expect", version, self.directory(version))
        self.fleet.wait_serving(version, [victim])
        caught_up = time.perf_counter() - started
        verified = self.verify(version, [victim])
        fills = [e for e in self.fleet.status().epochs
                 if e.kind == types_pb2.EPOCH_KIND_FILL and victim.name in e.engines and e.version == version
                 and e.phase == types_pb2.EPOCH_PHASE_COMMITTED]
        if not fills:
            raise AssertionError(f"{victim.name} serves version {version} without a fill")
        self.row(f"{victim.name} restarted, {caught_up:.1f} s", fills[0], fills[0].transfer_seconds, verified)
        self.verified += 1

    def table(self) -> str:
        head = ["what", "version", "epoch", "bytes", "MB by path", "seconds", "GB/s", "x memcpy", "flip", "verified"]
        widths = [max(len(row[i]) for row in [head] + self.rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in [head] + self.rows]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def main(arguments: list[str] | None = None, prog: str = "./dev demo") -> int:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument("--small", action="store_true", help="a small model of the same family")
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--work", help="directory for checkpoints (default: a temporary one)")
    args = parser.parse_args(arguments)
    config = checkpoint.SMALL if args.small else checkpoint.QWEN25_05B
    model_bytes = sum(2 * int(np.prod(s)) for s in checkpoint.hf_shapes(config).values())
    progress = Progress()
    progress.say(f"model: {'small ' if args.small else ''}Qwen2.5 shapes, {len(checkpoint.hf_shapes(config))} tensors, "
                 f"{model_bytes / 1e6:,.0f} MB of bf16, tied embeddings")
    memcpy = memcpy_seconds(model_bytes)
    progress.say(f"memcpy of as many bytes on one thread: {memcpy:.3f} s ({model_bytes / memcpy / 1e9:.1f} GB/s)")
    engines = [Engine("engine-a", 1, "shm"), Engine("engine-b", 2, "shm"), Engine("engine-c", 1, "tcp")]
    work = args.work or tempfile.mkdtemp(prefix="weightwire-demo-")
    try:
        with Fleet(config, args.binary, engines=engines) as fleet:
            progress.say("started: weightwired, an agent for engine-c (tcp), 4 trainer ranks (Megatron TP2 x PP2), "
                         "engine-a (vLLM TP1), engine-b (vLLM TP2), engine-c (vLLM TP1)")
            progress.say(f"status page, while this runs: http://{fleet.hub.http}/")
            fleet.wait("all members registered", lambda s: len(s.participants) == 4 + 4)
            demo = Demo(fleet, work, memcpy / model_bytes, progress)
            with Monitor(engines) as monitor:
                for _ in range(_VERSIONS):
                    demo.publish()
                demo.kill_during_transfer(engines[1])
                demo.kill_between_flips(engines[1])
            if monitor.mixes:
                raise AssertionError("mixed answers: " + "; ".join(monitor.mixes[:3]))
            if stopped := {n: c for n, c in monitor.stopped.items() if c and n != engines[1].name}:
                raise AssertionError("engines that were not hit stopped answering: "
                                     + "; ".join(f"{n} {c} times, {monitor.last[n]}" for n, c in stopped.items()))
            print(f"\n{demo.table()}\n\nx memcpy: seconds over those of a one-thread memcpy of the same bytes, in this run."
                  f"\nanswers while all this went on: "
                  + ", ".join(f"{n} {c} ({monitor.refused[n]} refused while down)" for n, c in monitor.answers.items())
                  + "; none mixed versions")
            if not all(monitor.answers.values()):
                raise AssertionError(f"an engine never answered: {monitor.answers}")
    finally:
        if not args.work:
            shutil.rmtree(work, ignore_errors=True)
    print(f"demo: verified {demo.verified} versions on {len(engines)} engines")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
