"""The same few calls on an engine, whichever way it is reached. Every call ends within its `timeout`, in seconds.

All methods block and raise on failure; `reset_prefix_cache` tells whether the cache is empty now, `asleep` whether vLLM has given
memory away, or somebody has paused it (vLLM says the same of both). `wake_up` gives "weights" or "kv_cache" back; with the last of
them vLLM schedules again. `replicas`: the data parallel indices that its calls reach; None: all that the workers know of.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any, Coroutine, Iterator, Protocol, Sequence

from weightwire import errors

_START = {False: "start_weight_update", True: "start_draft_weight_update"}
#: What tells a vLLM that would load the weights by itself that there is nothing to load (0.24; `features.has_sessions`).
_DIRECT: dict[bool, dict[str, Any]] = {False: {}, True: {"is_checkpoint_format": False}}


class Port(Protocol):
    """What the driver asks of an engine."""

    needs_thread: bool
    look_seconds: float  #: between two looks at whether the engine sleeps, while nothing is to be done

    def replicas(self, timeout: float) -> list[int] | None: ...
    def init(self, settings: dict[str, Any], timeout: float) -> None: ...
    def pause(self, mode: str, timeout: float) -> None: ...
    def start(self, draft: bool, timeout: float, direct: bool = False) -> None: ...
    def update(self, ticket: dict[str, Any], timeout: float) -> None: ...
    def finish(self, timeout: float) -> None: ...
    def set_version(self, version: str, timeout: float) -> None: ...
    def reset_prefix_cache(self, running: bool, timeout: float) -> bool: ...
    def resume(self, timeout: float) -> None: ...
    def asleep(self, timeout: float) -> bool: ...
    def wake_up(self, tag: str, timeout: float) -> None: ...
    def generate(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> list[int]: ...


class LlmPort:
    """A `vllm.LLM`. It answers only while its caller waits in `generate`, so there is nothing to pause. Its calls
    cannot be given up: vLLM loses track of its workers' answers when one runs out of time."""

    needs_thread = False
    look_seconds = 0.0

    def __init__(self, llm: Any):
        self._llm = llm

    def _rpc(self, method: str, **kwargs: Any) -> None:
        self._llm.collective_rpc(method, kwargs=kwargs)

    def ask(self, method: str, arguments: dict[str, Any], timeout: float) -> list[Any]:
        """A method of the workers, and what each of them answers."""
        with _calling(method):
            return list(self._llm.collective_rpc(method, kwargs=arguments))

    def replicas(self, timeout: float) -> list[int] | None:
        return _managed(self._llm.llm_engine)

    def init(self, settings: dict[str, Any], timeout: float) -> None:
        with _calling("init_weight_transfer_engine"):
            self._rpc("init_weight_transfer_engine", init_info=settings)

    def pause(self, mode: str, timeout: float) -> None:
        if self._llm.llm_engine.has_unfinished_requests():
            raise errors.NotReadyError("the LLM has unfinished requests", code="FAILED_PRECONDITION",
                                       remedy="call step() between generate() calls, or use AsyncLLM")

    def start(self, draft: bool, timeout: float, direct: bool = False) -> None:
        with _calling(_START[draft]):
            self._rpc(_START[draft], **_DIRECT[direct])

    def update(self, ticket: dict[str, Any], timeout: float) -> None:
        self._rpc("update_weights", update_info=ticket)

    def finish(self, timeout: float) -> None:
        self._rpc("finish_weight_update")

    def set_version(self, version: str, timeout: float) -> None:
        if hasattr(self._llm, "update_weight_version"):  # since vLLM 0.27
            self._llm.update_weight_version(version)

    def load_adapter(self, request: Any, timeout: float) -> None:
        self._llm.llm_engine.add_lora(request)

    def reset_prefix_cache(self, running: bool, timeout: float) -> bool:
        return bool(self._llm.reset_prefix_cache(reset_running_requests=running))

    def resume(self, timeout: float) -> None:
        pass

    def asleep(self, timeout: float) -> bool:
        return bool(self._llm.llm_engine.is_sleeping())

    def wake_up(self, tag: str, timeout: float) -> None:
        self._llm.wake_up(tags=[tag])

    def generate(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> list[int]:
        from vllm import SamplingParams
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        out = self._llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
        return list(out[0].outputs[0].token_ids)


class AsyncPort:
    """An `AsyncLLM` that lives on `loop`; called from another thread."""

    needs_thread = True
    look_seconds = 0.0

    def __init__(self, llm: Any, loop: asyncio.AbstractEventLoop):
        self._llm, self.loop = llm, loop

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        # Out of time the call goes on: vLLM loses track of its workers' answers when one is given up.
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def _rpc(self, method: str, timeout: float, **kwargs: Any) -> None:
        self._run(self._llm.collective_rpc(method, kwargs=kwargs), timeout)

    def ask(self, method: str, arguments: dict[str, Any], timeout: float) -> list[Any]:
        """As LlmPort's."""
        with _calling(method):
            return list(self._run(self._llm.collective_rpc(method, kwargs=arguments), timeout))

    def replicas(self, timeout: float) -> list[int] | None:
        return _managed(self._llm)

    def init(self, settings: dict[str, Any], timeout: float) -> None:
        with _calling("init_weight_transfer_engine"):
            self._rpc("init_weight_transfer_engine", timeout, init_info=settings)

    def pause(self, mode: str, timeout: float) -> None:
        self._run(self._llm.pause_generation(mode=mode, clear_cache=False), timeout)

    def start(self, draft: bool, timeout: float, direct: bool = False) -> None:
        with _calling(_START[draft]):
            self._rpc(_START[draft], timeout, **_DIRECT[direct])

    def update(self, ticket: dict[str, Any], timeout: float) -> None:
        self._rpc("update_weights", timeout, update_info=ticket)

    def finish(self, timeout: float) -> None:
        self._rpc("finish_weight_update", timeout)

    def set_version(self, version: str, timeout: float) -> None:
        if hasattr(self._llm, "update_weight_version"):
            self._run(self._llm.update_weight_version(version), timeout)

    def load_adapter(self, request: Any, timeout: float) -> None:
        self._run(self._llm.add_lora(request), timeout)

    def reset_prefix_cache(self, running: bool, timeout: float) -> bool:
        return bool(self._run(self._llm.reset_prefix_cache(reset_running_requests=running), timeout))

    def resume(self, timeout: float) -> None:
        self._run(self._llm.resume_generation(), timeout)

    def asleep(self, timeout: float) -> bool:
        return bool(self._run(self._llm.is_sleeping(), timeout))

    def wake_up(self, tag: str, timeout: float) -> None:
        self._run(self._llm.wake_up(tags=[tag]), timeout)

    def generate(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> list[int]:
        return list(self._run(self._generate(list(prompt), max_tokens), timeout))

    async def _generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        import uuid

        from vllm import SamplingParams
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        tokens: list[int] = []
        async for out in self._llm.generate({"prompt_token_ids": prompt}, params, f"weightwire-{uuid.uuid4().hex}"):
            tokens = list(out.outputs[0].token_ids)
        return tokens


class HttpPort:
    """A `vllm serve` with VLLM_SERVER_DEV_MODE=1. Those routes have no rights: keep them on loopback."""

    needs_thread = True
    look_seconds = 5.0  # each look is a line in the server's log

    def __init__(self, base_url: str):
        self._base = base_url.rstrip("/")
        self._model: str | None = None

    def _call(self, path: str, timeout: float, body: dict[str, Any] | None = None,
              query: dict[str, str] | None = None, method: str = "POST", optional: bool = False) -> dict[str, Any]:
        """optional: a server that has no such route is as well."""
        url = f"{self._base}/{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return dict(json.loads(response.read() or b"{}"))
        except urllib.error.HTTPError as error:
            if optional and error.code == 404:
                return {}
            remedy = "start the server with VLLM_SERVER_DEV_MODE=1" if error.code == 404 else ""
            raise errors.NotReadyError(f"/{path}: HTTP {error.code}: {error.read()[:2000].decode(errors='replace')}",
                                       code="FAILED_PRECONDITION", remedy=remedy) from None
        except (OSError, ValueError) as error:
            raise errors.UnavailableError(f"{url}: {error}", code="UNAVAILABLE") from error

    def replicas(self, timeout: float) -> list[int] | None:
        info = self._call("server_info", timeout, query={"config_format": "json"}, method="GET", optional=True)
        config = info.get("vllm_config")
        parallel = config.get("parallel_config") if isinstance(config, dict) else None
        if not isinstance(parallel, dict) or "data_parallel_size" not in parallel:
            return None
        local = parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb")
        first = int(parallel.get("data_parallel_index", parallel.get("data_parallel_rank")) or 0)
        return list(range(first, first + parallel["data_parallel_size_local" if local else "data_parallel_size"]))

    def init(self, settings: dict[str, Any], timeout: float) -> None:
        self._call("init_weight_transfer_engine", timeout, {"init_info": settings})

    def pause(self, mode: str, timeout: float) -> None:
        self._call("pause", timeout, query={"mode": mode, "clear_cache": "false"})

    def start(self, draft: bool, timeout: float, direct: bool = False) -> None:
        self._call(_START[draft], timeout, _DIRECT[direct])

    def update(self, ticket: dict[str, Any], timeout: float) -> None:
        self._call("update_weights", timeout, {"update_info": ticket})

    def finish(self, timeout: float) -> None:
        self._call("finish_weight_update", timeout)

    def set_version(self, version: str, timeout: float) -> None:
        self._call("update_weight_version", timeout, {"new_version": version}, optional=True)  # since vLLM 0.27

    def reset_prefix_cache(self, running: bool, timeout: float) -> bool:
        answer = self._call("reset_prefix_cache", timeout, query={"reset_running_requests": str(running).lower()})
        return bool(answer["success"])

    def resume(self, timeout: float) -> None:
        self._call("resume", timeout)

    def asleep(self, timeout: float) -> bool:
        return bool(self._call("is_sleeping", timeout, method="GET", optional=True).get("is_sleeping", False))

    def wake_up(self, tag: str, timeout: float) -> None:
        self._call("wake_up", timeout, query={"tags": tag})

    def generate(self, prompt: Sequence[int], max_tokens: int, timeout: float) -> list[int]:
        if self._model is None:
            self._model = self._call("v1/models", timeout, method="GET")["data"][0]["id"]
        answer = self._call("v1/completions", timeout, {
            "model": self._model, "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True})
        return list(answer["choices"][0]["token_ids"])


def _managed(engine: Any) -> list[int] | None:
    """A dense model's replicas know nothing of each other: of them only the client that starts them does."""
    managed = getattr(getattr(engine, "engine_core", None), "engine_ranks_managed", None)
    return list(managed) if managed else None


def port_of(engine: Any) -> Port:
    """The port for a `vllm.LLM`, an `AsyncLLM` (call this on its event loop), or a base URL. RefusedError: a vLLM of which
    weightwire needs more than it has."""
    if isinstance(engine, str):
        return HttpPort(engine)
    missing = [name for name in ("collective_rpc", "reset_prefix_cache") if not hasattr(engine, name)]
    if missing:
        raise _unsupported(f"{type(engine).__name__} has no {', '.join(missing)}")
    if hasattr(engine, "pause_generation"):
        return AsyncPort(engine, asyncio.get_running_loop())
    return LlmPort(engine)


def is_here(port: Port) -> bool:
    """Whether the caller runs on the event loop that this port's calls need: it must not wait for them."""
    try:
        return isinstance(port, AsyncPort) and asyncio.get_running_loop() is port.loop
    except RuntimeError:
        return False


def is_unsupported(error: BaseException) -> bool:
    """Whether no later try can do better: the engine's vLLM is too old, or built without weight transfer."""
    return isinstance(error, errors.RefusedError) and error.code == "UNIMPLEMENTED"


def _unsupported(what: str) -> errors.RefusedError:
    return errors.RefusedError(f"this vLLM is not supported: {what}", code="UNIMPLEMENTED", reason="protocol_version",
                               remedy="see docs/vllm.md for the versions that are")


@contextlib.contextmanager
def _calling(method: str) -> Iterator[None]:
    """A worker without this method answers with an AttributeError, which vLLM passes on as a text."""
    try:
        yield
    except Exception as error:
        if f"no attribute '{method}'" in str(error) or isinstance(error, NotImplementedError):
            raise _unsupported(str(error)) from error
        raise
