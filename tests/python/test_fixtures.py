"""Shards that real Megatron-core made, published rank by rank, arrive as Hugging Face has them."""

import json

import numpy as np
import pytest

from conftest import DATA, EngineRanks, Trainer, read_safetensors
from engine_oracle import engine_ranks
from weightwire import TensorMeta

# (model, folder, parallel spec)
LOCAL = [
    ("qwen2", "mcore-tp4", "tp4"),
    ("qwen2", "mcore-tp2pp2", "tp2,pp2"),
    ("qwen2", "mcore-pp2-first1", "pp2,first=1"),
    ("qwen2", "mcore-pp2vpp2", "pp2,vpp2"),
    ("qwen2_kv2", "mcore-tp4", "tp4"),
    ("qwen2_tied", "mcore-tp2pp2", "tp2,pp2"),
    ("qwen2_tied", "mcore-pp2vpp2", "pp2,vpp2"),
    ("qwen3", "mcore-tp2", "tp2"),
    ("deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2"),
    ("mixtral", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1"),
    ("qwen2_moe", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1"),
    ("qwen2_moe", "mcore-tp2ep2etp2-seq", "tp2,ep2,etp2,dp2"),
    ("qwen3_moe", "mcore-ep2-grouped", "ep2,dp2,experts=grouped"),
    ("qwen3_moe", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1"),
    ("qwen3_moe", "mcore-tp2ep2etp2-seq", "tp2,ep2,etp2,dp2"),
]
TRANSFORMER_ENGINE = [
    ("qwen2", "tp2pp2", "tp2,pp2"),
    ("qwen2", "tp1pp2vpp2", "pp2,vpp2,dp2"),
    ("qwen2_tied", "tp2pp2", "tp2,pp2"),
    ("qwen2_mqa", "tp4", "tp4"),
    ("qwen3", "tp2pp2", "tp2,pp2"),
    ("deepseek_v3", "tp2pp2ep2", "tp2,pp2,ep2,etp1"),
    ("deepseek_v3_mtp", "pp2ep2", "pp2,ep2,dp2,first=31"),
    ("mixtral", "tp2pp2ep2", "tp2,pp2,ep2,etp1"),
    ("qwen2_moe", "w8_tp4ep4etp2", "tp4,ep4,etp2,dp2"),
    ("qwen3_moe", "tp2ep2etp2", "tp2,ep2,etp2,dp2"),
]


def megatron_case(kind: str, model: str, case: str, sizes: str):
    base = DATA / kind / model
    config = json.loads((base / "hf/config.json").read_text())
    hf = read_safetensors(base / "hf/model.safetensors")
    folder = base / case
    if kind == "megatron":
        padded = json.loads((folder / "layout.json").read_text())["padded_vocab"]
        spec = f"megatron:{sizes},vocab_pad={padded}"
    else:
        padded = json.loads((folder / "rank00.json").read_text())["padded_vocab"] or "none"
        spec = f"megatron:{sizes},spec=te,vocab_pad={padded}"
    shards = [read_safetensors(path) for path in sorted(folder.glob("rank*.safetensors"))]
    return config, hf, spec, shards


every_dump = pytest.mark.parametrize("kind,model,case,sizes", [("megatron", *c) for c in LOCAL] +
                                     [("megatron-te", *c) for c in TRANSFORMER_ENGINE])


@every_dump
def test_real_megatron_shards_arrive_as_the_hugging_face_checkpoint(daemon, groups, kind, model, case,
                                                                         sizes):
    config, hf, spec, shards = megatron_case(kind, model, case, sizes)
    groups.append(Trainer(daemon.agent_socket, config, spec, shards))
    groups.append(EngineRanks(daemon.agent_socket, "hf", config, "hf", [[meta for meta, _ in hf.values()]]))
    groups[0].publish(1)
    groups[1].wait_version(1)
    got = groups[1].ranks[0].params
    assert got.keys() == hf.keys()
    for name, (_, want) in hf.items():
        assert np.array_equal(got[name].view(want.dtype), want), name


def by_newer_names(shard: dict) -> dict:
    """As megatron-core 0.17 and later name and keep them: MTP's inner layer, and with `mla_down_proj_fusion` both down
    projections in one matrix, which has the norm before them too."""
    out = {}
    for name, (meta, bits) in shard.items():
        if "linear_kv_down_proj" in name:
            continue
        if "linear_q_down_proj" in name:
            bits = np.concatenate([bits, shard[name.replace("linear_q_down", "linear_kv_down")][1]])
        new = name.replace("linear_q_down_proj", "linear_qkv_down_proj").replace("transformer_layer", "mtp_model_layer")
        if "input_layernorm" in new:
            new = new.replace("input_layernorm.weight", "self_attention.linear_qkv_down_proj.layer_norm_weight")
        out[new] = (TensorMeta(new, meta.dtype, bits.shape), bits)
    return out


@pytest.mark.parametrize("kind,model,case,sizes", [
    ("megatron-te", "deepseek_v3", "tp2pp2ep2", "tp2,pp2,ep2,etp1"),
    ("megatron-te", "deepseek_v3_mtp", "pp2ep2", "pp2,ep2,dp2,first=31"),
    ("megatron", "deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2")])
def test_shards_by_newer_megatrons_names_arrive_as_the_hugging_face_checkpoint(daemon, groups, kind, model, case, sizes):
    """From a Publisher that reports what a newer megatron-core has, with the scheme alone: no adapter renames anything."""
    config, hf, spec, shards = megatron_case(kind, model, case, sizes)
    shards = [by_newer_names(shard) for shard in shards]
    assert any("linear_qkv_down_proj.weight" in name for name in shards[0])
    groups.append(Trainer(daemon.agent_socket, config, spec, shards))
    groups.append(EngineRanks(daemon.agent_socket, "hf", config, "hf", [[meta for meta, _ in hf.values()]]))
    groups[0].publish(1)
    groups[1].wait_version(1)
    for name, (_, want) in hf.items():
        assert np.array_equal(groups[1].ranks[0].params[name].view(want.dtype), want), name


def engine_specs(config: dict) -> list[str]:
    """Engines of every kind that the model's sizes allow; vLLM's `ep` spreads over tp * dp ranks."""
    experts = next((config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config), 0)
    specs = ["vllm:tp2,pp2", "sglang:tp2,pp2"]
    if experts:
        specs += ["vllm:tp2,dp2,ep" if experts >= 4 else "vllm:tp2,ep", "vllm:tp2,dp2", "sglang:tp2,ep2"]
    if config["num_key_value_heads"] < 4:
        specs += ["vllm:tp4", "sglang:tp4"]
    return specs


@every_dump
def test_real_megatron_shards_arrive_as_the_engines_loaders_would_put_them(daemon, groups, kind, model, case, sizes):
    """One publish to several engines at once, against what loaders written from the facts make of the checkpoint."""
    config, hf, spec, shards = megatron_case(kind, model, case, sizes)
    groups.append(Trainer(daemon.agent_socket, config, spec, shards))
    wanted = {target: engine_ranks(config, hf, target) for target in engine_specs(config)}
    for target, ranks in wanted.items():
        observed = [[TensorMeta(name, p.dtype, p.bits.shape) for name, p in rank.items()] for rank in ranks]
        groups.append(EngineRanks(daemon.agent_socket, target.translate({58: 45, 44: 45}), config, target, observed))
    groups[0].publish(1)
    for (target, ranks), engine in zip(wanted.items(), groups[1:]):
        engine.wait_version(1)
        for rank, (params, subscriber) in enumerate(zip(ranks, engine.ranks)):
            for name, want in params.items():
                got = subscriber.params[name].view(want.bits.dtype)
                assert np.array_equal(got[want.filled], want.bits[want.filled]), (target, rank, name)


def vllm_case(name: str):
    """(config, checkpoint bits by name, rows by rank, parameters by rank as vLLM 0.32.0 filled them)."""
    trace = json.loads((DATA / f"vllm-traces/{name}.json").read_text())
    config = {**trace["config"]}
    if name.startswith("qwen2"):
        config["head_dim"] = None  # recorded by transformers 5, which writes it for every model
    ranks = [rank["copies"] for rank in trace["ranks"]]
    rng = np.random.Generator(np.random.SFC64(11))
    hf = {n: rng.integers(0, 1 << 16, shape, dtype=np.uint16) for n, shape in checkpoint_shapes(ranks).items()}
    return config, hf, ranks, [replay(copies, hf) for copies in ranks]


def checkpoint_shapes(ranks: list) -> dict[str, tuple]:
    """The shapes of the checkpoint's tensors, from what the ranks took of them together."""
    shapes: dict[str, list] = {}
    for copy in (copy for copies in ranks for copy in copies):
        narrow = next((op for op in copy["ops"] if op[0] == "narrow"), None)
        shape = list(copy["shape"])
        if narrow:
            shape[narrow[1]] = narrow[2] + narrow[3]
        known = shapes.setdefault(copy["src"], shape)
        shapes[copy["src"]] = [max(a, b) for a, b in zip(known, shape)]
    return {name: tuple(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["qwen2-tp2", "qwen3-moe-tp2"])
def test_an_engine_gets_what_vllms_own_loader_would_have_put_there(daemon, groups, name, traced):
    """Replays the recorded copies of vLLM 0.32.0 at TP2 on a checkpoint and compares every byte; the layout
    comes from the scheme, or from the trace itself, and both agree."""
    config, hf, ranks, want = vllm_case(name)
    whole = {n: (TensorMeta(n, "BF16", a.shape), a) for n, a in hf.items()}
    groups.append(Trainer(daemon.agent_socket, config, "hf", [whole]))
    observed = [[TensorMeta(n, "BF16", shape) for n, shape in stacked(config, params).items()] for params in want]
    groups.append(EngineRanks(daemon.agent_socket, "engine", config, "vllm:tp2", observed, ranks if traced else None))
    assert groups[1].notes == [[], []]
    groups[0].publish(1)
    groups[1].wait_version(1)
    for rank, expected in enumerate(want):
        for param, flat in expected.items():
            assert np.array_equal(groups[1].ranks[rank].params[param].ravel(), flat), (rank, param)


def test_a_trace_wins_over_the_scheme_and_says_where_they_disagree(daemon, groups):
    config, hf, ranks, want = vllm_case("qwen2-tp2")
    whole = {n: (TensorMeta(n, "BF16", a.shape), a) for n, a in hf.items()}
    groups.append(Trainer(daemon.agent_socket, config, "hf", [whole]))
    want.reverse()
    observed = [[TensorMeta(n, "BF16", flat.shape) for n, flat in params.items()] for params in want]
    groups.append(EngineRanks(daemon.agent_socket, "engine", config, "vllm:tp2", observed, ranks[::-1]))
    assert "model.layers.0.self_attn.q_proj.weight: the loader takes 32768 elements, the scheme 32768; 0 are the same" \
        in groups[1].notes[0]
    assert not any("layernorm" in line for line in groups[1].notes[0])
    groups[0].publish(1)
    groups[1].wait_version(1)
    for rank, expected in enumerate(want):
        for param, flat in expected.items():
            assert np.array_equal(groups[1].ranks[rank].params[param], flat), (rank, param)


def stacked(config: dict, params: dict) -> dict[str, tuple]:
    """The shapes of vLLM's parameters: matrices with the columns of what they were made from."""
    hidden, tp = config["hidden_size"], 2
    columns = {"o_proj": config["num_attention_heads"] * (config.get("head_dim") or hidden // config["num_attention_heads"]) // tp,
               "down_proj": config["intermediate_size"] // tp}
    shapes = {}
    for name, flat in params.items():
        experts = config.get("num_local_experts")
        if name.endswith("w13_weight"):
            shapes[name] = (experts, 2 * config["moe_intermediate_size"] // tp, hidden)
        elif name.endswith("w2_weight"):
            shapes[name] = (experts, hidden, config["moe_intermediate_size"] // tp)
        elif name.endswith("norm.weight") or name.endswith("bias"):
            shapes[name] = flat.shape
        else:
            width = next((c for part, c in columns.items() if part in name), hidden)
            shapes[name] = (flat.size // width, width)
    return shapes


def replay(copies: list, hf: dict) -> dict[str, np.ndarray]:
    """Parameters (flat) that the recorded copies fill; every element must be written once."""
    sizes_of: dict[str, int] = {}
    for c in copies:
        last = c["offset"] + sum((n - 1) * s for n, s in zip(c["shape"], c["stride"]))
        sizes_of[c["param"]] = max(sizes_of.get(c["param"], 0), last + 1)
    params = {name: np.zeros(size, np.uint16) for name, size in sizes_of.items()}
    written = {name: np.zeros(size, np.uint8) for name, size in sizes_of.items()}
    for c in copies:
        source = hf[c["src"]]
        for op, *arguments in c["ops"]:
            if op == "narrow":
                dim, start, length = arguments
                source = np.take(source, range(start, start + length), axis=dim)
            elif op == "unsqueeze":
                source = np.expand_dims(source, arguments[0])
            elif op == "__getitem__":  # after unbind, which takes dimension 0 apart
                source = source[arguments[0]]
            else:
                assert op == "unbind"
        strided(params[c["param"]], c)[...] = source
        strided(written[c["param"]], c)[...] += 1
    assert all((w == 1).all() for w in written.values())
    return params


def strided(flat: np.ndarray, copy: dict) -> np.ndarray:
    """The block of a flat parameter that a recorded copy writes."""
    return np.lib.stride_tricks.as_strided(flat[copy["offset"]:], copy["shape"],
                                           [s * flat.itemsize for s in copy["stride"]])
