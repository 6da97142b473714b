"""How much of a version has arrived: agents say it with their heartbeats, and status, wwctl and the client's Progress tell it."""

import re
import subprocess

import pytest

from conftest import BINARIES, until
from demo.fleet import Daemon
from test_client import assert_serves, engine, load, trainer
from weightwire import Client

#: Small pieces, and the bytes of them that an agent may read in a second: the version takes about eight heartbeats.
PIECES = {"slot_bytes": 20_480, "segment_bytes_max": 16_384, "chunk_bytes": 16_384}
SLOW = {"transports": "tcp", "rate_limit": 40_000, **PIECES}


@pytest.fixture
def slow(tmp_path):
    """A coordinator with the trainer's agent, and an agent that reads slowly."""
    start = lambda name, **options: Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, **options)
    hub = start("hub", role="all", listen="127.0.0.1:0", **PIECES)
    agent = start("slow", role="agent", coordinator=hub.grpc, **SLOW)
    yield hub, agent
    assert [agent.stop(), hub.stop()] == [0, 0]


def test_percent_rate_and_time_left_follow_a_slow_transfer(slow, groups):
    daemon, agent = slow
    groups += [trainer(daemon), engine(agent, "engine-a", 1)]
    hf, seen, shown = load(groups[0], 1), [], []
    for publisher in groups[0].publishers:
        publisher.publish(1)

    def look(progress):
        seen.append(progress)
        if progress.percent is not None and 0 < progress.percent < 100 and not shown:
            shown.append(subprocess.run([BINARIES / "wwctl", "epochs", "--address", daemon.grpc], capture_output=True, text=True, check=True).stdout)

    with Client(daemon.grpc) as client:
        status = client.wait_version(1, timeout=90, on_progress=look)
    until("the engine serves it", lambda: groups[1].ranks[0].serving is not None)
    assert_serves(groups[1], hf)
    bytes_total = sum(array.nbytes for array in hf.values())
    told = [p for p in seen if p.percent is not None]
    assert {p.stage for p in told} == {"transferring"} and {p.bytes_total for p in told} == {status.epoch_of(1).bytes}
    assert abs(status.epoch_of(1).bytes - bytes_total) < bytes_total * 0.2, "one engine's bytes are about the checkpoint's"
    grown = sorted({p.percent for p in told})
    assert len(grown) >= 4 and [p.percent for p in told] == sorted(p.percent for p in told), grown
    late = [p for p in told if 20 < p.percent < 100][-1]
    assert SLOW["rate_limit"] / 3 < late.bytes_per_second < SLOW["rate_limit"] * 1.5
    assert late.seconds_left == pytest.approx((late.bytes_total - late.bytes_done) / late.bytes_per_second)
    assert re.search(r"\d+ % of \d+\.\d kB at \d+\.\d kB/s, about \d+\.\d+ m?s left; waiting for ", shown[0]), shown[0]
    after = status.epoch_of(1)
    assert (after.bytes_done, after.bytes_total) == (0, 0), "it has ended"


def test_nothing_is_said_to_have_arrived_before_bytes_move(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    seen = []
    groups[0].publishers[0].publish(1, deadline=30)
    with Client(daemon.grpc) as client:
        until("it waits for the other ranks", lambda: "trainer/1" in client.status().waiting_for)
        for publisher in groups[0].publishers[1:]:
            publisher.publish(1)
        client.wait_version(1, timeout=30, on_progress=seen.append)
    assert [p for p in seen if p.stage != "transferring" and p.percent is not None] == []
