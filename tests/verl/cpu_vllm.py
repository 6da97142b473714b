"""Loaded by verl (VERL_USE_EXTERNAL_MODULES) in vLLM's workers: keeps vLLM's weights where verl's loader writes them. On a CPU vLLM packs a
linear layer's weight into a kernel's handle and empties the parameter; plain torch stands in for these kernels. For tests only."""

import sys

if "vllm" in sys.modules:
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False
