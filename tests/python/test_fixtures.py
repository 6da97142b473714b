"""Shards that real Megatron-core made, published rank by rank, arrive as Hugging Face has them."""

import json

import numpy as np
import pytest

from conftest import DATA, EngineRanks, Trainer, read_safetensors
from demo import oracle
from demo.checkpoint import hf_shapes
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


@pytest.mark.parametrize("kind,model,case,sizes", [("megatron", *c) for c in LOCAL] +
                         [("megatron-te", *c) for c in TRANSFORMER_ENGINE])
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


def test_an_engine_gets_what_vllms_own_loader_would_have_put_there(daemon, groups):
    """Replays the recorded copies of vLLM 0.32.0 at TP2 on a checkpoint and compares every byte."""
    trace = json.loads((DATA / "vllm-traces/qwen2-tp2.json").read_text())
    config = {**trace["config"], "head_dim": None}
    rng = np.random.Generator(np.random.SFC64(11))
    hf = {name: rng.integers(0, 1 << 16, shape, dtype=np.uint16) for name, shape in hf_shapes(config).items()}
    want = [replay(rank["copies"], hf) for rank in trace["ranks"]]
    shards = [{n: (TensorMeta(n, "BF16", a.shape), a) for n, a in oracle.megatron(config, hf, 2, 2, rank)}
              for rank in range(4)]
    groups.append(Trainer(daemon.agent_socket, config, "megatron:tp2,pp2", shards))
    shapes = oracle.vllm_shapes(config, 2)
    assert {n: a.size for n, a in want[0].items()} == {n: int(np.prod(s)) for n, s in shapes.items()}
    observed = [TensorMeta(n, "BF16", s) for n, s in shapes.items()]
    groups.append(EngineRanks(daemon.agent_socket, "engine", config, "vllm:tp2", [observed, observed]))
    groups[0].publish(1)
    groups[1].wait_version(1)
    for rank, expected in enumerate(want):
        for name, flat in expected.items():
            assert np.array_equal(groups[1].ranks[rank].params[name].ravel(), flat), (rank, name)


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
        for op, dim, start, length in c["ops"]:
            assert op == "narrow"
            source = np.take(source, range(start, start + length), axis=dim)
        strided(params[c["param"]], c)[...] = source
        strided(written[c["param"]], c)[...] += 1
    assert all((w == 1).all() for w in written.values())
    return params


def strided(flat: np.ndarray, copy: dict) -> np.ndarray:
    """The block of a flat parameter that a recorded copy writes."""
    return np.lib.stride_tricks.as_strided(flat[copy["offset"]:], copy["shape"],
                                           [s * flat.itemsize for s in copy["stride"]])
