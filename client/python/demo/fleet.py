"""Starts and stops a whole fleet on this machine: daemons, trainer ranks, engines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from demo.processes import Process
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc

_READY = re.compile(r"^weightwired ready .*$", re.M)


class Daemon:
    """One `weightwired`, configured by a YAML file in `directory`."""

    def __init__(self, binary: str, directory: str, name: str, *, env: dict | None = None, wait: bool = True,
                 own_host: bool = False, **config):
        """`wait`: returns when it is ready; else `await_ready` does. `own_host`: an IPC namespace of its own, by which the
        coordinator takes it for another host; needs root."""
        os.makedirs(directory, mode=0o700, exist_ok=True)
        self.name = name
        self.agent_socket = f"{directory}/agent.sock"
        self._log_path = f"{directory}/{name}.log"
        config = {"name": name, "agent_socket": self.agent_socket, "data_listen": "127.0.0.1:0",
                  "http": "127.0.0.1:0", **config}
        path = f"{directory}/{name}.yaml"
        with open(path, "w") as out:
            for key, value in config.items():
                out.write(f"{key}: {value}\n")
        self._log = open(self._log_path, "a")  # of all its lives
        command = [*(("unshare", "--ipc") if own_host else ()), binary, "--config", path]
        self._popen = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env)
        self.pid = self._popen.pid
        if wait:
            self.await_ready()

    def await_ready(self) -> None:
        line = self._popen.stdout.readline()
        if not _READY.match(line):
            self._popen.wait(10)
            raise RuntimeError(f"{self.name} did not start (exit {self._popen.returncode}):\n{open(self._log_path).read()}")
        said = dict(word.split("=", 1) for word in line.split() if "=" in word)
        self.grpc, self.http = said.get("grpc", ""), said.get("http", "")

    def kill(self) -> None:
        self._popen.kill()
        self._popen.wait(60)  # a busy machine takes its time to clear it away
        self._log.close()

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended by itself; -N: by signal N."""
        try:
            return self._popen.wait(timeout)
        finally:
            self._log.close()

    def metrics(self) -> str:
        """What /metrics says."""
        return urllib.request.urlopen(f"http://{self.http}/metrics", timeout=10).read().decode()

    def status(self) -> str:
        """What /status says."""
        return urllib.request.urlopen(f"http://{self.http}/status", timeout=10).read().decode()

    def counter(self, line: str) -> float:
        """The value behind `line` (a family and its labels) on /metrics; 0 for labels that were not seen yet. LookupError when
        there is no such family, or none without labels."""
        metrics, family = self.metrics(), line.split("{")[0]
        if found := re.search(f"^{re.escape(line)} (.*)$", metrics, re.M):
            return float(found[1])
        if line == family or f"\n# TYPE {family} " not in metrics:
            raise LookupError(f"no {line} on the metrics of {self.name}")
        return 0.0

    def stop(self) -> int:
        self._popen.send_signal(signal.SIGTERM)
        try:
            return self._popen.wait(10)
        finally:
            self._popen.kill()
            self._log.close()


@dataclass
class Engine:
    name: str
    tp: int
    via: str  # the transport by which its agent reads: "shm", "tcp" or "ucx"
    options: dict = field(default_factory=dict)  # for its agent, over the fleet's
    ranks: list[Process] = field(default_factory=list)
    agent: Daemon | None = None  # its own, where it does not read by shm


@dataclass
class Fleet:
    """Layout of the trainer and of the engines to start."""

    config: dict
    binary: str
    tp: int = 2
    pp: int = 2
    engines: list[Engine] = field(default_factory=list)
    options: dict = field(default_factory=dict)  # for the coordinating daemon
    agent_options: dict = field(default_factory=dict)  # for the agents of those that do not share the hub's memory
    own_hosts: bool = False  # Daemon's own_host, for these agents
    trainer_via: str = "shm"  # another transport: the trainer has an agent of its own, too

    def __enter__(self) -> "Fleet":
        self.directory = tempfile.mkdtemp(prefix="weightwire-")
        self.trainers: list[Process] = []
        self.daemons: list[Daemon] = []
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        import json
        with open(f"{self.directory}/config.json", "w") as out:
            json.dump(self.config, out)
        self.hub = Daemon(self.binary, f"{self.directory}/hub", "hub", role="all", listen="127.0.0.1:0", **self.options)
        self.daemons.append(self.hub)
        self.channel = grpc.insecure_channel(self.hub.grpc)
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self._log = open(f"{self.directory}/processes.log", "w")
        self.trainer_agent = self.hub if self.trainer_via == "shm" else self.start_trainer_agent()
        for rank in range(self.tp * self.pp):
            self.trainers.append(Process(f"{self.directory}/trainer-{rank}.sock", "trainer", self.trainer_agent.agent_socket,
                                         self.directory, str(self.tp), str(self.pp), str(rank), log=self._log))
        for engine in self.engines:
            self.start_engine(engine)
        for process in self.trainers + [rank for engine in self.engines for rank in engine.ranks]:
            process.wait_ready()

    def start_engine(self, engine: Engine) -> None:
        """Its agent and its processes, which are ready a while later."""
        agent = self.start_agent(engine) if engine.via != "shm" else self.hub
        paths = [f"{self.directory}/{engine.name}-{rank}.sock" for rank in range(engine.tp)]
        engine.ranks = [Process(path, "engine", agent.agent_socket, self.directory, engine.name, str(engine.tp),
                                str(rank), *(paths[1:] if rank == 0 else []), log=self._log)
                        for rank, path in enumerate(paths)]

    def start_agent(self, engine: Engine) -> Daemon:
        """The agent of an engine that does not share the hub's memory, first or again."""
        engine.agent = self._start_agent(engine.name, engine.via, engine.options)
        return engine.agent

    def start_trainer_agent(self) -> Daemon:
        """The trainer's own agent, first or again."""
        self.trainer_agent = self._start_agent("trainer", self.trainer_via)
        return self.trainer_agent

    def _start_agent(self, name: str, via: str, options: dict | None = None) -> Daemon:
        agent = Daemon(self.binary, f"{self.directory}/{name}", name, role="agent", coordinator=self.hub.grpc,
                       transports=f"[{via}]", own_host=self.own_hosts, **{**self.agent_options, **(options or {})})
        self.daemons.append(agent)
        return agent

    def kill_agent(self, of: Engine | None = None) -> None:
        """Of an engine, or the trainer's own."""
        agent = of.agent if of else self.trainer_agent
        agent.kill()
        self.daemons.remove(agent)

    def __exit__(self, *error) -> None:
        processes = self.trainers + [rank for engine in self.engines for rank in engine.ranks]
        with ThreadPoolExecutor(max(1, len(processes))) as pool:
            list(pool.map(Process.stop, processes))
        codes = [daemon.stop() for daemon in reversed(self.daemons)]
        if error and error[0] is not None:
            print(f"logs are kept in {self.directory}")
        elif any(codes):
            raise RuntimeError(f"a daemon ended with {codes}; logs are kept in {self.directory}")
        else:
            shutil.rmtree(self.directory, ignore_errors=True)

    def each(self, processes: list[Process], *request, timeout: float = 120) -> list:
        """Asks all of them at once; the answers in order."""
        with ThreadPoolExecutor(len(processes)) as pool:
            return list(pool.map(lambda process: process.ask(*request, timeout=timeout), processes))

    def engine_ranks(self, engines: list[Engine] | None = None) -> list[Process]:
        return [rank for engine in (engines or self.engines) for rank in engine.ranks]

    def publish(self, version: int, mode: str = "hold") -> tuple[int, float]:
        """All trainer ranks publish what they hold; (epoch, seconds until all were released)."""
        answers = self.each(self.trainers, "publish", version, mode)
        return answers[0][0], max(seconds for _, seconds in answers)

    def status(self) -> pb.StatusResponse:
        return self.stub.Status(pb.StatusRequest(), timeout=10)

    def wait(self, what: str, condition, timeout: float = 60):
        """Follows the coordinator's status until condition(status) is true; returns the status."""
        try:
            for status in self.stub.Watch(pb.WatchRequest(min_interval_ms=1), timeout=timeout):
                if condition(status):
                    return status
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
        raise TimeoutError(f"{what}: not within {timeout} s; waiting for: {self.status().waiting_for or 'nothing'}")

    def wait_serving(self, version: int, engines: list[Engine] | None = None, timeout: float = 60):
        names = {engine.name for engine in (engines or self.engines)}
        return self.wait(f"engines serving version {version}", lambda s: names <= {
            e.name for e in s.engines if e.version == version and e.state == pb.ENGINE_STATE_SERVING}, timeout)
