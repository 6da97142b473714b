"""Formats for which vLLM has no kernel on a CPU: what its loader makes of the bytes that an engine's rank received from a trainer of
floats is, in every parameter, what it makes of the file that compressed-tensors has written."""

import contextlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.engine import rig
from tests.engine.test_quantized import KIND, library_file, quantized
from tests.engine.trainer_hf import config_of, read
from weightwire import Subscriber
from weightwire.checkpoint import quantizing

MX = dict(strategy="group", group_size=32, scale_dtype="torch.uint8", type="float")
DYNAMIC = dict(num_bits=8, type="float", strategy="token", dynamic=True)
#: format -> what compressed-tensors is told of weights and of activations, and whether trainers' floats become it on the way.
FORMATS = {"fp8-tensor": (dict(num_bits=8, type="float", strategy="tensor"), DYNAMIC, True),
           "mxfp8-compressed-tensors": (dict(num_bits=8, **MX), None, True),
           "mxfp4-compressed-tensors": (dict(num_bits=4, **MX), None, True),
           "nvfp4-compressed-tensors": (dict(num_bits=4, type="float", strategy="tensor_group", group_size=16,
                                             scale_dtype="torch.float8_e4m3fn"), None, False)}


def loaded(tmp_path, *folders):
    said = tmp_path / "parameters.json"
    subprocess.run([sys.executable, "-m", "tests.engine.load_only", said, *folders], check=True, timeout=300, cwd=rig.ROOT)
    return json.loads(said.read_text())


def arrived(agent: str, source, quantized, out):
    """The folder `out` of what a rank holds that registered as an engine of `quantized`'s config received from a trainer of `source`."""
    import torch
    from safetensors.torch import save_file
    from weightwire.torch_dtypes import TORCH
    wanted = {name: meta for name, (meta, _) in read(quantized).items()}
    with contextlib.closing(rig.Trainer(agent, source)) as trainer, Subscriber(group="engine", rank=0, world_size=1, agent=agent) as rank:
        rank.bind(config_of(quantized), "hf", list(wanted.values()))
        trainer.send(1, source)
        offer = rank.wait_offer(120)
        assert offer is not None, trainer.released()
        held = rank.flip(offer)
        rank.acknowledge(offer)
        assert trainer.released()["version"] == 1
        shutil.copytree(quantized, out, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file({name: torch.from_numpy(np.frombuffer(held[name].tobytes(), np.uint8).copy()).view(TORCH[meta.dtype]).reshape(meta.shape)
                   for name, meta in wanted.items()}, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("format", FORMATS)
def test_the_loader_makes_the_same_parameters_of_what_arrived_as_of_the_librarys_file(format, checkpoint, tmp_path, stack):
    *said, on_the_way = FORMATS[format]
    library = library_file(checkpoint(KIND, 1), tmp_path / "library", *said)
    own = quantized(checkpoint, tmp_path, format)
    received = arrived(stack.agent, checkpoint(KIND, 1) if on_the_way else own[1], own[1], tmp_path / "received")
    theirs, ours, others = loaded(tmp_path, library, received, own[0])
    assert ours == theirs and len(ours) > 20
    assert {name for name in ours if others[name] == ours[name]}.isdisjoint(name for name in ours if name.endswith((".weight_scale", ".weight_packed")))


@pytest.mark.parametrize("format", ["mxfp8-modelopt", "fp8-channel-modelopt", "nvfp4-modelopt"])
def test_the_loader_finds_every_tensor_of_modelopts_formats(format, checkpoint, tmp_path):
    """What modelopt writes is compared in tests/python/test_quantize_modelopt.py; here, that vLLM takes it by name and shape."""
    quantizing.quantize(checkpoint(KIND, 1), tmp_path / "own", "hf", format)
    (held,) = loaded(tmp_path, tmp_path / "own")
    calibrated = (".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".input_scale")  # vLLM makes room for them whoever has them
    untouched = [name for name, digest in held.items() if digest is None]
    assert len(held) > 20 and [name for name in untouched if not name.endswith(calibrated)] == []
