"""What engines serve, summed by themselves and compared: over real dumps, against an oracle of the checkpoint, with
bytes of live stages changed behind everybody's back."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time

import numpy as np
import pytest

from conftest import BINARIES, Daemon, EngineRanks, Trainer, until
from content_oracle import root
from engine_oracle import engine_ranks
from test_fixtures import megatron_case
from test_fp8 import Case
from weightwire import AbortedError, Client, NotReadyError, RefusedError, StaleError, TensorMeta

DIGEST_MISMATCH = 64 + 28
MODELS = [
    ("megatron", "qwen2_tied", "mcore-pp2vpp2", "pp2,vpp2", ["vllm:tp2,pp2", "vllm:tp2,dp2", "sglang:tp2"]),
    ("megatron-te", "qwen3_moe", "tp2ep2etp2", "tp2,ep2,etp2,dp2", ["vllm:tp2,ep", "sglang:tp2,ep2"]),
    ("megatron", "deepseek_v3", "mcore-tp2ep2etp1pp2-seq", "tp2,ep2,etp1,pp2", ["vllm:tp2,pp2", "sglang:tp2,ep2"]),
]


def add_engine(groups: list, agent: str, name: str, config: dict, hf: dict, spec: str) -> EngineRanks:
    if spec == "hf":
        observed = [[meta for meta, _ in hf.values()]]
    else:
        observed = [[TensorMeta(n, p.dtype, p.bits.shape) for n, p in rank.items()]
                    for rank in engine_ranks(config, hf, spec)]
    groups.append(EngineRanks(agent, name, config, spec, observed))
    return groups[-1]


class Job:
    """A real Megatron dump published to engines "a", "b", … of some layouts."""

    def __init__(self, daemon, groups: list, kind: str, model: str, case: str, sizes: str, specs: list[str]):
        self.daemon = daemon
        config, self.hf, spec, shards = megatron_case(kind, model, case, sizes)
        self.trainer = Trainer(daemon.agent_socket, config, spec, shards)
        groups.append(self.trainer)
        self.engines = [add_engine(groups, daemon.agent_socket, name, config, self.hf, s)
                        for name, s in zip("abcdef", specs)]
        self.client = Client(daemon.grpc)

    def publish(self, version: int) -> None:
        self.trainer.publish(version)
        for engine in self.engines:
            engine.wait_version(version)
        self.client.wait_version(version, timeout=30)

    def wwctl(self, *arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run([BINARIES / "wwctl", *arguments, "--address", self.daemon.grpc], capture_output=True,
                              text=True, timeout=60)

    def flip(self, engine: int, rank: int, tensor: str, byte: int, mask: int = 1) -> None:
        """Changes a byte of what a rank serves, in the memory that its agent owns: the rank itself cannot write it."""
        array = self.engines[engine].ranks[rank].params[tensor]
        address = array.__array_interface__["data"][0] + byte
        for line in open("/proc/self/maps"):
            where, _, offset, _, inode = line.split()[:5]
            start, end = (int(part, 16) for part in where.split("-"))
            if start <= address < end:
                break
        folder = f"/proc/{self.daemon.pid}/fd"
        fd = next(f for f in os.listdir(folder) if os.stat(f"{folder}/{f}").st_ino == int(inode))
        at = address - start + int(offset, 16)
        with open(f"{folder}/{fd}", "r+b", buffering=0) as memory:
            before = os.pread(memory.fileno(), 1, at)[0]
            os.pwrite(memory.fileno(), bytes([before ^ mask]), at)
        assert array.view(np.uint8).reshape(-1)[byte] == before ^ mask


@pytest.fixture
def job(daemon, groups):
    made = Job(daemon, groups, "megatron", "qwen2_tied", "mcore-tp2pp2", "tp2,pp2", ["vllm:tp2", "vllm:tp2", "hf"])
    made.publish(1)
    return made


@pytest.mark.parametrize("kind,model,case,sizes,specs", MODELS)
def test_every_layout_has_the_root_of_the_checkpoint(daemon, groups, kind, model, case, sizes, specs):
    job = Job(daemon, groups, kind, model, case, sizes, specs)
    job.publish(1)
    result = job.client.verify()
    assert result.equal and not result.differences and len(result.engines) == len(specs)
    assert {e.root for e in result.engines} == {root(job.hf)}
    assert {e.tensors for e in result.engines} == {len(job.hf)} and {e.tensors_partial for e in result.engines} == {0}
    assert job.client.status().epochs[0].content_root == root(job.hf)


@pytest.mark.parametrize("name", ["deepseek-v3-fp8-tp2", "qwen3-moe-fp8-tp2"])
def test_an_fp8_engine_has_the_root_of_its_own_class(daemon, groups, name):
    case = Case(name)
    groups.append(Trainer(daemon.agent_socket, case.config, "hf", [case.checkpoint]))
    observed = [[meta for meta, _ in rank.values()] for rank in case.ranks]
    groups.append(EngineRanks(daemon.agent_socket, "fp8", case.config, "vllm:tp2", observed))
    groups[0].publish(1)
    groups[1].wait_version(1)
    client = Client(daemon.grpc)
    client.wait_version(1, timeout=30)
    result = client.verify()
    assert result.equal and result.engines[0].root == root(case.checkpoint)
    assert any(meta.dtype == "F8_E4M3" for meta, _ in case.checkpoint.values())


def test_another_version_has_another_root_and_the_same_class(job):
    first = job.client.verify().engines[0]
    for params in job.trainer.params:
        for array in params.values():
            array.view(np.uint8).reshape(-1)[::2] ^= 1
    job.publish(2)
    second = job.client.verify()
    assert second.equal and second.engines[0].root != first.root
    assert second.engines[0].content_class == first.content_class
    roots = {e.version: e.content_root for e in job.client.status().epochs}
    assert roots == {1: first.root, 2: second.engines[0].root}


def test_one_bit_is_found_and_engine_rank_and_tensor_are_named(job):
    job.flip(1, 1, "model.layers.2.mlp.gate_up_proj.weight", 101, 0x40)
    for _ in range(2):  # a difference is not taken for what is right
        result = job.client.verify()
        assert not result.equal and result.differences_total == 1
        (found,) = result.differences
        # The trainer's tensor lies in engine b in the layout of engine a: so the rank is known exactly.
        assert (found.engine, found.ranks, found.tensor) == ("b", (1,), "model.layers.2.mlp.gate_proj.weight")
        assert "differs from a and 1 more" in found.text and "b/1" in found.text
    told = job.wwctl("verify")
    assert told.returncode == DIGEST_MISMATCH, told
    assert "b: model.layers.2.mlp.gate_proj.weight: differs from a and 1 more" in told.stdout
    assert json.loads(job.wwctl("verify", "--json").stdout)["differences"][0]["engine"] == "b"
    job.flip(1, 1, "model.layers.2.mlp.gate_up_proj.weight", 101, 0x40)
    assert job.client.verify().equal
    told = job.wwctl("verify", "--group", "b")
    assert told.returncode == 0 and root(job.hf) in told.stdout


def test_what_all_engines_lost_together_differs_from_what_was_found_before(job):
    assert job.client.verify().equal
    for engine in (0, 1):
        for rank in (0, 1):
            job.flip(engine, rank, "model.norm.weight", 3)
    job.flip(2, 0, "model.norm.weight", 3)
    result = job.client.verify()
    assert {(d.engine, d.tensor) for d in result.differences} == {(e, "model.norm.weight") for e in "abc"}
    assert all("was found for this epoch before" in d.text for d in result.differences)
    assert not job.client.verify("a").equal


def test_replicas_of_one_engine_are_compared_with_each_other(job):
    job.flip(0, 1, "model.layers.0.input_layernorm.weight", 7)
    result = job.client.verify("a")
    found = result.differences[0]
    assert (found.engine, found.ranks) == ("a", (0, 1)) and "a/1 has other bytes than a/0" in found.text
    assert found.tensor == "model.layers.0.input_layernorm.weight"


def test_padding_is_not_content(job):
    embedding = job.engines[0].ranks[1].params["model.embed_tokens.weight"]
    rows = job.hf["model.embed_tokens.weight"][1].shape[0]
    assert embedding.shape[0] * 2 > rows, "the vocabulary is padded"
    last = embedding.nbytes - 1
    job.flip(0, 1, "model.embed_tokens.weight", last)
    assert job.client.verify().equal
    inside = (rows - embedding.shape[0]) * embedding.nbytes // embedding.shape[0] - 1
    job.flip(0, 1, "model.embed_tokens.weight", inside)
    assert not job.client.verify().equal


def test_epochs_go_on_while_it_runs_and_it_is_never_wrong(job):
    outcomes = []
    for version in range(2, 8):
        releases = [p.publish(version) for p in job.trainer.publishers]
        outcomes.append(job.client.verify(timeout=30))
        for release in releases:
            release.wait_released(30)
        job.client.wait_version(version, timeout=30)
    for result in outcomes:
        assert result.differences_total == 0
        assert all(engine.why is None or engine.superseded for engine in result.engines), result
    assert job.client.verify().equal


def test_who_serves_nothing_and_who_is_not_there_is_said(daemon):
    client = Client(daemon.grpc)
    with pytest.raises(NotReadyError, match="no engine serves anything yet"):
        client.verify()
    with pytest.raises(RefusedError, match="no engine 'x' is here"):
        client.verify("x")


@pytest.fixture
def sweeping(tmp_path):
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0",
                     verify_every=2)
    yield started
    assert started.stop() == 0


def test_every_second_version_is_swept(sweeping, groups):
    def outcome(name: str) -> int:
        return int(sweeping.counter(f'weightwire_content_verifications_total{{outcome="{name}"}}'))

    job = Job(sweeping, groups, "megatron", "qwen2_tied", "mcore-tp2pp2", "tp2,pp2", ["vllm:tp2"])
    for version in range(1, 5):
        job.publish(version)
        until("a sweep after every second version", lambda: outcome("equal") == version // 2)
    assert (outcome("different"), outcome("incomplete")) == (0, 0)
    assert {e.version for e in job.client.status().epochs if e.content_root} == {2, 4}


class Copies:
    """Two ranks that serve from copies, and what they say of them."""

    def __init__(self, daemon, groups):
        self.says, self.asked, self.hold = [None, None], [0, 0], threading.Event()
        self.hold.set()
        config, hf, spec, shards = megatron_case("megatron", "qwen2_tied", "mcore-tp2pp2", "tp2,pp2")
        observed = [[TensorMeta(n, p.dtype, p.bits.shape) for n, p in rank.items()] for rank in engine_ranks(config, hf, "vllm:tp2")]
        self.trainer = Trainer(daemon.agent_socket, config, spec, shards)
        self.engine = EngineRanks(daemon.agent_socket, "vllm", config, "vllm:tp2", observed, on_copy_check=self.check)
        groups += [self.trainer, self.engine]
        self.client = Client(daemon.grpc)
        self.publish(1)

    def publish(self, version):
        self.trainer.publish(version)
        self.engine.wait_version(version)
        self.client.wait_version(version, timeout=30)

    def check(self, rank):
        self.asked[rank] += 1
        self.hold.wait(20)
        if isinstance(self.says[rank], RuntimeError):
            raise self.says[rank]
        return self.says[rank]


class TestCopies:
    @pytest.fixture
    def copies(self, daemon, groups):
        return Copies(daemon, groups)

    def test_every_rank_is_asked_and_what_is_well_is_equal(self, copies):
        for times in (1, 2):
            assert copies.client.verify().equal and copies.asked == [times, times]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_what_a_rank_lost_is_a_difference_by_name(self, daemon, copies, rank):
        copies.says[rank] = AbortedError("2 parameters are not what was installed", code="ABORTED", reason="digest_mismatch",
                                         rank=f"vllm/{rank}", tensor="model.norm.weight")
        result = copies.client.verify()
        assert not result.equal and [(d.engine, d.tensor) for d in result.differences] == [("vllm", "model.norm.weight")]
        assert "2 parameters are not what was installed" in result.differences[0].text
        assert f"vllm/{rank}" in str(result.engines[0].why)
        told = subprocess.run([BINARIES / "wwctl", "verify", "--address", daemon.grpc], capture_output=True, text=True, timeout=60)
        assert told.returncode == DIGEST_MISMATCH and "vllm: model.norm.weight: 2 parameters are not" in told.stdout
        assert int(daemon.counter('weightwire_content_verifications_total{outcome="different"}')) == 2
        copies.says[rank] = None
        assert copies.client.verify().equal

    def test_a_version_that_is_being_installed_is_superseded(self, copies):
        copies.says[0] = StaleError("superseded: a version is being installed", code="ABORTED", reason="stale_epoch")
        result = copies.client.verify()
        assert not result.equal and not result.differences and result.engines[0].superseded

    def test_who_cannot_look_says_so(self, copies):
        copies.says[1] = RuntimeError("planted")
        result = copies.client.verify()
        assert not result.equal and not result.differences
        assert "RuntimeError: planted" in str(result.engines[0].why)

    def test_who_does_not_answer_is_not_waited_for_and_serves_on(self, copies):
        copies.hold.clear()
        before = time.monotonic()
        result = copies.client.verify(timeout=3)
        assert time.monotonic() - before < 10 and "no sums before the verification's deadline" in str(result.engines[0].why)
        copies.publish(2)  # neither are versions held up
        copies.publish(3)
        copies.hold.set()
        until("an answer", lambda: copies.client.verify().equal)

    def test_a_version_that_begins_to_overwrite_it_ends_the_question(self, copies):
        copies.hold.clear()
        found = []
        asking = threading.Thread(target=lambda: found.append(copies.client.verify(timeout=30)))
        asking.start()
        until("both ranks were asked", lambda: copies.asked == [1, 1])
        copies.publish(2)
        copies.publish(3)  # is written to where version 1 lay
        asking.join(15)
        assert found and found[0].engines[0].superseded
        copies.hold.set()
