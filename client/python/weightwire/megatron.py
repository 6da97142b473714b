"""megatron-core trainers, plain or built by mbridge or Megatron-Bridge. No gather.

>>> publisher = weightwire.megatron.Publisher(models, "path/to/config.json")     # on every rank
>>> publisher.publish(step).wait_released(timeout=60)

`models` are this rank's chunks as Megatron's own loops have them (a list, or one module), wrapped in DDP and
Float16Module or not. How the model is parallel is read from the modules on every rank, compared with the rank
order of weightwire's `megatron` scheme, and told to the coordinator, which compares every shape.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any, Iterator, Mapping, Sequence, Union, cast

import torch
import torch.distributed as dist

from weightwire import megatron_options
from weightwire.adapter import Live, LivePublisher, Model, frozen_places, is_freed, meta_of, refuse
from weightwire.boxes import Held
from weightwire.device_choice import DeviceChoice
from weightwire.export_check import Export
from weightwire.megatron_state import RankState, chunks_of, read_state, spec_of, unwrap
from weightwire.memory import Arrays
from weightwire.publisher import DeltaMode, Lineage
from weightwire.session import scheme_layout

#: The model's config.json: as a mapping, as the path of the file or its folder, or as a transformers config.
Config = Union[Mapping[str, Any], str, "os.PathLike[str]", Any]


def config_of(config: Config) -> dict[str, Any]:
    """config.json as a dictionary."""
    if hasattr(config, "to_json_string"):
        return dict(json.loads(config.to_json_string()))
    if isinstance(config, Mapping):
        return dict(config)
    path = os.fspath(config)
    with open(os.path.join(path, "config.json") if os.path.isdir(path) else path) as text:
        return dict(json.load(text))


def parallel_spec(models: Union[torch.nn.Module, Sequence[torch.nn.Module]], config: Config) -> str:
    """The spec `megatron:…` of the running trainer. Every rank must call it: ranks tell each other where they are.

    RefusedError when the ranks are ordered in a way that the scheme does not know, or disagree; it names the rank.
    """
    return _place(models, config_of(config))[0]


def _place(models: Union[torch.nn.Module, Sequence[torch.nn.Module], None], config: Mapping[str, Any]) -> tuple[str, int, int]:
    """The spec, and of the ranks that share the model this one's number and how many they are; (…, 0, 0): it has nothing of it."""
    if not dist.is_initialized():
        raise RuntimeError("megatron-core runs under torch.distributed, which is not initialised")
    mine = read_state(megatron_options.checked(models)[0], dist.get_rank()) if models is not None else None
    states: list[RankState | None] = [mine] * dist.get_world_size()
    dist.all_gather_object(states, mine)
    shares = [state for state in states if state is not None]
    if not shares:
        raise refuse("no rank has anything of the model", remedy="give the chunks on the ranks that hold it, None on the others")
    spec = spec_of([replace(state, rank=rank) for rank, state in enumerate(shares)], config)
    return (spec, shares.index(mine), len(shares)) if mine is not None else (spec, 0, 0)


def model(models: Union[torch.nn.Module, Sequence[torch.nn.Module], None], config: Config, *, verify: Export | None = None) -> Model:
    """One of the models of a `weightwire.models.Publisher`. Every rank of torch.distributed calls it, with None for `models` where
    it has nothing of it.

    How the model is parallel is read from its own process groups (`pg_collection` of its modules; from
    megatron.core.parallel_state where it has none), so that several may be parallel in different ways. Arguments as Publisher's;
    `verify` is called on the ranks that share the model.
    """
    described = config_of(config)
    spec, rank, world_size = _place(models, described)
    chunks = chunks_of(models) if models is not None else []
    text = json.dumps(described)
    return Model(lambda: _read(chunks, described) if chunks else [],
                 lambda lives: scheme_layout(text, spec, [live.held.meta for live in lives]), rank, world_size,
                 lambda: megatron_options.gather_delayed(chunks), verify, lambda _: _rank_boxes(text, spec, rank))


def _rank_boxes(config_text: str, spec: str, rank: int) -> list[Held]:
    from weightwire.checkpoint.planner import planner_of

    return planner_of(config_text).rank_boxes(spec, rank)


def named_tensors(models: Union[torch.nn.Module, Sequence[torch.nn.Module]],
                  config: Config | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the routers' correction, by the scheme's names: "vpp1." before those of chunk 1. For
    `checkpoint.Contents`, to save them and to fill them.

    With `overlap_param_gather` they are gathered first, which every rank of a data-parallel group must call.
    RefusedError: an option of megatron-core has made them other elements than the scheme says; `config`, the model's
    config.json, says which norms are zero-centred there
    """
    chunks, inner = megatron_options.checked(models)
    megatron_options.refuse_transforms(inner, config_of(config) if config is not None else {})
    megatron_options.gather_delayed(chunks)
    for name, _, tensor in _tensors(chunks):
        yield name, tensor


def _tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Of each tensor its scheme's name, the same without its chunk, and itself."""
    for v, chunk in enumerate(chunks):
        prefix = f"vpp{v}." if len(chunks) > 1 else ""
        options = getattr(unwrap(chunk), "config", None)
        for name, tensor in local_tensors(chunk):
            for own, part in _as_before(options, name, tensor):
                yield prefix + own, own, part


def _as_before(options: Any, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """By the names that megatron-core had before 0.17: its MTP layer's new one, and, with `mla_down_proj_fusion`, the two
    down-projections of latent attention that it keeps in one matrix, and their norm."""
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")
    before, fused, after = name.rpartition("self_attention.linear_qkv_down_proj.")
    if not fused:
        yield name, tensor
    elif after == "layer_norm_weight":
        yield f"{before}input_layernorm.weight", tensor
    elif after == "weight":
        whole = options.q_lora_rank + options.kv_lora_rank + options.qk_pos_emb_head_dim
        rows = options.q_lora_rank * len(tensor) // whole  # of each tensor-parallel rank, where it is cut
        yield f"{before}self_attention.linear_q_down_proj.weight", tensor[:rows]
        yield f"{before}self_attention.linear_kv_down_proj.weight", tensor[rows:]
    else:
        yield name, tensor


def local_tensors(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the routers' correction (a buffer) of one chunk, by the names of the model in its wrappers.

    A parameter whose storage mcore's or verl's offloading has taken away is read from its copy on the host.
    """
    model = unwrap(chunk)
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        yield name, _offloaded(chunk, tensor) if is_freed(tensor) else tensor
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            yield name, buffer.detach()


def _offloaded(chunk: torch.nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """The host's copy of a freed parameter, or the parameter itself when there is none.

    mcore's DDP keeps parameters in flat buffers; offloading resizes the buffer's storage to 0 and leaves a copy in
    `param_data_cpu` (mcore) or `param_data.cpu_data` (verl).
    """
    for buffer in _ddp_buffers(chunk):
        flat = buffer.param_data
        if flat is None or flat.untyped_storage()._cdata != tensor.untyped_storage()._cdata:
            continue
        host = getattr(buffer, "param_data_cpu", None)
        host = getattr(flat, "cpu_data", None) if host is None else host
        if host is not None:
            return host.view(-1)[tensor.storage_offset():tensor.storage_offset() + tensor.numel()].view(tensor.shape)
    return tensor


def _ddp_buffers(chunk: Any) -> Iterator[Any]:
    while chunk is not None:
        for attribute in ("buffers", "expert_parallel_buffers"):
            found = getattr(chunk, attribute, None)
            if isinstance(found, list):  # of a plain module it is a method
                yield from found
        chunk = getattr(chunk, "module", None)


def _read(chunks: Sequence[torch.nn.Module], config: Mapping[str, Any]) -> list[Live]:
    options = getattr(unwrap(chunks[0]), "config", None)
    frozen = frozen_places(map(unwrap, chunks))
    lives = []
    for name, own, tensor in _tensors(chunks):
        meta = megatron_options.fixed_dtype(meta_of(name, tensor))
        lives.append(Live(Held(meta), tensor, megatron_options.transform(options, config, own, tensor.shape),
                          None if own.endswith(".expert_bias") else tensor.data_ptr() in frozen))
    return lives


class Publisher(LivePublisher):
    """Publishes a Megatron model from every rank, each its own shards; replicas share the sending.

    models: this rank's chunks, as they were built; config: the model's config.json. Of mbridge's models that is
    `bridge.hf_config`, of Megatron-Bridge's `bridge.hf_pretrained.config`.
    spec: the parallel spec, where it is not to be read from the modules; reading it is one collective
    See LivePublisher for what `publish` promises. The model's family must be one that weightwire knows.

    Options of megatron-core that move, permute, shift or delay parameters are followed, or refused by name:
    docs/trainers.md. With `overlap_param_gather`, opening it and every `publish` gather what the optimizer has left to the
    next forward pass.

    verify: `lambda: bridge.export_hf_weights(models)` of Megatron-Bridge, `lambda: bridge.export_weights(models)` of mbridge
    """

    def __init__(self, models: Union[torch.nn.Module, Sequence[torch.nn.Module]], config: Config, *,
                 spec: str | None = None, group: str = "trainer", job: str = "", agent: str | None = None,
                 timeout: float = 30.0, lineage: Lineage = None, verify: Export | None = None, verify_every: int = 0,
                 device: DeviceChoice = None, delta: DeltaMode = None):
        described, chunks = config_of(config), chunks_of(models)
        text = json.dumps(described)
        #: What was found, e.g. "megatron:tp2,pp2,vocab_pad=256".
        self.spec = spec or parallel_spec(chunks, described)
        if spec:
            megatron_options.checked(chunks)
        super().__init__(lambda: _read(chunks, described),
                         lambda base, lives: cast(Arrays, base.bind(text, self.spec, [live.held.meta for live in lives])),
                         rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage, before=lambda: megatron_options.gather_delayed(chunks), verify=verify,
                         verify_every=verify_every, device=device, delta=delta)
        self._config_text = text

    def _held(self, lives: Sequence[Live]) -> list[Held]:
        return _rank_boxes(self._config_text, self.spec, self.rank)
