"""When a version is taken while requests run, what their outputs are labelled with, and what an engine that slept answers.

The oracle of a label: a fresh engine on the checkpoint that was published under it gives each token of the output the same logprob."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict


from tests.engine import rig
from tests.engine.conftest import Stack
from tests.engine.trainer_hf import config_of, read
from weightwire import Client, Subscriber
from weightwire.vllm import spans

KIND = "qwen2"
SEEDS = 3  # version v has the weights of seed 1 + v % SEEDS
MOST = 2  # versions behind
CLIENTS = 6


def seed_of(version: int) -> int:
    return 1 + version % SEEDS


class Peer(threading.Thread):
    """Another engine of the fleet, which takes each version at once."""

    def __init__(self, agent: str, checkpoint):
        super().__init__(daemon=True)
        self._closed, self._checkpoint = threading.Event(), checkpoint
        self.subscriber = Subscriber(group="peer", rank=0, world_size=1, agent=agent)
        self.subscriber.bind(config_of(checkpoint), "hf", [meta for meta, _ in read(checkpoint).values()])
        self.start()

    def run(self):
        while not self._closed.is_set():
            if offer := self.subscriber.wait_offer(0.2):
                self.subscriber.flip(offer)
                self.subscriber.acknowledge(offer)

    def close(self):
        self._closed.set()
        self.join(20)
        self.subscriber.close()


class Commits(threading.Thread):
    """When which version was the newest that is committed, as the coordinator says."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        self._closed, self._client, self.seen = threading.Event(), Client(address), []
        self.start()

    def run(self):
        while not self._closed.is_set():
            for status in self._client.watch(1.0, interval=0.05, participants=False):
                if not self.seen or self.seen[-1][1] != status.committed_version:
                    self.seen.append((time.monotonic(), status.committed_version))

    def at(self, when: float) -> int:
        return max((version for seen, version in self.seen if seen <= when), default=0)

    def close(self):
        self._closed.set()
        self.join(20)


class Load:
    """Clients that ask the engine one request after another; what they got: (prompt, output, when it ended)."""

    def __init__(self, engine: rig.Engine):
        self._engine, self._closed, self.most, self.got = engine, threading.Event(), 40, []
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number):
        draw = random.Random(number)
        while not self._closed.is_set():
            prompt = [draw.randrange(2, 1024) for _ in range(draw.randrange(4, 40))]
            output = self._engine.submit(prompt, rig.greedy(draw.randrange(self.most // 2, self.most))).result(300)
            self.got.append((prompt, output.outputs[0], time.monotonic()))

    def close(self):
        self._closed.set()
        for thread in self._threads:
            thread.join(300)
            assert not thread.is_alive()


def logprobs_of(engine, prompt, tokens) -> list[float]:
    """Of each of `tokens` after `prompt` and those before it."""
    from vllm import SamplingParams
    whole = [*prompt, *tokens]
    out = engine.submit(whole, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)).result(120)
    return [out.prompt_logprobs[at][whole[at]].logprob for at in range(len(prompt), len(whole))]


def furthest(engine, prompt, completion) -> float:
    """The largest difference between what was said of a token and what this engine says of it."""
    said = [step[token].logprob for token, step in zip(completion.token_ids, completion.logprobs)]
    return max(abs(a - b) for a, b in zip(said, logprobs_of(engine, prompt, completion.token_ids)))


def test_20_versions_under_load_with_rolling_adoption(checkpoint, tmp_path):
    stack = Stack(tmp_path / "daemon", commit_deadline_ms=1000)
    try:
        engine = stack.add(rig.Engine(checkpoint(KIND, 0)))
        trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
        stack.add(Peer(stack.agent, checkpoint(KIND, 0)))
        commits = stack.add(Commits(stack.daemon.grpc))
        driver = stack.add(engine.driver(name="engine", agent=stack.agent, adopt="rolling", max_behind=MOST, adopt_within=60,
                                         coordinator=stack.daemon.grpc)).start()
        installs = []
        installed = driver._set

        def record(serving, broken):
            installs.append(serving)
            installed(serving, broken)
        driver._set = record
        load = stack.add(Load(engine))
        for version in range(1, 21):
            if version == 11:
                load.most = 440  # from now on requests outlive several versions
            trainer.send(version, checkpoint(KIND, seed_of(version)))
            assert trainer.released()["version"] == version
            if version <= 10:
                driver.wait_version(version, 120)
            else:
                time.sleep(1.5)  # a trainer's step
        driver.wait_version(20, 300)
        load.close()
    finally:
        stack.close()
    assert [serving.version for serving in installs[:10]] == list(range(1, 11)) and installs[-1].version == 20
    assert not any(serving.recovered for serving in installs)
    assert [serving.forced for serving in installs[:10]] == [""] * 10, "short requests are waited for"
    assert any("versions behind" in serving.forced for serving in installs[10:]), "long ones are not"
    by_seed, finished, aborted = defaultdict(list), 0, 0
    for prompt, completion, ended in load.got:
        if completion.finish_reason == "abort" and not completion.token_ids:
            continue  # it was waiting
        (span,) = spans(completion)  # no mixture
        assert (span.begin, span.end, span.lineage) == (0, len(completion.token_ids), 1)
        by_seed[0 if span.version is None else seed_of(span.version)].append((prompt, completion))
        if completion.finish_reason == "abort":
            aborted += 1
        else:
            finished += 1
            assert (span.version or 0) + MOST >= commits.at(ended - 3.0), "it ended 3 s after it was too far behind"
    print(f"{finished} requests ended, {aborted} were aborted; installs {[(s.version, s.forced) for s in installs]}")
    assert finished > 20 and aborted >= 1 and set(by_seed) == {0, 1, 2, 3}
    said, others = [], []
    for seed in range(SEEDS + 1):
        fresh = rig.Engine(checkpoint(KIND, seed))
        try:
            for got, requests in by_seed.items():
                for prompt, completion in requests if got == seed else requests[:4]:
                    (said if got == seed else others).append(furthest(fresh, prompt, completion))
        finally:
            fresh.close()
    print(f"furthest from its label's engine {max(said):.3f}, nearest to another {min(others):.3f}")
    assert max(said) < 0.25 < 4 * 0.25 < min(others)


def test_at_request_end_nobody_is_cut_and_who_comes_meanwhile_is_answered_by_the_new_version(checkpoint, fresh, stack):
    engine = stack.add(rig.Engine(checkpoint(KIND, 0)))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
    driver = stack.add(engine.driver(name="engine", agent=stack.agent, adopt="at_request_end", adopt_within=120)).start()
    driver._workers.wait_hello(120)
    old = rig.answers_of(engine.submit(rig.PROMPTS[0], rig.greedy(300)).result(120))
    running = engine.stream(rig.PROMPTS[0], rig.greedy(300))
    running.wait_tokens(3)
    trainer.send(1, checkpoint(KIND, 1))
    end = time.monotonic() + 60
    while driver.draining is None:
        assert time.monotonic() < end and driver.serving is None
        time.sleep(0.01)
    waiting = engine.submit(rig.PROMPTS[0], rig.greedy())
    ended = running.result()
    assert rig.answers_of(ended) == old and [span.version for span in spans(ended.outputs[0])] == [None]
    now = waiting.result(120)
    assert [rig.answers_of(now)] == fresh(KIND, 1, 1)[:1] and [span.version for span in spans(now.outputs[0])] == [1]
    assert driver.wait_version(1, 60).forced == "" and trainer.released()["version"] == 1


def test_an_engine_that_slept_answers_nothing_before_its_weights_are_back(checkpoint, fresh, stack):
    """CPU workers keep their weights when vLLM sleeps, so the test writes zeros over them, as its level 2 does."""
    engine = stack.add(rig.Engine(checkpoint(KIND, 0), worker_extension_cls="tests.engine.extension.Inspect"))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
    driver = stack.add(engine.driver(name="engine", agent=stack.agent))
    driver.init()
    trainer.send(1, checkpoint(KIND, 1))
    assert driver.step(60).version == 1 and trainer.released()["version"] == 1

    def sleep():
        engine.run(engine.llm.sleep(level=2))
        engine.run(engine.llm.collective_rpc("lose_parameters"))
    sleep()
    trainer.send(2, checkpoint(KIND, 2))
    assert trainer.released()["version"] == 2
    assert driver.step(2) is None and driver.serving.version == 1 and "the engine sleeps" in str(driver.last_error)
    waiting = engine.submit(rig.PROMPTS[0], rig.greedy())
    assert driver.wake_up().version == 1
    assert [rig.answers_of(waiting.result(120))] == fresh(KIND, 1, 1)[:1]
    assert driver.step(60).version == 2 and engine.answers() == fresh(KIND, 1, 2)
    sleep()
    assert driver.step(0.1) is None
    engine.run(engine.llm.wake_up())  # by somebody else
    again = driver.step(10)
    assert (again.version, "somebody else" in again.recovered) == (2, True) and engine.answers() == fresh(KIND, 1, 2)
