"""Real shards in bf16 reach engines whose weights have four bits, packed: made on the way, as the libraries would have stored them."""

import numpy as np
import pytest

import four_bit_oracle
from conftest import EngineRanks, Trainer
from content_oracle import root
from test_fixtures import megatron_case
from weightwire import Client, NotReadyError, TensorMeta

#: What the oracle calls them, and what a config.json says of their weights.
KINDS = {"mxfp4": ("kMxFp4Rounded", "mxfp4-pack-quantized", {"type": "float", "strategy": "group", "scale_dtype": "torch.uint8"}),
         "int4": ("kInt4", "pack-quantized", {"type": "int", "strategy": "group"}),
         "nvfp4": ("kNvFp4", "nvfp4-pack-quantized", {"type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"})}
CASES = [("qwen3", "mcore-tp2", "tp2", "mxfp4", 32), ("qwen3", "mcore-tp2", "tp2", "int4", 32), ("qwen2", "mcore-pp2-first1", "pp2,first=1", "int4", 8),
         ("qwen3_moe", "mcore-ep2-grouped", "ep2,dp2,experts=grouped", "int4", 16),
         ("mixtral", "mcore-tp2ep2etp1-seq", "tp2,ep2,etp1", "int4", 16),
         ("deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2", "int4", 8)]
KEPT = ("lm_head", "re:.*mlp[.]gate$", "re:.*block_sparse_moe[.]gate$")
#: The shape of a weight never changes; an engine that reads it has it already.
SPEC = {"int4": "hf:skip=*.weight_shape"}
DTYPES = {"U8": np.uint8, "I32": np.uint32, "BF16": np.uint16}


def config_of(config: dict, kind: str, group: int) -> dict:
    _, format, weights = KINDS[kind]
    weights = {"num_bits": 4, "group_size": group, "symmetric": True, "dynamic": False, **weights}
    return {**config, "quantization_config": {"quant_method": "compressed-tensors", "format": format, "ignore": list(KEPT),
                                              "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}}


def wanted_of(plain: dict, kind: str, group: int) -> dict:
    """name -> (dtype, shape, bytes)"""
    made = {}
    for name, (meta, bits) in plain.items():
        linear = len(meta.shape) == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight",
                                                             "block_sparse_moe.gate.weight", "norm.weight"))
        made |= four_bit_oracle.stored(name, plain, KINDS[kind][0], group) if linear else {
            name: (meta.dtype, tuple(meta.shape), np.ascontiguousarray(bits).tobytes())}
    return made


def moved(stored: dict) -> dict:
    return {name: said for name, said in stored.items() if not name.endswith("weight_shape")}


def changed(plain: dict) -> dict:
    return {name: (meta, bits ^ bits.dtype.type(0x8000)) for name, (meta, bits) in plain.items()}


@pytest.mark.parametrize("model, folder, sizes, kind, group", CASES)
def test_shards_arrive_packed_as_the_library_stores_them(daemon, groups, model, folder, sizes, kind, group):
    config, plain, spec, shards = megatron_case("megatron", model, folder, sizes)
    groups.append(Trainer(daemon.agent_socket, config, spec, shards))
    stored = wanted_of(plain, kind, group)
    observed = [[TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in stored.items()]]
    wanted = moved(stored)
    groups.append(EngineRanks(daemon.agent_socket, "packed", config_of(config, kind, group), SPEC.get(kind, "hf"), observed))
    groups[0].publish(1)
    groups[1].wait_version(1)
    compare(groups[1], wanted)
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    result = client.verify()
    assert result.equal and not result.differences
    assert {engine.root for engine in result.engines} == {root({
        name: (TensorMeta(name, dtype, shape), np.frombuffer(data, DTYPES[dtype]).reshape(shape)) for name, (dtype, shape, data) in wanted.items()})}
    # The next version is packed again.
    for rank, params in enumerate(groups[0].params):
        for name, (_, bits) in shards[rank].items():
            params[name].view(bits.dtype)[...] = bits ^ bits.dtype.type(0x8000)
    groups[0].publish(2)
    groups[1].wait_version(2)
    compare(groups[1], moved(wanted_of(changed(plain), kind, group)))


@pytest.mark.parametrize("kind, group, tensor, words", [
    ("nvfp4", 16, "weight_packed", ("NVFP4", "wwctl convert --quantize", "MXFP4 or INT4")),
    ("int4", 32, "weight_shape", ("not sent", "hf:skip=*.weight_shape"))])
def test_what_is_not_made_on_the_way_is_refused_by_its_name(daemon, groups, kind, group, tensor, words):
    """Where the trainer publishes; without that engine the next version arrives."""
    config, plain, spec, shards = megatron_case("megatron", "qwen3", "mcore-tp2", "tp2")
    groups.append(Trainer(daemon.agent_socket, config, spec, shards))
    groups.append(EngineRanks(daemon.agent_socket, "plain", config, "hf", [[meta for meta, _ in plain.values()]]))
    observed = [[TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in wanted_of(plain, kind, group).items()]]
    groups.append(EngineRanks(daemon.agent_socket, "packed", config_of(config, kind, group), "hf", observed))
    with pytest.raises(NotReadyError) as refused:
        groups[0].publish(1)
    assert refused.value.rank == "packed, target/0" and refused.value.tensor.endswith(tensor)
    assert all(word in str(refused.value) for word in words), refused.value
    groups.pop().close()
    groups[0].publish(2)
    groups[1].wait_version(2)
    for name, (_, bits) in plain.items():
        assert np.array_equal(groups[1].ranks[0].params[name].view(bits.dtype), bits), name


def compare(engine, wanted: dict) -> None:
    got = engine.ranks[0].params
    assert {name for name in got if not name.endswith("weight_shape")} == wanted.keys()
    for name, (dtype, shape, data) in wanted.items():
        assert tuple(got[name].shape) == shape and got[name].tobytes() == data, (name, dtype)


@pytest.mark.parametrize("dtype", ["I64", "I32"])
def test_a_checkpoint_in_four_bits_passes_as_it_is(daemon, groups, dtype):
    """Kimi's releases store shapes in I32, compressed-tensors in I64."""
    config, plain, _, _ = megatron_case("megatron", "deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2")
    stored = wanted_of(plain, "int4", 8)
    for name, (_, shape, data) in stored.items():
        if name.endswith("weight_shape"):
            stored[name] = dtype, shape, np.frombuffer(data, np.int64).astype(dtype.lower().replace("i", "int")).tobytes()
    kinds = {**DTYPES, "I64": np.uint64, "F32": np.uint32}
    shard = {name: (TensorMeta(name, kind, shape), np.frombuffer(data, kinds[kind]).reshape(shape))
             for name, (kind, shape, data) in stored.items()}
    config = config_of(config, "int4", 8)
    groups.append(Trainer(daemon.agent_socket, config, "hf", [shard]))
    groups.append(EngineRanks(daemon.agent_socket, "packed", config, "hf", [[meta for meta, _ in shard.values()]]))
    groups[0].publish(1)
    groups[1].wait_version(1)
    got = groups[1].ranks[0].params
    assert got.keys() == stored.keys()
    assert [name for name, (_, _, data) in stored.items() if got[name].tobytes() != data] == []
