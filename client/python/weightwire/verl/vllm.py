"""verl's vLLM adapter for versions of weightwire. vLLM is told of an update once the whole version lies on this host; a tensor may be
larger than verl's bucket; the sender does not wait for vLLM's worker without an end (weightwire.verl_plugin: nor the other way round).

This module's ServerAdapter takes the place of verl's in verl's registry of rollouts, but with `engine_kwargs.weightwire.adapter: verl`.
Where verl has not what it builds on, ServerAdapter is verl's own, which has the limits that docs/verl.md names.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from typing import Any, Callable

from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer as transfer
from verl.workers.rollout.vllm_rollout import vllm_rollout

from weightwire import errors
from weightwire.verl.receiver import Version
from weightwire.verl.weights import Weights
from weightwire.verl_plugin import Bounded, parameters

logger = logging.getLogger(__name__)
_POLL_MS = 100


def changed() -> list[str]:
    """What weightwire builds on and this verl does not have as verl 0.9 has it."""
    sender, adapter = (getattr(module, name, None) for module, name in (
        (transfer, "BucketedWeightSender"), (vllm_rollout, "ServerAdapter")))
    wanted = {
        "BucketedWeightSender": (sender, ["zmq_handle", "bucket_size_mb", "use_shm"]),
        "BucketedWeightSender._init_socket": (getattr(sender, "_init_socket", None), ["self"]),
        "BucketedWeightSender.async_send_weights": (getattr(sender, "async_send_weights", None), ["self", "weights"]),
        "ServerAdapter._execute_method": (getattr(adapter, "_execute_method", None),
                                          ["self", "method", "non_block", "timeout", "args", "kwargs"]),
        "ServerAdapter.update_weights": (getattr(adapter, "update_weights", None),
                                         ["self", "weights", "global_steps", "wire_format", "kwargs"]),
    }
    return [name for name, (call, names) in wanted.items() if parameters(call) != names]


def _late(what: str) -> errors.DeadlineError:
    return errors.DeadlineError(what, code="DEADLINE_EXCEEDED", reason="deadline_exceeded", remedy="its log says what it does")


class Sender(transfer.BucketedWeightSender):  # type: ignore[misc]
    """Sends `named` to vLLM's worker of this rank, in a bucket in which the largest of them fits. DeadlineError at `until`
    (time.monotonic); AbortedError once `failed` is set."""

    def __init__(self, zmq_handle: str, named: list[tuple[str, Any]], bucket_mb: int, use_shm: bool, failed: threading.Event,
                 until: float):
        largest = max((tensor.nbytes for _, tensor in named), default=0)
        super().__init__(zmq_handle, max(bucket_mb, -(-largest >> 20)), use_shm)
        self._named, self._failed, self._until = named, failed, until

    def _init_socket(self) -> None:
        super()._init_socket()
        self.socket: Any = Bounded(self.socket, self._wait)

    def _wait(self, socket: Any, events: int) -> None:
        while not socket.poll(_POLL_MS, events):
            if self._failed.is_set():
                raise errors.AbortedError("vLLM's worker failed while it loaded the version", code="ABORTED", reason="member_lost")
            if time.monotonic() > self._until:
                raise _late("vLLM's worker did not take the version in time")

    def send(self) -> None:
        """To be called in a thread: verl's sender blocks."""
        asyncio.run(self.async_send_weights(self._named))


class WeightwireAdapter(vllm_rollout.ServerAdapter):  # type: ignore[misc]
    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        qat = getattr(self.config, "qat", None) or {}
        if self.config.checkpoint_engine.backend == "weightwire" and qat.get("enable", False):
            raise errors.RefusedError("rollout.qat.enable is set: such a vLLM takes packed weights, and weightwire brings the trainer's",
                                      code="INVALID_ARGUMENT", reason="invalid_request",
                                      remedy="unset it, or use another checkpoint_engine.backend")

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors",
                             **kwargs: Any) -> None:
        if not isinstance(weights, Weights):
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **kwargs)
            return
        if weights.role == "follows":
            return  # the first worker on this node sends in its place
        if weights.role == "leads" and self._pd_role is not None:
            raise errors.RefusedError("stage 'node' does not know replicas with prefill and decode servers", code="INVALID_ARGUMENT",
                                      reason="invalid_request", remedy="stage: worker")
        version = await weights.version()
        if version is None:
            return  # vLLM was told nothing, and goes on with what it has
        await self._load(weights, version, time.monotonic() + weights.deadline, kwargs)
        if self._has_server:
            await self.server_handle.clear_kv_cache.remote()
            if global_steps is not None:
                await self.server_handle.set_global_steps.remote(global_steps)
        await weights.installed(version)

    async def _load(self, weights: Weights, version: Version, until: float, kwargs: dict[str, Any]) -> None:
        """Each rank sends to vLLM's worker beside it, one that leads to all on its node, by way of host memory, for the device of another
        worker is not to be seen from here. The first rank tells vLLM to receive."""
        leads = weights.role == "leads"
        handles = self._handles_of_node() if leads else [self.zmq_handle]
        use_shm = self.use_shm or leads
        failed = threading.Event()
        told = await self._execute_method("update_weights_from_ipc", non_block=True, kwargs={**kwargs, "use_shm": use_shm})
        loaded = None if told is None else asyncio.ensure_future(_result(told))
        if loaded is not None:
            loaded.add_done_callback(_sets(failed))
        named, bucket_mb = weights.named(version), self.config.checkpoint_engine.update_weights_bucket_megabytes
        sent = await asyncio.gather(*[asyncio.to_thread(Sender(handle, named, bucket_mb, use_shm, failed, until).send)
                                      for handle in handles], return_exceptions=True)
        errors_of_senders = [error for error in sent if isinstance(error, BaseException)]
        if errors_of_senders:
            if loaded is not None and failed.is_set():
                await loaded  # its error says why
            raise errors_of_senders[0]
        if loaded is not None:
            done, _ = await asyncio.wait([loaded], timeout=max(0.0, until - time.monotonic()))
            if not done:
                raise _late("vLLM did not end loading the version in time")
            await loaded

    def _handles_of_node(self) -> list[str]:
        """As verl names them: of every worker of this replica on this node, this one's first."""
        stem = self.zmq_handle.removesuffix("-rank-0.sock")
        if stem == self.zmq_handle:
            raise errors.RefusedError(f"this verl names the sockets of its workers otherwise: {self.zmq_handle}", code="INVALID_ARGUMENT",
                                      reason="invalid_request", remedy="stage: worker")
        return [f"{stem}-rank-{rank}.sock" for rank in range(int(os.environ["RAY_LOCAL_WORLD_SIZE"]))]


def _sets(failed: threading.Event) -> Callable[[asyncio.Task[Any]], None]:
    def done(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            failed.set()

    return done


async def _result(reference: Any) -> Any:
    return await reference


ServerAdapter: Any = WeightwireAdapter
if changed():
    logger.warning("weightwire: this verl differs in %s: its own vLLM adapter is used", ", ".join(changed()))
    ServerAdapter = vllm_rollout.ServerAdapter
