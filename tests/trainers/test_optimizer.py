"""megatron-core's own distributed optimizer: its checkpoints are read, ours are read by it, and a live one is saved and
loaded under another layout and another data-parallel size, bit for bit, and steps on as if nothing had happened."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import BINARIES, ROOT
from optimizer_ranks import METADATA, go_on, save
from weightwire import checkpoint
from world import World

FIXTURES = ROOT / "tests/data/megatron"


@pytest.fixture
def model(tmp_path):
    """A fixture's model with a vocabulary that no layout pads: mcore keeps states of padding, weightwire does not."""
    def make(name: str):
        hf = json.loads((FIXTURES / name / "hf/config.json").read_text())
        tensors = load_file(FIXTURES / name / "hf/model.safetensors")
        for table in [t for t in tensors if t.endswith(("embed_tokens.weight", "lm_head.weight"))]:
            tensors[table] = torch.cat([tensors[table], tensors[table][:256 - hf["vocab_size"]] * 2])
        folder = tmp_path / "hf"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**hf, "vocab_size": 256, "padded_vocab": 256}))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    return make


@pytest.mark.parametrize("name,saved_by,sizes,loaded_by,other", [
    ("qwen2_tied", 4, dict(tp=2, pp=2), 2, dict(tp=1)),
    ("qwen2", 4, dict(tp=2), 4, dict(tp=1, pp=2)),
    ("qwen3_moe", 4, dict(tp=2, ep=2, etp=2), 2, dict(ep=2, etp=1))])
def test_a_trainer_goes_on_with_every_bit_of_its_optimizer(tmp_path, monkeypatch, model, name, saved_by, sizes, loaded_by, other):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    folder, experts = model(name), ",spec=local" if name == "qwen3_moe" else ""
    (tmp_path / "mcore").mkdir()
    with World(save, saved_by, str(folder), str(tmp_path), sizes, METADATA) as world:
        world.join(180)
    checkpoint.convert(tmp_path / "state", tmp_path / "converted", f"torch_dist:vocab_pad=256{experts}", verify=True)
    with World(go_on, loaded_by, str(folder), str(tmp_path), other, METADATA) as world:
        world.join(180)
    for group in ("exp_avg", "exp_avg_sq", "param"):  # what mcore saved and what we saved are the same tensors
        found = [checkpoint.open_checkpoint(tmp_path / saved, group) for saved in ("mcore", "converted")]
        a, b = ({n: one.files.flat(t, 0, t.count) for n, t in one.ranks[0].items()} for one in found)
        assert len(a) > 20 and a.keys() == b.keys() and all((a[name] == b[name]).all() for name in a)


@pytest.mark.parametrize("kind", ["dp_reshardable", "dp_zero_gather_scatter"])
def test_states_by_bucket_are_refused_with_what_to_do(tmp_path, model, kind):
    folder = model("qwen2_tied")
    (tmp_path / "mcore").mkdir()
    with World(save, 2, str(folder), str(tmp_path), dict(tp=1), {**METADATA, "distrib_optim_sharding_type": kind}, False) as world:
        world.join(180)
    with pytest.raises(checkpoint.CheckpointError, match=f"an optimizer saved as {kind}, cut.*fully_reshardable"):
        checkpoint.open_checkpoint(tmp_path / "mcore", "exp_avg")
