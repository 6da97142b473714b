"""`weightwire run [SETTINGS] -- COMMAND`: an agent of its own for one command, in the same container.

It sees what the command sees: its GPUs, its user, its shared memory. The command is what counts: it gets every signal, its exit code
is this one's, and an agent that ends is started again beside it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Dict, List, Optional

from weightwire.binaries import program
from weightwire.errors import RefusedError, WeightwireError
from weightwire.local_daemon import STOP_SECONDS, until_its_parent_ends

EXIT_REFUSED, EXIT_NOT_RUN, EXIT_NOT_FOUND = 125, 126, 127  # as env(1) and docker have them
_READY_SECONDS = 30.0
_PAUSE_SECONDS, _PAUSE_SECONDS_MAX = 1.0, 30.0  # before an agent that ended is started again
_STEADY_SECONDS = 60.0  # after which it counts as started well
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)


def add_to(commands: Any) -> None:
    """The command's help to an argparse's subparsers: its words are the agent's and the command's."""
    commands.add_parser(
        "run", help="run a command with an agent of its own beside it, in the same container", usage="weightwire run [SETTINGS] -- COMMAND …",
        description="Starts `weightwired --role agent SETTINGS`, then COMMAND, which finds it by WEIGHTWIRE_AGENT_SOCKET. Settings are "
                    "weightwired's (`weightwired --help`), by flags or by WEIGHTWIRE_ variables; --coordinator is needed. An agent that "
                    "ends is started again; the command is never touched. The exit code is the command's; 125: the settings are refused, 126 and 127: "
                    "the command cannot be run, or is not there.")


def run(rest: List[str]) -> int:
    """`rest`: what follows the word `run`."""
    if "--" not in rest or rest[-1] == "--":
        return _refuse("there is no command; write it behind --: weightwire run --coordinator HOST:7411 -- vllm serve MODEL")
    at = rest.index("--")
    try:
        agent = Agent(rest[:at])
        agent.start()
        agent.await_ready(_READY_SECONDS)
    except WeightwireError as error:
        return _refuse(str(error))
    try:
        return _Pair(agent, rest[at + 1:]).wait()
    except FileNotFoundError as error:
        return _refuse(str(error), EXIT_NOT_FOUND)
    except OSError as error:
        return _refuse(str(error), EXIT_NOT_RUN)
    finally:
        agent.stop()


def _refuse(why: str, code: int = EXIT_REFUSED) -> int:
    print(f"weightwire run: {why}", file=sys.stderr)
    return code


class Agent:
    """A `weightwired --role agent` with these flags, and this process's environment. It ends when this process does. Not thread-safe, but
    for the timer that starts it again."""

    def __init__(self, flags: List[str]):
        """RefusedError: weightwired refuses the settings, in its own words."""
        self._command = [str(program("weightwired")), "--role", "agent", *flags]
        done = subprocess.run([*self._command, "--print-config"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=60)
        if done.returncode != 0:
            why = re.sub(r"^weightwired: (\S+ \(\S+\): )?", "", done.stderr.strip() or done.stdout.strip())
            raise RefusedError(why, code="INVALID_ARGUMENT", reason="config_invalid")
        self.socket, self._coordinator = _setting(done.stdout, "agent_socket"), _setting(done.stdout, "coordinator")
        self._process: Optional["subprocess.Popen[bytes]"] = None
        self._timer: Optional[threading.Timer] = None
        self._pause, self._started, self._stopped = _PAUSE_SECONDS, 0.0, False
        self._ready = threading.Event()

    @property
    def pid(self) -> Optional[int]:
        return self._process.pid if self._process else None

    def environment(self) -> Dict[str, str]:
        """By which a command finds it."""
        own = {"WEIGHTWIRE_AGENT_SOCKET": self.socket}
        if "," not in self._coordinator:
            own["WEIGHTWIRE_ADDRESS"] = os.environ.get("WEIGHTWIRE_ADDRESS", self._coordinator)
        return {**os.environ, **own}

    def start(self) -> None:
        if self._stopped:
            return
        self._started = time.monotonic()
        # No key of the command's terminal ends it.
        self._process = subprocess.Popen(until_its_parent_ends(self._command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        threading.Thread(target=self._listen, args=(self._process,), daemon=True).start()

    def _listen(self, process: "subprocess.Popen[bytes]") -> None:
        """Standard output is the command's: what the agent says goes where errors go."""
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"weightwired ready "):
                self._ready.set()
            sys.stderr.buffer.write(line)
            sys.stderr.flush()

    def await_ready(self, timeout: float) -> None:
        """RefusedError: it has ended, and said why, or is not ready in time."""
        assert self._process is not None
        end = time.monotonic() + timeout
        while not self._ready.wait(0.05):
            code = self._process.poll()
            if code is not None or time.monotonic() > end:
                raise RefusedError(f"the agent ended with {code}" if code is not None else f"the agent is not ready after {timeout:.0f} s",
                                   code="FAILED_PRECONDITION", remedy="its own words are above")

    def ended(self) -> None:
        """Its process has: another one is started, later each time."""
        assert self._process is not None
        code = self._process.wait()
        if time.monotonic() - self._started > _STEADY_SECONDS:
            self._pause = _PAUSE_SECONDS
        print(f"weightwire run: the agent ended with {code}, and is started again in {self._pause:.0f} s", file=sys.stderr, flush=True)
        self._process = None
        self._timer = threading.Timer(self._pause, self.start)
        self._timer.daemon = True
        self._timer.start()
        self._pause = min(2 * self._pause, _PAUSE_SECONDS_MAX)

    def stop(self) -> None:
        """It says goodbye; killed when that takes too long."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._process is None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class _Pair:
    """The command and its agent. In a container this may be process 1: then orphans are its children, too."""

    def __init__(self, agent: Agent, command: List[str]):
        self._agent = agent
        self._command: Optional["subprocess.Popen[bytes]"] = None
        self._early: List[int] = []  # signals before there is a command
        for forwarded in _FORWARDED:
            signal.signal(forwarded, self._forward)
        self._command = subprocess.Popen(command, env=agent.environment())
        for number in self._early:
            self._command.send_signal(number)

    def _forward(self, number: int, _frame: Any) -> None:
        if self._command is None:
            self._early.append(number)
        else:
            self._command.send_signal(number)

    def wait(self) -> int:
        """The command's exit code; 128 and a signal's number, by which it ended."""
        assert self._command is not None
        while True:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            if ended.si_pid == self._command.pid:
                code = self._command.wait()
                return code if code >= 0 else 128 - code
            if ended.si_pid == self._agent.pid:
                self._agent.ended()
            else:
                os.waitpid(ended.si_pid, 0)


def _setting(config: str, name: str) -> str:
    found = re.search(rf"^{name}: (\"[^\"]*\"|\S+)", config, re.M)
    return found[1].strip('"') if found else ""

