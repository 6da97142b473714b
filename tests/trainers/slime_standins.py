"""slime and Ray as far as weightwire.slime sees them: a training rank's modules, and an engine actor in front of an
SGLang server. The server is a thread in the test's own process; actors reach it over a socket, as they would by HTTP."""

from __future__ import annotations

import base64
import concurrent.futures
import multiprocessing.connection
import pathlib
import pickle
import sys
import threading
import traceback
from types import ModuleType, SimpleNamespace

import weightwire.sglang


class SglangServer:
    """Takes what slime's engine actor posts; `load_weights` is the model's, a dictionary of tensors here.

    faults: method -> {which call of it: what happens instead}; "hang" or the message of an error
    """

    def __init__(self, path: pathlib.Path, faults: dict[str, dict[int, str]]):
        self.path, self._faults = str(path), faults
        self.calls: list[str] = []
        self.served: list[dict] = []  #: what the model held each time that generation went on
        self.versions: list[str] = []
        self.tensors: dict = {}
        self.fail_loading = ""
        self._closing = threading.Event()
        self._listener = multiprocessing.connection.Listener(self.path, "AF_UNIX")
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._closing.is_set():
            with self._listener.accept() as connection:
                request = connection.recv()
                if request is None:
                    return
            threading.Thread(target=self._answer, args=request, daemon=True).start()

    def _answer(self, reply_to: str, method: str, kwargs: dict):
        try:
            self.calls.append(method)
            fault = self._faults.get(method, {}).get(self.calls.count(method))
            if fault == "hang":
                self._closing.wait(600)
            elif fault and method != "update_weights_from_tensor":
                raise RuntimeError(fault)
            self.fail_loading = fault or ""
            answer = True, getattr(self, f"_{method}", lambda: None)(**kwargs)
        except BaseException:
            answer = False, traceback.format_exc()
        try:
            with multiprocessing.connection.Client(reply_to, "AF_UNIX") as connection:
                connection.send(answer)
        except OSError:
            pass  # nobody waits any more

    def _get_url(self):
        return f"http://127.0.0.1/{pathlib.Path(self.path).stem}"

    def _update_weights_from_tensor(self, serialized_named_tensors, load_format, flush_cache, weight_version):
        assert load_format == weightwire.sglang.LOADER and len(serialized_named_tensors) == 1
        assert flush_cache == (weight_version is not None)
        self.versions.append(weight_version)
        weightwire.sglang.load(self, pickle.loads(base64.b64decode(serialized_named_tensors[0])))
        return {"success": True, "message": "Success"}

    def named_parameters(self):
        return self.tensors.items()

    def parameters(self):
        return iter(self.tensors.values())

    def load_weights(self, pairs):
        for name, tensor in pairs:
            if self.fail_loading:
                raise KeyError(self.fail_loading)
            self.tensors[name] = tensor.clone()

    def _continue_generation(self):
        self.served.append(dict(self.tensors))

    def close(self):
        self._closing.set()
        with multiprocessing.connection.Client(self.path, "AF_UNIX") as connection:
            connection.send(None)
        self._thread.join(10)
        self._listener.close()


class EngineActor:
    """A handle as Ray gives it: method.remote(...) starts a call."""

    def __init__(self, server: str, own: pathlib.Path):
        self._server, self._own, self._count = server, own, 0
        self._pool = concurrent.futures.ThreadPoolExecutor(4)

    def __getattr__(self, method):
        return SimpleNamespace(remote=lambda **kwargs: self._pool.submit(self._call, method, kwargs))

    def _call(self, method, kwargs):
        self._count += 1
        own = f"{self._own}-{self._count}"
        with multiprocessing.connection.Listener(own, "AF_UNIX") as listener:
            with multiprocessing.connection.Client(self._server, "AF_UNIX") as connection:
                connection.send((own, method, kwargs))
            with listener.accept() as connection:
                good, answer = connection.recv()
        if not good:
            raise RuntimeError(answer)
        return answer


def install() -> SimpleNamespace:
    """The modules in a training rank; returns slime's actor module, whose updater class is not replaced yet."""
    import torch.distributed as dist

    group = dist.new_group(backend="gloo")
    actor = ModuleType("slime.backends.megatron_utils.actor")
    actor.UpdateWeightFromDistributed = None
    utils = ModuleType("slime.utils.distributed_utils")
    utils.get_gloo_group = lambda: group
    ray = ModuleType("ray")
    ray.get = lambda ref, timeout: ref.result(timeout)
    megatron_utils = ModuleType("slime.backends.megatron_utils")
    megatron_utils.actor = actor
    for module in (ray, ModuleType("slime"), ModuleType("slime.backends"), megatron_utils, actor,
                   ModuleType("slime.utils"), utils):
        sys.modules[module.__name__] = module
    return actor
