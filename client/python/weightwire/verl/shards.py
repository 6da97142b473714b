"""The route without a gather: every actor rank publishes the FSDP or Megatron shards that it holds.

verl gives a checkpoint engine the stream of get_per_tensor_param, which gathers as it is read. `hand_over_engine`
makes that stream say whose it is, so that it need not be read.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Callable, Iterable, Iterator, Union

from weightwire import errors, fsdp, megatron
from weightwire.adapter import LivePublisher
from weightwire.hf_tensors import checkpoint_tensors
from weightwire.memory import TensorMeta
from weightwire.publisher import Release


_ENGINES = (("verl.workers.engine.fsdp.transformer_impl", "FSDPEngine"),
            ("verl.workers.engine.megatron.transformer_impl", "MegatronEngine"))


class EngineParams:
    """What get_per_tensor_param gave, with the training engine that it came from. Reading it gathers as before."""

    def __init__(self, engine: Any, params: Iterable[tuple[str, Any]]):
        self.engine = engine
        self._params = params

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self._params)


def hand_over_engine() -> None:
    """Lets verl's FSDP and Megatron engines return EngineParams in this process. Idempotent."""
    for module, name in _ENGINES:
        try:
            engine = getattr(importlib.import_module(module), name)
        except ImportError:
            continue  # verl itself does without an engine whose packages are not installed
        if not hasattr(engine.get_per_tensor_param, "__wrapped__"):
            engine.get_per_tensor_param = _handing_over(engine.get_per_tensor_param)


def _handing_over(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> tuple[EngineParams, Any]:
        params, peft_config = original(self, *args, **kwargs)
        return EngineParams(self, params), peft_config

    return get_per_tensor_param


def checkpoint_names(weights: Iterable[tuple[str, Any]], model_type: str) -> Iterator[tuple[str, Any]]:
    """As verl's FSDP engine names its parameters for rollouts: packed experts one by one."""
    from verl.workers.engine.fsdp.utils import unfuse_moe_params

    yield from unfuse_moe_params(weights, model_type)


class ShardSource:
    """This rank's shards of verl's training engine, read anew for every version."""

    def __init__(self, **where: Any):
        self._where = where
        self._publisher: Union[LivePublisher, None] = None
        self._spec: Union[str, None] = None  # Megatron's; reading it is a collective, once is enough
        self._tensors: list[TensorMeta] = []
        self.model_type = ""

    def load(self, weights: Any, timeout: float) -> list[TensorMeta]:
        """`weights`: EngineParams, or verl's training engine itself. What lies in the model is read at publish,
        which also waits for the version before."""
        engine = getattr(weights, "engine", weights)
        if getattr(engine, "module", None) is None:
            raise _refuse(f"route 'shards' needs verl's FSDP or Megatron engine and got {type(weights).__name__}")
        if self._publisher is None:
            self._open(engine)
        return self._tensors

    def _open(self, engine: Any) -> None:
        from verl.utils.model import convert_weight_keys

        module = engine.module
        if isinstance(module, (list, tuple)):  # Megatron's chunks
            if getattr(engine, "peft_cls", None) is not None:
                raise _refuse("route 'shards' merges no LoRA adapters")
            tensors = checkpoint_tensors(engine.model_config.local_path)
            publisher = megatron.Publisher(module, engine.model_config.hf_config, spec=self._spec, **self._where)
            self._publisher, self._spec = publisher, publisher.spec
        else:
            model = getattr(module, "_fsdp_wrapped_module", module)
            if hasattr(model, "peft_config"):
                raise _refuse("route 'shards' merges no LoRA adapters")

            def names(name: str) -> str:
                return str(next(iter(convert_weight_keys({name: None}, model))))

            tensors = list(fsdp.read_sharded(module, names)[0].values())
            self.model_type = str(engine.model_config.hf_config.model_type)
            self._publisher = fsdp.Publisher(module, names=names, **self._where)
        self._tensors = sorted(tensors, key=lambda meta: meta.name)

    def publish(self, version: int, deadline: float) -> Release:
        assert self._publisher is not None, "load() comes first"
        return self._publisher.publish(version, deadline=deadline)

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()


def _refuse(message: str) -> errors.RefusedError:
    return errors.RefusedError(message, code="INVALID_ARGUMENT", reason="invalid_request",
                               remedy="use route: tensors")
