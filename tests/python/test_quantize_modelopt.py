"""wwctl convert --quantize to modelopt's formats: names, dtypes, shapes, bytes and config.json are those that its exporter writes of the same
weights (tests/data/modelopt_checkpoints.json), with the scales of activations and of the KV cache that it calibrated."""

import hashlib
import json

import numpy as np
import pytest

from checkpoint_folders import read_folder, write_shards
from conftest import BINARIES, DATA, EngineRanks, Trainer, golden_script
from four_bit_oracle import E2M1, in_kind
from quantize_oracle import VALUES, encode, floats
from test_fixtures import megatron_case
from weightwire import Client, NotReadyError, TensorMeta
from weightwire.checkpoint import quantizing
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.stored import CheckpointError

EXPORTED = json.loads((DATA / "modelopt_checkpoints.json").read_text())
#: Gate and up of an expert have one scale there.
EXPERTS = "FP8 qwen3_moe"
NAMES = {"FP8": "fp8-modelopt", "FP8_PER_CHANNEL_PER_TOKEN": "fp8-channel-modelopt", "NVFP4": "nvfp4-modelopt", "W4A16_NVFP4": "nvfp4-modelopt"}
KV = (".k_scale", ".v_scale")
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(autouse=True)
def planner(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def weights_of(said: dict) -> dict:
    """The numbers of tests/golden/modelopt_checkpoint.py."""
    golden = golden_script("four_bit_checkpoint")
    made = {}
    for seed, (name, shape) in enumerate(sorted(said["source"].items())):
        meta = TensorMeta(name, "BF16", tuple(shape))
        values = floats(meta, golden.numbers(seed, tuple(shape), "BF16")) * np.float32(2.0**-(seed % 5))
        made[name] = meta, (values.view(np.uint32) >> 16).astype(np.uint16).reshape(shape)  # exact
    return made


def release(folder, said: dict, without: tuple = (), **more) -> None:
    """A folder with its config.json and what is calibrated."""
    scales = {name: value for name, value in said["calibrated"].items() if not name.endswith(without or ("nothing",))} | more
    tensors = {name: (TensorMeta(name, "F32", ()), np.array(value, np.float32).view(np.uint32)) for name, value in scales.items()}
    write_shards(folder, {**said["sizes"], "quantization_config": said["quantization_config"]}, tensors, 1, index=False)


def summed(stored: dict) -> dict:
    """Of all but routers, which the exporter's transformers may hold in fp32."""
    return {name: [dtype, list(shape), hashlib.sha256(data).hexdigest()] for name, (dtype, shape, data) in stored.items()
            if ".mlp.gate." not in name}


def refusal(call) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("case", [case for case in EXPORTED if case != EXPERTS])
def test_a_release_is_made_again(tmp_path, case):
    """With its config.json for the format, the KV cache's scales included."""
    said = EXPORTED[case]
    write_shards(tmp_path / "bf16", said["sizes"], weights_of(said), 2)
    release(tmp_path / "release", said)
    quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", str(tmp_path / "release" / "config.json"), memory=1 << 17,
                        calibrated=tmp_path / "release", verify=True)
    assert summed(read_folder(tmp_path / "q")) == said["stored"]
    assert len(said["stored"]) > len(said["source"])
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"] == said["quantization_config"]


@pytest.mark.parametrize("case", [case for case in EXPORTED if case != EXPERTS])
def test_a_formats_name_says_what_the_exporter_says(tmp_path, case):
    """But for the KV cache, and the embedding, which no format quantizes."""
    said, algorithm = EXPORTED[case], case.split()[0]
    write_shards(tmp_path / "bf16", said["sizes"], weights_of(said), 1)
    release(tmp_path / "release", said, KV)
    calibrated = tmp_path / "release" if said["calibrated"] else None
    quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", NAMES[algorithm], calibrated=calibrated)
    assert summed(read_folder(tmp_path / "q")) == {name: one for name, one in said["stored"].items() if not name.endswith(KV)}
    wanted = {key: value for key, value in said["quantization_config"].items() if key not in ("producer", "kv_cache_scheme")}
    wanted["ignore"].remove("model.embed_tokens")
    assert json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"] == wanted


def test_scales_that_are_missing_or_too_many_are_named(tmp_path):
    said = EXPORTED["FP8 llama"]
    write_shards(tmp_path / "bf16", said["sizes"], weights_of(said), 1)

    def make(folder=None, format="fp8-modelopt"):
        return lambda: quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", format, calibrated=folder)
    alone = refusal(make())
    assert alone.tensor == f"{DOWN}.input_scale" and "7 of 7" in str(alone) and "--calibrated" in str(alone)
    release(tmp_path / "less", said, (f"{DOWN}.input_scale", *KV))
    less = refusal(make(tmp_path / "less"))
    assert less.tensor == f"{DOWN}.input_scale" and "1 of 7" in str(less)
    release(tmp_path / "more", said)
    more = refusal(make(tmp_path / "more"))
    assert more.tensor.endswith(KV) and "2 scales" in str(more) and "more/config.json" in str(more)
    assert not (tmp_path / "q").exists()


def test_fp8_of_experts_is_refused_by_name_and_otherwise_listed(tmp_path):
    said = EXPORTED[EXPERTS]
    gate, up = (said["stored"][f"model.layers.0.mlp.experts.1.{name}_proj.weight_scale"] for name in ("gate", "up"))
    assert gate == up  # which is why
    write_shards(tmp_path / "bf16", said["sizes"], weights_of(said), 1)
    release(tmp_path / "release", said)
    refused = refusal(lambda: quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", str(tmp_path / "release" / "config.json"),
                                                  calibrated=tmp_path / "release"))
    assert refused.tensor == "model.layers.0.mlp.experts.0.gate_proj.weight" and "one scale" in str(refused)
    config = {**said["sizes"], "quantization_config": said["quantization_config"]}
    listed = {meta.name: [meta.dtype, list(meta.shape)] for meta in planner_of(json.dumps(config), None).layout("hf")[0] if ".mlp.gate." not in meta.name}
    assert listed == {name: one[:2] for name, one in said["stored"].items()}


def test_blocks_of_weights_alone_stay_refused(tmp_path):
    """fp8_pb_wo: one scale of four dimensions or none, as a weight has several blocks or one."""
    said = EXPORTED["FP8 llama"]
    write_shards(tmp_path / "bf16", said["sizes"], weights_of(said), 1)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}}))
    refused = refusal(lambda: quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", str(tmp_path / "config.json")))
    assert 'quant_algo "fp8_pb_wo"' in str(refused)


def test_a_tensor_with_a_nan_is_nan_and_one_of_zeros_is_zeros(tmp_path):
    """modelopt's own: codes of 6 and a global scale that is no number; of zeros all is NaN, for it divides 0 by 0."""
    said = EXPORTED["W4A16_NVFP4 llama"]
    tensors = weights_of(said)
    tensors[f"{DOWN}.weight"][1][3, 5] = 0x7f80  # infinity
    tensors["model.layers.0.self_attn.o_proj.weight"][1][...] = 0x8000  # -0
    write_shards(tmp_path / "bf16", said["sizes"], tensors, 1)
    quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", "nvfp4-modelopt")
    stored = read_folder(tmp_path / "q")
    for module, scale, whole in (DOWN, 0x7f, np.nan), ("model.layers.0.self_attn.o_proj", 0x38, 0.0):
        assert set(stored[f"{module}.weight"][2]) == {0} and set(stored[f"{module}.weight_scale"][2]) == {scale}
        assert np.array_equal(np.frombuffer(stored[f"{module}.weight_scale_2"][2], np.float32), [np.float32(whole)], equal_nan=True)


def test_check_reads_them(tmp_path):
    said = EXPORTED["NVFP4 llama"]
    tensors = weights_of(said)
    write_shards(tmp_path / "bf16", said["sizes"], tensors, 1)
    release(tmp_path / "release", said, KV)
    quantizing.quantize(tmp_path / "bf16", tmp_path / "q", "hf", "nvfp4-modelopt", calibrated=tmp_path / "release")
    stored = read_folder(tmp_path / "q")
    apart = {one.name: one for one in quantizing.check(tmp_path / "bf16", tmp_path / "q")}
    assert apart.keys() == tensors.keys()
    for name in (f"{DOWN}.weight", "model.layers.0.self_attn.k_proj.weight"):
        codes = np.frombuffer(stored[name][2], np.uint8)
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(stored[name][1][0], -1)
        scales = VALUES[np.frombuffer(stored[f"{name}_scale"][2], np.uint8)].reshape(len(codes), -1).repeat(16, 1)
        numbers = np.where(codes & 8, -1, 1) * E2M1[codes & 7] * scales * float(np.frombuffer(stored[f"{name}_scale_2"][2], np.float32)[0])
        error = np.abs(numbers - floats(*tensors[name]).astype(np.float64))
        assert apart[name].greatest == pytest.approx(error.max(), rel=1e-12) and error.max() > 0
        assert apart[name].mean == pytest.approx(error.mean(), rel=1e-9)
    same = {one.name: one for one in quantizing.check(tmp_path / "q", tmp_path / "q")}
    assert (same[name].greatest, same[name].equal_codes) == (0, 1)


def fp8(name: str, meta: TensorMeta, bits: np.ndarray, algorithm: str) -> dict:
    """name -> (dtype, shape, bytes) of a weight, by the definition."""
    values, whole = floats(meta, bits).astype(np.float32), algorithm == "FP8"
    scales = np.abs(values).max(None if whole else 1) / np.float32(448)
    quotients = in_kind(values / scales, meta.dtype) if whole else values / scales[:, None]
    stored = {name: ("F8_E4M3", tuple(meta.shape), encode(quotients).tobytes()),
              f"{name}_scale": ("F32", () if whole else (meta.shape[0],), scales.astype(np.float32).tobytes())}
    return stored | ({name.removesuffix("weight") + "input_scale": ("F32", (), b"")} if whole else {})


@pytest.mark.parametrize("algorithm, spec", [("FP8", "hf:skip=*.input_scale"), ("FP8_PER_CHANNEL_PER_TOKEN", "hf")])
def test_fp8_is_made_on_the_way(daemon, groups, algorithm, spec):
    """Of the halves that two trainer ranks hold; the engine keeps its own scales of activations."""
    config, plain, source, shards = megatron_case("megatron", "qwen3", "mcore-tp2", "tp2")
    groups.append(Trainer(daemon.agent_socket, config, source, shards))
    stored = {}
    for name, (meta, bits) in plain.items():
        linear = len(meta.shape) == 2 and "_proj." in name
        stored |= fp8(name, meta, bits, algorithm) if linear else {name: (meta.dtype, tuple(meta.shape), np.ascontiguousarray(bits).tobytes())}
    engine = {**config, "quantization_config": {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}}
    observed = [[TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in stored.items()]]
    groups.append(EngineRanks(daemon.agent_socket, "fp8", engine, spec, observed))
    calibrated = {name for name in stored if name.endswith("input_scale")}
    groups[0].publish(1)
    groups[1].wait_version(1)
    got = groups[1].ranks[0].params
    assert len(stored) > len(plain) and got.keys() == stored.keys()
    assert [name for name in stored if name not in calibrated and got[name].tobytes() != stored[name][2]] == []
    assert {got[name].tobytes() for name in calibrated} <= {bytes(4)}, "what nobody sent was written"
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    assert client.verify().equal


def test_a_scale_that_is_calibrated_is_refused_with_the_words_that_leave_it_out(daemon, groups):
    config, plain, source, shards = megatron_case("megatron", "qwen3", "mcore-tp2", "tp2")
    groups.append(Trainer(daemon.agent_socket, config, source, shards))
    stored = {}
    for name, (meta, bits) in plain.items():
        stored |= fp8(name, meta, bits, "FP8") if "_proj." in name else {name: (meta.dtype, tuple(meta.shape), b"")}
    engine = {**config, "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}}
    groups.append(EngineRanks(daemon.agent_socket, "fp8", engine, "hf",
                              [[TensorMeta(name, dtype, shape) for name, (dtype, shape, _) in stored.items()]]))
    with pytest.raises(NotReadyError) as refused:
        groups[0].publish(1)
    assert refused.value.tensor.endswith(".input_scale") and "hf:skip=*.input_scale;" in str(refused.value)
