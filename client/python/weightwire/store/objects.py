"""An object store, whichever it is: what the rest of this package needs of one, and its errors in our words.

`obstore` (Rust's object_store) does the work: requests, signatures, retries with jitter, TLS. docs/regions.md says why it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple
from urllib.parse import parse_qs, unquote, urlsplit

from weightwire.errors import WeightwireError

#: Of one object that is read whole: what a pointer, a manifest or a layout may have.
SMALL_BYTES_MAX = 256 << 20
#: Begins the names of objects that are there for a moment, to see whether a store keeps to conditions of a write. Followers may write there.
PROBES = "leases/conditions-"
_EXTRA = "pip install 'weightwire[store]'"


class StoreError(WeightwireError):
    """The store, or what lies in it, cannot be used. `kind` is one word for counters:

    missing      an object is not there
    damaged      bytes are not what their digest says, or a record is no record
    signature    a manifest is not signed by the key of the job
    denied       credentials: none, expired, or without the right
    full         no room
    lost_race    somebody else wrote first
    unavailable  the store did not answer, or only with errors, as long as was retried
    refused      what was asked for makes no sense
    """

    def __init__(self, message: str, *, kind: str, remedy: str = "", rank: str = "", tensor: str = ""):
        code, reason = _CODES[kind]
        super().__init__(message, code=code, reason=reason, rank=rank, tensor=tensor, remedy=remedy)
        self.kind = kind


_CODES = {"missing": ("NOT_FOUND", "io_error"), "damaged": ("DATA_LOSS", "digest_mismatch"),
          "signature": ("PERMISSION_DENIED", "permission_denied"), "denied": ("PERMISSION_DENIED", "permission_denied"),
          "full": ("RESOURCE_EXHAUSTED", "io_error"), "lost_race": ("ABORTED", "stale_version"),
          "unavailable": ("UNAVAILABLE", "io_error"), "refused": ("INVALID_ARGUMENT", "invalid_request")}


@dataclass(frozen=True)
class Found:
    """An object that is there."""

    path: str
    bytes: int
    #: By the store's own clock.
    modified: datetime
    #: What a conditional write names: the ETag; in Google's storage the generation.
    etag: str


class Objects:
    """Everything below one URL; paths are relative to it. Any number of threads. All methods raise StoreError."""

    def __init__(self, url: str, *, endpoint: Optional[str] = None, retry_seconds: float = 60.0, timeout: float = 120.0):
        """`url`: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER; `?endpoint=URL` or `endpoint` for an S3 server that is
        not Amazon's. `retry_seconds`: how long a request is tried again; `timeout`: of one attempt, in seconds."""
        try:
            import obstore
            from obstore import exceptions, store
        except ImportError as error:
            raise StoreError(f"{url}: object stores need the package obstore: {error}", kind="refused", remedy=_EXTRA) from None
        self._io, self._errors = obstore, exceptions
        self._conditions = threading.Lock()
        self._condition: Optional[_Condition] = None
        self._retry_seconds, self._timeout = retry_seconds, timeout
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        if unknown := sorted(query.keys() - {"endpoint"}):
            raise StoreError(f"{url}: {unknown[0]} is not known", kind="refused", remedy="the one option in a URL is ?endpoint=URL")
        #: Without options, for people and for keys.
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
        self._folder: Optional[Path] = None
        self._tag = "version" if parts.scheme == "gs" else "e_tag"
        if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path.strip("/"):
            self._folder = Path(unquote(parts.path))
            try:
                self._store: Any = store.LocalStore(self._folder, mkdir=True, automatic_cleanup=True)
            except Exception as error:
                raise self._error(error, "the folder") from error
        elif parts.scheme in ("s3", "gs") and parts.netloc:
            self._store = self._remote(store, parts.scheme, parts.netloc, parts.path.strip("/"),
                                       endpoint or (query["endpoint"][0] if "endpoint" in query else None))
        else:
            raise StoreError(f"{url}: no store has such a URL", kind="refused",
                             remedy="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER")

    def _remote(self, store: Any, scheme: str, bucket: str, prefix: str, endpoint: Optional[str]) -> Any:
        options: Dict[str, Any] = dict(
            prefix=prefix or None, client_options={"timeout": timedelta(seconds=self._timeout)},
            retry_config={"max_retries": 1000, "retry_timeout": timedelta(seconds=self._retry_seconds),
                          "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}})
        try:
            if scheme == "gs":
                if endpoint is not None:
                    raise StoreError("an endpoint goes with s3://", kind="refused",
                                     remedy="reach Google's storage through its S3 interface as s3://, or as gs:// without an endpoint")
                return store.GCSStore(bucket, **options)
            endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
            if endpoint:
                options["endpoint"] = endpoint
                options["client_options"]["allow_http"] = endpoint.startswith("http://")
            if (provider := _from_profile(endpoint)) is not None:
                options["credential_provider"] = provider
            return store.S3Store(bucket, **options)
        except StoreError:
            raise
        except Exception as error:
            raise self._error(error, f"{scheme}://{bucket}") from error

    def get(self, path: str, bytes_max: int = SMALL_BYTES_MAX) -> Tuple[Any, Found]:
        """An object whole, as something with the buffer protocol. StoreError: it is not there, or longer than that."""
        try:
            got = self._io.get(self._store, path)
            found = self._found(got.meta)
            if found.bytes > bytes_max:
                raise StoreError(f"{self.at(path)} has {found.bytes} bytes, at most {bytes_max} were expected", kind="damaged",
                                 remedy="something else was written there: see who writes to this store")
            return got.bytes(), found
        except StoreError:
            raise
        except Exception as error:
            raise self._error(error, path) from error

    def find(self, path: str) -> Optional[Found]:
        """None: it is not there."""
        try:
            return self._found(self._io.head(self._store, path))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error(error, path) from error

    def put(self, path: str, data: Any) -> str:
        """Writes an object whole, atomically; returns its ETag."""
        return self._put(path, data, "overwrite")

    def put_if(self, path: str, data: bytes, etag: Optional[str]) -> str:
        """The same if the object has this ETag, or, None, if there is none. StoreError `lost_race`: it has another one, or a
        request that was repeated had succeeded: who gets it reads the object. `refused`: this store does not keep to conditions."""
        if self._folder is not None:
            return self._put(path, data, "create") if etag is None else self._replace(self._folder, path, data, etag)
        condition = self.check_conditions()
        return self._put(path, data, "create" if etag is None else condition(etag))

    def check_conditions(self) -> "_Condition":
        """Asks the store, once, whether it keeps to conditions of a write; how it is told one. StoreError `refused`: it does not."""
        if self._folder is not None:
            return self._as_it_is
        with self._conditions:
            if self._condition is None:
                self._condition = self._condition_that_is_kept()
            return self._condition

    def _condition_that_is_kept(self) -> "_Condition":
        """How this store is told a condition. S3 servers differ: some pass over it without a word, and then of two writers each would
        overwrite what the other wrote; Ceph 16 compares an ETag with its quotes, which no object has. So it is tried once, before
        anything depends on it, with an object of no meaning."""
        path = f"{PROBES}{secrets.token_hex(6)}"
        self.put(path, b"0")
        try:
            if self._wins(path, "create"):
                raise self._keeps_no_condition("a write that must find nothing has overwritten an object")
            for condition in (self._as_it_is, self._without_quotes):
                if self._wins(path, condition(_NO_VERSION if self._tag == "version" else _NO_ETAG)):
                    raise self._keeps_no_condition("a write on condition of another ETag has overwritten an object")
                found = self.find(path)
                if found is not None and self._wins(path, condition(found.etag)):
                    return condition
            raise self._keeps_no_condition("a write on condition of the ETag that the object has is refused")
        finally:
            try:
                self.delete([path])
            except StoreError:
                pass  # `gc` collects it

    def _wins(self, path: str, mode: Any) -> bool:
        said = secrets.token_bytes(16)
        try:
            self._put(path, said, mode)
            return True
        except StoreError as error:
            if error.kind != "lost_race":
                raise
            return bytes(self.get(path)[0]) == said  # it was repeated, and the first one had won

    def _keeps_no_condition(self, how: str) -> StoreError:
        return StoreError(f"{self.url}: this store does not keep to conditions of a write: {how}", kind="refused",
                          remedy="a writer needs them for latest.json, and a barrier for its decision: see docs/regions.md, What a store must do")

    def _as_it_is(self, etag: str) -> Dict[str, str]:
        return {self._tag: etag}

    def _without_quotes(self, etag: str) -> Dict[str, str]:
        return {self._tag: etag.strip('"')}

    def _put(self, path: str, data: Any, mode: Any) -> str:
        try:
            done = self._io.put(self._store, path, data, mode=mode, use_multipart=False)
            return str(done[self._tag] or "")
        except Exception as error:
            raise self._error(error, path) from error

    def _replace(self, folder: Path, path: str, data: bytes, etag: str) -> str:
        """A shared file system has no conditional writes: a lock and a rename. The ETag is obstore's, of the inode, size and time."""
        target = folder / path
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with open(target.with_name(f".{target.name}.lock"), "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = self.find(path)
                if found is None or found.etag != etag:
                    raise StoreError(f"{self.at(path)} was written by somebody else", kind="lost_race")
                try:
                    with open(temporary, "xb") as out:
                        out.write(data)
                        out.flush()
                        os.fsync(out.fileno())
                    os.replace(temporary, target)
                finally:
                    temporary.unlink(missing_ok=True)
                now = self.find(path)
                return now.etag if now is not None else ""
        except OSError as error:
            raise self._error(error, path) from error

    def list(self, folder: str) -> Iterator[Found]:
        """All objects below a folder, in the order of their paths."""
        try:
            for page in self._io.list(self._store, folder.rstrip("/") + "/", chunk_size=1000):
                yield from sorted((self._found(meta) for meta in page if not meta["path"].rsplit("/", 1)[-1].startswith(".")),
                                  key=lambda found: found.path)
        except Exception as error:
            raise self._error(error, folder) from error

    def folders(self, folder: str) -> List[str]:
        """Names of the folders in a folder, sorted."""
        try:
            said = self._io.list_with_delimiter(self._store, folder.rstrip("/") + "/")
            return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in said["common_prefixes"])
        except Exception as error:
            raise self._error(error, folder) from error

    def delete(self, paths: Sequence[str]) -> None:
        """One that is not there is not missed."""
        try:
            if self._folder is None:
                self._io.delete(self._store, list(paths))
                return
            for path in paths:
                try:
                    self._io.delete(self._store, path)
                except FileNotFoundError:
                    pass
        except Exception as error:
            raise self._error(error, paths[0] if paths else "") from error

    def _found(self, meta: Any) -> Found:
        return Found(str(meta["path"]), int(meta["size"]), meta["last_modified"], str(meta[self._tag] or ""))

    def at(self, path: str) -> str:
        """For people."""
        return f"{self.url}/{path}"

    def _error(self, error: Exception, path: str) -> StoreError:
        """What obstore or the system says, in our words. Its message may be long, and has no credentials."""
        text, where = " ".join(str(error).split())[:600], self.at(path)
        if isinstance(error, FileNotFoundError):
            return StoreError(f"{where}: not found: {text}", kind="missing", remedy="`wwctl store ls` says what the store has")
        if isinstance(error, (self._errors.AlreadyExistsError, self._errors.PreconditionError, FileExistsError)):
            return StoreError(f"{where} was written by somebody else", kind="lost_race")
        # Before what follows: Ceph says 403 when a quota is reached.
        if any(word in text for word in ("No space left", "QuotaExceeded", "Disk quota", "XMinioStorageFull", "InsufficientStorage")):
            return StoreError(f"{where}: {text}", kind="full", remedy="`wwctl store gc`, or make room")
        if isinstance(error, (self._errors.PermissionDeniedError, self._errors.UnauthenticatedError, PermissionError)) or any(
                word in text for word in ("ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed",
                                          "InvalidToken", "credential", "TokenRefreshRequired")):
            return StoreError(f"{where}: {text}", kind="denied",
                              remedy="see the credentials (docs/regions.md, Credentials), their end, and this host's clock")
        if isinstance(error, (self._errors.InvalidPathError, self._errors.UnknownConfigurationKeyError)):
            return StoreError(f"{where}: {text}", kind="refused")
        if "<Code>NotImplemented" in text:
            return StoreError(f"{where}: this store does not know what was asked for: {text}", kind="refused",
                              remedy="see docs/regions.md, What a store must do")
        return StoreError(f"{where}: {text}", kind="unavailable",
                          remedy=f"it was tried for {self._retry_seconds:g} s; is the store up, and is this its address?")


#: What no object has.
_NO_ETAG, _NO_VERSION = f'"{"0" * 32}"', "1"
_Condition = Callable[[str], Dict[str, str]]


def _from_profile(endpoint: Optional[str]) -> Any:
    """Credentials of ~/.aws and of AWS_PROFILE, which boto3 reads; None where the environment, a role of the pod or of the
    instance has them, which obstore knows itself."""
    named = os.environ.get("AWS_PROFILE")
    has_file = Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser().is_file()
    if os.environ.get("AWS_ACCESS_KEY_ID") or not (named or has_file):
        return None
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise StoreError(f"the AWS profile {named or 'in ~/.aws'} is read by boto3, which is not installed", kind="refused",
                         remedy="pip install boto3, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from None
    try:
        return Boto3CredentialProvider(boto3.Session())
    except Exception as error:
        raise StoreError(f"the AWS profile {named or 'default'}: {error}", kind="denied",
                         remedy="aws configure, or another AWS_PROFILE") from error
