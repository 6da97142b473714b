"""A real S3 server for tests: Ceph's gateway with one monitor and one disk, all on loopback and in a folder of its own, as processes
of whoever starts it. Debian packages it (ceph-mon, ceph-osd, radosgw); no service, no root rights and no manager are used.

Everything that waits asks the server, until a deadline.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import uuid

from conftest import until
from ports import free_ports
from store_server import BUCKET, KEYS

PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "radosgw-admin", "monmaptool", "ceph-authtool")
USER = "weightwire"
_PATIENCE = 120.0  # seconds; on an idle machine all of it is there in 8

#: In the network of the gateway. (What Debian's curl signs, the gateway refuses.)
_CREATE_BUCKET = """import boto3, sys
boto3.client("s3", endpoint_url=sys.argv[1], aws_access_key_id=sys.argv[3], aws_secret_access_key=sys.argv[4],
             region_name=sys.argv[5]).create_bucket(Bucket=sys.argv[2])"""

_CONFIG = """[global]
fsid = {fsid}
mon host = [v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]
auth cluster required = none
auth service required = none
auth client required = none
# The gateway asks for encryption, which there is none of without keys.
ms mon client mode = crc
ms bind ipv6 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
keyring = {folder}/keyring
# One disk: one copy of everything.
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
mon data avail warn = 1
[mon.a]
mon data = {folder}/mon
[osd]
osd data = {folder}/osd
osd objectstore = bluestore
osd memory target = 939524096
bluestore block size = {disk_bytes}
bluestore block create = true
bluestore block db size = 0
bluestore block wal size = 0
[client.admin]
rgw frontends = beast endpoint={host}:{port} tcp_nodelay=1
rgw data = {folder}/gateway
"""


def missing() -> str:
    """Empty, or what of Ceph this machine does not have, in words for a skipped test."""
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"no {', '.join(gone)} (Debian: ceph-mon ceph-osd radosgw; `./dev test ceph` installs them)" if gone else ""


class Ceph:
    """A cluster of one disk behind the S3 gateway at `endpoint`, with the user of KEYS and the bucket."""

    def __init__(self, *, disk_bytes: int = 8 << 30, host: str = "127.0.0.1", port: int = 0, prefix: tuple[str, ...] = ()):
        """disk_bytes: of a sparse file. host, port: where the gateway listens; 0: a free port. prefix: a command that starts another
        one, such as one that enters a network namespace, in which all of it then runs."""
        #: Sockets and paths of Ceph are short.
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="wwceph-"))
        self._prefix, self._running = list(prefix), {}
        v1, v2, *own = free_ports(3)
        self._port = port or own[0]
        self.endpoint = f"http://{host}:{self._port}"
        self._conf, fsid = self.folder / "ceph.conf", str(uuid.uuid4())
        self._conf.write_text(_CONFIG.format(fsid=fsid, v1=v1, v2=v2, folder=self.folder, disk_bytes=disk_bytes, host=host, port=self._port))
        for name in ("mon", "osd", "gateway"):
            (self.folder / name).mkdir()
        try:
            self._make_monitor(fsid, f"[v2:127.0.0.1:{v2},v1:127.0.0.1:{v1}]")
            self._make_disk()
            self.start_gateway()
            self.admin("user", "create", "--uid", USER, "--display-name", USER, "--access-key", KEYS["AWS_ACCESS_KEY_ID"],
                       "--secret", KEYS["AWS_SECRET_ACCESS_KEY"])
            self._run(sys.executable, "-c", _CREATE_BUCKET, self.endpoint, BUCKET, *KEYS.values())
        except BaseException:
            print(self.said())
            self.stop()
            raise

    def _make_monitor(self, fsid: str, address: str) -> None:
        keyring, map_ = self.folder / "keyring", self.folder / "monmap"
        self._run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        self._run("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", "--cap", "mon", "allow *", "--cap", "osd", "allow *")
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", address, map_)
        self._run("ceph-mon", "-c", self._conf, "-i", "a", "--mkfs", "--monmap", map_, "--keyring", keyring)
        self.start("ceph-mon", "-i", "a")

    def _make_disk(self) -> None:
        disk = str(uuid.uuid4())
        self.ceph("osd", "new", disk)
        self._run("ceph-osd", "-c", self._conf, "-i", "0", "--mkfs", "--osd-uuid", disk)
        self.start_disk()

    def start(self, name: str, *words: str) -> None:
        self._log = open(self.folder / f"{name}.out", "a")
        self._running[name] = subprocess.Popen([*self._prefix, name, "-c", str(self._conf), *words, "-f"], stdin=subprocess.DEVNULL,
                                               stdout=self._log, stderr=self._log)

    def start_disk(self) -> None:
        """Returns when it is up."""
        self.ceph("osd", "down", "0")  # else one that was killed counts as up for a while
        self.start("ceph-osd", "-i", "0")
        until("the disk is up", lambda: self._lives("ceph-osd") and " 1 up" in self.ceph("osd", "stat"), _PATIENCE)

    def start_gateway(self) -> None:
        """Returns when it answers."""
        self.start("radosgw", "-n", "client.admin")
        until("the gateway answers", self.answers, _PATIENCE)

    def _lives(self, name: str) -> bool:
        if (code := self._running[name].poll()) is not None:
            raise AssertionError(f"{name} ended ({code}):\n{self.said()}")
        return True

    def answers(self) -> bool:
        return self._lives("radosgw") and subprocess.run([*self._prefix, "curl", "-s", "-m", "5", "-o", "/dev/null", self.endpoint]).returncode == 0

    def kill(self, name: str) -> None:
        """SIGKILL; `name` is the program."""
        if (process := self._running.pop(name, None)) is not None:
            process.kill()
            process.wait(30)

    def ceph(self, *words: str) -> str:
        return self._run("ceph", "-c", self._conf, "--connect-timeout", "60", *words)

    def admin(self, *words: str) -> str:
        return self._run("radosgw-admin", "-c", self._conf, "-n", "client.admin", *words)

    def client(self):
        """Amazon's own client, for what the store's never does, and as an oracle."""
        import boto3
        return boto3.client("s3", endpoint_url=self.endpoint, aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
                            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"], region_name=KEYS["AWS_REGION"])

    def url(self, prefix: str) -> str:
        return f"s3://{BUCKET}/{prefix}?endpoint={self.endpoint}"

    def said(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("*.out")) + sorted(self.folder.glob("*.log")))

    def stop(self) -> None:
        for name in list(self._running):
            self.kill(name)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, *command: object) -> str:
        done = subprocess.run([*self._prefix, *map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_PATIENCE,
                              env={**os.environ, "CEPH_ARGS": ""})
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout
