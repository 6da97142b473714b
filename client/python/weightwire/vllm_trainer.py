"""vLLM's own trainer-side interface (`TrainerWeightTransferEngine`, vLLM 0.32) with weightwire below it.

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

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine, WeightSource
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from weightwire import boxes
from weightwire.adapter import LivePublisher, as_tensor, meta_of
from weightwire.publisher import Lineage, Publisher


@dataclass
class InitInfo(TrainerInitInfo):
    """How a trainer rank publishes.

    publisher: an open publisher of this rank (weightwire.torch, fsdp, megatron): every rank publishes its own shards.
        Without it a `source` is needed, whose whole tensors rank 0 publishes; the other ranks iterate it alongside.
    first_version: what the first `send_weights` publishes; each later one publishes the next number
    lineage: without a `publisher`, which has its own: that of Publisher.publish, for a trainer that goes on from an earlier
        step than what is committed
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


class TrainerEngine(TrainerWeightTransferEngine[InitInfo]):
    """See the module. Not for use from several threads at once."""

    init_info_cls = InitInfo

    def __init__(self, info: InitInfo, *, client: Any, source: WeightSource | None):
        super().__init__(client=client, source=source, is_sender=info.rank == 0)
        self._info, self._version = info, info.first_version
        self._whole: _Whole | None = None
        if info.publisher is None:
            if source is None:
                raise ValueError("weightwire needs InitInfo(publisher=…) or a source of whole tensors")
            if self.is_sender:
                self._whole = _Whole(info, source)

    @classmethod
    def trainer_init(cls, init_info: InitInfo, *, client: Any, source: WeightSource | None = None) -> "TrainerEngine":
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Publishes the next version. Raises what `publish` and `wait_released` raise; the number is then used up."""
        version, self._version = self._version, self._version + 1
        deadline = self._info.deadline
        if self._info.publisher is not None:
            self._info.publisher.publish(version, deadline=deadline).wait_released(deadline)
        elif self._whole is not None:
            self._whole.send(version, deadline)
        else:
            for _ in self.source:  # its collectives need every rank
                pass

    def shutdown(self) -> None:
        """Leaves the group, unless the publisher is the caller's."""
        if self._whole is not None:
            self._whole.close()


class _Whole:
    """Rank 0 of a source of whole tensors: one at a time into the shared memory."""

    def __init__(self, info: InitInfo, source: WeightSource):
        self._source = source
        metas = [meta_of(m.name, torch.empty(0, dtype=m.dtype), m.shape) for m in source.metadata()]
        self._publisher = Publisher(rank=0, world_size=1, group=info.group, job=info.job, agent=info.agent,
                                    timeout=info.timeout, lineage=info.lineage)
        arrays = self._publisher.bind_boxes(boxes.submission({m.name: m for m in metas},
                                                             [boxes.whole(m) for m in metas]))
        self._shared = {m.name: as_tensor(arrays[m.name], m) for m in metas if arrays[m.name].size > 0}

    def send(self, version: int, deadline: float) -> None:
        self._publisher.reclaim()  # a version that was not waited for to its end may still be read
        with torch.no_grad():
            for name, tensor in self._source:
                if name in self._shared:
                    self._shared[name].copy_(tensor)
        self._publisher.publish(version, deadline=deadline).wait_released(deadline)

    def close(self) -> None:
        self._publisher.close()


def register() -> None:
    """Makes "weightwire" known to vLLM's factory of trainer engines. Idempotent."""
    if InitInfo.backend not in WeightTransferTrainerFactory._registry:
        WeightTransferTrainerFactory.register_engine(InitInfo.backend, TrainerEngine)
