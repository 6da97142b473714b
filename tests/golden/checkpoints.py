#!/usr/bin/env python3
"""Writes tests/data/checkpoints: what real megatron-core saves of models that hold tests/data/megatron/*/hf.

It needs the environment of the trainer tests: $(tests/envs/make.sh megatron) tests/golden/checkpoints.py
The tests that read them (tests/python/test_checkpoint*.py) have neither torch nor mcore.
"""

import pathlib
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/trainers")]


def main() -> None:
    from checkpoint_ranks import save
    from world import World
    out = ROOT / "tests/data/checkpoints"
    for model, sizes, kept in (("qwen3_moe", dict(tp=2, ep=2, etp=2), "torch_dist"),
                               ("qwen2_tied", dict(tp=2, pp=2), "megatron")):
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "torch_dist").mkdir()
            with World(save, 4, str(ROOT / f"tests/data/megatron/{model}/hf"), folder, sizes, {}) as world:
                world.join(120)
            shutil.rmtree(out / f"{kept}-{model}", ignore_errors=True)
            shutil.copytree(f"{folder}/{kept}", out / f"{kept}-{model}")


if __name__ == "__main__":
    main()
