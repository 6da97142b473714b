#!/usr/bin/env python3
"""Writes tests/data/modelopt_checkpoints.json: what nvidia-modelopt's exporter stores of small models, for
tests/python/test_quantize_modelopt.py. In an environment of its own (torch 2.13.0, transformers 5.24.0 and nvidia-modelopt 0.47.0 wrote
the file; on a CPU, for on a GPU torch divides by a scale in bf16):
  pip install torch transformers nvidia-modelopt
  VENV/bin/python tests/golden/modelopt_checkpoint.py            # exit 1 when the file would change
  VENV/bin/python tests/golden/modelopt_checkpoint.py --update   # writes
"""

import copy
import json
import pathlib
import tempfile

import golden_file
from four_bit_checkpoint import LLAMA, SMALL, as_torch, entry, numbers

FILE = pathlib.Path(__file__).resolve().parents[1] / "data/modelopt_checkpoints.json"
REST = {"num_hidden_layers": 1, "vocab_size": 8, "tie_word_embeddings": False, "torch_dtype": "bfloat16"}
MODELS = {
    "llama": {**LLAMA, **SMALL, "architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], **REST, **SMALL, "num_experts": 3,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "deepseek_v3": {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **REST, "hidden_size": 64,
                    "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
                    "q_lora_rank": 32, "kv_lora_rank": 48, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
                    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "n_group": 1,
                    "topk_group": 1, "num_nextn_predict_layers": 0}}
#: Algorithm -> (modelopt's name of its configuration, whether the KV cache is in fp8, models)
ALGORITHMS = {"FP8": ("FP8_DEFAULT_CFG", True, ("llama", "qwen3_moe")),
              "FP8_PER_CHANNEL_PER_TOKEN": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", False, ("llama",)),
              "NVFP4": ("NVFP4_DEFAULT_CFG", True, ("llama", "qwen3_moe")),
              "W4A16_NVFP4": ("W4A16_NVFP4_CFG", False, ("llama", "qwen3_moe", "deepseek_v3"))}


def written(config: dict, folder: pathlib.Path) -> dict:
    """A checkpoint with numbers that only a stream of PCG64 decides, by name; the shapes of its tensors."""
    import safetensors.torch
    from transformers import AutoConfig, AutoModelForCausalLM
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder / "drawn")
    tensors = safetensors.torch.load_file(folder / "drawn/model.safetensors")
    # Each with a largest magnitude of its own, so that it can be told who has one in common.
    made = {name: as_torch(numbers(seed, tuple(tensors[name].shape), "BF16"), "BF16") * 2.0**-(seed % 5)
            for seed, name in enumerate(sorted(tensors))}
    safetensors.torch.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    return {name: list(tensor.shape) for name, tensor in sorted(tensors.items())}


def exported(config: dict, algorithm: str) -> dict:
    import modelopt.torch.quantization as mtq
    import safetensors.torch
    import torch
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.utils import update_quant_cfg_with_kv_cache_quant
    from transformers import AutoModelForCausalLM
    name, kv, _ = ALGORITHMS[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        source, target = pathlib.Path(folder) / "source", pathlib.Path(folder) / "target"
        shapes = written(config, source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        said = copy.deepcopy(getattr(mtq, name))
        if kv:
            said = update_quant_cfg_with_kv_cache_quant(said, mtq.FP8_KV_CFG["quant_cfg"])
        model = mtq.quantize(model, said, lambda one: one(torch.arange(8).reshape(1, 8)))
        # What calibration finds differs from CPU to CPU: it is what these numbers are copied from that is looked at.
        activations = [one for path, one in model.named_modules() if path.endswith(("input_quantizer", "_bmm_quantizer"))]
        for place, one in enumerate(activations):
            if getattr(one, "amax", None) is not None:
                one.amax = torch.tensor(1.0 + place / 7)
        export_hf_checkpoint(model, export_dir=target)
        tensors = safetensors.torch.load_file(target / "model.safetensors")
        tensors = {one: tensor for one, tensor in tensors.items() if ".mlp.gate." not in one}  # transformers has some of these in fp32
        kept = {one: tensor for one, tensor in tensors.items() if one.endswith((".input_scale", ".k_scale", ".v_scale"))}
        return {"sizes": config, "source": shapes,
                "quantization_config": json.loads((target / "config.json").read_text())["quantization_config"],
                "calibrated": {one: tensor.item() for one, tensor in sorted(kept.items())},
                "stored": {one: entry(tensor) for one, tensor in sorted(tensors.items())}}


def main():
    args = golden_file.parser(__doc__).parse_args()
    made = {f"{algorithm} {model}": exported(MODELS[model], algorithm)
            for algorithm, (_, _, models) in ALGORITHMS.items() for model in models}
    text = json.dumps(made, indent=1) + "\n"
    golden_file.settle(FILE, text, args.update, "modelopt")


if __name__ == "__main__":
    main()
