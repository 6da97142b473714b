"""vLLM beside its trainer, on the same GPUs: weights go from the trainer's parameters into the engine's (weightwire.colocated).

>>> llm = vllm.LLM(model, worker_extension_cls="weightwire.vllm.colocated.Worker")
>>> engine = weightwire.vllm.Colocated(llm, [rank.export for rank in trainer_ranks])   # once
>>> engine.install(version=7)                                                          # each version; or, of one that sleeps:
>>> engine.wake_up(version=8)

No agent, no stage: one module's weights at a time are put together in the load format and given to vLLM's own processing, as
EngineDriver does with mode fused; so a quantized or packed model works as well.
"""

from __future__ import annotations

import logging
import pickle
import time
from typing import Any, Callable, Sequence

from weightwire import colocated, errors
from weightwire.vllm.ports import AsyncPort, LlmPort, port_of
from weightwire.vllm.replace import Deadlines

log = logging.getLogger("weightwire.vllm")


class Worker:
    """Mixed into vLLM's workers by `worker_extension_cls`. Nothing raises here: where one rank of several does, vLLM loses track
    of the others' answers. What went wrong is in the answer."""

    def weightwire_colocate(self, exports: bytes, checkpoint: str | None) -> dict[str, Any]:
        """Plans this rank's reads from the trainer's memory."""
        return _answer(lambda: _plan(self, pickle.loads(exports), checkpoint))

    def weightwire_hand_over(self, verify: bool) -> dict[str, Any]:
        """Brings what the trainer holds now into this rank's parameters."""
        return _answer(lambda: _install(self, verify))


def _answer(do: Callable[[], None]) -> dict[str, Any]:
    try:
        do()
        return {}
    except Exception as error:
        log.exception("weightwire: a hand-over failed")
        remedy = error.remedy if isinstance(error, errors.WeightwireError) else ""
        return {"error": f"{type(error).__name__}: {error}", "remedy": remedy, "refused": isinstance(error, errors.RefusedError)}


def _plan(worker: Any, exports: Sequence[colocated.Export], folder: str | None) -> None:
    from weightwire.vllm import checkpoint, stage
    runner = worker.model_runner
    config = worker.vllm_config.model_config
    target = stage.target_of(runner.get_model(), checkpoint.tensors(checkpoint.folder_of(folder or config.model)), "fused")
    if target.mode != "fused":
        raise errors.RefusedError("this model's loader does more with a checkpoint than copy blocks of it", code="UNIMPLEMENTED",
                                  remedy="use EngineDriver, whose mode hf_sharded runs the loader")
    worker._weightwire_target = target
    worker._weightwire_hand_over = colocated.HandOver(colocated.held_of_rows(target.rows, target.observed), exports)


def _install(worker: Any, verify: bool) -> None:
    import torch
    hand_over: colocated.HandOver = worker._weightwire_hand_over
    model = worker.model_runner.get_model()
    device = next(model.parameters()).device
    installer = worker._weightwire_target.installer(model, worker.vllm_config.model_config)
    by_module: dict[str, list[str]] = {}
    for name in hand_over.held:
        by_module.setdefault(name.rpartition(".")[0], []).append(name)
    installer.start()
    try:
        for names in by_module.values():
            made = {}
            for name in names:
                meta = hand_over.held[name].meta
                made[name] = torch.zeros(meta.shape, dtype=colocated.dtype_of(meta), device=device)
                hand_over.fill(name, made[name], verify)
            installer.update(made, owned=True)
        installer.finish()
    except BaseException:
        installer.abandon()
        raise
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Colocated:
    """Leader of one engine that stands beside its trainer: pause → hand over on every rank → reset prefix cache → resume.

    engine:     a `vllm.LLM`, or an `AsyncLLM` (construct this on its event loop) with
                worker_extension_cls="weightwire.vllm.colocated.Worker"
    exports:    of all trainer ranks (weightwire.colocated.export), of this host
    checkpoint: a folder with the model's safetensors (or their headers), where the engine was not started from one
    pause:      as EngineDriver's: "abort", "wait" or "keep"

    Nothing of the engine is asked for before the first `install` or `wake_up`. Those of an AsyncLLM are called on another thread than its
    loop's. Not thread-safe: one call at a time.
    """

    def __init__(self, engine: Any, exports: Sequence[colocated.Export], *, checkpoint: str | None = None, pause: str = "abort",
                 deadlines: Deadlines = Deadlines()):
        port = port_of(engine)
        if not isinstance(port, (LlmPort, AsyncPort)):
            raise errors.RefusedError("memory is not handed over through HTTP", code="UNIMPLEMENTED",
                                      remedy="run this in the process that made the engine")
        self._port, self._pause, self._deadlines = port, pause, deadlines
        #: The version that the engine answers from; None: the one that it was started with, or none, because an install failed.
        self.version: int | None = None
        #: Seconds from the pause to the end of the last install.
        self.seconds = 0.0
        self._paused = False
        self._given: dict[str, Any] | None = {"exports": pickle.dumps(list(exports)), "checkpoint": checkpoint}

    def install(self, version: int, *, verify: bool = False) -> None:
        """Hands a version over, and lets the engine answer again. The trainer's ranks are `ready()`, and leave their parameters alone
        until this returns.

        NotReadyError: the engine sleeps. RefusedError: the engine and the exports do not fit; names the tensor; nothing has changed.
        Any other error: parameters of some ranks are of this version and others are not, so the
        engine stays paused; call `install` again."""
        if self._port.asleep(self._deadlines.prepare) and not self._paused:
            raise errors.NotReadyError("the engine sleeps, or somebody has paused it: its weights may have no memory", code="FAILED_PRECONDITION",
                                       remedy="wake_up(version) wakes it with this version")
        self._plan()
        self._pause_engine()
        self._hand_over(version, verify)
        self._port.resume(self._deadlines.resume)
        self._paused = False

    def wake_up(self, version: int, *, verify: bool = False) -> None:
        """The same of an engine that sleeps, whatever the level: its weights get memory, then this version, and then its cache gets
        memory, before anything is scheduled. When it raises, the engine sleeps on, and answers nothing."""
        self._plan()
        self._port.wake_up("weights", self._deadlines.resume)
        self._hand_over(version, verify)
        self._port.wake_up("kv_cache", self._deadlines.resume)

    def _plan(self) -> None:
        if self._given is not None:
            self._ask("weightwire_colocate", self._deadlines.init, **self._given)
            self._given = None

    def _pause_engine(self) -> None:
        if not self._paused:
            self._port.pause(self._pause, self._deadlines.pause)
            self._paused = True

    def _hand_over(self, version: int, verify: bool) -> None:
        began, self.version = time.monotonic(), None
        self._ask("weightwire_hand_over", self._deadlines.update, verify=verify)
        if not self._port.reset_prefix_cache(self._pause == "keep", self._deadlines.reset):
            raise errors.NotReadyError("the prefix cache was not emptied: requests hold blocks of it", code="FAILED_PRECONDITION")
        self._port.set_version(str(version), self._deadlines.finish)
        self.version, self.seconds = version, time.monotonic() - began

    def _ask(self, method: str, timeout: float, **arguments: Any) -> None:
        answers = self._port.ask(method, arguments, timeout)
        bad = [(rank, answer) for rank, answer in enumerate(answers) if "error" in answer]
        if bad:
            rank, first = bad[0]
            kind = errors.RefusedError if first["refused"] else errors.WeightwireError
            raise kind(f"{len(bad)} of {len(answers)} ranks: {first['error']}", code="FAILED_PRECONDITION" if first["refused"] else "INTERNAL",
                       rank=f"engine/{rank}", remedy=first["remedy"])
