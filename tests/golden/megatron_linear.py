#!/usr/bin/env python3
"""Writes tests/data/megatron-bridge/<model>-tp2.json: where Megatron-Bridge puts linear attention and Mamba.

Every element of a checkpoint that transformers saved is a number of its own; Megatron-Bridge's own loader fills real
megatron-core models of two tensor-parallel ranks, built with a stub of Transformer Engine (tests/trainers/stub_te.py)
and of the kernels' packages. What it computes (the gated delta rule's out_norm, held less one) has no row. No GPU.
  VENV/bin/python tests/golden/megatron_linear.py            # exit 1 when a file would change
  VENV/bin/python tests/golden/megatron_linear.py --update   # writes
with Megatron-Bridge 0.3.1 (megatron-core 0.16.1) for Qwen3-Next, and 0.6.2 (0.19.2) for the others.
"""

import importlib.metadata
import json
import pathlib
import sys

import numbered
from linear_models import MODELS, checkpoint

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/trainers"), str(ROOT / "client/python")]
# Its bridges read how often attention comes, know no layer that is dense among those with experts, and load no padded
# vocabulary.
FIELDS = dict(vocab_size=256, moe_shared_expert_overlap=False)
DELTA_FIELDS = dict(full_attention_interval=2, mlp_only_layers=[])
OF_VERSION = {"0.3.1": ["qwen3-next"], "0.6.2": ["qwen3-5", "qwen3-5-moe", "nemotron-h"]}


def load(config, rank, folder):
    """The rows of one rank."""
    import stub_kernels
    stub_kernels.install()
    import bridge_ranks  # installs the stub of Transformer Engine before megatron is imported
    import mcore
    import torch.distributed as dist
    from megatron.bridge import AutoBridge
    from safetensors.torch import save_file
    tensors = checkpoint(config)
    first = numbered.numbered(tensors)
    dist.init_process_group("gloo", init_method=f"file://{folder}/../store", rank=rank, world_size=numbered.TP)
    mcore.start(tp=numbered.TP)
    mcore.pack_what_is_scattered()
    found, chunks = {}, None
    for byte in range(2):
        hf = folder / f"part{byte}"
        hf.mkdir()
        (hf / "config.json").write_text(json.dumps(config))
        save_file({name: part.clone() for name, part in numbered.parts_of(tensors, first, byte)},
                  hf / "model.safetensors", metadata={"format": "pt"})
        bridge = AutoBridge.from_hf_pretrained(str(hf))
        if chunks is None:
            _, chunks = bridge_ranks.megatron_bridge(str(hf))
        bridge.load_hf_weights(chunks, str(hf))
        model = chunks[0]
        while hasattr(model, "module"):
            model = model.module
        params = list(model.named_parameters()) + [(name, buffer) for name, buffer in model.named_buffers()
                                                   if name.endswith("expert_bias")]
        numbered.add_part(found, params, tensors, byte)
    return [row for name, param in params if not name.endswith("out_norm.weight")
            for row in numbered.rows_of(name, param, found[name], tensors, first, together=False)]


if __name__ == "__main__":
    VERSION = importlib.metadata.version("megatron-bridge")
    CORE = importlib.metadata.version("megatron-core")
    MINE = {name: MODELS[name] | FIELDS | ({} if name.startswith("nemotron") else DELTA_FIELDS)
            for name in OF_VERSION.get(VERSION, [])}
    sys.exit(numbered.main(MINE, load, __file__, __doc__, "megatron-bridge",
                           f"Megatron-Bridge {VERSION}, megatron-core {CORE}" if VERSION in OF_VERSION else None))
