"""bench checkpoint: a rank that ends is named with what it did, rows before it stay, and what does not fit is not begun. With ranks
that load nothing: the benchmark itself needs torch."""

import importlib.util
import sys

import pytest

from conftest import ROOT

# Not by its folder: the benchmarks have modules that are called as some of the tests'.
_SPEC = importlib.util.spec_from_file_location("bench_checkpoint", ROOT / "bench/checkpoint.py")
checkpoint = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(checkpoint)

#: Answers as a rank does; rank 2 ends as it is told when it is to load in the way that the variable names.
RANK = """
import json, os, signal, sys
kinds, folder, rank, world_size, port = sys.argv[2:]
print("ready", flush=True)
for line in sys.stdin:
    what, _, kind = line.strip().partition(" ")
    if rank == "2" and kind == os.environ.get("ENDS_IN"):
        code = int(os.environ["ENDS_WITH"])
        os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
    print(json.dumps({"load": [0.001, 0], "digest": {"w": kinds}, "clear": None}[what]), flush=True)
"""


class Rows(list):
    """What the benchmark reports to."""

    def add(self, name: str, nbytes: int, seconds: list, checked: bool) -> dict:
        assert checked and nbytes == 1000 and len(seconds) == 2
        self.append(name)
        return {}


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").write_bytes(bytes(1000))
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    ranks = checkpoint.Ranks
    monkeypatch.setattr(checkpoint, "Ranks", lambda *arguments: ranks(*arguments, program=(sys.executable, str(script))))

    def go(kinds, world_size=4):
        rows = Rows()
        checkpoint.rows(rows, tmp_path, world_size, 2, kinds, lambda: go.written.append(list(rows)))
        return rows
    go.written = []
    return go


def test_one_process_a_rank_does_all_kinds_and_rows_are_written_as_they_come(run):
    names = run(["whole", "torch-dcp", "weightwire"])
    assert [len(rows) for rows in run.written] == [1, 2, 3, 4, 5, 6]
    assert names == run.written[-1] == ["whole-4", "torch-dcp-4", "weightwire-4", "whole-4-cold", "torch-dcp-4-cold", "weightwire-4-cold"]


@pytest.mark.parametrize("code,said", [(-9, "was killed by signal 9"), (-15, "was killed by signal 15"), (7, "ended with 7")])
def test_a_rank_that_ends_is_named_with_what_it_did(run, monkeypatch, code, said):
    monkeypatch.setenv("ENDS_IN", "torch-dcp")
    monkeypatch.setenv("ENDS_WITH", str(code))
    with pytest.raises(checkpoint.RankEnded, match=f"^rank 2 of 4 {said} in load torch-dcp$"):
        run(["whole", "torch-dcp"])
    assert not run.written  # the rows of other numbers of ranks are


def test_one_that_the_kernel_killed_for_memory_is_said_to_be(run, monkeypatch):
    monkeypatch.setenv("ENDS_IN", "whole")
    monkeypatch.setenv("ENDS_WITH", "-9")
    counts = iter([5, 6])
    monkeypatch.setattr(checkpoint, "killed_for_memory", lambda: next(counts))
    with pytest.raises(checkpoint.RankEnded, match="rank 2 of 4 was killed: out of memory in load whole"):
        run(["whole"])


@pytest.mark.parametrize("free_gb,left", [(20, ["whole", "whole-memory", "torch-dcp", "weightwire"]), (8, ["whole", "torch-dcp", "weightwire"]),
                                          (4.5, ["whole", "weightwire"]), (3, [])])
def test_what_does_not_fit_is_said_and_left_out(monkeypatch, capsys, free_gb, left):
    monkeypatch.setattr(checkpoint, "memory_free", lambda: int(free_gb * 1e9))
    assert checkpoint.that_fit(["whole", "whole-memory", "torch-dcp", "weightwire"], 8, 988_000_000) == left
    said = capsys.readouterr().out
    assert ("whole-memory-8: not run, 12.9 GB are needed" in said) == ("whole-memory" not in left)
    assert ("8 ranks: not run" in said) == (not left)
