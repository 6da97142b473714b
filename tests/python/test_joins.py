"""Trainers that describe their tensors by boxes, as transformers holds them, and engines that describe theirs by a scheme
or by what a loader was seen to do: bytes through the service against NumPy's own cuts. Every family and every pair is in
tests/unit/coordinator/joins_test.cc."""

from __future__ import annotations

import json
import pathlib
import subprocess

import numpy as np
import pytest

from conftest import BINARIES, DATA, EngineRanks
from engine_oracle import engine_ranks
from weightwire import Client, Publisher, RefusedError, Subscriber, TensorMeta, boxes

BITS = {"BF16": np.uint16, "F32": np.uint32}
TORCH = {"BF16": "bfloat16", "F32": "float32"}


def listing(name: str) -> tuple[dict, dict]:
    """config.json, and random bits with names, dtypes and shapes as transformers saves them."""
    read = json.loads((DATA / f"transformers/{name}.json").read_text())
    rng = np.random.default_rng(7)
    return read["config"], {n: (TensorMeta(n, dtype, tuple(shape)),
                                rng.integers(0, 1 << 15, shape).astype(BITS[dtype]))
                            for n, (dtype, shape) in read["tensors"].items()}


class Boxes:
    """A trainer of one rank by explicit boxes."""

    def __init__(self, agent: str, tensors: dict):
        self.publisher = Publisher(rank=0, world_size=1, agent=agent)
        metas = {name: meta for name, (meta, _) in tensors.items()}
        self.arrays = self.publisher.bind_boxes(boxes.submission(metas, [boxes.whole(m) for m in metas.values()]))
        self.fill(tensors)

    def fill(self, tensors: dict):
        for name, (_, bits) in tensors.items():
            self.arrays[name].view(bits.dtype)[...] = bits

    def publish(self, version: int):
        self.publisher.publish(version, deadline=30).wait_released(60)

    def close(self):
        self.publisher.close()


class BoxEngine(EngineRanks):
    """An engine of one rank that holds everything whole, by boxes."""

    def __init__(self, agent: str, name: str, tensors: dict):
        self.metas = {n: meta for n, (meta, _) in tensors.items()}
        super().__init__(agent, name, {}, "", [list(self.metas.values())])

    def bind(self, subscriber: Subscriber, *_):
        return subscriber.bind_submission(boxes.submission(self.metas, [boxes.whole(m) for m in self.metas.values()]))


def recorded(tensors: dict, rank: int) -> tuple[list[dict], dict]:
    """What a loader of two ranks does that gives each one half along the first even dimension from the end, and fuses
    nothing; and what the rank then holds."""
    rows, held = [], {}
    for name, (meta, bits) in tensors.items():
        dim = next((d for d in reversed(range(len(meta.shape))) if meta.shape[d] % 2 == 0), None)
        ops, part = [], bits
        if dim is not None:
            half = meta.shape[dim] // 2
            ops, part = [("narrow", dim, rank * half, half)], np.split(bits, 2, dim)[rank]
        held["engine." + name] = part
        rows.append(dict(src=name, ops=ops, param="engine." + name, offset=0, shape=list(part.shape),
                         stride=list(boxes.row_major(part.shape)), dtype=TORCH[meta.dtype]))
    return rows, held


def add_traced(groups: list, agent: str, name: str, config: dict, tensors: dict, spec: str = "",
               checkpoint: list | None = None) -> list[dict]:
    """Two ranks; what each must hold."""
    rows, held = zip(*(recorded(tensors, rank) for rank in range(2)))
    dtypes = {"engine." + n: meta.dtype for n, (meta, _) in tensors.items()}
    groups.append(EngineRanks(agent, name, config, spec, [[TensorMeta(n, dtypes[n], p.shape) for n, p in h.items()]
                                                          for h in held], list(rows), checkpoint=checkpoint or ()))
    return list(held)


def check(engine: EngineRanks, ranks: list[dict]):
    for subscriber, held in zip(engine.ranks, ranks, strict=True):
        for name, bits in held.items():
            assert np.array_equal(subscriber.params[name].view(bits.dtype).reshape(bits.shape), bits), name


def gpt_oss_experts(tensors: dict, rank: int) -> dict:
    """What vLLM and SGLang hold of the first layer's experts at tp2: gate and up alternate in the checkpoint's columns."""
    at, half = "model.layers.0.mlp.experts.", slice(rank * 26, rank * 26 + 26)
    fused, down = tensors[at + "gate_up_proj"][1], tensors[at + "down_proj"][1]
    bias = tensors[at + "gate_up_proj_bias"][1]
    return {"w13_weight": np.concatenate([fused[:, :, 0::2][:, :, half], fused[:, :, 1::2][:, :, half]], 2).swapaxes(1, 2),
            "w13_bias": np.concatenate([bias[:, 0::2][:, half], bias[:, 1::2][:, half]], 1),
            "w2_weight": down[:, half].swapaxes(1, 2)}


def shapes_of(config: pathlib.Path, spec: str, ranks: int) -> list[list[TensorMeta]]:
    """What every rank of a spec holds by the scheme: names and shapes only."""
    def ask(rank: int) -> list[TensorMeta]:
        said = subprocess.run([BINARIES / "wwctl", "layout", "show", "--config", config, "--spec", spec, "--rank", str(rank),
                               "--json"], check=True, capture_output=True, text=True).stdout
        return [TensorMeta(t["name"], t["dtype"], tuple(t["shape"])) for t in json.loads(said)["tensors"]]
    return [ask(rank) for rank in range(ranks)]


def test_gpt_oss_by_boxes_reaches_schemes_boxes_and_traces(daemon, groups, tmp_path):
    config, tensors = listing("gpt_oss-plain")
    (tmp_path / "config.json").write_text(json.dumps(config))
    agent = daemon.agent_socket
    groups.append(Boxes(agent, tensors))
    trainer = groups[0]
    hf = EngineRanks(agent, "hf", config, "hf", [[meta for meta, _ in tensors.values()]])
    groups.append(hf)
    cut = {}
    for spec in ("vllm:tp2", "sglang:tp2"):
        cut[spec] = EngineRanks(agent, spec.split(":")[0], config, spec, shapes_of(tmp_path / "config.json", spec, 2))
        groups.append(cut[spec])
    held = add_traced(groups, agent, "traced", config, tensors)
    traced = groups[-1]
    alone = add_traced(groups, agent, "alone", {**config, "model_type": "unlisted"}, tensors,
                       checkpoint=[meta for meta, _ in tensors.values()])
    trainer.publish(1)
    for engine in groups[1:]:
        engine.wait_version(1)
    check(hf, [{n: bits for n, (_, bits) in tensors.items()}])
    check(traced, held)
    check(groups[-1], alone)
    for engine in cut.values():
        for rank, subscriber in enumerate(engine.ranks):
            for name, bits in gpt_oss_experts(tensors, rank).items():
                full = next(n for n in subscriber.params if n.startswith("model.layers.0.") and n.endswith(name))
                assert np.array_equal(subscriber.params[full].view(np.uint16), bits), full

    # What they serve is one content, whatever shape each of them describes; and who comes late is filled from any.
    late = BoxEngine(agent, "late", tensors)
    groups.append(late)
    late.wait_version(1)
    check(late, [{n: bits for n, (_, bits) in tensors.items()}])
    with Client(daemon.grpc) as client:
        client.wait_version(1, timeout=30)
        found = client.verify()
    assert found.equal and len(found.engines) == 6
    assert len({(e.content_class, e.root) for e in found.engines}) == 1


@pytest.mark.parametrize("name", ["qwen3_moe-plain", "qwen2-tied", "llama-plain"])
def test_boxes_reach_engines_by_scheme_and_by_trace(daemon, groups, name):
    config, tensors = listing(name)
    agent = daemon.agent_socket
    groups.append(Boxes(agent, tensors))
    wanted = {}
    for spec in ("vllm:tp2", "sglang:tp2"):
        ranks = engine_ranks(config, tensors, spec)
        groups.append(EngineRanks(agent, spec.split(":")[0], config, spec,
                                  [[TensorMeta(n, p.dtype, p.bits.shape) for n, p in rank.items()] for rank in ranks]))
        wanted[groups[-1]] = ranks
    held = add_traced(groups, agent, "traced", config, tensors)
    groups[0].publish(1)
    for engine in groups[1:]:
        engine.wait_version(1)
    check(groups[-1], held)
    for engine, ranks in wanted.items():
        for subscriber, rank in zip(engine.ranks, ranks, strict=True):
            for tensor, p in rank.items():
                got = subscriber.params[tensor].view(p.bits.dtype)
                assert np.array_equal(got[p.filled], p.bits[p.filled]), tensor


MODEL = {"tomorrow.embed.weight": (50, 6), "tomorrow.block.0.mixer.in_proj": (4, 6, 10), "tomorrow.block.0.norm": (7,),
         "tomorrow.block.0.A_log": (3,), "tomorrow.scale": ()}


def test_a_model_of_no_family_by_trace_and_by_boxes(daemon, groups):
    """docs/layouts.md: an engine by trace and a trainer by boxes need no family."""
    rng = np.random.default_rng(3)
    tensors = {n: (TensorMeta(n, "F32", s), rng.integers(0, 1 << 31, s).astype(np.uint32)) for n, s in MODEL.items()}
    config, agent = {"model_type": "tomorrow"}, daemon.agent_socket
    metas = [meta for meta, _ in tensors.values()]
    rows, held = recorded(tensors, 0)
    observed = [TensorMeta(n, "F32", bits.shape) for n, bits in held.items()]
    with Subscriber(group="refused", rank=0, world_size=2, agent=agent) as subscriber:
        with pytest.raises(RefusedError, match="checkpoint=") as refused:
            subscriber.bind(config, "", observed, rows)
        assert refused.value.reason == "unknown_model"
        with pytest.raises(RefusedError, match="tomorrow.scale") as refused:
            subscriber.bind(config, "", observed, rows, metas[:-1])
        assert refused.value.reason == "tensor_missing"
    held = add_traced(groups, agent, "engine", config, tensors, "vllm:tp2", metas)
    assert [note for notes in groups[-1].notes for note in notes] == 2 * [
        "no scheme describes this engine's model: the recorded loader was compared with nothing"]
    trainer = Boxes(agent, tensors)
    groups.append(trainer)
    trainer.publish(1)
    groups[0].wait_version(1)
    check(groups[0], held)
