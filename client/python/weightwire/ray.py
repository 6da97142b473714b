"""Ray: the service of a job as actors, by one call.

>>> service = weightwire.ray.start()                       # after ray.init: a coordinator, and an agent on every node
>>> trainer = Trainer.options(runtime_env=service.runtime_env()).remote()
>>> # in these actors Publisher, Subscriber and Client find it without configuration
>>> service.stop()

Nothing else has to be installed on the nodes: the package brings `weightwired` (docs/install.md).
"""

from __future__ import annotations

import contextlib
import getpass
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from weightwire.errors import RefusedError
from weightwire.local_daemon import Settings, running

_READY_SECONDS = 60.0


class _Daemon:
    """One `weightwired` on this actor's node; it ends with the actor, however that ends."""

    def __init__(self, settings: Settings, directory: str):
        for folder in (Path(directory).parent, Path(directory)):  # of one's own, as its sockets want it; /tmp is there
            folder.mkdir(mode=0o700, exist_ok=True)
        self._stack, self._directory = contextlib.ExitStack(), directory
        host = ray.util.get_node_ip_address()
        own = {key: value.replace("{host}", host) if isinstance(value, str) else value for key, value in settings.items()}
        before = Path(directory, "listens")  # where it listened before the actor was restarted: there agents look for it
        if "listen" in own and before.exists():
            own["listen"] = before.read_text()
        try:
            self._said = self._stack.enter_context(running(own, directory, _READY_SECONDS))
        except BaseException:
            self._clear()
            raise
        before.write_text(self._said.get("grpc", ""))

    def said(self) -> Dict[str, str]:
        return self._said

    def stop(self) -> None:
        self._stack.close()
        self._clear()

    def _clear(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)
        with contextlib.suppress(OSError):  # another one's is in it
            Path(self._directory).parent.rmdir()


@dataclass
class Service:
    """A coordinator and an agent on each of its nodes, as actors."""

    address: str  #: of the coordinator, HOST:PORT
    agent_socket: str  #: the same path on every node
    nodes: List[str]  #: Ray's ids of the nodes that have an agent
    _actors: List[Any]

    def env(self) -> Dict[str, str]:
        """The variables by which processes on these nodes find it."""
        return {"WEIGHTWIRE_ADDRESS": self.address, "WEIGHTWIRE_AGENT_SOCKET": self.agent_socket}

    def runtime_env(self, **more: Any) -> Dict[str, Any]:
        """A runtime_env for actors and tasks, with `more` in it; `env_vars` of both are joined."""
        return {**more, "env_vars": {**more.get("env_vars", {}), **self.env()}}

    def stop(self) -> None:
        """Agents first: they say goodbye."""
        for actor in reversed(self._actors):
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=30)
            ray.kill(actor)
        self._actors.clear()


def start(*, job: str = "default", nodes: Optional[Sequence[str]] = None, insecure: bool = False,
          settings: Optional[Settings] = None, coordinator_settings: Optional[Settings] = None) -> Service:
    """Starts a coordinator on the first node and an agent on every node; returns when all are ready.

    job                   name of the job; one service of a name and user per node
    nodes                 Ray's node ids (`ray.nodes()`); None: all that are alive
    insecure              with several nodes and without certificates: gRPC and weights cross the network in plaintext, and
                          whoever reaches the ports may read, replace or stop what is moved
    settings              of every agent, by the names of weightwired's file: tls_cert, tls_key, tls_ca, slot_bytes …
    coordinator_settings  of the coordinator: tls_cert …; state_dir, where its journal is to outlive the node [in /tmp of its node]

    An actor that dies is started again on its node; the coordinator listens where it did and knows its commits.

    RefusedError: several nodes, neither certificates nor `insecure`, or no such node. RayError: what `weightwired` says where it does
    not start.
    """
    alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    wanted = list(nodes or alive)
    if unknown := [node for node in wanted if node not in alive]:
        raise RefusedError(f"{unknown[0]} is no node of this Ray cluster that is alive", code="NOT_FOUND", reason="invalid_request",
                           remedy="ray.nodes() lists them")
    agent, coordinator = dict(settings or {}), dict(coordinator_settings or {})
    alone = len(wanted) == 1
    if not (alone or insecure or ("tls_cert" in agent and "tls_cert" in coordinator)):
        raise RefusedError(f"{len(wanted)} nodes without certificates: gRPC and weights would cross the network in plaintext",
                           code="FAILED_PRECONDITION", reason="insecure_listener",
                           remedy="give tls_cert, tls_key and tls_ca in settings and coordinator_settings, or insecure=True in a network that "
                                  "you trust")
    host = "127.0.0.1" if alone else "{host}"
    directory = f"/tmp/weightwire-ray-{getpass.getuser()}-{job}"
    common: Settings = {"job": job, "http": f"{host}:0", **({"insecure": True} if insecure and not alone else {})}
    actors: List[Any] = []
    service = Service("", f"{directory}/agent/agent.sock", wanted, actors)
    try:
        place = f"{directory}/coordinator-{secrets.token_hex(4)}"
        actors.append(_actor(wanted[0], {**common, "role": "coordinator", "name": "coordinator", "listen": f"{host}:0",
                                         "state_dir": f"{place}/state", **coordinator}, place))
        service.address = ray.get(actors[0].said.remote())["grpc"]
        for node in wanted:
            actors.append(_actor(node, {**common, "role": "agent", "name": f"agent-{node[:8]}", "coordinator": service.address,
                                        "agent_socket": service.agent_socket, "data_listen": f"{host}:0", **agent}, f"{directory}/agent"))
        ray.get([actor.said.remote() for actor in actors[1:]])
    except BaseException:
        service.stop()
        raise
    return service


def _actor(node: str, settings: Settings, directory: str) -> Any:
    where = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    # A call that meets an actor between two lives is made again.
    kind = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=where)(_Daemon)
    return kind.remote(settings, directory)
