"""A real SGLang engine on two hosts (network namespaces that share nothing but a network), a rank and an agent on each: its answers equal
those that it gave when it had loaded the same checkpoint by itself, from disk, bit for bit. Needs root."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from conftest import BINARIES, ROOT
from demo.fleet import Daemon
from safetensors.torch import load_file
from test_engine import ENGINE, HERE, Host, checkpoint, said  # noqa: F401  a fixture

import weightwire.torch
from weightwire import Client

sys.path.insert(0, str(ROOT / "tests/python"))
import netns  # noqa: E402

WHY_NOT = netns.possible()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no hosts of our own here: {WHY_NOT}")
COORDINATOR, MASTER = 7411, 7412


class Fleet:
    """A trainer, the coordinator and the engine's first rank on one host; its second rank on another, which sees no file of the agents there."""

    def __init__(self, folder, model):
        self._opened = contextlib.ExitStack()
        self._folder = folder
        self.network = self._opened.enter_context(contextlib.closing(netns.Network(2)))
        self.first, self.second = self.network.hosts
        hub = self.first.call(Daemon, str(BINARIES / "weightwired"), str(folder / "first"), "first", role="all", insecure="true",
                              listen=f"0.0.0.0:{COORDINATOR}", data_listen=f"{self.first.address}:0")
        self._opened.callback(hub.stop)
        other = self.second.call(Daemon, str(BINARIES / "weightwired"), str(folder / "second"), "second", role="agent", insecure="true",
                                 coordinator=f"{self.first.address}:{COORDINATOR}", data_listen=f"{self.second.address}:0")
        self._opened.callback(other.stop)
        self.agents = [hub.agent_socket, other.agent_socket]
        self._opened.callback(self._start_second(model))
        options = self._options(0)
        self.engine = self._opened.enter_context(contextlib.closing(
            self.first.call(Host, model, 2, env=self._environment(self.first, 0), **options)))

    def _options(self, node):
        return {"nnodes": 2, "node_rank": node, "dist_init_addr": f"{self.first.address}:{MASTER}"}

    def _environment(self, host, number):
        """An agent's socket is named by its host's environment alone: a ticket is one for all."""
        return {**os.environ, "WEIGHTWIRE_AGENT_SOCKET": self.agents[number], "SGLANG_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0",
                "SGLANG_CPU_OMP_THREADS_BIND": str(number)}

    def _start_second(self, model):
        """SGLang takes ranks that see one /dev/shm for ranks of one host, and lets them talk over its loopback."""
        alone = f"mount -t tmpfs none {self._folder / 'first'}; mount -t tmpfs none /dev/shm; exec \"$@\""
        command = ["unshare", "--mount", "sh", "-ec", alone, "sh", sys.executable,
                   str(HERE / "engine_host.py"), str(model), "2", json.dumps(self._options(1))]
        with open(self._folder / "second-engine.log", "a") as log:
            process = self.second.call(subprocess.Popen, command, env=self._environment(self.second, 1), stdin=subprocess.PIPE, stdout=log,
                                       stderr=subprocess.STDOUT, start_new_session=True)

        def end():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)
        return end

    def add(self, thing):
        return self._opened.enter_context(contextlib.closing(thing))

    def cut(self, seconds):
        """Nothing that one host sends arrives at the other."""
        self.first.deafen(self.second)
        self.second.deafen(self.first)
        time.sleep(seconds)
        assert self.second.lost() + self.first.lost() > 0, "nothing was on its way"
        self.network.heal()

    def close(self):
        self._opened.close()


@pytest.fixture
def fleet(tmp_path, checkpoint):  # noqa: F811
    with contextlib.closing(Fleet(tmp_path, checkpoint(0))) as opened:
        yield opened


def test_versions_reach_the_ranks_on_both_hosts_and_a_network_that_is_away_stops_nothing(fleet, checkpoint):  # noqa: F811
    host, now = fleet.engine, {}
    want = {0: said(host("answers"))}  # of an engine that was started on it
    for seed in (1, 2):
        assert host("from_disk", model=checkpoint(seed))[0]
        want[seed] = said(host("answers"))
    assert len({str(answers) for answers in want.values()}) == 3
    now.update(load_file(f"{checkpoint(1)}/model.safetensors"))
    trainer = fleet.add(fleet.first.call(weightwire.torch.Publisher, lambda: now.items(), rank=0, world_size=1, agent=fleet.agents[0]))
    client = fleet.add(fleet.first.call(Client, f"{fleet.first.address}:{COORDINATOR}"))

    def publish(version, seed):
        now.clear()
        now.update(load_file(f"{checkpoint(seed)}/model.safetensors"))
        return trainer.publish(version)

    def update(version):
        host("update", engine=ENGINE, checkpoint=checkpoint(0), version=version, agent="", deadline=120)
    for version, seed in enumerate((1, 0, 2), 1):
        release = publish(version, seed)
        update(version)
        release.wait_released(60)
        assert said(host("answers")) == want[seed], f"version {version}"
    ranks = [p for p in client.status().participants if p.group == ENGINE]
    assert [p.spec for p in ranks] == ["sglang:tp2"] * 2 and len({p.agent for p in ranks}) == 2

    cutter = threading.Thread(target=fleet.cut, args=(3,))
    release = publish(4, 1)
    cutter.start()
    update(4)
    cutter.join()
    release.wait_released(60)
    assert said(host("answers")) == want[1]
    client.wait_version(4, timeout=60, engines=[ENGINE])
