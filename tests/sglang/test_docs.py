"""The snippet of docs/sglang.md through SGLang's own code, from Engine down to the model runner's updater, in one process.

Stood in for: the processes between them, and the model (test_hook.py's), since SGLang's run only on a GPU."""

import asyncio
import pathlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from sglang.srt.entrypoints import engine as entry
from sglang.srt.managers import tokenizer_control_mixin
from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.managers.tp_worker import BaseTpWorker
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.aio_rwlock import RWLock

import weightwire.sglang
import weightwire.torch
from test_hook import Model, checkpoint, process, weights  # noqa: F401  fixtures
from weightwire import AbortedError, Client

(SNIPPET,) = re.findall(r"```python\n(.*?)```", (pathlib.Path(__file__).resolve().parents[2] / "docs/sglang.md").read_text(),
                        re.S)


class Manager(tokenizer_control_mixin.TokenizerControlMixin):
    """SGLang's tokenizer process; what it sends to the scheduler is a call here."""

    def __init__(self, updater):
        self.is_pause, self.is_pause_cond, self.model_update_lock = False, asyncio.Condition(), RWLock()
        self.mm_processor, self.updater = None, updater

    def auto_create_handle_loop(self):
        pass

    def __getattr__(self, name):
        if not name.endswith("_communicator"):
            raise AttributeError(name)

        async def call(request):
            return [getattr(self.updater, name.removesuffix("_communicator"))(request)]

        return call


class Engine(entry.Engine):
    """SGLang's engine with everything in this process."""

    flushes = True
    started: list = []

    def __init__(self, **arguments):
        self.server_args = ServerArgs(**arguments)
        self.model = Model()
        runner = SimpleNamespace(weight_updater=weight_updater.WeightUpdater(
            tp_rank=0, device="cpu", gpu_id=0, model_config=None,
            custom_weight_loaders=self.server_args.custom_weight_loader, get_model=lambda: self.model,
            update_model_fields=None, recapture_cuda_graph=None, get_model_runner=lambda: None))
        worker = SimpleNamespace(weight_update_runners=lambda: [("target", runner)])
        worker.deserialize_own_rank = lambda payloads: BaseTpWorker.deserialize_own_rank(worker, payloads)
        self.updater = scheduler.SchedulerWeightUpdaterManager(
            tp_worker=worker, draft_worker=None, memory_saver_adapter=None, flush_cache=lambda **_: self.flushes,
            is_fully_idle=lambda **_: True, scheduler=SimpleNamespace(record_weight_version_change=lambda **_: None))
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = Manager(self.updater)
        Engine.started.append(self)


@pytest.fixture
def world(tmp_path, monkeypatch, process):  # noqa: F811
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    parallel = SimpleNamespace(tp_rank=0, tp_size=1, dp_size=1, tp_group=SimpleNamespace(cpu_group=dist.group.WORLD))
    import sglang.srt.managers.tp_worker
    for module in (entry, tokenizer_control_mixin, scheduler, sglang.srt.managers.tp_worker):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
    monkeypatch.setattr(sglang, "Engine", Engine)
    yield
    for rank in weightwire.sglang._ranks.values():
        rank.close()
    weightwire.sglang._ranks.clear()
    for engine in Engine.started:
        engine.loop.close()
    Engine.started.clear()
    dist.destroy_process_group()


def holds(engine, seed) -> bool:
    return torch.equal(engine.model.qk, torch.cat(list(weights(seed).values())))


def test_the_snippet_brings_a_version_and_sglangs_failures_are_raised(daemon, checkpoint, world, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WEIGHTWIRE_AGENT_SOCKET", daemon.agent_socket)
    now = weights(1)
    with weightwire.torch.Publisher(lambda: now.items(), rank=0, world_size=1) as trainer, Client(daemon.grpc) as client:
        trainer.publish(1)
        space = dict(checkpoint=checkpoint, version=1)
        exec(SNIPPET, space)
        engine, ww = space["engine"], space["ww"]
        assert holds(engine, 1)
        client.wait_version(1, timeout=30, engines=["engine-a"])

        # What the snippet would be without `update`: SGLang says no, and does not raise.
        good, why = engine.update_weights_from_tensor(ww.ticket("engine-a", checkpoint, 2), load_format=ww.LOADER)
        assert not good and "begin_weight_update" in why

        now = weights(2)
        trainer.publish(2)
        engine.flushes = False
        with pytest.raises(AbortedError, match="the cache was not flushed"):
            ww.update(engine, ww.ticket("engine-a", checkpoint, 2))
        engine.flushes = True
        ww.update(engine, ww.ticket("engine-a", checkpoint, 2))  # the session before was closed
        assert holds(engine, 2)

        now = weights(3)
        trainer.publish(3)  # as HTTP brings it, from another host
        assert engine.begin_weight_update()[0]
        request = entry.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=ww.payloads(ww.ticket("engine-a", checkpoint, 3), 1), load_format=ww.LOADER)
        assert engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_tensor(request)) == (
            True, "Success")
        assert engine.end_weight_update()[0] and holds(engine, 3)
