"""A private `weightwired` for a notebook, a test or a job on one node: `with weightwire.local(): …`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Dict, Iterator, List, Optional, Union

from weightwire.binaries import program
from weightwire.errors import DeadlineError, UnavailableError

#: Of `weightwired`, by the names of its file.
Settings = Dict[str, Union[str, int, bool]]
#: Of this process, while it has a daemon of its own.
_VARIABLES = ("WEIGHTWIRE_ADDRESS", "WEIGHTWIRE_AGENT_SOCKET")
#: They would lead clients elsewhere, or make them speak TLS.
_OTHERS = ("WEIGHTWIRE_TLS_CERT", "WEIGHTWIRE_TLS_KEY", "WEIGHTWIRE_TLS_CA", "WEIGHTWIRE_TLS_SERVER_NAME", "WEIGHTWIRE_TOKEN_FILE")
STOP_SECONDS = 15
#: Ends the daemon when its standard input does, that is when the process that wants it has ended, however it did. (A signal on
#: the parent's death would come when the thread ends that started it.)
_WATCH = """
import os, subprocess, sys, threading
daemon = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
def end():
    os.read(0, 1)  # not sys.stdin: the interpreter could not end while a thread reads it
    daemon.terminate()
    try:
        daemon.wait(float(sys.argv[1]))
    except subprocess.TimeoutExpired:
        daemon.kill()
threading.Thread(target=end, daemon=True).start()
sys.exit(daemon.wait())
"""


@dataclass(frozen=True)
class Local:
    """A daemon of this process's own: coordinator and agent."""

    address: str  #: of the coordinator's gRPC, HOST:PORT
    agent_socket: str
    http: str  #: of the status page and metrics, HOST:PORT
    directory: str  #: its settings, socket and log, gone with it
    log: str  #: path of its log


@contextmanager
def local(*, timeout: float = 30.0, **settings: Union[str, int, bool]) -> Iterator[Local]:
    """Runs `weightwired` (`weightwire.binaries` finds it) in a directory and on ports of its own; plaintext, on loopback only.

    Within the block Publisher, Subscriber, Client and `wwctl` of this process and of those that it starts use it without
    configuration: WEIGHTWIRE_ADDRESS and WEIGHTWIRE_AGENT_SOCKET are set, and restored behind it. Not for threads that want
    different ones. It ends with the block, and when this process is killed.

    timeout   seconds until it must be ready
    settings  of weightwired, by the names of its file, e.g. slot_bytes=1 << 20 (`weightwired --help` lists them)

    UnavailableError: there is no weightwired, or it did not start; the message has the end of its log. DeadlineError: it was
    not ready in time.
    """
    directory = tempfile.mkdtemp(prefix="weightwire-")  # of mode 0700, as its sockets want it
    paths: Settings = {
        "role": "all", "name": "local", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "data_listen": "127.0.0.1:0",
        "ucx_listen": "127.0.0.1:0", "agent_socket": f"{directory}/agent.sock", **settings}
    try:
        with running(paths, directory, timeout) as said:
            mine = Local(said["grpc"], str(paths["agent_socket"]), said.get("http", ""), directory, f"{directory}/weightwired.log")
            with _environment(mine):
                yield mine
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def until_its_parent_ends(command: List[str]) -> List[str]:
    """A command that runs `command` until its standard input, a pipe, is closed; then it has STOP_SECONDS."""
    return [sys.executable, "-I", "-S", "-c", _WATCH, str(STOP_SECONDS), *command]


@contextmanager
def running(settings: Settings, directory: str, timeout: float) -> Iterator[Dict[str, str]]:
    """A `weightwired` with these settings, whose file and log (weightwired.log) lie in `directory`: what its line of readiness says
    (grpc, http …). None of this process's WEIGHTWIRE_ variables reaches it."""
    binary, log = program("weightwired"), f"{directory}/weightwired.log"
    with open(f"{directory}/weightwired.yaml", "w") as out:
        out.writelines(f"{key}: {str(value).lower() if isinstance(value, bool) else value}\n" for key, value in settings.items())
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTWIRE_")}
    with open(log, "w") as errors:
        process = subprocess.Popen(until_its_parent_ends([str(binary), "--config", out.name]),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=clean)
    try:
        yield _ready(process, log, timeout)
    finally:
        _stop(process)


def _ready(process: "subprocess.Popen[str]", log: str, timeout: float) -> Dict[str, str]:
    assert process.stdout is not None
    lines: List[str] = []
    reader = threading.Thread(target=lambda out: lines.append(out.readline()), args=(process.stdout,), daemon=True)
    reader.start()
    reader.join(timeout)
    if not lines:
        raise DeadlineError(f"weightwired was not ready within {timeout} s: {_end_of(log)}", code="DEADLINE_EXCEEDED")
    if not re.match(r"weightwired ready ", lines[0]):
        raise UnavailableError(f"weightwired did not start: {lines[0]}{_end_of(log)}", code="UNAVAILABLE",
                               remedy="its own words are above; `weightwired --help` lists the settings")
    return dict(word.split("=", 1) for word in lines[0].split() if "=" in word)


def _end_of(log: str) -> str:
    with open(log, errors="replace") as file:
        return file.read()[-2000:].strip()


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(STOP_SECONDS + 5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


@contextmanager
def _environment(mine: Local) -> Iterator[None]:
    before: Dict[str, Optional[str]] = {name: os.environ.pop(name, None) for name in (*_VARIABLES, *_OTHERS)}
    os.environ.update(zip(_VARIABLES, (mine.address, mine.agent_socket)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
