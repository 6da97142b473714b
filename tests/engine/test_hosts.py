"""One engine on two hosts (network namespaces that share nothing but a network): vLLM's own multi-node launch, an agent on each host, and
the driver on the first. What it answers is what an engine that was started on the version answers. Needs root."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading

import pytest

from tests.engine import rig
from tests.engine.conftest import BINARIES
from weightwire import DeadlineError

sys.path.insert(0, str(rig.ROOT / "tests/python"))
import netns  # noqa: E402
from two_hosts import MASTER, TwoHosts  # noqa: E402

WHY_NOT = netns.possible()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"no hosts of our own here: {WHY_NOT}")

# On CPUs vLLM 0.32 makes what stages hand on in the run that warms a compiled model up, and at no other time.
WARMED_UP = {"enforce_eager": False, "kv_cache_memory_bytes": None, "compilation_config": {"mode": 3, "backend": "eager"}}
SHAPES = {"tp2": (2, 1, {}), "pp2": (1, 2, WARMED_UP), "dp2": (1, 1, {"data_parallel_size": 2})}


class Hosts(TwoHosts):
    def engine(self, model, tp: int, pp: int, **options) -> rig.Engine:
        """Its workers know no agent but that of their own host, by the environment."""
        launch = {"nnodes": 2, "master_addr": self.first.address, "master_port": MASTER} if "data_parallel_size" not in options else {
            "data_parallel_address": self.first.address, "data_parallel_rpc_port": MASTER, "data_parallel_size_local": 1}
        options = {**options, **launch, "pipeline_parallel_size": pp}
        self._start_second(model, tp, options)
        with _environment(self._of(0)):
            return self.add(self.first.call(rig.Engine, model, tp, **options))

    def _of(self, number: int) -> dict[str, str]:
        return self.environment(number, "VLLM_CPU_OMP_THREADS_BIND", VLLM_HOST_IP=self.network.hosts[number].address,
                                VLLM_CPU_KVCACHE_SPACE="1")

    def _start_second(self, model, tp, options):
        serve = {**rig.SERVE, **options, "node_rank": 1, "tensor_parallel_size": tp, "weight_transfer_config": {"backend": "weightwire"}}
        if "data_parallel_size" in options:
            serve.pop("node_rank")
            serve["data_parallel_start_rank"] = 1
        words = [word for name, value in serve.items() if value is not None for word in _option(name, value)]
        self.start_second([sys.executable, "-m", "tests.engine.headless", str(model), "--headless", *words], self._of(1), cwd=rig.ROOT)

    def driver(self, engine: rig.Engine, **options):
        return self.add(engine.driver(name="engine", listen=self.first.address, **options))

    def trainer(self, model) -> rig.Trainer:
        return self.add(self.first.call(rig.Trainer, self.agents[0], model))


def _option(name: str, value) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag[2:]}"]
    return [flag, json.dumps(value) if isinstance(value, dict) else str(value)]


@contextlib.contextmanager
def _environment(more: dict[str, str]):
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def hosts(tmp_path):
    with contextlib.closing(Hosts(tmp_path, BINARIES / "weightwired")) as opened:
        yield opened


@pytest.mark.parametrize("shape", SHAPES)
def test_three_versions_reach_the_ranks_on_both_hosts(hosts, checkpoint, fresh, shape):
    """The engine starts on weights that it gets again after others."""
    tp, pp, options = SHAPES[shape]
    engine = hosts.engine(checkpoint("qwen2", 1), tp, pp, **options)
    driver = hosts.driver(engine)
    trainer = hosts.trainer(checkpoint("qwen2", 1))

    def answers():
        return [engine.answers(data_parallel_rank=rank) for rank in (0, 1)] if shape == "dp2" else [engine.answers()]
    started = answers()
    if shape != "pp2":  # a compiled model of two stages rounds elsewhere than a fresh engine of one
        assert started == [fresh("qwen2", tp, 1)] * len(started)
    assert len(driver.init()) == 2
    for version, seed in ((1, 2), (2, 1), (3, 2)):
        trainer.send(version, checkpoint("qwen2", seed))
        serving = driver.step(90)
        assert (serving.version, serving.recovered) == (version, "")
        assert trainer.released()["version"] == version
        if seed == 1:
            assert answers() == started
        elif shape != "pp2":
            assert answers() == [fresh("qwen2", tp, 2)] * len(started)
        elif version == 1:
            others = answers()
            assert others != started
        else:
            assert answers() == others


def test_a_network_that_is_away_for_three_seconds_stops_no_engine(hosts, checkpoint, fresh):
    engine = hosts.engine(checkpoint("qwen2", 0), 2, 1)
    driver = hosts.driver(engine).start()
    trainer = hosts.trainer(checkpoint("qwen2", 1))
    trainer.publish(1, checkpoint("qwen2", 1))
    assert driver.wait_version(1, 90).version == 1
    for version in (2, 3, 4):
        cutter = threading.Thread(target=hosts.cut, args=(3,))
        trainer.send(version, checkpoint("qwen2", 1 + version % 2))
        cutter.start()
        cutter.join()
        assert trainer.released()["version"] == version
        serving = driver.wait_version(version, 90)
        assert serving.version == version and not driver.broken
        assert engine.answers() == fresh("qwen2", 2, 1 + version % 2)


def test_without_an_address_the_driver_says_what_is_missing_and_the_engine_serves_on(hosts, checkpoint, fresh, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(hosts.first_only))  # of the driver's socket
    engine = hosts.engine(checkpoint("qwen2", 0), 2, 1)
    driver = hosts.add(engine.driver(name="engine"))
    with pytest.raises(DeadlineError, match=r"only ranks \[0\] of the engine said hello") as raised:
        driver.init()
    assert "listen=" in raised.value.remedy
    assert engine.answers() == fresh("qwen2", 2, 0)
