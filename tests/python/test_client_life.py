"""A client's life: what goes wrong while it attaches, binds, follows and leaves ends no thread, loses no descriptor and leaves
nobody behind whom a fleet would wait for."""

import asyncio
import concurrent.futures
import ctypes
import errno
import gc
import importlib
import mmap
import multiprocessing
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import threading
import types

import pytest

import weightwire
from conftest import BINARIES, Trainer, until
from demo.fleet import Daemon
from test_client import CONFIG, checkpoint_of, engine
from weightwire import (Client, Publisher, RefusedError, StaleError, Subscriber, TensorMeta, UnavailableError, aio,
                        session, stage_memory, subscriber)
from weightwire.memory import Arena
from weightwire.vllm import InstallError, Serving

WHOLE = {name: (TensorMeta(name, "BF16", bits.shape), bits) for name, bits in checkpoint_of(1).items()}


@pytest.fixture
def opened():
    """Closes what tests put in, in any state."""
    made = []
    yield made
    for one in made:
        one.close()


def follower(daemon, opened, name="engine-a", **options) -> Subscriber:
    opened.append(Subscriber(group=name, rank=0, world_size=1, agent=daemon.agent_socket, **options))
    opened[-1].bind(CONFIG, "hf", [meta for meta, _ in WHOLE.values()])
    return opened[-1]


def trainer(daemon, groups) -> Trainer:
    groups.append(Trainer(daemon.agent_socket, CONFIG, "hf", [WHOLE]))
    return groups[-1]


def fenced(daemon, one: Subscriber) -> None:
    """Has the coordinator evict the engine, and waits until it has heard of it."""
    before = one.last_fence
    with Client(daemon.grpc) as client:
        client.evict(one._place["group"])
    until("the fence", lambda: one.last_fence is not before)


def present(daemon, group: str) -> int:
    """Ranks of the engine that the coordinator has."""
    with Client(daemon.grpc) as client:
        return sum(e.ranks_present for e in client.status().engines if e.name == group)


def take(one: Subscriber, timeout: float = 60) -> int:
    """Flips to the next offer and acknowledges; its version."""
    offer = one.wait_offer(timeout)
    assert offer is not None, one.last_fence
    one.flip(offer)
    one.acknowledge(offer)
    return offer.version


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# ---- attaching again

def test_a_close_while_it_attaches_again_leaves_no_session(daemon, opened, monkeypatch):
    one = follower(daemon, opened)
    until("it is there", lambda: present(daemon, "engine-a") == 1)
    attached, go, real = threading.Event(), threading.Event(), subscriber.Session

    def slow(**place):
        made = real(**place)
        until("the agent has it", lambda: made.handle)
        attached.set()
        assert go.wait(60)
        return made
    monkeypatch.setattr(subscriber, "Session", slow)
    fenced(daemon, one)
    assert attached.wait(60)
    closing = threading.Thread(target=one.close)
    closing.start()
    assert one._closed.wait(60)
    go.set()
    closing.join(60)
    assert not closing.is_alive()
    until("nobody is left", lambda: present(daemon, "engine-a") == 0, 20)


@pytest.mark.parametrize("module,library,call,failure", [
    (stage_memory, "mmap", "mmap", OSError(errno.ENOMEM, "Cannot allocate memory")),
    (session, "socket", "socket", OSError(errno.EMFILE, "Too many open files")),
    (session, "threading", "Thread", RuntimeError("can't start new thread"))])
def test_attaching_again_outlives_what_the_system_has_not(daemon, opened, groups, monkeypatch, module, library, call, failure):
    one = follower(daemon, opened)
    publisher = trainer(daemon, groups)
    own, failures = types.SimpleNamespace(**vars(getattr(module, library))), []
    real = getattr(own, call)

    def scarce(*args, **kwargs):
        if len(failures) < 3:
            failures.append(call)
            raise failure
        return real(*args, **kwargs)
    setattr(own, call, scarce)
    monkeypatch.setattr(module, library, own)  # for that module alone
    with Client(daemon.grpc) as client:
        client.evict("engine-a")
    until("three failures", lambda: len(failures) == 3)
    publisher.publish(1, mode="snapshot")
    assert take(one) == 1


def test_an_offer_from_before_a_fence_is_not_handed_out_after_it(daemon, opened, groups):
    arrived, filler = threading.Event(), engine(daemon, "engine-b")
    groups.append(filler)
    one = follower(daemon, opened, on_offer=arrived.set)
    trainer(daemon, groups).publish(1, mode="snapshot")
    filler.wait_version(1)
    assert arrived.wait(60)
    arrived.clear()
    fenced(daemon, one)
    assert arrived.wait(120)  # it is back, and is offered the version again
    assert take(one) == 1 and one.wait_offer(0.1) is None


def test_an_on_offer_that_raises_is_reported_and_the_commit_does_not_wait_for_it(tmp_path, opened, groups, caplog):
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                    commit_deadline_ms=600_000)
    try:
        calls, healthy = [], engine(daemon, "engine-b")
        groups.append(healthy)

        def wake():
            calls.append(threading.current_thread())
            if len(calls) == 1:
                raise ValueError("the consumer's own mistake")
        one = follower(daemon, opened, on_offer=wake)
        publisher = trainer(daemon, groups)
        publisher.publish(1, mode="snapshot")
        healthy.wait_version(1)
        with Client(daemon.grpc) as client:
            until("it is decided", lambda: client.status().epoch_of(1).phase == "committed")
        assert take(one) == 1  # it came back, and was offered it again
        assert len(calls) == 2 and "on_offer: ValueError: the consumer's own mistake" in str(one.last_fence)
        assert "the consumer's own mistake" in caplog.text and "engine-a/0" in caplog.text
        publisher.publish(2, mode="snapshot")
        assert take(one) == 2
        healthy.wait_version(2)  # no other engine was touched, and nothing was rolled back
        assert healthy.ranks[0].last_fence is None
        for group in (one, *reversed(groups)):
            group.close()
        groups.clear()
    finally:
        assert daemon.stop() == 0


CHILD_THAT_LIVES_ON = """
import ctypes, os, signal, sys
sys.path[:0] = {path!r}
from conftest import Trainer
from test_client_life import CONFIG, WHOLE
trainer = Trainer({socket!r}, CONFIG, "hf", [WHOLE])
trainer.publish(1)
child = ctypes.CDLL(None).syscall(57)  # fork, past what gRPC does at a fork: a data loader has its parent's sockets so
if child == 0:
    while True:
        signal.pause()
print(child, flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of a system call")
def test_the_next_process_has_the_place_of_one_that_was_killed_whose_child_has_its_sockets(daemon, opened, groups):
    engine_rank = follower(daemon, opened)
    old = subprocess.Popen([sys.executable, "-c", CHILD_THAT_LIVES_ON.format(path=sys.path, socket=daemon.agent_socket)],
                           stdout=subprocess.PIPE, text=True)
    child = int(old.stdout.readline())
    try:
        assert take(engine_rank) == 1
        with pytest.raises(RefusedError, match=f"process {old.pid} holds this rank and is alive"):
            Trainer(daemon.agent_socket, CONFIG, "hf", [WHOLE])
        old.kill()
        old.wait()
        successor = trainer(daemon, groups)
        successor.publish(2)
        assert take(engine_rank) == 2
    finally:
        os.kill(child, signal.SIGKILL)
        old.kill()
        old.wait()


# ---- what is held

def test_a_failed_bind_leaves_no_descriptor(daemon, opened):
    opened.append(Publisher(rank=0, world_size=1, agent=daemon.agent_socket))
    tensors = [meta for meta, _ in WHOLE.values()]
    opened[0].bind(CONFIG, "hf", tensors)  # what a first one opens
    place, before = opened[0]._session._socket, descriptors()
    opened[0]._session._socket = place + ".nowhere"
    for _ in range(20):
        with pytest.raises(UnavailableError, match="nowhere"):
            opened[0].bind(CONFIG, "hf", tensors)
    opened[0]._session._socket = place
    assert descriptors() == before


def test_an_arena_that_is_dropped_gives_its_memory_back():
    def held() -> list[str]:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            try:
                links.append(os.readlink(f"/proc/self/fd/{fd}"))
            except OSError:  # the listing's own
                continue
        return [link for link in links if "weightwire-dropped" in link]
    arena = Arena("weightwire-dropped", [TensorMeta("a", "F32", (1 << 20,))])
    arrays = dict(arena.arrays)
    arrays["a"][:] = 7
    assert held()
    del arena
    gc.collect()
    assert (arrays["a"] == 7).all()  # the mapping is there while somebody has an array
    del arrays
    gc.collect()
    assert not held()


def test_an_arena_that_was_closed_closes_nothing_again():
    arena = Arena("weightwire-closed", [TensorMeta("a", "F32", (4,))])
    number = arena.fd
    arena.close()
    arena.close()
    other = os.open(os.devnull, os.O_RDONLY)
    if other != number:
        os.dup2(other, number)  # the number is somebody else's now
        os.close(other)
    del arena
    gc.collect()
    os.close(number)  # and still is


def test_a_write_into_the_stage_is_an_exception(daemon, opened, groups):
    one = follower(daemon, opened)
    trainer(daemon, groups).publish(1)
    offer = one.wait_offer(60)
    array = one.flip(offer)["model.norm.weight"]
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError):
        array.flags.writeable = True
    one.acknowledge(offer)


def test_a_write_that_numpy_does_not_see_changes_its_own_bytes_and_is_found_out(daemon, opened, groups, caplog):
    """Nobody else's bytes change, and before the buffer holds another version what was written is given up."""
    writer, other, publisher = follower(daemon, opened, "engine-w"), follower(daemon, opened), trainer(daemon, groups)
    name, served = "model.embed_tokens.weight", {1: WHOLE}

    def publish(version: int) -> None:
        served[version] = {n: (TensorMeta(n, "BF16", bits.shape), bits) for n, bits in checkpoint_of(version).items()}
        publisher.fill([served[version]])
        publisher.publish(version)

    def right(one: Subscriber, version: int, but: str = "") -> bool:
        return all((one.params[n] == bits).all() for n, (_, bits) in served[version].items() if n != but)

    publish(1)
    assert take(writer) == take(other) == 1
    array, served_in = writer.params[name], writer.serving.buffer
    ctypes.memset(array.ctypes.data, 7, array.nbytes)  # as by torch.from_numpy, which drops numpy's flag
    assert (writer.params[name] == 0x0707).all() and right(writer, 1, but=name)
    assert right(other, 1)
    publish(2)  # into the other buffer
    assert take(writer) == take(other) == 2 and right(writer, 2) and right(other, 2)
    publish(3)  # into the one that was written
    assert take(other) == 3 and right(other, 3)
    assert take(writer) == 3 and right(writer, 3) and writer.serving.buffer == served_in
    assert f"wrote into its stage ({name}" in caplog.text
    assert writer.last_fence is None and other.last_fence is None


def test_a_stage_that_was_registered_unannounced_is_never_served_again(daemon, opened, groups):
    """All its pages are copies then, which a device goes on reading: the engine leaves, says why and attaches anew."""
    one, other, publisher = follower(daemon, opened, "engine-w"), follower(daemon, opened), trainer(daemon, groups)
    publisher.publish(1)
    assert take(one) == take(other) == 1
    memory = one._buffers[one.serving.buffer].memory
    for page in range(0, memory._bytes, mmap.PAGESIZE):  # as pinning does, with the same bytes
        ctypes.memmove(memory._begin + page, memory._begin + page, 1)
    publisher.publish(2)
    assert take(one) == take(other) == 2
    publisher.publish(3)
    assert take(other) == 3
    with pytest.raises(StaleError, match="registered with a device.*share_stage"):
        one.flip(one.wait_offer(60))
    until("it has left", lambda: one.last_fence is not None)
    with Client(daemon.grpc) as client:
        errors = {engine.name: str(engine.last_error) for engine in client.status(epochs=1).engines}
    assert "share_stage" in errors["engine-w"]
    assert take(one) == 3 and one._buffers[one.serving.buffer].memory is not memory
    assert all((one.params[name] == bits).all() for name, (_, bits) in WHOLE.items())


def test_a_stage_that_is_shared_before_it_is_registered_follows_the_agent(daemon, opened, groups):
    one, publisher = follower(daemon, opened), trainer(daemon, groups)
    publisher.publish(1)
    one.stage(offer := one.wait_offer(60))
    one.share_stage()
    one.flip(offer)
    one.acknowledge(offer)
    where = {name: array.ctypes.data for name, array in one.params.items()}
    for version in (2, 3):
        publisher.fill([{n: (TensorMeta(n, "BF16", b.shape), b) for n, b in checkpoint_of(version).items()}])
        publisher.publish(version)
        assert take(one) == version
        assert all((one.params[n] == bits).all() for n, bits in checkpoint_of(version).items())
    assert {name: array.ctypes.data for name, array in one.params.items()} == where  # the same place, every second version
    assert not any(buffer.memory.private for buffer in one._buffers)


# ---- what is told

def raised_by_the_package() -> list[type]:
    """Every exception class that a module of the package defines; modules that need a framework need it."""
    found = []
    for module in pkgutil.walk_packages(weightwire.__path__, "weightwire."):
        try:
            importlib.import_module(module.name)
        except ImportError:  # of torch, vLLM, Ray, …
            continue

    def below(kind: type) -> None:
        for one in kind.__subclasses__():
            if one.__module__.startswith("weightwire"):
                found.append(one)
            below(one)
    below(Exception)
    return found


def test_every_exception_of_the_package_is_pickled_with_all_it_says():
    kinds = raised_by_the_package()
    assert {"InstallError", "StepError", "RefusedError", "CheckpointError"} <= {kind.__name__ for kind in kinds}
    for kind in kinds:
        error = kind.__new__(kind, "what happened")
        Exception.__init__(error, "what happened")
        error.__dict__.update(code="ABORTED", reason="io_error", rank="trainer/3", tensor="a.weight", epoch=5, remedy="wait",
                              step="update", serving=None)
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind and str(again) == str(error) and vars(again) == vars(error) and again.args == error.args


def fail() -> None:
    raise InstallError("no room", step="update", version=7, serving=Serving(6, 5), broken=False, epoch=8)


def test_an_exception_comes_out_of_a_process_pool_as_it_was():
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with pytest.raises(InstallError, match="version 7 .epoch 8. was not installed: no room") as failed:
            pool.submit(fail).result(60)
    assert failed.value.serving == Serving(6, 5) and failed.value.step == "update"


def test_arguments_that_nobody_knows_are_refused_with_what_there_is(daemon, opened):
    opened.append(Publisher(rank=0, world_size=1, agent=daemon.agent_socket))
    one = opened[0]
    one.bind(CONFIG, "hf", [meta for meta, _ in WHOLE.values()])
    with pytest.raises(RefusedError, match="unknown mode 'quickly'.*hold, snapshot"):
        one.publish(1, mode="quickly")
    for version in (-1, 1 << 64, "one", None, 1.5):
        with pytest.raises(RefusedError):
            one.publish(version)
    for deadline in (float("inf"), float("nan"), -1, 1e12):
        with pytest.raises(RefusedError):
            one.publish(1, deadline=deadline)
    assert not one._releases
    for meta in (TensorMeta("a", "BF17", (4,)), TensorMeta("a" * 5000, "BF16", (4,)), TensorMeta("a\udc80", "BF16", (4,)),
                 TensorMeta("a", "BF16", ("x",)), TensorMeta(7, "BF16", (4,))):
        with pytest.raises(RefusedError):
            one.bind(CONFIG, "hf", [meta])
    with pytest.raises(RefusedError, match="dtype 'BF17' is not known.*one of BF16"):
        _ = TensorMeta("a", "BF17", (4,)).nbytes
    for place in (dict(group="g" * 200), dict(group="\udc80"), dict(rank=-1), dict(world_size=1 << 40), dict(job="j" * 5000),
                  dict(group=7)):
        with pytest.raises(RefusedError):
            Publisher(**{"rank": 0, "world_size": 1, "agent": daemon.agent_socket, **place})


def test_a_name_that_linux_does_not_take_is_cut():
    arena = Arena("é" * 300, [TensorMeta("a", "U8", (4,))])
    assert "é" * 100 in os.readlink(f"/proc/self/fd/{arena.fd}")
    arena.close()
    with pytest.raises(RefusedError):
        Arena("a\0b", [])


@pytest.mark.parametrize("kind", [aio.Subscriber, aio.Publisher])
@pytest.mark.parametrize("there", [False, True], ids=["before it is there", "in the moment in which it is"])
def test_an_opening_that_is_cancelled_leaves_nobody_behind(daemon, monkeypatch, there, kind):
    """The thread that opens it goes on; an engine that nobody holds would keep every version waiting, a trainer its place."""
    attached, go, ended = threading.Event(), threading.Event(), threading.Event()
    run = aio._Opening.run

    def then_say_so(opening):
        make = opening._make

        def slowly():
            opened = make()
            attached.set()
            assert go.wait(30)
            return opened
        opening._make = slowly
        try:
            return run(opening)
        finally:
            ended.set()
    monkeypatch.setattr(aio._Opening, "run", then_say_so)

    async def scenario():
        opening = asyncio.ensure_future(kind(group="one", rank=0, world_size=1, agent=daemon.agent_socket).open())
        await asyncio.to_thread(attached.wait, 30)
        if there:  # and the loop, which is busy here, does not know it yet
            go.set()
            assert ended.wait(30)
        opening.cancel()
        await asyncio.gather(opening, return_exceptions=True)
        assert opening.cancelled()
        go.set()

    asyncio.run(scenario())
    with Client(daemon.grpc) as client:
        until("nobody is registered", lambda: not client.status().participants)
