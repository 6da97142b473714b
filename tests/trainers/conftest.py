"""What the trainer tests share: a running daemon, an engine that holds whole Hugging Face tensors, worlds of ranks."""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests/trainers")]
sys.path += [str(ROOT / "tests/python"), str(ROOT / "tests/support")]  # for what both use; a conftest of its own is there, too

from demo.fleet import Daemon  # noqa: E402
from weightwire import Subscriber, TensorMeta  # noqa: E402

BINARIES = pathlib.Path(os.environ.get("WEIGHTWIRE_BIN_DIR", ROOT / "build/release/bin"))
_BITS = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}


def read_safetensors(path) -> dict[str, tuple[TensorMeta, np.ndarray]]:
    """name -> (meta, bits). Reads the format itself, so that no tensor library is between us and the bytes."""
    data = pathlib.Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    out = {}
    for name, entry in json.loads(data[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[8 + length + begin:8 + length + end], _BITS[entry["dtype"]])
        out[name] = TensorMeta(name, entry["dtype"], tuple(entry["shape"])), bits.reshape(entry["shape"])
    return out


def pytest_collection_modifyitems(items):
    files = {item.path.name for item in items}
    alone = files & {"test_bridges.py", "test_every_bridge.py", "test_hybrid.py", "test_mbridge.py"}
    if alone and len(files) > 1:
        raise pytest.UsageError(f"{alone.pop()} needs a process of its own; run.sh gives each file one")


@pytest.fixture
def daemon(tmp_path):
    """A `weightwired --role all` with a journal in memory; its exit code must be 0."""
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    yield started
    assert started.stop() == 0


class HfEngine:
    """An engine of one rank that holds a checkpoint's tensors whole, by the `hf` scheme."""

    def __init__(self, agent: str, checkpoint: pathlib.Path, name: str = "hf", model_name: str = ""):
        config = json.loads((checkpoint / "config.json").read_text())
        metas = [meta for meta, _ in read_safetensors(checkpoint / "model.safetensors").values()]
        self._subscriber = Subscriber(group=name, rank=0, world_size=1, agent=agent, model_name=model_name)
        self._subscriber.bind(config, "hf", metas)

    def expect(self, version: int, want: pathlib.Path, world=None, timeout: float = 60) -> None:
        """The next version is `version`, and its bits are those of the file `want`, tensor by tensor.

        Fails as soon as a rank of the publishing `world` has failed."""
        end, offer = time.monotonic() + timeout, None
        while offer is None:
            if world:
                world.check()
            assert time.monotonic() < end, f"version {version} did not arrive within {timeout} s"
            offer = self._subscriber.wait_offer(0.2)
        assert offer.version == version
        got = self._subscriber.flip(offer)
        expected = read_safetensors(want)
        assert got.keys() == expected.keys()
        different = [name for name, (_, bits) in expected.items() if not np.array_equal(got[name].view(bits.dtype), bits)]
        assert not different, f"version {version}: {len(different)} of {len(expected)} tensors differ: {different[:8]}"
        self._subscriber.acknowledge(offer)

    def close(self) -> None:
        self._subscriber.close()


@pytest.fixture
def hf_engine(daemon):
    """Opens HfEngines; they are closed before the daemon stops."""
    opened = []

    def start(checkpoint, name="hf"):
        opened.append(HfEngine(daemon.agent_socket, pathlib.Path(checkpoint), name))
        return opened[-1]

    yield start
    for engine in opened:
        engine.close()
