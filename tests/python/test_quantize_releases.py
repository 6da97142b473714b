"""wwctl plan with the quantization_config of released models, of their real sizes: names, dtypes and shapes of what the engine's
loader reads are compared with a list that follows from the modules of transformers' model and the rules of the format; what is not
described is refused by its name."""

import json
import math
import re
import subprocess

import pytest

from conftest import BINARIES, DATA

#: name -> sizes (a config of tests/data/configs, or what config.json says) and quantization_config as the release has it.
RELEASES = json.loads((DATA / "quantized_releases.json").read_text())
BYTES = {"BF16": 2, "F32": 4, "U8": 1, "I32": 4, "I64": 8, "F8_E4M3": 1}


def config_of(release: str) -> dict:
    said = RELEASES[release]
    sizes = said["sizes"]
    if isinstance(sizes, str):
        sizes = json.loads((DATA / f"configs/{sizes}.json").read_text())
    return {**sizes, "quantization_config": said["quantization_config"]}


@pytest.fixture
def planner(tmp_path):
    def run(release: str, *arguments: str) -> subprocess.CompletedProcess:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config_of(release)))
        command = ["layout", "show"] if arguments[0] == "--spec" else ["plan"]
        return subprocess.run([BINARIES / "wwctl", *command, "--config", path, *arguments], capture_output=True, text=True, timeout=120)
    return run


# Modules: what transformers calls Linear is a pair of sizes, all else a tuple of another kind with its dtype.

def mlp(prefix: str, hidden: int, inner: int) -> dict:
    return {f"{prefix}.gate_proj": (inner, hidden), f"{prefix}.up_proj": (inner, hidden), f"{prefix}.down_proj": (hidden, inner)}


def other(name: str, *shape: int, dtype: str = "BF16") -> dict:
    return {name: (dtype, shape)}


def deepseek(config: dict) -> tuple[dict, dict]:
    """DeepseekV3ForCausalLM, with the MTP layers as the release stores them."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    experts, layers, q, kv = config["n_routed_experts"], config["num_hidden_layers"], config["q_lora_rank"], config["kv_lora_rank"]
    linear, rest = {}, {}
    rest |= other("model.embed_tokens.weight", config["vocab_size"], hidden) | other("lm_head.weight", config["vocab_size"], hidden)
    rest |= other("model.norm.weight", hidden)
    for layer in range(layers + config["num_nextn_predict_layers"]):
        at = f"model.layers.{layer}"
        linear |= {f"{at}.self_attn.q_a_proj": (q, hidden), f"{at}.self_attn.q_b_proj": (heads * (nope + rope), q),
                   f"{at}.self_attn.kv_a_proj_with_mqa": (kv + rope, hidden), f"{at}.self_attn.kv_b_proj": (heads * (nope + value), kv),
                   f"{at}.self_attn.o_proj": (hidden, heads * value)}
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden), ("self_attn.q_a_layernorm", q),
                           ("self_attn.kv_a_layernorm", kv)):
            rest |= other(f"{at}.{norm}.weight", size)
        if layer < config["first_k_dense_replace"]:
            linear |= mlp(f"{at}.mlp", hidden, config["intermediate_size"])
        else:
            linear |= mlp(f"{at}.mlp.shared_experts", hidden, config["n_shared_experts"] * config["moe_intermediate_size"])
            for expert in range(experts):
                linear |= mlp(f"{at}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
            rest |= other(f"{at}.mlp.gate.weight", experts, hidden)  # a parameter of the router, no Linear
            rest |= other(f"{at}.mlp.gate.e_score_correction_bias", experts, dtype="F32")
        if layer >= layers:
            rest |= other(f"{at}.embed_tokens.weight", config["vocab_size"], hidden)
            rest |= other(f"{at}.shared_head.head.weight", config["vocab_size"], hidden)
            rest |= other(f"{at}.eh_proj.weight", hidden, 2 * hidden)
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                rest |= other(f"{at}.{norm}.weight", hidden)
    return linear, rest


def qwen(config: dict) -> tuple[dict, dict]:
    """Qwen2ForCausalLM and Qwen3MoeForCausalLM, whose router is a Linear, as the head is."""
    hidden, heads, kv = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    moe = config["model_type"] == "qwen3_moe"
    size = config["head_dim"] if moe else hidden // heads
    linear = {"lm_head": (config["vocab_size"], hidden)}
    rest = other("model.embed_tokens.weight", config["vocab_size"], hidden) | other("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for part, rows in (("q", heads * size), ("k", kv * size), ("v", kv * size)):
            linear[f"{at}.self_attn.{part}_proj"] = rows, hidden
            if not moe:
                rest |= other(f"{at}.self_attn.{part}_proj.bias", rows)
        linear[f"{at}.self_attn.o_proj"] = hidden, heads * size
        for norm in ("input_layernorm", "post_attention_layernorm"):
            rest |= other(f"{at}.{norm}.weight", hidden)
        if not moe:
            linear |= mlp(f"{at}.mlp", hidden, config["intermediate_size"])
            continue
        rest |= other(f"{at}.self_attn.q_norm.weight", size) | other(f"{at}.self_attn.k_norm.weight", size)
        linear[f"{at}.mlp.gate"] = config["num_experts"], hidden
        for expert in range(config["num_experts"]):
            linear |= mlp(f"{at}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
    return linear, rest


def gpt_oss(config: dict) -> dict:
    """What the release stores: of transformers' GptOssForCausalLM all but the two tensors with the experts' weights."""
    hidden, inner, experts, size = config["hidden_size"], config["intermediate_size"], config["num_local_experts"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    stored = other("model.embed_tokens.weight", config["vocab_size"], hidden) | other("lm_head.weight", config["vocab_size"], hidden)
    stored |= other("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for part, rows, columns in (("self_attn.q_proj", heads * size, hidden), ("self_attn.k_proj", kv * size, hidden),
                                    ("self_attn.v_proj", kv * size, hidden), ("self_attn.o_proj", hidden, heads * size),
                                    ("mlp.router", experts, hidden)):
            stored |= other(f"{at}.{part}.weight", rows, columns) | other(f"{at}.{part}.bias", rows)
        stored |= other(f"{at}.self_attn.sinks", heads)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            stored |= other(f"{at}.{norm}.weight", hidden)
        for part, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
            name = f"{at}.mlp.experts.{part}"
            stored |= other(f"{name}_blocks", experts, rows, columns // 32, 16, dtype="U8")
            stored |= other(f"{name}_scales", experts, rows, columns // 32, dtype="U8") | other(f"{name}_bias", experts, rows)
    return stored


def nemotron(config: dict) -> tuple[dict, dict]:
    """NemotronHForCausalLM of the release's own code, whose router is a parameter, as is all of Mamba's but its two projections."""
    hidden, experts, latent = config["hidden_size"], config["n_routed_experts"], config["moe_latent_size"]
    heads, kv, size = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    inner, state = config["mamba_num_heads"] * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    linear = {"lm_head": (config["vocab_size"], hidden)}
    rest = other("backbone.embeddings.weight", config["vocab_size"], hidden) | other("backbone.norm_f.weight", hidden)
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        at = f"backbone.layers.{layer}"
        rest |= other(f"{at}.norm.weight", hidden)
        if kind == "M":
            linear |= {f"{at}.mixer.in_proj": (2 * inner + 2 * state + config["mamba_num_heads"], hidden), f"{at}.mixer.out_proj": (hidden, inner)}
            rest |= other(f"{at}.mixer.conv1d.weight", inner + 2 * state, 1, config["conv_kernel"])
            rest |= other(f"{at}.mixer.conv1d.bias", inner + 2 * state) | other(f"{at}.mixer.norm.weight", inner)
            for name in ("A_log", "D", "dt_bias"):
                rest |= other(f"{at}.mixer.{name}", config["mamba_num_heads"])
        elif kind == "*":
            linear |= {f"{at}.mixer.q_proj": (heads * size, hidden), f"{at}.mixer.k_proj": (kv * size, hidden),
                       f"{at}.mixer.v_proj": (kv * size, hidden), f"{at}.mixer.o_proj": (hidden, heads * size)}
        else:
            shared = config["moe_shared_expert_intermediate_size"]
            linear |= {f"{at}.mixer.fc1_latent_proj": (latent, hidden), f"{at}.mixer.fc2_latent_proj": (hidden, latent),
                       f"{at}.mixer.shared_experts.up_proj": (shared, hidden), f"{at}.mixer.shared_experts.down_proj": (hidden, shared)}
            for expert in range(experts):
                linear |= {f"{at}.mixer.experts.{expert}.up_proj": (config["moe_intermediate_size"], latent),
                           f"{at}.mixer.experts.{expert}.down_proj": (latent, config["moe_intermediate_size"])}
            rest |= other(f"{at}.mixer.gate.weight", experts, hidden)
            rest |= other(f"{at}.mixer.gate.e_score_correction_bias", experts, dtype="F32")
    return linear, rest


# What each format stores of a Linear, as vLLM's loaders and compressed-tensors name and shape it.

def blocks(name: str, rows: int, columns: int) -> dict:
    return other(f"{name}.weight", rows, columns, dtype="F8_E4M3") | other(
        f"{name}.weight_scale_inv", math.ceil(rows / 128), math.ceil(columns / 128), dtype="F32")


def channels(name: str, rows: int, columns: int) -> dict:
    return other(f"{name}.weight", rows, columns, dtype="F8_E4M3") | other(f"{name}.weight_scale", rows, 1)


def int4(name: str, rows: int, columns: int) -> dict:
    return (other(f"{name}.weight_packed", rows, columns // 8, dtype="I32") | other(f"{name}.weight_scale", rows, columns // 32)
            | other(f"{name}.weight_shape", 2, dtype="I64"))


def static(name: str, rows: int, columns: int) -> dict:
    return (other(f"{name}.weight", rows, columns, dtype="F8_E4M3") | other(f"{name}.weight_scale", 1) | other(f"{name}.input_scale", 1))


def modelopt(name: str, rows: int, columns: int) -> dict:
    return (other(f"{name}.weight", rows, columns, dtype="F8_E4M3") | other(f"{name}.weight_scale", dtype="F32")
            | other(f"{name}.input_scale", dtype="F32"))


def nvfp4(name: str, rows: int, columns: int) -> dict:
    return (other(f"{name}.weight", rows, columns // 2, dtype="U8") | other(f"{name}.weight_scale", rows, columns // 16, dtype="F8_E4M3")
            | other(f"{name}.weight_scale_2", dtype="F32") | other(f"{name}.input_scale", dtype="F32"))


def kept(module: str, ignore: list[str]) -> bool:
    """compressed-tensors matches from the beginning of a name; the lists of fp8 here are whole names."""
    return any(re.match(entry[3:], module) if entry.startswith("re:") else entry == module for entry in ignore)


def wanted_of(release: str) -> dict:
    config = config_of(release)
    if release.startswith("gpt-oss"):
        return gpt_oss(config)
    method = config["quantization_config"]
    family = {"deepseek_v3": deepseek, "kimi_k2": deepseek, "nemotron_h": nemotron}.get(config["model_type"], qwen)
    linear, rest = family(config)
    ignore = method.get("ignore") or method.get("modules_to_not_convert") or []
    make = (nvfp4 if method.get("quant_algo") == "NVFP4" else modelopt if method["quant_method"] == "modelopt" else
            blocks if method["quant_method"] == "fp8" else int4 if method["format"] == "pack-quantized" else
            channels if method["config_groups"]["group_0"]["input_activations"]["dynamic"] else static)
    if method.get("kv_cache_scheme"):
        for module in [module for module in linear if module.endswith(("k_proj", "v_proj"))]:
            owner, scale = module.rpartition(".")[0], f"{module[-6]}_scale"
            rest |= other(f"{module}.{scale}", dtype="F32") if method["quant_method"] == "modelopt" else other(f"{owner}.{scale}", 1)
    for module, sizes in linear.items():
        rest |= other(f"{module}.weight", *sizes) if kept(module, ignore) else make(module, *sizes)
    return rest


@pytest.mark.parametrize("release", RELEASES)
def test_an_engines_loader_is_given_what_the_release_stores(planner, release):
    shown = planner(release, "--spec", "hf", "--rank", "0", "--json")
    assert shown.returncode == 0, shown.stderr
    layout = json.loads(shown.stdout)
    assert not layout["notes"]  # every entry of the release's list fits a module
    got = {tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in layout["tensors"]}
    wanted = wanted_of(release)
    assert got.keys() == wanted.keys()
    assert [(name, got[name], said) for name, said in wanted.items() if got[name] != said] == []
    planned = planner(release, "--from", "hf", "--to", "hf", "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    size = sum(math.prod(shape) * BYTES[dtype] for dtype, shape in wanted.values())
    assert plan["proof"] == "exact" and plan["bytes_total"] == size
    if release == "gpt-oss-20b":  # what its model.safetensors.index.json says
        assert (size, len(wanted)) == (13_761_264_768, 459)


@pytest.mark.parametrize("release, source, target", [
    ("DeepSeek-V3.1", "megatron:tp8,ep8,etp1", "vllm:tp8,ep"), ("DeepSeek-V3.1", "megatron:tp8,ep8,etp1", "sglang:tp8,ep8"),
    ("Kimi-K2-Thinking", "megatron:tp8,ep8,etp1", "hf:skip=*.weight_shape"), ("Qwen3-30B-A3B-FP8", "megatron:tp4,ep4,etp1", "vllm:tp2"),
    ("Qwen3-30B-A3B-FP8", "megatron:tp4,ep4,etp1", "hf"), ("Qwen2.5-7B-Instruct-FP8-dynamic", "megatron:tp2", "hf")])
def test_shards_of_a_trainer_are_quantized_on_the_way(planner, release, source, target):
    planned = planner(release, "--from", source, "--to", target, "--json")
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    assert plan["proof"] == "exact"
    if target.startswith("hf") and "tp2" not in source:  # rows of whole channels lie on several ranks, and are gathered
        size = sum(math.prod(shape) * BYTES[dtype] for name, (dtype, shape) in wanted_of(release).items()
                   if not name.endswith(".weight_shape"))
        assert plan["bytes_total"] == size


OWN_LOADER = ("give the engine's own loader the tensors of a checkpoint (hf)",)


@pytest.mark.parametrize("release, source, target, words", [
    ("Kimi-K2-Thinking", "megatron:tp8,ep8,etp1", "hf",
     ("model.layers.1.mlp.experts.0.down_proj.weight_shape", "not sent", "hf:skip=*.weight_shape")),
    ("Kimi-K2-Thinking", "hf", "vllm:tp8,ep", ("int4-32-compressed-tensors", *OWN_LOADER)),
    ("gpt-oss-20b", "megatron:tp1", "hf",
     ("model.layers.0.mlp.experts.down_proj_blocks", "not made on the way", "wwctl convert --quantize mxfp4-gpt-oss")),
    ("gpt-oss-20b", "hf", "vllm:tp1", ("mxfp4-gpt-oss", *OWN_LOADER)),
    ("Qwen2.5-7B-Instruct-FP8-dynamic", "megatron:tp2", "vllm:tp2", ("fp8-channel", *OWN_LOADER)),
    ("Qwen3-30B-A3B-FP8", "megatron:tp4,ep4,etp1", "vllm:tp4",
     ("model.layers.0.mlp.experts.0.gate_proj.weight", "rows 0 to 192", "leave multiples of 128")),
    ("NVIDIA-Nemotron-NVFP4", "megatron:tp1", "hf:skip=*.input_scale|*.k_scale|*.v_scale",
     ("mixer", "one global scale of a whole tensor", "wwctl convert --quantize")),
    ("Qwen2.5-7B-Instruct-FP8-static", "megatron:tp2", "hf",
     ("model.layers.0.mlp.down_proj.input_scale", "calibration", "hf:skip=*.input_scale|*.k_scale|*.v_scale;")),
    ("Qwen2.5-7B-Instruct-FP8-modelopt", "megatron:tp2", "hf",
     ("model.layers.0.mlp.down_proj.input_scale", "calibration", "hf:skip=*.input_scale|*.k_scale|*.v_scale;"))])
def test_what_is_not_described_is_refused_by_its_name(planner, release, source, target, words):
    refused = planner(release, "--from", source, "--to", target)
    assert refused.returncode >= 64 and refused.stdout == ""
    assert all(word in refused.stderr for word in words), refused.stderr
