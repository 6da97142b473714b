"""What vLLM's own loader makes of checkpoints: `python -m tests.engine.load_only OUT DIR...` writes to the file OUT, as JSON, for each
folder a digest of every parameter, or null of one that nothing was loaded into. Models are loaded and never run, so that formats can be compared for which this machine has no
kernel: where vLLM would choose one it gets a stand-in, and weights are not repacked for it."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pkgutil
import sys
import tempfile
from pathlib import Path
from unittest import mock


UNTOUCHED = 0xA5
_EXPERTS = {"select_mxfp4_moe_backend": "Mxfp4MoeBackend", "select_nvfp4_moe_backend": "NvFp4MoeBackend"}


def without_kernels() -> None:
    import vllm.model_executor.layers.quantization as quantization
    import vllm.model_executor.layers.quantization.compressed_tensors.schemes as schemes
    for package in (quantization, schemes):
        for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            try:
                found = importlib.import_module(module.name)
            except ImportError:
                continue  # it needs what a CPU has not
            for name in dir(found):
                if name.startswith("init_") and name.endswith("_linear_kernel"):
                    setattr(found, name, lambda *_, **__: mock.MagicMock())
                elif name in _EXPERTS:  # the backend that pads nothing
                    chosen = getattr(found, _EXPERTS[name]).EMULATION, mock.MagicMock()
                    setattr(found, name, lambda *_, _chosen=chosen, **__: _chosen)


def parameters(folder: Path) -> dict[str, str | None]:
    from safetensors.torch import load_file
    from torch.distributed import is_initialized
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import destroy_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    config = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                        max_model_len=32).create_engine_config()
    with set_current_vllm_config(config):
        if not is_initialized():
            store = tempfile.mkdtemp()
            init_distributed_environment(world_size=1, rank=0, backend="gloo", local_rank=0, distributed_init_method=f"file://{store}/store")
        destroy_model_parallel()
        initialize_model_parallel(1)  # of a model with experts there are more groups
        model = initialize_model(config)
        for parameter in model.parameters():
            _bytes(parameter).fill_(UNTOUCHED)
        model.load_weights(named for path in sorted(folder.glob("*.safetensors")) for named in load_file(path).items())
    return {name: _digest(_bytes(parameter).numpy().tobytes()) for name, parameter in model.named_parameters()}


def _digest(data: bytes) -> str | None:
    return None if set(data) == {UNTOUCHED} else hashlib.sha256(data).hexdigest()


def _bytes(parameter):
    import torch
    return parameter.data.reshape(-1).view(torch.uint8)


def main() -> None:
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    import torch
    torch.set_default_dtype(torch.bfloat16)
    without_kernels()
    out, *folders = sys.argv[1:]
    Path(out).write_text(json.dumps([parameters(Path(folder)) for folder in folders]))


if __name__ == "__main__":
    main()
