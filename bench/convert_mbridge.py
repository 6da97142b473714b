#!/usr/bin/env python3
"""The part of ./dev bench convert that mbridge and megatron-core do themselves, in the environment that has them.

    convert_mbridge.py torch_dist HF HF OUT      mbridge loads Hugging Face, megatron-core saves OUT
    convert_mbridge.py hf HF TORCH_DIST OUT      megatron-core loads, mbridge saves Hugging Face to OUT

HF is what the model is built from. One process without a GPU: what both assume of CUDA and of Transformer Engine is
replaced as in the trainer tests.
"""

from __future__ import annotations

import os
import pathlib
import socket
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/trainers"))

from bridge_ranks import mbridge  # noqa: E402  first: it replaces Transformer Engine

import megatron.core.dist_checkpointing as dist_checkpointing  # noqa: E402
import torch.distributed as dist  # noqa: E402

import mcore  # noqa: E402


def main() -> None:
    target, hf, source, out = sys.argv[1:]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    mcore.start()
    bridge, models = mbridge(hf)
    state = {"model": models[0].sharded_state_dict()}
    os.makedirs(out)
    if target == "torch_dist":
        bridge.load_weights(models, source)
        dist_checkpointing.save(state, out)
    else:
        models[0].load_state_dict(dist_checkpointing.load(state, source)["model"])
        bridge.safetensor_io = bridge._get_safetensor_io(hf)  # else its save wants a load before it
        bridge.save_weights(models, out)


if __name__ == "__main__":
    main()
