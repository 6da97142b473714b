"""wwctl convert --quantize and quantize check: what is written is what NumPy makes of the definition, in every format."""

import json
import subprocess
import sys

import numpy as np
import pytest

from checkpoint_folders import read_folder, write_shards
from conftest import BINARIES
from quantize_oracle import encode, floats
from weightwire import TensorMeta, checkpoint
from weightwire.checkpoint import quantizing
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


def scale_of(amax: np.float32, rule: str, dtype: str) -> float:
    if rule == "own":
        bits = to_kind(np.array([amax / np.float32(448)]), dtype)
        scale = float(floats(TensorMeta("", dtype, (1,)), bits)[0])
        return scale or EPSILON[dtype]
    if rule == "quotient":
        return float(max(amax / np.float32(448), np.float32(2.0**-126)))
    power = 2.0**-126
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
            scales[i, j] = scale_of(np.abs(values[part]).max(), rule, meta.dtype)
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
