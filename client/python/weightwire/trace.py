"""What an engine's own loader was seen to do, as the coordinator takes it."""

from __future__ import annotations

from typing import Any, Mapping

from weightwire.v1 import types_pb2

_FROM_TORCH = {
    "bfloat16": "BF16",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def trace_row(copy: Mapping[str, Any]) -> types_pb2.TraceRow:
    """One copy: "src", "ops" ([name, *integers] each), "param", "offset", "shape", "stride", "dtype"."""
    ops = [types_pb2.TraceOp(name=name, arguments=arguments or ([0] if name == "unbind" else []))
           for name, *arguments in copy["ops"]]
    return types_pb2.TraceRow(source=copy["src"], ops=ops, param=copy["param"], offset=copy["offset"],
                              shape=copy["shape"], stride=copy["stride"],
                              dtype=types_pb2.DType.Value("DTYPE_" + _FROM_TORCH[copy["dtype"]]))
