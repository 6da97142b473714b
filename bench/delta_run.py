#!/usr/bin/env python3
"""Curves over the versions of tests/engine/test_delta.py: bench/delta_run.py FOLDER OUT.svg. FOLDER: what the suite wrote, with
WEIGHTWIRE_DELTA_RUN=FOLDER in its environment; one file for each learning rate."""

from __future__ import annotations

import json
import pathlib
import sys

import curves


def main() -> int:
    folder, out = sys.argv[1:]
    runs = {path.stem.removeprefix("adamw-"): json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("adamw-*.json"))}
    if not runs:
        raise SystemExit(f"{folder} has no adamw-*.json")
    series = [f"lr {rate}" for rate in runs]

    def panel(label: str, of) -> tuple[str, list[curves.Curve]]:
        return label, [curves.Curve(name, [(row["version"], of(row)) for row in rows[1:]]) for name, rows in zip(series, runs.values())]

    curves.write(out, "A small Qwen2 under AdamW, sent to vLLM as what changed", "version", series,
                 [panel("per cent of the bf16 elements that changed", lambda row: 100 * row["density"]),
                  panel("per cent of the bytes that were sent", lambda row: 100 * row["sent"] / row["bytes"])])
    return 0


if __name__ == "__main__":
    sys.exit(main())
