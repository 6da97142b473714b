#!/usr/bin/env python3
"""./dev bench pause: how long an engine, and a trainer, stand still for a version, by every way to install one, and what happened before.

subscriber flip   our own subscriber: two buffers, a change of pointers; "touch" reads one byte of each page afterwards
torch publish     `publish` of weightwire.torch on CPUs, beside a memcpy of as many bytes (in vLLM's environment, for its torch)
tensor stream     a round of a stream of whole tensors, as verl's route "tensors" and TRL have it, until every engine has the version
vLLM MODE         a real vLLM (where tests/envs has made its environment) in install mode host-shadow, device-shadow or
                  paused-live. Stopped is from the call that pauses its scheduler to the end of the call that resumes it

before: publish (from the publish call until the version is staged and verified), prepare (the driver's checks; with
device-shadow the copy to the device). Of all rounds but the first two, in which buffers are written for the first time.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

import report
from demo import checkpoint, oracle
from demo.fleet import Fleet
from weightwire import Subscriber, TensorMeta

_HERE = pathlib.Path(__file__).resolve().parent
_VLLM = pathlib.Path(os.environ.get("WEIGHTWIRE_VENVS", pathlib.Path.home() / ".cache/weightwire/venvs")) / "vllm"
_WARM_ROUNDS = 2
_SECONDS = 1800
#: steps of weightwire.vllm's Deadlines while the engine is stopped, as the table calls them
_INSIDE = {"pause": "pause", "transfer": "transfer", "start": "start", "update": "load", "finish": "finish",
           "reset": "reset", "resume": "resume"}


def row(name: str, nbytes: int, before: dict[str, list[float]], inside: dict[str, list[float]], stopped: list[float]) -> dict:
    """`before`, `inside`: seconds of each part, a list with one figure a round."""
    preceded = [sum(parts) for parts in zip(*before.values())] or [0.0] * len(stopped)
    total = report.spread(stopped)
    made = {"name": name, "bytes": nbytes, "rounds": len(stopped), **{f"seconds_{k}": v for k, v in total.items()},
            "before": {part: report.spread(seconds) for part, seconds in before.items()},
            "inside": {part: report.spread(seconds) for part, seconds in inside.items()},
            "bars": {"before the pause": report.spread(preceded), "stopped": total}, "checked": True}
    print(f"{name:20s} {nbytes / 1e6:6,.0f} MB  stopped {total['median']:.3g} s (min {total['min']:.3g}, max "
          f"{total['max']:.3g})")
    for when in ("before", "inside"):
        print(f"{'':20s} {when}: " + (", ".join(f"{part} {of['median']:.3g}" for part, of in made[when].items()) or "-"),
              flush=True)
    return made


class Rounds:
    """Versions through a fleet without engines to this process's subscriber."""

    def __init__(self, fleet: Fleet, subscriber: Subscriber) -> None:
        self._fleet, self._subscriber = fleet, subscriber

    def run(self, version: int) -> tuple[float, float, float]:
        """Seconds of publish, flip, touch."""
        published: list[float] = []
        publishing = threading.Thread(target=lambda: published.append(self._fleet.publish(version)[1]))
        publishing.start()
        offer = self._subscriber.wait_offer(60)
        if offer is None or offer.version != version:
            raise AssertionError(f"version {version} did not come: {offer}; {self._subscriber.last_fence}")
        began = time.perf_counter()
        params = self._subscriber.flip(offer)
        flipped = time.perf_counter()
        for array in params.values():
            array.reshape(-1).view(np.uint8)[::4096].max()
        touched = time.perf_counter()
        self._subscriber.acknowledge(offer, flipped - began)
        publishing.join()
        return published[0], flipped - began, touched - flipped


def subscriber(binary: str, config: dict, rounds: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="weightwire-bench-") as work, Fleet(config, binary) as fleet:
        checkpoint.write(work, config, seed=1)
        fleet.each(fleet.trainers, "load", work)
        with Subscriber(group="engine", rank=0, world_size=1, agent=fleet.hub.agent_socket) as mine:
            mine.bind(config, "vllm:tp1", [TensorMeta(name, "BF16", shape)
                                           for name, shape in oracle.vllm_shapes(config, 1).items()])
            versions, measured = Rounds(fleet, mine), []
            for version in range(1, _WARM_ROUNDS + rounds + 1):
                fleet.each(fleet.trainers, "change")
                measured.append(versions.run(version))
            assert mine.params is not None
            for name, want in oracle.vllm(config, checkpoint.read(work), 1, 0):
                if not np.array_equal(mine.params[name][:len(want)], want + np.uint16(len(measured))):
                    raise AssertionError(f"{name} is not what the trainer holds")
            nbytes = sum(array.nbytes for array in mine.params.values())
    published, flips, touches = (list(part) for part in zip(*measured[_WARM_ROUNDS:]))
    made = row("subscriber flip", nbytes, {"publish": published}, {"flip": flips, "touch": touches}, flips)
    made["touch_first_rounds"] = [touch for _, _, touch in measured[:_WARM_ROUNDS]]
    return made


def trainer(small: bool, rounds: int) -> list[dict]:
    """`over_memcpy`: median of how long `publish` blocks, by that of a memcpy; `over_raw`: of a stream's round, by that of a memcpy and
    of publishing what lies in shared memory."""
    place = os.pathsep.join([str(_HERE.parent / "client/python"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([_VLLM / "bin/python", _HERE / "pause_torch.py", "--rounds", str(rounds), *(["--small"] if small else [])],
                          check=True, stdout=subprocess.PIPE, text=True, timeout=_SECONDS, env={**os.environ, "PYTHONPATH": place})
    measured = json.loads(done.stdout)
    made = row("torch publish", measured["bytes"], {}, {"publish": measured["blocked"]}, measured["blocked"])
    made["memcpy"] = report.spread(measured["memcpy"])
    made["over_memcpy"] = made["inside"]["publish"]["median"] / made["memcpy"]["median"]
    print(f"{'':20s} memcpy {made['memcpy']['median']:.3g} s, publish {made['over_memcpy']:.2f} x that", flush=True)
    copies = [whole - published for whole, published in zip(measured["stream"], measured["stream_publish"])]
    stream = row("tensor stream", measured["bytes"], {}, {"copy": copies, "publish": measured["stream_publish"]}, measured["stream"])
    raw = [sum(parts) for parts in zip(measured["stream_memcpy"], measured["stream_publish"])]
    stream["over_raw"] = report.spread(measured["stream"])["median"] / report.spread(raw)["median"]
    print(f"{'':20s} {stream['over_raw']:.2f} x a memcpy and the publish", flush=True)
    return [made, stream]


def vllm(kind: str, rounds: int, modes: list[str]) -> list[dict]:
    done = subprocess.run([_HERE.parent / "tests/engine/in_env.sh", "bench/pause_vllm.py", "--kind", kind, "--rounds",
                           str(rounds), "--modes", *modes], check=True, stdout=subprocess.PIPE, text=True, timeout=_SECONDS)
    rows = []
    for line in done.stdout.splitlines():  # vLLM prints there too
        if not line.startswith("{"):
            continue
        measured = json.loads(line)
        of = {step: [r.get(step, 0.0) for r in measured["rounds"]] for step in measured["rounds"][0]}
        live = "transfer" in of  # then nothing happens before the pause
        before = {} if live else {"publish": of["published"], "prepare": of["prepare"]}
        inside = {**({"prepare": of["prepare"]} if live else {}),
                  **{part: of[step] for step, part in _INSIDE.items() if step in of}}
        stopped = [sum(parts) for parts in zip(of["pause"], of["paused"], of["resume"])]
        rows.append({**row(f"vLLM {measured['mode']}", measured["bytes"], before, inside, stopped), "model": kind})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench pause", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="4 MB instead of 988: what the calls themselves cost")
    parser.add_argument("--modes", nargs="*", default=["host-shadow", "device-shadow", "paused-live"], help="of vLLM")
    report.add_options(parser)
    args = parser.parse_args()
    os.environ["WEIGHTWIRE_BIN_DIR"] = str(pathlib.Path(args.binary).resolve().parent)
    rows = [subscriber(args.binary, checkpoint.SMALL if args.small else checkpoint.QWEN25_05B, args.rounds)]
    if not (_VLLM / ".weightwire").exists():
        print(f"without rows of vLLM: {_VLLM} is not there; tests/envs/make.sh vllm makes it (6 GB)")
    else:
        rows += trainer(args.small, args.rounds)
    if args.modes and (_VLLM / ".weightwire").exists():
        rows += vllm("qwen2" if args.small else "qwen2.5-0.5b", args.rounds, args.modes)
    report.write(args, "What an engine is stopped for, and what happened before", rows)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
