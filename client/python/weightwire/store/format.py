"""The records of a store, all JSON: what a version is, what its bytes are the bytes of, and which version is the newest.

Whatever is read is checked here, field by field, before anybody uses it. docs/regions.md has the format for other readers.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Dict, List, Mapping, NoReturn, Optional, Tuple

from weightwire.errors import WeightwireError
from weightwire.memory import TensorMeta
from weightwire.store.objects import StoreError
from weightwire.store.parts import Block, digest, parts_of

FORMAT = "weightwire-store"
NUMBER = 1
LATEST = "latest.json"
VERSIONS = "versions"
LAYOUTS = "layouts"
MANIFEST = "manifest.json"
ANCHOR = "anchor.json"
PART_BYTES = 64 << 20
_PART_BYTES_MAX = 1 << 30
_RANKS_MAX = 16_384
_VERSION_MAX = 2**63 - 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_FOLDER = re.compile(r"versions/([0-9]{20})-([0-9a-f]{12})")
_MANIFEST_PATH = re.compile(r"(versions/[0-9]{20}-[0-9a-f]{12})/(manifest|anchor)\.json")


@dataclass(frozen=True)
class Layout:
    """What a version's bytes are the bytes of: the model, and what each rank holds. The same for all versions of a chain."""

    spec: str
    config: str  #: the text of the model's config.json
    ranks: Tuple[Tuple[TensorMeta, ...], ...]
    part_bytes: int = PART_BYTES
    _parts: Dict[int, List[List[Block]]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def parts(self, rank: int) -> List[List[Block]]:
        """The blocks of each of a rank's parts."""
        if rank not in self._parts:  # asked for with every part, of models with 100,000 blocks
            self._parts[rank] = parts_of(self.ranks[rank], self.part_bytes)
        return self._parts[rank]

    @cached_property
    def nbytes(self) -> int:
        return sum(meta.nbytes for rank in self.ranks for meta in rank)

    def text(self) -> bytes:
        return _dump({"format": f"{FORMAT}-layout", "number": NUMBER, "spec": self.spec, "config": self.config,
                      "part_bytes": self.part_bytes,
                      "ranks": [[[meta.name, meta.dtype, list(meta.shape)] for meta in rank] for rank in self.ranks]})

    @cached_property
    def digest(self) -> str:
        return digest(self.text())

    @staticmethod
    def path(wanted: str) -> str:
        return f"{LAYOUTS}/{wanted}.json"

    @classmethod
    def parse(cls, data: bytes, where: str) -> "Layout":
        said = _Record(data, where, f"{FORMAT}-layout")
        ranks = []
        for entry in said.list("ranks"):
            rank = []
            for one in entry if isinstance(entry, list) else said.wrong("ranks"):
                if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], str) and isinstance(one[1], str)
                        and isinstance(one[2], list) and all(isinstance(n, int) and 0 <= n < 2**40 for n in one[2])):
                    said.wrong("ranks")
                try:
                    rank.append(TensorMeta(one[0], one[1], tuple(one[2])))
                    rank[-1].nbytes  # of a dtype that is known  # noqa: B018
                except WeightwireError as error:
                    raise _damaged(where, str(error)) from error
            if len({meta.name for meta in rank}) != len(rank):
                said.wrong("ranks")
            ranks.append(tuple(rank))
        if not 0 < len(ranks) <= _RANKS_MAX:
            said.wrong("ranks")
        return cls(said.text("spec"), said.text("config"), tuple(ranks), said.count("part_bytes", 1, _PART_BYTES_MAX))


@dataclass(frozen=True)
class Link:
    """Another manifest, by its path and the digest of all its bytes; `state`: of the bytes that it stands for."""

    path: str
    digest: str
    state: str
    version: int
    lineage: int

    def said(self) -> Dict[str, Any]:
        return {"path": self.path, "digest": self.digest, "state": self.state, "version": self.version, "lineage": self.lineage}


@dataclass(frozen=True)
class Part:
    """An object: its size and digest, and the digest of the bytes that it stands for."""

    bytes: int
    digest: str
    content: str


@dataclass(frozen=True)
class Manifest:
    """One version in one form. An `anchor` says all bytes, a `delta` what makes them of those of `base`."""

    folder: str
    kind: str
    version: int
    lineage: int
    layout: str  #: digest of its text
    ranks: Tuple[Tuple[Part, ...], ...]
    base: Optional[Link] = None
    #: The newest anchor that was whole when this was written, for whoever has nothing yet. None: this is one itself.
    anchor: Optional[Link] = None
    #: Deltas since the anchor, this one included, and the bytes of their objects.
    chain: int = 0
    chain_bytes: int = 0
    #: As `wwctl verify` says at the site of the writer; empty where it was not asked.
    content_root: str = ""
    content_class: str = ""
    job: str = ""
    created: str = ""  #: by the writer's clock, for people
    #: ANCHOR: of an anchor that was put beside a delta of the same version.
    file: str = MANIFEST
    #: Of all bytes of the record, signature included.
    digest: str = ""

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.file}"

    @property
    def order(self) -> Tuple[int, int]:
        """Greater for what is newer."""
        return self.lineage, self.version

    @property
    def name(self) -> str:
        """For people."""
        return f"version {self.version}" + (f" of lineage {self.lineage}" if self.lineage != 1 else "")

    @property
    def nbytes(self) -> int:
        """Of its objects, this record not counted."""
        return sum(part.bytes for rank in self.ranks for part in rank)

    @property
    def state(self) -> str:
        """The digest of the bytes that it stands for: equal in every form and attempt that has these bytes in this layout."""
        return state_of(self.layout, [[part.content for part in rank] for rank in self.ranks])

    @property
    def link(self) -> Link:
        return Link(self.path, self.digest, self.state, self.version, self.lineage)

    def object(self, rank: int, number: int) -> str:
        return f"{self.folder}/{self.kind}-{rank:05d}-{number:05d}"

    def objects(self) -> List[str]:
        return [self.object(rank, number) for rank, parts in enumerate(self.ranks) for number in range(len(parts))]

    def text(self) -> bytes:
        """One line, without a signature."""
        return _dump({
            "format": FORMAT, "number": NUMBER, "folder": self.folder, "file": self.file, "kind": self.kind, "version": self.version, "lineage": self.lineage,
            "job": self.job, "created": self.created, "layout": self.layout, "state": self.state,
            "base": self.base and self.base.said(), "anchor": self.anchor and self.anchor.said(), "chain": self.chain,
            "chain_bytes": self.chain_bytes, "content": {"root": self.content_root, "class": self.content_class},
            "ranks": [[[part.bytes, part.digest, part.content] for part in rank] for rank in self.ranks]})

    @classmethod
    def parse(cls, data: bytes, path: str, where: str) -> "Manifest":
        """`data`: the whole record, whose signature somebody else looks at."""
        said = _Record(data.split(b"\n", 1)[0], where, FORMAT)
        found = _MANIFEST_PATH.fullmatch(path)
        content = said.value.get("content")
        if not isinstance(content, dict):
            said.wrong("content")
        made = cls(
            folder=said.text("folder"), kind=said.text("kind"), version=said.count("version", 1, _VERSION_MAX),
            lineage=said.count("lineage", 1, _VERSION_MAX), layout=said.digest("layout"), ranks=_ranks(said),
            base=said.link("base"), anchor=said.link("anchor"), chain=said.count("chain", 0, 2**31),
            chain_bytes=said.count("chain_bytes", 0, 2**62), content_root=str(content.get("root", "")),
            content_class=str(content.get("class", "")), job=said.text("job"), created=said.text("created"), file=said.text("file"), digest=digest(data))
        if found is None or made.folder != found.group(1) or made.path != path or folder_version(made.folder) != made.version:
            raise _damaged(where, f"it says that it is {made.path}: records were exchanged")
        is_delta = made.kind == "delta"
        if made.kind not in ("anchor", "delta") or is_delta != (made.base is not None) or is_delta != (made.chain > 0):
            said.wrong("kind")
        if (made.anchor is None) != (made.kind == "anchor"):
            said.wrong("anchor")
        for link in (made.base, made.anchor):
            if link is not None and (link.path == path or (link.lineage, link.version) >= made.order):
                said.wrong("base")  # so that no chain is a ring
        if said.digest("state") != made.state:
            said.wrong("state")
        return made

    def check(self, layout: Layout) -> None:
        """StoreError: it does not have the parts of this layout."""
        have = [len(parts) for parts in self.ranks]
        if have != [len(layout.parts(rank)) for rank in range(len(layout.ranks))]:
            raise _damaged(self.path, "its parts are not those of its layout")


def _ranks(said: "_Record") -> Tuple[Tuple[Part, ...], ...]:
    ranks = []
    for entry in said.list("ranks"):
        parts = []
        for one in entry if isinstance(entry, list) else said.wrong("ranks"):
            if not (isinstance(one, list) and len(one) == 3 and isinstance(one[0], int) and one[0] >= 0
                    and all(isinstance(d, str) and _DIGEST.fullmatch(d) for d in one[1:])):
                said.wrong("ranks")
            parts.append(Part(*one))
        ranks.append(tuple(parts))
    return tuple(ranks)


def state_of(layout: str, contents: List[List[str]]) -> str:
    return hashlib.sha256(_dump([layout, contents])).hexdigest()


def new_folder(version: int) -> str:
    """Of one attempt to store a version."""
    return f"{VERSIONS}/{version:020d}-{secrets.token_hex(6)}"


def folder_version(folder: str) -> int:
    """0: it is no folder of a version."""
    found = _FOLDER.fullmatch(folder)
    return int(found.group(1)) if found else 0


@dataclass(frozen=True)
class Latest:
    """The one object that changes: which version is the newest."""

    manifest: Link
    etag: str = ""

    def text(self) -> bytes:
        return _dump({"format": f"{FORMAT}-latest", "number": NUMBER, "manifest": self.manifest.said()}) + b"\n"

    @classmethod
    def parse(cls, data: bytes, etag: str, where: str) -> "Latest":
        said = _Record(data, where, f"{FORMAT}-latest")
        link = said.link("manifest")
        if link is None:
            said.wrong("manifest")
        return cls(link, etag)

    @property
    def order(self) -> Tuple[int, int]:
        return self.manifest.lineage, self.manifest.version


class _Record:
    """A JSON object, whose fields are looked at one by one."""

    def __init__(self, data: bytes, where: str, kind: str):
        self._where = where
        try:
            value = json.loads(bytes(data).decode())
        except (ValueError, RecursionError) as error:
            raise _damaged(where, f"no JSON: {error}") from error
        if not isinstance(value, dict) or value.get("format") != kind:
            raise _damaged(where, f"no record of the form {kind}")
        if value.get("number") != NUMBER:
            raise StoreError(f"{where}: of form {value.get('number')}, this release knows {NUMBER}", kind="refused",
                             remedy="use the release of weightwire that wrote it")
        self.value: Mapping[str, Any] = value

    def wrong(self, name: str) -> NoReturn:
        raise _damaged(self._where, f"its field {name} is malformed")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        return value if isinstance(value, str) else self.wrong(name)

    def digest(self, name: str) -> str:
        value = self.text(name)
        return value if _DIGEST.fullmatch(value) else self.wrong(name)

    def count(self, name: str, least: int, most: int) -> int:
        value = self.value.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most else self.wrong(name)

    def list(self, name: str) -> List[Any]:
        value = self.value.get(name)
        return value if isinstance(value, list) else self.wrong(name)

    def link(self, name: str) -> Optional[Link]:
        value = self.value.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong(name)
        inner = _Inner(value, f"{self._where}, {name}")
        path = inner.text("path")
        if not _MANIFEST_PATH.fullmatch(path):
            self.wrong(name)
        return Link(path, inner.digest("digest"), inner.digest("state"), inner.count("version", 1, _VERSION_MAX),
                    inner.count("lineage", 1, _VERSION_MAX))


class _Inner(_Record):
    def __init__(self, value: Mapping[str, Any], where: str):
        self._where, self.value = where, value


def _damaged(where: str, what: str) -> StoreError:
    return StoreError(f"{where}: {what}", kind="damaged", remedy="see who writes to this store; `wwctl store verify` looks at all of it")


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def sealed(manifest: Manifest, record: bytes) -> Manifest:
    """The manifest with the digest of the record that was written of it."""
    return replace(manifest, digest=digest(record))
