"""What every benchmark of weightwire prints and writes: one row a contender, ratios in one run."""

from __future__ import annotations

import json
import os
import platform
import statistics


def machine() -> dict:
    """What the figures depend on, for the JSON file."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "load_1min": os.getloadavg()[0]}


class Report:
    """Rows of {"name", "bytes", "rounds", "seconds_*", "ratio_to_memcpy", "checked"}."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self._memcpy: float | None = None

    def add(self, name: str, nbytes: int, seconds: list[float], checked: bool, first: float | None = None,
            cpu: list[float] | None = None) -> dict:
        """`seconds`: the steady rounds; `first`: the one that paid for connections and page faults; `cpu`: processor
        seconds of both sides in the steady rounds.
        The first row added is the reference of all ratios and should be memcpy."""
        if not checked:
            raise AssertionError(f"{name}: the bytes that arrived are wrong")
        median = statistics.median(seconds)
        self._memcpy = self._memcpy or median
        row = {"name": name, "bytes": nbytes, "rounds": len(seconds), "seconds_median": median,
               "seconds_min": min(seconds), "seconds_max": max(seconds), "ratio_to_memcpy": median / self._memcpy,
               "checked": True}
        if first is not None:
            row["seconds_first"] = first
        if cpu is not None:
            row["cpu_seconds_median"] = statistics.median(cpu)
        self.rows.append(row)
        print(f"{name:18s} {nbytes / 1e6:8,.0f} MB  median {median:.3f} s  (min {min(seconds):.3f}, max {max(seconds):.3f}"
              + (f", first {first:.3f}" if first is not None else "")
              + f")  {nbytes / median / 1e9:6.2f} GB/s  {median / self._memcpy:5.2f} x memcpy"
              + (f"  {row['cpu_seconds_median']:.2f} s of processor" if cpu is not None else ""), flush=True)
        return row

    def write(self, path: str | None) -> None:
        if path:
            with open(path, "w") as out:
                json.dump({"machine": machine(), "rows": self.rows}, out, indent=1)
                out.write("\n")
