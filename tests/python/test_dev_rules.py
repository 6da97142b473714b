"""What `./dev` makes of a test that fails: a copy of it in a tree of its own, on small suites whose tests fail as planted."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from conftest import ROOT

FAILS, PASSES = "exit 1", "exit 0"
SECOND_TIME = 'test -e "$0" || { touch "$0"; exit 1; }'  # $0: a file of the test's own


class Tree:
    """A clone that holds `dev` and planted suites."""

    def __init__(self, directory: pathlib.Path):
        self.directory, self.retried = directory, directory / "retried"
        shutil.copy(ROOT / "dev", directory / "dev")

    def suite(self, preset: str, **tests: str) -> None:
        """A built tree as ctest sees it: name -> shell command."""
        build = self.directory / "build" / preset
        build.mkdir(parents=True)
        (build / "CTestTestfile.cmake").write_text("".join(
            f"add_test({name} sh -c [=[{command}]=] {self.directory}/{preset}-{name})\n" for name, command in tests.items()))

    def pytests(self, **tests: str) -> None:
        folder = self.directory / "tests/python"
        folder.mkdir(parents=True)
        (folder / "test_planted.py").write_text("import subprocess\n" + "".join(
            f"def test_{name}():\n    assert subprocess.run(['sh', '-c', {command!r}, '{self.directory}/{name}']).returncode == 0\n"
            for name, command in tests.items()))
        (self.directory / ".venv/bin").mkdir(parents=True)
        (self.directory / ".venv/bin/python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (self.directory / ".venv/bin/python").chmod(0o755)

    def run(self, script: str, may_retry: bool = True) -> tuple[int, str]:
        """Exit code, and all that was said, of dev's functions."""
        env = {**os.environ, "WEIGHTWIRE_JOBS": "2", "WEIGHTWIRE_RETRIED": str(self.retried) if may_retry else ""}
        done = subprocess.run(["bash", "-c", f"source {self.directory}/dev; {script}"], env=env, text=True, timeout=120,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        return done.returncode, done.stdout


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


@pytest.mark.parametrize("preset", ["dev", "tsan", "fuzz"])
def test_under_sanitizers_nothing_runs_twice(tree, preset):
    tree.suite(preset, a=PASSES, racy=SECOND_TIME)
    code, said = tree.run(f"ctest_run {preset}")
    assert code != 0 and "RETRIED" not in said and not tree.retried.exists(), said
    assert tree.run(f"ctest_run {preset}")[0] == 0  # it was the kind that passes when it is asked again


def test_what_passed_the_second_time_is_named_and_counted(tree):
    tree.suite("release", a=PASSES, loaded=SECOND_TIME)
    code, said = tree.run("ctest_run release")
    assert code == 0 and "RETRIED 1: loaded" in said, said
    tree.pytests(b=PASSES, slow=SECOND_TIME)
    code, said = tree.run("run_pytest")
    assert code == 0 and "RETRIED 2: loaded tests/python/test_planted.py::test_slow" in said, said


def test_more_than_two_are_red(tree):
    tree.suite("release", a=SECOND_TIME, b=SECOND_TIME, c=SECOND_TIME)
    code, said = tree.run("ctest_run release")
    assert code != 0 and "more than 2 would have run twice: a b c" in said, said


def test_more_than_two_of_all_parts_together_are_red(tree):
    tree.suite("release", a=SECOND_TIME, b=SECOND_TIME)
    assert tree.run("ctest_run release")[0] == 0
    tree.pytests(slow=SECOND_TIME)
    code, said = tree.run("run_pytest")
    assert code != 0 and "a b tests/python/test_planted.py::test_slow" in said, said
    code, said = tree.run(f"once_more demo sh -c '{SECOND_TIME}' {tree.directory}/demo")
    assert code != 0 and "a b demo" in said, said


def test_a_command_runs_a_second_time_under_its_name(tree):
    code, said = tree.run(f"once_more demo sh -c '{SECOND_TIME}' {tree.directory}/demo")
    assert code == 0 and "RETRIED 1: demo" in said, said


def test_what_fails_twice_is_red(tree):
    tree.suite("release", broken=FAILS)
    tree.pytests(broken=FAILS)
    for script in ("ctest_run release", "run_pytest", f"once_more demo sh -c '{FAILS}'"):
        code, said = tree.run(script)
        assert code != 0 and "again, alone" in said and "RETRIED" not in said, said
    assert not tree.retried.exists()


def test_a_suite_that_cannot_even_be_collected_is_red_at_once(tree):
    tree.pytests(a=PASSES)
    (tree.directory / "tests/python/test_torn.py").write_text("import nothing_of_that_name\n")
    code, said = tree.run("run_pytest")
    assert code != 0 and "again, alone" not in said, said


def plant(tree, body: str) -> None:
    """`./dev` of the tree is the command `body`."""
    (tree.directory / "dev.real").write_text((tree.directory / "dev").read_text())
    (tree.directory / "dev").write_text(f"#!/bin/bash\n{body}\n")
    (tree.directory / "dev").chmod(0o755)


def in_time(tree, seconds: int) -> tuple[int, str]:
    done = subprocess.run(["bash", "-c", f"source {tree.directory}/dev.real; cd {tree.directory}; "
                           f"export WEIGHTWIRE_UNTIL=$(($(date +%s) + {seconds})); in_time sanitized planted"],
                          text=True, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return done.returncode, done.stdout


def test_what_the_time_cuts_off_is_named_and_ends_with_all_its_children(tree):
    plant(tree, f'sh -c "sleep 50; echo survived >{tree.directory}/survived" >/dev/null 2>&1 & wait')
    code, said = in_time(tree, 2)
    assert code == 0 and "NOT RUN, or not to its end, for time: sanitized planted" in said, said
    assert subprocess.run(["pgrep", "-f", f"{tree.directory}/survived"], stdout=subprocess.DEVNULL).returncode == 1


def test_what_has_no_time_left_does_not_begin(tree):
    plant(tree, f"touch {tree.directory}/began")
    code, said = in_time(tree, -5)
    assert code == 0 and "NOT RUN" in said and not (tree.directory / "began").exists(), said


def test_what_fails_before_the_time_is_over_is_red(tree):
    plant(tree, "exit 8")
    code, said = in_time(tree, 30)
    assert code == 8 and "NOT RUN" not in said, said


def test_sanitizers_stop_at_their_first_failure(tree):
    tree.suite("tsan", a=FAILS, b=f"sleep 0; touch {tree.directory}/b-ran; exit 0")
    code, said = tree.run("JOBS=1; ctest_run tsan")
    assert code != 0 and not (tree.directory / "b-ran").exists(), said


def test_people_get_no_second_run(tree):
    tree.suite("release", loaded=SECOND_TIME)
    code, said = tree.run("ctest_run release", may_retry=False)
    assert code != 0 and "again" not in said, said


def test_ci_counts_over_all_its_parts_and_the_cut_rows_never_run_twice():
    script = (ROOT / ".ci/run").read_text()
    assert "export WEIGHTWIRE_RETRIED" in script and "||" not in script
    assert "WEIGHTWIRE_RETRIED= ./dev test cut" in script


def test_long_suites_are_listed_in_one_file_with_their_results(tree):
    """Also when one fails, and where a preset's part did not run."""
    tree.suite("release", long_a=PASSES, long_b=FAILS)
    build = tree.directory / "build/release/CTestTestfile.cmake"
    build.write_text(build.read_text() + "set_tests_properties(long_a long_b PROPERTIES LABELS long)\n")
    (tree.directory / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/results.py", tree.directory / ".ci")
    code, said = tree.run("need() { :; }; build() { :; }; test_all long")
    assert code != 0, said
    rows = [line for line in (tree.directory / "build/test-long.md").read_text().splitlines() if line.startswith("| long")]
    assert [row.split(" | ")[:2] for row in rows] == [["| long_a", "passed"], ["| long_b", "FAILED"]], rows
    assert all(len(row.rstrip(" |").rsplit("| ", 1)[1]) == len("2026-11-27") for row in rows), rows
