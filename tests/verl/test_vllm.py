"""verl's vLLM adapter, its sender and what it puts into vLLM's workers bring versions into a real vLLM, which answers as transformers does
with the same weights. Stood in for: Ray and verl's server actor, by calls of this process (test_vllm_ray.py has both)."""

import asyncio
import functools
import importlib
import os
import threading
import types

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", RANK="0", RAY_LOCAL_WORLD_SIZE="1")

import pytest
import torch
import vllm
import cpu_vllm  # noqa: F401  after vLLM
import vllm_model
from conftest import Job
from verl.workers.rollout.vllm_rollout import bucketed_weight_transfer, vllm_rollout
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension as Worker

import weightwire.verl.vllm as adapter
from weightwire import DeadlineError, RefusedError, verl_plugin

verl_plugin.bound_receiver()  # as in a worker of verl's server


class Call:
    """`handle.method.remote(…)` as Ray has it, in a thread. It begins at once: verl's own sender then blocks the caller's loop."""

    def __init__(self, call):
        self._call = call

    def remote(self, *args, **kwargs):
        return asyncio.get_running_loop().run_in_executor(None, functools.partial(self._call, *args, **kwargs))


class Server:
    """The methods of verl's vLLMHttpServer that its adapter calls."""

    def __init__(self, llm):
        self.llm, self.told, self.steps = llm, [], []
        self.collective_rpc = Call(self._rpc)
        self.clear_kv_cache = Call(lambda: llm.reset_prefix_cache())
        self.set_global_steps = Call(self.steps.append)

    def _rpc(self, method, timeout, args, kwargs):
        self.told.append(method)
        self.llm.collective_rpc(method, timeout=timeout, args=args, kwargs=kwargs)

    def answer(self):
        made = self.llm.generate([{"prompt_token_ids": vllm_model.PROMPT}], vllm.SamplingParams(
            temperature=0.0, max_tokens=vllm_model.TOKENS, logprobs=0, ignore_eos=True, detokenize=False), use_tqdm=False)[0].outputs[0]
        return list(made.token_ids), [of[token].logprob for token, of in zip(made.token_ids, made.logprobs)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(vllm_model.write(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llm(path):
    return vllm.LLM(path, load_format="dummy", dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4,
                    skip_tokenizer_init=True, kv_cache_memory_bytes=64 << 20,
                    worker_extension_cls=f"{Worker.__module__}.{Worker.__name__}")


def weights(seed: int) -> dict:
    torch.manual_seed(seed)
    model = vllm_model.Qwen2ForCausalLM(vllm_model.CONFIG)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


class Rig:
    def __init__(self, daemon, llm, path, monkeypatch, cls, deadline=60.0):
        monkeypatch.setattr(vllm_rollout, "ray", types.SimpleNamespace(
            get_runtime_context=lambda: types.SimpleNamespace(get_job_id=lambda: "0")))
        self.now = {}
        self.job = Job(daemon, lambda rank: iter(self.now["weights"].items()))
        self.server = Server(llm)
        self.worker = self.job.add_rollout()
        self.worker.server_adapter = cls(vllm_model.rollout_config(vllm_model.checkpoint_config()), None, None, replica_rank=0)
        self.worker.server_adapter.server_handle = self.server
        self.worker.checkpoint_engine._deadline = deadline

    async def update(self, version: int):
        self.now["weights"] = weights(version)
        return await self.job.update(version)


@pytest.fixture
def run(daemon, llm, path, monkeypatch):
    def go(scenario, cls=None, **options):
        async def all_of_it():
            rig = Rig(daemon, llm, path, monkeypatch, cls or adapter.ServerAdapter, **options)
            try:
                await scenario(rig)
            finally:
                await rig.job.close()

        asyncio.run(all_of_it())

    return go


def assert_answers(server, path, want: dict) -> list[int]:
    tokens, logprobs = server.answer()
    assert (tokens, pytest.approx(logprobs, abs=1e-3)) == vllm_model.expected(path, want)
    return tokens


def test_five_versions_with_a_tensor_larger_than_the_bucket(run, path, client):
    async def scenario(rig):
        seen = set()
        for version in range(1, 6):
            sent, received = await rig.update(version)
            assert received is None and sent["weightwire/version"] == version
            seen.add(tuple(assert_answers(rig.server, path, rig.now["weights"])))
            assert rig.server.steps[-1] == version and client.status().committed_version == version
        assert len(seen) == 5 and adapter.ServerAdapter is adapter.WeightwireAdapter

    run(scenario)


def test_verls_own_sender_gives_up_on_such_a_tensor_and_the_worker_does_not_wait_without_an_end(run, monkeypatch):
    # Longer than the version takes to come on a busy machine: once the worker has given up nobody takes the first word of verl's sender, which waits on.
    monkeypatch.setattr(verl_plugin, "SILENCE_SECONDS", 20.0)

    async def scenario(rig):
        calls = []
        rig.server.collective_rpc = Call(lambda *args, **kwargs: calls.append(pytest.raises(TimeoutError, rig.server._rpc, *args, **kwargs)))
        _, received = await rig.update(1)
        assert isinstance(received, AssertionError) and "too large to fit in the bucket" in str(received)
        for _ in range(600):
            if calls:
                break
            await asyncio.sleep(0.1)
        assert len(calls) == 1

    run(scenario, vllm_rollout.ServerAdapter)


def test_a_worker_that_fails_while_it_loads_ends_the_update_with_its_reason(run, path, monkeypatch):
    async def scenario(rig):
        def fails(*_, **__):
            raise ValueError("no room for this weight")

        with monkeypatch.context() as broken:
            broken.setattr(Worker, "_update_weights", fails)
            _, received = await asyncio.wait_for(rig.update(1), 20)
        assert isinstance(received, ValueError) and "no room" in str(received)
        assert (await rig.update(2))[1] is None
        assert_answers(rig.server, path, rig.now["weights"])

    run(scenario)


@pytest.mark.parametrize("method", ["_update_weights", "update_weights_from_ipc"])
def test_a_worker_that_hangs_ends_the_update_at_its_deadline(run, path, monkeypatch, method):
    """Before the first bucket is loaded, and once all are."""
    async def scenario(rig):
        hangs, original = threading.Event(), getattr(Worker, method)

        def late(self, *args, **kwargs):
            if method == "_update_weights":
                hangs.wait(60)
            original(self, *args, **kwargs)
            hangs.wait(60)

        with monkeypatch.context() as broken:
            broken.setattr(Worker, method, late)
            broken.setattr(verl_plugin, "SILENCE_SECONDS", 3.0)
            _, received = await asyncio.wait_for(rig.update(1), 40)
            assert isinstance(received, DeadlineError)
            hangs.set()
            await asyncio.sleep(5)  # longer than the worker waits for more
        rig.worker.checkpoint_engine._deadline = 60.0
        assert (await rig.update(2))[1] is None
        assert_answers(rig.server, path, rig.now["weights"])

    run(scenario, deadline=5.0)


def test_vllm_hears_nothing_of_a_round_that_failed(run, path):
    async def scenario(rig):
        assert (await rig.update(1))[1] is None
        told, served = list(rig.server.told), rig.now["weights"]

        def fails(rank):
            yield next(iter(weights(2).items()))
            raise RuntimeError("the collective was aborted")

        rig.job.params = fails
        sent, received = await rig.job.update(2)
        assert isinstance(sent, RuntimeError) and received is None
        assert rig.server.told == told and rig.server.steps == [1]
        assert_answers(rig.server, path, served)

    run(scenario)


def test_of_the_workers_on_one_node_one_holds_the_model_and_sends_to_all(daemon, client, monkeypatch):
    """verl's receivers of two workers of one replica, without their vLLM."""
    monkeypatch.setattr(vllm_rollout, "ray", types.SimpleNamespace(
        get_runtime_context=lambda: types.SimpleNamespace(get_job_id=lambda: "0")))
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "2")
    held, sent = [{}, {}], {**weights(1), "half": torch.randn(33).to(torch.float16)}

    def receive(method, timeout, args, kwargs):
        assert (method, kwargs) == ("update_weights_from_ipc", {"use_shm": True})

        def one(rank):
            handle = f"ipc:///tmp/rl-colocate-zmq-0-replica-0-rank-{rank}.sock"
            bucketed_weight_transfer.BucketedWeightReceiver(handle, torch.device("cpu"), True).receive_weights(
                lambda bucket, is_last: held[rank].update({name: tensor.clone() for name, tensor in bucket}))

        threads = [threading.Thread(target=one, args=(rank,)) for rank in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    async def scenario():
        job = Job(daemon, lambda rank: iter(sent.items()), stage="node")
        config = vllm_model.rollout_config(vllm_model.checkpoint_config(), tp=2)
        for rank in (0, 1):
            monkeypatch.setenv("RANK", str(rank))
            job.add_rollout().server_adapter = adapter.ServerAdapter(config, None, None, replica_rank=0)
        nothing = Call(lambda *_: None)
        job.rollouts[0].server_adapter.server_handle = types.SimpleNamespace(
            collective_rpc=Call(receive), clear_kv_cache=nothing, set_global_steps=nothing)
        try:
            assert (await job.update(1))[1:] == [None, None]
            assert len(client.status().engines) == 1
        finally:
            await job.close()

    asyncio.run(scenario())
    for got in held:
        assert got.keys() == sent.keys() and all(got[name].dtype == tensor.dtype and torch.equal(got[name], tensor)
                                                 for name, tensor in sent.items())


def test_quantization_aware_training_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(vllm_rollout, "ray", types.SimpleNamespace(
        get_runtime_context=lambda: types.SimpleNamespace(get_job_id=lambda: "0")))
    with pytest.raises(RefusedError, match="rollout.qat.enable"):
        adapter.ServerAdapter(vllm_model.rollout_config(vllm_model.checkpoint_config(), qat={"enable": True}), None, None, replica_rank=0)


def test_a_verl_that_differs_keeps_its_own_adapter(monkeypatch):
    class Other(bucketed_weight_transfer.BucketedWeightSender):
        def __init__(self, zmq_handle, bucket_bytes):
            pass

    with monkeypatch.context() as changed:
        changed.setattr(bucketed_weight_transfer, "BucketedWeightSender", Other)
        assert importlib.reload(adapter).ServerAdapter is vllm_rollout.ServerAdapter
        assert adapter.changed() == ["BucketedWeightSender"]
    assert importlib.reload(adapter).ServerAdapter is adapter.WeightwireAdapter
