"""weightwire.nccl.Collective over the fake NCCL and a real weightwired; members are threads of this process."""

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import BINARIES
from weightwire import AbortedError, Client, DeadlineError, NotReadyError, RefusedError, StaleError, UnavailableError
from weightwire.nccl import Collective

LIBRARIES = BINARIES.parent / "lib"
FAKE = str(LIBRARIES / "libfake_nccl.so")
FILES = {"library": str(LIBRARIES / "libweightwire_nccl.so"), "nccl_library": FAKE, "cuda_library": FAKE}
HANG_OPERATION, ASYNC_ERROR = 2, 3


@pytest.fixture
def fake():
    library = ctypes.CDLL(FAKE)
    library.fake_nccl_reset()
    yield library
    library.fake_nccl_reset()
    assert library.fake_nccl_live_comms() == 0 and library.fake_nccl_live_events() == 0


@pytest.fixture
def client(daemon):
    with Client(daemon.grpc) as opened:
        yield opened


class Group:
    """`size` members; `each(call)` runs call(member) for all of them at once and returns what came of it."""

    def __init__(self, client, size, **options):
        self._pool = ThreadPoolExecutor(size)
        self.members = [None] * size
        opened = [self._pool.submit(Collective, client, "class-a", rank, size, **{**FILES, **options})
                  for rank in range(size)]
        self.members = [o.result() for o in opened]
        self.streams = [ctypes.create_string_buffer(1) for _ in range(size)]

    def each(self, call):
        return list(self._pool.map(call, self.members))

    def stream(self, member):
        return ctypes.addressof(self.streams[member.rank])

    def broadcast(self, buffers, root, **options):
        def one(member):
            try:
                member.broadcast(buffers[member.rank], root, stream=self.stream(member), **options)
            except (AbortedError, DeadlineError, UnavailableError) as error:
                return error
        return self.each(one)

    def check_broadcast(self, root, seed):
        want = np.random.default_rng(seed).integers(0, 256, 100_001, dtype=np.uint8)
        buffers = [want.copy() if rank == root else np.zeros_like(want) for rank in range(len(self.members))]
        assert self.broadcast(buffers, root) == [None] * len(self.members)
        assert all(np.array_equal(b, want) for b in buffers)

    def close(self):
        self.each(Collective.close)
        self._pool.shutdown()


@pytest.fixture
def group(client, fake):
    opened = []

    def make(size, **options):
        opened.append(Group(client, size, **options))
        return opened[-1]

    yield make
    fake.fake_nccl_reset()
    for g in opened:
        g.close()


def test_members_form_move_bytes_and_close(group):
    members = group(3)
    assert {(m.epoch, m.state) for m in members.members} == {(1, "ready")}
    for root in range(3):
        members.check_broadcast(root, root)
    sent = {(a, b): bytes([16 * a + b]) * (100 + 10 * a + b) for a in range(3) for b in range(3) if a != b}
    got = {pair: bytearray(len(content)) for pair, content in sent.items()}
    members.each(lambda m: m.exchange(
        [(peer, bytearray(sent[m.rank, peer])) for peer in range(3) if peer != m.rank],
        [(peer, got[peer, m.rank]) for peer in range(3) if peer != m.rank], stream=members.stream(m)))
    assert {pair: bytes(content) for pair, content in got.items()} == sent
    members.each(Collective.close)
    assert [m.state for m in members.members] == ["closed"] * 3
    with pytest.raises(NotReadyError, match="the collective is closed"):
        members.members[0].broadcast(bytearray(1), 0)


@pytest.mark.parametrize("fault", [HANG_OPERATION, ASYNC_ERROR])
def test_a_fault_ends_every_member_and_all_form_again(group, fake, fault):
    members = group(3)
    fake.fake_nccl_fault(1, fault)
    buffers = [np.full(1000, rank, np.uint8) for rank in range(3)]
    ended = members.broadcast(buffers, 0, timeout=0.3)
    assert all(isinstance(e, (DeadlineError, UnavailableError)) for e in ended), ended
    assert [m.state for m in members.members] == ["unformed"] * 3
    fake.fake_nccl_reset()
    members.each(Collective.form)
    assert {m.epoch for m in members.members} == {2}
    assert all((b == rank).all() for rank, b in enumerate(buffers)), "late bytes came to a buffer that was free"
    members.check_broadcast(2, 7)


def test_a_lost_process_is_replaced_and_its_zombie_is_told(group, client, fake):
    members = group(2)
    zombie, survivor = members.members
    fake.fake_nccl_lose(0)
    data = np.zeros(10, np.uint8)
    with pytest.raises(AbortedError, match="fake remote error") as lost:
        survivor.broadcast(data, 0, stream=members.stream(survivor))
    assert lost.value.reason == "member_lost" and lost.value.rank == "1 of 2"
    with ThreadPoolExecutor(2) as pool:
        again = pool.submit(survivor.form)
        members.members[0] = pool.submit(Collective, client, "class-a", 0, 2, **FILES).result()
        again.result()
    members.check_broadcast(0, 9)
    with pytest.raises(StaleError):
        zombie._ask("AwaitUniqueId", time.monotonic() + 5, epoch=survivor.epoch)
    with pytest.raises(AbortedError, match="closing: fake remote error"):
        zombie.close()
    assert zombie.state == "closed"


def test_abort_from_another_thread_ends_what_runs(group, fake):
    members = group(2)
    ended = []

    def wait():
        try:
            members.members[0].broadcast(bytearray(64), 0)
        except AbortedError as error:
            ended.append(error.reason)

    running = threading.Thread(target=wait)
    running.start()
    while fake.fake_nccl_pending() == 0:
        time.sleep(0.001)
    members.members[0].abort("enough")
    running.join(30)
    assert ended == ["abort_requested"]


def test_a_member_that_stays_away_is_named_in_time(client, fake):
    with pytest.raises(DeadlineError, match="of 2 members these have not asked: 1"):
        Collective(client, "class-a", 0, 2, timeout=0.3, **FILES)


def test_wrong_arguments_leave_the_communicator_alone(group):
    members = group(2)
    with pytest.raises(RefusedError, match="send 0: there is no rank 5"):
        members.members[0].exchange([(5, bytearray(1))], [])
    with pytest.raises(TypeError):
        members.members[0].broadcast(b"not writable", 0)
    members.check_broadcast(0, 3)


def test_what_is_not_there_is_named_with_a_remedy(client, tmp_path):
    with pytest.raises(UnavailableError, match="WEIGHTWIRE_NCCL_LIBRARY"):
        Collective(client, "class-a", 0, 1, **{**FILES, "nccl_library": str(tmp_path / "libnccl.so.2")})
    with pytest.raises(UnavailableError, match="build the target weightwire_nccl"):
        Collective(client, "class-a", 0, 1, **{**FILES, "library": str(tmp_path / "libweightwire_nccl.so")})
