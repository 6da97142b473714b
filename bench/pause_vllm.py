#!/usr/bin/env python3
"""The part of ./dev bench pause that runs in vLLM's environment: one engine, every install mode, one after another.

Prints one line of JSON a mode: seconds of every step in every round, and how many bytes a version has. The answers of the
engine after each version must be those that the same weights gave in every other mode, and differ from the others'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path

from demo.fleet import Daemon
from tests.engine import models, rig

MODES = ("host-shadow", "device-shadow", "paused-live")
#: so that what a buffer holds of two versions ago is no part of the next one
SEEDS = (1, 2, 3)
#: both buffers have been written, mapped and read
WARM_ROUNDS = 2
SECONDS = 300


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def measure(driver, engine, trainer, folders, versions, known: dict[int, list]) -> list[dict[str, float]]:
    """Installs `versions`; of each the seconds of its steps, and "paused" and "transfer" (the trainer's wait)."""
    rounds = []
    for version in versions:
        seed = SEEDS[version % len(SEEDS)]
        trainer.send(version, folders[seed])
        while (serving := driver.step(SECONDS)) is not None and serving.version != version:
            pass  # a rank that has just attached is given the version before
        released = trainer.released()
        if serving is None or serving.recovered or "error" in released:
            raise AssertionError(f"version {version}: serving {serving}, trainer {released}")
        answers = engine.answers(rig.PROMPTS[:1])
        if known.setdefault(seed, answers) != answers:
            raise AssertionError(f"version {version}: the weights of seed {seed} answer otherwise than before")
        rounds.append({**serving.seconds, "paused": serving.paused_seconds, "published": released["blocked_seconds"]})
    return rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kind", choices=list(models.KINDS), required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    args = parser.parse_args()
    binary = str(Path(os.environ["WEIGHTWIRE_BIN_DIR"]) / "weightwired")
    with tempfile.TemporaryDirectory(prefix="weightwire-pause-") as work, contextlib.ExitStack() as stack:
        folders = {seed: models.make(Path(work) / f"seed-{seed}", args.kind, seed) for seed in SEEDS}
        daemon = Daemon(binary, f"{work}/hub", "hub", role="all", listen="127.0.0.1:0")
        stack.callback(daemon.stop)
        engine = stack.enter_context(contextlib.closing(rig.Engine(folders[SEEDS[0]])))
        trainer = stack.enter_context(contextlib.closing(rig.Trainer(daemon.agent_socket, folders[SEEDS[0]])))
        known: dict[int, list] = {}
        first, each = 1, WARM_ROUNDS + args.rounds
        for mode in args.modes:
            driver = stack.enter_context(contextlib.closing(
                engine.driver(name="engine", agent=daemon.agent_socket, install=mode)))
            driver.init()
            rounds = measure(driver, engine, trainer, folders, range(first, first + each), known)
            first += each
            print(json.dumps({"mode": mode, "bytes": bytes_of(folders[SEEDS[0]]), "warm": rounds[:WARM_ROUNDS],
                              "rounds": rounds[WARM_ROUNDS:]}), flush=True)
        if len({json.dumps(answers) for answers in known.values()}) != len(SEEDS):
            raise AssertionError("different weights give equal answers: nothing was compared")


if __name__ == "__main__":
    sys.exit(main())
