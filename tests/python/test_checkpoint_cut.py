"""A checkpoint's file that is cut while it is read is an error that names it, for every reader: no signal, and no zeros where the
last page of a mapping would have some."""

import math
import subprocess
import sys

import pytest

from conftest import BINARIES, DATA
from test_checkpoint_damage import copied
from weightwire import checkpoint, dtype_bytes

HF, TORCH_DIST = DATA / "megatron/qwen2/hf", DATA / "checkpoints/torch_dist-qwen3_moe"
MEGATRON = DATA / "checkpoints/megatron-qwen2_tied"

#: Reads as it is told to, and cuts the file once its headers and sizes were checked and its first bytes were read (a mapping
#: would be there then): the moment that no check can see.
READER = """
import os, sys
import numpy as np
from weightwire import checkpoint
from weightwire.checkpoint import conversion, live, loading, planner, sources

what, folder, name, left, config, target, agent, coordinator = sys.argv[1:]

def cutting(module, function):
    real = getattr(module, function)
    def opened(*args, **kwargs):
        found = real(*args, **kwargs)
        made = getattr(found, "opened", found)
        for tensor in (t for tensors in made.ranks for t in tensors.values() if t.regions[0].file == name):
            made.files.flat(tensor, 0, 1)
        os.truncate(os.path.join(folder, name), int(left))
        return found
    setattr(module, function, opened)

cutting(*{"convert": (conversion, "find"), "load": (loading, "find"), "check": (sources, "open_checkpoint"),
          "push": (live, "open_checkpoint")}[what])
try:
    if what == "convert":
        checkpoint.convert(folder, target, "hf", config=config, memory=1 << 18)
    elif what == "load":
        (tensors,) = planner.planner_of(open(config).read()).layout("megatron:tp1")
        checkpoint.load(folder, "megatron:tp1", 0, {t.name: np.zeros(t.shape, np.uint16) for t in tensors}, config=config)
    elif what == "check":
        checkpoint.check(folder)
    else:
        checkpoint.push(folder, 1, config=config, agent=agent, coordinator=coordinator, timeout=60)
except checkpoint.CheckpointError as error:
    print(error)
    sys.exit(3)
"""


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


@pytest.mark.parametrize("cut", ["in the middle", "in its last page"])
@pytest.mark.parametrize("what,source,name,config", [
    ("convert", HF, "model.safetensors", HF), ("load", HF, "model.safetensors", HF), ("push", HF, "model.safetensors", HF),
    ("convert", TORCH_DIST, "__0_0.distcp", DATA / "megatron/qwen3_moe/hf"), ("check", TORCH_DIST, "__0_0.distcp", HF),
    ("check", MEGATRON, "iter_0000007/mp_rank_01_001/model_optim_rng.pt", HF)])
def test_a_file_cut_while_it_is_read_is_an_error_that_names_it(daemon, tmp_path, what, source, name, config, cut):
    folder = copied(source, tmp_path / "checkpoint")
    size = (folder / name).stat().st_size
    left = size // 4 if cut == "in the middle" else size - 50
    if name.endswith((".pt", ".distcp")) and cut != "in the middle":
        left = last_byte(folder, name) - 50  # what follows it is a zip's directory
    done = subprocess.run([sys.executable, "-c", READER, what, str(folder), name, str(left), str(config / "config.json"),
                           str(tmp_path / "made"), daemon.agent_socket, daemon.grpc], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 3, (done.returncode, done.stdout)
    assert f"{name}: cut short while it was read: expected at least " in done.stdout
    assert f"found {left};" in done.stdout and not (tmp_path / "made").exists()


def last_byte(folder, name: str) -> int:
    """Where the last tensor of the file ends."""
    return max(r.offset + math.prod(r.shape) * dtype_bytes(t.dtype) for tensors in checkpoint.open_checkpoint(folder).ranks
               for t in tensors.values() for r in t.regions if r.file == name)
