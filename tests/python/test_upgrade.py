"""This version and the one before it in one job, every byte of every rank compared: `tests/upgrade/run.sh` builds the one before
(`upgrade.Previous`, label long). The Python package is this version's everywhere."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess

import pytest

from conftest import BINARIES, until
from demo.fleet import Daemon
from ports import free_ports
from test_client import assert_serves, engine, load, trainer
from test_progress import PIECES, SLOW
from weightwire import Client

PREVIOUS = os.environ.get("WEIGHTWIRE_PREVIOUS_BIN_DIR")
pytestmark = pytest.mark.skipif(PREVIOUS is None, reason="no version before this one: tests/upgrade/run.sh builds it")
NEW, OLD = "new", "old"


def binary(which: str, name: str = "weightwired") -> str:
    return str((BINARIES if which == NEW else pathlib.Path(PREVIOUS)) / name)


class Fleet:
    """A coordinator with a journal, the trainer's agent and an engine's; each may be replaced by another version."""

    def __init__(self, directory):
        self.directory, self.daemons = directory, {}
        self.port = free_ports(1)[0]

    def start(self, name: str, which: str, **options) -> Daemon:
        config = {"role": "coordinator", "listen": f"127.0.0.1:{self.port}", "state_dir": self.directory / "state"}
        if name != "coordinator":
            config = {"role": "agent", "coordinator": f"127.0.0.1:{self.port}", **options}
        self.daemons[name] = Daemon(binary(which), str(self.directory / name), name, **config)
        return self.daemons[name]

    def stop(self, name: str) -> None:
        assert self.daemons.pop(name).stop() == 0

    def close(self) -> None:
        for name in reversed(list(self.daemons)):
            self.stop(name)


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def publish(groups: list, version: int, **options) -> None:
    hf = load(groups[0], version)
    groups[0].publish(version, **options)
    for e in groups[1:]:
        e.wait_version(version)
        assert_serves(e, hf)


@pytest.mark.parametrize("coordinator, source, target", [c for c in itertools.product((NEW, OLD), repeat=3) if OLD in c])
def test_any_mixture_moves_versions_and_fills_who_comes_late(fleet, groups, coordinator, source, target):
    fleet.start("coordinator", coordinator)
    sources, targets = fleet.start("trainer", source), fleet.start("engines", target)
    groups += [trainer(sources), engine(targets, "engine-a", 1), engine(sources, "engine-b", 2)]
    publish(groups, 1)
    publish(groups, 2, mode="snapshot")
    groups.append(engine(targets, "engine-c", 2))
    groups[-1].wait_version(2)
    publish(groups, 3)
    for which in (NEW, OLD):
        for command in ("status", "engines", "epochs"):
            said = subprocess.run([binary(which, "wwctl"), command, "--address", f"127.0.0.1:{fleet.port}"],
                                  capture_output=True, text=True, timeout=30)
            assert said.returncode == 0, f"{which} wwctl {command}: {said.stderr}"


def test_how_far_a_version_is_is_unknown_while_an_old_agent_receives(fleet, groups):
    """Not 0 %, of which nobody could tell whether it moves."""
    fleet.start("coordinator", NEW)
    sources, targets = fleet.start("trainer", NEW, **PIECES), fleet.start("engines", OLD, **SLOW)
    groups += [trainer(sources), engine(targets, "engine-a", 1)]
    load(groups[0], 1)
    for publisher in groups[0].publishers:
        publisher.publish(1)
    seen = []
    with Client(f"127.0.0.1:{fleet.port}") as client:
        client.wait_version(1, timeout=60, on_progress=seen.append)
    moving = [p for p in seen if p.stage == "transferring"]
    # The rank reports its bytes when it has all of them; its sources may still be waited for.
    arriving = [p for p in moving if p.percent != 100]
    assert arriving and {(p.percent, p.bytes_per_second, p.seconds_left) for p in arriving} == {(None, None, None)}


def test_what_an_old_agent_cannot_do_is_said(fleet, groups):
    fleet.start("coordinator", NEW)
    sources, targets = fleet.start("trainer", NEW), fleet.start("engines", OLD)
    groups += [trainer(sources), engine(targets, "engine-a", 1), engine(sources, "engine-b", 2)]
    publish(groups, 1)
    with Client(f"127.0.0.1:{fleet.port}") as client:
        client.wait_version(1, timeout=30)
        verdict = client.verify(timeout=30)
        assert not verdict.equal and verdict.differences_total == 0
        whys = {e.name: e.why for e in verdict.engines}
        assert whys["engine-b"] is None
        for word in ("engine-a/0", "its agent cannot sum what is served", "version of weightwired"):
            assert word in str(whys["engine-a"])


def test_one_after_another_is_replaced_the_coordinator_first(fleet, groups):
    """The newer coordinator goes on from the older one's journal."""
    for name in ("coordinator", "trainer", "engines"):
        fleet.start(name, OLD)

    def join() -> None:
        while groups:
            groups.pop().close()
        groups.extend([trainer(fleet.daemons["trainer"]), engine(fleet.daemons["engines"], "engine-a", 1),
                       engine(fleet.daemons["trainer"], "engine-b", 2)])

    join()
    publish(groups, 1)
    with Client(f"127.0.0.1:{fleet.port}") as client:
        epoch = client.status().committed_epoch
        for version, name in enumerate(("coordinator", "trainer", "engines"), 2):
            fleet.stop(name)
            fleet.start(name, NEW)
            until("both agents have a session", lambda: client.status().agents == 2)
            join()
            publish(groups, version)
            status = client.wait_version(version, timeout=30)
            assert status.committed_version == version and status.committed_epoch > epoch
            epoch = status.committed_epoch


def test_an_older_coordinator_refuses_a_newer_ones_journal_and_harms_nothing(fleet, groups):
    fleet.start("coordinator", NEW)
    agent = fleet.start("trainer", NEW)
    groups += [trainer(agent), engine(agent, "engine-a", 1)]
    publish(groups, 1)
    fleet.stop("coordinator")
    with pytest.raises(RuntimeError, match=r"exit 97(.|\n)*journal_failed"):
        fleet.start("coordinator", OLD)
    fleet.start("coordinator", NEW)
    publish(groups, 2)
