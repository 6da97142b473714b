"""What an engine's own loader was seen to do, as the coordinator takes it."""

from __future__ import annotations

from typing import Any, Mapping

from weightwire.memory import FROM_TORCH
from weightwire.v1 import types_pb2


def trace_row(copy: Mapping[str, Any]) -> types_pb2.TraceRow:
    """One copy: "src", "ops" ([name, *integers] each), "param", "offset", "shape", "stride", "dtype"."""
    ops = [types_pb2.TraceOp(name=name, arguments=arguments or ([0] if name == "unbind" else []))
           for name, *arguments in copy["ops"]]
    return types_pb2.TraceRow(source=copy["src"], ops=ops, param=copy["param"], offset=copy["offset"],
                              shape=copy["shape"], stride=copy["stride"],
                              dtype=types_pb2.DType.Value("DTYPE_" + FROM_TORCH[copy["dtype"]]))
