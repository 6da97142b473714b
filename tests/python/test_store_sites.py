"""Two sites and a store between them, all of them real processes: what a trainer publishes in one is what engines serve in the other."""

from __future__ import annotations

import json

import numpy as np
import pytest

import store_reader
from content_oracle import root
from store_sites import Site, holds, stepped, weights

pytestmark = pytest.mark.usefixtures("store_environment")


@pytest.fixture
def sites(tmp_path):
    made = [Site(tmp_path, "alpha"), Site(tmp_path, "beta")]
    yield made
    for site in made:
        site.close()


def test_five_versions_are_the_trainers_bytes_in_the_other_site(sites, tmp_path):
    alpha, beta = sites
    url = f"file://{tmp_path}/store"
    tensors = weights()
    alpha.add_trainer(tensors)
    near = alpha.add_engine("near")
    writer = alpha.writer(url, "--coordinator", alpha.daemon.grpc)
    far = [beta.add_engine("far-a"), beta.add_engine("far-b")]
    follower = beta.follower(url)
    for version in range(1, 6):
        alpha.publish(version, tensors)
        near.wait_version(version)
        for engine in far:
            engine.wait_version(version, timeout=60)
            assert holds(engine, tensors), version
        writer.wait_line(f"version {version}:", "anchor" if version == 1 else "delta")
        assert alpha.root() == beta.root() == root(tensors)
        stored = {name: data for name, (_, _, data) in store_reader.read(tmp_path / "store")[0].items()}
        assert stored == {name: bits.tobytes() for name, (_, bits) in tensors.items()}
        tensors = stepped(tensors, version)
    assert follower.stop() == 0 and writer.stop() == 0


def test_an_engine_that_comes_late_is_filled_by_its_neighbours(sites, tmp_path):
    alpha, beta = sites
    url, tensors = f"file://{tmp_path}/store", weights()
    alpha.add_trainer(tensors)
    alpha.writer(url)
    far = beta.add_engine("far-a")
    follower = beta.follower(url)
    alpha.publish(1, tensors)
    far.wait_version(1, timeout=60)
    follower.wait_line("version 1:")
    assert follower.stop() == 0
    late = beta.add_engine("far-b")
    late.wait_version(1)
    assert holds(late, tensors)


@pytest.mark.parametrize("layout", ["hf", "fsdp:dp2"])
def test_a_layout_of_several_ranks_is_stored_without_a_gather(sites, tmp_path, layout):
    alpha, beta = sites
    url, tensors = f"file://{tmp_path}/store", weights()
    alpha.add_trainer(tensors)
    writer = alpha.writer(url, "--layout", layout, "--part-size", "64KiB")
    far = beta.add_engine("far")
    beta.follower(url)
    for version in (1, 2):
        alpha.publish(version, tensors)
        far.wait_version(version, timeout=60)
        assert holds(far, tensors)
        writer.wait_line(f"version {version}:")
        ranks = store_reader.read(tmp_path / "store")
        assert len(ranks) == (1 if layout == "hf" else 2)
        assert sum(len(data) for rank in ranks for _, _, data in rank.values()) >= sum(bits.nbytes for _, bits in tensors.values())
        tensors = stepped(tensors, version)


def test_kills_of_writer_and_follower_never_lead_to_a_wrong_version(sites, tmp_path):
    alpha, beta = sites
    url, tensors, random = f"file://{tmp_path}/store", weights(), np.random.default_rng(4)
    alpha.add_trainer(tensors)
    alpha.add_engine("near")  # fills the writer that comes after a kill
    far = beta.add_engine("far")
    published, version = {}, 0
    for _ in range(3):
        writer, follower = alpha.writer(url, "--part-size", "16KiB", "--anchor-every", "2"), beta.follower(url)
        writer.wait_line("engine store:")
        follower.wait_line("site beta follows")
        for _ in range(2):
            version += 1
            published[version] = tensors
            alpha.publish(version, tensors)
            tensors = stepped(tensors, version)
        with far.flipped:  # both are in the middle of something
            far.flipped.wait(float(random.uniform(0, 0.5)))
        writer.kill()
        follower.kill()
        if far.ranks[0].serving is not None:
            assert holds(far, published[far.ranks[0].serving.version])
        if (tmp_path / "store/latest.json").exists():
            newest = json.loads((tmp_path / "store/latest.json").read_text())["manifest"]["version"]
            stored = {name: data for name, (_, _, data) in store_reader.read(tmp_path / "store")[0].items()}
            assert stored == {name: bits.tobytes() for name, (_, bits) in published[newest].items()}
    alpha.writer(url)
    beta.follower(url)
    far.wait_version(version, timeout=60)
    assert holds(far, published[version])
    assert alpha.root() == beta.root() == root(published[version])
