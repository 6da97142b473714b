"""One epoch's trace over real processes: the trace id of the trainer's step in the logs of every process, `wwctl epoch`, and
the trace file, whose stretches nest and cover the epoch."""

from __future__ import annotations

import collections
import functools
import json
import subprocess
import time

import pytest

from conftest import BINARIES
from coordinator_job import TRAINERS, Job
from weightwire import Publisher, RefusedError
from weightwire.v1 import types_pb2

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ENGINES = [f"engine-{i}" for i in range(3)]


class LoggedJob(Job):
    def __init__(self, directory):
        super().__init__(directory, log_format="json", fanout="star")

    def start_agent(self, name: str, **options):
        return super().start_agent(name, **{"log_format": "json", **options})


def wwctl(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([str(BINARIES / "wwctl"), *arguments], timeout=60, capture_output=True, text=True)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Version 1 without a trace of the trainer's, version 2 with one that its first rank brings; served everywhere."""
    started = LoggedJob(tmp_path_factory.mktemp("job"))
    started.attach_trainer(time.monotonic() + 60)
    first = started.publishers[0]
    for options in ({}, {"traceparent": TRACEPARENT}):
        first.publish = functools.partial(Publisher.publish, first, **options)
        for release in started.publish():
            release.wait_released(60)
        started.serve_everywhere()
    started.until("the last epoch to end", lambda: started.status().epochs[0].phase == types_pb2.EPOCH_PHASE_COMMITTED, 60)
    yield started
    started.close()


def lines_of(job: Job) -> dict[str, list[dict]]:
    """What each process has logged of version 2."""
    found = {}
    for name in ("coordinator", "trainer", "rollout"):
        with open(f"{job.directory}/{name}/{name}.log") as log:
            lines = [json.loads(line) for line in log if line.startswith("{")]
        found[name] = [line for line in lines if line.get("version") == "2"]
    return found


def test_one_trace_id_is_in_the_logs_of_every_process(job):
    lines = lines_of(job)
    for name, of_version in lines.items():
        assert of_version, f"{name} logged nothing of version 2"
        assert {line["trace_id"] for line in of_version} == {TRACE}, name
    assert {line["epoch"] for line in lines["coordinator"]} == {"2"}
    said = {(line["rank"], line["message"].split(": ")[1])
            for line in lines["trainer"] + lines["rollout"]}
    for rank in range(TRAINERS):
        assert (f"trainer/{rank}", f"trainer/{rank} all bytes read") in said
    for engine in ENGINES:
        assert (f"{engine}/0", f"{engine}/0 staged, every byte verified") in said
        assert (f"{engine}/0", f"{engine}/0 swapped") in said
    assert [engine.subscriber.serving.trace_id for engine in job.engines] == [TRACE] * len(ENGINES)


def test_the_trace_names_phases_the_last_ones_and_the_trace_id(job):
    told = wwctl("epoch", "2", "--address", job.address)
    assert told.returncode == 0, told.stderr
    assert told.stdout.startswith("epoch 2: publish of version 2, attempt 1, committed;")
    assert f"\ntrace {TRACE}\n" in told.stdout and "\nengines: engine-0, engine-1, engine-2\n" in told.stdout
    rows = {line.split()[0]: line for line in told.stdout.splitlines() if line.strip()}
    for phase, last in (("publish", "published"), ("preparing", "ready"), ("transferring", "received"), ("committing", "switched to the new version")):
        assert f" {last} at " in rows[phase], rows[phase]
    newest = wwctl("epoch", "--json", "--address", job.address)
    story = json.loads(newest.stdout)
    assert story["epoch"]["epoch"] == "2" and story["epoch"]["trace_id"] == TRACE
    assert wwctl("epoch", "1", "--address", job.address).stdout.count(TRACE) == 0


def test_an_epoch_that_is_not_known_says_which_are(job):
    refused = wwctl("epoch", "77", "--address", job.address)
    assert refused.returncode == 64 + 22 and "1 to 2" in refused.stderr


def test_a_trace_that_is_none_is_refused_before_anything_is_published(job):
    with pytest.raises(RefusedError, match="traceparent"):
        job.publishers[0].publish(99, traceparent="00-123")


@pytest.fixture(scope="module")
def trace(job, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "epoch.json"
    written = wwctl("epoch", "2", "--trace", str(path), "--address", job.address)
    assert written.returncode == 0, written.stderr
    assert "perfetto" in written.stdout
    return json.loads(path.read_text())


def stretches_by(trace, key) -> dict:
    found = collections.defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[key(event)].append(event)
    return found


def test_stretches_of_a_thread_nest(trace):
    threads = stretches_by(trace, lambda e: (e["pid"], e["tid"]))
    assert sum(map(len, threads.values())) > 25
    for thread, events in threads.items():
        open_ends: list[int] = []
        for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
            assert event["dur"] >= 0
            while open_ends and open_ends[-1] <= event["ts"]:
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1], (thread, event)
            open_ends.append(event["ts"] + event["dur"])


def test_phases_cover_the_epoch_without_a_gap(trace):
    events = {e["name"]: e for e in stretches_by(trace, lambda e: e["pid"])[1]}
    whole = events["epoch 2"]
    assert whole["args"]["trace_id"] == TRACE and abs(whole["ts"] / 1e6 - time.time()) < 3600
    at = whole["ts"]
    for phase in ("preparing", "transferring", "committing"):
        assert abs(events[phase]["ts"] - at) <= 1, phase
        at = events[phase]["ts"] + events[phase]["dur"]
    assert abs(at - (whole["ts"] + whole["dur"])) <= 2
    for part, phase in (("plan", "preparing"), ("journal", "committing")):
        assert events[phase]["ts"] <= events[part]["ts"]
        assert events[part]["ts"] + events[part]["dur"] <= events[phase]["ts"] + events[phase]["dur"]
    assert events["publish"]["ts"] + events["publish"]["dur"] <= whole["ts"] + 1


def test_every_rank_tells_its_own_part_within_the_phases(trace):
    names = {e["pid"]: e["args"]["name"].split()[0] for e in trace["traceEvents"] if e["name"] == "process_name"}
    ranks = {name: stretches_by(trace, lambda e: names[e["pid"]])[name] for name in names.values() if name != "coordinator"}
    assert set(ranks) == {f"trainer/{i}" for i in range(TRAINERS)} | {f"{name}/0" for name in ENGINES}
    phases = {e["name"]: e for e in stretches_by(trace, lambda e: e["pid"])[1]}
    within = {"prepare": "preparing", "serve": "transferring", "pack": "transferring", "stage": "transferring",
              "read": "transferring", "verify": "transferring", "swap": "committing"}
    for rank, events in ranks.items():
        kinds = collections.Counter(e["name"].split()[0] for e in events)
        if rank.startswith("trainer"):
            assert kinds == {"prepare": 1, "serve": 1, "pack": 1}, rank
        else:
            assert kinds == {"prepare": 1, "stage": 1, "read": TRAINERS, "verify": 1, "swap": 1}, rank
            assert {e["name"] for e in events if e["name"].startswith("read")} == {
                f"read from trainer/{i} over tcp" for i in range(TRAINERS)}
            stage = next(e for e in events if e["name"] == "stage")
            assert stage["args"]["bytes"] == sum(e["args"]["bytes"] for e in events if e["name"].startswith("read"))
        for event in events:
            phase = phases[within[event["name"].split()[0]]]
            # One host has one clock: what is estimated must be within the bounds that it was estimated from.
            slack = event["args"]["clock_error_us"] + 1000
            assert event["ts"] >= phase["ts"] - slack, (rank, event, phase)
            assert event["ts"] + event["dur"] <= phase["ts"] + phase["dur"] + slack, (rank, event, phase)


def test_what_members_reported_stands_at_their_own_rows(trace):
    instants = collections.Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "i")
    assert instants == {"published": TRAINERS, "prepared": TRAINERS + 3, "sourced": TRAINERS, "staged": 3, "swapped": 3}
