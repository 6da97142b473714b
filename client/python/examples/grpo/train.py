"""GRPO on a toy task: a trainer process, a rollout process, and weightwire between them.

    python train.py --engine vllm --steps 40 --out curve.json            # with sync
    python train.py --engine vllm --steps 40 --out frozen.json --no-sync # rollouts keep the first weights
    python train.py --dtype bfloat16 --delta always                      # after the first version only what changed is sent

Starts its own weightwired. Same seed, same run, as far as the engine's arithmetic is.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import task
import torch
import weightwire.torch
from transformers import Qwen2ForCausalLM
from weightwire import Client, binaries

HERE = pathlib.Path(__file__).resolve().parent
SECONDS = 300  # for any one wait: starting an engine, a version, a batch of answers


class Daemon:
    """weightwired as coordinator and agent of this machine."""

    def __init__(self, binary: str, folder: str, delta: str):
        self.agent = f"{folder}/agent.sock"
        # Within a host memory is mapped, and nothing sent: to see changes sent, there must be no shared memory.
        how = ["--delta", delta] + (["--transports", "tcp"] if delta == "always" else [])
        self._process = subprocess.Popen([binary, "--role", "all", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0",
                                          "--data-listen", "127.0.0.1:0", "--agent-socket", self.agent, "--state-dir", f"{folder}/journal", "--log-level", "warn",
                                          *how],
                                         stdout=subprocess.PIPE, text=True)
        ready = self._process.stdout.readline()
        if not ready.startswith("weightwired ready"):
            raise RuntimeError(f"weightwired did not start: {ready}")
        self.address = dict(word.split("=", 1) for word in ready.split() if "=" in word)["grpc"]

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)


class Rollout:
    """The rollout process, asked over its socket."""

    def __init__(self, engine: str, agent: str, model: str, folder: str):
        path = f"{folder}/rollout.sock"
        self._process = subprocess.Popen([sys.executable, str(HERE / "rollout.py"), engine, path, agent, model])
        end = time.monotonic() + SECONDS
        while not pathlib.Path(path).exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the rollout process did not start (exit {self._process.poll()})")
            time.sleep(0.1)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(SECONDS)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw")

    def answers(self, prompts: list[list[int]], seed: int) -> dict:
        self._lines.write(json.dumps({"prompts": prompts, "seed": seed}) + "\n")
        self._lines.flush()
        return json.loads(self._lines.readline())

    def close(self) -> None:
        self._socket.close()
        self._lines.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()


def grpo_step(model, optimizer, prompts, answers, epochs: int = 2, clip: float = 0.2) -> list[float]:
    """One batch: advantages within each prompt's group of answers, a clipped ratio against the policy that wrote
    them. Returns the rewards."""
    rewards = torch.tensor([[task.reward(answer) for answer in group] for group in answers["tokens"]])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    said = torch.tensor(answers["tokens"]).flatten(0, 1)
    asked = torch.tensor(prompts).repeat_interleave(task.ANSWERS_PER_PROMPT, 0)
    before = torch.tensor(answers["logprobs"]).flatten(0, 1)
    for _ in range(epochs):
        scores = model(torch.cat([asked, said], 1)).logits[:, task.PROMPT_TOKENS - 1:-1].log_softmax(-1)
        ratio = (scores.gather(2, said[:, :, None])[:, :, 0] - before).exp()
        gain = advantages.flatten()[:, None]
        loss = -torch.minimum(ratio * gain, ratio.clamp(1 - clip, 1 + clip) * gain).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return rewards.flatten().tolist()


def train(options, folder: str) -> dict:
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # one core for the trainer, one for the rollouts
    model = Qwen2ForCausalLM(task.model_config())
    dtype = getattr(torch, options.dtype)
    copy.deepcopy(model).to(dtype).save_pretrained(folder + "/model")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    curve, blocked, sent, said, began = [], [], [], hashlib.sha256(), time.monotonic()
    daemon = Daemon(options.weightwired or str(binaries.program("weightwired")), folder, options.delta)
    try:
        rollout = Rollout(options.engine, daemon.agent, folder + "/model", folder)
        try:
            with weightwire.torch.Publisher(lambda: rounded(model, dtype), rank=0, world_size=1, agent=daemon.agent,
                                            delta=options.delta) as publisher, Client(daemon.address) as client:
                for step in range(1, options.steps + 1):
                    prompts = task.prompts(options.seed * 100_000 + step)
                    answers = rollout.answers(prompts, options.seed * 100_000 + step)
                    expected = step - 1 if options.sync else 0
                    assert answers["version"] == expected, f"version {answers['version']} answered step {step}"
                    said.update(json.dumps([answers["tokens"], answers["logprobs"]]).encode())
                    rewards = grpo_step(model, optimizer, prompts, answers)
                    curve.append(sum(rewards) / len(rewards))
                    if options.sync:
                        publisher.publish(step).wait_released(SECONDS)
                        blocked.append(publisher.blocked_seconds)
                        client.wait_version(step, SECONDS)
                        epoch = client.status().epoch_of(step)
                        sent.append({"bytes": epoch.bytes, "sent": sum(epoch.bytes_by_transport.values())})
                    if step % 5 == 0 or step == 1:
                        print(f"step {step:3d}  version {answers['version']:3d}  reward {curve[-1]:.3f}", flush=True)
        finally:
            rollout.close()
    finally:
        daemon.stop()
    return {"engine": options.engine, "sync": options.sync, "seed": options.seed, "reward": curve,
            "answers": said.hexdigest(), "sent": sent, "seconds": time.monotonic() - began, "blocked_seconds_median": sorted(blocked)[len(blocked) // 2]
            if blocked else 0.0}


def rounded(model, dtype):
    """What engines serve: the trainer's float32 parameters, or what they round to."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["torch", "vllm"], default="torch")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of what is published and served")
    parser.add_argument("--delta", choices=["auto", "always", "off"], default="auto",
                        help="always: over tcp, and after the first version only what changed")
    parser.add_argument("--no-sync", dest="sync", action="store_false")
    parser.add_argument("--out", help="JSON with the reward of each step")
    parser.add_argument("--weightwired", help="the program; else the package's own, a build's, or that on PATH")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="weightwire-grpo-") as folder:
        result = train(options, folder)
    first, last = (sum(part) / len(part) for part in (result["reward"][:5], result["reward"][-5:]))
    print(f"reward of the first five steps {first:.3f}, of the last five {last:.3f}, in {result['seconds']:.0f} s")
    if options.out:
        pathlib.Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
