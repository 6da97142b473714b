"""The recorder against loaders that really run: replaying its rows gives what the loader itself put there.

Here the loaders are small ones of every kind that vLLM has; `test_versions` records vLLM's own.
"""

import json

import numpy as np
import pytest
import torch

from tests.engine import rig
from weightwire.vllm import install
from weightwire.vllm.tracer import Probe, Recorder, UnrecordableTensor, storage_of

WHOLE = (8, 6, 4)


def plain(params, w):
    params["a"].data.copy_(w[2:5])


def narrowed(params, w):
    params["a"].copy_(w.narrow(0, 3, 3))
    params["b"].narrow(0, 1, 1).copy_(w.narrow(0, 7, 1).narrow(2, 0, 4))


def chunked(params, w):
    for target, part in zip(params["c"].chunk(2, dim=1), w.chunk(2, dim=1)):
        target.copy_(part)


def experts(params, w):
    for number, expert in enumerate(w.unbind(0)):
        params["c"][number].copy_(expert)


def added_dimension(params, w):
    params["b"][1].copy_(w.unsqueeze(0).unbind(0)[0][4])


def transposed(params, w):
    params["d"].copy_(w.transpose(1, 2))


def joined(params, w):
    params["c"].view(48, 4)[:12].copy_(w.reshape(48, 4)[6:18])


def materialised(params, w):
    params["a"].copy_(w[1:4].contiguous().to(torch.float32).detach())


def padded(params, w):
    params["a"][:2].copy_(w[:2])
    params["a"][2:].fill_(0)


def parameters(device):
    shapes = dict(a=(3, 6, 4), b=(2, 6, 4), c=WHOLE, d=(8, 4, 6))
    return {n: torch.zeros(s, device=device) for n, s in shapes.items()}


def record(loader):
    params = parameters("meta")
    recorder = Recorder({storage_of(p): n for n, p in params.items()})
    with recorder:
        loader(params, Probe("w", WHOLE, torch.float32))
    return recorder


LOADERS = [plain, narrowed, chunked, experts, added_dimension, transposed, joined, materialised, padded]


@pytest.mark.parametrize("loader", LOADERS)
def test_replaying_the_rows_gives_what_the_loader_gives(loader):
    whole = torch.arange(1.0, 1 + np.prod(WHOLE)).view(WHOLE)
    want = parameters("cpu")
    loader(want, whole)
    got = parameters("cpu")
    rows = record(loader).rows
    assert rows
    for row in rows:
        block = whole.numpy()
        for _, dim, start, size in row["ops"]:
            block = np.take(block, range(start, start + size), axis=dim)
        flat = got[row["param"]].numpy().reshape(-1)[row["offset"]:]
        np.lib.stride_tricks.as_strided(flat, row["shape"], [4 * s for s in row["stride"]])[...] = block
    assert all(torch.equal(want[n], got[n]) for n in want)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_given_windows_does_the_same(loader):
    whole = torch.arange(1.0, 1 + np.prod(WHOLE)).view(WHOLE)
    want, got = parameters("cpu"), parameters("cpu")
    loader(want, whole)
    window = install.windows(record(loader).rows, {"w": WHOLE})["w"]
    held = whole[tuple(slice(a, a + n) for a, n in window)].clone()
    assert held.numel() < whole.numel() or loader in (chunked, experts, transposed)
    loader(got, Probe("w", WHOLE, torch.float32, fetch=install.fetch_window(held, window)))
    assert all(torch.equal(want[n], got[n]) for n in want)


@pytest.mark.parametrize("loader,why", [
    (lambda p, w: p["a"].copy_((w * 2)[:3]), "aten.mul"),
    (lambda p, w: p["a"].fill_(w.max().item()), "aten.max"),
    (lambda p, w: p["a"].copy_(w[::2][:3]), "is no block"),
    (lambda p, w: p["a"].copy_(torch.cat([w[:1], w[5:7]])), "aten.cat"),
    (lambda p, w: p["a"].copy_(w[:1]), "a copy of"),
    (lambda p, w: p["a"].copy_(w.to(torch.bfloat16)[:3]), "_to_copy"),
    (lambda p, w: torch.empty(WHOLE).copy_(w), "no parameter"),
])
def test_what_no_row_describes_is_refused_and_names_the_tensor(loader, why):
    with pytest.raises(UnrecordableTensor, match=f"^w: .*{why}"):
        record(loader)


def test_a_parameter_that_is_changed_after_the_copy_is_refused():
    def loader(params, w):
        params["a"].copy_(w[:3])
        params["a"].exp_()
    assert record(loader).refused == {"a": "aten.exp_.default"}


@pytest.mark.parametrize("kind,name", [("qwen2-4-layers", "qwen2-tp2"), ("qwen3-moe", "qwen3-moe-tp2")])
def test_rows_of_vllms_loader_equal_the_stored_ones(kind, name, checkpoint, stack):
    """The stored traces were recorded by other means; their no-ops (unsqueeze, unbind, getitem) are dropped here. Biases
    are float32 once vLLM's CPU kernels have had them: then the cast is made on the way, and only the dtype differs."""
    stored = json.loads((rig.ROOT / f"tests/data/vllm-traces/{name}.json").read_text())
    engine = stack.add(rig.Engine(checkpoint(kind, 0), 2, worker_extension_cls="tests.engine.extension.Inspect"))
    driver = stack.add(engine.driver(name="engine", agent=stack.agent))
    driver.init()
    for rank, rows in enumerate(engine.run(engine.llm.collective_rpc("recorded_rows"))):
        want = [{**copy, "ops": [op for op in copy["ops"] if op[0] == "narrow"]}
                for copy in stored["ranks"][rank]["copies"]]
        assert {row["dtype"] for row in want} == {"bfloat16"}
        for row in rows:
            if row["param"].endswith(".bias") and row["dtype"] == "float32":
                row["dtype"] = "bfloat16"
        key = lambda row: json.dumps(row, sort_keys=True)  # noqa: E731
        assert sorted(map(key, rows)) == sorted(map(key, want))
