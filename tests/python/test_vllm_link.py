"""The line between a driver and ranks on other hosts: nothing is lost or heard twice while connections break, and nobody without the
key is heard. The driver's own tests run over the same lines (test_vllm_driver.py)."""

import json
import socket
import threading
import time

import pytest

from breaking_line import BreakingLine
from conftest import until
from weightwire import DeadlineError, RefusedError, UnavailableError
from weightwire.vllm import channel
from weightwire.vllm.link import Link, Workers


class Rank:
    """Answers what it is asked with the count of what it was asked before, so that anything lost or repeated shows."""

    def __init__(self, number, workers, address=None, key=None):
        self.asked = []
        self.link = Link(address or workers.address, key or workers.key, self.answer, 5)
        self.link.send({"rank": number, "hello": {"world_size": 2, "interrupted": False}})

    def answer(self, do, message):
        self.asked.append(message["number"])
        return {"before": len(self.asked) - 1}


@pytest.fixture
def workers():
    made = Workers("127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def relay(workers):
    """Lasts until it is cut."""
    made = BreakingLine(channel.address_of(workers.address), most=None)
    yield made
    made.close()


def through(relay):
    return "127.0.0.1:%d" % relay.address[1]


def ask(workers, number, timeout=10.0):
    return [answer["before"] for answer in workers.ask("count", timeout, number=number)]


@pytest.mark.parametrize("seed", range(6))
def test_each_question_is_heard_once_and_in_order_however_often_connections_break(workers, seed):
    relays = [BreakingLine(channel.address_of(workers.address), seed=10 * seed + rank, most=2500) for rank in (0, 1)]
    ranks = [Rank(rank, workers, through(relays[rank])) for rank in (0, 1)]
    workers.wait_hello(5)
    for number in range(60):
        assert ask(workers, number) == [number, number]
        ranks[number % 2].link.send({"offer": {"epoch": number, "version": number}})
    assert [rank.asked for rank in ranks] == [list(range(60))] * 2
    assert min(relay.breaks for relay in relays) >= 5, "the relay broke nothing"
    until("the last offers", lambda: workers._offers.get(0, {}).get("epoch") == 58 and workers._offers[1]["epoch"] == 59)
    for rank in ranks:
        rank.link.close()
    for relay in relays:
        relay.close()


def test_an_answer_that_was_on_its_way_when_the_connection_broke_arrives(workers, relay):
    waits, go_on = threading.Event(), threading.Event()
    rank = Rank(0, workers, through(relay))
    other = Rank(1, workers)
    rank.link._on_ask = lambda do, message: (waits.set(), go_on.wait(5), {"before": 7})[2]
    workers.wait_hello(5)
    asker = threading.Thread(target=lambda: answers.extend(ask(workers, 0)))
    answers = []
    asker.start()
    assert waits.wait(5)
    relay.cut()
    go_on.set()
    asker.join(10)
    assert answers == [7, 0]
    other.link.close()
    rank.link.close()


def test_a_network_that_is_away_for_three_seconds_costs_nothing(workers, relay):
    ranks = [Rank(0, workers, through(relay)), Rank(1, workers)]
    workers.wait_hello(5)
    address = relay.address
    relay.close()
    asked = threading.Thread(target=lambda: answers.extend(ask(workers, 0, timeout=15)))
    answers = []
    asked.start()
    time.sleep(3)  # what the test is about
    again = BreakingLine(channel.address_of(workers.address), most=None, port=address[1])
    asked.join(15)
    assert answers == [0, 0]
    again.close()
    for rank in ranks:
        rank.link.close()


def test_a_rank_whose_host_is_gone_costs_the_deadline_and_no_more(workers, relay):
    ranks = [Rank(0, workers, through(relay)), Rank(1, workers)]
    workers.wait_hello(5)
    relay.close()
    started = time.monotonic()
    with pytest.raises(DeadlineError, match="rank 0 did not count within 1"):
        ask(workers, 0, timeout=1)
    assert time.monotonic() - started < 5
    for rank in ranks:
        rank.link.close()


def test_a_rank_that_says_goodbye_is_gone_at_once(workers):
    ranks = [Rank(number, workers) for number in (0, 1)]
    workers.wait_hello(5)
    ranks[1].link.close()
    until("it left", lambda: 1 not in workers._ranks)
    with pytest.raises(UnavailableError, match=r"ranks \[1\] of the engine are gone"):
        ask(workers, 0, timeout=60)
    ranks[0].link.close()


def test_a_rank_that_was_started_anew_takes_the_place_of_the_one_before(workers, relay):
    first, other = Rank(0, workers, through(relay)), Rank(1, workers)
    workers.wait_hello(5)
    assert ask(workers, 0) == [0, 0]
    before = workers._ranks[0]
    second = Rank(0, workers)
    until("its hello", lambda: workers._ranks[0] is not before)
    assert ask(workers, 1) == [0, 1] and first.asked == [0] and second.asked == [1]
    for rank in (first, second, other):
        rank.link.close()


def test_a_driver_that_closes_is_not_dialled_any_more(workers):
    rank = Rank(0, workers)
    until("hello", lambda: 0 in workers._hello)
    workers.close()
    until("it has given up", rank.link._closed.is_set)
    until("its thread has ended", lambda: not any(thread.name == "weightwire-link" for thread in threading.enumerate()))


class TestStrangers:
    def test_without_the_key_nothing_is_said_or_heard(self, workers):
        with pytest.raises(UnavailableError, match="driver's socket") as raised:
            Rank(0, workers, key=channel.new_key())
        assert "listen" in raised.value.remedy
        assert not workers._hello

    def test_a_driver_that_does_not_hold_the_key_is_not_obeyed(self):
        """Somebody else listens where the driver did."""
        false = Workers("127.0.0.1")
        with pytest.raises(UnavailableError):
            Link(false.address, channel.new_key(), lambda do, message: pytest.fail("obeyed"), 5)
        false.close()

    def test_what_was_overheard_cannot_be_said_again(self, workers, relay):
        ranks = [Rank(0, workers, through(relay)), Rank(1, workers)]
        workers.wait_hello(5)
        until("the hello was overheard", lambda: b"".join(relay.seen).count(b"\n") >= 2)
        heard = b"".join(relay.seen)
        ranks[0].link.close()
        until("it left", lambda: 0 not in workers._ranks)
        with socket.create_connection(channel.address_of(workers.address), 5) as thief:
            thief.sendall(heard)
            thief.settimeout(10)
            said = thief.makefile("rb").read()
        assert said.count(b"\n") == 1, "after its own first line the driver says nothing"
        assert 0 not in workers._ranks
        ranks[1].link.close()

    @pytest.mark.parametrize("change", ["a byte of a line", "a line is left out", "two lines change places"])
    def test_what_is_changed_on_the_way_is_not_taken(self, workers, change):
        """The connection ends and is made anew: what the rank said arrives, and nothing else does."""
        heard, hear = [], workers._hear
        workers._hear = lambda channel, message: (heard.append(message), hear(channel, message))
        relay = _Changing(channel.address_of(workers.address), change)
        rank = Rank(0, workers, through(relay))
        until("hello", lambda: 0 in workers._hello)
        relay.armed = True
        for epoch in (1, 2, 3):
            rank.link.send({"offer": {"epoch": epoch, "version": 10 + epoch}})
        until("the last offer", lambda: workers._offers.get(0, {}).get("epoch") == 3)
        assert relay.changed and relay.breaks == 1
        assert [message["offer"]["version"] for message in heard if "offer" in message] == [11, 12, 13]
        rank.link.close()
        relay.close()

    def test_a_hundred_silent_connections_keep_no_rank_out(self, workers):
        silent = [socket.create_connection(channel.address_of(workers.address), 5) for _ in range(100)]
        ranks = [Rank(number, workers) for number in (0, 1)]
        workers.wait_hello(5)
        assert ask(workers, 0) == [0, 0]
        assert len(workers._strangers) <= 64
        for connection in silent:
            connection.close()
        for rank in ranks:
            rank.link.close()

    def test_a_first_line_without_an_end_is_cut_off(self, workers):
        with socket.create_connection(channel.address_of(workers.address), 5) as stranger:
            stranger.settimeout(10)
            try:
                stranger.sendall(b"x" * 100_000)
                said = stranger.makefile("rb").read()
            except ConnectionError:
                said = b""
        assert said.count(b"\n") <= 1

    def test_another_version_is_named(self, workers, monkeypatch):
        monkeypatch.setattr(channel, "PROTOCOL", 2)
        accepted = socket.create_server(("127.0.0.1", 0))

        def older():
            connection, _ = accepted.accept()
            connection.sendall(json.dumps({"protocol": 1, "nonce": "00"}).encode() + b"\n")
        threading.Thread(target=older, daemon=True).start()
        with pytest.raises(UnavailableError, match="speaks protocol 1, this end 2: install one version"):
            Rank(0, workers, address="127.0.0.1:%d" % accepted.getsockname()[1])
        accepted.close()


class _Changing(BreakingLine):
    """Changes what the dialling end says, once, when armed."""

    def __init__(self, target, how):
        self.how, self.armed, self.changed, self._held = how, False, False, b""
        super().__init__(target, most=None)

    def _pump(self, source, sink, pair, left):
        if source is pair[1]:
            super()._pump(source, sink, pair, left)
            return
        try:
            while data := source.recv(65536):
                sink.sendall(self._change(data))
        except OSError:
            pass
        self._reset(pair)

    def _change(self, data):
        if not self.armed or self.changed:
            return data
        self._held += data
        lines = self._held.splitlines(keepends=True)
        if len(lines) < 2 or not lines[-1].endswith(b"\n"):
            return b""  # not yet
        self.changed = True
        if self.how == "a byte of a line":
            lines[0] = lines[0].replace(b'"version": 11', b'"version": 99')
        elif self.how == "a line is left out":
            del lines[0]
        else:
            lines[:2] = lines[1::-1]
        return b"".join(lines)


class TestWhereItListens:
    @pytest.mark.parametrize("listen, why", [("0.0.0.0", "no host that workers could dial"), ("[::]:0", "no host that workers could dial"),
                                             ("127.0.0.1:99999", "no address"), (":7000", "no address"),
                                             ("no-such-host.invalid:1", "no-such-host.invalid"), ("192.0.2.1:0", "192.0.2.1")])
    def test_what_workers_could_not_dial_is_refused(self, listen, why):
        with pytest.raises(RefusedError, match=why) as raised:
            Workers(listen)
        assert raised.value.remedy

    def test_a_port_that_is_taken_is_refused(self, workers):
        with pytest.raises(RefusedError, match="in use"):
            Workers(workers.address)

    def test_an_address_of_version_6(self):
        six = Workers("[::1]")
        ranks = [Rank(number, six) for number in (0, 1)]
        six.wait_hello(5)
        assert six.address.startswith("[::1]:") and ask(six, 0) == [0, 0]
        for rank in ranks:
            rank.link.close()
        six.close()

    def test_who_is_missing_is_said(self, workers):
        rank = Rank(0, workers)
        with pytest.raises(DeadlineError, match=r"only ranks \[0\] of the engine said hello at 127") as raised:
            workers.wait_hello(0.5)
        assert "listen=" in raised.value.remedy
        rank.link.close()
