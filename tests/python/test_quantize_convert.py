"""wwctl convert --quantize and quantize check: what is written is what NumPy makes of the definition, in every format."""

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

import four_bit_oracle
from checkpoint_folders import read_folder, write_shards
from conftest import BINARIES, DATA, golden_script
from quantize_oracle import VALUES, encode, floats
from weightwire import TensorMeta, checkpoint
from weightwire.checkpoint import quantizing
from weightwire.checkpoint.library import library_of
from weightwire.checkpoint.stored import CheckpointError

#: Sizes that blocks of 128 leave a rest of.
CONFIG = {"model_type": "qwen3_moe", "hidden_size": 160, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
          "head_dim": 96, "intermediate_size": 224, "vocab_size": 33, "num_experts": 2, "num_experts_per_tok": 1,
          "moe_intermediate_size": 96, "decoder_sparse_step": 1, "mlp_only_layers": [], "torch_dtype": "bfloat16"}
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
EPSILON = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}
#: format -> (block, 0: all; name of scales; their dtype, None: the weights'; the scale of a largest magnitude)
FORMATS = {"fp8-block": ((128, 128), "_scale_inv", "F32", "quotient"),
           "fp8-block-ue8m0": ((128, 128), "_scale_inv", "F32", "power"),
           "mxfp8": ((1, 32), "_scale_inv", "U8", "power"),
           "mxfp8-modelopt": ((1, 32), "_scale", "U8", "power"),
           "fp8-channel": ((1, 0), "_scale", None, "own"),
           "fp8-tensor": ((0, 0), "_scale", None, "own"),
           "fp8-block-compressed-tensors": ((128, 128), "_scale", None, "own"),
           "mxfp8-compressed-tensors": ((1, 32), "_scale", "U8", "rounded")}


@pytest.fixture(autouse=True)
def planner(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def to_kind(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to the nearest value of the kind, as its bits."""
    if dtype != "BF16":
        return values.astype(np.float16 if dtype == "F16" else np.float32).view(np.uint16 if dtype == "F16" else np.uint32)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def model(dtype: str, seed: int = 3) -> dict:
    random = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (33, 160), "lm_head.weight": (33, 160), "model.norm.weight": (160,)}
    layer = {"input_layernorm": (160,), "post_attention_layernorm": (160,), "self_attn.q_norm": (96,), "self_attn.k_norm": (96,),
             "self_attn.q_proj": (192, 160), "self_attn.k_proj": (96, 160), "self_attn.v_proj": (96, 160), "self_attn.o_proj": (160, 192),
             "mlp.gate": (2, 160)}
    for expert in range(2):
        layer |= {f"mlp.experts.{expert}.{name}_proj": (96, 160) for name in ("gate", "up")}
        layer[f"mlp.experts.{expert}.down_proj"] = (160, 96)
    shapes |= {f"model.layers.0.{name}.weight": shape for name, shape in layer.items()}
    made = {}
    for name, shape in sorted(shapes.items()):
        values = random.normal(size=shape) * np.exp2(random.integers(-6, 2, (*shape[:-1], 1)))
        if len(shape) == 2:
            values[0, :64] = 0
            values[1, :5] = [448, -0.0, -448, 2.0**-20, 0]
        made[name] = TensorMeta(name, dtype, shape), to_kind(values, dtype)
    return made


def scale_of(amax: np.float32, rule: str, dtype: str, in_a_byte: bool) -> float:
    if rule == "own":
        bits = to_kind(np.array([amax / np.float32(448)]), dtype)
        scale = float(floats(TensorMeta("", dtype, (1,)), bits)[0])
        return scale or EPSILON[dtype]
    if rule == "quotient":
        return float(max(amax / np.float32(448), np.float32(2.0**-126)))
    power = 2.0 ** (-127 if in_a_byte else -126)
    while 448.0 * power < amax or (rule == "rounded" and 448.0 * power == amax):
        power *= 2
    return power


def expected(tensors: dict, format: str) -> dict:
    """name -> (dtype, shape, bytes)."""
    (rows, columns), suffix, scale_dtype, rule = FORMATS[format]
    made = {}
    for name, (meta, bits) in tensors.items():
        if any(part in name for part in KEPT):
            made[name] = meta.dtype, meta.shape, bits.tobytes()
            continue
        values, block = floats(meta, bits), (rows or meta.shape[0], columns or meta.shape[1])
        codes = np.empty(values.shape, np.uint8)
        scales = np.empty([-(-n // b) for n, b in zip(values.shape, block)])
        for i, j in np.ndindex(*scales.shape):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            scales[i, j] = scale_of(np.abs(values[part]).max(), rule, meta.dtype, scale_dtype == "U8")
            quotients = (values[part] / np.float32(scales[i, j])).astype(np.float32)
            if rule == "own":
                quotients = floats(meta, to_kind(quotients, meta.dtype))
            codes[part] = encode(quotients)
        own = scale_dtype or meta.dtype
        stored = (np.log2(scales) + 127).astype(np.uint8) if own == "U8" else to_kind(scales, own)
        made[name] = "F8_E4M3", meta.shape, codes.tobytes()
        made[name + suffix] = own, (1,) if not rows else stored.shape, stored.tobytes()
    return made


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "weightwire.checkpoint", *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("format", FORMATS)
def test_each_format_is_what_its_definition_gives(tmp_path, format):
    for dtype in ("BF16", "F16", "F32"):
        tensors = model(dtype)
        write_shards(tmp_path / dtype, CONFIG, tensors, 2)
        # In 256 KiB the largest matrices of fp32 go in several bands; a scale of a whole one needs all of it at once.
        quantizing.quantize(tmp_path / dtype, tmp_path / f"{dtype}-q", "hf", format, memory=1 << (19 if format == "fp8-tensor" else 18),
                            shard_bytes=100_000, verify=True)
        got, wanted = read_folder(tmp_path / f"{dtype}-q"), expected(tensors, format)
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert got[name] == wanted[name], (dtype, name)
    config = json.loads((tmp_path / "BF16-q" / "config.json").read_text())
    assert config.pop("quantization_config")["quant_method"] in ("fp8", "mxfp8", "compressed-tensors", "modelopt")
    assert config == CONFIG
    # What was written is read as the same format.
    checkpoint.convert(tmp_path / "BF16-q", tmp_path / "again", "hf")
    assert read_folder(tmp_path / "again") == read_folder(tmp_path / "BF16-q")


def grouped(dtype: str) -> tuple:
    """The same with whole groups of 128."""
    config = {**CONFIG, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 128}
    random, sizes = np.random.default_rng(5), {160: 256, 192: 384, 96: 128}
    made = {}
    for name, (meta, _) in model(dtype).items():
        shape = tuple(sizes.get(n, n) for n in meta.shape)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            shape = (192, 256)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            shape = (96,)
        values = random.normal(size=shape) * np.exp2(random.integers(-6, 2, (*shape[:-1], 1)))
        if len(shape) == 2 and shape[0] > 3:
            values[0, :128] = 0
            values[1, :6] = [448, -0.0, -448, 2.0**-14, 0, -2.0**-20]
            values[2, :8] = [6, -6, 7, 5, 2.5, -0.25, 0.75, 1.25]
            values[3, :3] = [1.75, 3.5, 7.5]
        made[name] = TensorMeta(name, dtype, shape), to_kind(values, dtype)
    return config, made


@pytest.mark.parametrize("format", four_bit_oracle.FORMATS)
def test_four_bits_are_what_the_definition_gives(tmp_path, format):
    """MX scales of compressed-tensors are kept in fp16 while it divides: what it makes of fp16 is not claimed."""
    for dtype in ("BF16", "F32") if format.startswith("mx") else ("BF16", "F16", "F32"):
        config, tensors = grouped(dtype)
        write_shards(tmp_path / dtype, config, tensors, 2)
        quantizing.quantize(tmp_path / dtype, tmp_path / f"{dtype}-q", "hf", format, memory=1 << 18, shard_bytes=100_000, verify=True)
        got, wanted = read_folder(tmp_path / f"{dtype}-q"), {}
        for name, (meta, bits) in tensors.items():
            kept = any(part in name for part in KEPT)
            wanted |= {name: (meta.dtype, meta.shape, bits.tobytes())} if kept else four_bit_oracle.stored(
                name, tensors, *four_bit_oracle.FORMATS[format])
        assert got.keys() == wanted.keys()
        for name in wanted:
            assert got[name] == wanted[name], (dtype, name)
        checkpoint.convert(tmp_path / f"{dtype}-q", tmp_path / f"{dtype}-again", "hf")
        assert read_folder(tmp_path / f"{dtype}-again") == got
        # The config.json that was written says the same format.
        quantizing.quantize(tmp_path / dtype, tmp_path / f"{dtype}-like", "hf", str(tmp_path / f"{dtype}-q" / "config.json"))
        assert read_folder(tmp_path / f"{dtype}-like") == got


#: What vLLM 0.32.0 names in packed_modules_mapping, and experts, whose gate and up it fuses without.
FUSED_BY_VLLM = {"deepseek-v3": (("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
                 "qwen3.5-397b-a17b-text": (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("in_proj_qkv", "in_proj_z"),
                                            ("in_proj_b", "in_proj_a"))}


@pytest.mark.parametrize("model_of", FUSED_BY_VLLM)
def test_what_an_engine_fuses_has_one_global_scale(model_of):
    """vLLM takes the largest of several for all of them, which is wrong for the others."""
    config = {key: value for key, value in json.loads((DATA / f"configs/{model_of}.json").read_text()).items() if key != "quantization_config"}
    said = json.loads(library_of(None).quantized(json.dumps(config), "nvfp4-compressed-tensors"))["weights"]
    found, wanted = {}, {}
    for weight in said:
        parent, _, module = weight["name"].removesuffix(".weight").rpartition(".")
        names = next((names for names in FUSED_BY_VLLM[model_of] if module in names), (module,))
        wanted.setdefault((parent, names), []).append(weight["name"])
        found.setdefault(weight["fused"], []).append(weight["name"])
    assert sorted(map(sorted, found.values())) == sorted(map(sorted, wanted.values()))
    assert max(map(len, wanted.values())) > 1


def test_a_global_scale_of_two_dtypes_is_refused(tmp_path):
    """compressed-tensors rounds it to the weights' own dtype."""
    config, tensors = grouped("BF16")
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = grouped("F32")[1][name]
    write_shards(tmp_path / "a", config, tensors, 1)
    with pytest.raises(CheckpointError) as refused:
        quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", "nvfp4-compressed-tensors")
    assert "self_attn" in refused.value.tensor and "F32" in str(refused.value) and "BF16" in str(refused.value)


GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
           "head_dim": 16, "intermediate_size": 96, "vocab_size": 33, "num_local_experts": 3, "num_experts_per_tok": 1,
           "torch_dtype": "bfloat16", "tie_word_embeddings": False}


def gpt_oss(dtype: str, width: int = 96) -> dict:
    layer = {"input_layernorm.weight": (64,), "post_attention_layernorm.weight": (64,), "self_attn.sinks": (4,), "mlp.router.weight": (3, 64),
             "mlp.router.bias": (3,), "mlp.experts.gate_up_proj": (3, 64, 2 * width), "mlp.experts.gate_up_proj_bias": (3, 2 * width),
             "mlp.experts.down_proj": (3, width, 64), "mlp.experts.down_proj_bias": (3, 64)}
    for name, rows, columns in (("q", 64, 64), ("k", 32, 64), ("v", 32, 64), ("o", 64, 64)):
        layer |= {f"self_attn.{name}_proj.weight": (rows, columns), f"self_attn.{name}_proj.bias": (rows,)}
    shapes = {"model.embed_tokens.weight": (33, 64), "lm_head.weight": (33, 64), "model.norm.weight": (64,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in layer.items()}
    random = np.random.default_rng(7)
    return {name: (TensorMeta(name, dtype, shape), to_kind(random.normal(size=shape) * np.exp2(random.integers(-5, 5, (*shape[:-1], 1))), dtype))
            for name, shape in sorted(shapes.items())}


def test_the_experts_of_gpt_oss_are_stored_as_its_release_has_them(tmp_path):
    tensors = gpt_oss("BF16")
    write_shards(tmp_path / "a", GPT_OSS, tensors, 1)
    # One expert's gate and up, and rows of 64 bytes of codes beside it: several bands.
    quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", "mxfp4-gpt-oss", memory=1 << 17, verify=True)
    wanted = {}
    for name, (meta, bits) in tensors.items():
        wanted |= four_bit_oracle.experts(name, meta, bits) if name.endswith(("gate_up_proj", "down_proj")) else {
            name: (meta.dtype, meta.shape, bits.tobytes())}
    assert read_folder(tmp_path / "q") == wanted
    checkpoint.convert(tmp_path / "q", tmp_path / "again", "hf")
    assert read_folder(tmp_path / "again") == wanted
    said = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                         "model.embed_tokens", "lm_head"]}


LIBRARIES = json.loads((DATA / "four_bit_checkpoints.json").read_text())


@pytest.mark.parametrize("format, dtype", [(format, dtype) for format, kinds in LIBRARIES.items() for dtype in kinds])
def test_four_bits_are_what_the_libraries_store(tmp_path, format, dtype):
    """Names, dtypes, shapes and bytes as compressed-tensors has them, and torchao and transformers of gpt-oss."""
    golden = golden_script("four_bit_checkpoint")
    config = golden.GPT_OSS if format == "mxfp4-gpt-oss" else {**golden.LLAMA, **golden.FORMATS[format][0]}
    tensors = {name: (TensorMeta(name, dtype, bits.shape), bits) for name, bits in golden.model(config, dtype).items()}
    write_shards(tmp_path / "a", config, tensors, 2)
    quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", format, memory=1 << 17, verify=True)
    got = {name: [kind, list(shape), hashlib.sha256(data).hexdigest()] for name, (kind, shape, data) in read_folder(tmp_path / "q").items()}
    wanted = dict(LIBRARIES[format][dtype])
    assert len(wanted) == (4 if format == "mxfp4-gpt-oss" else 7 * (2 if format.startswith("mx") else 3))
    gone = {name for name in tensors if name.endswith(("_proj.weight", "gate_up_proj", "down_proj"))} - (
        {name for name in tensors if ".self_attn." in name} if format == "mxfp4-gpt-oss" else set())
    wanted |= {name: [dtype, list(bits.shape), hashlib.sha256(bits.tobytes()).hexdigest()] for name, (_, bits) in tensors.items()
               if name not in gone}
    assert got == wanted


def test_groups_that_a_matrix_cannot_have_are_refused_with_sizes_that_work(tmp_path):
    config, tensors = CONFIG, model("BF16")  # 160 and 192 columns, and 96
    write_shards(tmp_path / "a", config, tensors, 1)
    write_shards(tmp_path / "g", {**GPT_OSS, "intermediate_size": 80}, gpt_oss("BF16", 80), 1)
    for source, format, words in (("a", "int4-128-compressed-tensors", ("160 columns", "128 or 256", "one scale")),
                                  ("g", "mxfp4-gpt-oss", ("80 columns", "64 or 96")),
                                  ("a", "mxfp4-gpt-oss", ("gpt_oss", "qwen3_moe")),
                                  ("a", "/nowhere/config.json", ("nowhere",)),
                                  ("a", str(tmp_path / "a"), ("has no quantization_config",))):
        with pytest.raises(CheckpointError) as caught:
            quantizing.quantize(tmp_path / source, tmp_path / "b", "hf", format)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "b").exists()


def test_what_cannot_be_quantized_is_refused(tmp_path):
    write_shards(tmp_path / "a", CONFIG, model("BF16"), 1)
    done = run("convert", tmp_path / "a", tmp_path / "q", "--to", "hf", "--quantize", "fp8-block", "--verify")
    assert done.returncode == 0 and "fp8-block" in done.stdout and "verified" in done.stdout, done.stderr
    for source, to, format, memory, words in (("a", "hf", "int3", 1 << 20, ("int3", "fp8-channel")),
                                              ("a", "weightwire", "fp8-block", 1 << 20, ("--to hf",)),
                                              # 192 rows of 160 elements, of 3 bytes, twice
                                              ("a", "hf", "fp8-tensor", 1 << 15, ("--memory 184320",)),
                                              ("q", "hf", "mxfp8", 1 << 20, ("quantized already",))):
        with pytest.raises(CheckpointError) as caught:
            quantizing.quantize(tmp_path / source, tmp_path / "b", to, format, memory=memory)
        assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "b").exists()


def test_check_tells_how_far_two_checkpoints_are_apart(tmp_path):
    tensors = model("BF16")
    write_shards(tmp_path / "bf16", CONFIG, tensors, 1)
    for format in ("fp8-block", "fp8-block-ue8m0", "fp8-channel", "mxfp8"):
        quantizing.quantize(tmp_path / "bf16", tmp_path / format, "hf", format)
    name, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
    values = floats(*tensors[name]).astype(np.float64)

    def restored(format: str) -> tuple:
        """Codes and values, from the oracle's bytes."""
        (rows, columns), suffix, dtype, _ = FORMATS[format]
        made = expected(tensors, format)
        codes = np.frombuffer(made[name][2], np.uint8).reshape(values.shape)
        table = [f * 2.0**-9 if e == 0 else (8 + f) * 2.0**(e - 10) for e in range(16) for f in range(8)]
        scales = made[name + suffix]
        numbers = (2.0**(np.frombuffer(scales[2], np.uint8).astype(float) - 127) if dtype == "U8" else
                   floats(TensorMeta("", scales[0], ()), np.frombuffer(scales[2], np.uint16 if scales[0] == "BF16" else np.uint32)).astype(float))
        numbers = numbers.reshape(scales[1])
        spread = numbers.repeat(rows or values.shape[0], 0).repeat(columns or values.shape[1], 1)[:values.shape[0], :values.shape[1]]
        return codes, np.array(table + [-v for v in table])[codes] * spread

    for format in ("fp8-block", "fp8-block-ue8m0", "fp8-channel", "mxfp8"):
        apart = {one.name: one for one in quantizing.check(tmp_path / "bf16", tmp_path / format)}
        error = np.abs(restored(format)[1] - values)
        assert apart[name].greatest == error.max() > 0, format
        assert apart[name].mean == pytest.approx(error.mean(), rel=1e-12)
        assert apart[name].equal_codes is None and apart[name].not_numbers == 0
        assert (apart[norm].greatest, apart[norm].elements) == (0, 160)
    left, right = restored("fp8-block"), restored("fp8-block-ue8m0")
    apart = {one.name: one for one in quantizing.check(tmp_path / "fp8-block", tmp_path / "fp8-block-ue8m0")}
    assert apart[name].equal_codes == (left[0] == right[0]).mean() < 1
    assert apart[name].greatest == np.abs(left[1] - right[1]).max()
    done = run("quantize", "check", tmp_path / "fp8-block", tmp_path / "fp8-block", "--json")
    assert done.returncode == 0, done.stderr
    shown = {one["name"]: one for one in json.loads(done.stdout)["tensors"]}
    assert shown[name] == {"name": name, "elements": values.size, "max_error": 0.0, "mean_error": 0.0, "equal_codes": 1.0, "not_numbers": 0}
    text = run("quantize", "check", tmp_path / "bf16", tmp_path / "mxfp8").stdout
    assert name in text and "MAX ERROR" in text


def restored(codes: np.ndarray, scales: np.ndarray, kind: str, dtype: str, whole, group: int) -> np.ndarray:
    """Numbers that the oracle's codes stand for."""
    if kind == "kInt4":
        numbers, factors = codes.astype(float) - 8, floats(TensorMeta("", dtype, ()), scales).astype(float)
    else:
        numbers = np.where(codes & 8, -four_bit_oracle.E2M1[codes & 7], four_bit_oracle.E2M1[codes & 7])
        factors = 2.0**(scales.astype(float) - 127) if whole is None else VALUES[scales] / float(whole)
    return numbers * factors.repeat(group, 1)


@pytest.mark.parametrize("format", four_bit_oracle.FORMATS)
def test_check_reads_four_bits(tmp_path, format):
    config, tensors = grouped("BF16")
    kind, group = four_bit_oracle.FORMATS[format]
    write_shards(tmp_path / "a", config, tensors, 1)
    quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", format)
    quantizing.quantize(tmp_path / "a", tmp_path / "fp8", "hf", "fp8-block")
    apart = {one.name: one for one in quantizing.check(tmp_path / "a", tmp_path / "q")}
    assert apart.keys() == tensors.keys()
    for name in ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.experts.1.down_proj.weight"):
        meta, bits = tensors[name]
        values = floats(meta, bits).astype(np.float64)
        codes, scales, whole = four_bit_oracle.quantize(floats(meta, bits), "BF16", kind, group)
        error = np.abs(restored(codes, scales, kind, "BF16", whole, group) - values)
        assert apart[name].greatest == pytest.approx(error.max(), rel=1e-12) and error.max() > 0
        assert apart[name].mean == pytest.approx(error.mean(), rel=1e-9)
        assert (apart[name].elements, apart[name].equal_codes) == (values.size, None)
    same = {one.name: one for one in quantizing.check(tmp_path / "q", tmp_path / "q")}
    assert (same[name].greatest, same[name].equal_codes) == (0, 1)
    assert {one.equal_codes for one in quantizing.check(tmp_path / "q", tmp_path / "fp8")} == {None}


def test_check_reads_the_experts_of_gpt_oss(tmp_path):
    tensors, name = gpt_oss("BF16"), "model.layers.0.mlp.experts.gate_up_proj"
    write_shards(tmp_path / "a", GPT_OSS, tensors, 1)
    quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", "mxfp4-gpt-oss")
    values = np.swapaxes(floats(*tensors[name]), 1, 2).astype(np.float64).reshape(-1, 64)
    codes, scales, _ = four_bit_oracle.quantize(values.astype(np.float32), "BF16", "kMxFp4", 32)
    error = np.abs(restored(codes, scales, "kMxFp4", "BF16", None, 32) - values)
    apart = {one.name: one for one in quantizing.check(tmp_path / "a", tmp_path / "q")}
    assert apart.keys() == tensors.keys()
    assert apart[name].greatest == error.max() > 0 and apart[name].mean == pytest.approx(error.mean(), rel=1e-9)


def test_check_refuses_what_it_does_not_read(tmp_path):
    tensors = model("BF16")
    write_shards(tmp_path / "a", CONFIG, tensors, 1)
    del tensors["model.norm.weight"]
    write_shards(tmp_path / "b", CONFIG, tensors, 1)
    with pytest.raises(CheckpointError) as caught:
        quantizing.check(tmp_path / "a", tmp_path / "b")
    assert caught.value.tensor == "model.norm.weight"
    quantizing.quantize(tmp_path / "a", tmp_path / "q", "hf", "fp8-block")
    (tmp_path / "q" / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError) as caught:
        quantizing.check(tmp_path / "a", tmp_path / "q")
    assert "blocks" in str(caught.value) and caught.value.tensor.endswith("_scale_inv")
