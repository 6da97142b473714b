"""slime (Megatron trainers, SGLang rollouts on nodes of their own): its weight updater, without a gather.

    --custom-megatron-init-path weightwire.slime.install --sglang-custom-weight-loader weightwire.sglang.load

`install` puts `WeightUpdater` in the place of slime's UpdateWeightFromDistributed, whose interface it has; with
`--update-weight-mode delta` in that of UpdateWeightFromDiskDelta, though nothing goes by a disk: the first update sends
everything, others what changed. What it may be told is read from slime's arguments, where `--custom-config-path` puts every key of a YAML file:

    weightwire_deadline: 300    # seconds for one update, everything included
    weightwire_job: ""          # both as in weightwire.megatron.Publisher
    weightwire_agent: ""        # empty: WEIGHTWIRE_AGENT_SOCKET, on trainers' and on engines' hosts
    weightwire_device: auto     # or cpu, cuda; as in weightwire.torch.Publisher. Not set: WEIGHTWIRE_DEVICE
    weightwire_delta: auto      # or always, off; as in weightwire.Publisher. Not set: always with --update-weight-mode delta, else
                                # WEIGHTWIRE_PUBLISHER_DELTA
    weightwire_lineage: resume  # or a number, see Publisher.publish: when slime resumes from an earlier step than what the
                                # coordinator has committed; without it the first update is refused then

See docs/frameworks.md for an update's order and for what of it was run.
"""

from __future__ import annotations

import importlib
import re
import time
from datetime import timedelta
from typing import Any, Callable, Mapping, Sequence

import torch.distributed as dist

from weightwire import errors, megatron
from weightwire.publisher import DeltaMode, Lineage
from weightwire.labels import label
from weightwire.sglang import LOADER, NOT_YET, payloads, ticket

#: Seconds beyond the deadline for engines to generate again, and for ranks to hear of it.
_ASK_SECONDS = 0.1  # before a ticket that came too early is sent again
_RESUME_SECONDS = 30.0


def install(args: Any) -> None:
    """For slime's --custom-megatron-init-path. RefusedError for a job that sends no weights over NCCL and no changes."""
    delta = args.update_weight_mode == "delta" and args.update_weight_transport == "disk"  # slime has no other delta
    if args.colocate or not delta and (args.update_weight_mode, args.update_weight_transport) != ("full", "nccl"):
        raise errors.RefusedError("slime would not ask this updater", code="INVALID_ARGUMENT", reason="invalid_request",
                                  remedy="no --colocate, and --update-weight-mode full with --update-weight-transport nccl, or "
                                         "delta with disk")
    if LOADER not in (getattr(args, "sglang_custom_weight_loader", None) or []):
        raise errors.RefusedError("the engines would refuse the ticket", code="INVALID_ARGUMENT",
                                  reason="invalid_request", remedy=f"--sglang-custom-weight-loader {LOADER}")
    from slime.backends.megatron_utils import actor

    if not delta:
        actor.UpdateWeightFromDistributed = WeightUpdater
        return
    try:
        module = importlib.import_module("slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta")
    except ImportError as why:
        raise errors.RefusedError(f"this slime has no delta mode that could be replaced: {why}", code="INVALID_ARGUMENT",
                                  reason="invalid_request", remedy="--update-weight-mode full, and weightwire_delta: always in "
                                                                   "--custom-config-path") from why
    # The actor imports it when it needs it, or has imported it already.
    for place in [module] + ([actor] if hasattr(actor, "UpdateWeightFromDiskDelta") else []):
        place.UpdateWeightFromDiskDelta = WeightUpdater


class WeightUpdater:
    """What slime's actor holds as `weight_updater`, on every training rank; all ranks call all methods together."""

    def __init__(self, args: Any, model: Sequence[Any], weights_getter: Callable[[], Any] | None = None, *,
                 model_name: str = "", quantization_config: Any = None):
        """model: this rank's chunks. weights_getter, model_name: slime's, not needed.

        RefusedError for a quantized checkpoint: only slime knows how its trainer's weights become that.
        """
        if quantization_config:
            raise errors.RefusedError("rollouts are quantized", code="INVALID_ARGUMENT", reason="invalid_request",
                                      remedy="give --hf-checkpoint a checkpoint of full precision")
        self.weight_version = 0  #: that of the last update, whatever became of it; slime sets it when it resumes
        self.serving = 0  #: what every engine was last known to serve; 0: what it was started with
        self._args, self._model = args, model
        self._deadline = float(getattr(args, "weightwire_deadline", 300))
        self._job, self._agent = (getattr(args, f"weightwire_{key}", "") or "" for key in ("job", "agent"))
        self._lineage: Lineage = getattr(args, "weightwire_lineage", None)
        self._device: str | None = getattr(args, "weightwire_device", None)
        self._delta: DeltaMode = getattr(args, "weightwire_delta", None)
        if self._delta is None and args.update_weight_mode == "delta":
            self._delta = "always"
        self._engines: dict[str, Any] = {}  # by their names in weightwire; on rank 0
        self._tp_sizes: dict[str, int] = {}
        self._loaded: set[str] = set()  # engines that have loaded the newest version that travelled
        self._travelled = 0  # that version; 0: none yet
        self._publisher: megatron.Publisher | None = None
        self._spec: str | None = None
        self._metrics: dict[str, float] = {}
        self._end = 0.0

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any,
                                engine_gpu_counts: Sequence[int] | None = None,
                                engine_gpu_offsets: Sequence[int] | None = None,
                                engine_parallel_configs: Any = None) -> None:
        """Has the engines that are new join, so that versions reach their hosts while they generate. AbortedError on
        every rank when one does not. The coordinator fences engines that are gone."""
        def join() -> None:
            urls = [self._wait(ref, self._left()) for ref in [e.get_url.remote() for e in rollout_engines]]
            names = ["sglang-" + re.sub(r"\W+", "-", url.rpartition("//")[2]) for url in urls]
            new = {name: engine for name, engine in zip(names, rollout_engines) if self._engines.get(name) != engine}
            self._tp_sizes = dict(zip(names, engine_gpu_counts or
                                      [self._args.rollout_num_gpus_per_engine] * len(names)))
            failed = self._send(new, 0)
            if failed:
                raise RuntimeError(_text(failed))
            self._engines = dict(zip(names, rollout_engines))
            self._loaded = (self._loaded & set(names)) - set(new)

        self._end = time.monotonic() + self._deadline
        self._together(join if dist.get_rank() == 0 else None, "an engine did not join")

    def disconnect_rollout_engines(self) -> None:
        """slime calls it before it destroys its process groups; this rank leaves weightwire until the next update."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None

    def pop_metrics(self) -> dict[str, float]:
        metrics, self._metrics = self._metrics, {}
        return metrics

    def update_weights(self) -> None:
        """The next version, into every engine. All ranks return, or all raise AbortedError, at most a minute after the
        deadline.

        Engines generate while the weights travel. Failing there, or in pausing, no engine was touched: all go on with
        the version before. Failing later, those that did not load stay paused; the next update starts them again. Where no
        engine has loaded a version that had travelled, the next update first has them load that one, which lies where the
        next one is to go.
        """
        self._end = time.monotonic() + self._deadline
        self.weight_version += 1
        started = time.monotonic()
        self._together(self._publish, f"no engine was touched, all serve on with version {self.serving}")
        travelled = time.monotonic()
        self._travelled, self._loaded = self.weight_version, set()
        self._together(self._load if dist.get_rank() == 0 else None, "not every engine serves it")
        self.serving = self.weight_version
        self._metrics = {"perf/weightwire_publish_time": travelled - started,
                         "perf/weightwire_load_time": time.monotonic() - travelled}

    def _publish(self) -> None:
        """Returns when every engine that has joined holds the version whole in its host's memory."""
        if self._publisher is None:
            self._publisher = megatron.Publisher(self._model, self._args.hf_checkpoint, spec=self._spec, job=self._job,
                                                 agent=self._agent or None, timeout=self._left(), lineage=self._lineage,
                                                 device=self._device, delta=self._delta)
            self._spec = self._publisher.spec
        why = self._catch_up(self._travelled or self._publisher.committed) if dist.get_rank() == 0 else ""
        release = self._publisher.publish(self.weight_version, deadline=self._left())
        try:
            release.wait_released(self._left())
        except errors.DeadlineError as error:
            if not why:
                raise
            raise RuntimeError(f"{error}; {why}") from None

    def _catch_up(self, version: int) -> str:
        """Returns when an engine has room for the next version (the others are not waited for), or with why none has."""
        if version and not self._loaded:
            try:
                self._load(version, catch_up=True)
            except RuntimeError as error:
                if not self._loaded:
                    return f"version {version} had travelled, and no engine has loaded it: {error}"
        return ""

    def _load(self, version: int | None = None, catch_up: bool = False) -> None:
        """slime's own order: pause, flush, load, continue. `version`: the one that travelled, if it is not this one."""
        engines = self._engines
        failed = self._each(engines, "pause_generation") or self._each(engines, "flush_cache")
        if failed:
            stuck = self._each(engines, "continue_generation", seconds=_RESUME_SECONDS)
            raise RuntimeError(f"{_text(failed)}; nothing was loaded, engines serve on with version {self.serving}" +
                               (f", but {_text(stuck)}" if stuck else ""))
        failed = self._send(engines, version or self.weight_version, catch_up)
        loaded = {name: engine for name, engine in engines.items() if name not in failed}
        self._loaded = set(loaded)
        stuck = self._each(loaded, "continue_generation", seconds=_RESUME_SECONDS)
        if failed:
            raise RuntimeError(f"{_text(failed)}; these stay paused, {sorted(loaded) or 'none'} may serve the new version"
                               + (f", but {_text(stuck)}" if stuck else ""))
        if stuck:
            raise RuntimeError(f"every engine loaded it, but {_text(stuck)}")

    def _send(self, engines: Mapping[str, Any], version: int, catch_up: bool = False) -> dict[str, str]:
        """Tickets; for version 0 engines only join, and keep their cache. What went wrong, by engine."""
        arguments: dict[str, dict[str, Any]] = {}
        # Before this trainer's first version what travels is what another one had committed.
        lineage = self._publisher.lineage or self._publisher.committed_lineage if version and self._publisher else 1
        for name in engines:
            order = ticket(name, self._args.hf_checkpoint, version, agent=self._agent, job=self._job,
                           deadline=self._left(), catch_up=catch_up,
                           lineage=lineage)
            arguments[name] = dict(serialized_named_tensors=payloads(order, self._tp_sizes[name]), load_format=LOADER,
                                   flush_cache=version > 0, weight_version=label(version, lineage) if version else None)
        failed = self._each(engines, "update_weights_from_tensor", arguments)
        while self._left() > 0 and (again := {name: engines[name] for name, why in failed.items() if NOT_YET in why}):
            time.sleep(_ASK_SECONDS)
            failed = {name: why for name, why in failed.items() if name not in again} | \
                self._each(again, "update_weights_from_tensor", arguments)
        return failed

    def _each(self, engines: Mapping[str, Any], method: str, arguments: Mapping[str, dict[str, Any]] | None = None,
              seconds: float | None = None) -> dict[str, str]:
        """Calls it on all engines at once; what went wrong, by engine."""
        end = time.monotonic() + (self._left() if seconds is None else seconds)
        refs = {name: getattr(engine, method).remote(**(arguments or {}).get(name, {}))
                for name, engine in engines.items()}
        failed = {}
        for name, ref in refs.items():
            try:
                answer = self._wait(ref, max(0.0, end - time.monotonic()))
                if isinstance(answer, Mapping) and not answer.get("success", True):
                    raise RuntimeError(answer.get("message", "it says nothing"))
            except Exception as error:  # an actor that died, an HTTP error, a wait that ended: all are told
                failed[name] = f"{method}: {type(error).__name__}: {error}"
        return failed

    def _together(self, action: Callable[[], None] | None, failed: str) -> None:
        """Runs it, and raises on every rank when it failed on one."""
        from slime.utils.distributed_utils import get_gloo_group

        why = ""
        try:
            if action is not None:
                action()
        except Exception as error:  # whatever it is, the other ranks wait to hear of it
            why = f"training rank {dist.get_rank()}: {type(error).__name__}: {error}"
        group = get_gloo_group()  # anew each time: slime destroys and makes it again between steps
        answers = [""] * dist.get_world_size()
        try:
            dist.monitored_barrier(group, timeout=timedelta(seconds=self._left() + 2 * _RESUME_SECONDS))
            dist.all_gather_object(answers, why, group=group)
        except RuntimeError as error:  # gloo's, and names the rank that is missing
            answers = [why, str(error)]
        whys = [answer for answer in answers if answer]
        if whys:
            raise errors.AbortedError(f"version {self.weight_version}: {failed}: {'; '.join(whys)}", code="ABORTED",
                                      remedy="update again; `wwctl status` says what weightwire waits for")

    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @staticmethod
    def _wait(ref: Any, seconds: float) -> Any:
        import ray

        return ray.get(ref, timeout=seconds)


def _text(failed: Mapping[str, str]) -> str:
    return ", ".join(f"{name} failed in {why}" for name, why in failed.items())
