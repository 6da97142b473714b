"""The checkpoint engine that verl drives. Once a round, on every worker: prepare, init_process_group, then
send_weights on actors and receive_weights on rollout workers, then finalize. Nothing is built or torn down there:
workers register with weightwire once and stay, so replicas come and go without rebuilding a group.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from typing import Any, AsyncGenerator, Iterator, Sequence

from verl.checkpoint_engine.base import CheckpointEngineRegistry, CheckpointEngineWithCache
from verl.workers.rollout import base

from weightwire import errors
from weightwire.client import default_coordinator
from weightwire.device_choice import wanted_device
from weightwire.publisher import DeltaMode
from weightwire.tensor_stream import TensorSource, check_cast
from weightwire.verl import sender
from weightwire.verl.rendezvous import Announcement, Rendezvous, Round
from weightwire.verl.receiver import Receiver, Version
from weightwire.verl.shards import ShardSource, checkpoint_names, hand_over_engine
from weightwire.verl.weights import Weights

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))
ROUTES = ("tensors", "shards")
STAGES = ("worker", "node")
ADAPTERS = ("verl", "weightwire")
# Each step of a round is bounded by the deadline and says what it waited for. The whole gets this much more, and
# rollout workers twice, so that the reason that is told first is the one that says most.
GRACE_SECONDS = 5.0


@CheckpointEngineRegistry.register("weightwire")
class WeightwireCheckpointEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """Weights by weightwire. Its arguments are `engine_kwargs.weightwire` of verl's checkpoint_engine config.

    bucket_size: bytes of one region of shared memory of the actor's first rank (verl's
                 update_weights_bucket_megabytes)
    is_master:   set by verl
    route:       "tensors": the actor's first rank publishes verl's stream of whole tensors. "shards": every actor
                 rank publishes its own FSDP or Megatron shards, nothing is gathered
    coordinator: HOST:PORT; default WEIGHTWIRE_ADDRESS
    agent:       socket of the weightwired of this host; default WEIGHTWIRE_AGENT_SOCKET
    deadline:    seconds for one round, everything included
    failures_max: rounds that may fail one after another. A failed round is logged, counted in the metrics, and
                 rollouts go on with the weights that they have. The first round must succeed.
    device:      where an actor's shards lie, of route "shards", as in weightwire.torch.Publisher, and where versions arrive at a rollout
                 worker, as in weightwire.torch.Receiver ("auto": on the GPU that it uses; with stage "node" in host memory): "auto",
                 "cpu", "cuda", "cuda:1"; default WEIGHTWIRE_DEVICE
    delta:       whether only what changed since earlier versions is sent, as in weightwire.Publisher: "auto", "always", "off";
                 default WEIGHTWIRE_PUBLISHER_DELTA
    dtype:       of route "tensors": "bfloat16" or "float16", to which wider floats are rounded on the way (an actor with
                 parameters in float32); None: as they are
    keep:        patterns of names (fnmatch) that `dtype` does not touch, as ["*.mlp.gate.weight"]
    stage:       "worker": each rollout worker's agent holds two buffers of the model. "node": that of the first worker of a replica
                 on each node alone, which sends to the engine's workers beside the others, too; vLLM only
    adapter:     of rollouts by vLLM: "weightwire": weightwire.verl.vllm, which stage "node" needs; "verl": verl's own
    host:        where this actor rank is reached by rollout workers; default: Ray's address of the node
    """

    def __init__(self, bucket_size: int, is_master: bool = False, *, route: str = "tensors",
                 coordinator: str | None = None, agent: str | None = None, job: str = "", deadline: float = 300.0,
                 failures_max: int = 3, host: str | None = None, device: str | None = None,
                 delta: DeltaMode = None, dtype: str | None = None, keep: Sequence[str] = (),
                 stage: str = "worker", adapter: str = "weightwire"):
        if route not in ROUTES:
            raise ValueError(f"route {route!r} is none of {ROUTES}")
        if route == "shards" and dtype is not None:
            raise ValueError("dtype is of route 'tensors': on 'shards' parameters go out in the dtype in which the actor holds them")
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is none of {STAGES}")
        if adapter not in ADAPTERS:
            raise ValueError(f"adapter {adapter!r} is none of {ADAPTERS}")
        if stage == "node" and adapter != "weightwire":
            raise ValueError("stage 'node' needs adapter 'weightwire'")
        check_cast(dtype, keep)
        if adapter == "weightwire":
            _use_our_adapter()
        self.is_master = is_master
        self.route = route
        self._bucket_bytes = bucket_size
        self._coordinator = coordinator or default_coordinator()
        self._where: dict[str, Any] = dict(agent=agent, job=job, timeout=min(deadline, 60.0))
        self._device, self._delta, self._dtype, self._keep = device, delta, dtype, keep
        self._deadline = deadline
        self._failures_max = failures_max
        self._failures = 0
        self._host = host
        self._name = _new_name()
        self._rendezvous: Rendezvous | None = None
        self._source: sender.Source | None = None
        self._receiver: Receiver | None = None
        self._failed: Receiver | None = None  # to be closed
        self._staged: asyncio.Task[Version | None] | None = None
        self._role = _role(stage)
        self._published = False
        self._model_type = ""
        self._round: dict[str, Any] = {}
        if route == "shards":
            hand_over_engine()

    # ---- what verl's manager calls

    def prepare(self) -> dict[str, Any]:
        """What the other workers must know of this one."""
        if self._receiver is not None and self._receiver.failed:
            # Registers anew, by a name that trainers can wait for: they might take the old registration for the new one.
            self._failed, self._receiver, self._name = self._receiver, None, _new_name()
        if not self.is_master:
            return {"name": self._name, "role": self._role}
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._host or _node_address())
        # "desk", here and below: the key's name goes over verl's wire, also to workers of a version before this one.
        return {"name": self._name, "desk": {"host": self._rendezvous.host, "port": self._rendezvous.port,
                                             "token": self._rendezvous.token, "round": self._rendezvous.begin()}}

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int,
                       metadata: list[dict[str, Any]]) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        if "desk" not in metadata[0]:
            raise RuntimeError("the first actor rank is not is_master")
        engines = [m["name"] for m in metadata[actor_wg_world_size:] if m.get("role") != "follows"]

        def arguments(count: int) -> dict[str, list[Any]]:
            return {"rank": list(range(count)), "world_size": [count] * count, "desk": [metadata[0]["desk"]] * count,
                    "engines": [engines] * count}

        return arguments(actor_wg_world_size), arguments(rollout_world_size)

    def init_process_group(self, rank: int, world_size: int, desk: dict[str, Any], engines: list[str]) -> None:
        """Notes who takes part in this round."""
        self._round = {"rank": rank, "world_size": world_size, "rendezvous": desk, "engines": engines}

    def finalize(self) -> None:
        """The round is over. Sessions and memory stay for the next one."""
        self._round = {}

    # ---- actors

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publishes `weights` (a stream of named tensors; on the route "shards" verl's training engine or what
        its get_per_tensor_param gave) and waits until every rollout worker of the round has staged them.

        Returns metrics. A failure is raised in the first round and after `failures_max` others.
        """
        try:
            metrics = await asyncio.wait_for(self._send(weights, global_steps), self._deadline + GRACE_SECONDS)
        except (errors.WeightwireError, asyncio.TimeoutError) as error:
            return self._tolerate(_as_error(error, self._deadline), self._published)
        except BaseException as error:
            self._finish(f"{type(error).__name__}: {error}")
            raise
        self._finish()
        self._published, self._failures = True, 0
        return metrics

    async def _send(self, weights: Any, global_steps: int | None) -> dict[str, float]:
        began = time.monotonic()
        if self.route == "tensors" and self._round["rank"] > 0:
            for _ in weights:  # its collectives need every rank
                pass
            return {}
        if self._source is None:
            self._source = self._open()
        tensors = self._source.load(weights, self._deadline)

        def left() -> float:
            return max(0.0, self._deadline - (time.monotonic() - began))

        if self._rendezvous is not None:
            version = await sender.next_version(self._coordinator, global_steps)
            self._rendezvous.announce(Announcement(version, tensors, self._source.model_type))
            await sender.wait_for_engines(self._coordinator, self._round["engines"], left())
            self._rendezvous.go()
        else:
            told = await Round.ask(self._round["rendezvous"])
            try:
                version = (await told.announced()).version
                await told.go()
            finally:
                told.close()
        if self.route == "shards":
            await sender.wait_for_trainers(self._coordinator, self._round["world_size"], left())
        return await sender.publish(self._source, version, left())

    def _open(self) -> sender.Source:
        if self.route == "shards":
            return ShardSource(**self._where, device=self._device, delta=self._delta)
        return TensorSource(self._bucket_bytes, cast=self._dtype, keep=self._keep, **self._where, delta=self._delta)

    def _finish(self, error: str = "") -> None:
        if self._rendezvous is not None:
            self._rendezvous.finish(error)

    # ---- rollout workers

    def receive_weights(self, global_steps: int | None = None) -> Weights:
        """The tensors of this round's version, all of them there and verified before the first one; those of the version before when the
        round fails. Tensors are read-only views."""
        receiver, staged, self._staged = self._only_receiver(), self._staged, None

        def served() -> Version:
            assert receiver.served is not None  # else the failure was raised
            return receiver.served

        async def receive() -> Version | None:
            return await (staged or self._receive(receiver))

        return Weights(receive, served, self._named, receiver.acknowledge, self._deadline, self._role)

    def stage(self) -> None:
        """Begins to receive this round's version, for weightwire.verl.manager; `receive_weights` then hands it out."""
        if self._role == "follows":
            return
        self._staged = asyncio.get_running_loop().create_task(self._receive(self._only_receiver()))

    def _only_receiver(self) -> Receiver:
        if self._receiver is None:
            # One that leads sends by way of host memory.
            wanted = "cpu" if self._role == "leads" and wanted_device(self._device) == "auto" else self._device
            self._receiver = Receiver(self._name, **self._where, device=wanted)
        return self._receiver

    async def _receive(self, receiver: Receiver) -> Version | None:
        try:
            if self._failed is not None:
                failed, self._failed = self._failed, None
                await failed.close()
            announced, version = await receiver.receive(self._round["rendezvous"],
                                                         self._deadline + 2 * GRACE_SECONDS)
        except errors.WeightwireError as error:
            self._tolerate(error, receiver.served is not None)
            return None
        self._failures, self._model_type = 0, announced.model_type
        return version

    def _named(self, version: Version) -> Iterator[tuple[str, Any]]:
        if self._model_type:
            return checkpoint_names(version.named_tensors(), self._model_type)
        return version.named_tensors()

    async def get_weights(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Yields the newest version that this worker has, without waiting: for rollouts that end their running
        requests first and take the weights when they are ready. NotReadyError before the first one."""
        if self._receiver is None or self._receiver.served is None:
            raise errors.NotReadyError("no version arrived yet", code="FAILED_PRECONDITION", reason="not_ready",
                                       rank=f"{self._name}/0")
        for named in self._named(self._receiver.served):
            yield named

    # ---- both

    def _tolerate(self, error: errors.WeightwireError, can_go_on: bool) -> dict[str, float]:
        self._finish(str(error))
        self._failures += 1
        if not can_go_on or self._failures > self._failures_max:
            raise error
        logger.error("weights were not updated (failure %d of %d in a row), rollouts keep the version that they have: "
                     "%s", self._failures, self._failures_max, error)
        return {"weightwire/failures": float(self._failures)}

    async def close(self) -> None:
        """Leaves weightwire."""
        for receiver in (self._failed, self._receiver):
            if receiver is not None:
                await receiver.close()
        if self._source is not None:
            self._source.close()
        if self._rendezvous is not None:
            self._rendezvous.close()


def _new_name() -> str:
    return f"verl-{uuid.uuid4().hex[:12]}"


def _as_error(error: BaseException, deadline: float) -> errors.WeightwireError:
    if isinstance(error, errors.WeightwireError):
        return error
    return errors.DeadlineError(f"the round took more than {deadline:g} s", code="DEADLINE_EXCEEDED",
                                reason="deadline_exceeded", remedy="`wwctl status` says what everyone waits for")


def _use_our_adapter() -> None:
    """verl makes a rollout worker's adapter after its engine. A verl that keeps adapters in another way goes on with its own."""
    ours, rollouts = "weightwire.verl.vllm.ServerAdapter", getattr(base, "_ROLLOUT_REGISTRY", {})
    if rollouts.get(("vllm", "async")) == "verl.workers.rollout.vllm_rollout.ServerAdapter":
        rollouts["vllm", "async"] = ours
    elif rollouts.get(("vllm", "async")) != ours:
        logger.warning("weightwire: this verl keeps its adapters in another way: its own vLLM adapter is used")


def _role(stage: str) -> str:
    """Of this rollout worker, by the place that Ray's worker group gave it among those of its replica on this node."""
    if stage == "worker":
        return "alone"
    return "leads" if int(os.environ.get("RANK", "0")) % int(os.environ.get("RAY_LOCAL_WORLD_SIZE", "1")) == 0 else "follows"


def _node_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address()).strip("[]")
