"""A reader of a store in a folder, written from docs/regions.md alone: NumPy, zstandard, hashlib, json, and no code of weightwire."""

from __future__ import annotations

import hashlib
import json
import pathlib

import numpy as np
import zstandard

BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "I8": 1, "I16": 2, "I32": 4, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1,
         "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "U32": 4}
BLOCK = 1 << 20


def sha(data) -> str:
    return hashlib.sha256(data).hexdigest()


def apply_code(code: bytes, block: np.ndarray) -> np.ndarray:
    """The newer block (flat, unsigned) of the older one."""
    order, plain = code[1], code[2]
    elements, changes, gap_bytes, escapes, *stored = np.frombuffer(code, "<u4", 7, 4).tolist()
    assert code[0] == 1 and elements == block.size
    width, bits = block.itemsize, block.itemsize * 8
    streams, at = [], 32
    for i, size in enumerate((gap_bytes, (changes + 1) // 2, escapes * width)):
        data = code[at:at + stored[i]]
        streams.append(data if plain >> i & 1 or not size else zstandard.ZstdDecompressor().decompress(data, size))
        at += stored[i]
        assert len(streams[i]) == size
    assert at == len(code)
    gaps, pairs, planes = (np.frombuffer(stream, np.uint8) for stream in streams)
    places = np.cumsum(gaps, dtype=np.int64)[gaps != 255] + np.arange(changes)
    steps = np.stack([pairs & 15, pairs >> 4], 1).reshape(-1)[:changes].astype(np.uint64) + np.uint64(1)
    steps[steps == 16] = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<u{width}").reshape(-1)
    distance = np.where(steps & np.uint64(1), ~(steps >> np.uint64(1)), steps >> np.uint64(1))  # modulo 2**64
    kind = block.dtype.type
    sign, all_ones = kind(1 << bits - 1), kind((1 << bits) - 1)

    def flip(x: np.ndarray, negative: np.ndarray) -> np.ndarray:  # between bits of floats and their order
        return np.where(negative, x ^ all_ones, x ^ sign) if order >= 4 else x
    old = block[places]
    moved = (flip(old, old & sign != 0).astype(np.uint64) + distance).astype(block.dtype)
    block[places] = flip(moved, moved & sign == 0)
    return block


def read(folder, version: int | None = None) -> list[dict[str, tuple[str, tuple, bytes]]]:
    """Of each rank: name -> dtype, shape, bytes. The newest version, or the one that is named."""
    root = pathlib.Path(folder)

    def manifest(path: str, digest: str | None = None) -> dict:
        record = (root / path).read_bytes()
        assert digest in (None, sha(record)), path
        return json.loads(record.split(b"\n")[0])
    if version is None:
        latest = json.loads((root / "latest.json").read_text())["manifest"]
        at = manifest(latest["path"], latest["digest"])
    else:
        at = manifest(next(root.glob(f"versions/{version:020d}-*/manifest.json")).relative_to(root).as_posix())
    chain, anchor = [at], at["anchor"]
    while chain[-1]["kind"] == "delta":
        base = chain[-1]["base"]
        named = anchor is not None and base["state"] == anchor["state"]
        chain.append(manifest(anchor["path"], anchor["digest"]) if named else manifest(base["path"], base["digest"]))
    text = (root / f"layouts/{at['layout']}.json").read_bytes()
    assert sha(text) == at["layout"]
    layout, ranks = json.loads(text), []
    for rank, tensors in enumerate(layout["ranks"]):
        arrays = [np.zeros(int(np.prod(shape)), f"<u{BYTES[dtype]}") for _, dtype, shape in tensors]
        parts, held = [], layout["part_bytes"]
        for array in arrays:
            for begin in range(0, array.size, BLOCK // array.itemsize):
                if held >= layout["part_bytes"]:
                    parts.append([])
                    held = 0
                parts[-1].append(array[begin:begin + BLOCK // array.itemsize])
                held += parts[-1][-1].nbytes
        for step in reversed(chain):
            for number, (blocks, (size, digest, content)) in enumerate(zip(parts, step["ranks"][rank], strict=True)):
                data = (root / f"{step['folder']}/{step['kind']}-{rank:05d}-{number:05d}").read_bytes()
                assert len(data) == size and sha(data) == digest and data[:8] == b"WWSTORE1"
                place, sums = 8, hashlib.sha256()
                for block in blocks:
                    word = int.from_bytes(data[place:place + 4], "little")
                    body = data[place + 4:place + 4 + (word & 0xFFFFFF)]
                    place += 4 + len(body)
                    if word >> 24 in (0, 3):
                        apply_code(body, block if word >> 24 == 0 else np.multiply(block, 0, out=block))
                    elif word >> 24 == 1:
                        block[...] = np.frombuffer(body, block.dtype)
                    else:
                        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(body), np.uint8)
                        block[...] = np.ascontiguousarray(planes.reshape(block.itemsize, -1).T).view(block.dtype).reshape(-1)
                    sums.update(block.tobytes())
                assert place == len(data) and sums.hexdigest() == content
        ranks.append({name: (dtype, tuple(shape), array.tobytes()) for (name, dtype, shape), array in zip(tensors, arrays)})
    return ranks
