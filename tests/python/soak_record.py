"""What every process of the soak has of memory and descriptors, second by second, whether that grows, and a picture of it."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from typing import Callable, NamedTuple

from conftest import ROOT

MIB = 1 << 20


class Sample(NamedTuple):
    at: float  # seconds since the beginning
    rss: int
    fds: int
    threads: int = 0


class Life(NamedTuple):
    """One process of a daemon, from its start to its end."""

    name: str
    pid: int
    samples: list[Sample]

    @property
    def seconds(self) -> float:
        return self.samples[-1].at - self.samples[0].at

    def quarter(self, number: int, of: str) -> float:
        """The median of one quarter, the first is 0."""
        each = len(self.samples) / 4
        return statistics.median(getattr(s, of) for s in self.samples[int(number * each):max(int((number + 1) * each), 1)])

    def grown(self, of: str) -> float:
        """From its second quarter to its last: the first is for warming up."""
        return self.quarter(3, of) - self.quarter(1, of)


def look(pid: int, since: float) -> Sample | None:
    """None: it is no more."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = {name: rest.split()[0] for name, _, rest in (line.partition(":") for line in status.splitlines()) if rest.split()}
    if "VmRSS" not in fields:  # a zombie has none
        return None
    return Sample(time.monotonic() - since, int(fields["VmRSS"]) << 10, fds, int(fields["Threads"]))


class Recorder:
    """Samples of whoever `pids` names, each second, on a thread of its own."""

    def __init__(self, pids: Callable[[], dict[str, int]]):
        self.lives: dict[tuple[str, int], Life] = {}
        self.strikes: list[tuple[float, str]] = []
        self._pids, self._started = pids, time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(1):
            for name, pid in self._pids().items():
                if sample := look(pid, self._started):
                    self.lives.setdefault((name, pid), Life(name, pid, [])).samples.append(sample)

    def struck(self, what: str) -> None:
        self.strikes.append((self.seconds, what))

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def longest(self) -> dict[str, Life]:
        found: dict[str, Life] = {}
        for life in list(self.lives.values()):
            if life.name not in found or life.seconds > found[life.name].seconds:
                found[life.name] = life
        return found

    def close(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def table(self) -> str:
        """The longest life of each, as lines of Markdown."""
        rows = ["| longest life of | seconds | MiB, second quarter | last quarter | descriptors, second quarter | last quarter |",
                "|---|---|---|---|---|---|"]
        for name, life in self.longest().items():
            rows.append(f"| {name} | {life.seconds:.0f} | {life.quarter(1, 'rss') / MIB:.1f} | {life.quarter(3, 'rss') / MIB:.1f} "
                        f"| {life.quarter(1, 'fds'):.0f} | {life.quarter(3, 'fds'):.0f} |")
        return "\n".join(rows)

    def write(self, directory: str, title: str) -> None:
        """soak.json, every life at most 300 points, the largest of each stretch; and soak.svg."""
        lives = list(self.lives.values())

        def curves(of: str, unit: float) -> list:
            found = []
            for life in lives:
                stretch = max(1, len(life.samples) // 300)
                found.append((life.name, [
                    max(((round(s.at, 1), getattr(s, of) / unit) for s in life.samples[i:i + stretch]), key=lambda point: point[1])
                    for i in range(0, len(life.samples), stretch)]))
            return found
        about = {"title": title, "axis": "seconds; a mark at the foot for each strike",
                 "series": list(dict.fromkeys(life.name for life in lives)), "marks": [at for at, _ in self.strikes],
                 "panels": [("resident memory, MiB", curves("rss", MIB)), ("descriptors", curves("fds", 1))]}
        os.makedirs(directory, exist_ok=True)
        with open(f"{directory}/soak.json", "w") as out:
            json.dump(about, out)
        subprocess.run([sys.executable, ROOT / "bench/curves.py", f"{directory}/soak.json", f"{directory}/soak.svg"], check=True,
                       timeout=60)
