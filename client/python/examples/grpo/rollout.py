"""A rollout process: answers prompts with the weights that weightwire brought last.

    rollout.py ENGINE SOCKET AGENT MODEL          ENGINE: torch or vllm

Requests and answers are lines of JSON on the Unix socket SOCKET; no weight passes there.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from typing import Protocol

import task

POLL_SECONDS = 0.02


class Engine(Protocol):
    version: int  #: of the weights; 0: those of MODEL

    def update(self, timeout: float) -> None:
        """Takes the next committed version, if one comes within `timeout` seconds."""

    def generate(self, prompts: list[list[int]], seed: int) -> tuple[list, list]:
        """(tokens, log probabilities), each [prompt][answer][token]."""


class TorchEngine:
    """Samples with the model itself; the shortest engine that there can be."""

    def __init__(self, agent: str, model: str):
        import torch
        from transformers import Qwen2ForCausalLM
        from weightwire.torch import Receiver

        torch.set_num_threads(1)
        self._torch, self.version = torch, 0
        self._model = Qwen2ForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._receiver = Receiver(self._model, group="rollout", rank=0, world_size=1, agent=agent)

    def update(self, timeout: float) -> None:
        offer = self._receiver.receive(timeout)
        if offer is not None:
            self.version = offer.version

    def generate(self, prompts, seed):
        torch, n = self._torch, task.ANSWERS_PER_PROMPT
        random = torch.Generator().manual_seed(seed)
        tokens = torch.tensor(prompts).repeat_interleave(n, 0)
        logprobs = []
        with torch.no_grad():
            for _ in range(task.ANSWER_TOKENS):
                scores = self._model(tokens).logits[:, -1].log_softmax(-1)
                drawn = torch.multinomial(scores.exp(), 1, generator=random)
                logprobs.append(scores.gather(1, drawn))
                tokens = torch.cat([tokens, drawn], 1)
        shape = len(prompts), n, task.ANSWER_TOKENS
        return tokens[:, task.PROMPT_TOKENS:].reshape(shape).tolist(), torch.cat(logprobs, 1).reshape(shape).tolist()


class VllmEngine:
    """A real vLLM; weightwire is its weight-transfer back end."""

    def __init__(self, agent: str, model: str):
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        from vllm import LLM, SamplingParams
        from weightwire.vllm import EngineDriver

        self._params = lambda seed: SamplingParams(
            n=task.ANSWERS_PER_PROMPT, temperature=1.0, top_p=1.0, top_k=-1, seed=seed, max_tokens=task.ANSWER_TOKENS,
            min_tokens=task.ANSWER_TOKENS, logprobs=0, detokenize=False, ignore_eos=True)
        self._llm = LLM(model=model, dtype="auto", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
                        kv_cache_memory_bytes=128 << 20, weight_transfer_config={"backend": "weightwire"})
        self._driver = EngineDriver(self._llm, name="rollout", agent=agent)
        self._driver.init()
        self.version = 0

    def update(self, timeout: float) -> None:
        serving = self._driver.step(timeout)
        if serving is not None:
            self.version = serving.version

    def generate(self, prompts, seed):
        # vLLM counts on from a prompt's seed for its answers: far enough apart, or prompts share their draws.
        first = seed * len(prompts)
        params = [self._params((first + i) * task.ANSWERS_PER_PROMPT) for i in range(len(prompts))]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        tokens = [[list(answer.token_ids) for answer in o.outputs] for o in outputs]
        logprobs = [[[step[token].logprob for token, step in zip(a.token_ids, a.logprobs)] for a in o.outputs]
                    for o in outputs]
        return tokens, logprobs


def serve(engine: Engine, listener: socket.socket) -> None:
    peer, _ = listener.accept()
    lines = peer.makefile("rw")
    while True:
        engine.update(POLL_SECONDS)
        if not select.select([peer], [], [], POLL_SECONDS)[0]:
            continue
        line = lines.readline()
        if not line:
            return
        ask = json.loads(line)
        tokens, logprobs = engine.generate(ask["prompts"], ask["seed"])
        lines.write(json.dumps({"version": engine.version, "tokens": tokens, "logprobs": logprobs}) + "\n")
        lines.flush()


if __name__ == "__main__":
    kind, path, agent, model = sys.argv[1:]
    made = {"torch": TorchEngine, "vllm": VllmEngine}[kind](agent, model)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(1)
        serve(made, listening)
