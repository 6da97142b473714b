"""Real Megatron shards in bf16 reach engines whose weights are fp8: quantized on the way, as if the whole checkpoint had
been quantized and an engine's loader had cut it."""

import numpy as np
import pytest

from conftest import BINARIES, EngineRanks, Trainer
from content_oracle import root
from demo.fleet import Daemon
from quantize_oracle import Quantized
from test_fixtures import megatron_case
from weightwire import Client, TensorMeta

# (model, folder, parallel spec, block, left out, engines)
CASES = [
    ("qwen3", "mcore-tp2", "tp2", (8, 16), [], ["vllm:tp1", "vllm:tp2", "sglang:tp2"]),
    ("qwen2", "mcore-pp2-first1", "pp2,first=1", (8, 24), [], ["vllm:tp1", "sglang:tp1"]),  # blocks that end early
    ("qwen3_moe", "mcore-ep2-grouped", "ep2,dp2,experts=grouped", (8, 8), ["mlp.gate"], ["vllm:tp2,ep", "sglang:tp2,ep2"]),
    ("qwen2_moe", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1", (8, 8), ["mlp.gate", "mlp.shared_expert_gate"], ["vllm:tp2"]),
    ("mixtral", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1", (8, 8), ["block_sparse_moe.gate"], ["vllm:tp2", "sglang:tp2"]),
    ("deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2", (4, 8), [], ["vllm:tp2", "sglang:tp2,ep2"]),
]


class Case:
    def __init__(self, model: str, folder: str, sizes: str, block, skipped: list[str], engines: list[str]):
        self.config, self.plain, self.spec, self.shards = megatron_case("megatron", model, folder, sizes)
        self.quantized = Quantized(self.plain, block, [f"*.{name}.weight" for name in skipped])
        method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
                  "modules_to_not_convert": ["lm_head", *skipped]}
        self.fp8_config = {**self.config, "quantization_config": method}
        self.engines = {spec: self.quantized.engine(self.config, spec) for spec in engines}

    def run(self, groups: list, trainer_agent: str, engine_agent: str) -> None:
        groups.append(Trainer(trainer_agent, self.config, self.spec, self.shards))
        for spec, ranks in self.engines.items():
            observed = [[TensorMeta(name, dtype, bits.shape) for name, (dtype, bits, _) in rank.items()] for rank in ranks]
            groups.append(EngineRanks(engine_agent, spec.replace(":", "-").replace(",", "-"), self.fp8_config, spec, observed))
        groups[0].publish(1)
        for engine in groups[1:]:
            engine.wait_version(1)
        self.compare(groups)

    def compare(self, groups: list) -> None:
        for (spec, ranks), engine in zip(self.engines.items(), groups[1:]):
            for rank, (wanted, subscriber) in enumerate(zip(ranks, engine.ranks)):
                assert subscriber.params.keys() == wanted.keys(), (spec, rank)
                for name, (_, bits, filled) in wanted.items():
                    got = subscriber.params[name].view(bits.dtype)
                    assert np.array_equal(got[filled], bits[filled]), (spec, rank, name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_bf16_shards_arrive_as_the_quantized_checkpoint(daemon, groups, case):
    made = Case(*case)
    made.run(groups, daemon.agent_socket, daemon.agent_socket)
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    result = client.verify()
    assert result.equal and not result.differences
    assert {engine.root for engine in result.engines} == {root(made.quantized.hf)}


@pytest.mark.parametrize("transports", ["[tcp]", "[shm]"])
def test_agents_apart_move_what_was_quantized(tmp_path, groups, transports):
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                 transports=transports)
    rollout = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "rollout"), "rollout", role="agent",
                     coordinator=hub.grpc, transports=transports)
    Case(*CASES[0]).run(groups, hub.agent_socket, rollout.agent_socket)
    for group in reversed(groups):
        group.close()
    groups.clear()
    assert rollout.stop() == 0 and hub.stop() == 0


def test_bf16_and_fp8_engines_are_fed_together_and_told_apart(daemon, groups):
    """What they hold has different classes: neither is called wrong because of the other."""
    case = Case("qwen3", "mcore-tp2", "tp2", (8, 16), [], ["vllm:tp2", "sglang:tp1"])
    observed = [[meta for meta, _ in case.plain.values()]]
    groups.append(EngineRanks(daemon.agent_socket, "plain", case.config, "hf", observed))
    plain = groups.pop()
    case.run(groups, daemon.agent_socket, daemon.agent_socket)
    groups.append(plain)
    plain.wait_version(1)
    for name, (_, bits) in case.plain.items():
        assert np.array_equal(plain.ranks[0].params[name].view(bits.dtype), bits), name
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    result = client.verify()
    assert result.equal and not result.differences
    assert {e.name: e.root for e in result.engines} == {"plain": root(case.plain), "vllm-tp2": root(case.quantized.hf),
                                                        "sglang-tp1": root(case.quantized.hf)}
    # The next version: the trainer's changes arrive quantized again.
    for rank, params in enumerate(groups[0].params):
        for name, (_, bits) in case.shards[rank].items():
            params[name].view(bits.dtype)[...] = bits ^ bits.dtype.type(0x8000)
    changed = {name: (meta, bits ^ bits.dtype.type(0x8000)) for name, (meta, bits) in case.plain.items()}
    case.quantized = Quantized(changed, (8, 16), [])
    case.engines = {spec: case.quantized.engine(case.config, spec) for spec in case.engines}
    groups[0].publish(2)
    for engine in groups[1:]:
        engine.wait_version(2)
    case.compare(groups[:-1])


def test_blocks_on_two_trainer_ranks_are_quantized_where_they_arrive(daemon, groups):
    Case("qwen3", "mcore-tp2", "tp2", (8, 128), [], ["vllm:tp1", "sglang:tp1"]).run(  # down_proj: 48 columns on each rank
        groups, daemon.agent_socket, daemon.agent_socket)
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    assert client.verify().equal


def fsdp_shards(checkpoint: dict, ranks: int) -> list[dict]:
    """Rows as torch.chunk cuts them."""
    shards: list[dict] = [{} for _ in range(ranks)]
    for name, (meta, bits) in checkpoint.items():
        step = -(-len(bits) // ranks)
        for rank, shard in enumerate(shards):
            part = np.ascontiguousarray(bits[rank * step:(rank + 1) * step])
            shard[name] = TensorMeta(name, meta.dtype, part.shape), part
    return shards


def as_float32(checkpoint: dict, random) -> dict:
    """The same weights, with digits that BF16 has not."""
    return {name: (TensorMeta(name, "F32", meta.shape), (bits.astype(np.uint32) << 16) | random.integers(
        1 << 16, size=bits.shape, dtype=np.uint32)) for name, (meta, bits) in checkpoint.items()}


@pytest.mark.parametrize("transports, dtype, spec", [("[shm]", "BF16", "vllm:tp2"), ("[tcp]", "F32", "vllm:tp2"),
                                                     ("[tcp]", "BF16", "vllm:tp1"), ("[shm]", "F32", "vllm:tp1")])
def test_rows_of_fsdp_that_cut_blocks_reach_a_chain_of_engines(tmp_path, groups, transports, dtype, spec):
    """Three engines, each of which reads from the one before it what that gathered; then versions of which little changed,
    and nothing."""
    random = np.random.default_rng(7)
    config, plain, _, _ = megatron_case("megatron", "qwen3", "mcore-tp2", "tp2")
    block = (8, 16)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
              "modules_to_not_convert": ["lm_head"]}
    weights = as_float32(plain, random) if dtype == "F32" else {name: (m, b.copy()) for name, (m, b) in plain.items()}
    small = {"slot_bytes": 64 << 10, "segment_bytes_max": 8 << 10, "chunk_bytes": 16 << 10}
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                 transports=transports, fanout="chain", **small)
    rollout = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "rollout"), "rollout", role="agent",
                     coordinator=hub.grpc, transports=transports, **small)
    groups.append(Trainer(hub.agent_socket, config, "fsdp:dp3", fsdp_shards(weights, 3)))
    for name in ("a", "b", "c"):
        ranks = Quantized(weights, block, []).engine(config, spec)
        observed = [[TensorMeta(t, dt, bits.shape) for t, (dt, bits, _) in rank.items()] for rank in ranks]
        groups.append(EngineRanks(rollout.agent_socket, name, {**config, "quantization_config": method}, spec, observed))
    for version in (1, 2, 3):
        if version == 2:  # signs of a few rows of every matrix, so that their blocks change
            for _, bits in weights.values():
                if bits.ndim == 2:
                    bits[20:24] ^= bits.dtype.type(1 << (8 * bits.itemsize - 1))
                    bits[20:24, :3] = 0
            groups[0].fill(fsdp_shards(weights, 3))
        quantized = Quantized(weights, block, [])
        groups[0].publish(version)
        for engine in groups[1:]:
            engine.wait_version(version)
            for rank, (wanted, subscriber) in enumerate(zip(quantized.engine(config, spec), engine.ranks)):
                for name, (_, bits, filled) in wanted.items():
                    got = subscriber.params[name].view(bits.dtype)
                    assert np.array_equal(got[filled], bits[filled]), (version, rank, name)
    client = Client(hub.grpc)
    client.wait_version(3, timeout=30)
    result = client.verify()
    assert result.equal and {engine.root for engine in result.engines} == {root(quantized.hf)}
    for group in reversed(groups):
        group.close()
    groups.clear()
    assert rollout.stop() == 0 and hub.stop() == 0
