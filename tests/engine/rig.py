"""A daemon, a trainer and real vLLM engines, each in processes of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Sequence

ROOT = Path(__file__).resolve().parents[2]
SERVE = dict(skip_tokenizer_init=True, enforce_eager=True, dtype="bfloat16", kv_cache_memory_bytes=128 << 20,
             max_model_len=512, max_num_seqs=8, enable_prefix_caching=True)
PROMPTS = [[5, 6, 7, 8, 9, 10], [900, 3, 77], list(range(100, 140)), [512] * 5]
TOKENS = 24


def until(what: str, done: Callable[[], object], timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end, f"{what}: not within {timeout} s"
        time.sleep(0.01)


def environment(tp: int) -> None:
    """Before an engine starts: one core for each rank, and the plug-in that this checkout installs."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(core) for core in range(tp))
    os.environ["VLLM_LOGGING_LEVEL"] = os.environ.get("VLLM_LOGGING_LEVEL", "WARNING")


def answers_of(output) -> dict[str, Any]:
    """Greedy tokens, and the three likeliest tokens of each step with their exact logprobs."""
    completion = output.outputs[0]
    return {"tokens": list(completion.token_ids),
            "top": [sorted(((token, value.logprob.hex()) for token, value in step.items()))
                    for step in completion.logprobs or []],
            "finish": completion.finish_reason}


def greedy(tokens: int = TOKENS):
    from vllm import SamplingParams
    return SamplingParams(temperature=0, max_tokens=tokens, logprobs=3, detokenize=False, ignore_eos=True)


class Engine:
    """An AsyncLLM with its loop on a thread, as a server would hold it."""

    def __init__(self, model: Path, tp: int = 1, **options: Any):
        environment(tp)
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.llm = self.run(self._make(model, tp, options), 300)

    async def _make(self, model, tp, options):
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        images = (Path(model) / "processor_config.json").exists()  # which needs a tokenizer
        return AsyncLLM.from_engine_args(AsyncEngineArgs(
            model=str(model), tensor_parallel_size=tp, weight_transfer_config={"backend": "weightwire"},
            **{**SERVE, "skip_tokenizer_init": not images, **options}))

    def run(self, coroutine, timeout: float = 120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def driver(self, **options: Any):
        from weightwire.vllm import EngineDriver

        async def make():
            return EngineDriver(self.llm, **options)
        return self.run(make())

    async def _generate(self, prompt: Sequence[int], params, **options):
        async for output in self.llm.generate({"prompt_token_ids": list(prompt)}, params, uuid.uuid4().hex, **options):
            last = output
        return last

    def submit(self, prompt: Sequence[int], params, **options):
        """A request in flight; `.result()` is its last output."""
        return asyncio.run_coroutine_threadsafe(self._generate(prompt, params, **options), self.loop)

    def stream(self, prompt: Sequence[int], params):
        """As `submit`, for a request that is watched while it runs."""
        return _Stream(self, prompt, params)

    def answers(self, prompts=PROMPTS, **options) -> list[dict]:
        """One prompt after another, so that a batch is the same in every engine."""
        return [answers_of(self.submit(prompt, greedy(), **options).result(120)) for prompt in prompts]

    def close(self):
        self.loop.call_soon_threadsafe(self.llm.shutdown)
        self.run(asyncio.sleep(0.1))
        self.loop.call_soon_threadsafe(self.loop.stop)


class _Stream:
    """A request in flight, and how far it is."""

    def __init__(self, engine: Engine, prompt, params):
        self._changed, self._last = threading.Condition(), None
        self._future = asyncio.run_coroutine_threadsafe(self._run(engine, prompt, params), engine.loop)

    async def _run(self, engine, prompt, params):
        async for output in engine.llm.generate({"prompt_token_ids": list(prompt)}, params, uuid.uuid4().hex):
            with self._changed:
                self._last = output
                self._changed.notify_all()

    def wait_tokens(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._last and len(self._last.outputs[0].token_ids) >= count, 60)

    def result(self):
        self._future.result(120)
        return self._last


class Trainer:
    """A trainer behind a command line that speaks trainer_hf's lines."""

    def __init__(self, agent: str, checkpoint: Path, command: Sequence[str] = (sys.executable, "-m",
                                                                               "tests.engine.trainer_hf")):
        self._process = subprocess.Popen([*command, "--agent", agent, "--checkpoint", str(checkpoint)], cwd=ROOT,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._answer() == {"ready": True}

    def _answer(self) -> dict:
        line = self._process.stdout.readline()
        assert line, f"the trainer ended with {self._process.wait(10)}"
        return json.loads(line)

    def send(self, version: int, checkpoint: Path, **more: Any) -> None:
        self._process.stdin.write(json.dumps({"publish": version, "checkpoint": str(checkpoint), **more}) + "\n")
        self._process.stdin.flush()

    def released(self) -> dict:
        return self._answer()

    def publish(self, version: int, checkpoint: Path) -> dict:
        self.send(version, checkpoint)
        return self.released()

    def close(self) -> None:
        self._process.stdin.close()  # what is published may still wait for an engine
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
