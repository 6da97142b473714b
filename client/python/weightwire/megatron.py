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
from typing import Any, Iterator, Mapping, Sequence, Union

import torch
import torch.distributed as dist

from weightwire.adapter import Live, LivePublisher, is_freed, meta_of
from weightwire.boxes import Held
from weightwire.megatron_state import RankState, read_state, spec_of, unwrap
from weightwire.publisher import Lineage

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
    chunks = _chunks(models)
    if not dist.is_initialized():
        raise RuntimeError("megatron-core runs under torch.distributed, which is not initialised")
    state = read_state(chunks, dist.get_rank())
    states: list[RankState] = [state] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return spec_of(states, config_of(config))


def named_tensors(models: Union[torch.nn.Module, Sequence[torch.nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and the routers' correction, by the scheme's names: "vpp1." before those of chunk 1."""
    chunks = _chunks(models)
    for v, chunk in enumerate(chunks):
        prefix = f"vpp{v}." if len(chunks) > 1 else ""
        for name, tensor in local_tensors(chunk):
            yield prefix + name, tensor


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


def _chunks(models: Union[torch.nn.Module, Sequence[torch.nn.Module]]) -> list[torch.nn.Module]:
    return [models] if isinstance(models, torch.nn.Module) else list(models)


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


def _read(models: Union[torch.nn.Module, Sequence[torch.nn.Module]]) -> list[Live]:
    return [Live(Held(meta_of(name, tensor)), tensor) for name, tensor in named_tensors(models)]


class Publisher(LivePublisher):
    """Publishes a Megatron model from every rank, each its own shards; replicas share the sending.

    models: this rank's chunks, as they were built; config: the model's config.json. Of mbridge's models that is
    `bridge.hf_config`, of Megatron-Bridge's `bridge.hf_pretrained.config`.
    spec: the parallel spec, where it is not to be read from the modules; reading it is one collective
    See LivePublisher for what `publish` promises. The model's family must be one that weightwire knows.
    """

    def __init__(self, models: Union[torch.nn.Module, Sequence[torch.nn.Module]], config: Config, *,
                 spec: str | None = None, group: str = "trainer", job: str = "", agent: str | None = None,
                 timeout: float = 30.0, lineage: Lineage = None):
        text = json.dumps(config_of(config))
        #: What was found, e.g. "megatron:tp2,pp2,vocab_pad=256".
        self.spec = spec or parallel_spec(models, config)
        super().__init__(lambda: _read(models),
                         lambda base, lives: base.bind(text, self.spec, [live.held.meta for live in lives]),
                         rank=None, world_size=None, group=group, job=job, agent=agent, timeout=timeout,
                         lineage=lineage)
