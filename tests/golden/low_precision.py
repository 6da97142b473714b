#!/usr/bin/env python3
"""Writes tests/data/low_precision.txt: what the libraries that define quantized formats make of rows of numbers, for
tests/unit/kernels/quantize_test.cc and four_bit_test.cc. The lines of the libraries that the environment has are made, those of
others stay. Torch 2.15.0, torchao 0.18.0, compressed-tensors 0.20.1 and modelopt 0.47.0 wrote the file, and vLLM 0.32.0 in an
environment of its own (that of the engine tests will do):
  pip install torch torchao compressed-tensors nvidia-modelopt requests
  VENV/bin/python tests/golden/low_precision.py            # exit 1 when the file would change
  VENV/bin/python tests/golden/low_precision.py --update   # writes
"""

import importlib.util
import os
import pathlib
import random

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # compressed-tensors compiles what it casts with

import torch

import golden_file

FILE = pathlib.Path(__file__).resolve().parents[1] / "data/low_precision.txt"
KINDS = {"bf16": (torch.bfloat16, torch.int16, 4), "f16": (torch.float16, torch.int16, 4), "f32": (torch.float32, torch.int32, 8)}
GROUP = 32
HEADER = """# By tests/golden/low_precision.py; hexadecimal unless it counts. A row of elements, its codes and its scales:
# row LIBRARY SCALES KIND GROUP ELEMENTS CODES SCALES
# four LIBRARY KIND4 KIND GROUP ELEMENTS CODES SCALES GLOBAL: in four bits, with the bits of kNvFp4's global scale
# SCALES is a name of kernels::ScaleKind, KIND4 of kernels::FourBitKind. Elements and scales are numbers, most significant digit first.
"""


def rows(kind):
    """Rows of 96 numbers: wide and narrow, at the edges of powers of two, denormals, zeros with signs."""
    dtype = KINDS[kind][0]
    draw = random.Random(33)
    small = torch.finfo(dtype).tiny
    yield [draw.gauss(0, 0.02) for _ in range(96)]
    yield [draw.gauss(0, 1) * 2.0 ** draw.randint(-12, 8) for _ in range(96)]
    yield [448.0, -448.0, 447.0, 0.0, -0.0, 1.0, -1.0, 0.001] * 4 + [224.0, 223.0, 225.0, 1.75] * 8 + [7 * 2.0 ** -9, 3.5, -3.4] * 10 + [0.0, -0.0]
    yield [draw.choice([256.0, 384.0, 416.0, 440.0, 448.0, 456.0, 464.0, 480.0, 512.0]) * 2.0 ** (i // 32 - 1) for i in range(96)]
    if kind == "f16":
        yield [small * draw.randint(-9, 9) * 2.0 ** -8 for _ in range(96)]
        yield [65504.0, -65504.0, 1.0] * 32
    else:
        yield [draw.gauss(0, 1) * 2.0 ** -30 for _ in range(96)]
        yield [draw.gauss(0, 1) * 2.0 ** 100 for _ in range(96)]


def tiny_rows(kind):
    """Groups of zeros, and around the smallest scales."""
    yield [0.0] * 32 + [-0.0] * 32 + [0.0, -0.0] * 16
    yield [0.0] * 64 + [1.0, -0.25] * 16
    if kind != "f16":
        for top in (-133, -127, -125, -120, -119, -118, -117):
            yield [2.0 ** top, -(2.0 ** -133), 2.0 ** (top - 3), 0.0] * 8 + [1.5 * 2.0 ** top, 2.0 ** -130] * 16 + [1.75 * 2.0 ** top, -(2.0 ** -127)] * 16


def bits(values, kind=None):
    """As hexadecimal digits, element by element."""
    if kind is None:
        return bytes(values.flatten().tolist()).hex()
    _, integer, digits = KINDS[kind]
    return "".join(f"{v & (1 << 4 * digits) - 1:0{digits}x}" for v in values.flatten().contiguous().view(integer).tolist())


def line(library, scales, kind, group, row, codes, made):
    stored = bits(made) if made.dtype == torch.uint8 else bits(made, "f32" if made.dtype == torch.float32 else kind)
    return f"row {library} {scales} {kind} {group} {bits(row, kind)} {bits(codes.view(torch.uint8))} {stored}"


def torchao_rceil(kind, row):
    """NVIDIA's rule, as cuBLAS, Transformer Engine and SGLang have it."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    scales, codes = to_mx(row.reshape(1, -1), torch.float8_e4m3fn, GROUP, ScaleCalculationMode.RCEIL)
    return line("torchao", "kE8M0", kind, GROUP, row, codes, scales.view(torch.uint8))


def compressed(kind, row, group):
    """compressed-tensors with a scale for each group: of all of the row (a channel), or of an MX group."""
    from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
    from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams
    mx = group == GROUP
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=False, strategy="group" if mx else "channel",
                            group_size=group if mx else None, scale_dtype=torch.uint8 if mx else None)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = row.reshape(1, -1, group)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    compressor = MXFP8QuantizationCompressor if mx else NaiveQuantizationCompressor
    state = compressor.compress({"weight": row.reshape(1, -1), "weight_scale": scale}, scheme)
    return line("compressed-tensors", "kE8M0Rounded" if mx else "kOwnKind", kind, group, row, state["weight"], state["weight_scale"])


def four(library, kind4, kind, group, row, codes, scales, global_scale=None):
    stored = bits(scales, kind) if scales.dtype == row.dtype else bits(scales.view(torch.uint8))
    one = torch.ones(1) if global_scale is None else global_scale
    return f"four {library} {kind4} {kind} {group} {bits(row, kind)} {bits(codes.contiguous().view(torch.uint8))} {stored} {bits(one, 'f32')}"


def modelopt_mxfp8(kind, row):
    from modelopt.torch.quantization.qtensor import MXFP8QTensor
    made, scales = MXFP8QTensor.quantize(row.reshape(1, -1))
    return line("modelopt", "kE8M0", kind, GROUP, row, made._quantized_data, scales)


def vllm_mxfp8(kind, row):
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import _mxfp8_e4m3_quantize_torch
    codes, scales = _mxfp8_e4m3_quantize_torch(row.reshape(1, -1))
    return line("vllm", "kE8M0", kind, GROUP, row, codes, scales)


def vllm_block_ue8m0(kind, row):
    """As DeepGEMM has it: of bf16 and fp32 from 1e-4 on. With fp32 scales it multiplies by their inverse, where others divide."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8
    codes, scales = per_block_cast_to_fp8(row.reshape(1, -1), [1, GROUP], use_ue8m0=True)
    return line("vllm", "kPowerOfTwo", kind, GROUP, row, codes, scales)


def vllm_channel(kind, row):
    from vllm.model_executor.layers.quantization.online import fp8
    matrix = row.reshape(1, -1)
    scales = fp8._fp8_channel_scale(matrix.abs().amax(-1, keepdim=True))
    return line("vllm", "kF32", kind, len(row), row, fp8._fp8_quant_per_channel(matrix, scales), scales)


def torchao_mxfp4(kind, row):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    scales, codes = to_mx(row.reshape(1, -1), torch.float4_e2m1fn_x2, GROUP, ScaleCalculationMode.RCEIL)
    return four("torchao", "kMxFp4", kind, GROUP, row, codes, scales)


def compressed_four(kind4, kind, group, row):
    """compressed-tensors' packed formats."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    compressor, dtype, strategy, type_ = {
        "kMxFp4Rounded": (MXFP4PackedCompressor, torch.uint8, "group", "float"),
        "kNvFp4": (NVFP4PackedCompressor, torch.float8_e4m3fn, "tensor_group", "float"),
        "kInt4": (PackedQuantizationCompressor, None, "group", "int")}[kind4]
    args = QuantizationArgs(num_bits=4, type=type_, symmetric=True, dynamic=False, strategy=strategy, group_size=group, scale_dtype=dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    groups = row.reshape(1, -1, group)
    state = {"weight": row.reshape(1, -1)}
    if kind4 == "kNvFp4":
        state["weight_global_scale"] = generate_gparam(row.min(), row.max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args, state.get("weight_global_scale"))
    made = compressor.compress({**state, "weight_scale": scale}, scheme)
    return four("compressed-tensors", kind4, kind, group, row, made["weight_packed"], made["weight_scale"], made.get("weight_global_scale"))


def modelopt(kind, row):
    """nvidia-modelopt's functions, on a CPU, as its exporter calls them: fp8 of a whole tensor, with a scale for each row, and NVFP4."""
    from modelopt.torch.export.quant_utils import to_quantized_weight
    from modelopt.torch.quantization.qtensor import NVFP4QTensor
    matrix, amax = row.reshape(1, -1), row.abs().amax().float()
    whole = torch.tensor(amax.item() / 448)
    yield line("modelopt", "kF32OwnQuotient", kind, len(row), row, to_quantized_weight(matrix, whole, "fp8"), whole)
    rows_of = matrix.abs().amax(-1).float() / 448
    yield line("modelopt", "kF32", kind, len(row), row, to_quantized_weight(matrix, rows_of, "fp8_pc_pt"), rows_of)
    own = NVFP4QTensor.get_weights_scaling_factor_2(matrix)
    for library, scale2 in ("modelopt", own), ("modelopt-fused", own * 3000):  # with that of a module whose weights are larger
        scales = NVFP4QTensor.get_weights_scaling_factor(matrix, 16, scale2)[0]
        codes = to_quantized_weight(matrix.clone(), scales, "nvfp4", scale2, 16)
        yield four(library, "kNvFp4Modelopt", kind, 16, row, codes, scales, scale2)


def of_torchao(kind, row, tiny):
    if kind != "f16" and not (tiny and row.abs().max() < 2.0 ** -100):  # it has no MX of fp16, and takes for zeros what is below 2^-127
        yield torchao_rceil(kind, row)
        yield torchao_mxfp4(kind, row)


def of_compressed_tensors(kind, row, tiny):
    if kind != "f16":  # it keeps MX scales in fp16 while it divides
        yield compressed(kind, row, GROUP)
        yield compressed_four("kMxFp4Rounded", kind, GROUP, row)
    yield compressed(kind, row, len(row))
    yield compressed_four("kNvFp4", kind, 16, row)
    yield compressed_four("kInt4", kind, 32, row)
    yield compressed_four("kInt4", kind, 96, row)


def of_modelopt(kind, row, tiny):
    if kind != "f16":  # its powers overflow in fp16
        yield modelopt_mxfp8(kind, row)
    if not tiny:
        yield from modelopt(kind, row)


def of_vllm(kind, row, tiny):
    yield vllm_mxfp8(kind, row)
    if all(part.abs().max() > 1e-4 for part in row.float().reshape(-1, GROUP)):
        yield vllm_block_ue8m0(kind, row)
        yield vllm_channel(kind, row)


#: Each with the module that it is imported by.
LIBRARIES = {"torchao": ("torchao", of_torchao), "compressed-tensors": ("compressed_tensors", of_compressed_tensors),
             "modelopt": ("modelopt", of_modelopt), "vllm": ("vllm", of_vllm)}


def lines(library):
    of_library = LIBRARIES[library][1]
    for kind, (dtype, _, _) in KINDS.items():
        for tiny, make in ((False, rows), (True, tiny_rows)):
            for values in make(kind):
                yield from of_library(kind, torch.tensor(values, dtype=torch.float64).to(dtype), tiny)
        if library == "compressed-tensors":
            yield compressed(kind, torch.zeros(5, dtype=dtype), 5)
            yield compressed(kind, torch.tensor([-1.0, 0.5, -0.0], dtype=dtype), 3)


def main():
    args = golden_file.parser(__doc__).parse_args()
    stored = FILE.read_text()
    made = HEADER
    for library, (module, _) in LIBRARIES.items():
        if importlib.util.find_spec(module) is None:
            kept = [line for line in stored.splitlines() if line.split()[1].startswith(library) and line[0] != "#"]
            print(f"{library} is not here: its {len(kept)} lines are as they were")
        else:
            kept = list(lines(library))
        made += "\n".join(kept) + "\n" if kept else ""
    golden_file.settle(FILE, made, args.update)


if __name__ == "__main__":
    main()
