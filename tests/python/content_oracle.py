"""What the content of a checkpoint is, in NumPy: written from the definition (server/content, kernels/keyed_sum.h),
with whole tensors and one key for each word, no cuts and no layouts. The roots of the checkpoints behind the Megatron
dumps are in tests/data/content_roots.json, where tests in C++ read them; `content_oracle.py --update` writes it anew."""

from __future__ import annotations

import json
import math
import sys

import numpy as np

from conftest import DATA, read_safetensors

ROOTS = DATA / "content_roots.json"
DTYPES = {"BF16": 1, "F16": 2, "F32": 3, "F8_E4M3": 11, "I32": 7, "U8": 9}
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
TABLE = (np.uint64(0x243F6A8885A308D3), np.uint64(0x13198A2E03707344))
BLOCK = np.uint64(512)
ONE = np.uint64(1)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Fold:
    def __init__(self, domain: str):
        self.lanes = mix(np.array([1, 2], np.uint64))
        self.text(domain)

    def word(self, value: int) -> None:
        self.lanes = mix((self.lanes ^ np.uint64(value)) + GOLDEN)

    def text(self, text: str) -> None:
        data = text.encode()
        self.word(len(data))
        for at in range(0, len(data), 8):
            self.word(int.from_bytes(data[at:at + 8], "little"))

    def finish(self) -> tuple[int, int]:
        return int(self.lanes[0]), int(self.lanes[1])


def tensor_sum(name: str, data: bytes) -> list[int]:
    fold = Fold("weightwire.content.seed.1")
    fold.text(name)
    words = np.frombuffer(data + bytes(-len(data) % 4), "<u4").astype(np.uint64)
    place = np.arange(words.size, dtype=np.uint64)
    lanes = []
    for seed, table in zip(fold.finish(), TABLE):
        outer = mix(np.uint64(seed) + GOLDEN * (ONE + place // BLOCK)) | ONE
        inner = (mix(table + place % BLOCK) >> np.uint64(32)) | ONE
        lanes.append(int((outer * inner * words).sum(dtype=np.uint64)))
    return lanes


def leaf(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[int, int]:
    fold = Fold("weightwire.content.leaf.2")
    fold.text(name)
    for word in (DTYPES[dtype], math.prod(shape), *tensor_sum(name, data)):
        fold.word(word)
    return fold.finish()


def root(checkpoint: dict) -> str:
    """Of name -> (TensorMeta, bits), as 32 hex digits."""
    with np.errstate(over="ignore"):
        level = [leaf(name, meta.dtype, tuple(meta.shape), bits.tobytes())
                 for name, (meta, bits) in sorted(checkpoint.items(), key=lambda item: item[0].encode())]
        while len(level) > 1:
            above = [node(left, right) for left, right in zip(level[::2], level[1::2])]
            level = above + level[len(above) * 2:]
    return "".join(f"{word:016x}" for word in level[0])


def node(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
    fold = Fold("weightwire.content.node.1")
    for word in (*left, *right):
        fold.word(word)
    return fold.finish()


def held_by_megatron(name: str) -> bool:
    """Files with MTP layers repeat the embedding and the head for each of them; a rank holds these once."""
    return not (name.startswith("model.layers.") and name.endswith((".embed_tokens.weight", ".shared_head.head.weight")))


def roots() -> dict[str, str]:
    files = sorted(DATA.glob("megatron*/*/hf/model.safetensors"))
    return {str(file.parent.parent.relative_to(DATA)):
            root({name: tensor for name, tensor in read_safetensors(file).items() if held_by_megatron(name)}) for file in files}


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(__doc__)
    ROOTS.write_text(json.dumps(roots(), indent=1) + "\n")
