#!/usr/bin/env python3
"""Writes tests/data/vllm-traces/<family>-tp2.json: where vLLM 0.32.0's own loader puts the elements of a checkpoint.

The checkpoint's names, shapes and config.json are those of tests/data/transformers/<family>-engine.json, which
transformers itself saved (tests/golden/families.py), with sizes that vLLM accepts. Otherwise as vllm_fp8.py, whose
environment it needs:
  VENV/bin/python tests/golden/vllm_families.py            # exit 1 when a file would change
  VENV/bin/python tests/golden/vllm_families.py --update   # writes
"""

import argparse
import json
import pathlib
import sys
import traceback

import vllm_fp8

LISTINGS = vllm_fp8.DATA.parent / "transformers"


def listing(family):
    """(config.json, {name: (dtype, shape)}) of the tiny model."""
    import torch
    stored = json.loads((LISTINGS / f"{family}-engine.json").read_text())
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    # Releases hold this one in fp32; transformers casts it with the model.
    tensors = {name: (torch.float32 if name.endswith("e_score_correction_bias") else dtypes[dtype], tuple(shape))
               for name, (dtype, shape) in stored["tensors"].items()}
    return stored["config"], tensors


def without_processors():
    """Models are loaded and never run: no image processor has to be there, and no sparse attention for a CPU."""
    from vllm.config import ModelConfig
    from vllm.platforms.cpu import CpuPlatform
    ModelConfig._supports_multimodal_inputs = lambda self: self.multimodal_config is not None
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def without_sparse(cls, selected_backend, attn_selector_config, num_heads=None):
        return choose(cls, selected_backend, attn_selector_config._replace(use_sparse=False), num_heads)

    CpuPlatform.get_attn_backend_cls = classmethod(without_sparse)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument("--only", nargs="*", help="families")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import vllm
    if vllm.__version__ != vllm_fp8.VLLM:
        parser.error(f"vLLM is {vllm.__version__}, the traces are of {vllm_fp8.VLLM}")
    if options.rank is not None:
        without_processors()
        for family in options.models:
            try:
                rows = vllm_fp8.load(*listing(family), options.rank, options.folder)
            except Exception:  # of one model; both ranks fail alike
                traceback.print_exc()
                continue
            (options.folder / f"{family}.json").write_text(json.dumps(rows))
        return 0
    families = sorted(path.name.removesuffix("-engine.json") for path in LISTINGS.glob("*-engine.json"))
    configs = {family: listing(family)[0] for family in families if not options.only or family in options.only}
    return vllm_fp8.update(vllm_fp8.traces(configs, __file__), configs, "-tp2", options.update)


if __name__ == "__main__":
    sys.exit(main())
