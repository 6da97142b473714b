"""The parallel state of live megatron-core models, and the parallel spec that describes it. No torch needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from weightwire import errors

#: Megatron's dimensions, the fastest first.
_DIMENSIONS = ("tp", "cp", "dp", "pp")
_DECODER_LAYER = re.compile(r"(?:language_model\.)?decoder\.layers\.\d+")
_EXPERT_KINDS = ((".experts.local_experts.", "sequential"), (".experts.weight1", "grouped"),
                 (".experts.linear_fc1.weight0", "te"))
#: Of which the local spec has modules of their own, or none at all.
_TE_NAMES = (".linear_qkv.layer_norm_weight", ".linear_q_up_proj.layer_norm_weight", ".linear_kv_up_proj.layer_norm_weight",
             ".linear_fc1.layer_norm_weight", ".in_proj.layer_norm_weight", ".core_attention.indexer.linear_wq_b.weight")
#: Model types whose MTP layers are there where the spec says so, all in one form. Those of qwen3_5_moe_text have two, which
#: nothing here tells apart: the coordinator's refusal names the words.
_MTP_SAID = frozenset(("nemotron_h", "qwen3_5_text", "qwen3_next"))
#: Of the gated delta rule: checkpoints hold w of it, also where they hold w - 1 of the other norms.
OUT_NORM = ".self_attention.out_norm.weight"


@dataclass(frozen=True)
class RankState:
    """What one rank says of itself."""

    rank: int
    sizes: Mapping[str, int]  #: of tp, cp, dp, pp, ep, etp
    place: Mapping[str, int]  #: this rank's index in each
    layers: tuple[tuple[int, ...], ...]  #: 1-based layer numbers of each model chunk
    names: frozenset[str]  #: of parameters and buffers, without wrappers
    vocab_rows: int  #: of the padded vocabulary in all; 0: this rank has none of it


def chunks_of(models: Any) -> list[Any]:
    """This rank's chunks: a list of them, or one module."""
    return [models] if hasattr(models, "named_parameters") else list(models)


def unwrap(chunk: Any) -> Any:
    """The model inside DDP, Float16Module and the like."""
    while getattr(chunk, "module", None) is not None:
        chunk = chunk.module
    return chunk


def read_state(chunks: Sequence[Any], rank: int) -> RankState:
    """What the modules of this rank say: their process groups, layer numbers and names. No collective."""
    models = [unwrap(chunk) for chunk in chunks]
    sizes, place = _groups(models[0])
    names, rows = set(), 0
    for model in models:
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            names.add(name)
            if name.endswith(("embedding.word_embeddings.weight", "output_layer.weight")):
                rows = tensor.shape[0] * sizes["tp"]
    layers = tuple(tuple(module.layer_number for name, module in model.named_modules()
                         if _DECODER_LAYER.fullmatch(name)) for model in models)
    return RankState(rank, sizes, place, layers, frozenset(names), rows)


def _groups(model: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Sizes and indices from the model's own process groups; from megatron.core.parallel_state where it has none."""
    from megatron.core import parallel_state as mpu
    own = getattr(model, "pg_collection", None)
    fallback = {
        "tp": mpu.get_tensor_model_parallel_group,
        "cp": mpu.get_context_parallel_group,
        "dp": mpu.get_data_parallel_group,
        "pp": mpu.get_pipeline_model_parallel_group,
        "ep": mpu.get_expert_model_parallel_group,
        "etp": mpu.get_expert_tensor_parallel_group,
    }
    sizes, place = {}, {}
    for word, get in fallback.items():
        group = getattr(own, "expt_tp" if word == "etp" else word, None) or get()
        sizes[word], place[word] = group.size(), group.rank()
    return sizes, place


def spec_of(states: Sequence[RankState], config: Mapping[str, Any]) -> str:
    """The spec `megatron:…` of a whole trainer, from what all of its ranks say, in rank order.

    RefusedError names the rank whose coordinates, sizes or layers do not fit the scheme.
    """
    first = states[0]
    for state in states:
        if state.sizes != first.sizes:
            raise _refuse(state, f"parallel sizes {_text(state.sizes)}, but rank 0 has {_text(first.sizes)}",
                          "initialise model parallelism equally on every rank")
    words = [f"{word}{first.sizes[word]}" for word in ("tp", "pp", "cp", "dp")
             if word in ("tp", "pp") or first.sizes[word] > 1]
    order = _order(states)
    if order != "tp-cp-ep-dp-pp":
        words.append(f"order={order}")
    hybrid = any(name.endswith("decoder.final_norm.weight") for state in states for name in state.names)
    words += _layer_words(states, hybrid) + _expert_words(states, order)
    if hybrid and sum(map(len, _chunks(states))) == 2 * (config.get("text_config") or config).get("num_hidden_layers", 0):
        words.append("model=hybrid")
    if any(name.endswith(_TE_NAMES) for state in states for name in state.names):
        words.append("spec=te")
    if any(name.endswith(".mixer.conv1d_weight") for state in states for name in state.names):
        words.append("conv=flat")
    if any(name.endswith(OUT_NORM) for state in states for name in state.names):
        words.append("out_norm=plain")
    rows = {state.vocab_rows for state in states} - {0}
    if len(rows) > 1:
        raise _refuse(first, f"ranks disagree about the padded vocabulary: {sorted(rows)} rows",
                      "build every stage with the same vocabulary")
    words += [f"vocab_pad={count}" for count in rows]
    has_mtp = any(name.removeprefix("language_model.").startswith("mtp.") for s in states for name in s.names)
    if config.get("num_nextn_predict_layers") and not has_mtp:
        words.append("mtp=none")
    if has_mtp and config.get("model_type") in _MTP_SAID:
        words.append("mtp=single")
    return "megatron:" + ",".join(words)


def _order(states: Sequence[RankState]) -> str:
    """Which of the two rank orders that the scheme knows is this world's."""
    sizes = states[0].sizes
    world = sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]
    if world != len(states):
        raise _refuse(states[0], f"{_text(sizes)} make {world} ranks, but torch.distributed has {len(states)}",
                      "open the publisher on exactly the ranks of one model")
    expected = {}
    for order in ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"):
        dims = [d for d in order.split("-") if d != "ep"]
        expected[order] = [_index(state.place, sizes, dims) for state in states]
        if expected[order] == [state.rank for state in states]:
            return order
    wrong = next(i for i, at in enumerate(expected["tp-cp-ep-dp-pp"]) if at != states[i].rank)
    raise _refuse(states[wrong], f"is {_text(states[wrong].place)}, where the order tp-cp-ep-dp-pp has rank "
                  f"{expected['tp-cp-ep-dp-pp'][wrong]}",
                  "initialise Megatron with order tp-cp-ep-dp-pp or tp-cp-ep-pp-dp")


def _index(place: Mapping[str, int], sizes: Mapping[str, int], dims: Sequence[str]) -> int:
    index, stride = 0, 1
    for dim in dims:
        index += place[dim] * stride
        stride *= sizes[dim]
    return index


def _layer_words(states: Sequence[RankState], hybrid: bool) -> list[str]:
    """vpp and, where stages are uneven, the layers of every chunk in the order in which the model passes them.
    `hybrid`: a HybridModel, whose virtual stages are even by chance only.
    """
    vpp = len(states[0].layers)
    chunks = _chunks(states)
    counts = [len(layers) for layers in chunks]
    passed = [layer for layers in chunks for layer in layers]
    if passed != list(range(1, len(passed) + 1)):
        raise _refuse(states[0], f"the stages pass layers {passed}, which is not 1, 2, 3, …",
                      "weightwire reads layer_number of each decoder layer; report this")
    words = [f"vpp{vpp}"] if vpp > 1 else []
    if len(set(counts)) > 1 or (vpp > 1 and hybrid):
        words.append("layers=" + "-".join(map(str, counts)))
    return words


def _chunks(states: Sequence[RankState]) -> list[tuple[int, ...]]:
    """The layer numbers of each model chunk, in the order in which the model passes them."""
    pp, vpp = states[0].sizes["pp"], len(states[0].layers)
    chunks: dict[int, tuple[int, ...]] = {}
    for state in states:
        if len(state.layers) != vpp:
            raise _refuse(state, f"has {len(state.layers)} model chunks, but rank 0 has {vpp}",
                          "pass all chunks of the virtual pipeline")
        for v, layers in enumerate(state.layers):
            at = v * pp + state.place["pp"]
            if chunks.setdefault(at, layers) != layers:
                raise _refuse(state, f"chunk {v} has layers {list(layers)}, another rank of its stage has "
                              f"{list(chunks[at])}", "build all ranks of a stage from the same configuration")
    return [chunks[at] for at in sorted(chunks)]


def _expert_words(states: Sequence[RankState], order: str) -> list[str]:
    kinds = {kind for state in states for name in state.names for part, kind in _EXPERT_KINDS if part in name}
    if not kinds:
        return []
    sizes = states[0].sizes
    dims = [d for d in _DIMENSIONS if d != "pp"]
    for state in states:
        r = _index(state.place, sizes, dims)
        etp, ep = r % sizes["etp"], r // sizes["etp"] % sizes["ep"]
        if (state.place["etp"], state.place["ep"]) != (etp, ep):
            raise _refuse(state, f"holds experts as etp {state.place['etp']}, ep {state.place['ep']}, where the order "
                          f"{order} has etp {etp}, ep {ep}", "initialise Megatron with its default order")
    return [f"ep{sizes['ep']}", f"etp{sizes['etp']}", f"experts={min(kinds)}"]


def _text(values: Mapping[str, int]) -> str:
    return ", ".join(f"{word} {value}" for word, value in values.items())


def _refuse(state: RankState, message: str, remedy: str) -> errors.RefusedError:
    return errors.RefusedError(f"rank {state.rank}: {message}", code="INVALID_ARGUMENT", reason="invalid_request",
                               rank=str(state.rank), remedy=remedy)
