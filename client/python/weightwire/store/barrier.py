"""One decision for several sites: a version is published everywhere, or is passed over everywhere.

A site that has all bytes of a version says so in the store. Who sees that enough sites have decides to go; whose deadline passes
decides not to. The decision is an object that can be created only once, so that it is one, and all obey it.
"""

from __future__ import annotations

import json
import time
from threading import Event
from typing import Any

from weightwire.store.format import FORMAT, NUMBER, Manifest
from weightwire.store.objects import Objects, StoreError
from weightwire.store.retention import plain_name

BARRIERS = "barriers"


class Barrier:
    """Of `sites` followers that use the same name."""

    def __init__(self, objects: Objects, name: str, site: str, sites: int, *, deadline_seconds: float = 120.0, poll_seconds: float = 0.5):
        if sites < 1:
            raise StoreError(f"--sites {sites}", kind="refused", remedy="how many followers use this barrier")
        self._objects, self._sites = objects, sites
        self._name, self._site = plain_name(name, "the barrier"), plain_name(site, "the site")
        self._deadline, self._poll = deadline_seconds, poll_seconds

    def pass_(self, manifest: Manifest, stop: Event) -> bool:
        """Whether to publish; returns within the deadline. StoreError: the store does not say."""
        folder = f"{BARRIERS}/{self._name}/{manifest.folder.rsplit('/', 1)[1]}"
        decision, end = f"{folder}/decision.json", time.monotonic() + self._deadline
        self._objects.put(f"{folder}/staged-{self._site}", _record(staged=manifest.state))
        while True:
            if self._objects.find(decision) is not None:
                break
            staged = sum(1 for one in self._objects.list(folder) if "/staged-" in one.path)
            late = time.monotonic() >= end
            if staged >= self._sites or late:
                try:
                    self._objects.put_if(decision, _record(go=staged >= self._sites, staged=staged, site=self._site), None)
                except StoreError as error:
                    if error.kind != "lost_race":
                        raise
                break
            if stop.wait(min(self._poll, max(0.01, end - time.monotonic()))):
                return False
        data, _ = self._objects.get(decision, bytes_max=1 << 16)
        try:
            said: Any = json.loads(bytes(data).decode())
            return said["go"] is True
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self._objects.at(decision)} is no decision", kind="damaged") from error


def _record(**said: Any) -> bytes:
    return json.dumps({"format": f"{FORMAT}-barrier", "number": NUMBER, **said}, sort_keys=True).encode()
