"""NeMo-RL's workers as weightwire.nemo_rl sees them, over real Ray: policy ranks with FSDP2, vLLM workers with an engine."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import weightwire.torch
import weightwire.vllm


@ray.remote
class PolicyWorker:
    """As DTensorPolicyWorker: `cfg`, `model`."""

    def __init__(self, rank: int, world_size: int, store: str, model: str):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
        self.cfg = {"model_name": model, "megatron_cfg": {"enabled": False}}
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        mesh = init_device_mesh("cpu", (world_size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def step(self, factor: float):
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(factor)

    def free(self):
        self.storage = self.model.lm_head.weight.to_local().untyped_storage()
        self.kept = torch.frombuffer(bytearray(bytes(self.storage)), dtype=torch.uint8)
        self.storage.resize_(0)

    def bring_back(self):
        self.storage.resize_(self.kept.numel())
        self.storage.copy_(self.kept.untyped_storage())


class Driver:
    """In the place of weightwire.vllm.EngineDriver, which needs a vLLM; what it leads is a torch module."""

    def __init__(self, engine, *, name, agent, job, checkpoint, pause="abort"):
        self._where = dict(group=name, rank=0, world_size=1, agent=agent, job=job)
        self._engine, self._receiver, self._stop = engine, None, threading.Event()
        self.serving, self.last_error, self.pause = None, None, pause
        self.ready = self._refuses = False
        self._receiving = threading.Lock()

    def init(self):
        self._receiver = weightwire.torch.Receiver(self._engine, **self._where)
        self.ready = True

    def start(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self):
        self.init()
        while not self._stop.is_set():
            self.step(0.2)

    def step(self, timeout):
        with self._receiving:
            if not self._refuses:
                if (offer := self._receiver.receive(timeout)) is not None:
                    self.serving = {"version": offer.version}
                return
        self.last_error = "the engine refuses"
        self._stop.wait(min(timeout, 0.2))

    def refuse(self, refuse: bool):
        """From the return on: a step under way may receive one more version."""
        self._refuses = refuse
        with self._receiving:
            pass

    def status(self):
        return dict(serving=self.serving, ready=self.ready, last_error=self.last_error)

    def close(self):
        self._stop.set()


class GenerationWorker:
    """As VllmGenerationWorker: `llm`."""

    def __init__(self, model: str):
        weightwire.vllm.EngineDriver = Driver
        self.llm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        with torch.no_grad():
            for parameter in self.llm.parameters():
                parameter.zero_()

    def weights(self):
        return {name: (str(p.dtype), p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
                for name, p in self.llm.named_parameters()}

    def refuse(self, refuse: bool):
        self.weightwire_driver.refuse(refuse)
        return self.weightwire_driver.pause


class AsyncGenerationWorker(GenerationWorker):
    async def generate_async(self):
        """Makes Ray run the actor on an event loop."""


def job(model: str, store: str, engines: int, asynchronous: bool):
    """(policy, generation) with what Policy and VllmGeneration have; engines of two workers, the first leads."""
    policy = SimpleNamespace(worker_group=SimpleNamespace(workers=[
        PolicyWorker.options(num_cpus=0).remote(rank, 2, store, model) for rank in range(2)]))
    cls = ray.remote(AsyncGenerationWorker if asynchronous else GenerationWorker)
    workers = [None if i % 2 else cls.options(num_cpus=0).remote(model) for i in range(2 * engines)]
    annotations = SimpleNamespace(get_worker_coords=lambda i: dict(
        data_parallel=i // 2, pipeline_parallel=0, tensor_parallel=i % 2))
    generation = SimpleNamespace(
        cfg={"colocated": {"enabled": False}, "vllm_cfg": {"async_engine": asynchronous}}, weight_synchronizer=None,
        worker_group=SimpleNamespace(workers=workers, sharding_annotations=annotations))
    return policy, generation
