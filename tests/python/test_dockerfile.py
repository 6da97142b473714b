"""What the Dockerfile says that can be told without building it; `image_build.py` builds it."""

import re
import subprocess

import pytest

from conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text()


def stages() -> dict[str, str]:
    """The lines of each stage, by its name; "" are those before the first one."""
    parts = re.split(r"^FROM \S+ AS (\w+)\n", TEXT, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def test_the_base_is_named_by_its_digest():
    bases = {line.split()[1] for line in TEXT.splitlines() if line.startswith("FROM ")} - stages().keys()
    assert bases == {"${BASE}", "${CUDA}"}, "a base of another name"
    assert re.search(r"^ARG BASE=debian:bookworm-\d{8}-slim@sha256:[0-9a-f]{64}$", stages()[""], re.M)


def test_the_image_says_of_what_source_it_is():
    """The build is told, before it compiles and where the labels are."""
    compiled, labelled = stages()["build"], stages()["common"]
    assert compiled.index("ARG WEIGHTWIRE_REVISION=\n") < compiled.index("cmake --preset release")
    for name, argument in (("source", "WEIGHTWIRE_SOURCE"), ("revision", "WEIGHTWIRE_REVISION")):
        label = f'org.opencontainers.image.{name}="${argument}"'
        assert labelled.index(f"ARG {argument}=\n") < labelled.index(label)


def test_the_version_is_said_once_and_is_that_of_every_part():
    """A stage sees an argument from before the first one only where it names it."""
    (version,) = re.findall(r"^project\(weightwire VERSION (\S+) ", (ROOT / "CMakeLists.txt").read_text(), re.M)
    told = [line for line in TEXT.splitlines() if version in line and not line.startswith("#")]
    assert told == [f"ARG WEIGHTWIRE_VERSION={version}"] and told[0] in stages()[""]
    used = {name for name, text in stages().items() if "$WEIGHTWIRE_VERSION" in text}
    assert used == {"common", "cpu", "production"}
    for name in used:
        assert stages()[name].index("ARG WEIGHTWIRE_VERSION\n") < stages()[name].index("$WEIGHTWIRE_VERSION"), name
    assert f'\nversion = "{version}"\n' in (ROOT / "client/python/pyproject.toml").read_text()
    chart = (ROOT / "helm/weightwire/Chart.yaml").read_text()
    assert f"\nversion: {version}\nappVersion: {version}\n" in chart


@pytest.mark.parametrize("repository, told, given, revision", [
    (False, "abc", "", "abc"), (False, "", "", "unknown"), (False, "abc", "def", "def"), (True, "abc", "", "its own"), (True, "", "def", "def")])
def test_a_build_knows_its_revision(tmp_path, repository, told, given, revision):
    """GIVEN is CMake's option; an image's build has no repository and is told by the environment."""
    def git(*words):
        return subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", tmp_path, *words], check=True, capture_output=True, text=True).stdout.strip()
    if repository:
        git("init", "-q")
        git("commit", "-q", "--allow-empty", "-m", "first")
        revision = git("rev-parse", "--short=12", "HEAD") if revision == "its own" else revision
    (tmp_path / "in").write_text("@REVISION@")
    environment = {"PATH": "/usr/bin:/bin", "WEIGHTWIRE_REVISION": told, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["cmake", f"-DSOURCE={tmp_path}", f"-DTEMPLATE={tmp_path}/in", f"-DOUTPUT={tmp_path}/out", f"-DGIVEN={given}", "-P",
                    ROOT / "cmake/revision.cmake"], check=True, env=environment, timeout=60)
    assert (tmp_path / "out").read_text().strip() == revision
