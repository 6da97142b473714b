"""Run by test_wheel.py inside a clean environment: COORDINATOR AGENT_SOCKET."""

import importlib.metadata
import importlib.util
import pkgutil
import sys

import weightwire
import weightwire.aio
from weightwire import Client, Publisher, Subscriber, TensorMeta
from weightwire.v1 import types_pb2

coordinator, agent = sys.argv[1:]
assert "site-packages" in weightwire.__file__, weightwire.__file__
assert weightwire.__version__ == importlib.metadata.version("weightwire")
for absent in ("torch", "vllm", "verl", "sglang", "megatron"):
    assert importlib.util.find_spec(absent) is None, absent
print("protobuf", importlib.metadata.version("protobuf"), "grpcio", importlib.metadata.version("grpcio"),
      "modules", [m.name for m in pkgutil.iter_modules(weightwire.__path__)])


def boxes() -> types_pb2.LayoutSubmission:
    meta = TensorMeta("w", "F32", (3, 5)).to_proto()
    piece = types_pb2.Piece(tensor=0, begin=[0, 0], extent=[3, 5], local_offset=0, local_stride=[5, 1])
    return types_pb2.LayoutSubmission(boxes=types_pb2.LayoutSubmission.Explicit(
        canonical=types_pb2.CanonicalSpace(tensors=[meta]),
        layout=types_pb2.RankLayout(tensors=[types_pb2.LocalTensor(spec=meta, pieces=[piece])])))


with Client(coordinator) as client, Publisher(rank=0, world_size=1, agent=agent) as publisher, \
        Subscriber(group="e", rank=0, world_size=1, agent=agent) as subscriber:
    publisher.bind_boxes(boxes())["w"][...] = 7
    subscriber.bind_submission(boxes())
    release = publisher.publish(1)
    offer = subscriber.wait_offer(30)
    got = subscriber.flip(offer)
    subscriber.acknowledge(offer)
    release.wait_released(30, on_progress=print)
    assert got["w"].shape == (3, 5) and (got["w"] == 7).all()
    assert client.wait_version(1, timeout=30).engines[0].state == "serving"
    try:
        client.abort(99)
    except weightwire.RefusedError as refused:
        assert refused.reason == "not_registered", refused
    else:
        raise AssertionError("an abort of nothing was accepted")
print("version 1 served from an installed wheel")
