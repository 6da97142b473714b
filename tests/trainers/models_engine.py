"""An engine of one model that can be killed: `models_engine.py AGENT NAME MODEL CHECKPOINT` prints a JSON line for every version that it
has flipped to, with the digest of every byte."""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys
import time

from conftest import read_safetensors
from weightwire import StaleError, Subscriber


def digest(params) -> str:
    """Of names and bytes, in the order of names."""
    made = hashlib.sha256()
    for name in sorted(params):
        made.update(name.encode())
        made.update(params[name].tobytes())
    return made.hexdigest()


def main(agent: str, name: str, model: str, checkpoint: str) -> None:
    config = json.loads((pathlib.Path(checkpoint) / "config.json").read_text())
    metas = [meta for meta, _ in read_safetensors(pathlib.Path(checkpoint) / "model.safetensors").values()]
    subscriber = Subscriber(group=name, rank=0, world_size=1, agent=agent, model_name=model)
    subscriber.bind(config, "hf", metas)
    print(json.dumps({"engine": name, "at": time.monotonic(), "version": 0, "digest": ""}), flush=True)
    while True:
        try:
            offer = subscriber.wait_offer(1)
            if offer is None:
                continue
            params = subscriber.flip(offer)
            print(json.dumps({"engine": name, "at": time.monotonic(), "version": offer.version, "digest": digest(params)}), flush=True)
            subscriber.acknowledge(offer)
        except StaleError:
            continue


if __name__ == "__main__":
    main(*sys.argv[1:])
