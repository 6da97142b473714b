"""Versions are published all the time while one thing after another happens to the job, by chance: SIGKILL to the coordinator,
an agent or an engine's process, SIGSTOP of a daemon for up to two leases, a cut of the network, lost packets, new certificates.
mTLS is on. After each of them the next version is served everywhere within 60 s; no engine ever took a byte that is not that
version's, nor an epoch that was not committed; what was committed never goes back.

Memory and descriptors of every daemon, from the second to the last quarter of its longest life, grow by no more than stated
here. So that such a life is long, engine-0's agent is never killed, and in the second half nor are the coordinator and the
trainer's agent; all other things still happen to them.

`./dev test` runs a minute, `./dev test long` twenty (`WEIGHTWIRE_SOAK`, seconds). `WEIGHTWIRE_SEED` repeats what happens;
`WEIGHTWIRE_SOAK_OUT=DIR` keeps the samples and draws them."""

from __future__ import annotations

import mmap
import os
import time

import pytest

import netns
from soak_job import SoakJob, describe
from soak_record import MIB, Life, Recorder, Sample, look
from spread_job import spread_job

WHY_NOT = netns.possible()
SECONDS = float(os.environ.get("WEIGHTWIRE_SOAK", "60"))
OUT = os.environ.get("WEIGHTWIRE_SOAK_OUT", "")
RSS_GROWS_MAX, FDS_GROW_MAX = 16 * MIB, 12
NEVER_KILLED = {"engine-0"}
NOT_IN_THE_SECOND_HALF = {"coordinator", "trainer"}


def test_what_leaks_is_seen():
    """16 MiB in a life of twenty minutes, and a descriptor each 40 s; a warm-up of any size is none."""
    def life(rss, fds):
        return Life("coordinator", 1, [Sample(at, int(rss(at)), int(fds(at))) for at in range(1200)])
    leaking = life(lambda at: at * 34 * MIB / 1200, lambda at: 40 + at / 40)
    assert leaking.grown("rss") > RSS_GROWS_MAX and leaking.grown("fds") > FDS_GROW_MAX
    warm = life(lambda at: 64 * MIB - 32 * MIB * (at < 250), lambda at: 60 - 40 * (at < 250))
    assert warm.grown("rss") == warm.grown("fds") == 0
    before = look(os.getpid(), 0)
    # A mapping of its own: what the interpreter has freed may be given out again, and nothing grows.
    held, opened = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE), [os.dup(0) for _ in range(20)]
    held.write(b"x" * len(held))
    after = look(os.getpid(), 0)
    for fd in opened:
        os.close(fd)
    assert after.fds - before.fds == 20 and after.rss - before.rss > len(held) / 2


@pytest.mark.skipif(bool(WHY_NOT), reason=f"no networks of our own here: {WHY_NOT}")
def test_nothing_that_happens_breaks_a_promise_or_leaks(tmp_path):
    with spread_job(tmp_path, kind=SoakJob, fanout="chain") as job:
        def pids() -> dict[str, int]:
            return {name: daemon.pid for name, daemon in job.daemons().items()}
        recorder = Recorder(pids)
        try:
            counts = soak(job, recorder)
        finally:
            recorder.close()
            if OUT:
                recorder.write(OUT, f"{SECONDS / 60:.0f} minutes of strikes, seed {os.environ.get('WEIGHTWIRE_SEED', '1')}")
    print(f"{recorder.seconds:.0f} s, {len(recorder.strikes)} strikes, {counts['released']} versions released and compared, "
          f"{counts['given up']} given up\n{recorder.table()}")
    assert len(recorder.strikes) >= SECONDS / 60
    for life in recorder.longest().values():
        assert life.grown("rss") <= RSS_GROWS_MAX, f"{life.name}: {recorder.table()}"
        assert life.grown("fds") <= FDS_GROW_MAX, f"{life.name}: {recorder.table()}"


def soak(job: SoakJob, recorder: Recorder) -> dict[str, int]:
    counts = {"released": 0, "given up": 0}
    while recorder.seconds < SECONDS:
        half = NOT_IN_THE_SECOND_HALF if recorder.seconds > SECONDS / 2 else set()
        strikes = job.draw(NEVER_KILLED | half)
        began = time.monotonic()
        print(f"{recorder.seconds:.0f} s: {describe(strikes)}", end="", flush=True)
        recorder.struck(describe(strikes))
        for outcome, count in job.suffer(strikes).items():
            counts[outcome] += count
        print(f"; whole after {time.monotonic() - began:.1f} s, version {job.version}", flush=True)
    return counts
