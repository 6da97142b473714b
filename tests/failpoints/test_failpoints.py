"""Each row of docs/failpoints.md crossed with kill, stop and delay: one process of a running job dies at the point and is
started again, stands still there for two leases, or takes a moment longer. Then what docs/faults.md promises must hold.

`WEIGHTWIRE_FAILPOINTS=sample` (what `./dev test` runs) takes a few that cover each process and action; `2/4` the second
quarter of all (`./dev test long` runs them all); a text those whose name contains it."""

from __future__ import annotations

import os
import threading
import time
import traceback

import pytest
from job import LEASE, Job, Outcome, await_releases
from scenarios import SCENARIOS
from table import Row, rows
from weightwire.errors import WeightwireError

ACTIONS = ("kill", "stop", "delay")
DELAY_MS = 300  # less than a lease: nobody is lost
CROSSED_SECONDS_MAX = 20.0
SCENARIO_SECONDS_MAX = 45.0
SAMPLE = {
    "coordinator.before_commit_appended-coordinator-publish-0-kill",
    "coordinator.after_journal_before_send-coordinator-publish-0-stop",
    "coordinator.before_rejoin_decided-coordinator-lost_decided-0-kill",
    "store.after_a_record_is_durable_before_its_answer-coordinator-publish-0-delay",
    "agent.after_unpack_before_staged-engine-publish-0-kill",
    "agent.after_flip_before_acknowledged-edge-publish-0-stop",
    "transfer.before_a_slot_is_announced-trainer-publish-7-kill",
    "agent.before_claim-trainer-coordinator_lost-0-delay",
}


def chosen() -> list:
    cases = [(row, action) for row in rows() for action in ACTIONS]
    names = [f"{row.name}-{action}" for row, action in cases]
    assert len(set(names)) == len(names) and SAMPLE <= set(names), SAMPLE - set(names)
    wanted = os.environ.get("WEIGHTWIRE_FAILPOINTS", "sample")
    params = [pytest.param(*case, id=name) for case, name in zip(cases, names)]
    if wanted == "sample":
        return [param for param in params if param.id in SAMPLE]
    part, slash, parts = wanted.partition("/")
    return params[int(part) - 1::int(parts)] if slash else [param for param in params if wanted in param.id]


class Scenario(threading.Thread):
    """What leads to the point; a process that dies on the way is no failure of it."""

    def __init__(self, job: Job, outcome: Outcome, row: Row):
        super().__init__(daemon=True)
        self._act = lambda: SCENARIOS[row.scenario][1](job, outcome, row.process)
        self._outcome = outcome
        self.wrong = ""

    def run(self) -> None:
        try:
            self._act()
        except WeightwireError as error:
            self._outcome.refused.append(error)
        except RuntimeError as error:  # a daemon that was killed before it was ready
            if "did not start (exit -9)" not in str(error):
                self.wrong = traceback.format_exc()
        except BaseException:
            self.wrong = traceback.format_exc()


def strike(job: Job, row: Row, action: str, outcome: Outcome) -> float:
    """Runs the scenario into the armed point and mends the process. When the fault was over."""
    part = job.parts[row.process]
    SCENARIOS[row.scenario][0](job, outcome, row.process)
    part.arm(row.point, action, row.skip, DELAY_MS)
    scenario = Scenario(job, outcome, row)
    scenario.start()
    part.await_crossing(CROSSED_SECONDS_MAX)
    if action == "kill":
        part.await_death()
        part.start()
    elif action == "stop":
        part.hold_still(2 * LEASE)
    over = time.monotonic()
    scenario.join(SCENARIO_SECONDS_MAX)
    assert not scenario.is_alive(), f"{row.scenario} did not end"
    assert not scenario.wrong, scenario.wrong
    return over


def check_nothing_was_lost(job: Job, outcome: Outcome, errors: list) -> None:
    """Of a coordinator that is gone for a while, and of a delay, nobody learns."""
    assert not errors and not outcome.refused, (errors, outcome.refused)
    assert all(publisher.attached for publisher in job.publishers), "a publisher was lost"


def check_no_engine_stopped(job: Job) -> None:
    assert not [engine.name for engine in job.engines if engine.gaps], "an engine served nothing for a while"


@pytest.mark.parametrize("row, action", chosen())
def test_a_fault_at_a_point_keeps_every_promise(row: Row, action: str, tmp_path):
    job = Job(tmp_path)
    try:
        job.start()
        outcome = Outcome()
        over = strike(job, row, action, outcome)
        errors = await_releases(outcome.releases)
        hidden = row.process == "coordinator" or action == "delay"
        if hidden and row.scenario == "publish":
            check_no_engine_stopped(job)
            if not job.leases_lost():
                check_nothing_was_lost(job, outcome, errors)
        job.check_commits()
        job.publish_until_served(max(over, time.monotonic()))
        job.check_commits()
        for engine in job.engines:
            engine.compare_served()
            assert not outcome.never & {version for _, version in engine.flipped}, f"{engine.name} served what was aborted"
        job.raise_wrong()
    finally:
        wrong_ends = job.close()
    assert not wrong_ends, wrong_ends
