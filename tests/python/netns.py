"""Hosts that share one network: a network namespace each, all on one bridge, and what happens to networks: packets that
one host does not hear from another any more, a link that is down, loss, a narrow link. Needs root."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pods

_CLONE_NEWNET = 0x40000000
_TRY = """
ip link add name port0 type veth peer name port1; ip link add name br0 type bridge; ip link set port0 master br0 up
iptables -w -A INPUT -s 10.0.0.1 -m statistic --mode random --probability 0.1 -j DROP
tc qdisc add dev port0 root tbf rate 8mbit burst 32kb latency 400ms
"""


def possible() -> str:
    """Empty, or why this machine cannot do it."""
    missing = [tool for tool in ("ip", "iptables", "tc", "nsenter", "unshare", "setpriv") if not shutil.which(tool)]
    if os.geteuid() != 0 or missing:
        return f"needs root and {', '.join(missing) or 'nothing else'}"
    tried = subprocess.run(["unshare", "--net", "sh", "-ec", _TRY], capture_output=True, text=True, timeout=30)
    return tried.stderr.strip()


def _enter(path: str) -> None:
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns", path)


class Host:
    """One namespace. What `call` runs, and every process that it starts, sees this host's network only."""

    def __init__(self, namespace: pods.Namespace, address: str, port: str, switch: pods.Namespace):
        self._namespace, self.address, self._port, self._switch = namespace, address, port, switch
        self.identity = os.readlink(f"/proc/{namespace.pid}/ns/net")  # the part of weightwire's that differs
        self._thread = ThreadPoolExecutor(1, initializer=_enter, initargs=(f"/proc/{namespace.pid}/ns/net",))

    def call(self, function, *args, **kwargs):
        return self._thread.submit(function, *args, **kwargs).result()

    def run(self, *command: str) -> str:
        return pods.run(*self._namespace.enter(*command))

    def page(self, http: str, path: str) -> tuple[int, str]:
        """What a daemon of this host answers on its own loopback."""
        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://{http}{path}", timeout=10) as reply:
                    return reply.status, reply.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()
        return self.call(ask)

    def deafen(self, other: "Host") -> None:
        """Nothing that `other` sends arrives here any more, and nobody is told."""
        self.run("iptables", "-w", "-A", "INPUT", "-s", other.address, "-j", "DROP")

    def lose(self, probability: float) -> None:
        """Of what arrives here, each packet is lost with this probability. What leaves comes in packets as a wire carries
        them, so that one of them is lost and not 64 KiB."""
        self.run("sh", "-ec", "ip link set eth0 gso_max_segs 1; iptables -w -A INPUT -i eth0 -m statistic --mode random "
                              f"--probability {probability} -j DROP")

    def lost(self) -> int:
        """Packets that `deafen` and `lose` have dropped here."""
        rules = self.run("iptables", "-w", "-nvxL", "INPUT").splitlines()
        return sum(int(rule.split()[0]) for rule in rules if " DROP " in rule)

    def unplug(self) -> None:
        self.run("ip", "link", "set", "eth0", "down")

    def narrow(self, bits_per_second: int) -> None:
        """What is sent to this host passes a link of that rate."""
        pods.run(*self._switch.enter("tc", "qdisc", "replace", "dev", self._port, "root", "tbf", "rate", str(bits_per_second),
                                     "burst", "64kb", "latency", "200ms"))

    def heal(self) -> None:
        self.run("sh", "-ec", "iptables -w -F INPUT; ip link set eth0 up gso_max_segs 65535")
        pods.run(*self._switch.enter("tc", "qdisc", "replace", "dev", self._port, "root", "pfifo_fast"))

    def close(self) -> None:
        self._thread.shutdown()
        self._namespace.close()


class Network:
    """A bridge in a namespace of its own, and hosts at 10.78.0.2 and up."""

    def __init__(self, hosts: int):
        self._switch = pods.Namespace("--net")
        pods.run(*self._switch.enter("sh", "-ec", "ip link set lo up; ip link add name br0 type bridge; ip link set br0 up"))
        # In the order of host identities, in which a chain has its engines.
        self.hosts = sorted((self._connect(number) for number in range(2, 2 + hosts)), key=lambda host: host.identity)

    def _connect(self, number: int) -> Host:
        namespace, port, address = pods.Namespace("--net"), f"port{number}", f"10.78.0.{number}"
        pods.run(*self._switch.enter("sh", "-ec", f"ip link add name {port} type veth peer name eth0 netns {namespace.pid};"
                                                  f"ip link set {port} master br0 up"))
        pods.run(*namespace.enter("sh", "-ec", f"ip link set lo up; ip addr add {address}/24 dev eth0;"
                                               "ip link set eth0 up"))
        return Host(namespace, address, port, self._switch)

    def heal(self) -> None:
        for host in self.hosts:
            host.heal()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self._switch.close()
