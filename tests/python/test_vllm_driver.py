"""The driver's order and what it does when a step fails, with ranks that only pretend to be vLLM workers.

The same on a real engine, proved by generation: tests/engine/test_failures.py.
"""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import pickle
import threading
import time
import types

import pytest

from breaking_line import BreakingLine
from conftest import until
from fake_vllm import Engine, Rank
from weightwire import DeadlineError, NotReadyError, RefusedError
from weightwire.vllm import Deadlines, EngineDriver, InstallError, Serving, Span, adopt as adopt_module, driver as driver_module, spans
from weightwire.labels import label
from weightwire.vllm.channel import address_of
from weightwire.vllm.ports import AsyncPort, HttpPort, LlmPort
from weightwire.vllm.replace import StepError

QUICK = Deadlines(**{name: 5.0 for name in ("init", "prepare", "pause", "start", "update", "finish", "reset", "canary",
                                            "resume", "transfer", "room")})


@pytest.fixture
def engine(monkeypatch):
    made = Engine()
    monkeypatch.setattr(driver_module, "port_of", lambda _: made)
    yield made
    for rank in made.ranks:
        rank.link.close()


@pytest.fixture(params=["unix", "tcp", "breaking"])
def line(request, engine):
    """How workers reach their driver: what it listens on. What holds, holds on a network whose connections break all the time."""
    if request.param == "unix":
        yield None
        return
    opened = []

    def reached(settings):
        opened.append(BreakingLine(address_of(settings["link"]), seed=len(opened)))
        return {**settings, "link": "127.0.0.1:%d" % opened[-1].address[1]}
    if request.param == "breaking":
        engine.reached = reached
    yield "127.0.0.1"
    for relay in opened:
        relay.close()


@pytest.fixture
def driver(engine, line):
    with EngineDriver(None, name="engine", deadlines=QUICK, listen=line) as made:
        made.init()
        yield made


def install(engine, driver, epoch):
    engine.offer(epoch)
    return driver.step(5)


def test_the_order(engine, driver):
    engine.log.clear()
    assert install(engine, driver, 7).version == 7
    steps = [entry for entry in engine.log if entry not in ("state", "await")]
    assert steps == ["prepare", "prepare", "pause abort", "start", "update", "finish", "version 7", "reset", "resume",
                     "resumed", "resumed", "sealed", "sealed", "acknowledge", "forget", "forget"]
    assert engine.serves() == {7} and driver.step(0.05) is None


def test_a_version_is_waited_for_until_it_is_acknowledged(engine, driver, monkeypatch):
    """Not only until the engine answers with it: who waited may end the trainer, or the agent."""
    acknowledges = threading.Event()
    ask = driver._workers.ask
    monkeypatch.setattr(driver._workers, "ask", lambda do, *args, **more: (do != "acknowledge" or acknowledges.wait(4), ask(do, *args, **more))[1])
    engine.offer(7)
    stepping = threading.Thread(target=driver.step, args=(5,))
    stepping.start()
    until("it is served", lambda: driver.serving is not None and driver.serving.version == 7)
    with pytest.raises(DeadlineError, match="version 7 is not served"):
        driver.wait_version(7, 0.3)
    acknowledges.set()
    assert driver.wait_version(7, 5).version == 7
    stepping.join(10)


class TestWithoutSessions:
    """vLLM 0.24 calls its ranks once, and a session that it left open is its own."""

    @pytest.fixture
    def engine(self, monkeypatch):
        made = Engine(sessions=False)
        monkeypatch.setattr(driver_module, "port_of", lambda _: made)
        yield made
        for rank in made.ranks:
            rank.link.close()

    def test_the_order(self, engine, driver):
        assert install(engine, driver, 7).recovered == ""
        assert install(engine, driver, 8).recovered == ""
        assert engine.serves() == {8} and not engine.active

    @pytest.mark.parametrize("step", ["start", "update", "finish"])
    def test_a_failure_leaves_no_session_open(self, engine, driver, step):
        install(engine, driver, 1)
        engine.faults = {(step, 1): 1}
        assert f"rank 1: {step}: injected" in install(engine, driver, 2).recovered
        assert engine.serves() == {2} and not engine.active


class TestLostParameters:
    @pytest.mark.parametrize("ranks", [(0,), (0, 1)])
    def test_what_is_served_is_installed_again(self, engine, driver, ranks):
        install(engine, driver, 1)
        engine.installed = install(engine, driver, 2).epoch
        engine.log.clear()
        for rank in ranks:
            engine.ranks[rank].lose()
        served = driver.step(5)
        assert (served.version, served.recovered[:5]) == (2, "rank ") and engine.serves() == {2} and not engine.paused
        steps = [entry for entry in engine.log if entry not in ("state", "await")]
        assert steps == ["pause abort", "start", "update", "finish", "version 2", "reset", "resume", "resumed", "resumed",
                         "sealed", "sealed"], "nothing is acknowledged twice"
        assert driver.step(0.2) is None, "what the other rank said is dealt with, too"
        assert install(engine, driver, 3).version == 3

    def test_it_stays_paused_when_that_fails(self, engine, driver):
        engine.installed = install(engine, driver, 1).epoch
        engine.faults = {("update", 0): 2}
        engine.ranks[0].lose()
        with pytest.raises(InstallError, match="no version: it is paused"):
            driver.step(5)
        assert engine.paused and driver.broken and not driver.ready
        assert install(engine, driver, 2).version == 2 and not engine.paused

    def test_a_word_about_a_version_that_was_replaced_changes_nothing(self, engine, driver):
        engine.installed = install(engine, driver, 1).epoch
        install(engine, driver, 2)
        engine.log.clear()
        engine.ranks[1].link.send({"lost": {"epoch": 1, "why": "1 parameter"}})
        assert driver.step(1) is None and "start" not in engine.log and engine.serves() == {2}


def test_the_seconds_of_each_step_are_those_of_its_version(engine, driver):
    driver._canary = lambda generate, version: time.sleep(0.2)
    steps = {"prepare", "pause", "start", "update", "finish", "reset", "resume", "canary", "acknowledge"}
    served = install(engine, driver, 1)
    assert set(served.seconds) == steps and driver.serving.seconds == served.seconds
    assert served.seconds["canary"] >= 0.2 and served.seconds["update"] >= 0.05  # the last rank is that much later
    driver._canary = None
    assert set(install(engine, driver, 2).seconds) == steps - {"canary"}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_one_failure_is_replayed(engine, driver, step, rank):
    install(engine, driver, 1)
    engine.faults = {(step, rank): 1}
    assert f"rank {rank}: {step}: injected" in install(engine, driver, 2).recovered
    assert engine.serves() == {2} and not engine.paused


def test_a_rank_that_says_nothing_but_holds_another_version_is_seen(engine, driver):
    install(engine, driver, 1)
    engine.faults = {("silent", 1): 1}
    assert "ranks serve epochs [2, None] instead of 2" in install(engine, driver, 2).recovered
    assert engine.serves() == {2}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("step", ["prepare", "start", "update", "finish", "reset"])
def test_a_failure_that_stays_goes_back(engine, driver, step, rank):
    install(engine, driver, 1)
    engine.faults = {(step, 0 if step == "reset" else rank): 2 if step != "prepare" else 1}
    with pytest.raises(InstallError, match=f"step {step}: .*on version 1$"):
        install(engine, driver, 2)
    assert engine.serves() == {1} and not engine.paused and driver.ready
    assert driver.step(5).version == 2 and engine.serves() == {2}


@pytest.mark.parametrize("step", ["update", "finish"])
def test_with_no_version_before_it_stays_paused_until_one_installs(engine, driver, step):
    engine.faults = {(step, 1): 2}
    with pytest.raises(InstallError, match="it is paused and answers nothing") as failed:
        install(engine, driver, 1)
    assert failed.value.broken and engine.paused and not driver.ready
    pauses = engine.log.count("pause abort")
    assert driver.step(5).version == 1 and engine.serves() == {1} and not engine.paused
    assert engine.log.count("pause abort") == pauses  # what was queued is not dropped


def test_when_the_version_before_fails_too_it_stays_paused(engine, driver):
    install(engine, driver, 1)
    engine.faults = {("finish", 1): 4}
    with pytest.raises(InstallError, match="paused") as failed:
        install(engine, driver, 2)
    assert failed.value.broken and engine.paused


def test_a_refused_canary_goes_back_and_is_not_tried_again(engine, driver):
    install(engine, driver, 1)

    def canary(generate, version):
        raise ValueError(f"{generate([1], 3)} for {version}")
    driver._canary = canary
    with pytest.raises(InstallError, match=r"canary: ValueError: \[1, 1, 1\] for 2.*on version 1$"):
        install(engine, driver, 2)
    assert engine.serves() == {1} and driver.step(0.05) is None
    assert engine.log.count("refuse") == 1, "the leader tells the coordinator"
    driver._canary = None
    assert install(engine, driver, 3).version == 3


def test_an_epoch_that_was_counted_before_is_installed_again(engine, driver):
    """A coordinator that lost its memory counts from 1 again."""
    for epoch in (1, 2, 1):
        assert install(engine, driver, epoch).epoch == epoch
    engine.faults = {("finish", 0): 2}
    with pytest.raises(InstallError, match="paused"):  # the version before cannot be told from this one
        install(engine, driver, 1)


def test_no_offer_is_taken_while_a_rank_is_fenced(engine, driver):
    install(engine, driver, 1)
    engine.offer(2)
    engine.ranks[1].link.send({"fenced": "its agent went away"})
    workers = driver._workers
    with workers._changed:
        assert workers._changed.wait_for(lambda: workers._fences, 5)
    assert driver.step(0.05) is None and not driver.ready
    assert "its agent went away" in str(driver.status()["fences"])
    engine.ranks[1].offer(2)
    assert driver.step(5).version == 2 and driver.ready


def test_a_rank_that_left_is_named(engine, driver):
    workers = driver._workers
    engine.offer(1)
    assert workers.wait_event(5)
    engine.ranks[1].link.close()
    with workers._changed:
        assert workers._changed.wait_for(lambda: 1 not in workers._ranks, 5)
    with pytest.raises(InstallError, match=r"step prepare: .*ranks \[1\] of the engine are gone"):
        driver.step(5)


class TestRestart:
    """As of a server behind the same URL: its ranks go, others come, and hold what they were started with."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch):
        monkeypatch.setattr(driver_module, "_GONE_SECONDS", 2.0)

    @staticmethod
    def restart(engine, driver, says_goodbye):
        engine.restart(says_goodbye)
        until("its ranks are gone", lambda: driver._workers.are_gone(driver_module._GONE_SECONDS))
        assert driver.step(0.05) is None and len(engine.ranks) == engine.size

    @pytest.mark.parametrize("says_goodbye", [True, False])
    def test_it_is_initialised_again(self, engine, driver, says_goodbye):
        assert install(engine, driver, 3).version == 3
        self.restart(engine, driver, says_goodbye)
        assert driver.serving is None
        assert install(engine, driver, 3).version == 3 and engine.serves() == {3} and driver.ready

    def test_one_that_was_broken_is_whole_again(self, engine, driver):
        engine.faults = {("update", 0): 2}
        with pytest.raises(InstallError, match="paused"):
            install(engine, driver, 1)
        assert driver.broken
        self.restart(engine, driver, True)
        assert install(engine, driver, 2).version == 2 and not driver.broken

    def test_one_rank_that_is_away_is_not_the_engine(self, engine, driver):
        assert install(engine, driver, 1).version == 1
        engine.ranks[1].link.die()
        time.sleep(2.5)  # longer than that
        assert driver.step(0.05) is None and driver.serving.version == 1


class WithOneBuffer:
    """Whose ranks ask for room one by one."""

    install = ""

    @pytest.fixture
    def driver(self, engine, line):
        with EngineDriver(None, name="engine", deadlines=QUICK, listen=line, install=self.install) as made:
            made.init()
            yield made

    @staticmethod
    def stepping(driver):
        """A step on a thread of its own; returns a function that waits for its outcome."""
        outcome = []

        def run():
            try:
                outcome.append(driver.step(5))
            except Exception as error:  # what the test asks for
                outcome.append(error)
        thread = threading.Thread(target=run)
        thread.start()

        def result():
            thread.join(20)
            assert not thread.is_alive()
            return outcome[0]
        return result

    @staticmethod
    def wait(condition):
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, "not reached"
            time.sleep(0.01)


class TestDeviceStage(WithOneBuffer):
    """The engine answers while its stage is overwritten: it has copies of it."""

    install = "device-stage"

    def test_the_engine_is_paused_when_all_has_come_and_not_before(self, engine, driver):
        install(engine, driver, 1)
        engine.log.clear()
        engine.ranks[1].want_room(2)
        result = self.stepping(driver)
        engine.ranks[0].want_room(2)
        self.wait(lambda: sorted(engine.emptied) == [(0, 2), (1, 2)])
        assert not engine.paused and set(engine.log) == {"make_room"}
        engine.offer(2)
        assert result().version == 2 and engine.serves() == {2} and not engine.paused
        assert [entry for entry in engine.log if entry in ("prepare", "pause abort", "resume")] == \
            ["prepare", "prepare", "pause abort", "resume"]

    @pytest.mark.parametrize("how", ["a fence", "a deadline", "taken back"])
    def test_a_version_that_does_not_come_stops_nothing(self, engine, driver, how):
        install(engine, driver, 1)
        engine.log.clear()
        if how == "a deadline":
            driver.deadlines = dataclasses.replace(QUICK, transfer=0.3)
        if how == "taken back":
            engine.faults = {("make_room", 0): 1}
        engine.ranks[0].want_room(2)
        result = self.stepping(driver)
        if how == "a fence":
            self.wait(lambda: engine.emptied)
            engine.ranks[1].link.send({"fenced": "given up for an epoch that failed"})
        failed = result()
        assert failed is None if how == "taken back" else isinstance(failed, InstallError) and failed.step == "transfer"
        assert engine.serves() == {1} and set(engine.log) == {"make_room"}, "it was neither paused nor resumed"
        assert install(engine, driver, 4).version == 4 and driver.ready


class TestPausedLive(WithOneBuffer):
    """The engine stands still from the first wish to the end of the update."""

    install = "paused-live"

    def test_the_engine_is_paused_before_any_rank_gives_up(self, engine, driver):
        install(engine, driver, 1)
        engine.log.clear()
        engine.ranks[1].want_room(2)
        result = self.stepping(driver)
        self.wait(lambda: engine.emptied == [(1, 2)])
        engine.ranks[0].want_room(2)
        self.wait(lambda: engine.emptied == [(1, 2), (0, 2)])
        engine.offer(2)
        assert result().version == 2 and engine.serves() == {2} and not engine.paused
        assert engine.log.count("pause abort") == 1 and engine.log[0] == "pause abort"

    def test_an_epoch_that_is_tried_again_needs_no_second_wish(self, engine, driver):
        install(engine, driver, 1)
        for rank in engine.ranks:
            rank.want_room(2)
        result = self.stepping(driver)
        self.wait(lambda: len(engine.emptied) == 2)
        engine.offer(3)  # of the same version, after an abort of epoch 2
        assert result().epoch == 3 and not engine.paused

    def test_a_wish_that_was_taken_back_changes_nothing(self, engine, driver):
        install(engine, driver, 1)
        engine.faults = {("make_room", 0): 1}
        engine.ranks[0].want_room(2)
        assert driver.step(5) is None
        assert engine.serves() == {1} and not engine.paused and driver.ready

    def test_after_a_fence_it_goes_on_with_its_own_weights(self, engine, driver):
        install(engine, driver, 1)
        for rank in engine.ranks:
            rank.want_room(2)
        result = self.stepping(driver)
        self.wait(lambda: len(engine.emptied) == 2)
        engine.ranks[1].link.send({"fenced": "given up for an epoch that failed"})
        failed = result()
        assert isinstance(failed, InstallError) and failed.step == "transfer" and "given up" in str(failed)
        assert engine.serves() == {1} and not engine.paused and not driver.ready
        assert install(engine, driver, 4).version == 4 and driver.ready

    def test_a_transfer_has_a_deadline(self, engine):
        with EngineDriver(None, name="engine", deadlines=dataclasses.replace(QUICK, transfer=0.3), install="paused-live") as driver:
            driver.init()
            install(engine, driver, 1)
            engine.ranks[0].want_room(2)
            with pytest.raises(InstallError, match="step transfer: .*no version came within 0.3 s.*on version 1$"):
                driver.step(5)
            assert not engine.paused


class TestAdoption:
    """Requests that run when a version comes. The fake's end when a test says so, as vLLM's do in pause mode "wait"."""

    @pytest.fixture
    def engine(self, engine):
        engine.needs_thread = True
        return engine

    @staticmethod
    def driver(**options):
        return EngineDriver(None, name="engine", deadlines=QUICK, **options)

    def test_at_request_end_the_engine_changes_when_none_runs_any_more(self, engine):
        with self.driver(adopt="at_request_end", adopt_within=60) as driver:
            driver.init()
            install(engine, driver, 1)
            engine.running = 1
            engine.offer(2)
            result = TestPausedLive.stepping(driver)
            until("it waits", lambda: driver.draining == 2)
            assert engine.serves() == {1} and not engine.paused and driver.status()["draining"] == 2
            engine.end_requests()
            served = result()
            assert (served.version, served.forced, driver.draining) == (2, "", None) and "drain" in served.seconds
            assert engine.log.count("pause abort") == 0

    def test_after_its_bound_it_changes_all_the_same_and_says_so(self, engine):
        with self.driver(adopt="at_request_end", adopt_within=0.3, pause="keep") as driver:
            driver.init()
            engine.running = 1
            begun = time.monotonic()
            served = install(engine, driver, 1)
            assert served.forced == "requests still ran after 0.3 s" and 0.3 <= time.monotonic() - begun
            assert engine.log.count("pause keep") == 1 and engine.serves() == {1}
            assert install(engine, driver, 2).forced == ""

    @pytest.mark.parametrize("most", [1, 3])
    def test_rolling_changes_as_soon_as_it_is_further_behind_than_it_may_be(self, engine, monkeypatch, most):
        behind, looks = [1], []
        monkeypatch.setattr(adopt_module.Lag, "versions", lambda lag: looks.append(behind[0]) or behind[0])
        with self.driver(adopt="rolling", adopt_within=60, max_behind=most, coordinator="127.0.0.1:1") as driver:
            driver.init()
            engine.running = 1
            engine.offer(1)
            result = TestPausedLive.stepping(driver)
            until("it waits", lambda: driver.draining == 1)
            behind[0] = most
            until("it has looked", lambda: (len(looks) > 3 and looks[-3:] == [most] * 3))
            assert not engine.paused and driver.draining == 1
            behind[0] = most + 1
            assert result().forced == f"it is {most + 1} versions behind, and {most} may be"
            assert engine.log.count("pause abort") == 1

    def test_rolling_does_not_wait_where_nobody_says_how_far_behind_it_is(self, engine, monkeypatch):
        monkeypatch.setattr(adopt_module, "_UNKNOWN_SECONDS", 0.5)
        with self.driver(adopt="rolling", adopt_within=60, coordinator="127.0.0.1:1") as driver:
            driver.init()
            engine.running = 1
            assert "the coordinator does not answer" in install(engine, driver, 1).forced

    def test_a_pause_that_fails_leaves_the_engine_where_it_was(self, engine):
        with self.driver(adopt="at_request_end", adopt_within=60) as driver:
            driver.init()
            install(engine, driver, 1)
            pause, engine.pause = engine.pause, lambda mode, timeout: 1 / 0
            with pytest.raises(InstallError, match="step drain: ZeroDivisionError.*on version 1$"):
                install(engine, driver, 2)
            engine.pause = pause
            assert driver.step(5).version == 2

    @pytest.mark.parametrize("wrong, named", [
        (dict(adopt="later"), "unknown adoption 'later'"), (dict(adopt="rolling"), "needs coordinator="),
        (dict(adopt="rolling", max_behind=0, coordinator="x"), "max_behind=0"), (dict(adopt="at_request_end", pause="wait"), "pause='wait'"),
        (dict(adopt="at_request_end", adopt_within=0), "adopt_within=0")])
    def test_what_cannot_be_kept_is_refused(self, engine, wrong, named):
        with pytest.raises(RefusedError, match=named):
            self.driver(**wrong)


class TestSleep:
    def test_a_version_waits_until_the_engine_is_awake(self, engine, driver):
        install(engine, driver, 1)
        engine.served = None
        engine.sleep()
        engine.offer(2)
        assert driver.step(0.3) is None and "start" not in engine.log[-3:] and engine.serves() == {None}
        assert "the engine sleeps" in str(driver.last_error)
        engine.sleeps, engine.paused = set(), False  # somebody else woke it
        assert driver.step(5).version == 2 and engine.serves() == {2}

    def test_what_was_served_is_installed_again_when_somebody_else_woke_it(self, engine, driver):
        install(engine, driver, 1)
        engine.sleep()
        assert driver.step(0.05) is None
        engine.sleeps, engine.paused = set(), False
        served = driver.step(0.05)
        assert (served.version, "somebody else" in served.recovered) == (1, True) and engine.serves() == {1}
        assert driver.step(0.05) is None, "once"

    def test_the_drivers_own_wake_up_installs_before_anything_is_scheduled(self, engine, driver):
        install(engine, driver, 1)
        engine.served = {1}
        engine.sleep()
        engine.log.clear()
        assert driver.wake_up().version == 1 and not engine.paused
        steps = [entry for entry in engine.log if entry not in ("state", "await")]
        assert steps == ["wake weights", "start", "update", "finish", "version 1", "reset", "wake kv_cache", "resume", "resumed",
                         "resumed", "sealed", "sealed"], "what waits is not dropped"
        assert driver.step(0.05) is None

    def test_an_engine_whose_weights_do_not_come_back_sleeps_on(self, engine, driver):
        install(engine, driver, 1)
        engine.served = {1}
        engine.sleep()
        engine.faults = {("update", 0): 2}
        with pytest.raises(InstallError, match="no version"):
            driver.wake_up()
        assert engine.paused and engine.sleeps == {"kv_cache"} and driver.broken
        with pytest.raises(NotReadyError, match="on no version"):
            driver.wake_up()


@dataclasses.dataclass
class Labelled:
    weight_versions: list | None


@dataclasses.dataclass
class VllmSpan:
    version: str
    start: int
    end: int


class TestLabels:
    def test_they_are_read_as_they_were_set(self):
        own = [label(7), label(7, 2), "default"]
        found = spans(Labelled([VllmSpan(text, n, n + 1) for n, text in enumerate(own)]))
        assert found == (Span(7, 0, 1), Span(7, 1, 2, lineage=2), Span(None, 2, 3)) and own[:2] == ["7", "2/7"]

    @pytest.mark.parametrize("text", ["step-7", "", "/7", "x/7", "2/", "-1", "\u00b2"])
    def test_a_label_of_somebody_else_is_refused(self, text):
        with pytest.raises(NotReadyError, match="none of weightwire's"):
            spans(Labelled([VllmSpan(text, 0, 1)]))

    def test_where_there_is_none_it_is_said_why(self):
        with pytest.raises(NotReadyError, match="when its request ends"):
            spans(Labelled(None))
        with pytest.raises(RefusedError, match="labels no outputs"):
            spans(object())


class OldVllm:
    """A vLLM before weight transfer: its workers lack the method, and say so in vLLM's words."""

    def __init__(self):
        self.asked = 0

    async def collective_rpc(self, method, kwargs):
        self.asked += 1
        raise Exception(f"Call to collective_rpc method failed: 'Worker' object has no attribute '{method}'")

    async def pause_generation(self): ...
    async def update_weight_version(self): ...
    async def reset_prefix_cache(self): ...


@pytest.fixture
def loop():
    """An event loop that runs, as an AsyncLLM's."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    yield made
    made.call_soon_threadsafe(made.stop)
    thread.join(20)


def on(loop, do):
    async def run():
        return do()
    return asyncio.run_coroutine_threadsafe(run(), loop).result(20)


def test_an_unsupported_vllm_is_asked_once_and_named(loop):
    old = OldVllm()
    driver = on(loop, lambda: EngineDriver(old, name="engine", deadlines=QUICK))
    with driver.start():
        with pytest.raises(RefusedError, match="not supported: .*init_weight_transfer_engine"):
            driver.wait_version(1, 20)
        driver._thread.join(20)
        assert not driver._thread.is_alive() and old.asked == 1


def test_workers_of_an_unsupported_vllm_end_the_following(engine):
    """What loading.trace says where it does not know the vLLM, as the worker passes it on."""
    engine.needs_thread, asked = True, []

    def init(settings, timeout):
        asked.append(settings)
        engine.ranks = [Rank(number, 2, settings, engine, error="RefusedError: cannot be recorded", unsupported=True)
                        for number in range(2)]
    engine.init = init
    with EngineDriver(None, name="engine", deadlines=QUICK).start() as driver:
        with pytest.raises(RefusedError, match="rank 1: RefusedError: cannot be recorded"):
            driver.wait_version(1, 20)
        driver._thread.join(20)
        assert not driver._thread.is_alive() and len(asked) == 1


def test_a_vllm_without_the_calls_is_refused_before_anything_starts():
    with pytest.raises(RefusedError, match="object has no collective_rpc"):
        EngineDriver(object(), name="engine")


def test_failures_in_a_row_are_retried_ever_more_rarely(engine, monkeypatch):
    engine.needs_thread, waits = True, []
    engine.init = lambda settings, timeout: 1 / 0
    driver = EngineDriver(None, name="engine", deadlines=QUICK)
    stop = driver._stop.wait
    monkeypatch.setattr(driver._stop, "wait", lambda seconds: waits.append(seconds) or (len(waits) == 8 and driver._stop.set()))
    driver.start()._thread.join(20)
    assert not driver._thread.is_alive() and stop(0)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30] and isinstance(driver.last_error, ZeroDivisionError)
    driver.close()


def test_close_does_not_wait_for_ranks_that_never_come(engine):
    engine.needs_thread = True
    called = threading.Event()
    engine.init = lambda settings, timeout: called.set()  # and no rank says hello
    driver = EngineDriver(None, name="engine", deadlines=dataclasses.replace(QUICK, init=3600, close=3600)).start()
    assert called.wait(20)
    driver.close()
    assert not driver._thread.is_alive()


def test_close_on_the_engines_own_loop_waits_for_nothing_that_needs_it(loop):
    """What NeMo-RL does: the driver is closed in the actor whose event loop the engine's calls run on."""
    reached = threading.Event()

    class Busy(OldVllm):
        async def collective_rpc(self, method, kwargs):
            reached.set()
            await asyncio.sleep(0.2)

    driver = on(loop, lambda: EngineDriver(Busy(), name="engine", deadlines=dataclasses.replace(QUICK, init=600, close=3600)))
    driver.start()
    assert reached.wait(20)
    on(loop, driver.close)  # 20 s, on the loop
    driver._thread.join(20)
    assert not driver._thread.is_alive()


def test_an_installation_under_way_ends_well_although_the_driver_is_closed(engine):
    engine.needs_thread = True
    reached, go = threading.Event(), threading.Event()
    update = engine.update

    def slow(tickets, timeout):
        reached.set()
        assert go.wait(20)
        update(tickets, timeout)
    engine.update = slow
    driver = EngineDriver(None, name="engine", deadlines=dataclasses.replace(QUICK, close=0.1)).start()
    until("the ranks", lambda: len(engine.ranks) == 2)
    engine.offer(1)
    assert reached.wait(20)
    driver.close()
    assert driver._thread.is_alive()  # close has kept its deadline
    go.set()
    driver._thread.join(20)
    assert not driver._thread.is_alive() and engine.serves() == {1} and not engine.paused


@pytest.mark.parametrize("failed", [
    InstallError("no room", step="update", version=7, serving=Serving(6, 5, seconds={"pause": 0.1}), broken=False, epoch=8),
    StepError("update", RuntimeError("no room"))])
def test_a_failure_crosses_a_process_pool(failed):
    again = pickle.loads(pickle.dumps(failed))
    assert type(again) is type(failed) and str(again) == str(failed) and vars(again) == vars(failed)


class TestReplicas:
    """Which data parallel indices calls reach, as vLLM's own client (MPClient, 0.32) counts them."""

    @pytest.mark.parametrize("parallel, reached", [
        ({"data_parallel_size": 1, "data_parallel_size_local": 1, "data_parallel_rank": 0}, [0]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_rank": 0}, [0, 1, 2, 3]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 1, "data_parallel_rank": 3, "data_parallel_index": 3,
          "data_parallel_external_lb": True}, [3]),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2, "data_parallel_rank": 2, "data_parallel_hybrid_lb": True}, [2, 3])])
    def test_of_a_server(self, parallel, reached):
        with serving({"/server_info?config_format=json": {"vllm_config": {"parallel_config": parallel}}}) as url:
            assert HttpPort(url).replicas(5) == reached

    @pytest.mark.parametrize("answers", [{}, {"/server_info?config_format=json": {"vllm_config": "ParallelConfig(...)"}}])
    def test_of_a_server_that_does_not_say(self, answers):
        with serving(answers) as url:
            assert HttpPort(url).replicas(5) is None

    def test_of_an_engine(self):
        managed = types.SimpleNamespace(engine_core=types.SimpleNamespace(engine_ranks_managed=[2, 3]), pause_generation=None)
        assert AsyncPort(managed, None).replicas(5) == [2, 3]
        assert AsyncPort(types.SimpleNamespace(engine_core=object()), None).replicas(5) is None
        assert LlmPort(types.SimpleNamespace(llm_engine=managed)).replicas(5) == [2, 3]


@contextlib.contextmanager
def serving(answers):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps(answers.get(self.path)).encode()
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield "http://127.0.0.1:%d" % server.server_address[1]
        server.shutdown()
