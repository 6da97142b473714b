"""What a user of the Python package sees: release, snapshot, errors with reasons, fencing, metrics."""

import os
import pathlib
import shutil
import signal
import subprocess
import urllib.request

import grpc
import numpy as np
import pytest

from conftest import EngineRanks, Trainer, stand_still, until
from demo import checkpoint, oracle
from weightwire import (AbortedError, Client, DeadlineError, NotReadyError, Publisher, RefusedError, StaleError,
                        TensorMeta, WeightwireError)
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc

CONFIG = {**checkpoint.SMALL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 251}


def checkpoint_of(seed: int) -> dict:
    rng = np.random.Generator(np.random.SFC64(seed))
    return {n: rng.integers(0, 1 << 16, s, dtype=np.uint16) for n, s in checkpoint.hf_shapes(CONFIG).items()}


def shards_of(hf: dict, tp=2, pp=2) -> list[dict]:
    return [{n: (TensorMeta(n, "BF16", a.shape), a) for n, a in oracle.megatron(CONFIG, hf, tp, pp, r)}
            for r in range(tp * pp)]


def trainer(daemon, seed=1) -> Trainer:
    return Trainer(daemon.agent_socket, CONFIG, "megatron:tp2,pp2", shards_of(checkpoint_of(seed)))


def engine(daemon, name="engine-a", tp=2) -> EngineRanks:
    observed = [TensorMeta(n, "BF16", s) for n, s in oracle.vllm_shapes(CONFIG, tp).items()]
    return EngineRanks(daemon.agent_socket, name, CONFIG, f"vllm:tp{tp}", [observed] * tp)


def load(t: Trainer, seed: int) -> dict:
    hf = checkpoint_of(seed)
    for params, shard in zip(t.params, shards_of(hf)):
        for name, (_, bits) in shard.items():
            params[name][...] = bits
    return hf


def assert_serves(e: EngineRanks, hf: dict) -> None:
    for rank, subscriber in enumerate(e.ranks):
        for name, want in oracle.vllm(CONFIG, hf, len(e.ranks), rank):
            assert np.array_equal(subscriber.params[name][:len(want)], want), (rank, name)


def test_versions_follow_each_other_and_each_is_complete(daemon, groups):
    groups += [trainer(daemon), engine(daemon, "engine-a", 1), engine(daemon, "engine-b", 2)]
    for version in (1, 2, 7):
        hf = load(groups[0], version)
        releases = groups[0].publish(version)
        assert len({r.epoch for r in releases}) == 1 and all(r.blocked_seconds > 0 for r in releases)
        for e in groups[1:]:
            e.wait_version(version)
            assert_serves(e, hf)


def test_a_snapshot_is_what_was_published_even_if_the_parameters_change_at_once(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    hf = load(groups[0], 5)
    groups[0].publish(1, mode="snapshot")
    load(groups[0], 6)
    groups[1].wait_version(1)
    assert_serves(groups[1], hf)


@pytest.mark.parametrize("mode", ["hold", "snapshot"])
def test_what_is_said_to_be_unchanged_is_not_read(daemon, groups, mode):
    """It is a lie here: what engines serve of it tells that nobody looked."""
    one = Trainer(daemon.agent_socket, CONFIG, "megatron:tp1", shards_of(checkpoint_of(1), 1, 1))
    groups += [one, engine(daemon, tp=1)]
    old = "decoder.final_layernorm.weight"
    for version in (1, 2):  # both buffers of the engine
        one.publish(version, mode=mode)
        groups[1].wait_version(version)
    new = checkpoint_of(2)
    for name, (_, bits) in shards_of(new, 1, 1)[0].items():
        one.params[0][name][...] = bits
    one.publish(3, mode=mode, unchanged=[old])
    groups[1].wait_version(3)
    assert_serves(groups[1], {**new, "model.norm.weight": checkpoint_of(1)["model.norm.weight"]})
    with pytest.raises(RefusedError, match="1 names are not of this rank's layout.*nothing"):
        one.publish(4, mode=mode, unchanged=[old, "nothing"])
    one.publish(4, mode=mode)
    groups[1].wait_version(4)
    assert_serves(groups[1], new)


def test_what_was_written_before_a_publish_that_failed_is_read_by_the_next_one(daemon, groups):
    one = Trainer(daemon.agent_socket, CONFIG, "megatron:tp1", shards_of(checkpoint_of(1), 1, 1))
    groups += [one, engine(daemon, tp=1)]
    names = list(one.params[0])
    for version in (1, 2):
        one.publish(version)
        groups[1].wait_version(version)
    for version, wrong, why in ((3, 2, StaleError), (4, -1, RefusedError)):
        new = checkpoint_of(version)
        for name, (_, bits) in shards_of(new, 1, 1)[0].items():
            one.params[0][name][...] = bits
        with pytest.raises(why):
            one.publish(wrong)
        one.publish(version, unchanged=names)
        groups[1].wait_version(version)
        assert_serves(groups[1], new)


def test_an_engine_that_joins_later_is_filled_without_the_trainer(daemon, groups):
    groups += [trainer(daemon), engine(daemon, "engine-a", 2)]
    hf = load(groups[0], 5)
    groups[0].publish(3)
    groups[1].wait_version(3)
    load(groups[0], 6)  # the trainer goes on; the joiner must not see this
    groups.append(engine(daemon, "engine-b", 1))
    groups[2].wait_version(3)
    assert_serves(groups[2], hf)


def test_an_old_version_is_refused_and_nothing_else_happens(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(4)
    with pytest.raises(StaleError) as refused:
        groups[0].publish(4)
    assert refused.value.reason == "stale_version" and "4" in str(refused.value)
    groups[0].publish(5)
    groups[1].wait_version(5)


@pytest.mark.parametrize("version", [-1, 0, 2**63, 2**64 - 1, 2**64])
def test_a_version_after_which_no_other_could_follow_is_refused(daemon, groups, version):
    groups += [trainer(daemon), engine(daemon)]
    with pytest.raises(RefusedError, match="version"):
        groups[0].publishers[0].publish(version)
    for last in (2**63 - 2, 2**63 - 1):
        groups[0].publish(last)
        groups[1].wait_version(last)


def test_a_publisher_that_was_closed_says_so(daemon):
    with Publisher(rank=0, world_size=1, agent=daemon.agent_socket) as publisher:
        pass
    with pytest.raises(StaleError) as refused:
        publisher.publish(1)
    assert refused.value.reason == "stale_incarnation" and "trainer/0" in str(refused.value)


def test_an_agent_that_does_not_answer_in_time_is_named_with_what_it_was_asked(daemon):
    with Publisher(rank=0, world_size=1, agent=daemon.agent_socket, timeout=10) as publisher:
        publisher._session.timeout = 1.0
        stand_still(daemon.pid)
        try:
            until("all its threads stand still", lambda: all(
                status.read_text().rpartition(")")[2].split()[0] == "T" for status in pathlib.Path(f"/proc/{daemon.pid}/task").glob("*/stat")))
            with pytest.raises(DeadlineError, match="did not answer Publish within 1.0 s") as silent:
                publisher.publish(1)
        finally:
            os.kill(daemon.pid, signal.SIGCONT)
    assert silent.value.rank == "trainer/0" and silent.value.reason == "deadline_exceeded" and silent.value.remedy


def test_without_an_engine_a_publish_is_given_up_at_its_deadline(daemon, groups):
    groups.append(trainer(daemon))
    with pytest.raises((DeadlineError, NotReadyError, AbortedError)) as given_up:
        groups[0].publish(1, deadline=0.5)
    assert given_up.value.reason in ("not_ready", "deadline_exceeded")


def test_a_wrong_shape_is_refused_with_a_diff_that_names_the_tensor(daemon):
    shard = shards_of(checkpoint_of(1))[0]
    tensors = [meta for meta, _ in shard.values()]
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    wrong = [TensorMeta(m.name, m.dtype, (m.shape[0] + 1, *m.shape[1:])) if m.name == name else m for m in tensors]
    with Publisher(rank=0, world_size=4, agent=daemon.agent_socket) as publisher:
        with pytest.raises(WeightwireError) as refused:
            publisher.bind(CONFIG, "megatron:tp2,pp2", wrong)
        assert refused.value.reason == "shape_mismatch"
        assert refused.value.tensor == name and name in str(refused.value)
        publisher.bind(CONFIG, "megatron:tp2,pp2", tensors)  # the service is unharmed


def fsdp_shards(hf: dict, world: int) -> list[dict]:
    """What FSDP2 leaves on each rank: torch.chunk along dimension 0, with short and empty last shards."""
    ranks = [{} for _ in range(world)]
    for name, bits in hf.items():
        rows = -(-bits.shape[0] // world)
        for rank in range(world):
            shard = bits[rank * rows:(rank + 1) * rows]
            ranks[rank][name] = TensorMeta(name, "BF16", shard.shape), shard
    return ranks


def test_uneven_and_empty_fsdp_shards_arrive(daemon, groups):
    hf = checkpoint_of(21)
    shards = fsdp_shards(hf, 9)
    assert any(0 in meta.shape for meta, _ in shards[8].values())
    groups.append(Trainer(daemon.agent_socket, CONFIG, "fsdp:dp9", shards))
    groups += [engine(daemon, "engine-a", 2)]
    groups[0].publish(1)
    groups[1].wait_version(1)
    assert_serves(groups[1], hf)


def test_a_filtered_tensor_is_left_alone(daemon, groups):
    hf = checkpoint_of(22)
    frozen = "model.layers.*.mlp.*"
    whole = {n: (TensorMeta(n, "BF16", a.shape), a) for n, a in hf.items()}
    groups.append(Trainer(daemon.agent_socket, CONFIG, f"hf:skip={frozen}", [whole]))
    metas = [meta for meta, _ in whole.values()]
    groups.append(EngineRanks(daemon.agent_socket, "engine-a", CONFIG, f"hf:skip={frozen}", [metas]))
    groups[0].publish(1)
    groups[1].wait_version(1)
    for name, array in groups[1].ranks[0].params.items():
        bits = array.view(np.uint16)
        if ".mlp." in name:
            assert not bits.any(), name
        else:
            assert np.array_equal(bits, hf[name]), name


def test_a_second_process_cannot_take_a_rank(daemon):
    with Publisher(rank=0, world_size=2, agent=daemon.agent_socket):
        with pytest.raises(RefusedError) as refused:
            Publisher(rank=0, world_size=2, agent=daemon.agent_socket)
    assert refused.value.reason == "duplicate_rank"
    assert "trainer/0" in str(refused.value)


def test_an_evicted_engine_stops_serving_comes_back_and_is_filled(daemon, groups):
    groups += [trainer(daemon), engine(daemon, "engine-a", 1), engine(daemon, "engine-b", 2)]
    hf = load(groups[0], 9)
    groups[0].publish(1)
    for e in groups[1:]:
        e.wait_version(1)
    before = groups[2].ranks[0].serving
    with grpc.insecure_channel(daemon.grpc) as channel:
        coordinator_pb2_grpc.CoordinatorStub(channel).Evict(pb.EvictRequest(group="engine-b", why="test"), timeout=10)
    with groups[2].flipped:
        assert groups[2].flipped.wait_for(
            lambda: all(r.serving and r.serving.generation > before.generation for r in groups[2].ranks), 30)
    assert groups[2].ranks[0].last_fence is not None
    assert_serves(groups[2], hf)


def test_metrics_are_valid_and_count_what_happened(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(1)
    with Client(daemon.grpc) as client:  # served is before counted: the last acknowledgement ends the epoch
        assert any(s.epoch_of(1) and s.epoch_of(1).phase == "committed" for s in client.watch(30))
    text = daemon.metrics()
    assert 'weightwire_epochs_total{outcome="committed"} 1' in text
    assert "weightwire_epoch_committed 1" in text
    if shutil.which("promtool"):
        checked = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr + checked.stdout
    for path in ("healthz", "readyz"):
        assert urllib.request.urlopen(f"http://{daemon.http}/{path}", timeout=10).status == 200


def test_a_call_of_a_closed_session_is_stale(daemon):
    publisher = Publisher(rank=0, world_size=1, agent=daemon.agent_socket)
    publisher.close()
    with pytest.raises(StaleError) as caught:
        publisher.publish(1)
    assert caught.value.rank == "trainer/0"
