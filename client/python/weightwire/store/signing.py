"""Who may write versions: manifests signed with an Ed25519 key of the job, by the package `cryptography`.

A signed record is its line of JSON, and a second one: {"ed25519": the signature of the first line, "key": which key}, both in
hex. A manifest has the digests of all that belongs to it (its parts, its layout, the manifest that it is based on), so its
signature is enough for the version.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Union

from weightwire.store.objects import StoreError
from weightwire.store.parts import digest

Paths = Sequence[Union[str, "os.PathLike[str]"]]


class Signer:
    """The private key in a PEM file (`openssl genpkey -algorithm ed25519`)."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]):
        serialization, ed25519, _ = _cryptography()
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise _no_key(path, error) from error
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise _no_key(path, "it is a key of another kind")
        self._key, self._name = key, _name(key.public_key())

    def sign(self, line: bytes) -> bytes:
        """The record of a line of JSON."""
        signature = json.dumps({"ed25519": self._key.sign(line).hex(), "key": self._name})
        return line + b"\n" + signature.encode() + b"\n"


class TrustedKeys:
    """Public keys in PEM files (`openssl pkey -pubout`): a record is good that one of them signed, so that keys can change."""

    def __init__(self, paths: Paths):
        serialization, ed25519, self._invalid = _cryptography()
        self._keys: Dict[str, Any] = {}
        for path in paths:
            try:
                key = serialization.load_pem_public_key(Path(path).read_bytes())
            except (OSError, ValueError, TypeError) as error:
                raise _no_key(path, error) from error
            if not isinstance(key, ed25519.Ed25519PublicKey):
                raise _no_key(path, "it is a key of another kind")
            self._keys[_name(key)] = key

    def check(self, record: bytes, where: str) -> None:
        """StoreError (signature)."""
        line, _, rest = record.partition(b"\n")
        try:
            said = json.loads(rest.decode()) if rest.strip() else {}
            key, signature = self._keys.get(str(said.get("key"))), bytes.fromhex(str(said.get("ed25519", "")))
        except (ValueError, AttributeError, RecursionError):
            key, signature = None, b""
        if not signature:
            raise _refused(where, "it is not signed")
        if key is None:
            raise _refused(where, f"it is signed by another key, {str(said.get('key'))[:80]}")
        try:
            key.verify(signature, line)
        except self._invalid:
            raise _refused(where, "its signature is not of these bytes") from None


def signer(path: Optional[Union[str, "os.PathLike[str]"]]) -> Optional[Signer]:
    return Signer(path) if path else None


def trusted(paths: Paths) -> Optional[TrustedKeys]:
    return TrustedKeys(paths) if paths else None


def _name(public: Any) -> str:
    serialization, _, _ = _cryptography()
    return digest(public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))[:16]


def _cryptography() -> Any:
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise StoreError(f"signatures need the package cryptography: {error}", kind="refused", remedy="pip install 'weightwire[store]'") from None
    return serialization, ed25519, InvalidSignature


def _no_key(path: Any, why: object) -> StoreError:
    return StoreError(f"{path}: no Ed25519 key in PEM: {why}", kind="refused",
                      remedy="openssl genpkey -algorithm ed25519 -out KEY; openssl pkey -in KEY -pubout -out PUBLIC")


def _refused(where: str, what: str) -> StoreError:
    return StoreError(f"{where}: {what}", kind="signature", remedy="the writer needs --sign KEY, and its public key is named with --trust; "
                                                                    "else somebody without the key has written there")
