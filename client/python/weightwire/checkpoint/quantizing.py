"""Quantized checkpoints: made of one in bf16, fp16 or fp32, and compared.

The arithmetic is kernels/quantize.h's, the same that weights take on their way to an engine.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import numpy as np
from numpy.typing import NDArray

from weightwire.checkpoint.conversion import OnProgress, identity_of
from weightwire.checkpoint.execute import Bound
from weightwire.checkpoint.formats import Opened, Wanted
from weightwire.checkpoint.library import NVFP4_MODELOPT, Library, library_of
from weightwire.checkpoint.loading import Report
from weightwire.checkpoint.planner import planner_of
from weightwire.checkpoint.sources import PathLike, find, open_checkpoint
from weightwire.checkpoint.stored import Bits, CheckpointError, Stored, bits_of
from weightwire.checkpoint.writing import Writing, check_free, target_layout
from weightwire.memory import TensorMeta, dtype_bytes

_FLOATS = ("BF16", "F16", "F32")
_OWN_KIND, _NVFP4, _INT4 = 2, 6, 7  # layout::ScaleRule
_SUFFIXES = ("_scale_inv", "_scale")
_SECOND_SCALE = "_scale_2"
#: Last parts of names of scales of activations and of the KV cache, which weights do not tell.
_CALIBRATED = ("input_scale", "input_global_scale", "k_scale", "v_scale")
#: Of formats with calibrated scales, what the dialect has without them.
_WEIGHTS_ALONE = {"nvfp4-modelopt": "nvfp4-w4a16-modelopt"}
#: What packed weights are called beside the weight's own name, and their scales.
_PACKED = (("_packed", "_scale"), ("_blocks", "_scales"))
_CHECK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Weight:
    source: Stored
    scales: str
    block: Tuple[int, int]
    rule: int
    #: Elements in one of the codes.
    packed: int
    #: Of all experts of gpt-oss: each expert's matrix has inputs first, its codes outputs.
    turned: bool
    #: Weights with the same text have one global scale; empty: it has its own.
    fused: str

    @property
    def beside(self) -> Tuple[str, ...]:
        """All that is made but the codes."""
        last = {_NVFP4: "_global_scale", _INT4: "_shape", NVFP4_MODELOPT: _SECOND_SCALE}.get(self.rule)
        return (self.scales,) if last is None else (self.scales, self.source.name + last)

    @property
    def columns(self) -> int:
        return self.source.shape[1]


def quantize(source: PathLike, target: PathLike, to: str, format: str, *, config: Optional[PathLike] = None, memory: int = 1 << 28,
             shard_bytes: int = 5_000_000_000, verify: bool = False, leave_out: Sequence[str] = (), calibrated: Optional[PathLike] = None,
             wwctl: Optional[str] = None, on_progress: OnProgress = lambda what, done, total: None) -> Report:
    """Writes `target`, which must not exist: the Hugging Face checkpoint `source` with its linear weights in `format`, but the head
    and the routers of experts; or as the quantization_config of the config.json at the path `format` says. All else is copied; scales of activations and of the KV
    cache come from the checkpoint `calibrated`.
    `memory` bounds what is held of the weights; `verify` computes all once more and compares. CheckpointError: refused, with tensor
    and remedy; OSError: a disk failed. Run again to go on.
    """
    final = Path(os.path.abspath(target))
    check_free(final)
    kind, spec = target_layout(to)
    found = find(source, spec=None, config=config, leave_out=leave_out, wwctl=wwctl, verify=verify)
    try:
        if kind != "hf" or spec != "hf" or found.opened.format != "hf":
            raise CheckpointError(f"{found.opened.format} to {to}: only a Hugging Face checkpoint is quantized, to another one",
                                  remedy="convert it with --to hf first")
        library = library_of(wwctl)
        said = _format(format) if calibrated else _WEIGHTS_ALONE.get(format, _format(format))
        answer = json.loads(library.quantized(found.described().read_text(), said))
        scales = _scales_of(calibrated, answer["calibrated"])
        planner = planner_of(answer["config"], wwctl)
        weights = {w["codes"]: _weight(found.opened, w) for w in answer["weights"]}
        metas = _metas(planner.layout("hf")[0], found.opened, weights, {name: kind for name, (kind, _) in scales.items()})
        wanted = Wanted("hf", to, "hf", [metas], shard_bytes, found.described(), config_text=answer["config"])
        key = {"quantize": format, "calibrated": [[name, bits.tobytes().hex()] for name, (_, bits) in scales.items()], "config": answer["config"], "shard_bytes": shard_bytes, "source": identity_of(found)}
        total = sum(meta.nbytes for meta in metas)
        beside = {name for weight in weights.values() for name in weight.beside}
        steps = [meta.name for meta in metas if meta.name not in beside]
        sizes = {meta.name: meta.nbytes for meta in metas}
        with Writing(final, wanted, key) as writing:
            tensors = {stored.name: stored for stored in writing.target.ranks[0]}
            amaxes: Dict[str, Tuple[float, float]] = {}

            def made_of(name: str) -> Iterator[Tuple[Stored, int, Bits]]:
                if name in scales:
                    return iter([(tensors[name], 0, scales[name][1])])
                return _made(library, found.opened, name, weights, tensors, memory, amaxes)

            def size_of(name: str) -> int:
                return sizes[name] + (sum(sizes[one] for one in weights[name].beside) if name in weights else 0)

            def each(names: Sequence[str], done: int, what: str, act: Callable[[Stored, int, Bits], None]) -> None:
                for name in names:
                    for made, begin, values in made_of(name):
                        act(made, begin, values)
                    done += size_of(name)
                    if what == "write":
                        writing.wrote(size_of(name))
                    on_progress(what, done, total)
            resumed = sum(size_of(name) for name in steps[:writing.done])
            each(steps[writing.done:], resumed, "write", writing.target.files.write)
            writing.seal()
            if verify:
                each(steps, 0, "verify", _comparer(writing.reopened()))
            found.opened.files.check_unchanged()
            writing.finish()
        return Report("hf", "hf", format, total, resumed, found.opened.left_out, found.opened.notes)
    finally:
        found.opened.files.close()


def _scales_of(folder: Optional[PathLike], wanted: Sequence[str]) -> Dict[str, Tuple[str, Bits]]:
    """Of the checkpoint at `folder` the scales that are calibrated: the dtype and the one element of each."""
    opened = open_checkpoint(folder) if folder else None
    try:
        there = opened.ranks[0] if opened else {}
        missing = [name for name in wanted if name not in there]
        if missing:
            raise CheckpointError(f"{len(missing)} of {len(wanted)} scales of activations or of the KV cache are not there: they are "
                                  "calibrated, weights do not tell them", reason="tensor_missing", tensor=missing[0],
                                  remedy="--calibrated FOLDER: a release of the model that has them; or a format without them")
        more = [name for name in there if name.rpartition(".")[2] in _CALIBRATED and name not in wanted]
        if more:
            raise CheckpointError(f"{folder} has {len(more)} scales that the format has not", reason="tensor_unexpected", tensor=more[0],
                                  remedy=f"--quantize {folder}/config.json takes the format as that release has it")
        return {name: (there[name].dtype, _only_element(opened, there[name])) for name in wanted} if opened else {}
    finally:
        if opened is not None:
            opened.files.close()


def _only_element(opened: Opened, stored: Stored) -> Bits:
    if stored.count != 1 or stored.dtype not in _FLOATS:
        raise CheckpointError(f"{stored.dtype} {list(stored.shape)} is no scale", reason="shape_mismatch", tensor=stored.name)
    element: Bits = opened.files.flat(stored, 0, 1).copy()
    return element


def _format(format: str) -> str:
    """A format's name, or the quantization_config of the config.json that it is the path of."""
    if os.sep not in format and not format.endswith(".json"):
        return format
    path = Path(format) / "config.json" if Path(format).is_dir() else Path(format)
    try:
        said: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no format, and no config.json: {error}") from None
    found = said.get("quantization_config") or (said.get("text_config") or {}).get("quantization_config")
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} has no quantization_config", remedy="name a format, or the config.json of an engine that has one")
    return json.dumps(found)


def _weight(opened: Opened, said: Mapping[str, Any]) -> _Weight:
    stored = _stored(opened, said["name"])
    if stored.dtype not in _FLOATS:
        raise CheckpointError(f"{stored.dtype} is not quantized", reason="dtype_mismatch", tensor=stored.name,
                              remedy=f"of a checkpoint in {', '.join(_FLOATS)}")
    return _Weight(stored, said["scales"], (said["block"][0], said["block"][1]), said["rule"], said["packed"], said["turned"],
                   said["fused"])


def _stored(opened: Opened, name: str) -> Stored:
    if name not in opened.ranks[0]:
        raise CheckpointError("it is not there", reason="tensor_missing", tensor=name, remedy="compare config.json with the files")
    return opened.ranks[0][name]


def _metas(described: Sequence[TensorMeta], opened: Opened, weights: Mapping[str, _Weight], scales: Mapping[str, str]) -> List[TensorMeta]:
    """With the source's dtypes where they are kept."""
    own = {weight.scales: weight.source.dtype for weight in weights.values() if weight.rule in (_OWN_KIND, _INT4)}
    own.update(scales)
    new = set(weights) | {name for weight in weights.values() for name in weight.beside} | scales.keys()
    return [TensorMeta(meta.name, own.get(meta.name, meta.dtype) if meta.name in new else _stored(opened, meta.name).dtype, meta.shape)
            for meta in described]


def _made(library: Library, opened: Opened, name: str, weights: Mapping[str, _Weight], tensors: Mapping[str, Stored],
          memory: int, amaxes: Dict[str, Tuple[float, float]]) -> Iterator[Tuple[Stored, int, Bits]]:
    """What belongs into the target of one tensor of the source: (tensor, first element, elements). `amaxes`: what is known of weights
    that have a global scale in common."""
    half = max(memory // 2, 1 << 16)
    if name not in weights:
        stored = _stored(opened, name)
        step = half // dtype_bytes(stored.dtype)
        for begin in range(0, stored.count, step):
            yield tensors[name], begin, opened.files.flat(stored, begin, min(stored.count, begin + step))
        return
    weight = weights[name]
    scales, dtype, columns = tensors[weight.scales], weight.source.dtype, weight.columns
    across = -(-columns // weight.block[1])
    amax, global_scale = amaxes.get(weight.fused, (0.0, 1.0))
    if weight.rule in (_NVFP4, NVFP4_MODELOPT) and weight.fused not in amaxes:
        for one in [one for one in weights.values() if one.fused == weight.fused != ""] or [weight]:
            if weight.rule == _NVFP4 and one.source.dtype != dtype:  # its scale is rounded to the weights' dtype
                raise CheckpointError(f"it is {one.source.dtype}, and {weight.source.name}, with which it has a global scale in common, "
                                      f"{dtype}", reason="dtype_mismatch", tensor=one.source.name,
                                      remedy="make a checkpoint in one dtype first, or take nvfp4-modelopt")
            for _, source in _bands(opened, one, half, memory):
                amax, global_scale = library.global_scale(one.source.dtype, weight.rule, source, amax)
        if weight.fused:
            amaxes[weight.fused] = amax, global_scale
    for top, source in _bands(opened, weight, half, memory):
        codes = np.empty(len(source) // weight.packed, bits_of(tensors[name].dtype))
        own = np.empty(-(-(len(source) // columns) // weight.block[0]) * across, bits_of(scales.dtype))
        library.quantize(dtype, source, columns, weight.block, weight.rule, codes, own, global_scale)
        yield tensors[name], top * columns // weight.packed, codes
        yield scales, top // weight.block[0] * across, own
    for other in weight.beside[1:]:
        said = np.array([global_scale], np.float32) if weight.rule != _INT4 else np.array(weight.source.shape, np.int64)
        yield tensors[other], 0, said.view(bits_of(tensors[other].dtype))


def _bands(opened: Opened, weight: _Weight, half: int, memory: int) -> Iterator[Tuple[int, Bits]]:
    """The matrix with outputs first, in rows of whole blocks: (first row, its elements)."""
    columns, item = weight.columns, dtype_bytes(weight.source.dtype)
    experts, rows = (weight.source.shape[0], weight.source.shape[2]) if weight.turned else (1, weight.source.shape[0])
    block_rows = min(weight.block[0], rows)
    band_bytes = columns * block_rows * (item + 1)
    held = rows * columns * item if weight.turned else 0
    bands = (half - held) // band_bytes
    if bands <= 0:
        raise CheckpointError(f"rows of blocks take {held + band_bytes} bytes, more than half of --memory {memory}",
                              reason="limit_exceeded", tensor=weight.source.name, remedy=f"--memory {2 * (held + band_bytes)}")
    for expert in range(experts):
        whole = opened.files.flat(weight.source, expert * rows * columns, (expert + 1) * rows * columns) if weight.turned else None
        for top in range(0, rows, bands * block_rows):
            bottom = min(rows, top + bands * block_rows)
            if whole is None:
                yield top, opened.files.flat(weight.source, top * columns, bottom * columns)
            else:
                yield expert * rows + top, np.ascontiguousarray(whole.reshape(columns, rows)[:, top:bottom].T).reshape(-1)


def _comparer(target: Bound) -> Callable[[Stored, int, Bits], None]:
    def compare(made: Stored, begin: int, values: Bits) -> None:
        if not np.array_equal(target.files.flat(made, begin, begin + len(values)), values):
            raise CheckpointError("what was written differs from what the source gives", code="DATA_LOSS", reason="digest_mismatch",
                                  tensor=made.name)
    return compare


@dataclass(frozen=True)
class Apart:
    """How far the values of one tensor are apart in two checkpoints."""

    name: str
    elements: int
    greatest: float
    mean: float
    #: Of the elements, where both hold codes.
    equal_codes: Optional[float]
    #: Elements that only one of the two holds as numbers.
    not_numbers: int


def check(a: PathLike, b: PathLike) -> List[Apart]:
    """Compares each tensor of two Hugging Face checkpoints of a model as numbers: codes times their scales where it is quantized.

    CheckpointError: they are of different models, or quantized in a way that is not read.
    """
    opened = [open_checkpoint(folder) for folder in (a, b)]
    try:
        sides = [_Side(one) for one in opened]
        different = sorted(name for name in sides[0].weights.keys() ^ sides[1].weights.keys()
                           if name.rpartition(".")[2] not in _CALIBRATED)
        if different:
            raise CheckpointError("only one of the two checkpoints holds it", reason="tensor_missing", tensor=different[0])
        return [_apart(sides[0], sides[1], name) for name in sides[0].weights if name in sides[1].weights]
    finally:
        for one in opened:
            one.files.close()


class _Side:
    """A checkpoint with its scales told from its weights."""

    def __init__(self, opened: Opened):
        if opened.format != "hf":
            raise CheckpointError(f"{opened.format} is not compared as numbers", remedy="convert it with --to hf")
        self.opened, tensors = opened, opened.ranks[0]
        self.scales: Dict[str, Stored] = {}
        for name, stored in tensors.items():
            for suffix in _SUFFIXES if stored.dtype == "F8_E4M3" else ():
                if name + suffix in tensors:
                    self.scales[name] = tensors[name + suffix]
        beside = {stored.name for stored in self.scales.values()}
        #: Codes of four bits, by the name of the weight that they were made of.
        self._packed: Dict[str, Stored] = {}
        for name, stored in tensors.items():
            for codes, scales in _PACKED:
                weight = name.removesuffix(codes)
                if weight != name and stored.dtype in ("U8", "I32") and weight + scales in tensors:
                    self._packed[weight], self.scales[weight] = stored, tensors[weight + scales]
                    beside |= {name, weight + scales, weight + "_global_scale", weight + "_shape"}
        for name, stored in tensors.items():
            if stored.dtype == "U8" and name + _SUFFIXES[1] in tensors and name + _SECOND_SCALE in tensors:
                self._packed[name], self.scales[name] = stored, tensors[name + _SUFFIXES[1]]
                beside |= {name + _SUFFIXES[1], name + _SECOND_SCALE}
        self.weights = {name: stored for name, stored in tensors.items() if name not in beside} | self._packed
        self._block = self._block_size()

    def _block_size(self) -> Optional[Tuple[int, int]]:
        path = self.opened.config()
        said: Any = json.loads(path.read_text()) if path else {}
        said = said.get("quantization_config") or (said.get("text_config") or {}).get("quantization_config") or {}
        block = said.get("weight_block_size")
        for group in (said.get("config_groups") or {}).values():
            args = group.get("weights") or {}
            block = args.get("block_structure") or ([1, args["group_size"]] if args.get("group_size") else block)
        if said.get("quant_algo") == "MXFP8":
            block = [1, 32]
        return (int(block[0]), int(block[1])) if block else None

    def shape(self, name: str) -> Tuple[int, ...]:
        """Of the weight, however its codes are stored."""
        shape = self.weights[name].shape
        if name not in self._packed:
            return shape
        if len(shape) == 4:  # gpt-oss: experts, outputs, groups, bytes
            return shape[0], 2 * shape[2] * shape[3], shape[1]
        return shape[0], shape[1] * (8 if self._packed[name].dtype == "I32" else 2)

    def kind(self, name: str) -> Optional[str]:
        """What codes it holds; None: numbers."""
        return None if name not in self.scales else self.weights[name].dtype

    def values(self, name: str, top: int, bottom: int) -> NDArray[np.float64]:
        """Rows of a tensor as numbers."""
        stored = self.weights[name]
        if name in self._packed:
            return self._four_bits(name, top, bottom)
        columns = stored.count // stored.shape[0] if stored.shape and stored.shape[0] else 1
        flat = self.opened.files.flat(stored, top * columns, bottom * columns)
        values = _numbers(flat, stored).reshape(bottom - top, columns)
        return values * self._factors(name, stored, top, bottom, columns) if name in self.scales else values

    def codes(self, name: str, top: int, bottom: int) -> Bits:
        """One for each element, in the order in which they are stored."""
        stored = self.weights[name]
        columns = stored.count // stored.shape[0]
        flat = self.opened.files.flat(stored, top * columns, bottom * columns)
        if name not in self._packed:
            return flat
        each = 8 if stored.dtype == "I32" else 2
        codes: Bits = (flat[:, None] >> np.arange(0, 4 * each, 4, dtype=flat.dtype) & 15).reshape(-1).astype(np.uint8)
        return codes

    def _four_bits(self, name: str, top: int, bottom: int) -> NDArray[np.float64]:
        stored, scales = self._packed[name], self.scales[name]
        codes = self.codes(name, top, bottom)
        numbers = codes.astype(np.float64) - 8 if stored.dtype == "I32" else _E2M1[codes]
        per_row = scales.count // scales.shape[0]
        factors = _numbers(self.opened.files.flat(scales, top * per_row, bottom * per_row), scales)
        if len(factors) == 0 or len(numbers) % len(factors):
            raise CheckpointError(f"scales {list(scales.shape)} of codes {list(stored.shape)}", reason="shape_mismatch", tensor=scales.name)
        values: NDArray[np.float64] = (numbers.reshape(len(factors), -1) * factors[:, None]).reshape(bottom - top, -1)
        whole = self.opened.ranks[0].get(name + "_global_scale")
        if whole is not None:
            values = values / _numbers(self.opened.files.flat(whole, 0, 1), whole)
        second = self.opened.ranks[0].get(name + _SECOND_SCALE)
        if second is not None:
            values = values * _numbers(self.opened.files.flat(second, 0, 1), second)
        if len(stored.shape) == 4:  # each expert's with inputs first, as it was
            values = values.reshape(bottom - top, stored.shape[1], -1).swapaxes(1, 2).reshape(bottom - top, -1)
        return values

    def _factors(self, name: str, stored: Stored, top: int, bottom: int, columns: int) -> NDArray[np.float64]:
        """The scale of each element of some rows."""
        scales = self.scales[name]
        values = _numbers(self.opened.files.flat(scales, 0, scales.count), scales)
        rows = stored.shape[0]
        if scales.count == 1:
            return np.broadcast_to(values.reshape(1, 1), (bottom - top, columns))
        if scales.shape in ((rows, 1), (rows,)):
            return values.reshape(rows, 1)[top:bottom]
        block = self._block
        if block is None or scales.shape != (-(-rows // block[0]), -(-columns // block[1])):
            raise CheckpointError(f"scales {list(scales.shape)} of a weight {list(stored.shape)}, whose blocks config.json does not tell",
                                  reason="shape_mismatch", tensor=scales.name)
        return values.reshape(scales.shape)[np.ix_(np.arange(top, bottom) // block[0], np.arange(columns) // block[1])]


def _numbers(flat: Bits, stored: Stored) -> NDArray[np.float64]:
    if stored.dtype == "BF16":
        return (flat.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if stored.dtype == "F8_E4M3":
        return _E4M3[flat]
    if stored.dtype in ("F8_E8M0", "U8"):
        return np.where(flat == 0xff, np.nan, np.exp2(flat.astype(np.float64) - 127))
    if stored.dtype in ("F16", "F32", "F64"):
        kind: Any = {"F16": np.float16, "F32": np.float32, "F64": np.float64}[stored.dtype]
        numbers: NDArray[np.float64] = flat.view(kind).astype(np.float64)
        return numbers
    raise CheckpointError(f"{stored.dtype} is not compared as numbers", reason="dtype_mismatch", tensor=stored.name)


def _e4m3_table() -> NDArray[np.float64]:
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, codes & 7
    values = np.where(exponent == 0, np.ldexp(fraction.astype(np.float64), -9), np.ldexp(8.0 + fraction, exponent - 10))
    values[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -values, values)


_E4M3 = _e4m3_table()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def _apart(a: _Side, b: _Side, name: str) -> Apart:
    shape = a.shape(name)
    if shape != b.shape(name):
        raise CheckpointError(f"{list(shape)} and {list(b.shape(name))}", reason="shape_mismatch", tensor=name)
    rows, count = shape[0] if shape else 1, math.prod(shape)
    step = max(1, _CHECK_BYTES // (8 * max(1, count // max(rows, 1))))
    greatest, total, numbers, equal, others = 0.0, 0.0, 0, 0, 0
    both = a.kind(name) is not None and a.kind(name) == b.kind(name)
    for top in range(0, rows, step):
        bottom = min(rows, top + step)
        left, right = a.values(name, top, bottom), b.values(name, top, bottom)
        with np.errstate(invalid="ignore"):
            difference = np.abs(left - right)
        finite = np.isfinite(difference)
        same = (left == right) | (np.isnan(left) & np.isnan(right))
        others += int((~finite & ~same).sum())
        greatest = max(greatest, float(difference[finite].max(initial=0.0)))
        total += float(difference[finite].sum())
        numbers += int(finite.sum())
        if both:
            equal += int(np.count_nonzero(a.codes(name, top, bottom) == b.codes(name, top, bottom)))
    return Apart(name, count, greatest, total / numbers if numbers else 0.0, equal / count if both and count else None, others)


def as_json(found: Sequence[Apart]) -> Dict[str, object]:
    """What `wwctl quantize check --json` prints."""
    return {"tensors": [{"name": one.name, "elements": one.elements, "max_error": one.greatest, "mean_error": one.mean,
                         "equal_codes": one.equal_codes, "not_numbers": one.not_numbers} for one in found]}


def as_text(found: Sequence[Apart]) -> Iterator[str]:
    """A line for each tensor, those that are farthest apart first."""
    width = max([len(one.name) for one in found] + [6])
    yield f"{'TENSOR':{width}}  {'MAX ERROR':>12}  {'MEAN ERROR':>12}  EQUAL CODES"
    for one in sorted(found, key=lambda one: -one.greatest):
        share = f"{100 * one.equal_codes:10.4f}%" if one.equal_codes is not None else "          -"
        yield (f"{one.name:{width}}  {one.greatest:12.6g}  {one.mean:12.6g}  {share}"
               + (f"  {one.not_numbers} that are numbers on one side only" if one.not_numbers else ""))
