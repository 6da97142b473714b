"""What every benchmark of weightwire prints and writes: rows, a chart of them, and ratios in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time

import chart


def machine() -> dict:
    """What the figures depend on, for the JSON file."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    return {"cpu": model, "cores": os.cpu_count(), "kernel": platform.release(), "load_1min": os.getloadavg()[0],
            "date": time.strftime("%Y-%m-%d")}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the rows to this file")
    parser.add_argument("--plot", metavar="FILE.svg", help="draw the medians as bars, with whiskers from least to most")


def spread(values: list[float]) -> dict:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def write(args: argparse.Namespace, title: str, rows: list[dict], unit: str = "seconds", about: dict | None = None) -> None:
    """What `add_options` asked for. A row is one bar, of its "seconds_median", "seconds_min" and "seconds_max", or those of
    its "bars": a `spread` for each series, or one number. `about`: what is not of one row."""
    about = {"title": title, "unit": unit, "machine": machine(), **(about or {}), "rows": rows}
    if args.json:
        with open(args.json, "w") as out:
            json.dump(about, out, indent=1)
            out.write("\n")
    if args.plot:
        plot(about, args.plot)


def plot(about: dict, path: str) -> None:
    on = about["machine"]
    chart.write(path, about["title"], about["unit"], [(row["name"], _bars(row)) for row in about["rows"] if _bars(row)],
                f"{on['cores']} cores of {on['cpu']}, {on['date']}")


def _bars(row: dict) -> list[chart.Bar]:
    if "bars" not in row:
        if row["seconds_median"] is None:  # it tells of something else than time
            return []
        return [chart.Bar("", row["seconds_median"], row["seconds_min"], row["seconds_max"])]
    return [chart.Bar(series, of["median"], of["min"], of["max"]) if isinstance(of, dict) else
            chart.Bar(series, of, of, of) for series, of in row["bars"].items()]


class Report:
    """Rows of {"name", "bytes", "rounds", "seconds_*", "ratio_to_memcpy", "checked"}; `reference`: what the first row is."""

    def __init__(self, reference: str = "memcpy") -> None:
        self.rows: list[dict] = []
        self._reference = reference

    def add(self, name: str, nbytes: int, seconds: list[float], checked: bool, first: float | None = None,
            cpu: list[float] | None = None) -> dict:
        """`seconds`: the steady rounds; `first`: the one that paid for connections and page faults; `cpu`: processor
        seconds of both sides in the steady rounds.
        The first row added is the reference of all ratios."""
        if not checked:
            raise AssertionError(f"{name}: the bytes that arrived are wrong")
        median = statistics.median(seconds)
        ratio = median / (self.rows[0]["seconds_median"] if self.rows else median)
        row = {"name": name, "bytes": nbytes, "rounds": len(seconds), "seconds_median": median,
               "seconds_min": min(seconds), "seconds_max": max(seconds), f"ratio_to_{self._reference}": ratio,
               "checked": True}
        if first is not None:
            row["seconds_first"] = first
        if cpu is not None:
            row["cpu_seconds_median"] = statistics.median(cpu)
        self.rows.append(row)
        print(f"{name:18s} {nbytes / 1e6:8,.0f} MB  median {median:.3f} s  (min {min(seconds):.3f}, max {max(seconds):.3f}"
              + (f", first {first:.3f}" if first is not None else "")
              + f")  {nbytes / median / 1e9:6.2f} GB/s  {ratio:5.2f} x {self._reference}"
              + (f"  {row['cpu_seconds_median']:.2f} s of processor" if cpu is not None else ""), flush=True)
        return row


def main() -> None:
    """bench/report.py FILE.json FILE.svg: the chart of rows that were written before."""
    with open(sys.argv[1]) as rows:
        plot(json.load(rows), sys.argv[2])


if __name__ == "__main__":
    main()
