"""The table of rights again, with job tokens in place of certificates: every RPC by every role, and by tokens that are none,
of somebody else, over, changed, or replayed from where they were good."""

from __future__ import annotations

import grpc
import pytest

import certificates
from test_rights import DENIED, ROLES, TABLE, outcome
from test_tokens import Minting, coordinator_of

UNKNOWN = grpc.StatusCode.UNAUTHENTICATED


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return certificates.Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def minting(tmp_path_factory):
    return Minting(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def coordinator(authority, minting, tmp_path_factory):
    started = coordinator_of(tmp_path_factory.mktemp("coordinator"), authority, token_key=minting.key, lease_ms=60_000)
    yield started
    assert started.stop() == 0


@pytest.mark.parametrize("role", ROLES)
def test_each_role_may_call_what_the_table_says(coordinator, authority, minting, role):
    with certificates.channel(coordinator.grpc, minting.tls(authority, role, minting.token(role))) as channel:
        for method, row in TABLE.items():
            code = outcome(channel, method)
            if row[role] == "no":
                assert code == DENIED, f"{role} called {method}: {code}"
            else:
                assert code not in (DENIED, UNKNOWN, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), \
                    f"{role} called {method}: {code}"


@pytest.mark.parametrize("role", ROLES)
def test_a_token_replayed_from_another_job_has_the_rights_of_another_job(coordinator, authority, minting, role):
    tls = minting.tls(authority, f"{role}-other", minting.token(role, job="other"))
    with certificates.channel(coordinator.grpc, tls) as channel:
        for method, row in TABLE.items():
            code = outcome(channel, method)
            assert (code == DENIED) == (row[role] != "yes"), f"{role} of job other called {method}: {code}"


@pytest.mark.parametrize("who", ["no token", "another key", "expired", "wrong role", "wrong job"])
def test_nobody_who_is_not_known_calls_anything(coordinator, authority, minting, tmp_path, who):
    good = minting.token("metrics")
    token = {"no token": "", "another key": Minting(tmp_path).token("operator"), "expired": minting.token("operator", hours=0),
             "wrong role": good.replace("role/metrics", "role/operator"),
             "wrong job": minting.token("trainer", job="other").replace("job/other", "job/rl")}[who]
    ca = open(authority.directory / "ca.crt", "rb").read()
    credentials = grpc.ssl_channel_credentials(ca)
    if token:
        shows = grpc.metadata_call_credentials(lambda context, callback: callback((("weightwire-token", token),), None))
        credentials = grpc.composite_channel_credentials(credentials, shows)
    with grpc.secure_channel(coordinator.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        for method in TABLE:
            assert outcome(channel, method) == UNKNOWN, method


@pytest.mark.parametrize("who", ["wrong CA", "expired"])
def test_a_bad_certificate_is_no_better_than_before(coordinator, authority, minting, tmp_path, who):
    """A client is asked for a certificate, and may go without; one that is not good still ends the handshake."""
    if who == "wrong CA":
        own = certificates.Authority(tmp_path / "stranger").issue("operator", "operator", job="rl")
    else:
        own = authority.issue("over", "operator", job="rl", days=-1)
    files = [open(path, "rb").read() for path in (authority.directory / "ca.crt", own.key, own.cert)]
    token = minting.token("operator")
    shows = grpc.metadata_call_credentials(lambda context, callback: callback((("weightwire-token", token),), None))
    credentials = grpc.composite_channel_credentials(grpc.ssl_channel_credentials(*files), shows)
    with grpc.secure_channel(coordinator.grpc, credentials, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        for method in TABLE:
            assert outcome(channel, method) == grpc.StatusCode.UNAVAILABLE, method
