"""A store of versions: every byte that comes out of it is the byte that went in, or nothing comes out of it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import store_reader
from conftest import ROOT
from store_server import KEYS, Proxy, half_the_time
from weightwire.memory import TensorMeta
from weightwire.store import Image, Layout, Objects, Reader, Signer, StoreError, Uploader, TrustedKeys, gc, verify
from weightwire.store.retention import Lease

pytestmark = pytest.mark.usefixtures("store_environment")

#: Odd sizes, a scalar, an empty tensor, several blocks of 1 MiB, and every width of an element.
RANKS = ((TensorMeta("a", "BF16", (1201, 603)), TensorMeta("b", "F32", (77, 3)), TensorMeta("c", "F8_E4M3", (1_050_001,)), TensorMeta("d", "F16", ())),
         (TensorMeta("e", "I64", (5, 7)), TensorMeta("empty", "BF16", (0, 4)), TensorMeta("f", "F32", (300_001,)), TensorMeta("g", "BOOL", (3,))))
LAYOUT = Layout("fsdp:dp2", "{}", RANKS, 256 << 10)
#: Two parts for each rank.
SMALL = Layout("fsdp:dp2", "{}", ((TensorMeta("a", "BF16", (301, 7)), TensorMeta("b", "BF16", (2000,))), (TensorMeta("c", "F32", (900,)), TensorMeta("d", "F32", (33, 50)))), 4000)


@pytest.fixture(params=["file", "s3"])
def url(request, tmp_path):
    return f"file://{tmp_path}/store" if request.param == "file" else request.getfixturevalue("s3").url(tmp_path.name + "/nested")


class Weights:
    """What a trainer holds, as arrays of the test, and a step of it."""

    def __init__(self, layout: Layout = SMALL):
        self.random = np.random.default_rng(1)
        self.image = Image.empty(layout)
        for flats in self.image.flats:
            for flat in flats:
                flat[...] = self.random.integers(0, 2 ** (8 * flat.itemsize) - 1, flat.shape, flat.dtype)
        self.base = None
        self.versions: dict[int, list[list[bytes]]] = {}

    def step(self, share: float = 0.02) -> None:
        for flats in self.image.flats:
            for flat in flats:
                moved = self.random.random(flat.shape) < share
                flat[moved] += self.random.choice(np.array([1, 1, 1, 900]), int(moved.sum())).astype(flat.dtype)

    def store(self, uploader: Uploader, version: int, lineage: int = 1, anchor: bool = True):
        self.versions[version] = [[flat.tobytes() for flat in flats] for flats in self.image.flats]
        stored = uploader.store(version, lineage, self.image, self.base)
        if anchor and uploader.anchor_due:
            uploader.put_anchor(self.image)
        self.base = self.base or Image.empty(self.image.layout)
        self.base.copy_from(self.image)
        return stored

    def are(self, image: Image, version: int) -> bool:
        return [[flat.tobytes() for flat in flats] for flats in image.flats] == self.versions[version]


def filled(url: str, versions: int, anchor_every: int = 16, layout: Layout = SMALL, **more) -> tuple[Weights, Uploader]:
    weights, uploader = Weights(layout), Uploader(Reader(Objects(url)), layout, anchor_every=anchor_every, **more)
    assert uploader.adopt() is None
    for version in range(1, versions + 1):
        weights.store(uploader, version)
        weights.step()
    return weights, uploader


def newest(reader: Reader):
    return reader.manifest(reader.latest().manifest)


def test_every_version_comes_back_bit_for_bit(url):
    weights, uploader = Weights(LAYOUT), Uploader(Reader(Objects(url)), LAYOUT, anchor_every=3)
    reader, following, kinds = Reader(Objects(url)), Image.empty(LAYOUT), []
    for version in range(1, 9):
        kinds.append(weights.store(uploader, version).manifest.kind)
        if version not in (2, 3, 6):  # that follower is late for these
            loaded = reader.load(newest(reader), following)
            assert weights.are(following, version) and following.manifest.version == version
            assert loaded.bytes < weights.base.layout.nbytes * (1.01 if version == 1 else 0.3)
        weights.step()
    assert kinds == ["anchor"] + ["delta"] * 7
    for version in range(1, 9):
        cold = Image.empty(LAYOUT)
        loaded = reader.load(reader.version(version), cold)
        assert weights.are(cold, version)
        assert loaded.steps <= 4  # anchors lie beside 4 and 7
    assert [one.error for one in verify(reader)] == [""] * 10


@pytest.mark.parametrize("share, kind, of_the_bytes", [(0, 3, 0.002), (0.01, 3, 0.03), (0.3, 2, 0.6)])
def test_blocks_that_are_mostly_zeros_come_back_bit_for_bit(tmp_path, share, kind, of_the_bytes):
    """Of every dtype, with negative zeros and NaNs among them; into memory that holds another version, and by the reader that shares no code."""
    weights = Weights(LAYOUT)
    old = [[flat.copy() for flat in flats] for flats in weights.image.flats]
    for flats in weights.image.flats:
        for flat in flats:
            flat[weights.random.random(flat.shape) >= share] = 0
            flat[1:2], flat[3:4] = 1 << (8 * flat.itemsize - 1), 2 ** (8 * flat.itemsize) - 1
    reader, image = Reader(Objects(f"file://{tmp_path}/store")), Image.empty(LAYOUT)
    uploader = Uploader(reader, LAYOUT)
    assert uploader.adopt() is None
    weights.store(uploader, 1)
    for flats, before in zip(image.flats, old, strict=True):
        for flat, other in zip(flats, before, strict=True):
            flat[...] = other
    reader.load(newest(reader), image)
    assert weights.are(image, 1)
    assert [[data for _, _, data in rank.values()] for rank in store_reader.read(tmp_path / "store")] == weights.versions[1]
    lengths: dict[int, int] = {}
    for path in (tmp_path / "store").glob("versions/*/anchor-*-*"):
        data, place = path.read_bytes(), 8
        while place < len(data):
            word = int.from_bytes(data[place:place + 4], "little")
            lengths[word >> 24] = lengths.get(word >> 24, 0) + (word & 0xFFFFFF)
            place += 4 + (word & 0xFFFFFF)
    assert max(lengths, key=lengths.__getitem__) == kind and sum(lengths.values()) < of_the_bytes * LAYOUT.nbytes
    assert [one.error for one in verify(reader)] == [""]


def test_a_reader_that_shares_no_code_reads_the_same(tmp_path):
    weights, _ = filled(f"file://{tmp_path}/store", 6, 3, LAYOUT)
    assert len((ROOT / "tests/python/store_reader.py").read_text().splitlines()) <= 100
    for version in (None, 2, 4, 5):
        ranks = store_reader.read(tmp_path / "store", version)
        assert [[data for _, _, data in rank.values()] for rank in ranks] == weights.versions[version or 6]
        assert [[(name, dtype, shape) for name, (dtype, shape, _) in rank.items()] for rank in ranks] == \
            [[(meta.name, meta.dtype, meta.shape) for meta in rank] for rank in RANKS]


def test_of_several_who_write_the_pointer_one_wins_and_the_others_know(url):
    objects = Objects(url)
    objects.put_if("latest.json", b"0", None)
    for turn in range(5):
        _, found = objects.get("latest.json")
        outcomes: list[str] = []

        def write(number: int, etag: str = found.etag):
            try:
                Objects(url).put_if("latest.json", f"{turn} {number}".encode(), etag)
                outcomes.append(f"{turn} {number}")
            except StoreError as error:
                assert error.kind == "lost_race", error
        threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [bytes(objects.get("latest.json")[0]).decode()] == outcomes
    with pytest.raises(StoreError) as lost:
        objects.put_if("latest.json", b"0", None)
    assert lost.value.kind == "lost_race"


def test_a_second_writer_is_noticed_and_what_the_first_had_is_no_version(url):
    weights, uploader = filled(url, 2)
    other = Uploader(Reader(Objects(url)), SMALL)
    other.adopt()
    other.store(7, 1, weights.image, None)
    with pytest.raises(StoreError, match="another writer") as lost:
        uploader.store(3, 1, weights.image, weights.base)
    assert lost.value.kind == "lost_race"
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert image.manifest.version == 7
    with pytest.raises(StoreError, match="only grow"):
        uploader.store(6, 1, weights.image, weights.base)


def test_changes_of_a_version_that_the_pointer_does_not_say_any_more_are_not_stored(url):
    """What they are changes of may be collected at any time; a whole version is made of nothing."""
    weights, uploader = filled(url, 3)
    other = Uploader(Reader(Objects(url)), SMALL)
    other.adopt()
    other.store(4, 1, weights.base, None)
    with pytest.raises(StoreError, match="another writer") as lost:
        uploader.store(5, 1, weights.image, weights.base)
    assert lost.value.kind == "lost_race" and Reader(Objects(url)).latest().order == (1, 4)
    uploader.store(6, 1, weights.image, None)
    assert Reader(Objects(url)).latest().order == (1, 6)


@pytest.mark.parametrize("header", ["if-match", "if-none-match"])
def test_a_store_that_passes_over_conditions_is_refused_before_a_version_is_lost(s3, tmp_path, header):
    proxy = Proxy(s3.endpoint, edit=lambda headers: headers.pop(header, None))
    try:
        url = f"s3://weights/{tmp_path.name}?endpoint={proxy.endpoint}"
        with pytest.raises(StoreError, match="does not keep to conditions") as refused:
            filled(url, 1)
        assert refused.value.kind == "refused" and "What a store must do" in refused.value.remedy
        assert not [found.path for folder in ("versions", "layouts", "leases") for found in Objects(url).list(folder)]
        with pytest.raises(StoreError, match="does not keep to conditions"):
            Objects(url).put_if("barriers/decision.json", b"x", None)
        assert Objects(url).find("barriers/decision.json") is None
    finally:
        proxy.stop()


def test_a_store_that_compares_etags_without_their_quotes_is_written_and_read(s3, tmp_path):
    """As Ceph 16 does, of which `./dev test ceph` runs a real one: what has quotes is no object's ETag."""
    def edit(headers: dict) -> None:
        if (said := headers.get("if-match")) is not None:
            headers["if-match"] = f'"{"f" * 32}"' if said.startswith('"') else f'"{said}"'
    proxy = Proxy(s3.endpoint, edit=edit)
    try:
        url = f"s3://weights/{tmp_path.name}?endpoint={proxy.endpoint}"
        weights, _ = filled(url, 3)
        reader, image = Reader(Objects(url)), Image.empty(SMALL)
        reader.load(newest(reader), image)
        assert weights.are(image, 3)
    finally:
        proxy.stop()


def test_a_writer_that_is_always_too_late_ends_with_an_error(tmp_path, monkeypatch):
    """Of a pointer that is always another one than was read: the writer does not ask for ever."""
    weights, uploader = filled(f"file://{tmp_path}/store", 2)

    def lost(self, path, data, etag):
        raise StoreError(path, kind="lost_race")
    monkeypatch.setattr(Objects, "put_if", lost)
    with pytest.raises(StoreError, match="latest.json cannot be written") as late:
        weights.store(uploader, 3)
    assert late.value.kind == "unavailable"


def test_a_base_whose_named_anchor_was_collected_is_one_by_the_anchor_beside_it(tmp_path):
    url = f"file://{tmp_path}/store"
    weights, _ = filled(url, 3, anchor_every=2)  # 1 is an anchor, which 3 names; one lies beside 3
    reader = Reader(Objects(url))
    assert [len(gc(reader, keep=1).deleted), newest(reader).anchor.version] == [2, 1]
    uploader = Uploader(Reader(Objects(url)), SMALL)
    uploader.head = uploader.adopt()
    weights.step()
    assert weights.store(uploader, 4).manifest.anchor.version == 3
    image = Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert weights.are(image, 4)


def test_an_anchor_that_no_version_names_is_a_way_to_all_after_it(tmp_path, monkeypatch):
    """As when its writer did not hear that it had been written; what came before it is collected."""
    url = f"file://{tmp_path}/store"
    weights, uploader = filled(url, 3)
    put = Objects.put

    def unheard(self, path, data):
        put(self, path, data)
        if path.endswith("anchor.json"):
            raise StoreError(path, kind="unavailable")
    with monkeypatch.context() as patch:
        patch.setattr(Objects, "put", unheard)
        with pytest.raises(StoreError):
            uploader.put_anchor(weights.base)
    for version in (4, 5):
        weights.store(uploader, version)
        weights.step()
    assert len(gc(Reader(Objects(url)), keep=1).deleted) == 2
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    assert newest(reader).anchor.version == 1
    assert reader.load(newest(reader), image).steps == 3
    assert weights.are(image, 5)


def test_what_the_pointer_does_not_say_yet_is_not_collected(tmp_path):
    """The manifest of 4 is written, and the pointer to it comes later; of another writer 5 came to nothing."""
    url = f"file://{tmp_path}/store"
    weights, uploader = filled(url, 3, anchor_every=1)
    point_to, late = uploader._point_to, []
    uploader._point_to = late.append
    for version in (4, 5):
        weights.versions[version] = [[flat.tobytes() for flat in flats] for flats in weights.image.flats]
        uploader.head, uploader._latest = newest(Reader(Objects(url))), Reader(Objects(url)).latest()
        uploader.store(version, 1, weights.image, weights.base)
    assert sorted(int(folder.split("/")[1][:20]) for folder in gc(Reader(Objects(url)), keep=1).deleted) == [1, 2]
    point_to(late[0])
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert weights.are(image, 4)


def test_a_version_that_comes_after_the_listing_keeps_what_it_is_made_of(tmp_path, monkeypatch):
    """9 came to nothing, and is the newest of the listing; 10 is made of 3, which is then not the newest any more."""
    url, listed, done = f"file://{tmp_path}/store", Objects.list, []
    weights, uploader = filled(url, 3)
    other = Uploader(Reader(Objects(url)), SMALL)
    other.adopt()
    other._point_to = lambda _manifest: None
    other.store(9, 1, weights.image, None)

    def slow(self, folder):
        found = list(listed(self, folder))
        if folder == "versions" and not done:
            done.append(weights.store(uploader, 10))
        return iter(found)
    monkeypatch.setattr(Objects, "list", slow)
    gc(Reader(Objects(url)), keep=1)
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert weights.are(image, 10)


def test_a_layout_that_was_collected_before_its_first_version_is_written_again(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    weights, uploader, put_if = Weights(), Uploader(Reader(Objects(url)), SMALL), Objects.put_if
    uploader.adopt()

    def down(self, path, data, etag):
        raise StoreError(path, kind="unavailable")
    monkeypatch.setattr(Objects, "put_if", down)
    with pytest.raises(StoreError):
        weights.store(uploader, 1)
    shutil.rmtree(next((tmp_path / "store/versions").iterdir()))  # as if it had been killed before its manifest
    os.utime(next((tmp_path / "store/layouts").iterdir()), (1, 1))  # a day and more passes
    gc(Reader(Objects(url)), keep=1)
    assert not list(tmp_path.glob("store/layouts/*"))
    monkeypatch.setattr(Objects, "put_if", put_if)
    weights.store(uploader, 1)
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert weights.are(image, 1)


#: What becomes of an object, and of another one of its kind; None: it is gone.
DAMAGES = {
    "cut short": lambda data, other: data[:-1],
    "emptied": lambda data, other: b"",
    "longer": lambda data, other: data + b"x",
    "a bit": lambda data, other: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "exchanged": lambda data, other: other,
    "gone": lambda data, other: None}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("record", ["delta-00000-00001", "manifest.json"])
def test_damage_is_named_and_gone_around_by_the_next_anchor(tmp_path, damage, record):
    url, store = f"file://{tmp_path}/store", tmp_path / "store"

    def change(path: str, other: str, made) -> None:
        if (data := made((store / path).read_bytes(), (store / other).read_bytes())) is None:
            (store / path).unlink()
        else:
            (store / path).write_bytes(data)
    damaged_and_gone_around(url, damage, record, change)


def damaged_and_gone_around(url: str, damage: str, record: str, change) -> None:
    """`change(path, other, made)` makes an object hold what `made` says of its bytes and those of another one."""
    weights, uploader = filled(url, 3, anchor_every=4)
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    reader.load(reader.version(2), image)
    third = newest(reader).folder
    change(f"{third}/{record}", f"{reader.version(2).folder}/{record}", DAMAGES[damage])
    fresh = Reader(Objects(url))
    for _ in range(2):
        with pytest.raises(StoreError) as wrong:
            fresh.load(newest(fresh), image)
        assert wrong.value.kind == ("missing" if damage == "gone" else "damaged") and record in str(wrong.value)
    assert image.manifest.version == 2
    found = {one.path.rsplit("/", 1)[0]: one.error for one in verify(Reader(Objects(url)))}
    if (record, damage) != ("manifest.json", "gone"):
        assert found[third] and not any(error for folder, error in found.items() if folder < third)
    weights.store(uploader, 4)
    weights.step()
    with pytest.raises(StoreError):
        fresh.load(newest(fresh), image)
    weights.store(uploader, 5)  # an anchor lies beside it
    weights.step()
    weights.store(uploader, 6)
    fresh.load(newest(fresh), image)
    assert weights.are(image, 6)


def test_an_object_that_makes_other_bytes_than_its_manifest_says_is_refused(tmp_path, monkeypatch):
    """As a writer with bad memory would write it: the object has its digest, and its weights have not theirs."""
    from weightwire.store import uploading
    url, real = f"file://{tmp_path}/store", uploading.encode
    weights, uploader = filled(url, 2)

    def bad(library, now, base):
        changed = [(dtype, piece.copy()) for dtype, piece in now]
        changed[0][1][:1] ^= 1
        return real(library, changed, base)[0], real(library, now, base)[1]
    monkeypatch.setattr(uploading, "encode", bad)
    weights.store(uploader, 3)
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    with pytest.raises(StoreError, match="what it makes is not what the manifest says") as wrong:
        reader.load(newest(reader), image)
    assert wrong.value.kind == "damaged" and not image.whole
    assert [bool(one.error) for one in verify(Reader(Objects(url)))] == [False, False, True]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"format":"weightwire-store-latest","number":1}', b"\xff\xfe", b'{"format":"weightwire-store-latest",'
                                  b'"number":1,"manifest":{"path":"../../etc/passwd","digest":"' + b"0" * 64 + b'","state":"' + b"0" * 64 +
                                  b'","version":1,"lineage":1}}', b"[" * 100_000])
def test_a_pointer_that_is_none_is_refused(tmp_path, text):
    filled(f"file://{tmp_path}/store", 1)
    (tmp_path / "store/latest.json").write_bytes(text)
    with pytest.raises(StoreError, match="latest.json") as wrong:
        Reader(Objects(f"file://{tmp_path}/store")).latest()
    assert wrong.value.kind == "damaged"


def test_a_record_of_a_later_form_is_refused_by_name(tmp_path):
    filled(f"file://{tmp_path}/store", 1)
    path = tmp_path / "store/latest.json"
    path.write_text(path.read_text().replace('"number":1', '"number":2'))
    with pytest.raises(StoreError, match="of form 2, this release knows 1"):
        Reader(Objects(f"file://{tmp_path}/store")).latest()


def test_a_store_that_fails_half_of_the_time_is_written_and_read(s3, tmp_path):
    proxy = Proxy(s3.endpoint, half_the_time(3))
    url = f"s3://weights/{tmp_path.name}?endpoint={proxy.endpoint}"
    try:
        weights, _ = filled(url, 4, anchor_every=3)
        reader, image = Reader(Objects(url)), Image.empty(SMALL)
        reader.load(newest(reader), image)
        assert weights.are(image, 4)
        assert proxy.faults > proxy.requests / 3
    finally:
        proxy.stop()


@pytest.mark.parametrize("answer,kind,said", [((400, "ExpiredToken"), "denied", "credentials"), ((403, "AccessDenied"), "denied", "credentials"),
                                              ((403, "RequestTimeTooSkewed"), "denied", "clock"), ((503, "SlowDown"), "unavailable", "address"),
                                              ((507, "XMinioStorageFull"), "full", "gc"),
                                              ((403, "QuotaExceeded"), "full", "gc"), ((501, "NotImplemented"), "refused", "must do")])
def test_a_store_that_refuses_is_an_error_with_a_remedy(s3, tmp_path, answer, kind, said):
    weights, _ = filled(s3.url(tmp_path.name), 1)
    proxy = Proxy(s3.endpoint, lambda method, path: answer)
    try:
        url = f"s3://weights/{tmp_path.name}?endpoint={proxy.endpoint}"
        begin = time.monotonic()
        with pytest.raises(StoreError) as refused:
            Objects(url, retry_seconds=1.0).put("x", b"x")
        assert refused.value.kind == kind and said in refused.value.remedy
        with pytest.raises(StoreError) as refused:
            Reader(Objects(url, retry_seconds=1.0)).latest()
        assert refused.value.kind == kind and time.monotonic() - begin < 60
        assert "test" not in refused.value.remedy and KEYS["AWS_SECRET_ACCESS_KEY"] + '"' not in str(refused.value)
    finally:
        proxy.stop()


def test_a_load_that_breaks_off_goes_on_part_by_part(tmp_path, monkeypatch):
    url = f"file://{tmp_path}/store"
    weights, uploader = filled(url, 2)
    reader, image = Reader(Objects(url), workers=1), Image.empty(SMALL)
    reader.load(newest(reader), image)
    weights.store(uploader, 3)
    get, left, lock = Objects.get, [2], threading.Lock()

    def breaks_off(self, path, *more, **words):
        with lock:
            left[0] -= "/delta-" in path
            ends = left[0] < 0
        if ends:
            raise StoreError(path, kind="unavailable")
        return get(self, path, *more, **words)
    monkeypatch.setattr(Objects, "get", breaks_off)
    with pytest.raises(StoreError):
        reader.load(newest(reader), image)
    assert image.manifest.version == 2 and not image.whole
    left[0] = 1000
    weights.step()
    weights.store(uploader, 4)
    loaded = reader.load(newest(reader), image)
    assert weights.are(image, 4) and loaded.steps == 2
    assert loaded.objects == 2 * sum(map(len, image.contents)) - 2


@pytest.mark.parametrize("at_once", [4, 1], ids=["small", "as-large-as-a-part"])
def test_small_objects_are_read_several_at_a_time_and_large_ones_no_more_than_workers(tmp_path, monkeypatch, at_once):
    """However many are read, they take no more memory than `workers` whole parts."""
    layout = Layout("hf", "{}", (tuple(TensorMeta(f"t{part}", "F32", (1000,)) for part in range(8)),), 4000)
    weights, uploader = filled(f"file://{tmp_path}/store", 1, layout=layout)
    reader, image = Reader(Objects(f"file://{tmp_path}/store"), workers=1), Image.empty(layout)
    reader.load(newest(reader), image)
    weights.step()
    for flat in weights.image.flats[0] if at_once == 1 else []:  # other numbers, of which no change is short
        flat[...] = weights.random.integers(0, 2 ** 32 - 1, flat.shape, flat.dtype)
    sizes = [part.bytes for part in weights.store(uploader, 2).manifest.ranks[0]]
    assert len(sizes) == 8 and (max(sizes) <= 1000) == (at_once > 1), sizes
    get, lock, inside, most = Objects.get, threading.Condition(), [0], [0]

    def counted(self, path, *more, **words):
        if "/delta-" not in path:
            return get(self, path, *more, **words)
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            lock.notify_all()
            assert lock.wait_for(lambda: most[0] >= at_once, 30), f"{most[0]} at a time"
        try:
            return get(self, path, *more, **words)
        finally:
            with lock:
                inside[0] -= 1
    monkeypatch.setattr(Objects, "get", counted)
    reader.load(newest(reader), image)
    assert weights.are(image, 2) and most[0] == at_once


class TestSignatures:
    @pytest.fixture
    def keys(self, tmp_path):
        for name in ("ours", "theirs"):
            key, public = tmp_path / f"{name}.pem", tmp_path / f"{name}.pub"
            subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
            subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
        return tmp_path

    def test_openssl_finds_the_signature_good(self, tmp_path, keys):
        filled(f"file://{tmp_path}/store", 1, signer=Signer(keys / "ours.pem"))
        line, signature = next(tmp_path.glob("store/versions/*/manifest.json")).read_bytes().splitlines()
        (tmp_path / "line").write_bytes(line)
        (tmp_path / "signature").write_bytes(bytes.fromhex(json.loads(signature)["ed25519"]))
        subprocess.run(["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", keys / "ours.pub", "-rawin", "-in", tmp_path / "line",
                        "-sigfile", tmp_path / "signature"], check=True, capture_output=True)

    def test_what_the_key_did_not_sign_is_refused(self, tmp_path, keys):
        trust = TrustedKeys([keys / "ours.pub"])
        for name, signer, good in (("signed", Signer(keys / "ours.pem"), True), ("unsigned", None, False),
                                   ("forged", Signer(keys / "theirs.pem"), False)):
            weights, _ = filled(f"file://{tmp_path}/{name}", 2, signer=signer)
            reader, image = Reader(Objects(f"file://{tmp_path}/{name}"), trusted=trust), Image.empty(SMALL)
            if good:
                reader.load(newest(reader), image)
                assert weights.are(image, 2)
                continue
            with pytest.raises(StoreError, match="manifest.json") as refused:
                newest(reader)
            assert refused.value.kind == "signature"

    def test_a_changed_manifest_is_refused_though_its_digests_were_made_anew(self, tmp_path, keys):
        filled(f"file://{tmp_path}/store", 1, signer=Signer(keys / "ours.pem"))
        path = next(tmp_path.glob("store/versions/*/manifest.json"))
        path.write_bytes(path.read_bytes().replace(b'"job":""', b'"job":"x"'))
        latest = json.loads((tmp_path / "store/latest.json").read_text())
        latest["manifest"]["digest"] = store_reader.sha(path.read_bytes())
        (tmp_path / "store/latest.json").write_text(json.dumps(latest))
        Reader(Objects(f"file://{tmp_path}/store")).manifest_at(latest["manifest"]["path"])
        reader = Reader(Objects(f"file://{tmp_path}/store"), trusted=TrustedKeys([keys / "theirs.pub", keys / "ours.pub"]))
        with pytest.raises(StoreError, match="not of these bytes"):
            newest(reader)


class TestRetention:
    def test_what_a_chain_or_a_lease_needs_stays(self, url):
        weights, _ = filled(url, 10, anchor_every=4)
        reader = Reader(Objects(url))
        second = reader.version(2)
        Lease(reader.objects, "reader-slow").hold([second])
        report = gc(Reader(Objects(url)), keep=2)
        versions = sorted(int(folder.rsplit("/")[1][:20]) for folder in report.kept)
        assert versions == [1, 2, 9, 10]  # an anchor lies beside 5 and 9
        assert len(report.deleted) == 6 and not report.torn
        fresh = Reader(Objects(url))
        for version in versions:
            image = Image.empty(SMALL)
            fresh.load(fresh.version(version), image)
            assert weights.are(image, version)
        assert not any(one.error for one in verify(fresh))
        with pytest.raises(StoreError, match="no version 5"):
            fresh.version(5)

    def test_a_dry_run_deletes_nothing(self, tmp_path):
        filled(f"file://{tmp_path}/store", 5)
        before = sorted(tmp_path.rglob("store/versions/*/*"))
        assert gc(Reader(Objects(f"file://{tmp_path}/store")), keep=1, dry_run=True).deleted == []
        weights, uploader = filled(f"file://{tmp_path}/other", 5, anchor_every=1)
        report = gc(Reader(Objects(f"file://{tmp_path}/other")), keep=1, dry_run=True)
        assert len(report.deleted) == 4 and report.bytes_deleted > 0
        assert before == sorted(tmp_path.rglob("store/versions/*/*"))
        assert len(list(tmp_path.glob("other/versions/*"))) == 5

    def test_times_are_the_stores_whatever_this_hosts_clock_says(self, tmp_path, monkeypatch):
        """The store's clock is two days behind this host's: nothing is taken for old."""
        url, real = f"file://{tmp_path}/store", Objects.put
        behind = time.time() - 2 * 86_400

        def put(self, path, data):
            etag = real(self, path, data)
            os.utime(tmp_path / "store" / path, (behind, behind))
            return etag
        monkeypatch.setattr(Objects, "put", put)
        filled(url, 4, anchor_every=1)
        torn = tmp_path / "store/versions/00000000000000000009-0123456789ab"
        torn.mkdir()
        (torn / "delta-00000-00000").write_bytes(b"x")
        os.utime(torn / "delta-00000-00000", (behind - 3600, behind - 3600))
        Lease(Objects(url), "reader-slow", seconds=600).hold([Reader(Objects(url)).version(1)])
        report = gc(Reader(Objects(url)), keep=1)
        assert not report.torn and len(report.kept) == 3 and len(report.deleted) == 2
        behind += 2 * 86_400  # a day and more has passed there: the attempt is torn, the lease has ended
        report = gc(Reader(Objects(url)), keep=1)
        assert report.torn == ["versions/00000000000000000009-0123456789ab"] and len(report.deleted) == 1

    def test_what_is_not_understood_stays_and_is_named(self, tmp_path):
        url = f"file://{tmp_path}/store"
        filled(url, 3, anchor_every=1)
        first = sorted((tmp_path / "store/versions").iterdir())[0]
        (first / "manifest.json").write_text("{}")
        report = gc(Reader(Objects(url)), keep=1)
        assert list(report.unknown) == [f"versions/{first.name}"] and first.is_dir()
        (tmp_path / "store/leases/reader-odd.json").write_text("{}")
        with pytest.raises(StoreError, match="reader-odd.json is no lease, so nothing is deleted"):
            gc(Reader(Objects(url)), keep=1)


def test_killed_at_every_request_it_leaves_the_old_version_or_the_new_one(tmp_path):
    killed_at_every_request(f"file://{tmp_path}/store", lambda: tmp_path / "store")


def killed_at_every_request(url: str, look) -> None:
    """`look()`: a folder that has what the store has now."""
    killed = subprocess.Popen([sys.executable, ROOT / "tests/python/store_killed.py", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    before, seen, ends = None, set(), 0
    for line in killed.stdout:
        version, how, number, *sums = line.split()
        latest = Reader(Objects(url)).latest()
        ranks = [hashlib.sha256(b"".join(data for _, _, data in rank.values())).hexdigest() for rank in store_reader.read(look())] \
            if latest is not None else None
        if latest is not None and latest.manifest.version == int(version):
            assert ranks == sums
            seen.add("new")
        else:
            assert ranks == before and how != "end"
            seen.add("old")
        before, ends = ranks, ends + (how == "end")
        killed.stdin.write("\n")
        killed.stdin.flush()
    assert killed.wait(60) == 0 and seen == {"old", "new"} and ends >= 1 and int(number) > 10
    assert not any(one.error for one in verify(Reader(Objects(url))))


def test_a_full_disk_is_an_error_and_the_version_before_stays(tmp_path):
    """On a file system of 5 MB; what it takes to make one is root."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=5m", "none", folder], check=True)
    try:
        weights, uploader = Weights(LAYOUT), Uploader(Reader(Objects(f"file://{folder}/store")), LAYOUT, workers=1)
        weights.store(uploader, 1)
        weights.step(1.0)
        with pytest.raises(StoreError) as full:
            uploader.store(2, 1, weights.image, None)
        assert full.value.kind == "full" and "gc" in full.value.remedy
        reader, image = Reader(Objects(f"file://{folder}/store")), Image.empty(LAYOUT)
        reader.load(newest(reader), image)
        assert weights.are(image, 1)
        assert gc(reader, keep=1, grace_seconds=0).torn
        assert uploader.store(3, 1, weights.base, weights.base).manifest.kind == "delta"
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("url,said", [("http://x/y", "s3://"), ("s3://", "s3://"), ("file://host/x", "file:///"), ("weights", "s3://"),
                                      ("s3://b/p?region=x", "endpoint"), ("gs://b/p?endpoint=http://x", "endpoint")])
def test_a_url_that_is_none_is_refused_with_what_would_be_one(url, said):
    with pytest.raises(StoreError) as refused:
        Objects(url)
    assert refused.value.kind == "refused" and said in str(refused.value)
