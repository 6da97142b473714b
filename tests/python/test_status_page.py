"""What the coordinator's HTTP serves to people: the status page, the documents that feed it, and the same as text."""

import json
import re
import subprocess
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser

from google.protobuf import json_format

from conftest import BINARIES, ROOT
from demo.fleet import Daemon
from test_client import engine, trainer
from weightwire import Client
from weightwire.v1 import coordinator_pb2 as pb

PAGE = (ROOT / "server/daemon/status_page.html").read_text()
HOSTILE = "</script><img src=x onerror=alert(1)>\"'"


def get(daemon, path, method="GET"):
    """(status, headers, body) of one request, whatever its status."""
    request = urllib.request.Request(f"http://{daemon.http}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return reply.status, reply.headers, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


class Elements(HTMLParser):
    """Every element with its attributes; what is opened must be closed."""

    VOID = {"meta", "link", "br", "img", "input"}

    def __init__(self, text: str):
        super().__init__()
        self.all, self.open = [], []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.all.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing, or something else"


def test_the_page_asks_no_other_host_and_runs_only_its_own_script(daemon):
    code, headers, body = get(daemon, "/")
    assert code == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    nonce = re.fullmatch("'nonce-([0-9a-f]{32})'", policy["script-src"])[1]
    assert policy["style-src"] == f"'nonce-{nonce}'" and "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Date"].endswith(" GMT")
    assert body == PAGE.replace("{{nonce}}", nonce)
    assert get(daemon, "/")[1]["Content-Security-Policy"] != headers["Content-Security-Policy"], "one nonce for two replies"
    elements = Elements(body)
    for tag, attributes in elements.all:
        assert "style" not in attributes and not [a for a in attributes if a.startswith("on")], (tag, attributes)
        if tag in ("script", "style"):
            assert attributes == {"nonce": nonce}
        for link in (attributes.get("src"), attributes.get("href")):
            assert link is None or link.startswith(("/", "data:")) and not link.startswith("//"), (tag, attributes)
    assert not re.search(r"https?://|url\(|@import|//[a-z]+\.", body), "an address outside this host"


def test_the_script_writes_text_only_and_finds_its_elements():
    script = PAGE.split("<script", 1)[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|DOMParser", script)
    there = {attributes["id"] for _, attributes in Elements(PAGE).all if "id" in attributes}
    made = set(re.findall(r'id: "([a-z-]+)"', script))
    asked = set(re.findall(r'\$\("([a-z-]+)"\)', script)) | set(re.findall(r'(?:draw|set)\("([a-z-]+)"', script))
    assert len(asked) > 10 and asked <= there | made, asked - there - made


def test_the_document_is_the_status_that_wwctl_gets(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(4)
    with Client(daemon.grpc) as client:
        client.wait_version(4, timeout=30)
    asked = subprocess.run([BINARIES / "wwctl", "status", "--json", "--address", daemon.grpc], check=True, timeout=30,
                           capture_output=True, text=True)
    code, headers, body = get(daemon, "/api/status")
    assert code == 200 and headers["Content-Type"] == "application/json"
    ours, theirs = json.loads(body), json.loads(asked.stdout)
    for status in (ours, theirs):  # the last acknowledgement may be counted between the two
        for epoch in status["epochs"]:
            for field in ("phase", "commit_seconds", "total_seconds", "waiting_for", "flip_seconds_max"):
                assert field in epoch
                del epoch[field]
    assert ours == theirs
    message = json_format.Parse(body, pb.StatusResponse())
    assert message.committed_version == 4 and {p.group for p in message.participants} == {"trainer", "engine-a"}
    page = json_format.Parse(get(daemon, "/api/page")[2], pb.StatusResponse())
    assert page.engines == message.engines and len(page.participants) == 6 and page.trainers_total == 4
    assert [(list(e.engine_runs), list(e.engines)) for e in page.epochs] == [([0, 1], [])], "engines by number"
    text = get(daemon, "/status")
    words = [line.split() for line in text[2].splitlines()]
    assert ["ENGINE", "STATE", "VERSION", "EPOCH", "LAG", "READY", "RANKS", "LAST", "ERROR"] in words and \
        ["engine-a", "serving", "4", "1", "0", "yes", "2/2"] in words, "the columns of `wwctl engines -o wide`"
    (row,) = [line for line in words if line[:3] == ["1", "publish", "4"]]
    assert row[3] in ("committing", "committed") and row[4] == "1" and row[6] in ("kB", "MB"), "those of `wwctl epochs`"
    assert text[0] == 200 and text[1]["Content-Type"].startswith("text/plain") and text[2].startswith("idle: all engines serve version 4\n")
    assert "default-src 'none'" in text[1]["Content-Security-Policy"]


def test_the_matrix_says_who_sends_how_much_to_whom(daemon, groups):
    assert json.loads(get(daemon, "/api/plans")[2]) == {"plans": []}
    groups += [trainer(daemon), engine(daemon, "engine-a"), engine(daemon, "engine-b")]
    groups[0].publish(1)
    with Client(daemon.grpc) as client:
        status = client.wait_version(1, timeout=30)
        explained = client.explain("engine-a", "")
    (plan,) = json.loads(get(daemon, "/api/plans")[2])["plans"]
    assert plan["engines"] == ["engine-a", "engine-b"] and plan["certain"], "one plan for engines of one layout"
    assert (plan["source_ranks"], plan["target_ranks"], plan["source_step"], plan["target_step"]) == (4, 2, 1, 1)
    assert [len(row) for row in plan["rows"]] == [2] * 4
    assert sum(map(sum, plan["rows"])) == plan["bytes_total"] == status.epoch_of(1).bytes // 2
    for rank, row in enumerate(plan["rows"]):
        amount, unit = re.search(rf"^  trainer/{rank} sends (\S+) (\S+)$", explained, re.M).groups()
        assert abs(float(amount) * {"kB": 1e3, "MB": 1e6}[unit] - sum(row)) <= 0.05 * {"kB": 1e3, "MB": 1e6}[unit], explained
    assert re.search(r"^ +engine-a/0  +engine-a/1$", explained, re.M), explained
    assert plan["id"] in explained


def test_links_say_who_read_how_fast_from_whom(daemon, groups, tmp_path):
    assert json.loads(get(daemon, "/api/links")[2]) == {"epochs": []}
    agent = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "agent"), "far", role="agent", coordinator=daemon.grpc, transports="tcp")
    try:
        groups += [trainer(daemon), engine(daemon, "near"), engine(agent, "far")]
        for version in (1, 2):
            groups[0].publish(version)
            with Client(daemon.grpc) as client:
                status = client.wait_version(version, timeout=30)
        epochs = json.loads(get(daemon, "/api/links")[2])["epochs"]
        names = {p.group: p.agent for p in status.participants}
        assert epochs and [epoch["version"] for epoch in epochs] == sorted((epoch["version"] for epoch in epochs), reverse=True)
        (moved,) = [epoch for epoch in epochs if epoch["version"] == 1]
        assert moved["left_off"] == 0
        links = {(link["source"], link["target"], link["transport"]): link for link in moved["links"]}
        hub, far = names["trainer"], names["far"]
        assert hub != far and set(links) == {(hub, hub, "shm"), (hub, far, "tcp")}
        assert sum(link["bytes"] for link in links.values()) == status.epoch_of(1).bytes
        (shown,) = [epoch for epoch in json.loads(get(daemon, "/api/status")[2])["epochs"] if epoch["version"] == "1"]
        for link in links.values():  # the coordinator's time has the commands and reports, too
            assert 0 < link["seconds"] <= shown["transfer_seconds"]
    finally:
        for group in groups:
            group.close()
        groups.clear()
        assert agent.stop() == 0


def test_names_from_outside_stay_text_in_the_document(tmp_path, monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_NAME", HOSTILE)
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "hub"), "hub", role="all", listen="127.0.0.1:0")
    try:
        group = trainer(hub)
        for publisher in group.publishers:
            publisher.publish(1, deadline=30)
        code, headers, body = get(hub, "/api/status")
        assert code == 200 and headers["Content-Type"] == "application/json" and headers["X-Content-Type-Options"] == "nosniff"
        assert {p["agent_name"] for p in json.loads(body)["participants"]} == {HOSTILE}
        assert json.loads(body)["waiting_for"].startswith("version 1: ")
        assert "<img" not in body, "the JSON escapes what begins an element"
        assert "<img" not in get(hub, "/api/page")[2]
        group.close()
    finally:
        assert hub.stop() == 0


def test_an_agent_has_text_only(daemon, tmp_path):
    agent = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "agent"), "agent", role="agent", coordinator=daemon.grpc)
    try:
        for path in ("/", "/status"):
            code, headers, body = get(agent, path)
            assert code == 200 and headers["Content-Type"].startswith("text/plain"), path
            assert body.startswith("session with the coordinator: "), body
        assert get(agent, "/api/status")[0] == get(agent, "/api/plans")[0] == get(agent, "/api/links")[0] == 404
    finally:
        assert agent.stop() == 0


def test_it_is_read_only(daemon):
    for path in ("/", "/api/status", "/api/page", "/api/plans", "/api/links", "/status"):
        assert get(daemon, path, "POST")[0] == 405, path
        code, headers, body = get(daemon, path, "HEAD")
        assert (code, body) == (200, "") and int(headers["Content-Length"]) > 0, path


def test_many_readers_get_whole_documents_while_a_version_moves(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    stop = threading.Event()

    def read(path):
        count = 0
        while not stop.is_set() or count < 5:
            code, _, body = get(daemon, path)
            assert code == 200 and json.loads(body), path
            count += 1
        return count

    with ThreadPoolExecutor(12) as pool:
        readers = [pool.submit(read, path) for path in ["/api/status", "/api/page", "/api/plans", "/api/links"] * 3]
        try:
            for version in range(1, 4):
                groups[0].publish(version)
        finally:
            stop.set()
        assert all(reader.result(60) >= 5 for reader in readers)
