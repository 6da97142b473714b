"""`torch_dist`: torch.distributed.checkpoint as Megatron's dist_checkpointing writes it.

Its tensors are those of an unsharded Megatron model, in blocks, layers (and experts) stacked on leading axes. Taken
apart along these they are what the layout `megatron:tp1` holds. Reading needs no torch and imports nothing that the
pickled `.metadata` names; writing lets torch write the files, empty, which are then filled in place.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from weightwire.checkpoint import pickles, torch_files
from weightwire.checkpoint.formats import Opened, Wanted, padding
from weightwire.checkpoint.stored import CheckpointError, Files, Region, Stored, damaged, plain
from weightwire.checkpoint.torch_files import Stack
from weightwire.memory import FROM_TORCH, TensorMeta, dtype_bytes

METADATA = ".metadata"
COMMON = "common.pt"
#: The same as an object of the checkpoint.
_COMMON_STATE = re.compile(r"common_state(/shard_[0-9._]+)?")
_EXPERTS = "mlp.experts.experts."
_LOCAL_EXPERTS = "mlp.experts.local_experts."
#: mcore's local layer spec calls the norm before experts as if it were fused; Transformer Engine's does not.
_MOE_NORM, _DENSE_NORM = "pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"
#: What a training checkpoint holds besides weights.
_OTHER = re.compile(r"(.*_extra_state(/.*)?|(chained_\d+\.)?optimizer\..*|rng_state.*|rerun_state_machine.*|opt_param_.*)")
#: Before the name of a parameter and of its state: optimizer.state.exp_avg.decoder.layers…
STATE_PREFIX = "optimizer.state."
_BY_PARAMETER = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([a-z0-9_]+)\..+")
#: What other sharding types of megatron-core's distributed optimizer store.
_OTHER_STATES = {
    "dp_reshardable": re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\..*bucket_idx_\d+\..*"),
    "dp_zero_gather_scatter": re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.param_state(/.*)?")}
_SINGLE_EXPERT = re.compile(re.escape(_EXPERTS) + r"(\d+)\.(.*)")
_STACK = re.compile(r"((?:optimizer\.state\.[a-z0-9_]+\.)?(?:decoder|mtp)\.layers\.)(\d+\.)?((?:transformer_layer\.)?)(.*)")


def found_at(folder: Path) -> bool:
    return (folder / METADATA).is_file()


def open_at(folder: Path) -> Opened:
    opened = _open(folder, lambda key: None if _OTHER.fullmatch(key) else key)
    try:
        common = read_common(folder) or {}
    except CheckpointError as error:
        opened.notes.append(f"what lies beside the weights cannot be read: {error}")
        return opened
    opened.left_out += [f"{key} {common[key]}" for key in ("iteration",) if type(common.get(key)) is int]
    return opened


def read_common(folder: Path) -> Optional[Dict[Any, Any]]:
    """What is the same on all ranks (iteration, the optimizer's step and hyperparameters): in common.pt, or, as megatron-core
    saves it from 0.19 on, in an object among the tensors. None: there is neither. CheckpointError (DATA_LOSS): malformed."""
    files, where = Files(folder), COMMON
    try:
        if (folder / COMMON).is_file():
            content = pickles.TorchZip(files, COMMON).content
        else:
            place = _object(_metadata(folder), _COMMON_STATE)
            if place is None:
                return None
            where = plain(place.field("relative_path"), METADATA)
            start, size = _numbers((place.field("offset"), place.field("length")))
            content = pickles.TorchZip(files, where, start, size).content
    except (AttributeError, TypeError, ValueError) as error:
        raise damaged(METADATA, f"not a checkpoint's description: {error}") from error
    finally:
        files.close()
    if isinstance(content, (list, tuple)) and len(content) == 1:
        content = content[0]
    if not isinstance(content, dict):
        raise damaged(where, "no mapping")
    return content


def _object(metadata: Any, form: "re.Pattern[str]") -> Any:
    """Where the object whose key is of this form lies; None: nowhere."""
    for key, place in metadata.field("storage_data").items():
        if isinstance(key.field("fqn"), str) and form.fullmatch(key.field("fqn")):
            if place.field("transform_descriptors"):
                raise damaged(METADATA, f"{key.field('fqn')} is stored transformed")
            return place
    return None


def _metadata(folder: Path) -> Any:
    try:
        if (folder / METADATA).stat().st_size > pickles.PICKLE_BYTES_MAX:
            raise damaged(METADATA, "too large a pickle")
        return pickles.load((folder / METADATA).read_bytes(), METADATA)
    except OSError as error:
        raise damaged(METADATA, str(error)) from error


def open_group(folder: Path, group: str) -> Opened:
    """Instead of the weights, the states of their optimizer of this name, where they are stored by parameter: exp_avg,
    exp_avg_sq, and the fp32 master, which megatron-core's distributed optimizer (`fully_reshardable`) calls `param`, its
    others fp32_param.

    CheckpointError: there are none (NOT_FOUND), or they are stored otherwise (UNIMPLEMENTED); says how.
    """
    pattern = re.compile(rf"(?:chained_\d+\.)?optimizer\.state\.{re.escape(group)}\.(?:module\.)*(.+)")
    opened = _open(folder, lambda key: found.group(1) if (found := pattern.fullmatch(key)) else None)
    if opened.ranks[0]:
        return opened
    kinds = sorted({kind for key in opened.left_out for kind, form in _OTHER_STATES.items() if form.fullmatch(key)})
    has = sorted({found.group(1) for key in opened.left_out if (found := _BY_PARAMETER.fullmatch(key))})
    if kinds:
        raise _unreadable(folder, group, f"but an optimizer saved as {kinds[0]}, cut by that job's own ranks")
    raise CheckpointError(f"{folder} has no states {group!r} by parameter, but {', '.join(has) or 'none at all'}",
                          code="NOT_FOUND", remedy="name one that it has")


def _unreadable(folder: Path, what: str, but: str) -> CheckpointError:
    return CheckpointError(f"{folder} has no states {what!r} by parameter, {but}", code="UNIMPLEMENTED",
                           remedy="save it with megatron-core's distrib_optim_sharding_type='fully_reshardable' "
                                  "(Megatron-LM: --dist-ckpt-optim-fully-reshardable)")


def open_unsealed(folder: Path, wanted: Wanted) -> Opened:
    """What `lay_out` made: weights, and an optimizer's states by their stored names."""
    return _open(folder, lambda key: key if key.startswith(STATE_PREFIX) or not _OTHER.fullmatch(key) else None)


def _open(folder: Path, named: Callable[[str], Optional[str]]) -> Opened:
    """`named`: what a stored key is called among the model's; None leaves it out."""
    metadata = _metadata(folder)
    files = Files(folder)
    tensors: Dict[str, Stored] = {}
    left_out: List[str] = []
    zips: List[Tuple[str, int, int]] = []
    try:
        described = metadata.field("state_dict_metadata")
        places = {(key.field("fqn"), _numbers(key.field("offset"))): place
                  for key, place in metadata.field("storage_data").items()}
        for key, entry in described.items():
            name = named(key)
            if name is None or not entry.path.endswith(".TensorStorageMetadata"):
                left_out.append(key)
                continue
            weight = described.get(name)
            if weight is not None and _numbers(weight.field("size")) != _numbers(entry.field("size")):
                raise _unreadable(folder, key, "but one saved as fully_sharded_model_space, flat and cut by that job's own ranks")
            stored = replace(_stored(files, key, entry, places, zips), name=name)
            for local in _unstack(stored):
                tensors[local.name] = local
    except (AttributeError, TypeError, ValueError) as error:
        raise damaged(METADATA, f"not a checkpoint's description: {error}") from error
    for name in [name for name in tensors if name.endswith(_DENSE_NORM)]:
        at = name[:-len(_DENSE_NORM)]
        if f"{at}mlp.router.weight" in tensors and at + _MOE_NORM not in tensors:
            tensors[at + _MOE_NORM] = replace(tensors.pop(name), name=at + _MOE_NORM)
    spec = "megatron:spec=te,experts=sequential" + padding("embedding.word_embeddings.weight", tensors, 1)
    return Opened("torch_dist", spec, files, [tensors], left_out, zips)


def _numbers(size: Any) -> Tuple[int, ...]:
    """A pickled torch.Size; () for none, as objects have it."""
    numbers = () if size is None else tuple(size.args[0]) if isinstance(size, pickles.Inert) else tuple(size)
    if len(numbers) > 8 or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in numbers):
        raise ValueError(f"{str(numbers)[:80]} is no size")
    return numbers


def _stored(files: Files, key: str, entry: Any, places: Dict[Any, Any], zips: List[Tuple[str, int, int]]) -> Stored:
    """A tensor as it is stored, its blocks located in the items that hold them."""
    dtype = FROM_TORCH.get(_dtype(entry.field("properties")).rsplit(".", 1)[-1])
    shape, regions = _numbers(entry.field("size")), []
    if dtype is None:
        raise damaged(METADATA, "its dtype is not known", tensor=key)
    for chunk in entry.field("chunks"):
        begin, extent = _numbers(chunk.field("offsets")), _numbers(chunk.field("sizes"))
        place = places.get((key, begin))
        if place is None or place.field("transform_descriptors"):
            raise damaged(METADATA, f"the block at {begin} is stored nowhere, or transformed", tensor=key)
        file = plain(place.field("relative_path"), METADATA)
        if not (files.folder / file).is_file():
            raise damaged(file, "is missing", tensor=key)
        start, size = _numbers((place.field("offset"), place.field("length")))
        item = pickles.TorchZip(files, file, start, size)
        zips.append((file, start, size))
        held = item.tensor(item.content, key)
        if held is None or held.dtype != dtype or held.shape != extent:
            raise damaged(file, f"the item for the block at {begin} does not hold {dtype} {list(extent)}", tensor=key)
        regions.append(replace(held.regions[0], begin=begin))
    return Stored(key, dtype, shape, tuple(regions))


def _dtype(properties: Any) -> str:
    """TensorProperties pickle as a tuple, the dtype first, or as a dict of attributes."""
    state = properties.state
    found = state.get("dtype") if isinstance(state, dict) else state[0]
    return str(found.path if isinstance(found, pickles.Inert) else getattr(found, "path", ""))


def _unstack(stored: Stored) -> Iterator[Stored]:
    """The tensors of single layers and experts, by their local names."""
    names, lead = _local_names(stored.name, stored.shape)
    parts: List[List[Region]] = [[] for _ in names]
    for region in stored.regions:
        size = math.prod(region.shape[lead:]) * dtype_bytes(stored.dtype)
        single = math.prod(region.shape[:lead]) == 1
        for number, index in enumerate(itertools.product(*map(range, region.shape[:lead]))):
            place = 0
            for axis, i in enumerate(index):
                place = place * stored.shape[axis] + region.begin[axis] + i
            if place < len(parts):  # else the block leaves the tensor, and its place stays uncovered
                parts[place].append(Region(region.file, region.offset + number * size, region.begin[lead:],
                                           region.shape[lead:], region.crc if single else None))
    for name, regions in zip(names, parts):
        yield Stored(name, stored.dtype, stored.shape[lead:], tuple(regions))


def _local_names(key: str, shape: Tuple[int, ...]) -> Tuple[List[str], int]:
    """The local tensors that a stored one stacks, and on how many leading axes."""
    match = _STACK.fullmatch(key)
    if not match:
        return [key], 0
    prefix, layer, inner, rest = match.groups()
    single = _SINGLE_EXPERT.fullmatch(rest)  # mcore with singleton_local_shards
    if single:
        rest = f"{_LOCAL_EXPERTS}{single.group(1)}.{single.group(2)}"
    experts = rest.startswith(_EXPERTS)
    lead = (not layer) + experts
    if len(shape) < lead or math.prod(shape[:lead]) > 1 << 22:
        raise damaged(METADATA, f"no stack of layers: {list(shape)}", tensor=key)
    names = [f"{prefix}{layer}{inner}"] if layer else [f"{prefix}{n}.{inner}" for n in range(shape[0])]
    if not experts:
        return [at + rest for at in names], lead
    return [f"{at}{_LOCAL_EXPERTS}{e}.{rest[len(_EXPERTS):]}" for at in names for e in range(shape[lead - 1])], lead


def lay_out(folder: Path, wanted: Wanted) -> None:
    stacks = stacked(wanted.ranks[0])
    if "spec=local" in wanted.to:
        for stack in stacks:
            stack.key = stack.key.replace(_MOE_NORM, _DENSE_NORM)
    torch_files.write_torch_dist(folder, stacks, wanted.common)


def seal(opened: Opened, wanted: Wanted) -> None:
    for file, start, size in opened.zips:
        pickles.TorchZip(opened.files, file, start, size).write_sums()


def stacked(tensors: Sequence[TensorMeta]) -> List[Stack]:
    """How the tensors are stored: layers that are all alike on a leading axis, others each under its own name."""
    layers: Dict[str, Dict[str, Tuple[str, Tuple[int, ...]]]] = {}
    for t in tensors:
        match = _STACK.fullmatch(t.name)
        if match and match.group(1).endswith("decoder.layers."):
            layers.setdefault(match.group(2), {})[match.group(1) + match.group(4)] = (t.dtype, t.shape)
    alike = len({json.dumps(sorted(layer.items())) for layer in layers.values()}) == 1
    made: Dict[str, Stack] = {}
    for t in tensors:
        key, index = t.name, []
        match = _STACK.fullmatch(t.name)
        if match:
            prefix, layer, inner, rest = match.groups()
            if alike and prefix.endswith("decoder.layers."):
                layer, index = "", [int(layer[:-1])]
            expert = re.fullmatch(re.escape(_LOCAL_EXPERTS) + r"(\d+)\.(.*)", rest)
            if expert:
                rest, index = _EXPERTS + expert.group(2), [*index, int(expert.group(1))]
            key = prefix + layer + inner + rest
        stack = made.setdefault(key, Stack(key, t.dtype, t.shape, []))
        stack.places.append(tuple(index))
        if (stack.dtype, stack.shape) != (t.dtype, t.shape):
            raise CheckpointError(f"layers or experts differ: {stack.dtype} {list(stack.shape)} and {t.dtype} "
                                  f"{list(t.shape)}, which torch_dist cannot stack", tensor=t.name)
    return list(made.values())
