"""`weightwire vllm URL --name ENGINE`: follows every version with a `vllm serve`, in a process of its own. Needs no vLLM itself."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

from weightwire.errors import RefusedError, WeightwireError
from weightwire.vllm.adopt import ADOPTIONS
from weightwire.vllm.driver import INSTALLS, MODES, PAUSE_MODES, EngineDriver
from weightwire.vllm.replace import Deadlines

log = logging.getLogger("weightwire.vllm")
_LOOK_SECONDS, _SAY_SECONDS = 1.0, 30.0

EXIT_REFUSED = 2  # an option, or a vLLM, with which no later try can do better


def add_to(commands: Any) -> None:
    """The command and its options to an argparse's subparsers."""
    one = commands.add_parser("vllm", help="follow every version with a `vllm serve` on this host", description=(
        "Updates a running `vllm serve` with every committed version, until it is ended by SIGTERM or SIGINT. The server is started with "
        "VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{\"backend\": \"weightwire\"}', before or after this; one that is started "
        "anew is brought up to date again, by another engine or with the next version."))
    one.add_argument("server", metavar="URL", help="of the server, such as http://127.0.0.1:8000")
    one.add_argument("--name", default=os.environ.get("WEIGHTWIRE_ENGINE"), help="of the engine in the job [$WEIGHTWIRE_ENGINE]")
    one.add_argument("--agent", help="the agent's socket [$WEIGHTWIRE_AGENT_SOCKET]")
    one.add_argument("--job", default="", help="[the agent's]")
    one.add_argument("--listen", metavar="HOST[:PORT]", help="this host's address, where the engine has workers on other hosts")
    one.add_argument("--mode", choices=MODES, default="fused", help="what lies in the stage [%(default)s]")
    one.add_argument("--install", choices=INSTALLS, default="auto", help="when weights are copied to the device [%(default)s]")
    one.add_argument("--pause", choices=PAUSE_MODES, default="abort", help="what becomes of requests that run [%(default)s]")
    one.add_argument("--adopt", choices=ADOPTIONS, default="lockstep", help="when the engine changes while requests run [%(default)s]")
    one.add_argument("--adopt-within", type=float, default=10.0, metavar="SECONDS", help="[%(default)s]")
    one.add_argument("--max-behind", type=int, default=1, metavar="VERSIONS", help="of --adopt rolling [%(default)s]")
    one.add_argument("--coordinator", default=os.environ.get("WEIGHTWIRE_ADDRESS"), help="its address, for --adopt rolling [$WEIGHTWIRE_ADDRESS]")
    one.add_argument("--checkpoint", metavar="DIR", help="config.json and safetensors, where the server was not started from one")
    one.add_argument("--draft", action="store_true", help="the server has a draft model; it is updated in the same pause")
    one.add_argument("--model-name", default="", metavar="NAME", help="which of the trainer's models this is, where it publishes several")
    one.add_argument("--deadline", action="append", default=[], metavar="STEP=SECONDS",
                     help="of one step: " + ", ".join(field.name for field in dataclasses.fields(Deadlines)))
    one.add_argument("--ready-file", type=Path, metavar="PATH",
                     help="is there while the engine is on one version and its ranks are heard, for a readiness probe")


def run(asked: argparse.Namespace) -> int:
    """Until a signal: 0. EXIT_REFUSED: no later try can do better."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        if not asked.name:
            raise RefusedError("the engine has no name", code="INVALID_ARGUMENT", remedy="--name, or WEIGHTWIRE_ENGINE")
        driver = EngineDriver(
            asked.server, name=asked.name, agent=asked.agent, job=asked.job, mode=asked.mode, install=asked.install, pause=asked.pause,
            adopt=asked.adopt, adopt_within=asked.adopt_within, max_behind=asked.max_behind,
            coordinator=asked.coordinator if asked.adopt == "rolling" else None, checkpoint=asked.checkpoint, draft=asked.draft,
            listen=asked.listen, model_name=asked.model_name, deadlines=_deadlines(asked.deadline))
    except WeightwireError as error:
        print(f"weightwire vllm: {error}", file=sys.stderr)
        return EXIT_REFUSED
    try:
        _say_ready(asked.ready_file, False)
        if _wait_for_server(asked.server, stop):
            driver.start()
            return _watch(driver, asked.ready_file, stop)
        return 0
    finally:
        driver.close()
        _say_ready(asked.ready_file, False)


def _deadlines(given: list[str]) -> Deadlines:
    known = {field.name for field in dataclasses.fields(Deadlines)}
    seconds: dict[str, float] = {}
    for text in given:
        step, _, value = text.partition("=")
        try:
            seconds[step] = float(value)
        except ValueError:
            seconds[step] = 0.0
        if step not in known or not 0 < seconds[step] < 86_400:
            raise RefusedError(f"--deadline {text}", code="INVALID_ARGUMENT", remedy=f"STEP=SECONDS, a step of {', '.join(sorted(known))}")
    return Deadlines(**seconds)


def _wait_for_server(url: str, stop: threading.Event) -> bool:
    """Whether it answers; False: `stop` was set before. A large model takes its time to load."""
    waited = 0.0
    while not stop.is_set():
        try:
            urllib.request.urlopen(url.rstrip("/") + "/health", timeout=5).close()
            return True
        except (OSError, ValueError) as error:
            if waited % _SAY_SECONDS == 0:
                log.info("weightwire: %s does not answer yet, for %.0f s: %s", url, waited, error)
        stop.wait(_LOOK_SECONDS)
        waited += _LOOK_SECONDS
    return False


def _watch(driver: EngineDriver, ready: Path | None, stop: threading.Event) -> int:
    """Says what is served, and whether the engine is ready, until `stop`."""
    told = None
    while not stop.is_set():
        serving = driver.serving
        if serving != told and serving is not None:
            log.info("weightwire: serving version %d (epoch %d), paused for %.3f s%s", serving.version, serving.epoch, serving.paused_seconds,
                     f", after {serving.recovered}" if serving.recovered else "")
        told = serving
        _say_ready(ready, driver.ready and serving is not None)
        if driver.gave_up:
            log.error("weightwire: %s", driver.last_error)
            return EXIT_REFUSED
        stop.wait(_LOOK_SECONDS)
    return 0


def _say_ready(path: Path | None, ready: bool) -> None:
    if path is None:
        return
    if ready:
        path.touch()
    else:
        path.unlink(missing_ok=True)
