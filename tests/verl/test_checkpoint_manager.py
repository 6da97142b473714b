"""The worked checkpoint manager in verl's place: a job goes on from what another one saved, on as many ranks or others."""

import json

import pytest
import torch
import torch.multiprocessing
from safetensors.torch import load_file

import manager_ranks


def ranks(world_size: int, folder, what: str, async_save: bool) -> dict:
    torch.multiprocessing.spawn(_rank, (world_size, str(folder), what, async_save), world_size)
    return load_file(f"{folder}/{what}{world_size}.safetensors")


def _rank(rank: int, *arguments) -> None:
    manager_ranks.run(rank, *arguments)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_job_goes_on_on_as_many_ranks_or_others_with_every_bit(tmp_path, async_save):
    saved = ranks(2, tmp_path, "save", async_save)
    assert [path.name for path in tmp_path.glob("global_step_*/actor")] == ["actor"]
    again = ranks(2, tmp_path, "load", False)
    (tmp_path / "load.store").unlink()
    fewer = ranks(1, tmp_path, "load", False)
    assert saved.keys() == again.keys() and all(torch.equal(saved[name], again[name]) for name in saved)
    held = [name for name in saved if name.startswith("held/")]
    assert held and all(torch.equal(saved[name], fewer[name]) for name in held) and torch.equal(saved["lr"], fewer["lr"])
    hf = tmp_path / "global_step_1/actor/weightwire/hf_model"
    assert json.loads((hf / "config.json").read_text())["use_cache"] is True
    whole = load_file(hf / "model.safetensors")
    assert all(torch.equal(whole[name[5:]], saved[name]) for name in held if "/" not in name[5:])

