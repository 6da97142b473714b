"""NeMo-RL (DTensor or Megatron policies, vLLM on nodes of its own): its weight synchronizer, without a gather.

    policy, policy_generation, *rest = setup(...)          # NeMo-RL's own, in run_grpo.py and its like
    policy_generation.weight_synchronizer = weightwire.nemo_rl.Synchronizer(policy, policy_generation)
    policy_generation.weight_synchronizer.init_communicator()

NeMo-RL then refits through it, in place of prepare_refit_info and update_weights_*: every policy worker publishes its own
shards, and an EngineDriver in every vLLM worker installs them. vLLM needs `weight_transfer_config: {backend: weightwire}`
in policy.generation.vllm_kwargs. Nothing is subclassed: functions of this module run in NeMo-RL's actors, by Ray's
`__ray_call__`. See docs/frameworks.md for what of it was run.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Sequence

from weightwire import errors
from weightwire.publisher import DeltaMode

_POLL_SECONDS = 0.1
#: Beyond the deadline, so that a worker's own error is heard, and not only that it is late.
_GRACE_SECONDS = 5.0


class Synchronizer:
    """NeMo-RL's WeightSynchronizer, in the driver's process. Not for use from several threads.

    deadline: seconds for one sync, everything included
    version:  that of the last sync, where a job resumes under a coordinator that knows it
    lineage:  a number, see Publisher.publish: where it resumes from an earlier version than what is committed; without it
              the first sync is refused then, and the error says which number to set
    checkpoint: folder with config.json and safetensors headers; default: the policy's model_name. For Megatron, and for
              engines that were not started from a folder
    device:   of the policy's workers, as in weightwire.torch.Publisher: "auto", "cpu", "cuda"; default WEIGHTWIRE_DEVICE there
    delta:    as in weightwire.Publisher: "auto", "always", "off"; default WEIGHTWIRE_PUBLISHER_DELTA of the policy's workers
    driver:   further arguments of weightwire.vllm.EngineDriver: mode, install, pause, …
    """

    def __init__(self, policy: Any, generation: Any, *, deadline: float = 300.0, version: int = 0, job: str = "",
                 agent: str | None = None, checkpoint: str | None = None, lineage: int = 1,
                 device: str | None = None, delta: DeltaMode = None, **driver: Any):
        if generation.cfg["colocated"]["enabled"]:
            raise errors.RefusedError("policy and generation share their GPUs", code="INVALID_ARGUMENT",
                                      reason="invalid_request", remedy="policy.generation.colocated.enabled=false")
        if not isinstance(lineage, int):
            raise errors.RefusedError(f"lineage {lineage!r} is no number", code="INVALID_ARGUMENT", reason="invalid_request",
                                      remedy="the error of the first sync says which")
        self._deadline, self._where = deadline, dict(job=job, agent=agent)
        self._checkpoint, self._driver = checkpoint, driver
        self._opened = dict(lineage=lineage, device=device, delta=delta)
        self._policy = {f"policy worker {i}": worker for i, worker in enumerate(policy.worker_group.workers)}
        group = generation.worker_group  # the first worker of each engine has it
        self._engines = {f"vllm-{i}": worker for i, worker in enumerate(
            worker for index, worker in enumerate(group.workers)
            if not any(group.sharding_annotations.get_worker_coords(index).get(axis)
                       for axis in ("tensor_parallel", "pipeline_parallel")))}
        self._async = bool(generation.cfg["vllm_cfg"]["async_engine"])
        self.version, self._lineage = version, lineage
        self._stale = True
        self._end = 0.0

    @property
    def is_stale(self) -> bool:
        return self._stale

    def init_communicator(self) -> None:
        """Every worker joins. AbortedError names those that did not; called again, the others stay as they are."""
        self._end = time.monotonic() + self._deadline
        failed = self._all(self._policy, _open, lambda _: (self._checkpoint, {**self._where, **self._opened,
                                                                                "timeout": self._left()}))
        failed |= self._all(self._engines, _follow, lambda name: (
            dict(name=name, checkpoint=self._checkpoint, **self._where, **self._driver), self._async))
        if not failed and self._async:
            failed = self._until(lambda status: bool(status["ready"]))
        if failed:
            raise _aborted("not every worker joined", failed)

    def sync_weights(self, *, timer: Any = None, kv_scales: Any = None) -> dict[str, float]:
        """The policy's weights as the next version, into every engine; returns seconds.

        AbortedError when it failed, at most seconds after the deadline: engines go on with the version before, as far as an engine's
        own driver could bring it back; the error says what each serves. The next sync is the retry.
        """
        if kv_scales:
            raise errors.RefusedError("scales of an fp8 cache are not moved", code="INVALID_ARGUMENT",
                                      reason="invalid_request", remedy="use NeMo-RL's own refit")
        self._end = time.monotonic() + self._deadline
        self._stale = True
        self.version += 1
        version, started = self.version, time.monotonic()
        with timer.time("prepare_for_generation/transfer_and_update_weights") if timer else contextlib.nullcontext():
            failed = self._all(self._policy, _publish, lambda _: (version, self._left()))
            published = time.monotonic()
            if failed:
                raise _aborted(f"version {version} was not published, engines keep what they serve", failed)
            if self._async:
                failed = self._until(lambda status: _serves(status, version, self._lineage))
            else:
                failed = self._all(self._engines, _install, lambda _: (version, self._lineage, self._left()))
        if failed:
            raise _aborted(f"version {version} is not served by every engine", failed)
        self._stale = False
        return {"weightwire/publish_seconds": published - started,
                "weightwire/install_seconds": time.monotonic() - published}

    def shutdown(self) -> None:
        """Engines stop following and keep their weights; policy workers leave."""
        self._end = time.monotonic() + self._deadline
        self._all({**self._engines, **self._policy}, _close, lambda _: ())

    def _all(self, workers: dict[str, Any], function: Callable[..., Any],
             arguments: Callable[[str], Sequence[Any]]) -> dict[str, str]:
        """Runs it in all of them at once; what went wrong, by worker."""
        refs = {name: worker.__ray_call__.remote(function, *arguments(name)) for name, worker in workers.items()}
        failed = {}
        for name, ref in refs.items():
            try:
                _get(ref, self._left() + _GRACE_SECONDS)
            except Exception as error:
                failed[name] = _why(error)
        return failed

    def _until(self, done: Callable[[dict[str, Any]], bool]) -> dict[str, str]:
        """Asks every engine until it is done or the time is over: its actor's event loop must not be blocked."""
        waiting, failed = dict(self._engines), {}
        while waiting:
            for name, worker in list(waiting.items()):
                try:
                    status = _get(worker.__ray_call__.remote(_status), self._left() + _GRACE_SECONDS)
                except Exception as error:
                    failed[name] = _why(error)
                    del waiting[name]
                    continue
                if done(status):
                    del waiting[name]
                elif self._left() == 0:
                    failed[name] = f"serving {status['serving']}, last error: {status['last_error']}"
                    del waiting[name]
            if waiting:
                time.sleep(_POLL_SECONDS)
        return failed

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())


# What runs in NeMo-RL's workers. Not one of them is a coroutine: Ray runs them in an async actor's event loop.

def _open(worker: Any, checkpoint: str | None, where: dict[str, Any]) -> None:
    if getattr(worker, "weightwire_publisher", None) is not None:
        return  # it attaches again by itself
    if (worker.cfg.get("megatron_cfg") or {}).get("enabled"):
        from weightwire.megatron import Publisher as MegatronPublisher
        worker.weightwire_publisher = MegatronPublisher(worker.model, checkpoint or worker.cfg["model_name"], **where)
    else:
        from weightwire.fsdp import Publisher
        worker.weightwire_publisher = Publisher(worker.model, **where)


def _publish(worker: Any, version: int, deadline: float) -> None:
    end = time.monotonic() + deadline
    release = worker.weightwire_publisher.publish(version, deadline=deadline)
    release.wait_released(max(0.0, end - time.monotonic()))


def _follow(worker: Any, settings: dict[str, Any], follow: bool) -> None:
    from weightwire.vllm import EngineDriver

    if getattr(worker, "weightwire_driver", None) is None:
        driver = EngineDriver(worker.llm, **settings)
        worker.weightwire_driver = driver.start() if follow else driver
    if not follow and not worker.weightwire_driver.ready:
        worker.weightwire_driver.init()


def _install(worker: Any, version: int, lineage: int, deadline: float) -> None:
    """For a synchronous LLM, which has no thread to follow on."""
    end = time.monotonic() + deadline
    while not _serves(worker.weightwire_driver.status(), version, lineage):
        if time.monotonic() >= end:
            raise errors.DeadlineError(f"version {version} did not come within {deadline:g} s",
                                       code="DEADLINE_EXCEEDED", reason="deadline_exceeded")
        worker.weightwire_driver.step(max(0.0, end - time.monotonic()))


def _status(worker: Any) -> dict[str, Any]:
    return dict(worker.weightwire_driver.status())


def _close(worker: Any) -> None:
    for name in ("weightwire_publisher", "weightwire_driver"):
        if getattr(worker, name, None) is not None:
            getattr(worker, name).close()
            setattr(worker, name, None)


def _serves(status: dict[str, Any], version: int, lineage: int) -> bool:
    serving = status["serving"]
    return bool(serving) and (serving.get("lineage", 1), serving["version"]) >= (lineage, version)


def _get(ref: Any, seconds: float) -> Any:
    import ray

    return ray.get(ref, timeout=seconds)


def _why(error: Exception) -> str:
    """Ray's own error for a worker that is dead or late; otherwise the worker's, without the traceback around it."""
    cause = getattr(error, "cause", None) or error
    return f"{type(cause).__name__}: {cause}"


def _aborted(message: str, failed: dict[str, str]) -> errors.AbortedError:
    whys = "; ".join(f"{name}: {why}" for name, why in failed.items())
    return errors.AbortedError(f"{message}: {whys}", code="ABORTED",
                               remedy="sync again; `wwctl status` says what weightwire waits for")
