#!/usr/bin/env python3
"""Writes tests/data/vllm-traces/<model>-tp2.json: what vLLM 0.32.0's own loader does with linear attention and Mamba.

As vllm_fp8.py does, with every element a number of its own; names and shapes of the checkpoints are those that
transformers saves. What the loader computes (Mamba's A = -exp(A_log)) has no row. It needs vllm_fp8.py's environment
and torchvision, which vLLM's module of Qwen3.5 imports.
  VENV/bin/python tests/golden/vllm_linear.py            # exit 1 when a file would change
  VENV/bin/python tests/golden/vllm_linear.py --update   # writes
"""

import sys
from types import SimpleNamespace

import numbered
import vllm_fp8
from linear_models import MODELS, checkpoint


def load(config, rank, folder):
    """The rows of one rank. For experts without a gate the CPU has no kernel, which loading does not need: a GPU's it is."""
    import vllm.model_executor.layers.fused_moe.config as experts
    import vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method as method
    experts.current_platform = SimpleNamespace(is_cuda_alike=lambda: True, is_xpu=lambda: False)
    choose = method.select_unquantized_moe_backend
    method.select_unquantized_moe_backend = lambda moe_config: (
        choose(moe_config) if moe_config.is_act_and_mul else (method.UnquantizedMoeBackend.TRITON, None))
    return vllm_fp8.load(config, checkpoint(config), rank, folder)


def engine():
    """What loads, where it is the version that the traces are of."""
    import vllm
    return f"vllm {vllm_fp8.VLLM} cpu" if vllm.__version__ == vllm_fp8.VLLM else None


if __name__ == "__main__":
    sys.exit(numbered.main(MODELS, load, __file__, __doc__, "vllm-traces", engine()))
