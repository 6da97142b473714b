"""A trainer of one rank that holds a checkpoint as Hugging Face saves it.

    python -m tests.engine.trainer_hf --agent SOCKET --checkpoint DIR

Reads one JSON object a line on stdin, {"publish": VERSION, "checkpoint": DIR} or {"stop": true}; with "manual": true the
version is not committed until somebody asks. Answers each with one line: {"version", "epoch", "blocked_seconds"} or {"error"}. The first line that it prints is {"ready": true}. Any
program with these arguments and lines can take its place (see `rig.Trainer`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from weightwire import Publisher, TensorMeta


def read(folder: Path) -> dict[str, tuple[TensorMeta, np.ndarray]]:
    """name -> (meta, raw bytes) of a folder of safetensors."""
    out = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = np.fromfile(path, np.uint8)
        length = int(data[:8].view("<u8")[0])
        for name, entry in json.loads(data[8:8 + length].tobytes()).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                out[name] = (TensorMeta(name, entry["dtype"], tuple(entry["shape"])),
                             data[8 + length + begin:8 + length + end])
    return out


def config_of(folder: Path) -> dict:
    """config.json without members that are null."""
    return {k: v for k, v in json.loads((folder / "config.json").read_text()).items() if v is not None}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--agent", required=True)
    parser.add_argument("--checkpoint", required=True, type=Path)
    args = parser.parse_args()
    config = config_of(args.checkpoint)
    held = read(args.checkpoint)
    if config.get("tie_word_embeddings"):
        held.pop("lm_head.weight", None)
    with Publisher(rank=0, world_size=1, agent=args.agent) as publisher:
        params = publisher.bind(config, "hf", [meta for meta, _ in held.values()])
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            if command.get("stop"):
                break
            new = read(Path(command["checkpoint"]))
            for name, array in params.items():
                array.reshape(-1).view(np.uint8)[:] = new[name][1]
            try:
                release = publisher.publish(command["publish"], deadline=300,
                                            manual_commit=command.get("manual", False)).wait_released(300)
                answer = {"version": release.version, "epoch": release.epoch, "blocked_seconds": release.blocked_seconds}
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
