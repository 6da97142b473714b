"""A coordinator that lives, or comes back, is cut from its agents: no engine stops serving, with nothing published afterwards.

Real processes on hosts of their own (network namespaces, iptables; needs root): a coordinator, a trainer with its agent, three
engines with an agent and a process each, which serve version 1. A row cuts and heals. Then, for every engine, from its first
flip on: seconds without service == 0, no fence, no wrong byte; 25 s after healing it serves version 1 (`quiet`), or comes to
serve the one that is published as soon as the network is whole (`published`; a trainer that was fenced attaches anew, which is
printed). What was cut is counted: a row in which no connection was reset, or no packet dropped, fails.

Rows have jobs of their own and mostly wait: `WEIGHTWIRE_CUT_JOBS` (default 3) run at once. `WEIGHTWIRE_REPEATS=n` repeats every
row. `ctest -L cut`, or `./dev test cut`."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/python"), str(ROOT / "tests/cut")]

import engine as engine_process  # noqa: E402
import netns  # noqa: E402
from conftest import BINARIES, stand_still  # noqa: E402
from demo.fleet import Daemon  # noqa: E402
from demo.processes import Process  # noqa: E402
from weightwire import Publisher  # noqa: E402
from weightwire.errors import WeightwireError  # noqa: E402

ENGINES = ("engine-0", "engine-1", "engine-2")
AGENTS = ("trainer", *ENGINES)
PORT = 7411
AFTER_HEALING = 25.0  # seconds that a row goes on looking
AFTER_PUBLISHING = 3.0  # the same, once the next version is served everywhere
ARRIVES = 60.0  # seconds after healing until the next version is served everywhere
REPEATS = int(os.environ.get("WEIGHTWIRE_REPEATS", "1"))
JOBS = int(os.environ.get("WEIGHTWIRE_CUT_JOBS", "3"))


class Clock:
    """The wall clock of the daemons that are started with `environment`: of clock.c, which says what it can."""

    _SHARED = struct.Struct("qQQ")  # by how much it is off (ns); reads, and waits for an instant of it, since then

    def __init__(self, directory: pathlib.Path):
        self._file, library = directory / "clock", directory / "clock.so"
        source = pathlib.Path(__file__).with_name("clock.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.jump(0)
        self.environment = {**os.environ, "LD_PRELOAD": str(library), "WEIGHTWIRE_TEST_CLOCK": str(self._file)}

    def jump(self, seconds: float) -> None:
        with open(self._file, "r+b" if self._file.exists() else "wb") as file:
            file.write(self._SHARED.pack(round(seconds * 1e9), 0, 0))

    def seen(self) -> tuple[int, int]:
        return self._SHARED.unpack(self._file.read_bytes())[1:]


class Job:
    """The whole of it, with version 1 served by all. `jumping`: whose clock may jump: the coordinator's or the agents'."""

    def __init__(self, directory: pathlib.Path, network: netns.Network, closing: contextlib.ExitStack, jumping: str | None = None):
        self.directory, self.network, self._closing = directory, network, closing
        self.clock = Clock(directory) if jumping else None
        self._jumping = jumping
        self.hosts = dict(zip(("coordinator", *AGENTS), network.hosts))
        self.said: list[str] = []  # for the row's test to print
        self._log = closing.enter_context(open(directory / "engines.log", "w"))
        self.coordinator = self._start_coordinator()
        closing.callback(lambda: self.coordinator.kill())
        self.agents = {name: self._start_agent(name) for name in AGENTS}
        self.engines = {}
        for name in ENGINES:
            self.engines[name] = Process(str(directory / f"{name}.ask"), name, self.agents[name].agent_socket, log=self._log,
                                         program=(engine_process.__file__,))
            closing.callback(self.engines[name].stop)
        for process in self.engines.values():
            process.wait_ready()
        self.attached = 0
        self.publisher: Publisher | None = None
        closing.callback(lambda: self.publisher and self.publisher.close())
        self.publish(1, time.monotonic() + ARRIVES)
        self.await_version(1, ARRIVES)

    def _start_coordinator(self) -> Daemon:
        host = self.hosts["coordinator"]
        return host.call(Daemon, str(BINARIES / "weightwired"), str(self.directory / "coordinator"), "coordinator",
                         role="coordinator", listen=f"0.0.0.0:{PORT}", state_dir=str(self.directory / "coordinator"),
                         insecure="true", env=self._environment("coordinator"))

    def _environment(self, daemons: str) -> dict[str, str] | None:
        return self.clock.environment if daemons == self._jumping else None

    def _start_agent(self, name: str) -> Daemon:
        host = self.hosts[name]
        agent = host.call(Daemon, str(BINARIES / "weightwired"), str(self.directory / name), name, role="agent",
                          coordinator=f"{self.hosts['coordinator'].address}:{PORT}", data_listen=f"{host.address}:0",
                          transports="[tcp]", insecure="true", env=self._environment("agents"))
        self._closing.callback(agent.kill)
        return agent

    def publish(self, version: int, end: float) -> None:
        """The trainer's loop: until `version` is released."""
        while True:
            try:
                if self.publisher is None or not self.publisher.attached:
                    if self.publisher is not None:
                        self.publisher.close()
                    self.publisher = None
                    self.publisher = Publisher(rank=0, world_size=1, agent=self.agents["trainer"].agent_socket, timeout=10)
                    self.arrays = self.publisher.bind_boxes(engine_process.layout())
                    self.attached += 1
                self.arrays[engine_process.TENSOR.name][...] = engine_process.content(version)
                self.publisher.publish(version, deadline=ARRIVES).wait_released(ARRIVES)
                return
            except WeightwireError as error:
                self.said.append(f"the trainer: {error}")
                if error.reason == "stale_version":  # it was committed before the trainer lost its session
                    return
                assert time.monotonic() < end, f"version {version} cannot be published: {error}\n{self.status()}"
                time.sleep(0.2)

    def reports(self) -> dict[str, dict]:
        return {name: process.ask("report", timeout=30) for name, process in self.engines.items()}

    def await_version(self, version: int, seconds: float) -> float:
        started = time.monotonic()
        while True:
            reports = self.reports()
            if all(report["version"] == version for report in reports.values()):
                return time.monotonic() - started
            assert time.monotonic() < started + seconds, (
                f"version {version} is not served by all within {seconds} s: {shown(reports)}\n{self.status()}")
            time.sleep(0.05)

    def status(self) -> str:
        """For a failure's text: what the coordinator says."""
        try:
            return self.hosts["coordinator"].run(str(BINARIES / "wwctl"), "status", "--address", f"127.0.0.1:{PORT}")
        except (AssertionError, OSError) as error:
            return f"no status: {error}"

    # What is done to it.

    def connections(self) -> set[tuple[str, str]]:
        """Agents' connections to the coordinator, as its host has them: (address, port) of the other end."""
        return self._sockets("coordinator", "sport", 3)

    def connections_of_agents(self) -> set[tuple[str, str]]:
        """The same, as the agents' hosts have them."""
        return set().union(*(self._sockets(name, "dport", 2) for name in AGENTS))

    def _sockets(self, host: str, port: str, column: int) -> set[tuple[str, str]]:
        lines = self.hosts[host].run("ss", "-tnH", "state", "established", port, "=", f":{PORT}").splitlines()
        ends = [line.split()[column].removeprefix("[::ffff:").replace("]", "") for line in lines]
        return {tuple(end.rsplit(":", 1)) for end in ends}

    def reset(self) -> dict[str, int]:
        """A TCP reset of every agent's connection: how many each agent lost. They are gone at both ends."""
        before = self.connections()
        self.hosts["coordinator"].run("ss", "-K", "-tnH", "state", "established", "sport", "=", f":{PORT}")
        end = time.monotonic() + 10
        while left := before & (self.connections() | self.connections_of_agents()):
            assert time.monotonic() < end, f"not reset: {left} (does this kernel have INET_DIAG_DESTROY?)"
        return {name: sum(address == self.hosts[name].address for address, _ in before) for name in AGENTS}

    def refuse(self) -> None:
        """New connections; those that there are stay."""
        self.hosts["coordinator"].run("iptables", "-w", "-A", "INPUT", "-p", "tcp", "--syn", "--dport", str(PORT), "-j", "REJECT",
                                      "--reject-with", "tcp-reset")

    def counted(self, host: str) -> dict[str, int]:
        """Packets that this host's rules took: by the party that they came from; refused ones under `refused`."""
        rules = self.hosts[host].run("iptables", "-w", "-nvxL", "INPUT").splitlines()
        names = {party.address: name for name, party in self.hosts.items()}
        counts = {}
        for rule in rules:
            if found := re.match(r"\s*(\d+)\s+\d+\s+(DROP|REJECT)\s+\S+\s+\S+\s+\S+\s+\S+\s+(\S+)", rule):
                counts["refused" if found[2] == "REJECT" else names[found[3]]] = int(found[1])
        return counts

    def drop(self, seconds: float, agents: tuple[str, ...] = AGENTS, to_coordinator: bool = True, from_coordinator: bool = True) -> None:
        """Packets between the coordinator and these agents vanish, in one direction or in both; all of them did."""
        coordinator = self.hosts["coordinator"]
        for name in agents:
            if to_coordinator:
                coordinator.deafen(self.hosts[name])
            if from_coordinator:
                self.hosts[name].deafen(coordinator)
        time.sleep(seconds)
        for name in agents:
            dropped = self.counted("coordinator" if to_coordinator else name).get(name if to_coordinator else "coordinator", 0)
            assert dropped > 0, f"nothing was dropped between {name} and the coordinator"
            self.said.append(f"{name}: {dropped} packets dropped")
        self.network.heal()


def reset_and_refused(job: Job, seconds: float) -> None:
    job.refuse()
    lost = job.reset()
    assert all(lost.values()), f"an agent had no connection that could be reset: {lost}"
    time.sleep(seconds)
    refused = job.counted("coordinator")["refused"]
    assert refused > 0, "nobody was refused"
    assert not job.connections(), "somebody is connected though all are refused"
    job.said.append(f"connections reset: {lost}; {refused} packets refused")
    job.network.heal()


def reset_every_second(job: Job, seconds: int) -> None:
    total = dict.fromkeys(AGENTS, 0)
    started = time.monotonic()
    for tick in range(seconds):
        for name, lost in job.reset().items():
            total[name] += lost
        time.sleep(max(0.0, started + tick + 1 - time.monotonic()))
    assert min(total.values()) >= 2, f"an agent did not come back to be reset again: {total}"
    job.said.append(f"connections reset: {total}")


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z, …; proc(5)."""
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def stopped(job: Job, seconds: float) -> None:
    stand_still(job.coordinator.pid)
    try:
        time.sleep(seconds)
        assert state_of(job.coordinator.pid) == "T", "the coordinator was not stopped"
    finally:
        os.kill(job.coordinator.pid, signal.SIGCONT)


def killed(job: Job, seconds: float) -> None:
    job.coordinator.kill()
    time.sleep(seconds)
    job.coordinator = job._start_coordinator()


def clock_jumps(job: Job, days: int) -> None:
    """And stays there. It costs nobody his lease or his connection."""
    connections = job.connections()
    job.clock.jump(days * 86_400)
    time.sleep(7)
    reads, waits = job.clock.seen()
    assert reads > 0, "nobody looked at the clock that jumped"
    assert job.connections() == connections, f"connections changed: {connections}, now {job.connections()}"
    for role in ("trainer", "engine"):
        expired = job.hosts["coordinator"].call(job.coordinator.counter, f'weightwire_lease_expiries_total{{role="{role}"}}')
        assert expired == 0, f"{expired:.0f} leases of the role {role} ended"
    job.said.append(f"the clock jumped by {days} days: read {reads} times, {waits} waits for an instant of it")


ROWS = {  # the longest first
    "reset_every_second_60s": lambda job: reset_every_second(job, 60),
    "reset_and_refused_3s": lambda job: reset_and_refused(job, 3),
    "dropped_4s": lambda job: job.drop(4),
    "dropped_7s": lambda job: job.drop(7),
    "dropped_20s": lambda job: job.drop(20),
    "stopped_7s": lambda job: stopped(job, 7),
    "stopped_20s": lambda job: stopped(job, 20),
    "one_agent_dropped_7s": lambda job: job.drop(7, agents=("engine-0",)),
    "all_but_the_trainer_dropped_7s": lambda job: job.drop(7, agents=ENGINES),
    "coordinator_to_agents_dropped_7s": lambda job: job.drop(7, to_coordinator=False),
    "agents_to_coordinator_dropped_7s": lambda job: job.drop(7, from_coordinator=False),
    "killed_7s": lambda job: killed(job, 7),
    "clock_forward_400_days": lambda job: clock_jumps(job, 400),
    "clock_back_400_days": lambda job: clock_jumps(job, -400),
    "agents_clocks_forward_400_days": lambda job: clock_jumps(job, 400),
    "agents_clocks_back_400_days": lambda job: clock_jumps(job, -400),
}
JUMPING = {"clock_forward_400_days": "coordinator", "clock_back_400_days": "coordinator",
           "agents_clocks_forward_400_days": "agents", "agents_clocks_back_400_days": "agents"}


def shown(reports: dict[str, dict]) -> str:
    return "\n".join(f"{name}: seconds without service: {report['without_service']:.3f} (longest {report['longest_gap']:.3f}; "
                     f"{report['samples']} samples, at most {report['blind']:.3f} s apart; serves version {report['version']}; "
                     f"fences: {report['fences'] or 'none'})" for name, report in reports.items())


def run_row(row: str, published: bool, directory: pathlib.Path) -> str:
    """Raises what is wrong; returns what is to be printed."""
    with contextlib.ExitStack() as closing:
        network = netns.Network(1 + len(AGENTS))
        closing.callback(network.close)
        job = Job(directory, network, closing, JUMPING.get(row))
        before, pid = job.reports(), job.coordinator.pid
        ROWS[row](job)
        healed = time.monotonic()
        version = 1
        if published:
            version = 2
            job.publish(version, healed + ARRIVES)
            job.await_version(version, max(1.0, healed + ARRIVES - time.monotonic()))
            job.said.append(f"version 2 is served by all {time.monotonic() - healed:.1f} s after healing; the trainer attached "
                            f"{job.attached - 1} times anew")
            time.sleep(AFTER_PUBLISHING)
        else:
            time.sleep(AFTER_HEALING)
        reports = job.reports()
        text = "\n".join([*job.said, shown(reports)])
        explained = f"{text}\n{job.status()}"
        assert row.startswith("killed") or job.coordinator.pid == pid and state_of(pid) != "Z", "the coordinator was to live"
    for name, report in reports.items():
        looked = report["samples"] - before[name]["samples"]
        assert looked > 50, f"{name} looked at what it serves {looked} times only\n{explained}"
        assert not report["wrong"], f"{name}: {report['wrong']}\n{explained}"
        assert report["without_service"] == 0, f"{name} was without service for {report['without_service']:.3f} s\n{explained}"
        assert not report["fences"], f"{name} was fenced\n{explained}"
        assert report["version"] == version, f"{name} does not serve version {version}\n{explained}"
        assert report["flipped"] == sorted(report["flipped"]), f"{name} went back: {report['flipped']}\n{explained}"
    return text


CASES = [(row, case, number) for row in ROWS for case in ("quiet", "published") for number in range(REPEATS)]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """What became of every row that is to be tested: each begins as soon as one before it has ended."""
    chosen = [item.callspec.params["case"] for item in request.session.items if item.fspath == request.fspath]
    pool = ThreadPoolExecutor(JOBS)
    try:
        yield {case: pool.submit(run_row, case[0], case[1] == "published", tmp_path_factory.mktemp("-".join(map(str, case))))
               for case in chosen}
    finally:
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}" + (f"-{case[2] + 1}" if REPEATS > 1 else ""))
def test_no_engine_stops(results, case):
    why_not = netns.possible()
    assert not why_not, f"no networks of our own here: {why_not}"
    print(results[case].result())
