"""fp8 checkpoints with block scales reach an engine as vLLM's own loader would have put them there."""

import json
import math

import numpy as np
import pytest

from conftest import DATA, EngineRanks, Trainer
from test_fixtures import checkpoint_shapes, strided
from weightwire import TensorMeta

KINDS = {"bfloat16": ("BF16", np.uint16), "float8_e4m3fn": ("F8_E4M3", np.uint8), "float32": ("F32", np.uint32)}


class Case:
    """A trace of vLLM 0.32.0 at TP2: a checkpoint of random bits, and the parameters that its copies make of it."""

    def __init__(self, name: str):
        trace = json.loads((DATA / f"vllm-traces/{name}.json").read_text())
        self.config = trace["config"]
        self.rows = [rank["copies"] for rank in trace["ranks"]]
        random = np.random.Generator(np.random.SFC64(23))
        kinds = {row["src"]: KINDS[row["dtype"]] for rows in self.rows for row in rows}
        self.checkpoint = {}
        for source, shape in checkpoint_shapes(self.rows).items():
            dtype, kind = kinds[source]
            bits = random.integers(0, np.iinfo(kind).max, shape, dtype=kind, endpoint=True)
            self.checkpoint[source] = (TensorMeta(source, dtype, shape), bits)
        self.ranks = [self.replay(rows) for rows in self.rows]

    def replay(self, rows: list) -> dict[str, tuple[TensorMeta, np.ndarray]]:
        params = {}
        for name in dict.fromkeys(row["param"] for row in rows):
            copies = [row for row in rows if row["param"] == name]
            dtype, kind = KINDS[copies[0]["dtype"]]
            flat = np.zeros(sum(math.prod(row["shape"]) for row in copies), kind)
            written = np.zeros(flat.size, np.uint8)
            for row in copies:
                source = self.checkpoint[row["src"]][1]
                for op, dim, start, length in row["ops"]:
                    assert op == "narrow"
                    source = source.take(range(start, start + length), axis=dim)
                strided(flat, row)[...] = source
                strided(written, row)[...] += 1
            assert (written == 1).all(), name
            shape = (flat.size,) if len(copies[0]["shape"]) == 1 else (flat.size // copies[0]["stride"][0], copies[0]["stride"][0])
            if ".w13_" in name or ".w2_" in name:
                experts = {row["src"].split(".experts.")[1].split(".")[0] for row in copies}
                shape = (len(experts), shape[0] // len(experts), shape[1])
            params[name] = (TensorMeta(name, dtype, shape), flat)
        return params


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", ["deepseek-v3-fp8-tp2", "qwen3-moe-fp8-tp2"])
def test_an_fp8_engine_gets_what_vllms_own_loader_would_have_put_there(daemon, groups, name, traced):
    case = Case(name)
    groups.append(Trainer(daemon.agent_socket, case.config, "hf", [case.checkpoint]))
    observed = [[meta for meta, _ in rank.values()] for rank in case.ranks]
    groups.append(EngineRanks(daemon.agent_socket, "engine", case.config, "vllm:tp2", observed, case.rows if traced else None))
    assert groups[1].notes == [[], []]
    groups[0].publish(1)
    groups[1].wait_version(1)
    for rank, params in zip(groups[1].ranks, case.ranks):
        assert rank.params.keys() == params.keys()
        for param, (_, flat) in params.items():
            assert np.array_equal(rank.params[param].view(flat.dtype).ravel(), flat), param
