"""torch's dtypes by safetensors' names, and the other way."""

from __future__ import annotations

import torch

NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
for attribute, name in (("uint16", "U16"), ("uint32", "U32"), ("float8_e8m0fnu", "F8_E8M0")):  # not in every torch
    if hasattr(torch, attribute):
        NAMES[getattr(torch, attribute)] = name
TORCH = {name: dtype for dtype, name in NAMES.items()}
