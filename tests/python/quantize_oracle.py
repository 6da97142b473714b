"""fp8 e4m3 with block scales by its definition (kernels/quantize.h), of whole tensors, in NumPy."""

from __future__ import annotations

import fnmatch

import numpy as np

from engine_oracle import engine_ranks
from weightwire import TensorMeta

SUFFIX = "_scale_inv"
#: What each code from 0 to 0x7e stands for; 0x7f is NaN.
VALUES = np.array([f * 2.0**-9 if e == 0 else (8 + f) * 2.0**(e - 10) for e in range(16) for f in range(8)][:-1])


def floats(meta: TensorMeta, bits: np.ndarray) -> np.ndarray:
    if meta.dtype == "BF16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.view(np.float16 if meta.dtype == "F16" else np.float32).astype(np.float32)


def encode(quotients: np.ndarray) -> np.ndarray:
    """The nearest code, of two the even one; beyond the largest, the largest."""
    magnitudes = np.abs(quotients).astype(np.float64)
    above = np.minimum(np.searchsorted(VALUES, magnitudes), 0x7E)
    below = np.maximum(above - 1, 0)
    up, down = VALUES[above] - magnitudes, magnitudes - VALUES[below]
    codes = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (codes | np.where(np.signbit(quotients), 0x80, 0)).astype(np.uint8)


def quantize(values: np.ndarray, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and the scales of all blocks."""
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty([-(-n // b) for n, b in zip(values.shape, block)], np.float32)
    for i, j in np.ndindex(*scales.shape):
        part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        scales[i, j] = max(np.abs(values[part]).max() / np.float32(448), np.float32(2.0**-126))
        codes[part] = encode(values[part] / scales[i, j])
    return codes, scales


class Quantized:
    """A Hugging Face checkpoint, name -> (TensorMeta, bits), whose matrices are quantized but for those that match."""

    def __init__(self, hf: dict, block: tuple[int, int], keep: list[str]):
        self.block = block
        self.hf: dict = {}  # as it would be stored
        self.codes: dict = {}  # whole tensors, fp8 where they are quantized
        self.scales: dict = {}  # the same, with its scale in place of each element
        for name, (meta, bits) in hf.items():
            self.hf[name] = self.codes[name] = self.scales[name] = meta, bits
            if not name.endswith("_proj.weight") and ".experts." not in name and "kv_a_proj" not in name:
                continue
            if any(fnmatch.fnmatch(name, pattern) for pattern in keep):
                continue
            codes, scales = quantize(floats(meta, bits), block)
            expanded = scales.repeat(block[0], 0).repeat(block[1], 1)[:codes.shape[0], :codes.shape[1]]
            self.hf[name] = self.codes[name] = TensorMeta(name, "F8_E4M3", meta.shape), codes
            self.hf[name + SUFFIX] = TensorMeta(name + SUFFIX, "F32", scales.shape), scales.view(np.uint32)
            self.scales[name] = TensorMeta(name, "F32", meta.shape), np.ascontiguousarray(expanded).view(np.uint32)

    def engine(self, config: dict, spec: str) -> list[dict]:
        """What each rank of an engine holds: name -> (dtype, bits, filled)."""
        ranks = []
        for codes, scales in zip(engine_ranks(config, self.codes, spec), engine_ranks(config, self.scales, spec)):
            rank = {}
            for name, param in codes.items():
                rank[name] = param.dtype, param.bits, param.filled
                if param.dtype != "F8_E4M3":
                    continue
                rows, columns = (-(-n // b) for n, b in zip(param.bits.shape[-2:], self.block))
                cut = scales[name].bits[..., ::self.block[0], ::self.block[1]]
                assert cut.shape[-2:] == (rows, columns)
                rank[name + SUFFIX] = "F32", np.ascontiguousarray(cut), np.ones(cut.shape, bool)
            ranks.append(rank)
        return ranks
