#!/usr/bin/env python3
"""Writes tests/data/e4m3.txt: what torch makes of float8_e4m3fn, for tests/unit/kernels/quantize_test.cc.

It needs torch (2.13.0 wrote the file): `pip install torch` or any environment that has it.
  VENV/bin/python tests/golden/e4m3.py            # exit 1 when the file would change
  VENV/bin/python tests/golden/e4m3.py --update   # writes
"""

import pathlib
import zlib

import torch

import golden_file

FILE = pathlib.Path(__file__).resolve().parents[1] / "data/e4m3.txt"
E4M3 = torch.float8_e4m3fn
KINDS = {"bf16": (torch.bfloat16, torch.uint16, 0x87FF, 0x3800), "f16": (torch.float16, torch.uint16, 0xBFFF, 0),
         "f32": (torch.float32, torch.uint32, 0x87FFFFFF, 0x38000000)}
SHAPES = [(256, 384, 128, 128), (200, 300, 128, 128), (1, 1, 128, 128), (129, 127, 128, 128), (37, 500, 1, 500), (64, 96, 16, 32)]
HEADER = """# By tests/golden/e4m3.py; hexadecimal unless it counts.
# decode CODE F32_BITS
# cast KIND FIRST_BITS CODE: inputs from here to the next line of the kind, clamped to +-448, have this code
# point F32_BITS CODE: around each midpoint of two codes
# matrix KIND ROWS COLUMNS BLOCK_ROWS BLOCK_COLUMNS CRC32_OF_CODES CRC32_OF_SCALES
"""


def codes(values):
    """e4m3 of f32 values, saturating as quantizers do: torch's bare cast makes NaN of what exceeds 464."""
    return values.clamp(-448, 448).to(E4M3).view(torch.uint8)


def decoded():
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    for code, bits in enumerate(every.view(torch.int32).tolist()):
        yield f"decode {code:02x} {bits & 0xFFFFFFFF:08x}"


def casts(kind):
    dtype = KINDS[kind][0]
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(dtype).float()
    last = None
    for bits, code in enumerate(codes(every).tolist()):
        if code != last:
            yield f"cast {kind} {bits:04x} {code:02x}"
        last = code


def points():
    values = torch.arange(127, dtype=torch.int32).to(torch.uint8).view(E4M3).float()
    middles = ((values[:-1] + values[1:]) / 2).view(torch.int32)
    near = torch.stack([middles - 1, middles, middles + 1], 1).flatten()
    near = torch.cat([near, near | -(1 << 31)])
    for bits, code in zip(near.tolist(), codes(near.view(torch.float32)).tolist()):
        yield f"point {bits & 0xFFFFFFFF:08x} {code:02x}"


def matrix(kind, rows, columns):
    """Elements over 16 powers of two, from a generator that the test repeats."""
    dtype, unsigned, keep, plus = KINDS[kind]
    width = 32 if kind == "f32" else 16
    state, bits = 1, []
    for _ in range(rows * columns):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        bits.append(state >> (64 - width) & keep | plus)
    return torch.tensor(bits, dtype=torch.int64).to(unsigned).view(dtype).view(rows, columns)


def matrices(kind):
    for rows, columns, block_rows, block_columns in SHAPES:
        source = matrix(kind, rows, columns).float()
        result = torch.empty(rows, columns, dtype=torch.uint8)
        scales = []
        for row in range(0, rows, block_rows):
            for column in range(0, columns, block_columns):
                block = (slice(row, row + block_rows), slice(column, column + block_columns))
                scale = (source[block].abs().amax() / 448).clamp(min=2.0**-126)
                result[block] = codes(source[block] / scale)
                scales.append(scale)
        crcs = [zlib.crc32(t.contiguous().numpy().tobytes()) for t in (result, torch.stack(scales))]
        yield f"matrix {kind} {rows} {columns} {block_rows} {block_columns} {crcs[0]:08x} {crcs[1]:08x}"


def main():
    args = golden_file.parser(__doc__).parse_args()
    lines = [*decoded(), *casts("bf16"), *casts("f16"), *points()]
    for kind in KINDS:
        lines += matrices(kind)
    text = HEADER + "\n".join(lines) + "\n"
    golden_file.settle(FILE, text, args.update, f"torch {torch.__version__}")


if __name__ == "__main__":
    main()
