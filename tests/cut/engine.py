"""An engine of one rank in a process of its own that looks at what it serves all the time: `engine.py SOCKET NAME AGENT`.

A sample, every few milliseconds: is a version served, are its bytes those of that version, has this process never been
fenced. What is counted only grows: from the first flip on nothing sets it back.

Verb: report.
"""

from __future__ import annotations

import functools
import sys
import threading
import time

import numpy as np

from demo.processes import serve
from weightwire import Subscriber, TensorMeta, boxes
from weightwire.errors import WeightwireError

TENSOR = TensorMeta("weight", "BF16", (256, 128))
SAMPLE_SECONDS = 0.004


def layout():
    """One whole tensor, on either side."""
    return boxes.submission({TENSOR.name: TENSOR}, [boxes.whole(TENSOR)])


@functools.cache
def content(version: int) -> np.ndarray:
    """Every version has other bits almost everywhere."""
    return np.random.default_rng(version).integers(0, 1 << 16, TENSOR.shape, dtype=np.uint16)


class Engine:
    """Takes what it is offered, and looks at what it serves."""

    def __init__(self, name: str, agent: str):
        self._step = threading.Lock()  # held in a sample and in a flip: no sample sees half a flip
        self._stopping = threading.Event()
        self._flipped: list[int] = []
        self._samples, self._blind = 0, 0.0
        self._gaps: list[tuple[float, float, str]] = []  # since when, how long, what was the matter
        self._gap: tuple[float, str] | None = None  # the one that lasts
        self._wrong: list[str] = []
        self._fences: list[str] = []
        self.subscriber = Subscriber(group=name, rank=0, world_size=1, agent=agent)
        self.subscriber.bind_submission(layout())
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._follow, self._look)]
        for thread in self._threads:
            thread.start()

    def _follow(self) -> None:
        while not self._stopping.is_set():
            offer = self.subscriber.wait_offer(0.2)
            if offer is None:
                continue
            content(offer.version)  # not while the lock is held
            try:
                with self._step:
                    self.subscriber.flip(offer)
                    self._flipped.append(offer.version)
                self.subscriber.acknowledge(offer)
            except WeightwireError as error:  # fenced, or cut off: what is to be served is offered again
                print(f"version {offer.version} of epoch {offer.epoch}: {error}", file=sys.stderr, flush=True)

    def _look(self) -> None:
        last, good, fence = time.monotonic(), time.monotonic(), None
        while not self._stopping.wait(SAMPLE_SECONDS):
            with self._step:
                serving, params, fenced = self.subscriber.serving, self.subscriber.params, self.subscriber.last_fence
                if not self._flipped:
                    last = good = time.monotonic()
                    fence = fenced
                    continue
                matter = "serves nothing" if serving is None or params is None else ""
                if not matter and not np.array_equal(params[TENSOR.name], content(serving.version)):
                    matter = f"what it serves is not version {serving.version}"
                    self._wrong.append(matter)
                now = time.monotonic()
                self._samples, self._blind, last = self._samples + 1, max(self._blind, now - last), now
                if fenced is not fence:
                    fence = fenced
                    self._fences.append(str(fenced))
                if matter:
                    self._gap = self._gap or (good, matter)
                    continue
                if self._gap:
                    self._gaps.append((self._gap[0], now - self._gap[0], self._gap[1]))
                    self._gap = None
                good = now

    def report(self) -> dict:
        """All of it since the first flip."""
        with self._step:
            now, serving = time.monotonic(), self.subscriber.serving
            gaps = self._gaps + ([(self._gap[0], now - self._gap[0], self._gap[1])] if self._gap else [])
            return {"version": serving.version if serving else None, "flipped": list(self._flipped), "samples": self._samples,
                    "blind": self._blind, "without_service": sum(gap[1] for gap in gaps),
                    "longest_gap": max((gap[1] for gap in gaps), default=0.0), "gaps": [gap[1:] for gap in gaps],
                    "wrong": self._wrong[:5], "fences": list(self._fences)}

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(30)
        self.subscriber.close()


if __name__ == "__main__":
    path, *which = sys.argv[1:]
    engine = Engine(*which)
    serve(path, {"report": engine.report})
    engine.close()
