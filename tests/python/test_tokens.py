"""Job tokens instead of certificates: who they let in and who not, that they are shown over TLS only, that a session ends with
its token or goes on with the next one, that a Watch ends with it, and that publishes go on while tokens change."""

from __future__ import annotations

import asyncio
import os
import pathlib
import secrets
import subprocess
import threading
import time

import grpc
import pytest

import certificates
from certificates import Authority
from conftest import BINARIES
from demo.fleet import Daemon
from test_client import assert_serves, engine, load, trainer
from weightwire import Client, DeadlineError, RefusedError, Tls, UnavailableError, aio
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc, types_pb2

DOMAIN = "weightwire.test"  # of deploy/certs.sh
FAILED = 'weightwire_auth_failures_total{reason="token"}'
TRAINER, ENGINE = types_pb2.GROUP_ROLE_TRAINER, types_pb2.GROUP_ROLE_ENGINE


class Minting:
    """A coordinator's key, and tokens made with it."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self.key = self.directory / "key"
        self.key.write_text(secrets.token_hex(32) + "\n")

    def token(self, role: str, hours: float = 1, job: str = "rl", **options) -> str:
        given = {"key": self.key, "domain": DOMAIN, "job": job, "role": role, "hours": hours, **options}
        run = subprocess.run([BINARIES / "wwctl", "token", *(f"--{name}={value}" for name, value in given.items())],
                             capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stderr
        return run.stdout.strip()

    def put(self, name: str, token: str) -> str:
        """In the file of that name, in one step; its path."""
        fresh = self.directory / f".{name}"
        fresh.write_text(token + "\n")
        os.replace(fresh, self.directory / name)
        return str(self.directory / name)

    def tls(self, authority: Authority, name: str, token: str) -> Tls:
        return Tls.with_token(self.put(name, token), str(authority.directory / "ca.crt"))


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def minting(tmp_path_factory):
    return Minting(tmp_path_factory.mktemp("tokens"))


def coordinator_of(directory, authority: Authority, **options) -> Daemon:
    own = authority.issue("coordinator", "coordinator", job="rl")
    return Daemon(str(BINARIES / "weightwired"), str(directory), "coordinator", role="coordinator", job="rl",
                  listen="127.0.0.1:0", **certificates.settings(own), **options)


@pytest.fixture(scope="module")
def coordinator(authority, minting, tmp_path_factory):
    started = coordinator_of(tmp_path_factory.mktemp("coordinator"), authority, token_key=minting.key, lease_ms=60_000)
    yield started
    assert started.stop() == 0


class Session:
    """An agent's session, opened by hand."""

    def __init__(self, address: str, tls: Tls, incarnation: int):
        self.channel = certificates.channel(address, tls)
        self.stub = coordinator_pb2_grpc.CoordinatorStub(self.channel)
        self._ups: list = []
        self._more = threading.Condition()
        self.say(pb.SessionUp(hello=pb.AgentHello(protocol=types_pb2.Protocol(min=1, max=1), job="rl", name="by-hand",
                                                  incarnation=incarnation, host="h", addresses={"tcp": "127.0.0.1:1"})))
        self.call = self.stub.Session(self._said(), timeout=60)
        self.agent = next(self.call).welcome.agent

    def say(self, up) -> None:
        with self._more:
            self._ups.append(up)
            self._more.notify()

    def heartbeat(self, token: str = "") -> None:
        self.say(pb.SessionUp(heartbeat=pb.Heartbeat(sequence=1, token=token)))

    def _said(self):
        while True:
            with self._more:
                self._more.wait_for(lambda: self._ups)
                up = self._ups.pop(0)
            if up is None:
                return
            yield up

    def register(self, role, rank: int):
        return self.stub.Register(pb.RegisterRequest(agent=self.agent, job="rl", role=role, group=f"group-{role}", rank=rank,
                                                     world_size=8, incarnation=4711 + rank), timeout=20)

    def ends(self) -> grpc.RpcError:
        with pytest.raises(grpc.RpcError) as caught:
            for _ in self.call:
                pass
        return caught.value

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.say(None)
        self.channel.close()


def refused(code: grpc.StatusCode, call, *arguments, **named) -> str:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, **named)
    assert caught.value.code() == code, caught.value
    return caught.value.details()


def test_a_token_lets_in_whom_it_names(coordinator, authority, minting):
    tls = minting.tls(authority, "operator", minting.token("operator"))
    with Client(coordinator.grpc, tls=tls) as client:
        assert client.status().job == "rl"
    run = subprocess.run([BINARIES / "wwctl", "status", "--address", coordinator.grpc, "--token-file", tls.token_file,
                          "--tls-ca", tls.ca], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    metrics = minting.tls(authority, "metrics", minting.token("metrics"))
    with Client(coordinator.grpc, tls=metrics) as client, pytest.raises(RefusedError, match="role/metrics may not call"):
        client.status()
    with Client(coordinator.grpc, tls=authority.issue("certified", "operator", job="rl")) as client:
        assert client.status().job == "rl", "certificates go on"


@pytest.mark.parametrize("what, words", [
    ("none", "neither a certificate nor"), ("expired", "has expired"), ("changed", "was not signed"),
    ("another key", "was not signed"), ("no token", "has not the form")])
def test_what_is_no_token_of_this_coordinator_is_refused_and_counted(coordinator, authority, minting, tmp_path, what, words):
    good = minting.token("trainer")
    shown = {"none": None, "expired": minting.token("operator", hours=0), "changed": good.replace("role/trainer", "role/operator"),
             "another key": Minting(tmp_path).token("operator"), "no token": "hello"}[what]
    before = coordinator.counter(FAILED)
    credentials = grpc.ssl_channel_credentials((authority.directory / "ca.crt").read_bytes())
    with grpc.secure_channel(coordinator.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        details = refused(grpc.StatusCode.UNAUTHENTICATED, coordinator_pb2_grpc.CoordinatorStub(channel).Status, pb.StatusRequest(),
                          timeout=20, metadata=[("weightwire-token", shown)] if shown else None)
    assert words in details
    assert coordinator.counter(FAILED) == before + 1


def test_a_token_names_ranks_and_is_bound_to_the_agent_that_uses_it(coordinator, authority, minting):
    some = minting.tls(authority, "some", minting.token("trainer", ranks="2-3"))
    one = minting.tls(authority, "one", minting.token("engine", ranks="5"))
    with Session(coordinator.grpc, some, 11) as first, Session(coordinator.grpc, some, 12) as second, \
            Session(coordinator.grpc, one, 13) as third:
        assert first.register(TRAINER, 2).member.participant and second.register(TRAINER, 3).member.participant
        assert "another rank" in refused(grpc.StatusCode.PERMISSION_DENIED, first.register, TRAINER, 4)
        assert "cannot register engine ranks" in refused(grpc.StatusCode.PERMISSION_DENIED, first.register, ENGINE, 2)
        assert third.register(ENGINE, 5).member.participant
        # Somebody who has got hold of the file.
        details = refused(grpc.StatusCode.PERMISSION_DENIED, Session, coordinator.grpc, one, 14)
        assert "in use by agent incarnation 13" in details
    with certificates.channel(coordinator.grpc, one) as channel:
        refused(grpc.StatusCode.PERMISSION_DENIED, coordinator_pb2_grpc.CoordinatorStub(channel).Evict, pb.EvictRequest(),
                timeout=20)


def test_a_session_ends_with_its_token_or_goes_on_with_the_next(coordinator, authority, minting):
    def short() -> str:
        return minting.token("trainer", hours=4 / 3_600)

    with Session(coordinator.grpc, minting.tls(authority, "short", short()), 21) as session, \
            Session(coordinator.grpc, minting.tls(authority, "renewed", short()), 22) as renewed:
        renewed.heartbeat(minting.token("trainer"))
        end = time.monotonic() + 20
        while session.call.is_active():
            assert time.monotonic() < end
            session.heartbeat()
            renewed.heartbeat()
            time.sleep(0.1)
        over = session.ends()
        assert over.code() == grpc.StatusCode.UNAUTHENTICATED and "has expired" in over.details()
        assert renewed.call.is_active()
        renewed.heartbeat(minting.token("engine"))
        over = renewed.ends()
        assert over.code() == grpc.StatusCode.PERMISSION_DENIED and "goes on with a token of" in over.details()


def test_a_watch_ends_with_its_token_or_the_key_that_signed_it(authority, tmp_path):
    minting = Minting(tmp_path)
    started = coordinator_of(tmp_path / "coordinator", authority, token_key=minting.key)
    certified = Client(started.grpc, tls=authority.issue("person", "operator", job="rl"))
    unaffected = certified.watch(60)
    assert next(unaffected).job == "rl"
    token = minting.token("operator", hours=4 / 3_600)
    expires = int(token.split(";")[2])
    short = minting.tls(authority, "short", token)
    wwctl = subprocess.Popen([BINARIES / "wwctl", "watch", "--address", started.grpc, "--token-file", short.token_file,
                              "--tls-ca", short.ca], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with Client(started.grpc, tls=short) as client, pytest.raises(RefusedError, match="has expired; make one with `wwctl token`"):
        for status in client.watch(60):
            assert status.job == "rl"
    assert expires <= time.time() < expires + 2
    printed, said = wwctl.communicate(timeout=20)
    assert wwctl.returncode != 0 and "job rl" in printed and "has expired" in said and "wwctl token" in said, said
    long = minting.tls(authority, "long", minting.token("operator"))
    with Client(started.grpc, tls=long) as client:
        watch = client.watch(60)
        assert next(watch).job == "rl"
        minting.key.write_text(secrets.token_hex(32) + "\n")
        with pytest.raises(RefusedError, match="was not signed"):
            next(watch)
    # By certificate: it still hears of a change, the first agent.
    agent = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "agent"), "agent", role="agent", job="rl",
                   coordinator=started.grpc, **certificates.settings(authority.issue("agent", "agent", job="rl")))
    assert next(unaffected).job == "rl"
    unaffected.close()
    certified.close()
    assert [agent.stop(), started.stop()] == [0, 0]


def test_who_waits_goes_on_with_the_next_token(coordinator, authority, minting):
    """A wait is watches, one after another; each shows what the file holds when it begins."""
    def short() -> str:
        return minting.token("operator", hours=3 / 3_600)

    for kind in ("blocking", "aio"):
        def wait(seconds: float, name=f"{kind}-waiter") -> None:
            tls = Tls.with_token(str(minting.directory / name), str(authority.directory / "ca.crt"))
            if name.startswith("aio"):
                async def waited() -> None:
                    async with aio.Client(coordinator.grpc, tls=tls) as client:
                        await client.wait_version(4_711, seconds)
                asyncio.run(waited())
            else:
                with Client(coordinator.grpc, tls=tls) as client:
                    client.wait_version(4_711, seconds)

        minting.put(f"{kind}-waiter", short())
        with pytest.raises(RefusedError, match="has expired"):
            wait(60)
        minting.put(f"{kind}-waiter", short())
        put = threading.Timer(1, lambda: minting.put(f"{kind}-waiter", minting.token("operator")))
        put.start()
        with pytest.raises(DeadlineError):
            wait(6)
        put.join()


def test_publishes_go_on_while_tokens_and_the_key_change(authority, tmp_path, groups):
    minting = Minting(tmp_path)
    first = coordinator_of(tmp_path / "coordinator", authority, token_key=minting.key)
    roles = {"trainer": "trainer", "rollout": "engine"}
    ca = str(authority.directory / "ca.crt")

    def put(hours: float) -> None:
        for name, role in roles.items():
            minting.put(name, minting.token(role, hours))

    put(12 / 3_600)
    agents = [Daemon(str(BINARIES / "weightwired"), str(tmp_path / f"{name}-agent"), name, role="agent", job="rl",
                     coordinator=first.grpc, token_file=tmp_path / name, tls_ca=ca) for name in roles]
    opened = time.monotonic()
    groups += [trainer(agents[0]), engine(agents[1], "engine-a", 1)]
    # A new key on top, tokens of it, and then the old key away.
    minting.key.write_text(secrets.token_hex(32) + "\n" + minting.key.read_text())
    put(1)
    version = 0
    while time.monotonic() < opened + 14:  # beyond the first tokens' end
        version += 1
        hf = load(groups[0], version)
        groups[0].publish(version)
        groups[1].wait_version(version)
        assert_serves(groups[1], hf)
    minting.key.write_text(minting.key.read_text().splitlines()[0] + "\n")
    with Client(first.grpc, tls=authority.issue("person", "operator", job="rl")) as client:
        status = client.status()
        assert status.committed_version == version
    assert first.counter('weightwire_epochs_total{outcome="aborted"}') == 0
    for group in reversed(groups):
        group.close()
    groups.clear()
    assert [daemon.stop() for daemon in [*agents, first]] == [0, 0, 0]


def test_tokens_are_shown_and_taken_over_tls_only(authority, minting, tmp_path):
    token = minting.token("operator")
    with pytest.raises(RefusedError, match="ca"):
        Tls.with_token(minting.put("plain", token), "")
    run = subprocess.run([BINARIES / "wwctl", "status", "--address", "127.0.0.1:1", "--token-file", minting.put("plain", token)],
                         capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and "--tls-ca" in run.stderr, run.stderr
    started = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "plain"), "coordinator", role="coordinator", job="rl",
                     listen="127.0.0.1:0")
    with Client(started.grpc, timeout=5, tls=Tls.with_token(minting.put("plain", token), str(authority.directory / "ca.crt"))) as client, \
            pytest.raises(UnavailableError):
        client.status()
    with grpc.insecure_channel(started.grpc) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        shown = {"timeout": 20, "metadata": [("weightwire-token", token)]}
        for call in (lambda: stub.Status(pb.StatusRequest(), **shown), lambda: next(stub.Watch(pb.WatchRequest(), **shown)),
                     lambda: next(stub.Session(iter([]), **shown))):
            assert "came in plaintext" in refused(grpc.StatusCode.UNAUTHENTICATED, call)
    assert started.stop() == 0


def start(tmp_path, **options) -> subprocess.CompletedProcess:
    """A process that is to refuse its settings."""
    given = {"job": "rl", "http": "127.0.0.1:0", "listen": "127.0.0.1:0", "agent_socket": f"{tmp_path}/a/agent.sock", **options}
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
    return subprocess.run([BINARIES / "weightwired", *flags], capture_output=True, text=True, timeout=60)


def test_settings_that_do_not_fit_are_refused_at_start(authority, minting, tmp_path):
    ca = str(authority.directory / "ca.crt")
    agent = {"role": "agent", "coordinator": "127.0.0.1:1"}
    file = minting.put("settings", minting.token("trainer"))
    own = authority.issue("settings", "agent", job="rl")
    assert "token_file needs tls_ca" in start(tmp_path, **agent, token_file=file).stderr
    assert "stands in for" in start(tmp_path, **agent, **certificates.settings(own), token_file=file).stderr
    assert "is for role agent" in start(tmp_path, role="coordinator", token_file=file, tls_ca=ca).stderr
    assert "token_key needs TLS" in start(tmp_path, role="coordinator", token_key=minting.key).stderr
    for token, words in ((minting.token("operator"), "cannot be agent of job rl"), ("nonsense", "has not the form"),
                         (minting.token("trainer", job="other"), "cannot be agent of job rl"),
                         (minting.token("trainer", hours=0), "has expired")):
        run = start(tmp_path, **agent, token_file=minting.put("wrong", token), tls_ca=ca)
        assert run.returncode in (64 + 36, 64 + 35) and words in run.stderr, run.stderr
    coordinator = certificates.settings(authority.issue("keys", "coordinator", job="rl"))
    short = minting.put("short-key", "too short")
    assert "fewer than 32" in start(tmp_path, role="coordinator", **coordinator, token_key=short).stderr
