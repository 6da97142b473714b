"""Weights of four bits by their definitions (kernels/four_bit.h), of whole tensors, in NumPy, and how each dialect stores them."""

from __future__ import annotations

import numpy as np

from quantize_oracle import VALUES, encode, floats
from weightwire import TensorMeta

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
LEAST = {"BF16": 2.0**-126, "F16": 2.0**-14, "F32": 2.0**-126}
EPSILON = {"BF16": 2.0**-7, "F16": 2.0**-10, "F32": 2.0**-23}


def in_kind(values, dtype: str) -> np.ndarray:
    """fp32 numbers, rounded to the nearest of the kind."""
    values = np.asarray(values, np.float32)
    if dtype == "F32":
        return values
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def bits_in(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of numbers that the kind has."""
    if dtype == "F16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32)
    return bits if dtype == "F32" else (bits >> 16).astype(np.uint16)


def e2m1(quotients: np.ndarray, signed_zeros: bool) -> np.ndarray:
    """The nearest code, of two the even one. `signed_zeros`: an element -0 keeps its sign."""
    magnitudes = np.abs(quotients).astype(np.float64)
    distance = np.abs(magnitudes[..., None] - E2M1)
    nearest = distance.min(-1, keepdims=True)
    codes = np.arange(8)
    # Of the nearest codes (one, or two that are neighbours) the even one.
    found = np.where(distance == nearest, np.where(codes % 2 == 0, codes, codes + 100), 1000).min(-1) % 100
    negative = np.signbit(quotients) & (signed_zeros | (quotients != 0))
    return (found | np.where(negative, 8, 0)).astype(np.uint8)


#: Modules that vLLM fuses, by the ends of their names: their weights in NVFP4 have one global scale.
FUSED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"),
         ("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))


def largest_of(name: str, tensors: dict) -> float:
    """Of the weight and of those that are fused with it."""
    module = name.removesuffix(".weight")
    ends = [(end, group) for group in FUSED for end in group if module.endswith("." + end)]
    names = [module.removesuffix(end) + other + ".weight" for end, group in ends for other in group] or [name]
    return max(np.abs(floats(*tensors[one])).max() for one in names if one in tensors)


def quantize(values: np.ndarray, dtype: str, kind: str, group: int, largest: float | None = None):
    """(a code for each element, the bits of each group's scale, the fp32 global scale): `kind` of kernels::FourBitKind."""
    rows, columns = values.shape
    assert columns % group == 0
    groups = values.reshape(rows, columns // group, group).astype(np.float32)
    amax = np.abs(groups).max(-1)
    if kind in ("kMxFp4", "kMxFp4Rounded"):
        powers = 2.0 ** np.arange(-127, 128)
        # The first power of two that fits: 6 of it are not less, or 7 of it are more.
        index = np.searchsorted(6 * powers, amax.astype(np.float64), side="left") if kind == "kMxFp4" else np.searchsorted(
            7 * powers, amax.astype(np.float64), side="right")
        codes = e2m1((groups / powers[index][..., None].astype(np.float32)), kind == "kMxFp4")
        return codes.reshape(rows, columns), index.astype(np.uint8), None
    if kind == "kNvFp4":
        largest = np.abs(values).max() if largest is None else largest
        whole = in_kind(np.float32(2688) * in_kind(np.float32(1) / np.float32(max(largest, LEAST[dtype])), dtype), dtype)
        stored = encode(in_kind(amax / np.float32(6), dtype) * whole)
        stored = np.where(stored == 0, 0x20, stored).astype(np.uint8)
        codes = e2m1(groups / (VALUES[stored].astype(np.float32) / whole)[..., None], False)
        return codes.reshape(rows, columns), stored, whole
    assert kind == "kInt4"
    scales = in_kind(amax / np.float32(7.5), dtype)
    scales = np.where(scales == 0, np.float32(EPSILON[dtype]), scales)
    codes = np.clip(np.rint(in_kind(groups / scales[..., None], dtype)), -8, 7) + 8
    return codes.astype(np.uint8).reshape(rows, columns), bits_in(scales, dtype), None


def packed(codes: np.ndarray, words: bool) -> np.ndarray:
    """Two in a byte, or eight in a word of 32 bits, the first one lowest."""
    each = 8 if words else 2
    apart = codes.reshape(*codes.shape[:-1], -1, each).astype(np.uint32) << (4 * np.arange(each, dtype=np.uint32))
    together = np.bitwise_or.reduce(apart, -1)
    return together if words else together.astype(np.uint8)


#: format -> (kind, group)
FORMATS = {"mxfp4-compressed-tensors": ("kMxFp4Rounded", 32), "nvfp4-compressed-tensors": ("kNvFp4", 16),
           "int4-32-compressed-tensors": ("kInt4", 32), "int4-128-compressed-tensors": ("kInt4", 128)}


def stored(name: str, tensors: dict, kind: str, group: int) -> dict:
    """What compressed-tensors stores of a weight of a model: name -> (dtype, shape, bytes)."""
    meta, bits = tensors[name]
    rows, columns = meta.shape
    codes, scales, whole = quantize(floats(meta, bits), meta.dtype, kind, group, largest_of(name, tensors))
    words = kind == "kInt4"
    dtype = {"kInt4": meta.dtype, "kNvFp4": "F8_E4M3"}.get(kind, "U8")
    made = {f"{name}_packed": ("I32" if words else "U8", (rows, columns // (8 if words else 2)), packed(codes, words).tobytes()),
            f"{name}_scale": (dtype, (rows, columns // group), scales.tobytes())}
    if words:
        made[f"{name}_shape"] = "I64", (2,), np.array(meta.shape, np.int64).tobytes()
    if kind == "kNvFp4":
        made[f"{name}_global_scale"] = "F32", (1,), np.array([whole], np.float32).tobytes()
    return made


def experts(name: str, meta: TensorMeta, bits: np.ndarray) -> dict:
    """What gpt-oss' release stores of the experts' weights, which transformers has with inputs first."""
    count, columns, rows = meta.shape
    codes, scales, _ = quantize(np.swapaxes(floats(meta, bits), 1, 2).reshape(count * rows, columns), meta.dtype, "kMxFp4", 32)
    return {f"{name}_blocks": ("U8", (count, rows, columns // 32, 16), packed(codes, False).tobytes()),
            f"{name}_scales": ("U8", (count, rows, columns // 32), scales.tobytes())}
