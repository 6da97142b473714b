"""weightwire.Client and weightwire.aio against a running daemon: waits, manual commits, events, errors."""

import asyncio
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import weightwire.aio
from test_client import CONFIG, assert_serves, checkpoint_of, engine, load, shards_of, trainer
from weightwire import (AbortedError, Client, DeadlineError, NotReadyError, Progress, RefusedError, StaleError,
                        UnavailableError)


@pytest.fixture
def client(daemon):
    with Client(daemon.grpc) as opened:
        yield opened


def test_a_status_names_participants_engines_and_epochs(daemon, client, groups):
    assert client.status().committed_version == 0
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(4)
    status = client.wait_version(4, timeout=30)
    assert [p.name for p in status.participants if p.role == "trainer"] == [f"trainer/{r}" for r in range(4)]
    assert {p.spec for p in status.participants} == {"megatron:tp2,pp2", "vllm:tp2"}
    (e,) = status.engines
    assert (e.name, e.state, e.version, e.lag_versions) == ("engine-a", "serving", 4, 0)
    epoch = status.epoch_of(4)
    assert (epoch.kind, epoch.attempt, epoch.why) == ("publish", 1, None)
    assert epoch.bytes > 0 and sum(epoch.bytes_by_transport.values()) == epoch.bytes
    assert "model.norm.weight" in client.explain("engine-a", "model.norm.weight")


def test_a_manual_commit_is_served_only_once_it_is_committed(daemon, client, groups):
    groups += [trainer(daemon), engine(daemon)]
    hf = load(groups[0], 3)
    releases = [p.publish(1, manual_commit=True) for p in groups[0].publishers]
    stages = []
    staged = client.wait_staged(1, timeout=30, on_progress=lambda p: stages.append(p.stage))
    assert staged.phase == "staged" == stages[-1]
    assert client.status().committed_version == 0 and groups[1].ranks[0].serving is None
    client.commit(staged.epoch)
    client.wait_version(1, timeout=30, engines=["engine-a"])
    assert_serves(groups[1], hf)
    for release in releases:
        release.wait_released(30)
    with pytest.raises(RefusedError, match="no such epoch is in progress") as refused:
        client.abort(staged.epoch)
    assert refused.value.remedy == "`wwctl epochs` says how each one ended"
    with pytest.raises(StaleError, match="decided"):
        client.wait_staged(1, timeout=30)


def test_a_version_aborted_by_a_client_is_served_nowhere_and_says_why(daemon, client, groups):
    groups += [trainer(daemon), engine(daemon)]
    for p in groups[0].publishers:
        p.publish(1, manual_commit=True)
    client.abort(client.wait_staged(1, timeout=30).epoch, "the reward fell")
    with pytest.raises(DeadlineError, match="the reward fell"):
        client.wait_version(1, timeout=0.5)
    epoch = client.status().epoch_of(1)
    assert epoch.phase == "aborted" and isinstance(epoch.why, AbortedError) and epoch.why.reason == "abort_requested"
    assert groups[1].ranks[0].serving is None


def test_a_wait_that_fails_says_what_everyone_waits_for(daemon, client, groups):
    groups.append(trainer(daemon))
    groups[0].publishers[0].publish(9, deadline=30)
    seen = []
    with pytest.raises(DeadlineError, match="trainer/1: publish"):
        client.wait_version(9, timeout=0.5, on_progress=seen.append)
    assert seen[0].stage == "waiting" and "trainer/1" in seen[-1].waiting_for


def test_errors_carry_the_reason_of_the_server(client):
    with pytest.raises(RefusedError) as refused:
        client.abort(12345)
    assert refused.value.reason == "not_registered" and refused.value.code == "NOT_FOUND"
    with Client("127.0.0.1:1", timeout=2) as nobody:
        with pytest.raises(UnavailableError, match="is weightwired running, is 127.0.0.1:1 its address"):
            nobody.status()
        with pytest.raises(DeadlineError, match="cannot be reached"):
            nobody.wait_version(1, timeout=0.5)


def test_progress_of_a_publish_comes_from_the_agent(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    seen = []
    # One rank alone cannot begin: its progress is seen while it waits for the others.
    first, *others = [(p, r) for r, p in enumerate(groups[0].publishers)]
    release = first[0].publish(1)
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: [waiting.wait(30)] + [p.publish(1) for p, _ in others])
    thread.start()
    release.wait_released(30, on_progress=lambda p: (seen.append(p), waiting.set()))
    thread.join(30)
    assert isinstance(seen[0], Progress) and seen[0].stage == "idle"
    assert seen[-1] == Progress(1, "released", release.epoch)


def test_evicted_groups_attach_again_and_events_tell_it(daemon, client, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(1)
    client.wait_version(1, timeout=30)
    events, saw_return = [], threading.Event()

    def follow():
        for event in client.events(timeout=30):
            events.append(event)
            dirty = [e for e in events if e.name == "engine-a" and e.after in ("dirty", "incomplete")]
            if dirty and event.name == "engine-a" and event.after not in ("dirty", "incomplete"):
                saw_return.set()
                return

    thread = threading.Thread(target=follow)
    thread.start()
    client.wait_version(1, timeout=30)
    while not events:
        time.sleep(0.01)
    client.evict("engine-a", "maintenance")
    assert saw_return.wait(30), events
    thread.join(30)
    assert ("engine", "engine-a", "", "serving", 1) in [(e.kind, e.name, e.before, e.after, e.version) for e in events]


def test_the_asynchronous_twins_do_the_same_job(daemon):
    shard = shards_of(checkpoint_of(8), tp=1, pp=1)[0]
    whole = [meta for meta, _ in shard.values()]

    async def job():
        async with weightwire.aio.Client(daemon.grpc) as client, \
                weightwire.aio.Publisher(rank=0, world_size=1, agent=daemon.agent_socket) as publisher, \
                weightwire.aio.Subscriber(group="e", rank=0, world_size=1, agent=daemon.agent_socket) as subscriber:
            params = await publisher.bind(CONFIG, "megatron:tp1,pp1", whole)
            for name, (_, bits) in shard.items():
                params[name][...] = bits
            await subscriber.bind(CONFIG, "megatron:tp1,pp1", whole)
            assert await subscriber.wait_offer(0) is None
            cancelled = asyncio.create_task(subscriber.wait_offer(30))
            await asyncio.sleep(0)
            cancelled.cancel()
            release = await publisher.publish(1)
            offer = await subscriber.wait_offer(30)
            got = subscriber.flip(offer)
            await subscriber.acknowledge(offer)
            await publisher.released(release, 30)
            status = await client.wait_version(1, timeout=30, engines=["e"])
            with pytest.raises(RefusedError):
                await client.abort(999)
            async for event in client.events(timeout=30):
                if event.kind == "engine":
                    assert (event.name, event.after, event.version) == ("e", "serving", 1)
                    break
            return status, {name: array.copy() for name, array in got.items()}

    status, got = asyncio.run(job())
    assert status.committed_version == 1
    for name, (_, bits) in shard.items():
        rows = CONFIG["vocab_size"] if name.endswith("word_embeddings.weight") else None  # the rest is padding
        assert np.array_equal(got[name][:rows], bits[:rows]), name


def test_an_unopened_twin_says_so():
    with pytest.raises(NotReadyError, match="not open"):
        asyncio.run(weightwire.aio.Publisher(rank=0, world_size=1).publish(1))


def test_a_wait_that_is_over_is_no_warning_in_the_servers_log(daemon, client, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(1)
    client.wait_version(1, timeout=30)
    groups[0].publish(2)
    client.wait_version(2, timeout=30)
    assert "rpc Watch" not in Path(daemon._log_path).read_text()
