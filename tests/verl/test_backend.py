"""The backend behind verl's registry, driven through the update_weights of verl's own workers."""

import asyncio

import pytest
import torch
from conftest import BINARIES, Job
from demo.fleet import Daemon
from gpu_standin import FAKE, REPLACED, FakeTorchCuda
from verl.checkpoint_engine import CheckpointEngineRegistry

from weightwire import AbortedError, Client, DeadlineError, NotReadyError, Release, torch_cuda
from weightwire.tensor_stream import TensorSource


def model(seed: int, dtype=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Odd sizes; one tensor larger than a bucket, one of another dtype, one scalar."""
    g = torch.Generator().manual_seed(seed)
    shapes = {"embed": (300, 129), "layers.0.q": (17, 33), "layers.0.bias": (5,), "scale": ()}
    out = {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}
    return {**out, "router": torch.randn((3, 7), generator=g)}


def assert_same(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


def run(job: Job, scenario) -> None:
    async def all_of_it():
        try:
            await scenario()
        finally:
            await job.close()

    asyncio.run(all_of_it())


def test_every_version_arrives_whole_on_every_worker(daemon, client):
    now = {}
    job = Job(daemon, lambda rank: iter(now["weights"].items()))
    job.add_rollout(), job.add_rollout()

    async def scenario():
        for step in (1, 2, 5):
            now["weights"] = model(step)
            metrics, *rest = await job.update(step)
            assert rest == [None, None] and metrics["weightwire/version"] == step
            assert metrics["weightwire/failures"] == 0 and metrics["weightwire/blocked_seconds"] > 0
            for worker in job.rollouts:
                assert_same(worker.server_adapter.weights, now["weights"])
            assert client.status().committed_version == step

    run(job, scenario)


@pytest.fixture
def standin():
    """Of torch's CUDA: tests/support/gpu_standin."""
    before = {name: getattr(torch_cuda, name) for name in REPLACED}
    yield FakeTorchCuda().install()
    for name, function in before.items():
        setattr(torch_cuda, name, function)


@pytest.mark.parametrize("lent, device", [(32 << 20, "auto"), (32 << 20, "cuda:1"), (64 << 10, "auto")])
def test_a_rollout_worker_takes_versions_in_memory_of_its_gpu(tmp_path, standin, lent, device):
    """As views of it, which nothing of this process has copied to the host; where the agent lends too little, in the host's memory."""
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0", gpu="required",
                 gpu_slab_bytes=lent, gpu_library=FAKE, transports="[shm, tcp]")
    now, places = {}, []
    job = Job(hub, lambda rank: iter(now["weights"].items()), device=device)
    worker = job.add_rollout()
    receive = worker.checkpoint_engine.receive_weights

    def spied(*args, **more):
        weights = receive(*args, **more)
        named = weights._named
        weights._named = lambda version: ((name, places.append(standin.gpu_of(tensor)) or tensor) for name, tensor in named(version))
        return weights
    worker.checkpoint_engine.receive_weights = spied

    async def scenario():
        for step in (1, 2, 3):
            now["weights"], before = model(step), standin.count("host_bytes")
            places.clear()
            assert (await job.update(step))[1:] == [None]
            assert_same(worker.server_adapter.weights, now["weights"])
            assert set(places) == {{"cuda:1": 1}.get(device, 0) if lent > 64 << 10 else None}
            assert standin.count("host_bytes") == before

    run(job, scenario)
    assert hub.stop() == 0


def test_ranks_other_than_the_first_only_take_part_in_the_collectives(daemon):
    read = []

    def params(rank):
        for named in model(3).items():
            read.append((rank, named[0]))
            yield named

    job = Job(daemon, params, actors=2)
    job.add_rollout()

    async def scenario():
        first, second, rollout = await job.update(1)
        assert (second, rollout) == ({}, None) and first["weightwire/version"] == 1
        assert [n for r, n in read if r == 0] == [n for r, n in read if r == 1] == list(model(3))
        assert_same(job.rollouts[0].server_adapter.weights, model(3))

    run(job, scenario)


def test_replicas_come_and_go_without_the_others_noticing(daemon, client):
    now = {}
    job = Job(daemon, lambda rank: iter(now["weights"].items()))
    first = job.add_rollout()

    async def scenario():
        now["weights"] = model(1)
        await job.update(1)
        pids = {p.name: p for p in client.status().participants}
        second = job.add_rollout()
        now["weights"] = model(2)
        assert (await job.update(2))[1:] == [None, None]
        for worker in (first, second):
            assert_same(worker.server_adapter.weights, model(2))
        now["weights"] = model(3)  # the second is left out: it does not hold up the fleet
        assert (await job.update(3, rollouts=[first]))[1:] == [None]
        client.wait_version(3, timeout=30)
        assert_same(second.server_adapter.weights, model(2))
        now["weights"] = model(4)  # and taken in again
        assert (await job.update(4))[1:] == [None, None]
        for worker in (first, second):
            assert_same(worker.server_adapter.weights, model(4))
        again = {p.name: p for p in client.status().participants}
        assert all(again[name] == pid for name, pid in pids.items()), "somebody registered anew"

    run(job, scenario)


def test_a_coordinator_that_forgot_everything_costs_no_round_and_brings_no_old_weights(tmp_path):
    """Versions count from 1 again; what the workers hold under higher numbers must not be taken for them."""

    def start(listen):
        return Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen=listen)

    daemons = [start("127.0.0.1:0")]
    now = {}
    job = Job(daemons[0], lambda rank: iter(now["weights"].items()))
    worker = job.add_rollout()

    async def scenario():
        now["weights"] = model(1)
        assert (await job.update(50))[0]["weightwire/version"] == 50
        assert await asyncio.to_thread(daemons[0].stop) == 0
        daemons.append(await asyncio.to_thread(start, daemons[0].grpc))
        now["weights"] = model(2)
        sent, received = await job.update(1)
        assert (sent["weightwire/version"], sent["weightwire/failures"], received) == (1, 0, None)
        assert_same(worker.server_adapter.weights, model(2))

    try:
        run(job, scenario)
    finally:
        assert daemons[-1].stop() == 0


def test_cached_weights_are_what_arrived_last(daemon):
    job = Job(daemon, lambda rank: iter(model(8).items()))
    engine = job.add_rollout().checkpoint_engine

    async def cached():
        return {name: tensor.clone() async for name, tensor in engine.get_weights()}

    async def scenario():
        with pytest.raises(NotReadyError):
            await cached()
        await job.update(1)
        assert_same(await cached(), model(8))

    run(job, scenario)


def test_a_failed_round_ends_everywhere_and_rollouts_keep_the_old_version(daemon, client):
    """The trainer's agent is asked for a version that cannot be: a missing worker."""
    now = {"weights": model(1)}
    job = Job(daemon, lambda rank: iter(now["weights"].items()), failures_max=1)
    job.actors[0].checkpoint_engine._deadline = 3.0  # rollout workers would wait for 30 s
    worker = job.add_rollout()

    async def scenario():
        await job.update(1)
        now["weights"] = model(2)
        absent = CheckpointEngineRegistry.new("weightwire", **job._options)

        async def update_without_one(step):
            engines = [job.actors[0].checkpoint_engine, worker.checkpoint_engine, absent]
            metadata = [e.prepare() for e in engines]
            actor, rollout = type(absent).build_topology(1, 2, metadata)
            engines[0].init_process_group(**{k: v[0] for k, v in actor.items()})
            engines[1].init_process_group(**{k: v[0] for k, v in rollout.items()})
            return await asyncio.gather(engines[0].send_weights(iter(now["weights"].items()), step),
                                        worker.server_adapter.update_weights(worker.checkpoint_engine.receive_weights()),
                                        return_exceptions=True)

        sent, received = await update_without_one(2)
        assert sent == {"weightwire/failures": 1.0} and received is None
        assert not worker.server_adapter.open and worker.server_adapter.updates == 2
        assert_same(worker.server_adapter.weights, model(1))
        assert client.status().committed_version == 1
        sent, received = await update_without_one(3)  # one too many
        assert isinstance(sent, DeadlineError) and absent._name in str(sent)
        assert isinstance(received, AbortedError) and absent._name in str(received)
        now["weights"] = model(4)
        sent, received = await job.update(4)
        assert sent["weightwire/failures"] == 0 and received is None
        assert_same(worker.server_adapter.weights, model(4))

    run(job, scenario)


def test_an_actor_that_dies_while_it_exports_fails_the_round_for_all(daemon):
    now = {"fail": False}

    def params(rank):
        yield "w", torch.ones(4)
        if now["fail"]:
            raise RuntimeError("the collective was aborted")
        yield "x", torch.ones(4)

    job = Job(daemon, params)
    worker = job.add_rollout()

    async def scenario():
        await job.update(1)
        now["fail"] = True
        sent, received = await job.update(2)
        assert isinstance(sent, RuntimeError) and received is None
        assert worker.checkpoint_engine._failures == 1
        assert_same(worker.server_adapter.weights, {"w": torch.ones(4), "x": torch.ones(4)})

    run(job, scenario)


def test_memory_that_is_still_read_is_not_written_and_the_stream_is_read_to_its_end():
    """A round failed by its deadline while its version was on its way; other ranks are inside the collectives."""
    source = TensorSource(1 << 16, agent="/nowhere")
    stream = iter(model(1).items())
    source.load(stream, 1.0)
    source._last = Release(1, lambda version: None)  # nobody released it
    stream = iter(model(2).items())
    with pytest.raises(DeadlineError, match="version 1 is not released"):
        source.load(stream, 0.1)
    assert next(stream, None) is None
    assert_same(source._buckets._views, model(1))
    source.close()


def test_the_first_round_must_succeed(daemon):
    job = Job(daemon, lambda rank: iter([("w", torch.ones(2)), ("w", torch.ones(2))]))
    job.add_rollout()

    async def scenario():
        sent, received = await job.update(1)
        assert isinstance(sent, ValueError) and "twice" in str(sent)
        assert isinstance(received, AbortedError) and "twice" in str(received)

    run(job, scenario)


def test_masters_in_float32_are_rounded_on_the_way_but_for_those_that_stay(daemon):
    masters = {**model(1, torch.float32), "ids": torch.arange(5), "half": torch.randn(7).to(torch.float16)}
    job = Job(daemon, lambda rank: iter(masters.items()), dtype="bfloat16", keep=["rout*"])
    job.add_rollout()

    async def scenario():
        assert (await job.update(1))[1] is None
        kept = ("router", "ids", "half")
        assert_same(job.rollouts[0].server_adapter.weights, {n: t if n in kept else t.to(torch.bfloat16) for n, t in masters.items()})

    run(job, scenario)


def test_what_cannot_be_cast_to_is_refused_by_name():
    with pytest.raises(ValueError, match="dtype 'fp8'"):
        CheckpointEngineRegistry.new("weightwire", bucket_size=1, dtype="fp8")
    with pytest.raises(ValueError, match="route 'tensors'"):
        CheckpointEngineRegistry.new("weightwire", bucket_size=1, route="shards", dtype="bfloat16")
    with pytest.raises(ValueError, match="list of patterns"):
        CheckpointEngineRegistry.new("weightwire", bucket_size=1, dtype="bfloat16", keep="gate")


def test_an_unknown_route_is_refused():
    with pytest.raises(ValueError, match="tensors"):
        CheckpointEngineRegistry.new("weightwire", bucket_size=1, route="nccl")


def test_of_versions_that_differ_little_only_the_changes_are_sent(tmp_path):
    """No memory is mapped, so that everything is sent: of one host, what "auto" would send whole."""
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0", transports="[tcp]")
    weights = model(1) | {"layers.0.up": torch.randn((513, 255), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)}
    job = Job(daemon, lambda rank: iter(weights.items()), delta="always")
    job.add_rollout(), job.add_rollout()
    total = sum(tensor.nbytes for tensor in weights.values())

    async def scenario():
        for step in range(1, 5):
            for tensor in weights.values():
                if tensor.dtype == torch.bfloat16 and tensor.numel() > 100:
                    tensor.view(torch.int16).view(-1)[step::97] += 1  # to the next number
            assert [r for r in await job.update(step) if isinstance(r, BaseException)] == []
            for worker in job.rollouts:
                assert_same(worker.server_adapter.weights, weights)
            epoch = next(e for e in client.status().epochs if e.version == step)
            moved = sum(epoch.bytes_by_transport.values())
            assert moved >= 2 * total if step == 1 else moved < total / 4, (step, moved, total, epoch)

    with Client(daemon.grpc) as client:
        run(job, scenario)
    assert daemon.stop() == 0
