"""A job on hosts of its own, with certificates, that is struck again and again while versions are published: one coordinator,
two trainer ranks, three engines in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import sqlite3
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, NamedTuple

import certificates
from conftest import stand_still
from demo.fleet import Daemon
from soak_engine import EngineProcess
from spread_job import SpreadJob, every_cut

LEASE = 3.0
ROLES = {"coordinator": "coordinator", "trainer": "trainer", "engine-0": "engine", "engine-1": "engine", "engine-2": "engine"}
DEADLINE = 15.0  # of a version while something is broken
_COMMIT = 6  # kind of a journal's record (wire/journal.cc): its second byte, before epoch and version
WHOLE_AGAIN = 60.0  # seconds until the next version is served everywhere


class Strike(NamedTuple):
    name: str
    begin: Callable[[], None]
    end: Callable[[], None]
    seconds: float  # between the two
    stops: tuple[str, ...] = ()  # engines that it may stop: all others serve on


class SoakJob(SpreadJob):
    engine_names = tuple(name for name in ROLES if name.startswith("engine"))

    def __init__(self, directory, network, agents: dict | None = None, **options):
        self._authority = certificates.Authority(f"{directory}/ca")
        self._operator = self._authority.issue("person", "operator", job="soak")
        self.hosts = dict(zip(ROLES, network.hosts))
        self.renew_certificates()
        self.committed = 0
        self._commits: dict[int, int] = {}
        super().__init__(directory, network, agents, lease_ms=int(1000 * LEASE), **options)

    def renew_certificates(self) -> None:
        for party, role in ROLES.items():
            san = {"san": f"{certificates.SAN},IP:{self.hosts[party].address}"} if role == "coordinator" else {}
            self._authority.issue(party, role, job="soak", **san)

    def security(self, party: str) -> dict[str, str]:
        return {"job": "soak", "allow_plaintext": "[data]", **certificates.settings(self._authority.files(party))}

    def wwctl(self, *words: str) -> str:
        own = self._operator
        return super().wwctl(*words, "--tls-cert", own.cert, "--tls-key", own.key, "--tls-ca", own.ca)

    def start_engine(self, name: str, agent: str) -> EngineProcess:
        return EngineProcess(name, agent, self.directory)

    def daemons(self) -> dict[str, Daemon]:
        return {"coordinator": self.coordinator, **dict(zip(self.parties[1:], self.agents))}

    def account(self):
        status = super().account()
        assert status.committed_version >= self.committed, f"{self.committed} was committed, and now: {status}"
        self.committed = status.committed_version
        return status

    def commits(self) -> dict[int, int]:
        """The journal's, version by epoch: read from a copy, because the coordinator keeps its file locked. A copy that was
        made while SQLite wrote may lack some."""
        with tempfile.TemporaryDirectory() as copy:
            for file in sorted(pathlib.Path(self.directory, "coordinator").glob("journal.sqlite*")):
                if not file.name.endswith("-shm"):
                    shutil.copy(file, copy)
            with contextlib.closing(sqlite3.connect(f"{copy}/journal.sqlite")) as journal:
                records = [record for (record,) in journal.execute("SELECT record FROM journal")]
        # The journal keeps the newest records; what was there stays true.
        self._commits |= dict(struct.unpack_from("<QQ", record, 2) for record in records if record[1] == _COMMIT)
        return self._commits

    def flips_were_committed(self) -> bool:
        """A coordinator that was killed says nothing of the epochs before that: the journal does."""
        self.account()
        commits = self.commits()
        flips = [flip for engine in self.engines for flip in engine.contents.items()]
        assert all(commits.get(epoch, version) == version for epoch, version in flips), f"{flips} of {commits}"
        return all(epoch in commits for epoch, _ in flips)

    # What can happen to it. `spared` daemons are not killed.

    def draw(self, spared: set[str]) -> list[Strike]:
        """What happens next: one strike; now and then one to the network and one to a process at once."""
        processes = [self._kill_daemon(name) for name in self.daemons() if name not in spared]
        processes += [self._stop(name) for name in self.daemons()]
        processes += [self._kill_engine(engine) for engine in self.engines]
        networks = [self._cut(), self._cut(), self._lose()]
        kind = self.random.random()
        if kind < 0.15:
            return [self.random.choice(processes), self.random.choice(networks)]
        if kind < 0.2:
            return [Strike("new certificates", self.renew_certificates, lambda: None, 0)]
        return [self.random.choice(processes if kind < 0.7 else networks)]

    def _kill_daemon(self, name: str) -> Strike:
        def start() -> None:
            if name == "coordinator":
                self.coordinator = self.start_coordinator(self.address)
            else:
                self.agents[self.parties.index(name) - 1] = self.start_agent_of(name)
        return Strike(f"kill {name}", lambda: self.daemons()[name].kill(), start, self.random.choice([0, 0, 2 * LEASE]), (name,))

    def _kill_engine(self, engine: EngineProcess) -> Strike:
        return Strike(f"kill {engine.name}'s process", engine.process.kill, engine.start_again, self.random.uniform(0, LEASE),
                      (engine.name,))

    def _stop(self, name: str) -> Strike:
        return Strike(f"stop {name}", lambda: stand_still(self.daemons()[name].pid),
                      lambda: os.kill(self.daemons()[name].pid, signal.SIGCONT), self.random.uniform(0, 2 * LEASE))

    def _cut(self) -> Strike:
        cut = self.random.choice(every_cut(self.parties))
        return Strike(f"cut {cut}", lambda: cut.make(self), self.network.heal, self.random.uniform(0, 2.5 * LEASE))

    def _lose(self) -> Strike:
        probability = self.random.choice([0.01, 0.05])

        def begin() -> None:
            for host in self.network.hosts:
                host.lose(probability)
        return Strike(f"lose {probability:.0%}", begin, self.network.heal, self.random.uniform(1, 2 * LEASE))

    def suffer(self, strikes: list[Strike]) -> dict[str, int]:
        """Publishes one version after another while that happens, and until one is served everywhere after it: how many
        of them went through, and how many not."""
        counts = {"released": 0, "given up": 0}
        waits = [self.random.uniform(0, self.usual_seconds) for _ in strikes]

        def happen(strike: Strike, wait: float) -> None:
            time.sleep(wait)  # the moment at which it strikes
            strike.begin()
            try:
                time.sleep(strike.seconds)
            finally:
                strike.end()

        with ThreadPoolExecutor(len(strikes)) as pool:
            happening = [pool.submit(happen, strike, wait) for strike, wait in zip(strikes, waits)]
            over = False
            while not over:
                over = all(one.done() for one in happening)
                released = self.try_next(DEADLINE) == "released"
                counts["released" if released else "given up"] += 1
                if not released:
                    time.sleep(0.2)  # a publisher without its agent is refused at once
            for one in happening:
                one.result(0)
        if released:  # the publishers outlived it
            self.serve_everywhere()
            self.until("every flip is of a committed epoch", self.flips_were_committed, 20)
        else:
            before = self.version
            self.serve_next(WHOLE_AGAIN)
            counts["released"] += 1
            counts["given up"] += self.version - before - 1
        stopped = {name for strike in strikes for name in strike.stops}
        self.excuse([engine for engine in self.engines if engine.name in stopped])
        self.compare_what_is_served()
        return counts


def describe(strikes: list[Strike]) -> str:
    return " and ".join(f"{strike.name} for {strike.seconds:.1f} s" for strike in strikes)
