"""Page-locking of the stage, for copies to an engine's GPU. There is none here: CUDA's calls are recorded, all else is real."""

import threading
from types import SimpleNamespace

import pytest
import torch

import weightwire.torch_cuda
from tests.engine.rig import until
from weightwire import Publisher, Subscriber, TensorMeta, boxes
from weightwire.torch_cuda import PageLocks
from weightwire.vllm.engine import Settings, WeightwireEngine

GPU = 3
META = TensorMeta("w", "BF16", (3, 5000))
LAYOUT = boxes.submission({"w": META}, [boxes.whole(META)])


@pytest.fixture
def registered(monkeypatch):
    """Ranges that CUDA has now: address -> bytes. It refuses what it has already, and to unregister what it has not."""
    ranges = {}

    def register(gpu, address, nbytes, read_only):
        assert (gpu, read_only) == (GPU, True) and address not in ranges
        with open("/proc/self/maps") as maps:  # pinned pages of a private mapping would be copies
            (line,) = [line for line in maps if int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16)]
        assert line.split()[1] == "r--s"
        ranges[address] = nbytes
        return 0

    def unregister(gpu, address):
        assert gpu == GPU
        del ranges[address]
        return 0
    monkeypatch.setattr(weightwire.torch_cuda, "host_register", register)
    monkeypatch.setattr(weightwire.torch_cuda, "host_unregister", unregister)
    return ranges


@pytest.fixture
def engine(stack):
    """What vLLM has nothing to do with: the subscriber, its offers, and the preparation of each."""
    made = object.__new__(WeightwireEngine)
    made._settings, made.device, made._observed = Settings(engine="engine", link="", link_key=""), torch.device("cpu"), [META]
    made._pages, made._lock, made._staged_on = PageLocks(GPU, read_only=True), threading.Condition(), None
    made._held, made._seals, made._pending, made._room, made._closed = {}, {}, None, None, threading.Event()
    made._subscriber = Subscriber(group="engine", rank=0, world_size=1, agent=stack.agent)
    made._subscriber.bind_submission(LAYOUT)
    made._link = SimpleNamespace(send=lambda message: None, close=lambda: None)
    follower = threading.Thread(target=made._follow, args=(made._subscriber, made._link, made._closed), name="follower")
    follower.start()
    yield made
    made.shutdown()
    follower.join(10)


@pytest.mark.parametrize("install, device, free, copied", [
    ("auto", "cuda:3", META.nbytes + (1 << 30), True), ("auto", "cuda:3", META.nbytes + (1 << 30) - 1, False), ("auto", "cpu", None, False),
    ("host-shadow", "cuda:3", 1 << 50, False), ("device-shadow", "cuda:3", 0, True)])
def test_a_version_is_copied_to_the_device_before_the_pause_where_it_fits(monkeypatch, install, device, free, copied):
    """There is no such device here: its calls are recorded."""
    made = object.__new__(WeightwireEngine)
    made._settings, made._pages, made._lock = Settings(engine="engine", link="", link_key="", install=install), None, threading.Condition()
    made._staged_on = None
    made._shadow = (1, "of a version that was not installed")
    made.device = torch.device(device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked: (free, 1 << 60) if asked == made.device else pytest.fail("another device"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda asked: None)

    class Staged:
        nbytes = META.nbytes

        def to(self, where, copy, non_blocking):
            assert where == made.device and copy
            return "on the device"
    made._staged = lambda epoch: {"w": Staged()}
    made._prepare(2)
    assert made._shadow == ((2, {"w": "on the device"}) if copied else None)


def test_each_buffer_is_registered_once_and_given_up_with_a_fence_or_the_engine(stack, engine, registered):
    publisher = stack.add(Publisher(rank=0, world_size=1, agent=stack.agent))
    array, versions = publisher.bind_boxes(LAYOUT)["w"], iter(range(1, 100))

    def take():
        version = next(versions)
        array[...] = version
        release = publisher.publish(version)
        until("it is offered", lambda: engine._pending is not None and engine._pending.version == version)
        offer = engine._pending
        engine._prepare(offer.epoch)
        engine._subscriber.flip(offer)
        engine._subscriber.acknowledge(offer)
        release.wait_released(30)
        return offer
    sizes = []
    for _ in range(5):
        take()
        sizes.append(len(registered))
    assert sizes == [1, 2, 2, 2, 2] and set(registered.values()) == {META.nbytes}
    subscriber = engine._subscriber
    subscriber.fail(take(), "for a test")
    until("what the fence took is given up", lambda: not registered)
    until("it is attached again", lambda: subscriber._session.attached and subscriber._buffers)
    take()
    assert len(registered) == 1
    engine.shutdown()
    assert not registered


@pytest.mark.parametrize("install, interrupted", [("paused-live", True), ("device-stage", False)])
def test_a_rank_that_gives_room_is_interrupted_only_where_the_engine_is_paused(install, interrupted):
    """Else the next driver would resume an engine that somebody has paused on purpose."""
    made = object.__new__(WeightwireEngine)
    made._settings, made._lock = Settings(engine="engine", link="", link_key="", install=install), threading.Condition()
    made._serving = made._broken = made._failure = made._update = None
    made._calls, made._interrupted, made._make_room = 0, False, lambda epoch: None
    made._answer("make_room", {"epoch": 2})
    assert made._interrupted is interrupted


class Follower:
    """The follower of `engine` is held before it waits for an event, or after it has one; `told` is what it says to the driver."""

    def __init__(self, engine):
        self.told, self._subscriber, self._wait = [], engine._subscriber, engine._subscriber.wait_event
        self._held, self._go = threading.Event(), threading.Event()
        self._go.set()
        self._where, self._subscriber.wait_event, engine._link.send = "", self._waits, self.told.append

    def _waits(self, seconds):
        event = None
        for where in ("before", "after"):
            if self._where == where and (where == "before" or event is not None):
                self._held.set()
                assert self._go.wait(30)
            if where == "before":
                event = self.event = self._wait(0.05)
        return event

    def hold(self, where):
        self._held.clear()
        self._go.clear()
        self._where = where

    def wait_held(self):
        assert self._held.wait(30)

    def go(self):
        self._where = ""
        self._go.set()

    def words(self):
        return [f"offer {word['offer']['version']}" if "offer" in word else next(iter(word)) for word in self.told]


def test_a_fence_is_told_before_the_offer_that_came_after_it(stack, engine, registered):
    """Else the driver would take the engine for fenced, until its next version."""
    publisher, follower = stack.add(Publisher(rank=0, world_size=1, agent=stack.agent)), Follower(engine)
    publisher.bind_boxes(LAYOUT)["w"][...] = 1
    subscriber = engine._subscriber

    def take(version):
        until("it is told", lambda: follower.words() and follower.words()[-1] == f"offer {version}")
        offer = engine._pending
        subscriber.flip(offer)
        subscriber.acknowledge(offer)
        return offer
    publisher.publish(1)
    first = take(1)
    follower.hold("before")
    follower.wait_held()
    subscriber.fail(first, "for a test")
    until("it is attached again", lambda: subscriber.last_fence and subscriber._session.attached and subscriber._buffers)
    publisher.publish(2)
    until("a version waits", lambda: [e for e in list(subscriber._events) if e.version == 2])
    follower.go()
    take(2)
    assert follower.words()[:2] == ["offer 1", "fenced"] and follower.words().count("fenced") == 1

    follower.told.clear()
    follower.hold("after")
    publisher.publish(3)
    follower.wait_held()
    fence, void = subscriber.last_fence, follower.event
    subscriber.fail(void, "for a test")
    until("the offer that it has is void", lambda: subscriber.last_fence is not fence and subscriber._session.attached and subscriber._buffers)
    follower.go()
    publisher.publish(4)
    take(4)
    assert follower.words()[0] == "fenced" and follower.words().count("fenced") == 1
    assert void.epoch not in [word["offer"]["epoch"] for word in follower.told if "offer" in word]


def test_who_followed_a_subscriber_that_is_closed_touches_nothing_of_its_successor(stack, engine, registered):
    """Its thread may look once more when an engine was initialised again, and then sees that its own session has ended."""
    old, looked, look = engine._subscriber, threading.Event(), threading.Event()
    wait_event = old.wait_event

    def waits(seconds):
        looked.set()
        assert look.wait(30)
        return wait_event(0.0)
    old.wait_event = waits
    assert looked.wait(30)
    engine.shutdown()
    until("its session has ended", lambda: old.last_fence is not None)
    engine._closed, engine._staged_on = threading.Event(), "a GPU"
    engine._subscriber, engine._pending, engine._held = "its successor", "an offer", {1: "a stage"}
    follower = next(thread for thread in threading.enumerate() if thread.name == "follower")
    look.set()
    follower.join(30)
    assert not follower.is_alive() and (engine._pending, engine._held) == ("an offer", {1: "a stage"})
    engine._subscriber = engine._pending = None
    engine._held = {}
