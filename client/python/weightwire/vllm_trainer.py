"""vLLM's own trainer-side interface (`TrainerWeightTransferEngine`, since vLLM 0.26) with weightwire below it.

>>> from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
>>> from weightwire import fsdp, vllm_trainer
>>> vllm_trainer.register()
>>> engine = WeightTransferTrainerFactory.trainer_init(
...     vllm_trainer.InitInfo(rank=rank, publisher=fsdp.Publisher(model)), client=client)
>>> engine.send_weights()                                   # on every rank

`send_weights` publishes the next version and returns when it is staged on every engine. The engines' side of the
update is weightwire.vllm.EngineDriver's, which learns of the version from its agent: `client` is never called.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, ClassVar, Iterable, cast

import torch

try:
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
except ImportError as error:
    raise ImportError(f"this vLLM has no trainer-side interface that weightwire knows ({error}); vLLM has one since 0.26. "
                      "weightwire.torch, fsdp and megatron publish without it") from error

from weightwire import boxes
from weightwire.adapter import Live, LivePublisher, as_tensor, meta_of, place, refuse
from weightwire.device_choice import DeviceChoice
from weightwire.memory import Arrays, TensorMeta
from weightwire.publisher import DeltaMode, Lineage, Publisher
from weightwire.torch import BoxPublisher, Reading


@dataclass
class InitInfo(TrainerInitInfo):
    """How a trainer rank publishes.

    publisher: an open publisher of this rank (weightwire.torch, fsdp, megatron): every rank publishes its own shards.
        Without it a `source` is needed. Where it has `iter_local` (vLLM 0.33) every rank publishes the pieces that it owns;
        else rank 0 publishes whole tensors, and the other ranks iterate them alongside.
    world_size: of the ranks that publish pieces; torch.distributed's when not given
    first_version: what the first `send_weights` publishes; each later one publishes the next number
    device: of a source that has `iter_local`, without a `publisher`: as in weightwire.torch.Publisher
    lineage: without a `publisher`, which has its own: that of Publisher.publish, for a trainer that goes on from an earlier
        step than what is committed
    delta: without a `publisher`: as in weightwire.Publisher
    """

    backend: ClassVar[str] = "weightwire"

    publisher: LivePublisher | None = None
    first_version: int = 1
    group: str = "trainer"
    job: str = ""
    agent: str | None = None
    timeout: float = 30.0
    deadline: float = 120.0
    lineage: Lineage = None
    world_size: int | None = None
    device: DeviceChoice = None
    delta: DeltaMode = None


class TrainerEngine(TrainerWeightTransferEngine):
    """See the module. Not for use from several threads at once."""

    init_info_cls = InitInfo

    def __init__(self, info: InitInfo, *, client: Any, source: WeightSource | None):
        if info.publisher is None and source is None:
            raise ValueError("weightwire needs InitInfo(publisher=…) or a source of whole tensors")
        known = inspect.signature(TrainerWeightTransferEngine.__init__).parameters
        more = {"config": None, "rank": info.rank}  # the one in vLLM 0.26 alone, the other since 0.33
        super().__init__(client=client, source=source, is_sender=info.rank == 0,
                         **{name: value for name, value in more.items() if name in known})
        self._info, self._version = info, info.first_version
        self._publisher, self._whole = info.publisher, None  # type: LivePublisher | None, _Whole | None
        if self._publisher is None and has_pieces(source):
            self._publisher = _pieces_publisher(info, source)
        elif self._publisher is None and self.is_sender:
            self._whole = _Whole(info, source)

    @classmethod
    def trainer_init(cls, init_info: InitInfo, *, client: Any, source: WeightSource | None = None,
                     config: Any = None) -> "TrainerEngine":
        """`config` is vLLM 0.26's, which gives one beside the init info; nothing of it is needed."""
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publishes the next version. Raises what `publish` and `wait_released` raise; the number is then used up."""
        version, self._version = self._version, self._version + 1
        deadline = self._info.deadline
        if self._publisher is not None:
            self._publisher.publish(version, deadline=deadline).wait_released(deadline)
        elif self._whole is not None:
            self._whole.send(version, deadline)
        else:
            for _ in whole_tensors(self.source):  # its collectives need every rank
                pass

    def shutdown(self) -> None:
        """Leaves the group, unless the publisher is the caller's."""
        if self._whole is not None:
            self._whole.close()
        if self._publisher is not None and self._info.publisher is None:
            self._publisher.close()


def metadata_of(source: Any) -> list[Any]:
    """Of every parameter: a method until vLLM 0.32, a property since."""
    found = source.metadata
    return list(found() if callable(found) else found)


def whole_tensors(source: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """One pass over the whole tensors: by iteration until vLLM 0.32, by `iter_full` since."""
    pairs: Iterable[tuple[str, torch.Tensor]] = source.iter_full() if hasattr(source, "iter_full") else source
    return pairs


def has_pieces(source: Any) -> bool:
    """Whether each rank can be asked for the pieces that it owns, and where they lie."""
    return bool(hasattr(source, "implements_iter_local") and source.implements_iter_local())


def _pieces_publisher(info: InitInfo, source: Any) -> LivePublisher:
    rank, world_size = place(info.rank, info.world_size) if info.world_size else place(None, None)
    if rank != info.rank:
        raise refuse(f"InitInfo says rank {info.rank}, torch.distributed rank {rank}", remedy="give InitInfo(world_size=…), too")
    return BoxPublisher(lambda: read_pieces(source, rank), rank=rank, world_size=world_size, group=info.group, job=info.job,
                        agent=info.agent, timeout=info.timeout, lineage=info.lineage, device=info.device, delta=info.delta)


def read_pieces(source: Any, rank: int) -> Reading:
    """What `rank` holds by `iter_local`, and what it is part of."""
    metas = {meta.name: meta for meta in metadata_of(source)}
    canonical = {name: meta_of(name, torch.empty(0, dtype=meta.dtype), meta.shape) for name, meta in metas.items()}
    lives = []
    for name, tensor in source.iter_local():
        held = piece_of(metas[name], canonical[name], rank)
        if tuple(tensor.shape) != held.meta.shape or tensor.dtype != metas[name].dtype:
            raise refuse(f"iter_local yields {tensor.dtype} of shape {tuple(tensor.shape)}, and by its metadata rank {rank} owns "
                         f"{metas[name].dtype} of shape {held.meta.shape}", tensor=name)
        lives.append(Live(held, tensor.detach()))
    return canonical, lives


def piece_of(meta: Any, whole: TensorMeta, rank: int) -> boxes.Held:
    """Of a vLLM ParamMeta: the outer axes of the mesh cut first, each as torch.chunk does."""
    begin, extent = [0] * len(whole.shape), list(whole.shape)
    at = meta.owners.index(rank) if meta.placements else 0
    coordinates: list[int] = []
    for size in reversed(meta.mesh_shape or ()):
        at, coordinate = divmod(at, size)
        coordinates.insert(0, coordinate)
    for size, coordinate, placement in zip(meta.mesh_shape or (), coordinates, meta.placements or ()):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            chunk = -(-extent[dim] // size)
            low = min(coordinate * chunk, extent[dim])
            begin[dim], extent[dim] = begin[dim] + low, min(chunk, extent[dim] - low)
    return boxes.block(whole.name, whole.dtype, begin, extent)


class _Whole:
    """Rank 0 of a source of whole tensors: one at a time into the shared memory."""

    def __init__(self, info: InitInfo, source: WeightSource):
        self._source = source
        metas = [meta_of(m.name, torch.empty(0, dtype=m.dtype), m.shape) for m in metadata_of(source)]
        self._publisher = Publisher(rank=0, world_size=1, group=info.group, job=info.job, agent=info.agent,
                                    timeout=info.timeout, lineage=info.lineage, delta=info.delta)
        layout = boxes.submission({m.name: m for m in metas}, [boxes.whole(m) for m in metas])
        arrays = cast(Arrays, self._publisher.bind_boxes(layout))
        self._shared = {m.name: as_tensor(arrays[m.name], m) for m in metas if arrays[m.name].size > 0}

    def send(self, version: int, deadline: float) -> None:
        self._publisher.reclaim()  # a version that was not waited for to its end may still be read
        with torch.no_grad():
            for name, tensor in whole_tensors(self._source):
                if name in self._shared:
                    self._shared[name].copy_(tensor)
        self._publisher.publish(version, deadline=deadline).wait_released(deadline)

    def close(self) -> None:
        self._publisher.close()


def register() -> None:
    """Makes "weightwire" known to vLLM's factory of trainer engines. Idempotent."""
    if InitInfo.backend not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(InitInfo.backend, TrainerEngine)
