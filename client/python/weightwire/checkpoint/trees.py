"""What a trainer keeps besides tensors of parameters (schedules, random states, counters) as tensors, and back: no pickle.

A tree is None, bool, int, float, str, lists, tuples, dicts with text or whole numbers as keys, NumPy arrays and torch
tensors. Anything else is refused by its path.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Dict, Mapping

import numpy as np
from numpy.typing import NDArray

from weightwire.checkpoint.stored import CheckpointError, damaged
from weightwire.memory import FROM_TORCH

_TREE = "tree"
_DEPTH_MAX = 64
Bytes = NDArray[np.uint8]


def encode(tree: Any) -> Dict[str, Bytes]:
    """The tree as arrays of bytes by name. CheckpointError: something in it is none of the above; says where."""
    arrays: Dict[str, Bytes] = {}
    text = json.dumps(_encode(tree, "", arrays))
    return {_TREE: np.frombuffer(text.encode(), np.uint8).copy(), **arrays}


def decode(arrays: Mapping[str, Bytes], where: str) -> Any:
    """CheckpointError (DATA_LOSS): this is no encoded tree."""
    try:
        return _decode(json.loads(bytes(arrays[_TREE])), arrays, 0)
    except (KeyError, ValueError, TypeError, IndexError, RecursionError, AttributeError) as error:
        raise damaged(where, f"no state: {error}") from error


def _encode(node: Any, path: str, arrays: Dict[str, Bytes]) -> Any:
    if path.count("/") > _DEPTH_MAX:
        raise CheckpointError(f"{path[:200]}: nested deeper than {_DEPTH_MAX}")
    if node is None or isinstance(node, (bool, int, float, str)):
        return node
    if isinstance(node, (list, tuple)):
        return {type(node).__name__ if type(node) in (list, tuple) else "tuple":
                [_encode(item, f"{path}/{i}", arrays) for i, item in enumerate(node)]}
    if isinstance(node, dict) and all(isinstance(key, (str, int)) and not isinstance(key, bool) for key in node):
        return {"dict": [[key, _encode(value, f"{path}/{key}", arrays)] for key, value in node.items()]}
    dtype, name = str(getattr(node, "dtype", "")), str(len(arrays))
    if dtype.startswith("torch.") and dtype[len("torch."):] in FROM_TORCH:
        torch = sys.modules["torch"]
        arrays[name] = node.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().copy()
        return {"tensor": [name, dtype[len("torch."):], list(node.shape)]}
    if isinstance(node, np.generic) and node.dtype.kind in "biuf":
        return node.item()
    if isinstance(node, np.ndarray) and node.dtype.kind in "biuf":
        arrays[name] = np.frombuffer(node.tobytes(), np.uint8).copy()
        return {"array": [name, node.dtype.str, list(node.shape)]}
    raise CheckpointError(f"{path or '/'}: a {type(node).__name__} cannot be kept", code="INVALID_ARGUMENT",
                          remedy="give numbers, text, lists, dicts, arrays and tensors")


def _decode(node: Any, arrays: Mapping[str, Bytes], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError("nested too deep")
    if not isinstance(node, dict):
        return node
    (kind, held), = node.items()
    if kind == "list":
        return [_decode(item, arrays, depth + 1) for item in held]
    if kind == "tuple":
        return tuple(_decode(item, arrays, depth + 1) for item in held)
    if kind == "dict":
        return {key: _decode(value, arrays, depth + 1) for key, value in held}
    name, dtype, shape = held
    if kind == "array" and np.dtype(dtype).kind in "biuf":
        return np.frombuffer(arrays[name].tobytes(), dtype).reshape(shape).copy()
    if kind == "tensor" and dtype in FROM_TORCH:
        import torch
        return torch.frombuffer(bytearray(arrays[name].tobytes()), dtype=getattr(torch, dtype)).reshape(shape) \
            if len(arrays[name]) else torch.empty(shape, dtype=getattr(torch, dtype))
    raise ValueError(f"a {str(kind)[:40]!r} of {str(dtype)[:40]!r}")
