"""Certificates or job tokens for connections to a coordinator: TLS where files are named, plaintext else.

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
    certificate, where it is not the host that is dialled. `token_file` stands in for `cert` and `key`, which are empty
    then: a file with a job token of `wwctl token`, shown with every call. The files may be replaced while a client
    lives."""

    cert: str
    key: str
    ca: str
    server_name: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        if not self.ca or bool(self.cert) != bool(self.key) or bool(self.cert) == bool(self.token_file):
            raise _wrong("TLS takes a ca, and either cert and key or a token_file")

    @classmethod
    def with_token(cls, token_file: str, ca: str, server_name: str = "") -> "Tls":
        """Of who has no certificate."""
        return cls("", "", ca, server_name, token_file)

    @classmethod
    def from_environment(cls) -> "Tls | None":
        """WEIGHTWIRE_TLS_CERT, _KEY, _CA and _SERVER_NAME, and WEIGHTWIRE_TOKEN_FILE, as `wwctl` reads them; None where
        none is set."""
        cert, key, ca = (os.environ.get(f"WEIGHTWIRE_TLS_{name}", "") for name in ("CERT", "KEY", "CA"))
        token = os.environ.get("WEIGHTWIRE_TOKEN_FILE", "")
        if not (cert or key or ca or token):
            return None
        if not (ca and (bool(cert), bool(key), bool(token)) in ((True, True, False), (False, False, True))):
            raise _wrong("WEIGHTWIRE_TLS_CERT, _KEY and _CA belong together: set all three or none; or _CA and "
                         "WEIGHTWIRE_TOKEN_FILE")
        return cls(cert, key, ca, os.environ.get("WEIGHTWIRE_TLS_SERVER_NAME", ""), token)

    def credentials(self) -> grpc.ChannelCredentials:
        if not self.token_file:
            return grpc.ssl_channel_credentials(_bytes(self.ca), _bytes(self.key), _bytes(self.cert))
        _bytes(self.token_file)
        shown = grpc.metadata_call_credentials(_ShowsToken(self.token_file))
        return grpc.composite_channel_credentials(grpc.ssl_channel_credentials(_bytes(self.ca)), shown)

    def options(self) -> Options:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def stamp(self) -> tuple[int, ...]:
        """Changes when a file does."""
        try:
            # (A token is read for each call: what changes it needs no new channel.)
            return tuple(os.stat(path).st_mtime_ns for path in (self.cert, self.key, self.ca) if path)
        except OSError:  # just being replaced: what was read last still serves
            return ()


class _ShowsToken(grpc.AuthMetadataPlugin):
    """Puts what the file holds into a call's metadata; gRPC asks only on connections with TLS."""

    def __init__(self, path: str):
        self._path = path

    def __call__(self, context: Any, callback: Any) -> None:
        try:
            callback((("weightwire-token", _bytes(self._path).decode("ascii").strip()),), None)
        except (errors.WeightwireError, UnicodeDecodeError) as error:
            callback((), error)


def _bytes(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _wrong(f"{error.filename}: {error.strerror}") from None


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
