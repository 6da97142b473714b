"""Ports for a server that is started later, below those that Linux gives to outgoing connections: one that was merely free
a moment ago may be any client's by then."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 32000  # net.ipv4.ip_local_port_range starts at 32768
_random = random.SystemRandom()


def listen(*hosts: str) -> list[socket.socket]:
    """Listens on the same free port of each of `hosts`."""
    while True:
        port, servers = _random.randrange(_FIRST, _LAST), []
        try:
            for host in hosts:
                servers.append(socket.create_server((host, port)))
            return servers
        except OSError:
            for server in servers:
                server.close()


def free_ports(count: int) -> list[int]:
    """So many different ones of 127.0.0.1."""
    servers = [server for _ in range(count) for server in listen("127.0.0.1")]
    ports = [server.getsockname()[1] for server in servers]
    for server in servers:
        server.close()
    return ports
