"""wwctl store: what it prints and ends with; barriers; what a follower's and a writer's metrics say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import urllib.request

import numpy as np
import pytest

from conftest import BINARIES, DATA, ROOT, Daemon, EngineRanks, read_safetensors, until
from weightwire import Client, checkpoint
from weightwire.store import Barrier, Figures, Follower, MetricsServer, Objects, Reader, StoreError, Writer
from weightwire.store.__main__ import main

pytestmark = pytest.mark.usefixtures("store_environment")

MODEL = DATA / "megatron/qwen2/hf"


def stepped_folder(folder, seed: int):
    """A copy of the model whose weights a step has moved, and its arrays."""
    folder.mkdir()
    (folder / "config.json").write_bytes((MODEL / "config.json").read_bytes())
    data = bytearray((MODEL / "model.safetensors").read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    bits = np.frombuffer(data, np.uint16, offset=begin)
    bits[np.random.default_rng(seed).random(bits.size) < 0.03] += 1
    (folder / "model.safetensors").write_bytes(data)
    return {name: array for name, (_, array) in read_safetensors(folder / "model.safetensors").items()}


def run(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_checkpoints_go_in_and_come_out(s3, tmp_path, capsys):
    url = s3.url(tmp_path.name)
    want = {}
    for version in (1, 2, 3):
        want[version] = stepped_folder(tmp_path / f"step-{version}", version)
        code, out, err = run(capsys, "push", url, tmp_path / f"step-{version}", "--version", version, "--json", "--quiet")
        assert code == 0, err
        said = json.loads(out)
        assert (said["version"], said["kind"]) == (version, "anchor" if version == 1 else "delta")
    for version, to in ((2, "weightwire"), (3, "hf"), (1, "weightwire:megatron:tp2")):
        target = tmp_path / f"out-{version}"
        code, out, err = run(capsys, "pull", url, target, "--version", version, "--to", to, "--json", "--quiet")
        assert code == 0 and json.loads(out)["version"] == version, err
        if to != "hf":
            checkpoint.convert(target, tmp_path / f"hf-{version}", "hf", config=MODEL / "config.json")
            target = tmp_path / f"hf-{version}"
        got = {name: bits for name, (_, bits) in read_safetensors(target / "model.safetensors").items()}
        assert got.keys() == want[version].keys() and all(np.array_equal(got[name], want[version][name]) for name in got)
    listed = json.loads(run(capsys, "ls", url, "--json")[1])["versions"]
    assert [(row["version"], row["kind"], row["latest"]) for row in listed] == [(1, "anchor", False), (2, "delta", False), (3, "delta", True)]
    shown = json.loads(run(capsys, "show", url, "--json")[1])
    assert shown["version"] == 3 and len(shown["route"]) == 3 and shown["weights_bytes"] == sum(a.nbytes for a in want[3].values())
    assert "version 3" not in run(capsys, "show", url, "--version", "2")[1]
    code, out, _ = run(capsys, "verify", url, "--json", "--quiet")
    assert code == 0 and json.loads(out)["damaged"] == 0 and len(json.loads(out)["manifests"]) == 3
    code, out, _ = run(capsys, "gc", url, "--keep", "1", "--json")
    assert code == 0 and len(json.loads(out)["kept"]) == 3  # the newest is made of the others
    with pytest.raises(SystemExit):
        main(["gc", url, "--keep-age", "tomorrow"])


def test_damage_ends_verify_with_1_and_is_named(tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    stepped_folder(tmp_path / "step", 1)
    assert run(capsys, "push", url, tmp_path / "step", "--version", 1, "--quiet")[0] == 0
    part = next(tmp_path.glob("store/versions/*/anchor-00000-00000"))
    part.write_bytes(part.read_bytes()[:-1])
    code, out, _ = run(capsys, "verify", url, "--quiet")
    assert code == 1 and "anchor-00000-00000" in out and "1 are damaged" in out
    code, _, err = run(capsys, "pull", url, tmp_path / "out", "--quiet")
    assert code == 1 and "anchor-00000-00000" in err and not (tmp_path / "out").exists()


def test_what_is_not_there_is_an_error_with_a_remedy(tmp_path, capsys):
    url = f"file://{tmp_path}/store"
    for words, said in ((["pull", url, tmp_path / "out"], "wwctl store write"), (["show", url, "--version", 3], "wwctl store ls"),
                        (["push", url, tmp_path / "none", "--version", 1], "none"), (["ls", "http://x"], "s3://"),
                        (["follow", url, "--barrier", "b"], "--sites"), (["write", url, "--config", tmp_path / "none"], "config.json")):
        code, _, err = run(capsys, *words)
        assert code == 1 and said in err, err


def test_wwctl_hands_its_store_commands_on(tmp_path):
    done = subprocess.run([BINARIES / "wwctl", "store", "ls", f"file://{tmp_path}/store", "--json"], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "WEIGHTWIRE_PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "client/python")})
    assert done.returncode == 0 and json.loads(done.stdout) == {"url": f"file://{tmp_path}/store", "versions": [], "sites": []}, done


class TestBarrier:
    @pytest.fixture
    def manifest(self, tmp_path, capsys):
        stepped_folder(tmp_path / "step", 1)
        assert run(capsys, "push", f"file://{tmp_path}/store", tmp_path / "step", "--version", 1, "--quiet")[0] == 0
        reader = Reader(Objects(f"file://{tmp_path}/store"))
        return reader.objects, reader.version(1)

    def passes(self, objects, manifest, sites, deadline, stop=None):
        """What each of these sites finds, asked at the same time."""
        found = {}

        def ask(site):
            found[site] = Barrier(objects, "all", site, 3, deadline_seconds=deadline, poll_seconds=0.02).pass_(manifest, stop or threading.Event())
        threads = [threading.Thread(target=ask, args=(site,)) for site in sites]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return found

    def test_with_all_sites_all_go(self, manifest):
        assert self.passes(*manifest, ["a", "b", "c"], 60) == {"a": True, "b": True, "c": True}
        assert self.passes(*manifest, ["d"], 60) == {"d": True}  # it comes late, and the decision stands

    def test_without_one_nobody_goes_and_it_neither_when_it_comes(self, manifest):
        assert self.passes(*manifest, ["a", "b"], 0.3) == {"a": False, "b": False}
        assert self.passes(*manifest, ["c"], 60) == {"c": False}

    def test_who_is_late_with_the_other_decision_obeys_the_first(self, manifest, monkeypatch):
        """Site b has seen too few, and stands still there while the others come and go."""
        objects, version = manifest
        seen, others_went, found, real = threading.Event(), threading.Event(), {}, Objects.list

        def slow(self, folder):
            listed = list(real(self, folder))
            if threading.current_thread().name == "b":
                seen.set()
                assert others_went.wait(60)
            return iter(listed)
        monkeypatch.setattr(Objects, "list", slow)
        late = threading.Thread(target=lambda: found.update(self.passes_one(objects, version, "b", 0.0)), name="b")
        late.start()
        assert seen.wait(60)
        assert self.passes(objects, version, ["a", "c"], 60) == {"a": True, "c": True}
        others_went.set()
        late.join(60)
        assert found == {"b": True}

    def passes_one(self, objects, manifest, site, deadline):
        return {site: Barrier(objects, "all", site, 3, deadline_seconds=deadline).pass_(manifest, threading.Event())}

    def test_one_who_stops_decides_nothing(self, manifest):
        stop = threading.Event()
        stop.set()
        assert self.passes(*manifest, ["a"], 60, stop) == {"a": False}
        assert self.passes(*manifest, ["b", "c"], 60) == {"b": True, "c": True}


class Sites:
    """A daemon each for two sites, with writer and follower on threads of this process."""

    def __init__(self, tmp_path):
        self.daemons = [Daemon(str(BINARIES / "weightwired"), str(tmp_path / name), name, role="all", listen="127.0.0.1:0") for name in ("near", "far")]
        self.near, self.far = self.daemons
        self.config = json.loads((MODEL / "config.json").read_text())
        self.running = []
        self.engine = EngineRanks(self.far.agent_socket, "far", self.config, "hf",
                                  [[meta for meta, _ in read_safetensors(MODEL / "model.safetensors").values()]])

    def start(self, participant):
        thread = threading.Thread(target=participant.run, daemon=True)
        thread.start()
        self.running.append((participant, thread))
        return participant

    def close(self):
        for participant, thread in self.running:
            participant.stop()
            thread.join(60)
            assert not thread.is_alive()
        self.engine.close()
        for daemon in self.daemons:
            daemon.stop()


@pytest.fixture
def two(tmp_path):
    made = Sites(tmp_path)
    yield made
    made.close()


def value(figures: Figures, name: str, label: str = "") -> float:
    return figures.values().get((f"weightwire_store_{name}", label), 0.0)


def test_a_site_goes_straight_to_the_newest_and_its_metrics_say_how_late_it_is(two, tmp_path, capsys):
    url, want = f"file://{tmp_path}/store", {}
    for version in (1, 2, 3):
        want[version] = stepped_folder(tmp_path / f"step-{version}", version)
        assert run(capsys, "push", url, tmp_path / f"step-{version}", "--version", version, "--quiet")[0] == 0
    follower = two.start(Follower(Reader(Objects(url)), "far", agent=two.far.agent_socket, coordinator=two.far.grpc, poll_seconds=0.05))
    two.engine.wait_version(3, 60)
    assert all(np.array_equal(two.engine.ranks[0].params[name].view(bits.dtype), bits) for name, bits in want[3].items())
    until("it says so", lambda: value(follower.figures, "version") == 3)
    with MetricsServer(follower.figures, "127.0.0.1:0") as server:
        def scraped() -> dict:
            text = urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10).read().decode()
            return dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("weightwire_store"))
        assert float(scraped()["weightwire_store_staleness_seconds"]) == 0
        assert float(scraped()['weightwire_store_failures_total{reason="damaged"}']) == 0
        want[4] = stepped_folder(tmp_path / "step-4", 4)
        assert run(capsys, "push", url, tmp_path / "step-4", "--version", 4, "--quiet")[0] == 0
        two.engine.wait_version(4, 60)
        stepped_folder(tmp_path / "step-5", 5)
        part = []

        real = Reader.read_part

        def cut(self, manifest, rank, number):
            if manifest.version == 5:
                part.append(number)
                raise StoreError("x", kind="damaged")
            return real(self, manifest, rank, number)
        Reader.read_part = cut
        try:
            assert run(capsys, "push", url, tmp_path / "step-5", "--version", 5, "--quiet")[0] == 0
            until("it is stale", lambda: float(scraped()["weightwire_store_staleness_seconds"]) > 0.5)
            now = scraped()
            assert (float(now["weightwire_store_version"]), float(now["weightwire_store_version_seen"])) == (4, 5)
            assert float(now["weightwire_store_staleness_versions"]) == 1 and float(now['weightwire_store_failures_total{reason="damaged"}']) >= 1
            assert two.engine.ranks[0].serving.version == 4
        finally:
            Reader.read_part = real
        two.engine.wait_version(5, 60)
        until("it is well again", lambda: float(scraped()["weightwire_store_staleness_seconds"]) == 0)
    assert json.loads(run(capsys, "ls", url, "--json")[1])["sites"] == [{"site": "far", "version": 5, "lineage": 1}]


def test_exactly_one_version_is_published_when_it_is_asked_for(two, tmp_path, capsys):
    url, want = f"file://{tmp_path}/store", {}
    for version in (1, 2, 3):
        want[version] = stepped_folder(tmp_path / f"step-{version}", version)
        assert run(capsys, "push", url, tmp_path / f"step-{version}", "--version", version, "--quiet")[0] == 0
    Follower(Reader(Objects(url)), "far", agent=two.far.agent_socket, coordinator=two.far.grpc).publish_exactly(2)
    two.engine.wait_version(2)
    assert all(np.array_equal(two.engine.ranks[0].params[name].view(bits.dtype), bits) for name, bits in want[2].items())


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_store_that_is_down_holds_up_no_version_of_the_trainers_site(two, tmp_path, monkeypatch, how):
    from conftest import Trainer
    from store_sites import stepped, weights
    url, tensors = f"file://{tmp_path}/store", weights()
    down, tried, put = threading.Event(), threading.Event(), Objects._put
    down.set()

    def failing(self, path, data, mode):
        tried.set()
        if down.is_set() and how == "fails":
            raise StoreError(f"{path}: it is down", kind="unavailable")
        until("it is up", lambda: not down.is_set(), 120)
        return put(self, path, data, mode)
    monkeypatch.setattr(Objects, "_put", failing)
    trainer = Trainer(two.near.agent_socket, two.config, "hf", [tensors])
    try:
        writer = two.start(Writer(Reader(Objects(url)), json.dumps(two.config), agent=two.near.agent_socket))
        for version in range(1, 8):
            trainer.fill([tensors])
            trainer.publish(version)
            assert tried.wait(60)  # from the first version on it is down for each of them
            with Client(two.near.grpc) as client:
                client.wait_version(version, timeout=30)
            tensors = stepped(tensors, version)
        assert value(writer.figures, "version") == 0 and value(writer.figures, "staleness_seconds") > 0
        if how == "fails":
            until("it has failed", lambda: value(writer.figures, "failures_total", "unavailable") >= 1)
        down.clear()
        until("the newest is stored", lambda: value(writer.figures, "version") == 7)
        assert Reader(Objects(url)).latest().manifest.version == 7 and len(Reader(Objects(url)).versions()) < 7
        assert value(writer.figures, "versions_total", "skipped") >= 1
    finally:
        down.clear()
        trainer.close()


def test_a_new_lineage_is_followed_though_its_numbers_are_lower(two, tmp_path):
    from conftest import Trainer
    from store_sites import stepped, weights
    url, tensors = f"file://{tmp_path}/store", weights()
    writer = two.start(Writer(Reader(Objects(url)), json.dumps(two.config), agent=two.near.agent_socket))
    follower = two.start(Follower(Reader(Objects(url)), "far", agent=two.far.agent_socket, coordinator=two.far.grpc, poll_seconds=0.05))
    for lineage, versions in ((1, (1, 2, 5)), (2, (3, 4))):
        trainer = Trainer(two.near.agent_socket, two.config, "hf", [tensors])
        try:
            for version in versions:
                trainer.fill([tensors])
                trainer.publish(version, lineage=lineage)
                two.engine.wait_version(version, 60)
                assert all(np.array_equal(two.engine.ranks[0].params[name].view(bits.dtype), bits) for name, (_, bits) in tensors.items())
                until("it is known", lambda: value(follower.figures, "version") == version)
                tensors = stepped(tensors, version)
        finally:
            trainer.close()
    assert Reader(Objects(url)).latest().order == (2, 4)
    assert value(writer.figures, "failures_total", "not_newer") == 0


def test_a_rollback_is_not_stored_and_is_counted_and_the_next_version_is(two, tmp_path):
    from conftest import Trainer
    from store_sites import stepped, weights
    url, tensors = f"file://{tmp_path}/store", weights()
    writer = two.start(Writer(Reader(Objects(url)), json.dumps(two.config), agent=two.near.agent_socket))
    two.start(Follower(Reader(Objects(url)), "far", agent=two.far.agent_socket, coordinator=two.far.grpc, poll_seconds=0.05))
    trainer = Trainer(two.near.agent_socket, two.config, "hf", [tensors])
    try:
        for version in (1, 2):
            trainer.fill([tensors])
            trainer.publish(version)
            two.engine.wait_version(version, 60)
            tensors = stepped(tensors, version)
        with Client(two.near.grpc) as client:
            client.wait_version(2, timeout=30)
            client.wait_epoch(client.rollback(1), timeout=30)
        until("it is counted", lambda: value(writer.figures, "failures_total", "not_newer") == 1)
        assert Reader(Objects(url)).latest().manifest.version == 2 and two.engine.ranks[0].serving.version == 2
        trainer.fill([tensors])
        trainer.publish(3)
        two.engine.wait_version(3, 60)
        assert all(np.array_equal(two.engine.ranks[0].params[name].view(bits.dtype), bits) for name, (_, bits) in tensors.items())
    finally:
        trainer.close()
