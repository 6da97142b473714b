"""What requests see of an update: in flight in each pause mode, and with a prompt that was cached before it."""

import pytest

from tests.engine import rig
from weightwire.vllm import spans

KIND = "qwen2"
LONG, PROMPT = 400, rig.PROMPTS[0]


@pytest.fixture(scope="module")
def job(module_stack, checkpoint):
    class Job:
        engine = module_stack.add(rig.Engine(checkpoint(KIND, 0)))
        trainer = module_stack.add(rig.Trainer(module_stack.agent, checkpoint(KIND, 1)))
        version = 0

        def update(self, seed, pause):
            """Publishes `seed` and installs it while a request runs; what became of the request."""
            driver = module_stack.add(self.engine.driver(name="engine", agent=module_stack.agent, pause=pause))
            driver.init()
            self.version += 1
            self.trainer.send(self.version, checkpoint(KIND, seed))
            running = self.engine.stream(PROMPT, rig.greedy(LONG))
            running.wait_tokens(3)
            assert driver.step(60).version == self.version
            assert self.trainer.released()["version"] == self.version
            self.output = running.result().outputs[0]
            return rig.answers_of(running.result())

        def whole(self, prompt=PROMPT, tokens=LONG):
            return rig.answers_of(self.engine.submit(prompt, rig.greedy(tokens)).result(120))
    return Job()


def test_abort_ends_the_request_with_what_the_old_weights_said(job):
    old = job.whole()
    got = job.update(seed=1, pause="abort")
    assert got["finish"] == "abort" and [span.version for span in spans(job.output)] == [None]
    assert 3 <= len(got["tokens"]) < LONG and got["tokens"] == old["tokens"][:len(got["tokens"])]


def test_wait_lets_the_request_end_on_the_old_weights(job):
    old = job.whole()
    assert job.update(seed=2, pause="wait") == old and [span.version for span in spans(job.output)] == [job.version - 1]
    assert job.whole() != old


def test_keep_goes_on_with_the_new_weights_and_a_cache_that_they_made(job):
    old = job.whole()
    got = job.update(seed=3, pause="keep")
    assert got["finish"] == "length" and len(got["tokens"]) == LONG
    same = next(i for i, (a, b) in enumerate(zip(got["tokens"], old["tokens"])) if a != b)
    assert 3 <= same < LONG

    def continued_from(i):
        return job.whole(PROMPT + got["tokens"][:i], LONG - i)["tokens"] == got["tokens"][i:]
    # The switch lies at or before the first token that differs: from there on the new weights say the same.
    assert any(continued_from(i) for i in range(same, 2, -1))
    before, after = spans(job.output)
    assert (before.version, after.version) == (job.version - 1, job.version) and (before.begin, after.end) == (0, LONG)
    assert before.end == after.begin and 3 <= after.begin <= same and continued_from(after.begin), "each token has its label"


def test_a_cached_prompt_is_answered_by_the_new_weights(job, fresh, checkpoint):
    prompt = [7 + i % 900 for i in range(300)]
    first, again = (job.engine.submit(prompt, rig.greedy()).result(60) for _ in range(2))
    assert again.num_cached_tokens >= 256 and rig.answers_of(first) == rig.answers_of(again)
    job.update(seed=1, pause="abort")
    now = job.engine.submit(prompt, rig.greedy()).result(60)
    assert now.num_cached_tokens == 0 and rig.answers_of(now) != rig.answers_of(again)
    assert job.engine.answers() == fresh(KIND, 1, 1)
