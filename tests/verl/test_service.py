"""weightwire.ray: one call starts coordinator and agents as actors; others find them by their runtime_env."""

import os
import pathlib
import time

import numpy as np
import pytest
import ray

import weightwire.ray
from weightwire import Client, RefusedError, UnavailableError

HERE = pathlib.Path(__file__).resolve().parent
PATH = os.pathsep.join([str(HERE), str(HERE.parents[1] / "client/python")])


@pytest.fixture
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {
        "PYTHONPATH": PATH, "WEIGHTWIRE_BIN_DIR": os.environ["WEIGHTWIRE_BIN_DIR"]}})
    yield
    ray.shutdown()


class Trainer:
    def __init__(self, layout: bytes):
        from weightwire import Publisher
        from weightwire.v1 import types_pb2
        self.publisher = Publisher(rank=0, world_size=1)
        self.params = self.publisher.bind_boxes(types_pb2.LayoutSubmission.FromString(layout))

    def publish(self, version: int, value: float) -> None:
        self.params["w"][...] = value
        self.publisher.publish(version).wait_released(60)


class Engine:
    def __init__(self, layout: bytes):
        from weightwire import Subscriber
        from weightwire.v1 import types_pb2
        self.subscriber = Subscriber(group="engine", rank=0, world_size=1)
        self.subscriber.bind_submission(types_pb2.LayoutSubmission.FromString(layout))

    def install(self) -> tuple:
        offer = self.subscriber.wait_offer(60)
        params = self.subscriber.flip(offer)
        self.subscriber.acknowledge(offer)
        return offer.version, np.array(params["w"])


def layout() -> bytes:
    from weightwire import TensorMeta
    from weightwire.v1 import types_pb2
    meta = TensorMeta("w", "F32", (7, 3)).to_proto()
    piece = types_pb2.Piece(tensor=0, begin=[0, 0], extent=[7, 3], local_offset=0, local_stride=[3, 1])
    return types_pb2.LayoutSubmission(boxes=types_pb2.LayoutSubmission.Explicit(
        canonical=types_pb2.CanonicalSpace(tensors=[meta]),
        layout=types_pb2.RankLayout(tensors=[types_pb2.LocalTensor(spec=meta, pieces=[piece])]))).SerializeToString()


def test_actors_find_it_and_it_ends_with_stop(cluster):
    service = weightwire.ray.start(job="step", settings={"heartbeat_ms": 250})
    env = service.runtime_env(env_vars={"PYTHONPATH": PATH, "MINE": "1"})
    assert env["env_vars"]["MINE"] == "1" and len(service.nodes) == 1
    trainer = ray.remote(num_cpus=0)(Trainer).options(runtime_env=env).remote(layout())
    engine = ray.remote(num_cpus=0)(Engine).options(runtime_env=env).remote(layout())
    for version, value in ((1, 4.0), (2, 5.0)):
        ray.get(engine.__ray_ready__.remote())
        released = trainer.publish.remote(version, value)
        got, params = ray.get(engine.install.remote(), timeout=90)
        ray.get(released, timeout=90)
        assert got == version and np.array_equal(params, np.full((7, 3), value, np.float32))
    # The coordinator's actor dies with its process; the one that Ray starts again listens where it did, and knows what is committed.
    before = coordinators()
    assert len(before) == 1
    ray.kill(service._actors[0], no_restart=False)
    end = time.monotonic() + 60
    while coordinators() & before:
        assert time.monotonic() < end, "the daemon outlives its actor"
        time.sleep(0.1)
    with Client(service.address) as client:
        while True:
            try:
                status = client.status()
                if len(status.participants) == 2:
                    break
            except UnavailableError:
                pass
            assert time.monotonic() < end, "the coordinator did not come back"
            time.sleep(0.1)
        assert (status.job, status.committed_version) == ("step", 2)
    released = trainer.publish.remote(3, 6.0)
    assert ray.get(engine.install.remote(), timeout=90)[0] == 3
    ray.get(released, timeout=90)
    ray.kill(trainer)
    ray.kill(engine)
    service.stop()
    assert not list(pathlib.Path("/tmp").glob("weightwire-ray-*-step"))
    assert not [line for line in map(_read, pathlib.Path("/proc").glob("[0-9]*/cmdline")) if b"weightwire-ray-" in line and b"weightwired.yaml" in line]


def coordinators() -> set:
    return {path.parent.name for path in pathlib.Path("/proc").glob("[0-9]*/cmdline")
            if _read(path).split(b"\0")[0].endswith(b"/weightwired") and b"/coordinator-" in _read(path)}


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_weightwired_refuses_is_raised_and_nothing_is_left(cluster):
    with pytest.raises(ray.exceptions.RayError, match="slot_byte"):
        weightwire.ray.start(job="bad", settings={"slot_byte": 1})
    assert not list(pathlib.Path("/tmp").glob("weightwire-ray-*-bad"))


def test_plaintext_between_nodes_is_refused_unless_it_is_asked_for(cluster, monkeypatch):
    nodes = [{"NodeID": f"{i:056x}", "Alive": i < 2} for i in range(3)]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    with pytest.raises(RefusedError, match="2 nodes without certificates") as refused:
        weightwire.ray.start()
    assert "insecure=True" in refused.value.remedy
    with pytest.raises(RefusedError, match="is no node"):
        weightwire.ray.start(nodes=[nodes[2]["NodeID"]])
