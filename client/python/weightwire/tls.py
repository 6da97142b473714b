"""Certificates for connections to a coordinator: mTLS where files are named, plaintext else.

A sidecar's Unix socket needs none of this."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any, Callable, Generic, Sequence, TypeVar

import grpc

from weightwire import errors

Options = Sequence[tuple[str, Any]]
Channel_ = TypeVar("Channel_")


@dataclass(frozen=True)
class Tls:
    """PEM files: the own certificate chain, its key, and whom to believe. `server_name` is the name in the coordinator's
    certificate, where it is not the host that is dialled. The files may be replaced while a client lives."""

    cert: str
    key: str
    ca: str
    server_name: str = ""

    @classmethod
    def from_environment(cls) -> "Tls | None":
        """WEIGHTWIRE_TLS_CERT, _KEY, _CA and _SERVER_NAME, as `wwctl` reads them; None where none is set."""
        cert, key, ca = (os.environ.get(f"WEIGHTWIRE_TLS_{name}", "") for name in ("CERT", "KEY", "CA"))
        if not (cert or key or ca):
            return None
        if not (cert and key and ca):
            raise _wrong("WEIGHTWIRE_TLS_CERT, _KEY and _CA belong together: set all three or none")
        return cls(cert, key, ca, os.environ.get("WEIGHTWIRE_TLS_SERVER_NAME", ""))

    def credentials(self) -> grpc.ChannelCredentials:
        try:
            ca, key, cert = (open(path, "rb").read() for path in (self.ca, self.key, self.cert))
        except OSError as error:
            raise _wrong(f"{error.filename}: {error.strerror}") from None
        return grpc.ssl_channel_credentials(ca, key, cert)

    def options(self) -> Options:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does."""
        try:
            return tuple(os.stat(path).st_mtime_ns for path in (self.cert, self.key, self.ca))
        except OSError:  # just being replaced: what was read last still serves
            return ()


class Channels(Generic[Channel_]):
    """The channel of one client, another one once the files have changed; calls on older ones go on."""

    def __init__(self, module: Any, address: str, options: Options, tls: Tls | None):
        """`module`: grpc or grpc.aio."""
        self._open: Callable[[], Channel_] = lambda: (
            module.insecure_channel(address, options=options) if tls is None else
            module.secure_channel(address, tls.credentials(), options=[*options, *tls.options()]))
        self._tls = tls
        self._lock = threading.Lock()
        self._stamp = tls.stamp() if tls else ()
        self.opened = [self._open()]  #: the newest last

    def newest(self) -> Channel_:
        with self._lock:
            stamp = self._tls.stamp() if self._tls else ()
            if stamp and stamp != self._stamp:
                self.opened.append(self._open())
                self._stamp = stamp
            return self.opened[-1]


def _wrong(message: str) -> errors.RefusedError:
    return errors.RefusedError(message, code="INVALID_ARGUMENT", reason="config_invalid")
