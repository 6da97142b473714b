"""An agent in a memory cgroup that is smaller than what its engine asks for. Killed for it or refusing, it takes nobody along."""

from __future__ import annotations

import contextlib
import pathlib
import signal
import time
import uuid

import pytest

from coordinator_job import CONFIG, Follower, metas
from demo import oracle
from demo.fleet import Daemon
from weightwire import Subscriber
from weightwire.errors import RefusedError, StaleError, UnavailableError

ROOT = pathlib.Path("/sys/fs/cgroup/memory")
LIMIT = 16 << 20  # bytes; one buffer of the model is as large, and an engine has two


class Limited:
    """A cgroup (v1) of its own."""

    def __init__(self):
        self._path = ROOT / f"weightwire-{uuid.uuid4().hex[:8]}"
        self._path.mkdir()
        (self._path / "memory.limit_in_bytes").write_text(str(LIMIT))
        swap = self._path / "memory.memsw.limit_in_bytes"
        if swap.exists():
            swap.write_text(str(LIMIT))

    def admit(self, daemon: Daemon) -> None:
        """What it touches from now on counts."""
        (self._path / "cgroup.procs").write_text(str(daemon.pid))

    def kills(self) -> int:
        fields = dict(line.split() for line in (self._path / "memory.oom_control").read_text().splitlines())
        return int(fields["oom_kill"])

    def remove(self) -> None:
        self._path.rmdir()


@pytest.fixture
def limited():
    try:
        made = Limited()
    except OSError as error:
        pytest.skip(f"no memory cgroup (v1) can be made here: {error}")
    yield made
    made.remove()


@pytest.fixture
def job(coordinator_job):
    running = coordinator_job()
    running.attach_trainer(time.monotonic() + 30)
    publish(running)
    return running


def publish(job) -> None:
    for release in job.publish():
        release.wait_released(60)
    job.serve_everywhere()


@contextlib.contextmanager
def attached(agent: Daemon):
    """An engine's process, and how it binds its layout."""
    with Subscriber(group="engine-3", rank=0, world_size=1, agent=agent.agent_socket) as subscriber:
        yield lambda: subscriber.bind(CONFIG, "vllm:tp1", metas(oracle.vllm_shapes(CONFIG, 1)))


def test_an_agent_over_its_memory_limit_is_killed_and_the_others_commit(limited, job):
    agent = job.start_agent("small")
    limited.admit(agent)
    # The call ends, or the session's own stream does and with it the incarnation: whichever is heard of first.
    with attached(agent) as bind, pytest.raises((UnavailableError, StaleError)) as ended:
        bind()
    assert isinstance(ended.value, UnavailableError) or ended.value.reason == "stale_incarnation"
    assert agent.wait(30) == -signal.SIGKILL and limited.kills() == 1
    publish(job)
    assert not [engine.name for engine in job.engines if engine.gaps]
    job.agents.append(job.start_agent("small"))  # with the memory that it needs
    job.engines.append(Follower("engine-3", job.agents[-1].agent_socket, job.wanted))
    job.serve_everywhere()  # filled by a peer
    publish(job)


def test_an_agent_that_knows_its_memory_limit_refuses_what_does_not_fit(limited, job):
    agent = job.start_agent("small", stage_bytes_max=LIMIT)
    limited.admit(agent)
    with attached(agent) as bind, pytest.raises(RefusedError, match=f"needs [0-9]+ bytes; 0 of the budget of {LIMIT} are in use") as refused:
        bind()
    assert refused.value.reason == "limit_exceeded" and refused.value.rank == "engine-3/0"
    publish(job)
    assert agent.stop() == 0 and limited.kills() == 0
