"""Files that libraries write which are not in vLLM's environment: `PYTHONPATH=LIBRARIES python -m tests.engine.library_files FORMAT FOLDER
OUT...` writes each checkpoint FOLDER to OUT as nvidia-modelopt's exporter does, or, of gpt-oss, with the codes of torchao in the places
from which transformers reads the same numbers back."""

from __future__ import annotations

import copy
import json
import shutil
import sys
from pathlib import Path

#: format -> modelopt's name of its configuration
MODELOPT = {"fp8-modelopt": "FP8_DEFAULT_CFG", "fp8-channel-modelopt": "FP8_PER_CHANNEL_PER_TOKEN_CFG", "nvfp4-modelopt": "NVFP4_DEFAULT_CFG",
            "nvfp4-w4a16-modelopt": "W4A16_NVFP4_CFG", "mxfp8-modelopt": "MXFP8_DEFAULT_CFG"}
#: Of these the KV cache is calibrated too.
WITH_KV = ("fp8-modelopt", "nvfp4-modelopt")


def modelopt(folder: Path, out: Path, format: str) -> None:
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    said = copy.deepcopy(getattr(mtq, MODELOPT[format]))
    if format in WITH_KV:
        said = update_quant_cfg_with_kv_cache_quant(said, mtq.FP8_KV_CFG["quant_cfg"])
    model = mtq.quantize(model, said, lambda one: one(torch.arange(256).reshape(4, 64)))
    export_hf_checkpoint(model, export_dir=out)


def gpt_oss(folder: Path, out: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    stored = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            stored[name] = tensor
            continue
        values = tensor.transpose(1, 2).contiguous()
        scales, codes = to_mx(values, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL)
        blocks = codes.view(torch.uint8).reshape(*values.shape[:2], -1, 16)
        exponents = scales.view(torch.uint8).reshape(blocks.shape[:3])
        numbers = to_dtype(codes, scales, torch.float4_e2m1fn_x2, 32, torch.bfloat16)
        assert torch.equal(convert_moe_packed_tensors(blocks, exponents), numbers.transpose(1, 2)), name
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
    out.mkdir()
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (out / "config.json").write_text(json.dumps(config))


def main() -> None:
    said = sys.argv[1:]
    for format, folder, out in zip(said[::3], map(Path, said[1::3]), map(Path, said[2::3])):
        gpt_oss(folder, out) if format == "mxfp4-gpt-oss" else modelopt(folder, out, format)
        for path in folder.iterdir():
            if not (out / path.name).exists() and path.suffix != ".safetensors":
                shutil.copy(path, out)


if __name__ == "__main__":
    main()
