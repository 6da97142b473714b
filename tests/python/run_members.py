"""A trainer or an engine that finds its agent by the environment alone: `run_members.py trainer|engine`. For each version that a line of standard
input names, a line says what is held of it: {"version", "sums" of every tensor}."""

from __future__ import annotations

import hashlib
import json
import sys
import time

from coordinator_job import CONFIG, content, metas
from demo import checkpoint
from weightwire import Publisher, StaleError, Subscriber

SHAPES = checkpoint.hf_shapes(CONFIG)


def say(version: int, tensors) -> None:
    sums = {name: hashlib.sha256(bytes(tensors[name])).hexdigest() for name in SHAPES}
    print(json.dumps({"version": version, "sums": sums}), flush=True)


def trainer() -> None:
    with Publisher(rank=0, world_size=1) as publisher:
        held = publisher.bind(CONFIG, "hf", metas(SHAPES))
        for line in sys.stdin:
            bits = content(int(line))
            for name in SHAPES:
                held[name].view(bits[name].dtype)[...] = bits[name]
            publisher.publish(int(line)).wait_released(60)
            say(int(line), bits)


def engine() -> None:
    with Subscriber(group="engine-a", rank=0, world_size=1) as subscriber:
        subscriber.bind(CONFIG, "hf", metas(SHAPES))
        for line in sys.stdin:
            end = time.monotonic() + 60
            while subscriber.serving is None or subscriber.serving.version < int(line):
                assert time.monotonic() < end, f"version {line.strip()} did not come; serving {subscriber.serving}"
                try:
                    if offer := subscriber.wait_offer(1):
                        subscriber.flip(offer)
                        subscriber.acknowledge(offer)
                except StaleError:
                    pass  # its agent went away; it attaches again
            say(subscriber.serving.version, subscriber.params)


{"trainer": trainer, "engine": engine}[sys.argv[1]]()
