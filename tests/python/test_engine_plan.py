""".ci/engine.py: what it chooses, and what it makes of suites that pass, fail, come right or outlive the time."""

import importlib.util
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / ".ci/engine.py"
spec = importlib.util.spec_from_file_location("ci_engine", SCRIPT)
plan = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan)


def test_what_proves_most_comes_first_and_each_other_suite_has_its_turn():
    costs = {**{f"x.{i}": float(i) for i in range(8)}, plan.FIRST[1]: 400.0, plan.FIRST[0]: 500.0}
    orders = [plan.order(costs, f"commit {turn}") for turn in range(64)]
    assert all(one[:2] == list(plan.FIRST[:2]) and sorted(one) == sorted(costs) for one in orders)
    assert {one[2] for one in orders} == {one[-1] for one in orders} == {f"x.{i}" for i in range(8)}
    assert plan.order(costs, "commit 1") == orders[1]


def test_the_first_that_could_run_twice_is_chosen():
    costs = {"a": 100.0, "b": 30.0, "c": 10.0}
    assert plan.choose(["a", "b", "c"], costs, 200.0) == "a"
    assert plan.choose(["a", "b", "c"], costs, 199.0) == "b"
    assert plan.choose(["a", "b", "c"], costs, 19.0) is None
    assert plan.choose([], costs, 9.0) is None


def tree(path: pathlib.Path, **suites: tuple[int, str]) -> pathlib.Path:
    """A build tree as far as ctest reads one: name -> (COST, shell command)."""
    (path / "CTestTestfile.cmake").write_text("".join(
        f'add_test({name} "/bin/sh" "-c" "{command}")\n'
        f'set_tests_properties({name} PROPERTIES LABELS engine COST {cost} TIMEOUT 60)\n'
        for name, (cost, command) in suites.items()) + 'add_test(other "/bin/false")\n')
    return path


def run(build: pathlib.Path, seconds: float) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, SCRIPT, "--build", build, "--seconds", str(seconds)], stdout=subprocess.PIPE,
                          text=True, timeout=120)
    return done.returncode, done.stdout.partition("suites with real engines and trainers:\n")[2].splitlines()


def test_what_does_not_fit_is_named_and_fails_nothing(tmp_path):
    code, lines = run(tree(tmp_path, long=(1000, "exit 1"), short=(1, "exit 0")), 100)
    assert code == 0
    assert [line.split(",")[0] for line in lines] == ["passed: short", "NOT RUN: long"]
    assert "would need up to 2000 s" in lines[1]


def test_a_suite_that_fails_twice_fails_all_and_the_others_still_run(tmp_path):
    code, lines = run(tree(tmp_path, bad=(1, "exit 1"), good=(2, "exit 0")), 100)
    assert code == 1
    assert sorted(line.split(",")[0] for line in lines) == ["FAILED: bad", "passed: good"]


def test_a_suite_that_passes_the_second_time_is_called_flaky(tmp_path):
    code, lines = run(tree(tmp_path, once=(1, f"mkdir {tmp_path}/seen && exit 1 || exit 0")), 100)
    assert code == 0
    assert lines[0].startswith("FLAKY: once") and len(lines) == 1


def test_the_second_run_may_outlive_the_time(tmp_path):
    script = f"mkdir {tmp_path}/seen 2>/dev/null && sleep 3 && exit 1 || sleep 3"
    code, lines = run(tree(tmp_path, once=(3, script)), 6.5)
    assert code == 0 and lines[0].startswith("FLAKY: once")


def test_what_the_end_of_the_time_cuts_off_was_not_run(tmp_path):
    code, lines = run(tree(tmp_path, slow=(3, "sleep 50")), 7)
    assert code == 0 and lines[0].startswith("NOT RUN: slow, cut off after")


def test_without_its_cost_a_suite_is_refused(tmp_path):
    (tmp_path / "CTestTestfile.cmake").write_text(
        'add_test(free "/bin/true")\nset_tests_properties(free PROPERTIES LABELS engine)\n')
    done = subprocess.run([sys.executable, SCRIPT, "--build", tmp_path, "--list"], stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "free has no COST" in done.stderr


def test_the_list_names_every_suite_and_runs_none(tmp_path):
    build = tree(tmp_path, b=(7, f"touch {tmp_path}/ran"), a=(9, "exit 1"))
    shown = subprocess.run([sys.executable, SCRIPT, "--build", build, "--list"], stdout=subprocess.PIPE, text=True,
                           check=True).stdout
    *suites, total = [line.split() for line in shown.splitlines()]
    assert sorted(suites) == [["7", "s", "b"], ["9", "s", "a"]] and total == ["16", "s", "all"]
    assert not (tmp_path / "ran").exists()
