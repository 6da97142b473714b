"""Ranks that save their own parts at once make one checkpoint, or none."""

import errno
import json
import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import BINARIES, DATA, read_safetensors
from weightwire import DeadlineError, checkpoint
from weightwire.checkpoint import sharded
from weightwire.checkpoint.attempts import Attempt

HF, DUMP = DATA / "megatron/qwen2/hf", DATA / "megatron/qwen2/mcore-tp2pp2"
CONFIG = (HF / "config.json").read_text()
SPEC = f"megatron:tp2,pp2,vocab_pad={json.loads((DUMP / 'layout.json').read_text())['padded_vocab']}"
RANKS = [{name: bits for name, (_, bits) in read_safetensors(path).items()} for path in sorted(DUMP.glob("rank*.safetensors"))]


@pytest.fixture(autouse=True)
def binaries(monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def save(rank: int, folder, attempt: str = "one", **options) -> None:
    checkpoint.save_rank(folder, SPEC, rank, 4, RANKS[rank], config=CONFIG, attempt=attempt, timeout=options.pop("timeout", 30),
                         **options)


def save_all(folder, **options) -> None:
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(save, rank, folder, **options) for rank in range(4)]:
            done.result()


def same_model(folder, tmp_path) -> None:
    checkpoint.convert(folder, tmp_path / "hf", "hf", verify=True)
    got, want = (read_safetensors(path / "model.safetensors") for path in (tmp_path / "hf", HF))
    assert got.keys() == want.keys() and all(np.array_equal(got[name][1], want[name][1]) for name in want)


def test_ranks_of_a_real_megatron_job_save_one_checkpoint_that_any_layout_loads(tmp_path):
    save_all(tmp_path / "run/step_1")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step_1"]
    assert checkpoint.check(tmp_path / "run/step_1").spec == SPEC
    same_model(tmp_path / "run/step_1", tmp_path)
    want = read_safetensors(DATA / "megatron/qwen2/mcore-tp4/rank02.safetensors")
    into = {name: np.zeros_like(bits) for name, (_, bits) in want.items()}
    padded = json.loads((DATA / "megatron/qwen2/mcore-tp4/layout.json").read_text())["padded_vocab"]
    checkpoint.load(tmp_path / "run/step_1", f"megatron:tp4,vocab_pad={padded}", 2, into)
    assert all(np.array_equal(into[name], bits) for name, (_, bits) in want.items()
               if "word_embeddings" not in name and "output_layer" not in name)


def test_what_a_later_save_takes_is_what_the_tensors_held_when_it_was_asked_for(tmp_path):
    live = [{name: bits.copy() for name, bits in rank.items()} for rank in RANKS]
    futures = []
    for rank, tensors in reversed(list(enumerate(live))):
        futures.append(checkpoint.save_rank_later(tmp_path / "step_1", SPEC, rank, 4, tensors, config=CONFIG, attempt="one",
                                                  timeout=30))
        for array in tensors.values():
            array.fill(9)
    for future in futures:
        future.result(60)
    same_model(tmp_path / "step_1", tmp_path)


def test_a_part_that_rank_0_takes_at_once_is_a_part(tmp_path, monkeypatch):
    """Between a part's rename and its sync, its folder may have got the checkpoint's name."""
    one, rename = Attempt(tmp_path / "step_1", "one", 1, 0.0), os.rename
    one.partial.mkdir()

    def taken(old, new):
        rename(old, new)
        if str(new).endswith("rank00001.json"):
            rename(one.partial, one.final)
    monkeypatch.setattr(os, "rename", taken)
    one.put(one.partial / "rank00001.json", "{}")
    assert [path.name for path in one.final.iterdir()] == ["rank00001.json"] and not one.partial.exists()


def test_a_rank_that_never_comes_is_named_and_leaves_the_previous_checkpoint(tmp_path):
    save_all(tmp_path / "step_1")
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, rank, tmp_path / "step_2", timeout=3) for rank in (0, 1, 3)]
    with pytest.raises(DeadlineError, match="parts are missing 2"):
        saves[0].result()
    assert saves[1].result() is None and saves[2].result() is None
    assert not (tmp_path / "step_2").exists()
    checkpoint.check(tmp_path / "step_1")
    with pytest.raises(DeadlineError, match="rank 0 did not begin attempt 'two'"):
        save(1, tmp_path / "step_2", attempt="two", timeout=0.2)
    with pytest.raises(checkpoint.CheckpointError, match="attempt 'one'.*was made before"):
        save(0, tmp_path / "step_2")
    save_all(tmp_path / "step_2", attempt="three")
    checkpoint.check(tmp_path / "step_2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2"]


def _killed(rank: int, folder: str, module: str, name: str) -> None:
    """Saves a rank and dies where `module.name` is called."""
    import os
    target = {"disk": sharded.disk, "native": sharded.native, "os": os, "sharded": sharded}[module]
    setattr(target, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    save(rank, folder, keep_last=1)


@pytest.mark.parametrize("rank,module,name", [(2, "native", "describe"), (2, "os", "rename"), (0, "native", "manifest_of"),
                                              (0, "disk", "sync_tree"), (0, "os", "fsync")])
def test_a_rank_killed_at_any_step_leaves_no_checkpoint(tmp_path, rank, module, name):
    child = multiprocessing.get_context("spawn").Process(target=_killed, args=(rank, str(tmp_path / "step_1"), module, name))
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, other, tmp_path / "step_1", timeout=20 if rank == 0 else 5) for other in range(4) if other != rank]
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        if rank != 0:
            with pytest.raises(DeadlineError, match=f"missing {rank}"):
                saves[0].result()
    assert not (tmp_path / "step_1").exists()


@pytest.mark.parametrize("rank,module,name,written", [
    (2, "native", "open_files", False), (2, "os", "rename", False), (2, "disk", "sync_folder", True), (0, "os", "fsync", False),
    (0, "disk", "sync_tree", True), (0, "sharded", "prune", True)])
def test_a_rank_killed_at_any_step_and_started_again_goes_on(tmp_path, monkeypatch, rank, module, name, written):
    """The others are not asked again. What was whole is not written again."""
    child = multiprocessing.get_context("spawn").Process(target=_killed, args=(rank, str(tmp_path / "step_1"), module, name))
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, other, tmp_path / "step_1", timeout=60) for other in range(4) if other != rank]
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
        parts = []
        write = sharded._write_part
        monkeypatch.setattr(sharded, "_write_part", lambda *args: parts.append(args[2]) or write(*args))
        save(rank, tmp_path / "step_1", resume=True)
        assert parts.count(rank) == (0 if written else 1)  # the others are threads here and may still be writing
        for other in saves:
            other.result()
    assert [path.name for path in tmp_path.iterdir()] == ["step_1"]
    checkpoint.check(tmp_path / "step_1")
    save(rank, tmp_path / "step_1", resume=True)  # killed after the end: there is nothing to do
    same_model(tmp_path / "step_1", tmp_path)


def test_a_disk_that_fills_up_under_a_rank_leaves_no_checkpoint_and_the_save_goes_on_when_there_is_room(tmp_path, monkeypatch):
    save_all(tmp_path / "step_1")
    room, write, full = [20_000], os.pwrite, threading.Event()

    def pwrite(fd, data, offset):
        """As a disk with so much room: the last write is cut short, the next one fails."""
        if not os.readlink(f"/proc/self/fd/{fd}").endswith("rank00002-00000.safetensors"):
            return write(fd, data, offset)
        if not room[0]:
            full.set()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(fd, data[:room[0]], offset)
        room[0] -= done
        return done
    monkeypatch.setattr(os, "pwrite", pwrite)
    with ThreadPoolExecutor(4) as pool:
        saves = [pool.submit(save, rank, tmp_path / "step_2", timeout=60) for rank in range(4)]
        with pytest.raises(OSError, match="No space left"):
            saves[2].result()
        assert full.is_set() and not (tmp_path / "step_2").exists()
        checkpoint.check(tmp_path / "step_1")
        room[0] = 1 << 30
        save(2, tmp_path / "step_2", resume=True)
        saves[0].result()
    same_model(tmp_path / "step_2", tmp_path)


@pytest.mark.parametrize("complete", [False, True])
def test_a_rank_that_comes_back_with_other_values_cannot_resume(tmp_path, monkeypatch, complete):
    if complete:
        save_all(tmp_path / "step_1")
    else:
        with ThreadPoolExecutor(2) as pool, pytest.raises(DeadlineError, match="missing 1, 2"):
            for done in [pool.submit(save, rank, tmp_path / "step_1", timeout=3) for rank in (0, 3)]:
                done.result()
    changed = {name: bits.copy() for name, bits in RANKS[3].items()}
    last = sorted(changed)[-1]
    changed[last].reshape(-1)[-1] ^= 1
    for values in (changed, {n: b for n, b in changed.items() if n != last}):
        with pytest.raises(checkpoint.CheckpointError, match=f"other values.*rank 3.*tensor {last}"):
            checkpoint.save_rank(tmp_path / "step_1", SPEC, 3, 4, values, config=CONFIG, attempt="one", resume=True)
    if complete:  # rank 0 gives the attempt its name while this rank looks
        partial, read = tmp_path / ".step_1.one.partial", sharded.read_json
        os.rename(tmp_path / "step_1", partial)

        def renamed(path):
            os.rename(partial, tmp_path / "step_1")
            return read(path)
        monkeypatch.setattr(sharded, "read_json", renamed)
        save(3, tmp_path / "step_1", resume=True)
    else:  # the ranks that were missing come, and rank 0 again
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(save, rank, tmp_path / "step_1", resume=True) for rank in range(4)]:
                done.result()
    same_model(tmp_path / "step_1", tmp_path)


def test_only_the_last_ones_are_kept(tmp_path):
    (tmp_path / "step_notes").mkdir()
    (tmp_path / "step_3").mkdir()  # no checkpoint: not ours to remove
    for step in (8, 9, 10, 11):
        save_all(tmp_path / f"step_{step}", keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_11", "step_3", "step_notes"]


@pytest.mark.parametrize("attempt", ["../x", "", "a/b", ".x"])
def test_an_attempt_is_a_name(tmp_path, attempt):
    with pytest.raises(checkpoint.CheckpointError, match="no plain file name"):
        save(0, tmp_path / "step_1", attempt=attempt)


def test_a_rank_of_another_layout_and_an_unknown_dtype_are_refused(tmp_path):
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(checkpoint.save_rank, tmp_path / "s", spec, rank, 2, RANKS[rank], config=CONFIG, attempt="one",
                             timeout=20) for rank, spec in ((0, "megatron:tp2"), (1, "megatron:pp2"))]
    with pytest.raises(checkpoint.CheckpointError, match="another layout.*rank 1"):
        saves[0].result()
    with pytest.raises(checkpoint.CheckpointError, match="complex64 is not known.*tensor x"):
        checkpoint.save_rank(tmp_path / "t", "hf", 0, 1, {"x": np.zeros(2, np.complex64)}, config=CONFIG, attempt="one")
    assert not (tmp_path / "s").exists() and not (tmp_path / "t").exists()
