"""What a store keeps: the newest versions, what chains are made of, and what a lease names. All times are the store's own."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Dict, List, Sequence, Set

from weightwire.store.format import ANCHOR, FORMAT, LAYOUTS, MANIFEST, NUMBER, VERSIONS, Layout, Manifest, folder_version
from weightwire.store.objects import Found, Objects, StoreError
from weightwire.store.reading import Reader

LEASES = "leases"
LEASE_SECONDS = 600.0
GRACE_SECONDS = 86_400.0
_CLOCK = f"{LEASES}/clock"
_DELETED_AT_ONCE = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def plain_name(name: str, what: str) -> str:
    """A name that may be a part of a path. StoreError: it may not."""
    if not _NAME.fullmatch(name):
        raise StoreError(f"{what} {name[:100]!r} is no plain name", kind="refused", remedy="letters, digits, dots, dashes, at most 100")
    return name


class Lease:
    """Says that somebody reads versions, for a while; `hold` again renews it. A lease that cannot be written is not fatal:
    objects that are collected under a reader are missed, and it takes another way."""

    def __init__(self, objects: Objects, name: str, seconds: float = LEASE_SECONDS):
        self._objects, self._seconds = objects, seconds
        self._path = f"{LEASES}/{plain_name(name, 'the lease')}.json"
        self._holds: List[str] = []
        self._written = float("-inf")

    def hold(self, manifests: Sequence[Manifest]) -> None:
        """Names these instead of what was named before."""
        holds = [manifest.folder for manifest in manifests]
        if holds != self._holds or time.monotonic() - self._written > self._seconds / 3:
            self._holds = holds
            self._write()

    def renew(self) -> None:
        """To be called now and then."""
        if self._holds and time.monotonic() - self._written > self._seconds / 3:
            self._write()

    def _write(self) -> None:
        try:
            self._objects.put(self._path, json.dumps({"format": f"{FORMAT}-lease", "number": NUMBER, "holds": self._holds,
                                                      "seconds": self._seconds}).encode())
            self._written = time.monotonic()
        except StoreError:
            self._written = float("-inf")

    def drop(self) -> None:
        if self._holds:
            try:
                self._objects.delete([self._path])
            except StoreError:
                pass  # it ends by itself
            self._holds = []


@dataclass
class Kept:
    """What `gc` finds, and does."""

    #: Folders of versions, and why they are kept.
    kept: Dict[str, str] = field(default_factory=dict)
    deleted: List[str] = field(default_factory=list)
    #: Attempts that came to nothing and are deleted.
    torn: List[str] = field(default_factory=list)
    #: What is not understood, and so is kept.
    unknown: Dict[str, str] = field(default_factory=dict)
    bytes_kept: int = 0
    bytes_deleted: int = 0


def gc(reader: Reader, *, keep: int = 8, keep_seconds: float = 0.0, grace_seconds: float = GRACE_SECONDS, dry_run: bool = False) -> Kept:
    """Deletes versions but the newest `keep`, those younger than `keep_seconds`, those that a lease names, and whatever any of them is
    made of; and attempts without a manifest that nobody has written to for `grace_seconds`.

    A version goes with its manifest first, and what is based on it before it, so that what is left is whole at every moment."""
    if keep < 1:
        raise StoreError(f"--keep {keep}", kind="refused", remedy="the newest version always stays: at least 1")
    objects = reader.objects
    now = _store_time(objects)
    folders: Dict[str, List[Found]] = {}
    for found in objects.list(VERSIONS):
        folders.setdefault(found.path.rsplit("/", 1)[0], []).append(found)
    report, manifests = Kept(), {}
    for folder, inside in folders.items():
        names = {found.path.rsplit("/", 1)[1] for found in inside}
        if not folder_version(folder):
            report.unknown[folder] = "no folder of a version"
        elif MANIFEST in names:
            try:
                manifests[folder] = reader.manifest_at(f"{folder}/{MANIFEST}")
            except StoreError as error:
                if error.kind in ("unavailable", "denied"):
                    raise
                report.unknown[folder] = str(error)
    _keep(report, reader, manifests, folders, now, keep, keep_seconds, grace_seconds)
    doomed = sorted((folder for folder in manifests if folder not in report.kept), key=lambda f: manifests[f].order, reverse=True)
    for folder, inside in folders.items():
        if folder not in manifests and folder not in report.unknown:
            if now - max(found.modified for found in inside) > timedelta(seconds=grace_seconds):
                report.torn.append(folder)
            else:
                report.kept[folder] = "is being written, perhaps"
    for folder in [*doomed, *report.torn]:
        inside = sorted(folders[folder], key=lambda found: (not found.path.endswith(".json"), found.path))
        if not dry_run:
            records = [found.path for found in inside if found.path.endswith(".json")]
            objects.delete(records)
            rest = [found.path for found in inside[len(records):]]
            for begin in range(0, len(rest), _DELETED_AT_ONCE):
                objects.delete(rest[begin:begin + _DELETED_AT_ONCE])
        report.bytes_deleted += sum(found.bytes for found in inside)
    report.deleted = doomed
    report.bytes_kept = sum(found.bytes for folder, inside in folders.items() if folder in report.kept for found in inside)
    if not report.unknown:
        _collect_layouts(reader, {manifests[folder].layout for folder in report.kept if folder in manifests}, now, grace_seconds, dry_run)
    return report


def _keep(report: Kept, reader: Reader, manifests: Dict[str, Manifest], folders: Dict[str, List[Found]], now: datetime, keep: int,
          keep_seconds: float, grace_seconds: float) -> None:
    wanted: Dict[str, str] = {}
    latest = reader.latest()
    if latest is not None:
        at = reader.manifest(latest.manifest)
        while at.folder not in folders and at.base is not None:  # it came after the listing, and is made of what was the newest there
            at = reader.manifest(at.base)
        wanted[at.folder] = "is the newest"
    for folder in sorted(manifests, key=lambda f: manifests[f].order, reverse=True)[:keep]:
        wanted.setdefault(folder, f"is of the newest {keep}")
    for folder, inside in folders.items():
        if now - max(found.modified for found in inside) < timedelta(seconds=keep_seconds):
            wanted.setdefault(folder, f"is younger than {keep_seconds:g} s")
    for folder, manifest in manifests.items():
        if (latest is None or manifest.order > latest.order) and now - max(found.modified for found in folders[folder]) <= timedelta(seconds=grace_seconds):
            wanted.setdefault(folder, "the pointer will say it, perhaps")
    for name, holds in _leases(reader.objects, now).items():
        for folder in holds:
            wanted.setdefault(folder, f"is read by {name}")
    for folder in list(wanted):
        if folder not in manifests:
            continue
        report.kept.setdefault(folder, wanted[folder])
        at, passed = manifests[folder], {folder}
        while at.base is not None:
            if any(found.path == f"{at.folder}/{ANCHOR}" for found in folders[at.folder]):
                break
            below = at.base.path.rsplit("/", 1)[0]
            if below not in manifests or below in passed:
                break  # it was collected before; what there is stays
            passed.add(below)
            report.kept.setdefault(below, f"{folder} is made of it")
            at = manifests[below]


def _store_time(objects: Objects) -> datetime:
    """What the store's clock says, as in its listings: Ceph tells there parts of a second, and elsewhere none."""
    objects.put(_CLOCK, b"{}")
    found = next((one for one in objects.list(LEASES) if one.path == _CLOCK), None)
    if found is None:
        raise StoreError(f"{objects.at(_CLOCK)} is gone as soon as it is written", kind="unavailable")
    return found.modified


def _leases(objects: Objects, now: datetime) -> Dict[str, List[str]]:
    """Of those that have not ended, the folders by name. One that is not understood ends the collection."""
    found: Dict[str, List[str]] = {}
    for one in objects.list(LEASES):
        if not one.path.endswith(".json"):
            continue
        try:
            data, _ = objects.get(one.path, bytes_max=1 << 20)
            said: Any = json.loads(bytes(data).decode())
            seconds, holds = float(said["seconds"]), [str(folder) for folder in said["holds"]]
        except StoreError as error:
            if error.kind == "missing":
                continue  # its holder has just dropped it
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{objects.at(one.path)} is no lease, so nothing is deleted: {error}", kind="damaged",
                             remedy="delete it if nobody reads with it") from error
        if now - one.modified < timedelta(seconds=seconds):
            found[one.path[len(LEASES) + 1:-len(".json")]] = holds
    return found


def _collect_layouts(reader: Reader, wanted: Set[str], now: datetime, grace_seconds: float, dry_run: bool) -> None:
    doomed = [found.path for found in reader.objects.list(LAYOUTS)
              if found.path not in {Layout.path(one) for one in wanted} and now - found.modified > timedelta(seconds=grace_seconds)]
    if doomed and not dry_run:
        reader.objects.delete(doomed)


