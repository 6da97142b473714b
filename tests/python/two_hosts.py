"""Two hosts (network namespaces that share nothing but a network) with an agent each; the first has the coordinator, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import netns

from demo.fleet import Daemon

COORDINATOR, MASTER = 7411, 7412  # of weightwire; of an engine's own ranks


class TwoHosts:
    def __init__(self, folder: Path, binary: Path):
        self._folder, self.first_only = folder, folder / "first"  # files of the first host alone
        with contextlib.ExitStack() as opened:
            self.network = opened.enter_context(contextlib.closing(netns.Network(2)))
            self.first, self.second = self.network.hosts
            self.coordinator = f"{self.first.address}:{COORDINATOR}"
            hub = self.first.call(Daemon, str(binary), str(self.first_only), "first", role="all", insecure="true",
                                  listen=f"0.0.0.0:{COORDINATOR}", data_listen=f"{self.first.address}:0")
            opened.callback(hub.stop)
            other = self.second.call(Daemon, str(binary), str(folder / "second"), "second", role="agent", insecure="true",
                                     coordinator=self.coordinator, data_listen=f"{self.second.address}:0")
            opened.callback(other.stop)
            self.agents = [hub.agent_socket, other.agent_socket]
            self._opened = opened.pop_all()

    def add(self, thing):
        """Closed before the hosts are."""
        return self._opened.enter_context(contextlib.closing(thing))

    def environment(self, number: int, cores: str, **more: str) -> dict[str, str]:
        """An engine's on that host: its agent is named here alone, `cores` is the variable that binds its ranks."""
        return {"WEIGHTWIRE_AGENT_SOCKET": self.agents[number], "GLOO_SOCKET_IFNAME": "eth0", cores: str(number), **more}

    def start_second(self, command: list[str], env: dict[str, str], setup: str = "", **options) -> None:
        """Runs `command` on the second host, as its operator starts it there, until the hosts are closed; it does not see the first one's
        files. `setup`: shell words in its mount namespace before."""
        alone = f"mount -t tmpfs none {self.first_only}; {setup or ':'}; exec \"$@\""
        with open(self._folder / "second-engine.log", "a") as log:
            process = self.second.call(subprocess.Popen, ["unshare", "--mount", "sh", "-ec", alone, "sh", *command],
                                       env={**os.environ, **env}, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, **options)

        def end():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(20)
                os.killpg(process.pid, signal.SIGKILL)  # what its first process left behind, too
            process.wait(10)

        self._opened.callback(end)

    def cut(self, seconds: float) -> None:
        """Nothing that one host sends arrives at the other."""
        self.first.deafen(self.second)
        self.second.deafen(self.first)
        time.sleep(seconds)
        assert self.second.lost() + self.first.lost() > 0, "nothing was on its way"
        self.network.heal()

    def close(self) -> None:
        self._opened.close()
