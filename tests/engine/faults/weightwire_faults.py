"""A vLLM plug-in of the tests that makes a worker fail at a chosen moment; the product knows nothing of it.

The file named by WEIGHTWIRE_ENGINE_FAULTS holds {"id", "step", "rank", "times"}: on that rank, the first `times` calls of
the step raise. Steps: prepare, start, update (half of the modules are written by then), finish. An empty file: none.
WEIGHTWIRE_ENGINE_MISSING=MODULE:NAME takes NAME out of vLLM, as another version may.
WEIGHTWIRE_ENGINE_GPU=1: the parameters of its rank stand for ones on the GPU of that number.
"""

import importlib
import json
import os

_counts = {}


def _fail(step, rank):
    text = open(os.environ["WEIGHTWIRE_ENGINE_FAULTS"]).read()
    fault = json.loads(text) if text else {}
    if fault.get("step") == step and fault["rank"] == rank:
        _counts[fault["id"]] = _counts.get(fault["id"], 0) + 1
        if _counts[fault["id"]] <= fault["times"]:
            raise RuntimeError(f"injected in {step} on rank {rank}")


def register():
    if "WEIGHTWIRE_ENGINE_GPU" in os.environ:
        from tests.support.gpu_standin import ParametersOnGpus
        ParametersOnGpus.install_once()
    if missing := os.environ.get("WEIGHTWIRE_ENGINE_MISSING"):
        module, _, name = missing.partition(":")
        vars(importlib.import_module(module)).pop(name, None)  # once in each process
    if "WEIGHTWIRE_ENGINE_FAULTS" not in os.environ:
        return
    from weightwire.vllm import install
    from weightwire.vllm.engine import WeightwireEngine as engine
    if getattr(engine, "faulty", False):
        return
    engine.faulty = True

    def before(name, step):
        method = getattr(engine, name)

        def wrapped(self, *args):
            _fail(step, self._rank)
            return method(self, *args)
        setattr(engine, name, wrapped)

    before("_prepare", "prepare")
    before("_start", "start")
    before("_installed", "finish")

    receive, put = engine._receive, install._install_module

    def receive_half(self, ticket):
        total = len({meta.name.rpartition(".")[0] for meta in self._observed})
        done = []

        def put_some(*args):
            if len(done) == total // 2:
                _fail("update", self._rank)
            done.append(1)
            return put(*args)
        install._install_module = put_some
        try:
            return receive(self, ticket)
        finally:
            install._install_module = put
    engine._receive = receive_half
