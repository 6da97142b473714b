"""An engine of the soak in a process of its own, so that it can be killed: `soak_engine.py SOCKET NAME AGENT`. Every version
that it takes is a line of its output, which outlives it."""

from __future__ import annotations

import json
import pathlib
import sys
import time

from coordinator_job import CONFIG, Follower, content
from demo import oracle
from demo.processes import Process, serve


class Recording(Follower):
    def took(self, epoch: int, version: int, wrong: list[str]) -> None:
        super().took(epoch, version, wrong)
        print(json.dumps([epoch, version, wrong]), flush=True)


def main(path: str, name: str, agent: str) -> None:
    engine = Recording(name, agent, lambda version: oracle.vllm(CONFIG, content(version), 1, 0))
    serve(path, {"version": lambda: engine.version, "compare": engine.compare, "gaps": lambda: engine.gaps})
    engine.close()


class EngineProcess:
    """That process as its driver sees it, in place of a Follower."""

    def __init__(self, name: str, agent: str, directory: str):
        self.name = name
        self._gaps, self._gaps_before = 0, 0  # of this life, as last told; of those before
        self._log = pathlib.Path(directory, f"{name}.flips")
        self._read = 0
        self._contents: dict[int, int] = {}
        self._wrong: list[str] = []
        self._output = open(self._log, "a")
        self.process = Process(f"{directory}/{name}.ask", name, agent, log=self._output, program=(__file__,))
        self.process.wait_ready()

    def start_again(self, seconds: float = 60) -> None:
        """As who supervises it would: as often as it ends because its agent or the coordinator is away."""
        end = time.monotonic() + seconds
        self._gaps, self._gaps_before = 0, self._gaps_before + self._gaps
        while True:
            self.process.restart()
            try:
                return self.process.wait_ready()
            except RuntimeError:
                assert time.monotonic() < end, f"{self.name} does not start: {self._log.read_text()[-2000:]}"
                time.sleep(0.2)

    @property
    def version(self) -> int | None:
        try:
            return self.process.ask("version", timeout=20)
        except (OSError, EOFError):  # it is dead now
            return None

    @property
    def gaps(self) -> int:
        """As a Follower's, of all its lives."""
        try:
            self._gaps = self.process.ask("gaps", timeout=20)
        except (OSError, EOFError):  # it is dead now: what it said last
            pass
        return self._gaps_before + self._gaps

    def compare(self) -> list[str]:
        return self.process.ask("compare", timeout=60)

    def _take_in(self) -> None:
        """The versions that it took since; lines of another kind say what it died of."""
        with open(self._log) as output:
            output.seek(self._read)
            text = output.read()
        whole = text[:text.rfind("\n") + 1]
        self._read += len(whole.encode())
        for line in whole.splitlines():
            if line.startswith("["):
                epoch, version, wrong = json.loads(line)
                self._contents[epoch] = version
                self._wrong += wrong

    @property
    def contents(self) -> dict[int, int]:
        self._take_in()
        return self._contents

    @property
    def wrong(self) -> list[str]:
        self._take_in()
        return self._wrong

    def close(self) -> None:
        self.process.stop()
        self._output.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
