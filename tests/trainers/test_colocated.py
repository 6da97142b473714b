"""Weights from a trainer's parameters straight into an engine's, within one process and between two: every element against an
oracle that shares no code with the planner, at odd sizes, with casts, replicas, padding and tied weights."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from demo import checkpoint, oracle
from weightwire import RefusedError, UnavailableError, colocated
from weightwire.boxes import Box, Held
from weightwire.memory import TensorMeta

#: Odd: a vocabulary that no TP divides, an intermediate size whose shards are uneven.
CONFIG = {**checkpoint.SMALL, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 3, "vocab_size": 251}
TEXT = json.dumps(CONFIG)


def floats(version: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(version)
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in checkpoint.hf_shapes(CONFIG).items()}


def as_bf16(array: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even."""
    bits = array.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def megatron(hf: dict[str, np.ndarray], tp: int, pp: int = 1) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in oracle.megatron(CONFIG, hf, tp, pp, rank)} for rank in range(tp * pp)]


def engine(tp: int, fill: float = -7.0) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.full(shape, fill, dtype=torch.bfloat16) for name, shape in oracle.vllm_shapes(CONFIG, tp).items()} for _ in range(tp)]


def assert_holds(params: dict[str, torch.Tensor], hf: dict[str, np.ndarray], tp: int, rank: int, fill: float = -7.0) -> None:
    names = set()
    for name, want in oracle.vllm(CONFIG, {n: as_bf16(a) for n, a in hf.items()}, tp, rank):
        got = params[name].view(torch.uint16).numpy()
        assert np.array_equal(got[:len(want)], want), (rank, name)
        assert (params[name][len(want):] == fill).all(), f"the padding of {name} was written to"
        names.add(name)
    assert names == params.keys()


@pytest.mark.parametrize("layout, tp", [("megatron:tp2,pp1", 1), ("megatron:tp2,pp1", 2), ("megatron:tp1,pp3", 2), ("megatron:tp4,pp1", 2)])
def test_every_element_comes_from_the_rank_that_holds_it_and_is_cast_on_the_way(layout, tp):
    sizes = [int(word[2:]) for word in layout.partition(":")[2].split(",")]
    shards = megatron(floats(1), *sizes)
    exports = [colocated.export(shard, config=TEXT, layout=layout, rank=rank).export for rank, shard in enumerate(shards)]
    hand_overs = [colocated.HandOver(colocated.held_by(TEXT, f"vllm:tp{tp}", rank), exports) for rank in range(tp)]
    params = engine(tp)
    for version in (1, 2, 3):  # the trainer writes to the same memory; nothing is exported again
        hf = floats(version)
        for mine, new in zip(shards, megatron(hf, *sizes)):
            for name, tensor in new.items():
                mine[name].copy_(tensor)
        for rank, hand_over in enumerate(hand_overs):
            written = hand_over.install(params[rank], version, verify=True)
            assert hand_over.version == version and written == hand_over.bytes > 0
            assert_holds(params[rank], hf, tp, rank)


def test_parameters_that_lie_in_one_flat_buffer_are_read_and_written_where_they_lie():
    def flat(tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        buffer = torch.full((3 + sum(t.numel() + 2 for t in tensors.values()),), 99.0, dtype=next(iter(tensors.values())).dtype)
        views, at = {}, 3
        for name, tensor in tensors.items():
            views[name] = buffer[at:at + tensor.numel()].view(tensor.shape)
            views[name].copy_(tensor)
            at += tensor.numel() + 2
        return buffer, views
    shards = [flat(shard)[1] for shard in megatron(floats(6), 2)]
    exports = [colocated.export(shard, config=TEXT, layout="megatron:tp2,pp1", rank=rank).export for rank, shard in enumerate(shards)]
    buffer, params = flat(engine(1)[0])
    around = buffer == 99
    colocated.HandOver(colocated.held_by(TEXT, "vllm:tp1", 0), exports).install(params, 1, verify=True)
    assert_holds(params, floats(6), 1, 0)
    assert (buffer[around] == 99).all() and around.sum() == 3 + 2 * len(params)


_TRAINER = """
import json, pickle, sys
sys.path[:0] = json.loads(sys.argv[1])
import test_colocated as t
from weightwire import colocated
shards = t.megatron(t.floats(1), 2)
exporters = [colocated.export(s, config=t.TEXT, layout="megatron:tp2,pp1", rank=r) for r, s in enumerate(shards)]
sys.stdout.buffer.write(pickle.dumps([e.export for e in exporters]).hex().encode() + b"\\n")
sys.stdout.buffer.flush()
for line in sys.stdin:
    for mine, new in zip(shards, t.megatron(t.floats(int(line)), 2)):
        for name, tensor in new.items():
            mine[name].copy_(tensor)
    for e in exporters:
        e.ready()
    print("ready", flush=True)
"""


def test_a_trainers_process_hands_over_to_another_one_which_keeps_no_copy():
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, json.dumps(sys.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        exports = pickle.loads(bytes.fromhex(trainer.stdout.readline().decode()))
        assert "pid" in exports[0].name and str(trainer.pid) in exports[0].name
        hand_overs = [colocated.HandOver(colocated.held_by(TEXT, "vllm:tp2", rank), exports) for rank in range(2)]
        params = engine(2)
        for version in (2, 3, 4):
            trainer.stdin.write(f"{version}\n".encode())
            trainer.stdin.flush()
            assert trainer.stdout.readline() == b"ready\n"
            for rank, hand_over in enumerate(hand_overs):
                hand_over.install(params[rank], version)
                assert_holds(params[rank], floats(version), 2, rank)
    finally:
        trainer.kill()
        trainer.wait()


def test_whole_tensors_of_one_rank_and_a_rank_of_which_others_have_copies():
    hf = floats(5)
    whole = {name: torch.from_numpy(a) for name, a in hf.items()}
    one = colocated.export(whole, config=TEXT, layout="hf", rank=0).export
    params = engine(1)[0]
    colocated.HandOver(colocated.held_by(TEXT, "vllm:tp1", 0), [one]).install(params, 1)
    assert_holds(params, hf, 1, 0)
    # Two ranks that hold all of it (data parallel): each element is read once.
    again = [replace(one, rank=rank, ranks=2) for rank in (0, 1)]
    hand_over = colocated.HandOver(colocated.held_by(TEXT, "vllm:tp1", 0), again)
    assert hand_over.install(engine(1)[0], 1) == sum(2 * a.size for a in hf.values())


def held(shape, begin=None, name="w", dtype="F32", extent=None, stride=None) -> Held:
    return Held(TensorMeta(name, dtype, tuple(shape)), [Box("w", tuple(begin or [0] * len(shape)), tuple(extent or shape), 0, tuple(stride or (shape[1], 1)))])


def test_overlapping_sources_are_cut_so_that_every_element_is_written_once():
    whole = torch.arange(35, dtype=torch.float32).view(7, 5)
    parts = [((0, 0), whole[:4, :3]), ((2, 1), whole[2:, 1:]), ((0, 0), whole[:2]), ((3, 0), whole[3:, :2])]
    exports = [colocated.export_boxes({"w": part.contiguous()}, [held(part.shape, begin)], rank=rank, ranks=len(parts)).export
               for rank, (begin, part) in enumerate(parts)]
    hand_over = colocated.HandOver([held((7, 5))], exports)
    into = torch.zeros(7, 5)
    assert hand_over.install({"w": into}, 1) == 35 * 4 and torch.equal(into, whole)
    turned = torch.zeros(5, 7)  # held the other way round
    colocated.HandOver([held((5, 7), extent=(7, 5), stride=(1, 7))], exports).install({"w": turned}, 1)
    assert torch.equal(turned, whole.t())


def refusal(do, *words: str) -> RefusedError:
    with pytest.raises(RefusedError) as found:
        do()
    assert all(word in f"{found.value} {found.value.remedy}" for word in words), found.value
    return found.value


def test_what_does_not_fit_is_refused_by_name():
    shards = megatron(floats(1), 2)
    exports = [colocated.export(s, config=TEXT, layout="megatron:tp2,pp1", rank=r).export for r, s in enumerate(shards)]
    target = colocated.held_by(TEXT, "vllm:tp1", 0)
    name = "decoder.layers.1.mlp.linear_fc2.weight"

    def export(tensors, rank=0):
        return lambda: colocated.export(tensors, config=TEXT, layout="megatron:tp2,pp1", rank=rank)
    assert refusal(export({n: t for n, t in shards[0].items() if n != name}), "gives no").tensor == name
    assert refusal(export({**shards[0], name: torch.zeros(3, 3)}), "by the layout rank 0 holds").reason == "shape_mismatch"
    assert refusal(export({**shards[0], name: shards[0][name].t().contiguous().t()}), "not contiguous").tensor == name
    assert refusal(export({**shards[0], name: torch.empty_like(shards[0][name], device="meta")}), "no memory").tensor == name
    refusal(export(shards[0], 2), "has no rank 2")
    assert refusal(lambda: colocated.HandOver(target, exports[:1]), "no export of rank 1", "agents").reason == "missing_rank"
    refusal(lambda: colocated.HandOver(target, [exports[0], exports[0]]), "not those of the ranks of one trainer")
    refusal(lambda: colocated.HandOver(target, [replace(exports[0], host="elsewhere/1"), exports[1]]), "another host", "hostIPC", "agents")
    counts = {**shards[0], name: torch.zeros(shards[0][name].shape, dtype=torch.int32)}
    other = colocated.export(counts, config=TEXT, layout="megatron:tp2,pp1", rank=0).export
    assert refusal(lambda: colocated.HandOver(target, [other, exports[1]]), "torch.int32", "bfloat16").reason == "dtype_mismatch"
    with pytest.raises(UnavailableError) as gone:
        colocated.HandOver(target, [replace(exports[0], handles=b"nothing"), exports[1]])
    assert "trainer/0" in gone.value.rank and "Export again" in gone.value.remedy
    outside = Held(TensorMeta("w", "F32", (4, 5)), [Box("w", (0, 0), (5, 5), 0, (5, 1))])
    one = colocated.export_boxes({"w": torch.zeros(7, 5)}, [held((7, 5))], rank=0, ranks=1).export
    refusal(lambda: colocated.HandOver([outside], [one]), "leaves its tensor")
    refusal(lambda: colocated.HandOver([held((9, 5))], [one]), "nobody hands over w[7:9, 0:5]")


def test_parameters_are_of_no_version_until_an_install_has_ended():
    one = colocated.export_boxes({"w": torch.ones(7, 5), "v": torch.ones(2, 5)}, [
        held((7, 5)), Held(TensorMeta("v", "F32", (2, 5)), [Box("v", (0, 0), (2, 5), 0, (5, 1))])], rank=0, ranks=1).export
    wanted = [held((7, 5)), Held(TensorMeta("v", "F32", (2, 5)), [Box("v", (0, 0), (2, 5), 0, (5, 1))])]
    hand_over = colocated.HandOver(wanted, [one])
    good = {"w": torch.zeros(7, 5), "v": torch.zeros(2, 5)}
    hand_over.install(good, 4)
    assert hand_over.version == 4
    refusal(lambda: hand_over.install({"w": good["w"]}, 5), "no parameter v")
    assert hand_over.version == 4  # nothing was touched
    refusal(lambda: hand_over.install({**good, "v": torch.zeros(3, 5)}, 5), "planned was")
    assert hand_over.version is None  # w is of version 5, v of 4
    hand_over.install(good, 6)
    assert hand_over.version == 6


def test_verify_finds_a_trainer_that_goes_on_writing(monkeypatch):
    source = torch.zeros(7, 5)
    hand_over = colocated.HandOver([held((7, 5))], [colocated.export_boxes({"w": source}, [held((7, 5))], rank=0, ranks=1).export])
    compare = torch.equal

    def meanwhile(a, b):
        source[3, 3] += 1
        return compare(a, source)
    monkeypatch.setattr(torch, "equal", meanwhile)
    with pytest.raises(Exception) as found:
        hand_over.install({"w": torch.zeros(7, 5)}, 1, verify=True)
    assert found.value.reason == "digest_mismatch" and found.value.tensor == "w" and hand_over.version is None


def test_rows_of_a_recorded_loader_are_boxes_of_what_it_reads():
    rows = [{"src": "w", "ops": [("narrow", 0, 2, 3)], "param": "p", "offset": 5, "shape": [3, 5], "stride": [5, 1], "dtype": "float32"}]
    made = colocated.held_of_rows(rows, [TensorMeta("p", "F32", (4, 5))])
    assert made == [Held(TensorMeta("p", "F32", (4, 5)), [Box("w", (2, 0), (3, 5), 5, (5, 1))])]
    refusal(lambda: colocated.held_of_rows([{**rows[0], "ops": [("t",)]}], [TensorMeta("p", "F32", (4, 5))]), "no block of it")




class Engine:
    """Stands for a vLLM: what is asked of it, in order."""

    def __init__(self, ranks: int = 2):
        from weightwire.vllm.ports import LlmPort
        self.said: list[str] = []
        self.sleeping, self.broken, ranks_ = False, {}, range(ranks)

        class Port(LlmPort):
            def ask(port, method, arguments, timeout):
                self.said.append(method)
                return [self.broken.get((method, rank), {}) for rank in ranks_]

            def asleep(port, timeout):
                return self.sleeping

            def reset_prefix_cache(port, running, timeout):
                self.said.append("reset")
                return True

            def pause(port, mode, timeout):
                self.said.append(f"pause {mode}")

            def resume(port, timeout):
                self.said.append("resume")

            def wake_up(port, tag, timeout):
                self.said.append(f"wake {tag}")

            def set_version(port, version, timeout):
                self.said.append(f"version {version}")
        self.port = Port(None)

    def take(self) -> list[str]:
        said, self.said = self.said, []
        return said


@pytest.fixture
def beside(monkeypatch):
    import weightwire.vllm.colocated as module
    engine = Engine()
    monkeypatch.setattr(module, "port_of", lambda _: engine.port)
    return engine, module.Colocated(engine, [], pause="keep")


def test_an_engine_answers_again_only_when_every_rank_has_the_version(beside):
    engine, driver = beside
    assert engine.take() == []
    driver.install(3)
    assert engine.take() == ["weightwire_colocate", "pause keep", "weightwire_hand_over", "reset", "version 3", "resume"]
    assert driver.version == 3
    engine.broken["weightwire_hand_over", 1] = {"error": "OSError: lost", "remedy": "mend it", "refused": False}
    with pytest.raises(Exception) as failed:
        driver.install(4)
    assert failed.value.rank == "engine/1" and "1 of 2 ranks: OSError: lost" in str(failed.value) and failed.value.remedy == "mend it"
    assert engine.take() == ["pause keep", "weightwire_hand_over"] and driver.version is None  # it stays paused
    engine.broken.clear()
    engine.sleeping = True  # vLLM says so of a paused one
    driver.install(5)
    assert engine.take() == ["weightwire_hand_over", "reset", "version 5", "resume"] and driver.version == 5


def test_an_engine_that_sleeps_is_not_touched_until_it_is_woken_with_a_version(beside):
    from weightwire import NotReadyError
    engine, driver = beside
    engine.sleeping = True
    with pytest.raises(NotReadyError) as refused:
        driver.install(3)
    assert "wake_up" in refused.value.remedy and engine.take() == []
    driver.wake_up(3)
    assert engine.take() == ["weightwire_colocate", "wake weights", "weightwire_hand_over", "reset", "version 3", "wake kv_cache"]
    engine.broken["weightwire_hand_over", 0] = {"error": "OSError: lost", "remedy": "", "refused": False}
    with pytest.raises(Exception, match="lost"):
        driver.wake_up(4)
    assert engine.take() == ["wake weights", "weightwire_hand_over"], "without a cache nothing is scheduled"


def test_exports_that_do_not_fit_leave_the_engine_answering(beside):
    engine, driver = beside
    engine.broken["weightwire_colocate", 0] = {"error": "RefusedError: no w", "remedy": "", "refused": True}
    refusal(lambda: driver.install(3), "1 of 2 ranks: RefusedError: no w")
    assert engine.take() == ["weightwire_colocate"]
