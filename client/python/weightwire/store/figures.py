"""What a writer or a follower counts, and how Prometheus reads it."""

from __future__ import annotations

import threading
import time
from typing import Any, Dict, Iterator, Optional, Tuple

from weightwire.errors import WeightwireError
from weightwire.store.objects import StoreError

#: name -> (kind, help, label)
_FAMILIES: Dict[str, Tuple[str, str, str]] = {
    "weightwire_store_version": ("gauge", "Newest version that this side has done: stored by a writer, published by a follower", ""),
    "weightwire_store_version_seen": ("gauge", "Newest version that this side knows of: committed at a writer's site, in a follower's store", ""),
    "weightwire_store_staleness_seconds": ("gauge", "Since when this side knows of a version newer than what it has done; 0: of none", ""),
    "weightwire_store_staleness_versions": ("gauge", "By how much the numbers of these differ", ""),
    "weightwire_store_last_seconds": ("gauge", "From when the last version was known to when it was done", ""),
    "weightwire_store_bytes_total": ("counter", "Bytes of objects that were written or read, records not counted", "direction"),
    "weightwire_store_objects_total": ("counter", "The objects", "direction"),
    "weightwire_store_versions_total": ("counter", "Versions that were done (anchor, delta), and that were passed over (skipped)", "kind"),
    "weightwire_store_failures_total": ("counter", "Attempts that failed, by reason; docs/regions.md has the reasons", "reason"),
}
#: What `failures` counts, from the start on, so that a rate is seen at the first one.
REASONS = ("missing", "damaged", "signature", "denied", "full", "lost_race", "unavailable", "refused", "not_newer", "fleet", "barrier")


class Figures:
    """Counts of one process. Any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: Dict[Tuple[str, str], float] = {(name, ""): 0.0 for name, (_, _, label) in _FAMILIES.items() if not label}
        self._values.update({("weightwire_store_failures_total", reason): 0.0 for reason in REASONS})
        self._since: Optional[float] = None  # monotonic: a version is known that is not done
        self._seen = self._done = (0, 0)  # lineage, version
        self.last_failure: Optional[BaseException] = None

    def seen(self, lineage: int, version: int) -> None:
        """A version that is to be done."""
        with self._lock:
            if (lineage, version) > self._seen:
                self._seen = lineage, version
                if self._since is None and self._seen > self._done:
                    self._since = time.monotonic()

    def done(self, lineage: int, version: int, kind: str, direction: str, bytes_: int, objects: int) -> None:
        with self._lock:
            if self._since is not None:
                self._values["weightwire_store_last_seconds", ""] = time.monotonic() - self._since
            self._done = max(self._done, (lineage, version))
            self._since = None if self._done >= self._seen else time.monotonic()
        self.add("weightwire_store_versions_total", kind)
        self.moved(direction, bytes_, objects)

    def moved(self, direction: str, bytes_: int, objects: int) -> None:
        self.add("weightwire_store_bytes_total", direction, bytes_)
        self.add("weightwire_store_objects_total", direction, objects)

    def failed(self, error: BaseException, reason: str = "") -> None:
        with self._lock:
            self.last_failure = error
        self.add("weightwire_store_failures_total", reason or (error.kind if isinstance(error, StoreError) else
                                                               "fleet" if isinstance(error, WeightwireError) else "unavailable"))

    def add(self, name: str, label: str, value: float = 1) -> None:
        with self._lock:
            self._values[name, label] = self._values.get((name, label), 0.0) + value

    def values(self) -> Dict[Tuple[str, str], float]:
        """By family and label."""
        with self._lock:
            made = dict(self._values)
            made["weightwire_store_version", ""], made["weightwire_store_version_seen", ""] = self._done[1], max(self._seen, self._done)[1]
            made["weightwire_store_staleness_seconds", ""] = time.monotonic() - self._since if self._since is not None else 0.0
            made["weightwire_store_staleness_versions", ""] = max(0, self._seen[1] - self._done[1]) if self._seen > self._done else 0
            return made

    def collect(self) -> Iterator[Any]:
        """As prometheus_client asks for it."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
        values = self.values()
        for name, (kind, about, label) in _FAMILIES.items():
            family: Any = (CounterMetricFamily if kind == "counter" else GaugeMetricFamily)(name, about, labels=[label] if label else [])
            for (of, value), number in sorted(values.items()):
                if of == name:
                    family.add_metric([value] if label else [], number)
            yield family


class MetricsServer:
    """`/metrics` over HTTP, for `with`."""

    def __init__(self, figures: Figures, listen: str):
        """`listen`: HOST:PORT; port 0 takes a free one."""
        host, _, port = listen.rpartition(":")
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as error:
            raise StoreError(f"metrics need the package prometheus_client: {error}", kind="refused",
                             remedy="pip install 'weightwire[store]'") from None
        registry = CollectorRegistry()
        registry.register(figures)
        try:
            self._server, self._thread = start_http_server(int(port), host.strip("[]") or "127.0.0.1", registry)
        except (OSError, ValueError, OverflowError) as error:
            raise StoreError(f"metrics cannot be served at {listen}: {error}", kind="refused", remedy="HOST:PORT, such as 127.0.0.1:9464") from None
        self.address = f"{host or '127.0.0.1'}:{self._server.server_port}"

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
