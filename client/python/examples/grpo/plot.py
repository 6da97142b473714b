"""Draws the reward curves of train.py's JSON files: plot.py OUT.png RUN.json… Needs matplotlib."""

from __future__ import annotations

import json
import sys

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # noqa: E402

out, *runs = sys.argv[1:]
figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
for path in runs:
    with open(path) as file:
        run = json.load(file)
    label = f"{'with sync' if run['sync'] else 'sync off'} ({run['engine']}, {run['seconds']:.0f} s)"
    axes.plot(range(1, len(run["reward"]) + 1), run["reward"], "-" if run["sync"] else "--", label=label)
axes.set(xlabel="step", ylabel="reward", ylim=(0, 1), title="GRPO on a toy task: reward of the rollouts")
axes.grid(alpha=0.3)
axes.legend()
figure.savefig(out, dpi=110)
