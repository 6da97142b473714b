"""Formats for which vLLM has no kernel on a CPU: what its loader makes of the bytes that an engine's rank received from a trainer of
floats, or of a file that `wwctl convert --quantize` makes, is, in every parameter, what it makes of the file that the library which
defines the format has written."""

import contextlib
import json
import os
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
    subprocess.run([sys.executable, "-m", "tests.engine.load_only", said, *folders], check=True, timeout=900, cwd=rig.ROOT)
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


#: format -> (models, scales that follow from no weight, by the ends of their names)
KV, EXPERTS = (".k_scale", ".v_scale"), "qwen3-moe"
OF_LIBRARIES = {"fp8-modelopt": ((KIND,), (".input_scale", *KV)), "fp8-channel-modelopt": ((KIND,), ()),
                "nvfp4-modelopt": ((KIND, EXPERTS), (".input_scale", *KV)), "nvfp4-w4a16-modelopt": ((KIND, EXPERTS), ()),
                "mxfp8-modelopt": ((KIND,), ()), "mxfp4-gpt-oss": (("gpt-oss",), ())}
CASES = [(format, kind) for format, (kinds, _) in OF_LIBRARIES.items() for kind in kinds]


@pytest.fixture(scope="module")
def converted(checkpoint, tmp_path_factory):
    """(format, kind) -> what vLLM loads of the library's file, of ours, and of ours of other weights. What was calibrated is the
    library's."""
    made = subprocess.run([rig.ROOT / "tests/envs/overlay.sh", "vllm", "vllm-libraries", rig.ROOT / "tests/engine/requirements-libraries.txt"],
                          check=True, stdout=subprocess.PIPE, text=True, timeout=900)
    out, said, folders = tmp_path_factory.mktemp("libraries"), [], []
    for format, kind in CASES:
        said += [format, checkpoint(kind, 1), out / f"{format}-{kind}"]
    subprocess.run([sys.executable, "-m", "tests.engine.library_files", *said], check=True, timeout=600, cwd=rig.ROOT,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join([made.stdout.split()[1], str(rig.ROOT)]), "TORCHDYNAMO_DISABLE": "1"})
    for format, kind in CASES:
        library = out / f"{format}-{kind}"
        folders.append(library)
        for seed in (1, 0):
            folders.append(out / f"own-{seed}-{format}-{kind}")
            quantizing.quantize(checkpoint(kind, seed), folders[-1], "hf", str(library / "config.json"),
                                calibrated=library if OF_LIBRARIES[format][1] else None)
    found = loaded(out, *folders)
    return {case: found[3 * at:3 * at + 3] for at, case in enumerate(CASES)}


@pytest.mark.parametrize("format, kind", CASES)
def test_the_loader_makes_the_same_parameters_of_a_converted_file_as_of_the_librarys(format, kind, converted):
    """Of modelopt's exporter, and of torchao's codes as gpt-oss' release stores them."""
    theirs, ours, others = converted[format, kind]
    assert ours == theirs and len(ours) > 20
    quantized = [name for name in ours if name.endswith(("_proj.weight", "w13_weight", "w2_weight")) and (kind != "gpt-oss" or "experts" in name)]
    assert len(quantized) >= 4 and [name for name in quantized if ours[name] is None or ours[name] == others[name]] == []
    # vLLM has room for more of attention's scales than a file has.
    has = OF_LIBRARIES[format][1]
    room = tuple(end for end in (".q_scale", ".k_scale", ".v_scale", ".prob_scale", ".input_scale", "_input_scale") if end not in has)
    assert [name for name, digest in ours.items() if digest is None and not name.endswith(room)] == []
