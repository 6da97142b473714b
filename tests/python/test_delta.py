"""Versions of which little changed, sent as changes: every element of every rank compared with what NumPy holds, bytes counted,
and SIGKILL to whoever takes part in the middle of a version."""

from __future__ import annotations

import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import BINARIES, Daemon, until
from demo import checkpoint
from demo.fleet import Engine, Fleet
from demo.processes import Process
from demo.run import Monitor
from weightwire import Client, Publisher, Subscriber, TensorMeta, boxes
from weightwire.v1 import types_pb2

CONFIG = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 4_001}
READ = 'weightwire_transfer_bytes_total{direction="in",transport="tcp"}'
SMALL_PARTS = {"slot_bytes": 256 << 10, "chunk_bytes": 64 << 10, "segment_bytes_max": 32 << 10}


class Model:
    """bf16 bits by Hugging Face name, and a folder for each version of them."""

    def __init__(self, directory):
        self._directory = directory
        self._random = np.random.Generator(np.random.SFC64(7))
        self.now = {name: (0x3C00 + self._random.integers(0, 0x180, shape)).astype(np.uint16)
                    for name, shape in checkpoint.hf_shapes(CONFIG).items()}

    def step(self, share: float, most: int) -> int:
        """Moves a share of the elements by up to `most` units in the last place; so many changed."""
        changed = 0
        for tensor in self.now.values():
            mask = self._random.random(tensor.shape, np.float32) < share
            tensor[mask] += self._random.integers(1, most, int(mask.sum()), np.uint16, endpoint=True)
            changed += int(mask.sum())
        return changed

    def folder(self, version: int) -> str:
        return f"{self._directory}/v{version}"

    def write(self, version: int) -> None:
        checkpoint.write_tensors(self.folder(version), CONFIG, (memoryview(tensor).cast("B") for tensor in self.now.values()))


class Run:
    """A fleet through versions of a model."""

    def __init__(self, fleet: Fleet, directory):
        self.fleet, self.model, self.version = fleet, Model(directory), 0
        self.client = Client(fleet.hub.grpc)

    def load(self, share: float, most: int = 1) -> int:
        changed = self.model.step(share, most) if self.version else 0
        self.version += 1
        self.model.write(self.version)
        self.fleet.each(self.fleet.trainers, "load", self.model.folder(self.version))
        self.fleet.each(self.fleet.engine_ranks(), "expect", self.version, self.model.folder(self.version))
        return changed

    def publish(self, share: float = 0.01):
        """The epoch of the next version, which every engine serves, every element right; and how many changed."""
        changed = self.load(share)
        self.fleet.publish(self.version)
        return self.served(), changed

    def served(self, engines: list[Engine] | None = None, version: int = 0):
        version = version or self.version
        self.fleet.wait_serving(version, engines)
        for engine in engines or self.fleet.engines:
            for count, wrong, serving in self.fleet.each(engine.ranks, "verify", version, self.model.folder(version)):
                assert serving == version and wrong == 0 and count > 0, (
                    f"{engine.name} serves version {serving}, {wrong} of {count} elements differ from version {version}")
        return self.epoch()

    def epoch(self):
        return self.client.status().epoch_of(self.version)


def moved(epoch) -> int:
    return sum(epoch.bytes_by_transport.values())


def is_changes(epoch) -> bool:
    """All but what was kept was made of changes, of a twentieth of its bytes."""
    return epoch.delta_bytes + epoch.bytes_kept > 0.98 * epoch.bytes and 0 < moved(epoch) < epoch.bytes / 20


def is_dense(epoch) -> bool:
    return epoch.delta_bytes == epoch.delta_code_bytes == 0 and moved(epoch) == epoch.bytes - epoch.bytes_kept > 0


def fleet_of(engines: list[Engine], more: dict | None = None, **options) -> Fleet:
    both = {"delta": "always", **SMALL_PARTS, **(more or {})}
    return Fleet(CONFIG, str(BINARIES / "weightwired"), engines=engines, agent_options=both,
                 options={**both, **options.pop("hub", {})}, **options)


def test_megatron_ranks_send_their_changes_to_engines_of_other_layouts(tmp_path):
    """TP2 x PP2, vLLM TP1 and TP2, fused and tied parameters, a vocabulary that no TP divides."""
    with fleet_of([Engine("one", 1, "tcp"), Engine("two", 2, "tcp")]) as fleet:
        run = Run(fleet, tmp_path)
        assert is_dense(run.publish()[0])
        for share in (0.01, 0.0003, 0.02):
            epoch, changed = run.publish(share)
            assert is_changes(epoch), epoch
            # Each engine holds every element, the one of two ranks its norms twice.
            assert 2 * changed <= epoch.delta_changed <= 2.05 * changed
        shown = subprocess.run([BINARIES / "wwctl", "--address", fleet.hub.grpc, "epochs", "-o", "wide"], capture_output=True, text=True, check=True)
        lines = [line for line in shown.stdout.splitlines() if " tcp" in line]
        assert ["changes" in line for line in lines] == [True, True, True, False], shown.stdout
        epoch, _ = run.publish(1.0)  # nothing is shorter than a bit for each element that it has
        assert moved(epoch) <= 1.02 * epoch.bytes


def three_versions(directory, dtype: str, kind: type, step: int, said: str, **options) -> list:
    """The epochs of three versions of odd sizes, of which 1 % changed, between ranks of one agent over tcp; each compared.
    `said`: by the publisher. `options`: of the agent."""
    daemon = Daemon(str(BINARIES / "weightwired"), str(directory / "hub"), "hub", role="all", listen="127.0.0.1:0", transports="[tcp]",
                    **options)
    random = np.random.Generator(np.random.SFC64(3))
    metas = {name: TensorMeta(name, dtype, shape) for name, shape in
             {"wide": (301, 1_021), "one": (1,), "scalar": (), "odd": (7, 3), "long": (65_537,)}.items()}
    layout = boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()])
    with Publisher(rank=0, world_size=1, agent=daemon.agent_socket, delta=said) as publisher, \
            Subscriber(group="engine", rank=0, world_size=1, agent=daemon.agent_socket) as subscriber, Client(daemon.grpc) as client:
        arrays = publisher.bind_boxes(layout)
        subscriber.bind_submission(layout)
        now = {name: random.integers(0, np.iinfo(kind).max, meta.shape, dtype=kind, endpoint=True) for name, meta in metas.items()}
        for version in (1, 2, 3):
            for name, bits in now.items():
                if version > 1:
                    mask = random.random(bits.shape) < 0.01
                    now[name] = np.where(mask, bits + kind(step), bits).astype(kind)
                arrays[name].view(kind)[...] = now[name]
            release = publisher.publish(version)
            offer = until("an offer", lambda: subscriber.wait_offer(0.2))
            params = subscriber.flip(offer)
            subscriber.acknowledge(offer)
            release.wait_released(30)
            assert {name: params[name].tobytes() for name in metas} == {name: bits.tobytes() for name, bits in now.items()}
        epochs = [client.status().epoch_of(version) for version in (1, 2, 3)]
    assert daemon.stop() == 0
    return epochs


@pytest.mark.parametrize("dtype, kind, step", [("BF16", np.uint16, 1), ("F16", np.uint16, 3), ("F32", np.uint32, 70_000),
                                               ("F8_E4M3", np.uint8, 1), ("U8", np.uint8, 5)])
def test_every_dtype_and_odd_sizes(tmp_path, dtype, kind, step):
    first, *rest = three_versions(tmp_path, dtype, kind, step, "always")
    assert is_dense(first) and all(is_changes(epoch) for epoch in rest), rest


@pytest.mark.parametrize("delta, said", [("off", "always"), ("auto", "off"), ("always", "auto")])
def test_where_it_is_off_or_there_is_no_network_everything_is_sent(tmp_path, delta, said):
    """What a trainer says goes over what its agent is configured to, but for `off`; and loopback is no network."""
    epochs = three_versions(tmp_path, "BF16", np.uint16, 1, said, delta=f'"{delta}"')
    assert all(is_dense(epoch) for epoch in epochs), epochs


def test_an_engine_that_starts_again_gets_everything_and_the_others_changes(tmp_path):
    with fleet_of([Engine("one", 1, "tcp"), Engine("two", 1, "tcp")]) as fleet, Monitor(fleet.engines[:1]) as monitor:
        run = Run(fleet, tmp_path)
        run.publish()
        assert is_changes(run.publish()[0])
        restarted = fleet.engines[1].ranks[0]
        restarted.kill()
        restarted.restart()
        restarted.wait_ready()
        run.served()
        fill = next(epoch for epoch in run.client.status().epochs if epoch.kind != "publish")
        assert is_dense(fill) and fill.version == run.version
        epoch, changed = run.publish()  # the segments of a fill are others: their sums are made of what is served
        assert is_changes(epoch) and epoch.delta_changed == 2 * changed
    assert monitor.stopped == {"one": 0} and not monitor.mixes and monitor.answers["one"] > 10


def test_a_trainer_of_another_layout_sends_everything_once(tmp_path):
    with fleet_of([Engine("one", 1, "tcp")]) as fleet:
        run = Run(fleet, tmp_path)
        run.publish()
        assert is_changes(run.publish()[0])
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(Process.stop, fleet.trainers))
        fleet.tp, fleet.pp = 1, 2
        fleet.trainers = [Process(f"{fleet.directory}/again-{rank}.sock", "trainer", fleet.trainer_agent.agent_socket, fleet.directory,
                                  "1", "2", str(rank), log=fleet._log) for rank in range(2)]
        for trainer in fleet.trainers:
            trainer.wait_ready()
        assert is_dense(run.publish()[0])
        assert is_changes(run.publish()[0])


class TestKills:
    """A version of which half a second of codes is read; whoever is hit, it ends right and the next ones are changes. Nobody else
    stops serving."""

    RATE = 6_000_000  # bytes a second

    @pytest.fixture
    def run(self, tmp_path):
        """The trainer, which has an agent of its own -> "one" -> "two". Two versions are served, the second made of changes."""
        engines = [Engine("one", 1, "tcp"), Engine("two", 1, "tcp")]
        with fleet_of(engines, {"rate_limit": self.RATE}, hub={"fanout": "chain"}, trainer_via="tcp") as fleet:
            run = Run(fleet, tmp_path)
            run.publish()
            assert is_changes(run.publish()[0])
            yield run

    def hit(self, run, strike, watched: list[Engine]):
        """Publishes a version and strikes while its codes are read; the trainer's failure, or None."""
        failed = []
        run.load(0.4, 100)
        agent = run.fleet.engines[0].agent
        before = agent.counter(READ)

        def publish():
            try:
                run.fleet.publish(run.version)
            except (RuntimeError, EOFError, OSError) as error:  # a rank says why, or is dead
                failed.append(error)

        thread = threading.Thread(target=publish)
        with Monitor(watched) as monitor:
            thread.start()
            until("codes are read", lambda: agent.counter(READ) > before + 100_000)
            phases = [e.phase for e in run.fleet.status().epochs if e.version == run.version]
            strike()
            thread.join(90)
            assert not thread.is_alive(), f"version {run.version} was neither released nor given up"
            until("both answered after it", lambda: all(monitor.answers.values()))
        assert phases == [types_pb2.EPOCH_PHASE_TRANSFERRING], "it was hit in the middle of a version"
        assert not any(monitor.stopped.values()) and not monitor.mixes, (monitor.stopped, monitor.last, monitor.mixes)
        return failed[0] if failed else None

    def goes_on(self, run) -> None:
        run.publish()  # all of it to whom was filled, whose segments were others, and to whoever reads from there
        for _ in range(2):
            assert is_changes(run.publish()[0])

    @pytest.mark.parametrize("victim", [0, 1], ids=["relay", "target"])
    def test_an_engine_and_its_agent(self, run, victim):
        hit, left = run.fleet.engines[victim], run.fleet.engines[1 - victim]

        def strike():
            run.fleet.kill_agent(hit)
            hit.ranks[0].kill()

        assert self.hit(run, strike, [left]) is None
        run.served([left])
        epoch = run.epoch()
        assert epoch.phase == "committed" and epoch.delta_bytes > 0.9 * epoch.bytes, epoch
        run.fleet.start_agent(hit)
        hit.ranks[0].restart()
        hit.ranks[0].wait_ready()
        run.served()
        self.goes_on(run)

    def test_the_agent_of_the_trainer(self, run):
        served = run.version
        assert self.hit(run, run.fleet.kill_agent, run.fleet.engines) is not None
        run.fleet.wait("it was given up", lambda s: all(e.phase == types_pb2.EPOCH_PHASE_ABORTED for e in s.epochs if e.version > served))
        run.served(version=served)
        for trainer in run.fleet.trainers:
            trainer.kill()
        agent = run.fleet.start_trainer_agent()
        run.fleet.trainers = [Process(f"{run.fleet.directory}/again-{rank}.sock", "trainer", agent.agent_socket, run.fleet.directory,
                                      "2", "2", str(rank), log=run.fleet._log) for rank in range(4)]
        for trainer in run.fleet.trainers:
            trainer.wait_ready()
        assert is_dense(run.publish()[0])  # nobody knows any more what was sent last
        assert is_changes(run.publish()[0])
