"""./dev test ceph: the store's tests against a real S3 server, Ceph's gateway, with the same oracles as with moto, and what only a
real one can show: its conditional writes, a gateway or a disk that is killed, keys that end, a clock that is wrong, a quota."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import pytest

import ceph_server
import store_reader
import test_store
import test_store_commands
from ceph_server import USER
from content_oracle import root
from store_server import BUCKET, KEYS, Proxy
from store_sites import Site, holds, stepped, weights
from test_store import DAMAGES, SMALL, damaged_and_gone_around, filled, killed_at_every_request, newest
from weightwire.memory import TensorMeta
from weightwire.store import Image, Layout, Objects, Reader, Signer, StoreError, TrustedKeys, Uploader, verify

pytestmark = [pytest.mark.usefixtures("store_environment"), pytest.mark.skipif(bool(ceph_server.missing()), reason=ceph_server.missing())]


@pytest.fixture(scope="session")
def s3():
    server = ceph_server.Ceph()
    yield server
    server.stop()


@pytest.fixture
def url(s3, tmp_path):
    return s3.url(tmp_path.name + "/nested")


# The same tests as with moto and with files.
test_every_version_comes_back_bit_for_bit = test_store.test_every_version_comes_back_bit_for_bit
test_of_several_who_write_the_pointer_one_wins_and_the_others_know = test_store.test_of_several_who_write_the_pointer_one_wins_and_the_others_know
test_a_second_writer_is_noticed_and_what_the_first_had_is_no_version = test_store.test_a_second_writer_is_noticed_and_what_the_first_had_is_no_version
test_a_store_that_fails_half_of_the_time_is_written_and_read = test_store.test_a_store_that_fails_half_of_the_time_is_written_and_read
test_a_store_that_refuses_is_an_error_with_a_remedy = test_store.test_a_store_that_refuses_is_an_error_with_a_remedy
test_checkpoints_go_in_and_come_out = test_store_commands.test_checkpoints_go_in_and_come_out


class TestRetention:
    test_what_a_chain_or_a_lease_needs_stays = test_store.TestRetention.test_what_a_chain_or_a_lease_needs_stays


def prefix_of(url: str) -> str:
    return url.split("?")[0].removeprefix(f"s3://{BUCKET}/")


def mirrored(s3, url: str, folder):
    """A folder with what lies below a URL, by Amazon's client."""
    prefix, client = prefix_of(url) + "/", s3.client()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix):
        for entry in page.get("Contents", ()):
            path = folder / entry["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read())
    return folder


def test_a_reader_that_shares_no_code_reads_the_same(s3, url, tmp_path):
    made, _ = filled(url, 6, 3)
    folder = mirrored(s3, url, tmp_path / "mirror")
    for version in (None, 2, 4, 5):
        assert [[data for _, _, data in rank.values()] for rank in store_reader.read(folder, version)] == made.versions[version or 6]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("record", ["delta-00000-00001", "manifest.json"])
def test_damage_is_named_and_gone_around_by_the_next_anchor(s3, url, damage, record):
    client, prefix = s3.client(), prefix_of(url)

    def change(path: str, other: str, made) -> None:
        def read(name: str) -> bytes:
            return client.get_object(Bucket=BUCKET, Key=f"{prefix}/{name}")["Body"].read()
        if (data := made(read(path), read(other))) is None:
            client.delete_object(Bucket=BUCKET, Key=f"{prefix}/{path}")
        else:
            client.put_object(Bucket=BUCKET, Key=f"{prefix}/{path}", Body=data)
    damaged_and_gone_around(url, damage, record, change)


def test_killed_at_every_request_it_leaves_the_old_version_or_the_new_one(s3, url, tmp_path):
    turns = iter(range(1000))
    killed_at_every_request(url, lambda: mirrored(s3, url, tmp_path / f"mirror-{next(turns)}"))


def test_a_pointer_that_many_write_goes_on_by_one_winner_for_each_turn(url):
    """200 turns of 8 writers: a counter that is only written on condition of what was read counts every win, and none twice."""
    Objects(url).put_if("latest.json", b"0", None)
    wins, turns = [0] * 8, 200

    def count(number: int) -> None:
        objects = Objects(url)
        while True:
            data, found = objects.get("latest.json")
            if (value := int(bytes(data))) >= turns:
                return
            try:
                objects.put_if("latest.json", str(value + 1).encode(), found.etag)
                wins[number] += 1
            except StoreError as error:
                assert error.kind == "lost_race", error
    threads = [threading.Thread(target=count, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(wins) == turns == int(bytes(Objects(url).get("latest.json")[0]))


def test_of_several_who_create_an_object_one_does(url):
    for turn in range(30):
        made: list[bytes] = []

        def create(number: int, turn: int = turn) -> None:
            data = f"{turn} {number}".encode()
            try:
                Objects(url).put_if(f"barriers/{turn}", data, None)
                made.append(data)
            except StoreError as error:
                assert error.kind == "lost_race", error
        threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [bytes(Objects(url).get(f"barriers/{turn}")[0])] == made


def test_the_probe_of_conditions_leaves_nothing(s3, url):
    filled(url, 2)
    listed = s3.client().list_objects_v2(Bucket=BUCKET, Prefix=prefix_of(url) + "/leases/")
    assert listed["KeyCount"] == 0


def test_more_than_a_page_of_objects_is_listed_and_deleted(s3, url):
    objects = Objects(url)
    names = sorted(f"versions/{number % 1100:04d}-{number}/x" for number in range(2100))
    threads = [threading.Thread(target=lambda share: [objects.put(name, b"x") for name in share], args=(names[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.path for found in objects.list("versions")] == names
    assert objects.folders("versions") == [name.split("/")[1] for name in names]
    objects.delete([*names[:1000], "versions/none/x"])
    assert [found.path for found in objects.list("versions")] == names[1000:]


def test_parts_that_the_gateway_cuts_into_pieces_come_back(url):
    """Its own pieces are of 4 MiB; random bits do not get shorter."""
    layout = Layout("hf", "{}", ((TensorMeta("a", "BF16", (6_000_001,)), TensorMeta("b", "U8", (9_000_001,))),), 16 << 20)
    made, _ = filled(url, 2, layout=layout)
    reader, image = Reader(Objects(url)), Image.empty(layout)
    assert reader.load(reader.version(1), image).bytes > layout.nbytes
    assert made.are(image, 1)
    reader.load(newest(reader), image)
    assert made.are(image, 2)
    assert not any(one.error for one in verify(reader))


def test_what_the_key_did_not_sign_is_refused(s3, url, tmp_path):
    for name in ("ours", "theirs"):
        key = tmp_path / f"{name}.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", tmp_path / f"{name}.pub"], check=True, capture_output=True)
    made, _ = filled(url, 2, signer=Signer(tmp_path / "ours.pem"))
    reader, image = Reader(Objects(url), trusted=TrustedKeys([tmp_path / "ours.pub"])), Image.empty(SMALL)
    reader.load(newest(reader), image)
    assert made.are(image, 2)
    with pytest.raises(StoreError, match="manifest.json") as refused:
        newest(Reader(Objects(url), trusted=TrustedKeys([tmp_path / "theirs.pub"])))
    assert refused.value.kind == "signature"


@pytest.mark.parametrize("server", ["radosgw", "ceph-osd"])
def test_a_server_that_is_killed_while_a_version_is_stored_holds_it_up_and_no_more(s3, url, tmp_path, server):
    """SIGKILL to the gateway, or to the disk below it, at a request of the writer, for several of them."""
    made, _ = filled(url, 1)
    chance = random.Random(5)
    for version in range(2, 6):
        left, reached, killed = [chance.randrange(9)], threading.Event(), threading.Event()

        def fault(method: str, path: str, left=left, reached=reached, killed=killed):
            left[0] -= method == "PUT"
            if left[0] < 0 and not reached.is_set():
                reached.set()
                s3.kill(server)
                killed.set()
                if server == "radosgw":
                    return 503, "SlowDown"  # who was connected to it would see the connection end
            return None
        proxy = Proxy(s3.endpoint, fault)
        again = threading.Thread(target=lambda killed=killed: killed.wait(60) and (s3.start_gateway if server == "radosgw" else s3.start_disk)())
        again.start()
        try:
            uploader = Uploader(Reader(Objects(f"{url.split('?')[0]}?endpoint={proxy.endpoint}")), SMALL, anchor_every=2, workers=1)
            uploader.head = uploader.adopt()
            made.step()
            made.store(uploader, version)
        finally:
            again.join()
            proxy.stop()
        assert killed.is_set()
        reader, image = Reader(Objects(url)), Image.empty(SMALL)
        reader.load(newest(reader), image)
        assert image.manifest.version == version and made.are(image, version)
    folder = mirrored(s3, url, tmp_path / "mirror")
    assert [[data for _, _, data in rank.values()] for rank in store_reader.read(folder)] == made.versions[5]
    assert not any(one.error for one in verify(Reader(Objects(url))))


def test_keys_that_have_ended_are_refused_and_new_ones_go_on(s3, url, monkeypatch):
    made, uploader = filled(url, 2)
    s3.admin("key", "create", "--uid", USER, "--key-type", "s3", "--access-key", "second", "--secret", "second-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "second-secret")
    reader, image = Reader(Objects(url)), Image.empty(SMALL)
    uploader = Uploader(reader, SMALL)
    uploader.head = uploader.adopt()
    s3.admin("key", "rm", "--uid", USER, "--access-key", "second")
    made.step()
    with pytest.raises(StoreError) as ended:
        uploader.store(3, 1, made.image, made.base)
    assert ended.value.kind == "denied" and "credentials" in ended.value.remedy and "second-secret" not in str(ended.value)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    reader = Reader(Objects(url))
    assert newest(reader).version == 2
    uploader = Uploader(reader, SMALL)
    uploader.head = uploader.adopt()
    made.store(uploader, 3)
    reader.load(newest(reader), image)
    assert made.are(image, 3)


def test_a_clock_that_is_off_by_an_hour_is_named(url):
    """Of a process whose time is another one: what it signs has the wrong hour."""
    filled(url, 1)
    code = ("import sys; from weightwire.store import Objects, StoreError\n"
            "try: Objects(sys.argv[1], retry_seconds=2).get('latest.json'); print('read')\n"
            "except StoreError as error: print(error.kind, error.remedy)")
    said = {shift: subprocess.run([*shift, sys.executable, "-c", code, url], env={**os.environ, **KEYS}, capture_output=True, text=True, timeout=120)
            for shift in ((), ("faketime", "-f", "+1h"), ("faketime", "-f", "-1h"))}
    assert said[()].stdout == "read\n", said[()]
    for shift, done in said.items():
        if shift:
            assert done.stdout.startswith("denied ") and "clock" in done.stdout, done


def test_a_full_bucket_is_an_error_with_a_remedy_and_the_version_before_stays(s3, url):
    made, uploader = filled(url, 2)
    used = sum(entry["Size"] for entry in s3.client().list_objects_v2(Bucket=BUCKET)["Contents"])
    s3.admin("quota", "set", "--quota-scope", "user", "--uid", USER, "--max-objects", "1", "--max-size", str(used))
    s3.admin("quota", "enable", "--quota-scope", "user", "--uid", USER)
    try:
        made.step(1.0)
        with pytest.raises(StoreError) as full:
            Uploader(Reader(Objects(url)), SMALL).store(3, 1, made.image, None)
        assert full.value.kind == "full" and "gc" in full.value.remedy
        reader, image = Reader(Objects(url)), Image.empty(SMALL)
        reader.load(newest(reader), image)
        assert made.are(image, 2)
    finally:
        s3.admin("quota", "disable", "--quota-scope", "user", "--uid", USER)
    made.store(uploader, 4)
    reader.load(newest(reader), image)
    assert made.are(image, 4)


def test_two_sites_have_the_trainers_bytes_while_writer_follower_and_gateway_are_killed(s3, url, tmp_path):
    alpha, beta = Site(tmp_path, "alpha"), Site(tmp_path, "beta")
    try:
        tensors = weights()
        alpha.add_trainer(tensors)
        alpha.add_engine("near")  # fills the writer that comes after a kill
        far = [beta.add_engine(f"far-{number}") for number in range(3)]
        for version in range(1, 7):
            if version % 2 == 1:
                writer, follower = alpha.writer(url, "--part-size", "64KiB", "--anchor-every", "2"), beta.follower(url)
                writer.wait_line("engine store:")
                follower.wait_line("site beta follows")
            alpha.publish(version, tensors)
            if version == 4:
                s3.kill("radosgw")
                s3.start_gateway()
            for engine in far:
                engine.wait_version(version, timeout=120)
                assert holds(engine, tensors), version
            assert alpha.root() == beta.root() == root(tensors)
            published, tensors = tensors, stepped(tensors, version)
            if version in (2, 4):
                writer.kill()
                follower.kill()
    finally:
        alpha.close()
        beta.close()
    stored = {name: data for name, (_, _, data) in store_reader.read(mirrored(s3, url, tmp_path / "mirror"))[0].items()}
    assert stored == {name: bits.tobytes() for name, (_, bits) in published.items()}
