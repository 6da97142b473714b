"""Install mode paused-live: the ranks of a paused engine give up the stage of the version before, for the next one."""

from __future__ import annotations

import logging
import time
from typing import Callable

from weightwire import errors
from weightwire.vllm.channel import Message
from weightwire.vllm.link import Workers
from weightwire.vllm.replace import Deadlines, StepError

log = logging.getLogger("weightwire.vllm")
_LOOK_SECONDS = 0.2  # how soon a fence, or the driver's end, is seen


def give_room(workers: Workers, wanted: Message, deadlines: Deadlines,
              stopped: Callable[[], bool]) -> Message | None:
    """Lets each rank give its stage up as it is asked to, beginning with `wanted`, and returns the offer of the version
    that was written there. An epoch may fail and be tried again meanwhile.

    None when the wish was taken back before any rank had followed it, or `stopped()`. Raises StepError "transfer" when
    no version comes before the deadline, or when a rank is fenced: then its stage is made anew.
    """
    event: Message | None = wanted
    emptied = False
    fences, end = workers.fences, time.monotonic() + deadlines.transfer
    while not stopped():
        if event is None:
            now = workers.fences
            new = [f"rank {rank}: {why}" for rank, why in now.items() if fences.get(rank) != why]
            if new or time.monotonic() > end:
                why = "; ".join(new) or f"no version came within {deadlines.transfer:g} s"
                raise StepError("transfer", errors.AbortedError(why, code="ABORTED", epoch=wanted["epoch"]))
        elif "rank" not in event:
            return event
        else:
            emptied |= _make_room(workers, event, deadlines.room)
            if not emptied:
                return None
        event = workers.wait_event(_LOOK_SECONDS)
    return None


def _make_room(workers: Workers, wish: Message, timeout: float) -> bool:
    """False when its epoch has ended meanwhile: the rank keeps what it has."""
    workers.roomed(wish["rank"])
    try:
        workers.ask("make_room", timeout, ranks=[wish["rank"]], epoch=wish["epoch"])
        return True
    except errors.WeightwireError as error:
        log.info("weightwire: rank %d, room for epoch %d: %s", wish["rank"], wish["epoch"], error)
        return False
