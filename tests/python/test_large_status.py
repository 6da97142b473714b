"""A status that is longer than gRPC lets a client take by itself: 1,000 engines and 256 epochs, of a coordinator of before, which
knows no pages and sends the names of every epoch."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from conftest import BINARIES
from weightwire import Client
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc

NAMES = [f"rollout-engine-{i:06}" for i in range(1_000)]


class Large(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers nothing but its status."""

    def __init__(self):
        self.status = pb.StatusResponse(job="default", committed_version=256, deciding=True)
        for name in NAMES:
            self.status.engines.add(name=name, ranks_present=1, world_size=1, version=256, ready=True)
        for epoch in range(256, 0, -1):
            self.status.epochs.add(epoch=epoch, version=epoch, engines=NAMES)
        assert self.status.ByteSize() > 4 << 20

    def Status(self, request, context):
        return self.status

    def Watch(self, request, context):
        yield self.status


@pytest.fixture
def address():
    server = grpc.server(ThreadPoolExecutor(4))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Large(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("command", [("status", "--json"), ("status", "--json", "--epochs", "0"), ("top",), ("engines",), ("status",),
                                     ("epochs",)])
def test_wwctl_reads_a_status_of_many_engines_and_epochs(address, command):
    shown = subprocess.run([BINARIES / "wwctl", *command, "--address", address, "--timeout", "60"], timeout=120,
                           capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})
    assert shown.returncode == 0, shown.stderr
    if "--json" in command:
        status = json.loads(shown.stdout)
        epochs = 256 if "--epochs" in command else 16
        assert len(status["epochs"]) == epochs and len(status["engines"]) == 1_000 and status["epochs_left"] == 256 - epochs
        assert status["epochs"][-1]["epoch"] == str(257 - epochs) and status["epochs"][-1]["engines"] == NAMES
    else:
        assert NAMES[0] in shown.stdout
    if command == ("epochs",):
        assert f"{NAMES[0]}, {NAMES[1]}, {NAMES[2]} and 997 more" in shown.stdout and "and 240 older" in shown.stdout


def test_the_python_client_reads_a_status_of_many_engines_and_epochs(address):
    with Client(address) as client:
        whole = client.status()
        assert len(whole.engines) == 1_000 and len(whole.epochs) == 256 and whole.epochs[255].engines == tuple(NAMES)
        newest = client.status(epochs=3)
        assert [epoch.epoch for epoch in newest.epochs] == [256, 255, 254] and newest.epochs_left == 253
