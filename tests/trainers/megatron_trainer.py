#!/usr/bin/env python3
"""A real megatron-core trainer behind a command line, for tests that need one beside a real engine.

    tests/trainers/run_trainer.sh --agent SOCKET --checkpoint DIR [--tp 2] [--pp 2] [--ep 1]

Starts tp * pp ranks (ep takes them from tp) over gloo, loads the Hugging Face checkpoint DIR into megatron-core's own
modules, and then reads one JSON object a line on stdin:

    {"publish": VERSION, "checkpoint": DIR}   loads DIR (a checkpoint of the same model) and publishes it
    {"publish": VERSION, "train": DIR}        trains one step, writes the result into DIR (a checkpoint folder that
                                              exists: its model.safetensors is replaced), and publishes it
    {"stop": true}

The first line that it prints is {"ready": true}; then one a command: {"version", "epoch", "blocked_seconds"}, or {"error"}.
These are the lines of tests/engine/trainer_hf.py, with "train" added.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import sys
import traceback

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "client/python"), str(HERE)]

from world import World  # noqa: E402

_SECONDS = 300


def rank_main(rank: int, world_size: int, agent: str, checkpoint: str, sizes: dict, pipes: list) -> None:
    import weightwire.megatron
    from mcore_ranks import Job
    # Small steps, so that an engine's answers stay those of the same kind of model.
    job = Job(checkpoint, sizes, {}, learning_rate=0.01)
    with weightwire.megatron.Publisher(job.chunks, checkpoint, agent=agent) as publisher:
        pipes[rank].send({"ready": True})
        while command := pipes[rank].recv():
            try:
                pipes[rank].send(execute(job, publisher, command))
            except Exception:
                pipes[rank].send({"error": traceback.format_exc()})


def execute(job, publisher, command: dict) -> dict:
    version = command["publish"]
    if "train" in command:
        job.step(version)
        job.save(pathlib.Path(command["train"]) / "model.safetensors")
    else:
        job.load(command["checkpoint"])
    release = publisher.publish(version, deadline=_SECONDS).wait_released(_SECONDS)
    return {"version": release.version, "epoch": release.epoch, "blocked_seconds": publisher.blocked_seconds}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--checkpoint", required=True)
    for word in ("tp", "pp", "ep"):
        parser.add_argument(f"--{word}", type=int, default=1)
    args = parser.parse_args()
    # Without ep, experts are cut by tensor parallelism, as Megatron does when told nothing.
    sizes = dict(tp=args.tp, pp=args.pp, ep=args.ep, etp=1 if args.ep > 1 else None)
    world_size = max(args.tp, args.ep) * args.pp
    pairs = [multiprocessing.Pipe() for _ in range(world_size)]
    with World(rank_main, world_size, args.agent, args.checkpoint, sizes, [theirs for _, theirs in pairs]) as world:
        ours = [mine for mine, _ in pairs]
        print(json.dumps(answer(ours, world)), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command.get("stop"):
                break
            for pipe in ours:
                pipe.send(command)
            print(json.dumps(answer(ours, world)), flush=True)
        for pipe in ours:
            pipe.send(None)
        world.join()


def answer(pipes: list, world: World) -> dict:
    """Rank 0's answer once all ranks have one, or the first error. Fails when a rank has."""
    answers = []
    for pipe in pipes:
        while not pipe.poll(0.5):
            world.check()
        answers.append(pipe.recv())
    return next((a for a in answers if "error" in a), answers[0])


if __name__ == "__main__":
    main()
