"""TRL's asynchronous trainers with weightwire between them and vLLM.

>>> from weightwire.trl import WeightTransfer
>>> trainer = AsyncGRPOTrainer(..., weight_transfer=WeightTransfer(engines=["engine-a"]))

Each engine follows by `weightwire.vllm.EngineDriver`, which pauses it only while it loads what lies on its host. See docs/frameworks.md.
"""

from __future__ import annotations

import time
from typing import Any, Iterator, Sequence

from weightwire.client import Client
from weightwire.publisher import DeltaMode, Lineage
from weightwire.tensor_stream import TensorSource


class WeightTransfer:
    """TRL's WeightTransferProtocol; TRL calls it in its main process.

    engines:      names of the engines (`EngineDriver(name=)`) that must serve a version before TRL goes on; empty: all that are there
    deadline:     seconds for one transfer, everything included, and for engines to come at the beginning
    bucket_bytes: of one region of the shared memory in which the model lies once
    cast, keep:   "bfloat16" or "float16", to which wider floats are rounded on the way, but those whose names match one of the patterns
    coordinator, agent, job, lineage, delta: as in weightwire.Publisher and weightwire.Client

    An error of `send_weights` (DeadlineError, AbortedError, …) ends TRL's training; engines go on with the version that they serve.
    """

    def __init__(self, engines: Sequence[str] = (), *, coordinator: str | None = None, agent: str | None = None, job: str = "",
                 deadline: float = 1800.0, bucket_bytes: int = 512 << 20, cast: str | None = None, keep: Sequence[str] = (),
                 lineage: Lineage = None, delta: DeltaMode = None):
        self._engines, self._coordinator, self._deadline = list(engines), coordinator, deadline
        self._source = TensorSource(bucket_bytes, cast=cast, keep=keep, agent=agent, job=job, timeout=min(deadline, 60.0), lineage=lineage,
                                    delta=delta)
        self._destroyed = False
        #: That every engine serves; 0: none yet.
        self.version = 0

    def init_weight_transfer(self) -> None:
        """Waits until the engines have registered. DeadlineError names what is missing."""
        with Client(self._coordinator) as client:
            missing = set(self._engines)
            for status in client.watch(self._deadline):
                there = {engine.name for engine in status.engines if engine.state != "incomplete"}
                missing = set(self._engines) - there
                if not missing and there:
                    return
        raise TimeoutError(f"engines {sorted(missing) or '(any)'} did not register within {self._deadline:g} s: does an EngineDriver run "
                           "beside each of them?")

    def pause(self) -> None:
        """Nothing: requests run while the weights move, and each engine's driver pauses it to load them."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Publishes the tensors of `iterator`, and returns when the engines serve them."""
        until = time.monotonic() + self._deadline

        def left() -> float:
            return max(0.0, until - time.monotonic())

        self._source.load(iterator, left())
        with Client(self._coordinator) as client:
            version = client.status(participants=False).unused_version
            self._source.publish(version, left()).wait_released(left())
            client.wait_version(version, left(), engines=self._engines)
        self.version = version

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        if not self._destroyed:
            self._destroyed = True
            self._source.close()
