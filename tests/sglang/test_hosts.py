"""A real SGLang engine on two hosts (network namespaces that share nothing but a network), a rank and an agent on each: its answers equal
those that it gave when it had loaded the same checkpoint by itself, from disk, bit for bit. Needs root."""

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from conftest import BINARIES, ROOT
from safetensors.torch import load_file
from test_engine import ENGINE, HERE, Host, checkpoint, said  # noqa: F401  a fixture

import weightwire.torch
from weightwire import Client

sys.path.insert(0, str(ROOT / "tests/python"))
import netns  # noqa: E402
from two_hosts import MASTER, TwoHosts  # noqa: E402

WHY_NOT = netns.possible()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no hosts of our own here: {WHY_NOT}")


class Fleet(TwoHosts):
    """A trainer, the coordinator and the engine's first rank on one host; its second rank on the other one."""

    def start(self, model):
        # SGLang takes ranks that see one /dev/shm for ranks of one host, and lets them talk over its loopback.
        self.start_second([sys.executable, str(HERE / "engine_host.py"), str(model), "2", json.dumps(self._options(1))],
                          self._environment(1), "mount -t tmpfs none /dev/shm", stdin=subprocess.PIPE)
        self.engine = self.add(self.first.call(Host, model, 2, env={**os.environ, **self._environment(0)}, **self._options(0)))

    def _options(self, node):
        return {"nnodes": 2, "node_rank": node, "dist_init_addr": f"{self.first.address}:{MASTER}"}

    def _environment(self, number):
        return self.environment(number, "SGLANG_CPU_OMP_THREADS_BIND", SGLANG_HOST_IP=self.network.hosts[number].address)


@pytest.fixture
def fleet(tmp_path, checkpoint):  # noqa: F811
    with contextlib.closing(Fleet(tmp_path, BINARIES / "weightwired")) as opened:
        opened.start(checkpoint(0))
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
    client = fleet.add(fleet.first.call(Client, fleet.coordinator))

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
