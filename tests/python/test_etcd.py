"""Several coordinators over a real etcd: one leads, the others follow when it is killed or stopped, and nothing that was
committed is lost. `WEIGHTWIRE_LEADERS` (default 3) leaders are lost."""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
import urllib.error
import urllib.request

import pytest

from certificates import Authority
from conftest import BINARIES, stand_still, until
from demo.fleet import Daemon
from ports import free_ports
from test_client import assert_serves, engine, load, trainer
from weightwire import Client, WeightwireError

LOST = int(os.environ.get("WEIGHTWIRE_LEADERS", "3"))
SEED = int(os.environ.get("WEIGHTWIRE_SEED", "1"))
PATIENCE = 60
LEADS_WITHIN = 8.0  # seconds; five of them are the lease of a leader that was killed

pytestmark = pytest.mark.skipif(shutil.which("etcd") is None, reason="no etcd (Debian: etcd-server)")


class Etcd:
    """A cluster of one. `tls`: certificate, key and CA of itself."""

    def __init__(self, directory: str, tls=None):
        client, peer = free_ports(2)
        self.endpoint = f"127.0.0.1:{client}"
        self._at = at = f"http{'s' if tls else ''}://{self.endpoint}"
        among = f"http://127.0.0.1:{peer}"
        self._context, self._token = None, None
        self._log = open(f"{directory}/etcd.log", "w")
        self._command = ["etcd", "--data-dir", f"{directory}/etcd", "--listen-client-urls", at, "--advertise-client-urls", at,
                         "--listen-peer-urls", among, "--initial-advertise-peer-urls", among,
                         "--initial-cluster", f"default={among}"]
        if tls:
            self._command += ["--cert-file", tls.cert, "--key-file", tls.key]
            self._context = ssl.create_default_context(cafile=tls.ca)
        self.start()

    def ask_for_certificates(self, tls) -> None:
        """From now on a client's certificate names its user. (The gateway, which has one, is nobody then.)"""
        self.kill()
        self._command += ["--client-cert-auth", "--trusted-ca-file", tls.ca]
        self._context.load_cert_chain(tls.cert, tls.key)
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def ask(self, path: str, **request) -> dict:
        """Over etcd's gateway of JSON, with keys and values in base64."""
        fields = {name: base64.b64encode(value).decode() if isinstance(value, bytes) else value for name, value in request.items()}
        headers = {"Authorization": self._token} if self._token else {}
        call = urllib.request.Request(f"{self._at}/v3/{path}", json.dumps(fields).encode(), headers)
        with urllib.request.urlopen(call, timeout=30, context=self._context) as reply:
            return json.loads(reply.read())

    def await_answers(self) -> None:
        def answers():
            try:
                return self.ask("maintenance/status")
            except OSError:
                return None
        until("etcd answers", answers)

    def ask_for_users(self, **passwords: str) -> None:
        """From now on nobody without; `root` is this test."""
        for name, password in passwords.items():
            self.ask("auth/user/add", name=name, password=password)
        self.ask("auth/user/grant", user="root", role="root")
        self.ask("auth/enable")
        self._token = self.ask("auth/authenticate", name="root", password=passwords["root"])["token"]

    def let_write(self, user: str, prefix: str) -> None:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        encoded = {name: base64.b64encode(text.encode()).decode() for name, text in (("key", prefix), ("range_end", end))}
        self.ask("auth/role/add", name="weightwire")
        self.ask("auth/role/grant", name="weightwire", perm={"permType": "READWRITE", **encoded})
        self.ask("auth/user/grant", user=user, role="weightwire")


class Coordinator:
    """One of several, started again as its supervisor would."""

    def __init__(self, directory: str, name: str, listen: int, http: int, etcd: str, **settings: str):
        self.name, self.address, self.http = name, f"127.0.0.1:{listen}", f"127.0.0.1:{http}"
        self.log_path = f"{directory}/{name}.log"
        self._command = [str(BINARIES / "weightwired"), "--role", "coordinator", "--name", name, "--listen", self.address,
                         "--http", self.http, "--etcd", etcd, "--log-format", "text",
                         *(part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", value))]
        self.start()

    def start(self) -> None:
        with open(self.log_path, "a") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=log)

    def ready(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.http}/readyz", timeout=2) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def leads(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http}/metrics", timeout=2) as reply:
                return "\nweightwire_leader 1\n" in reply.read().decode()
        except OSError:
            return False

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(10)


class Control:
    """etcd, three coordinators, and one agent that knows all of them."""

    def __init__(self, directory: str):
        ports = free_ports(6)
        self.etcd = Etcd(directory)
        self.all = [Coordinator(directory, f"coordinator-{i}", ports[2 * i], ports[2 * i + 1], self.etcd.endpoint)
                    for i in range(3)]
        self.address = "ipv4:" + ",".join(c.address for c in self.all)  # of gRPC: the first one that listens
        until("a first leader", self.leader)
        self.agent = Daemon(str(BINARIES / "weightwired"), f"{directory}/agent", "agent", role="agent",
                            coordinator="[" + ", ".join(c.address for c in self.all) + "]")

    def leader(self) -> Coordinator | None:
        leaders = [c for c in self.all if c.process.poll() is None and c.leads()]
        return leaders[0] if len(leaders) == 1 else None

    def revive(self) -> None:
        for coordinator in self.all:
            if coordinator.process.poll() is not None:
                coordinator.start()

    def stop(self) -> None:
        self.agent.stop()
        for coordinator in self.all:
            coordinator.process.kill()
        self.etcd.kill()


@pytest.fixture
def control(tmp_path):
    started = Control(str(tmp_path))
    yield started
    started.stop()


class Publishing:
    """A trainer that publishes version after version, as fast as they are released. Ranks that lost the coordinator
    attach again, as a trainer's own loop would."""

    def __init__(self, agent: Daemon):
        self.agent, self.version, self.released, self.errors = agent, 0, [], []
        self.checkpoints = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        group = None
        while not self._stop.is_set():
            try:
                group = group or trainer(self.agent)
                self.version += 1
                self.checkpoints[self.version] = load(group, self.version)
                group.publish(self.version, deadline=20)
                self.released.append((time.monotonic(), self.version))
            except WeightwireError as error:
                self.errors.append(error)
                if group and not all(publisher.attached for publisher in group.publishers):
                    group.close()
                    group = None
                time.sleep(0.05)
        if group:
            group.close()

    def await_release(self, after: int = 0) -> float:
        """The moment when a version above `after` was released."""
        until("the next release", lambda: self.released and self.released[-1][1] > after)
        return next(at for at, version in self.released if version > after)

    def stop(self) -> int:
        """The last version that was released."""
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        return self.released[-1][1]


def test_one_leads_and_standbys_say_who(control):
    leader = control.leader()
    for standby in control.all:
        if standby is leader:
            continue
        status, text = until("an answer", lambda: (lambda r: r if leader.name in r[1] else None)(standby.ready()))
        assert status == 503 and f"{leader.name} ({leader.address}) leads" in text
        with socket.socket() as probe:
            host, port = standby.address.split(":")
            assert probe.connect_ex((host, int(port))) != 0, "a standby listens to no gRPC"
        assert urllib.request.urlopen(f"http://{standby.http}/healthz", timeout=5).status == 200
    with Client(control.address) as client:
        assert client.status().committed_version == 0
    standby = next(c for c in control.all if c is not leader)
    assert standby.stop() == 0, "SIGTERM ends a standby in good order"
    assert leader.stop() == 0
    until("the last one leads", lambda: control.leader(), timeout=4)  # given back: nobody waits for the lease to end


def assert_never_fenced(groups):
    """Engines served on all the time, without a coordinator too: what stopped one for a moment leaves its reason."""
    fences = [rank.last_fence for group in groups for rank in group.ranks]
    assert not any(fences), fences


def test_leaders_are_lost_under_a_running_trainer_and_nothing_that_was_committed_is(control, groups):
    rng = random.Random(SEED)
    groups += [engine(control.agent, "engine-a", 1), engine(control.agent, "engine-b", 2)]
    publishing = Publishing(control.agent)
    publishing.await_release()
    seconds = []
    for lost in range(LOST):
        leader = control.leader()
        time.sleep(rng.uniform(0, 0.5))
        with Client(leader.address) as client:
            committed = client.status().committed_version
        stopped = lost % 3 == 2
        stand_still(leader.process.pid) if stopped else leader.process.send_signal(signal.SIGKILL)
        moment, last = time.monotonic(), publishing.version
        seconds.append(publishing.await_release(after=last) - moment)
        follower = until("a new leader", lambda: next((c for c in control.all if c is not leader and c.leads()), None))
        with Client(follower.address) as client:
            assert client.status().committed_version >= committed
        if stopped:  # it goes on, finds that its lease is over, and ends
            leader.process.send_signal(signal.SIGCONT)
            assert leader.process.wait(10) == 64 + 24, open(leader.log_path).read()[-2000:]
        leader.process.wait(10)
        control.revive()
    last = publishing.stop()
    for group in groups:
        group.wait_version(last)
        assert_serves(group, publishing.checkpoints[last])
    assert_never_fenced(groups)
    print(f"{LOST} leaders lost; seconds until a version published afterwards was released: "
          + ", ".join(f"{s:.1f}" for s in seconds) + f"; {len(publishing.released)} released, {len(publishing.errors)} refused")
    assert max(seconds) < 40  # figures: docs/performance.md


def test_an_etcd_that_comes_back_within_the_lease_is_hardly_noticed(control, groups):
    groups += [trainer(control.agent), engine(control.agent)]
    load(groups[0], 1)
    groups[0].publish(1)
    leader = control.leader()
    control.etcd.kill()
    hf = load(groups[0], 2)
    released = []
    publisher = threading.Thread(target=lambda: released.append(groups[0].publish(2)))
    publisher.start()
    control.etcd.start()
    publisher.join(PATIENCE)
    assert released, "the version was not released"
    groups[1].wait_version(2)
    assert_serves(groups[1], hf)
    assert control.leader() is leader


def test_without_etcd_nothing_is_committed_and_afterwards_it_goes_on_above_what_was(control, groups):
    groups.append(engine(control.agent))
    publishing = Publishing(control.agent)
    publishing.await_release()
    leader = control.leader()
    control.etcd.kill()
    assert leader.process.wait(PATIENCE) == 64 + 33, open(leader.log_path).read()[-2000:]
    assert groups[0].ranks[0].serving, "engines serve on without any coordinator"
    committed = publishing.released[-1][1]
    control.etcd.start()
    control.revive()
    publishing.await_release(after=committed)
    last = publishing.stop()
    groups[0].wait_version(last)
    assert_serves(groups[0], publishing.checkpoints[last])
    assert_never_fenced(groups)
    with Client(until("a leader", control.leader).address) as client:
        assert client.status().committed_version == last > committed


def commit_of_an_earlier_version(epoch: int, version: int, engines: list[str]) -> bytes:
    """A record that names its engines (server/wire/journal.cc, kNamedCommit)."""
    body = b"\x01\x01" + struct.pack("<QQI", epoch, version, len(engines))
    body += b"".join(struct.pack("<I", len(name)) + name.encode() for name in engines)
    return sealed(body)


def sealed(body: bytes) -> bytes:
    value = 0xcbf29ce484222325
    for byte in body:
        value = (value ^ byte) * 0x100000001b3 & (1 << 64) - 1
    return body + struct.pack("<I", (value ^ value >> 32) & 0xffffffff)


def test_a_new_leader_reads_an_earlier_versions_journal_of_ten_thousand_engines(tmp_path):
    """`WEIGHTWIRE_COMMITS` (default 12, over gRPC's 4 MiB an answer) of 680 kB each; an earlier version kept 1,024."""
    commits = int(os.environ.get("WEIGHTWIRE_COMMITS", "12"))
    etcd, coordinators = Etcd(str(tmp_path)), []
    try:
        etcd.await_answers()
        # Of all but the newest one the text alone counts, and summing it is slow here.
        record = commit_of_an_earlier_version(commits, commits + 70, [f"{i:064}" for i in range(10_000)])
        for epoch in range(1, commits + 1):
            etcd.ask("kv/put", key=f"weightwire/default/commit/{epoch:020}".encode(), value=record)
        etcd.ask("kv/put", key=b"weightwire/default/reserve", value=sealed(b"\x01\x04" + struct.pack("<QQ", 2048, 7)))
        ports = free_ports(4)

        def start(i: int) -> None:
            coordinators.append(Coordinator(str(tmp_path), f"coordinator-{i}", ports[2 * i], ports[2 * i + 1], etcd.endpoint))

        def committed(coordinator: Coordinator) -> int:
            assert coordinator.process.poll() is None, open(coordinator.log_path).read()[-2000:]
            if not coordinator.leads():
                return 0
            with Client(coordinator.address) as client:
                return client.status().committed_version

        def seconds_until_it_leads(coordinator: Coordinator, since: float) -> float:
            assert until("it leads", lambda: committed(coordinator)) == commits + 70
            return time.monotonic() - since
        began = time.monotonic()
        start(0)
        first = seconds_until_it_leads(coordinators[0], began)
        start(1)
        until("a standby", lambda: coordinators[1].ready()[0])
        coordinators[0].process.kill()
        second = seconds_until_it_leads(coordinators[1], time.monotonic())
        print(f"{commits} commits of {len(record)} bytes: the first leads after {first:.2f} s, the next one {second:.2f} s after its "
              "death")
        assert first < LEADS_WITHIN and second < LEADS_WITHIN
    finally:
        for coordinator in coordinators:
            coordinator.process.kill()
        etcd.kill()


@pytest.mark.parametrize("by", ["password", "certificate"])
def test_etcd_with_tls_and_users(tmp_path, by):
    authority = Authority(tmp_path / "ca")
    own = authority.issue("etcd", "coordinator")  # its CN, "coordinator", is the user's name in etcd
    shown = authority.issue("shown", "coordinator")
    password = tmp_path / "password"
    password.write_text("right\n")
    etcd = Etcd(str(tmp_path), tls=own)
    started = []

    def start(**settings) -> Coordinator:
        ports = free_ports(2)
        started.append(Coordinator(str(tmp_path), f"coordinator-{len(started)}", *ports, etcd.endpoint, **settings))
        return started[-1]

    def ends(coordinator: Coordinator, *says: str) -> None:
        assert coordinator.process.wait(PATIENCE) == 64 + 33
        log = open(coordinator.log_path).read()
        assert all(word in log for word in says), log
    try:
        etcd.await_answers()
        etcd.ask_for_users(root="root", coordinator="right", other="right")
        known = {"etcd_ca": own.ca}
        if by == "password":
            asked = {**known, "etcd_user": "coordinator", "etcd_password_file": str(password)}
            wrong = tmp_path / "wrong"
            wrong.write_text("wrong")
            ends(start(**{**asked, "etcd_password_file": str(wrong)}), "authentication failed", "etcd_password_file")
            ends(start(**known), "user name is empty", "set etcd_user and etcd_password_file")
            ends(start(**asked), "permission denied", "grant", "readwrite on the prefix weightwire/JOB/")
        etcd.let_write("coordinator", "weightwire/default/")
        if by == "certificate":
            asked = {**known, "etcd_cert": shown.cert, "etcd_key": shown.key}
            etcd.ask_for_certificates(own)
        coordinator = start(**asked)
        until("it leads", coordinator.leads)
        if by == "password":  # etcd forgets its tokens
            etcd.kill()
            etcd.start()
            etcd.await_answers()
        with Client(coordinator.address) as client:
            assert client.status().deciding
        plain = start()
        assert "etcd_ca is set if it speaks TLS" in until("it says why", lambda: (lambda t: t if "etcd_ca" in t else None)(
            plain.ready()[1]))
        if by == "certificate":
            stranger = start(**known)
            until("it finds no leader", lambda: "etcd at" in stranger.ready()[1])
        assert coordinator.leads()
        assert coordinator.stop() == 0
    finally:
        for coordinator in started:
            coordinator.process.kill()
        etcd.kill()


def test_commits_that_somebody_deletes_from_etcd_are_noticed_and_restored(control, groups):
    groups += [trainer(control.agent), engine(control.agent)]
    for version in range(1, 5):
        hf = load(groups[0], version)
        groups[0].publish(version)
        groups[1].wait_version(version)
    leader = control.leader()
    with Client(leader.address) as client:
        before = client.status()
    control.etcd.ask("kv/deleterange", key=f"weightwire/default/commit/{before.committed_epoch - 1:020}".encode(),
                     range_end=b"weightwire/default/commit0")
    leader.process.kill()
    leader.process.wait(10)
    control.revive()

    def restored():
        follower = control.leader()
        if not follower:
            return None
        with Client(follower.address) as client:
            status = client.status()
        return follower if status.committed_version == 4 else None
    follower = until("the decision is restored", restored)
    with urllib.request.urlopen(f"http://{follower.http}/metrics", timeout=5) as reply:
        assert "\nweightwire_journal_lost_decisions 1\n" in reply.read().decode()
    assert "the journal has lost decisions: engine-a/" in open(follower.log_path).read()
    assert_serves(groups[1], hf)
    assert all(rank.last_fence is None for rank in groups[1].ranks), "no engine was fenced"
    hf = load(groups[0], 5)
    groups[0].publish(5)
    groups[1].wait_version(5)
    assert_serves(groups[1], hf)
    with Client(follower.address) as client:
        status = client.status()
    assert status.committed_version == 5 and status.committed_epoch > before.committed_epoch
