"""Ranks that save together what changed since a base: every version is what NumPy says it was, whoever dies and whatever is removed."""

# ruff: noqa: F811 (a fixture that is imported is an argument, too)
import os
import pathlib
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from conftest import read_safetensors
from test_checkpoint_state import binaries, tmp_path  # noqa: F401 (fixtures)
from test_checkpoint_wwctl import wwctl
import trainer_ranks
from trainer_ranks import CONFIG, MAKERS, WEIGHTS, layout_of, on_all, ranks, same, save_all, shard, states
from weightwire import DeadlineError, boxes, checkpoint
from weightwire.checkpoint import Explicit, attempts, native, native_delta
from weightwire.memory import TensorMeta

#: dtype, shape; of bf16 and fp16 the bits. "tied" are two names of one array; "long" has more than one piece of a digest.
SHAPES = {"odd": ("BF16", (7, 131, 13)), "wide": ("BF16", (3, 400_001)), "half": ("F16", (257, 33)), "fp32": ("F32", (91, 1013)),
          "bytes": ("U8", (100_003,)), "one": ("BF16", (1,)), "tied": ("BF16", (129, 65)), "long": ("U8", (1009, 16_849))}


def versions(count: int, names=tuple(SHAPES)) -> list[dict]:
    """What steps of training leave in whole tensors: a few elements by a bit, all of `bytes`, nothing of `half`."""
    random = np.random.default_rng(count)
    makers = {"BF16": lambda values: (values.view(np.uint32) >> 16).astype(np.uint16), "F16": lambda values: values.astype(np.float16),
              "F32": lambda values: values, "U8": lambda values: values.view(np.uint32).astype(np.uint8)}
    made = [{name: makers[SHAPES[name][0]](random.standard_normal(SHAPES[name][1], np.float32)) for name in names}]
    for _ in range(1, count):
        now = {name: bits.copy() for name, bits in made[-1].items()}
        for name, bits in now.items():
            if name == "bytes":
                bits[:] = random.integers(0, 256, bits.shape, np.uint8)
            elif name != "half":
                flat = bits.reshape(-1).view(f"u{bits.itemsize}")
                flat[random.random(flat.shape, np.float32) < 0.02] += flat.dtype.type(1)
        made.append(now)
    for tensors in made:
        if "tied" in tensors:
            tensors["tied.again"] = tensors["tied"]
    return made


def meta(name: str) -> TensorMeta:
    return TensorMeta(name, *SHAPES[name.split(".")[0]])


def cuts(size: int, world_size: int) -> list[int]:
    """Uneven: each rank has more than the one before it; of few elements some have none."""
    return [size * r * r // (world_size * world_size) for r in range(world_size + 1)]


def part(whole: dict, rank: int, world_size: int) -> tuple[Explicit, dict]:
    """A rank's layout, and its arrays by slices of the flat ones."""
    held, arrays = [], {}
    for name, bits in whole.items():
        begin, end = cuts(bits.size, world_size)[rank:rank + 2]
        if begin < end:
            held.append(boxes.cut(boxes.whole(meta(name)), begin, end))
            arrays[name] = bits.reshape(-1)[begin:end]
    return Explicit({name: meta(name) for name in whole}, held), arrays


def save(folder, whole: dict, rank: int, world_size: int, **options) -> None:
    spec, arrays = part(whole, rank, world_size)
    checkpoint.save_rank(folder, spec, rank, world_size, arrays, config="{}", attempt=options.pop("attempt", "one"),
                         timeout=options.pop("timeout", 60), **options)


def save_by_all(folder, whole: dict, world_size: int, **options) -> None:
    on_all([lambda r=r: save(folder, whole, r, world_size, **options) for r in range(world_size)])


def loads(folder, whole: dict, world_size: int) -> None:
    """Ranks, as many as that, find what slices of the whole arrays are, bit for bit."""
    for rank in range(world_size):
        spec, want = part(whole, rank, world_size)
        into = {name: np.full_like(bits, 77) for name, bits in want.items()}
        checkpoint.load(folder, spec, rank, into)
        for name, bits in want.items():
            assert into[name].tobytes() == bits.tobytes(), (folder, rank, name)


def stored(folder) -> tuple[int, list[str]]:
    files = [path for path in folder.iterdir() if path.name.startswith("rank")]
    return sum(path.stat().st_size for path in files), sorted({"".join(path.suffixes) for path in files})


@pytest.mark.parametrize("world_size,others", [(2, 3), (3, 2)])
def test_five_versions_of_ranks_are_what_they_were_for_any_number_of_ranks(tmp_path, world_size, others):
    made = versions(5)
    for number, base in enumerate([None, 0, 1, 0, 3]):  # two chains from one whole version
        save_by_all(tmp_path / f"v{number}", made[number], world_size, base=None if base is None else tmp_path / f"v{base}")
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"v{n}" for n in range(5)]
    whole = stored(tmp_path / "v0")[0]
    assert whole > sum(bits.nbytes for bits in made[0].values())
    for number, tensors in enumerate(made):
        checkpoint.check(tmp_path / f"v{number}")
        for count in (world_size, others, 1):
            loads(tmp_path / f"v{number}", tensors, count)
        size, kinds = stored(tmp_path / f"v{number}")
        # 2 % by a bit: 0.14 + 0.02 bits of 8 and more an element, and all of `bytes`
        assert kinds == ([".safetensors.delta"] if number else [".safetensors"]) and (not number or size < whole / 20 + 110_000)
    # Made whole, its files are those that the ranks would have written.
    assert wwctl("compact", tmp_path / "v4").returncode == 0
    for other in (0, 1, 2, 3):
        shutil.rmtree(tmp_path / f"v{other}")
    for rank in range(world_size):
        got = read_safetensors(tmp_path / f"v4/rank{rank:05d}-00000.safetensors")
        want = part(made[4], rank, world_size)[1]
        assert got.keys() == want.keys() and all(got[name][1].tobytes() == bits.tobytes() for name, bits in want.items())
    loads(tmp_path / "v4", made[4], others)


def test_wwctl_reads_what_ranks_of_a_model_saved(tmp_path):
    """Three ranks of FSDP, whose cuts are uneven, and torch's names of a layout instead of boxes."""
    layout = layout_of("fsdp:dp3")
    random, whole = np.random.default_rng(1), {name: bits.copy() for name, bits in WEIGHTS.items()}
    made = []
    for number in range(3):
        options = {"config": CONFIG, "attempt": "one", "timeout": 60, "base": tmp_path / f"v{number - 1}" if number else None}
        on_all([lambda r=r: checkpoint.save_rank(tmp_path / f"v{number}", "fsdp:dp3", r, 3, shard(layout[r], whole), **options)
                for r in range(3)])
        made.append({name: bits.copy() for name, bits in whole.items()})
        for bits in whole.values():
            bits[random.random(bits.shape) < 0.02] += np.uint16(1)
    for number, want in enumerate(made):
        done = wwctl("convert", tmp_path / f"v{number}", tmp_path / f"hf{number}", "--to", "hf", "--verify", "--quiet")
        assert done.returncode == 0, done.stderr
        got = read_safetensors(tmp_path / f"hf{number}/model.safetensors")
        assert got.keys() == want.keys() and all(np.array_equal(got[name][1], bits) for name, bits in want.items())


def gone_at(number: int, work) -> bool:
    """Runs `work` in a child that gets SIGKILL before its `number`-th step that is durable or has a name; False: it came to its end."""
    child = os.fork()
    if child == 0:
        left = [number]

        def deadly(owner, name):
            real = getattr(owner, name)

            def wrapped(*arguments, **words):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **words)
            setattr(owner, name, wrapped)
        for owner, name in [(os, "fsync"), (os, "rename"), (os, "unlink"), (pathlib.Path, "unlink"), (pathlib.Path, "write_text"),
                            (os, "rmdir")]:
            deadly(owner, name)
        try:
            work()
            os._exit(0)
        except BaseException as why:  # the parent cannot see it otherwise
            print(repr(why), flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status != 0


SMALL = ("odd", "fp32", "tied", "one")


@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_killed_at_any_step_leaves_the_version_or_none_and_the_base_is_as_it_was(tmp_path, dying):
    """Rank 0 writes, seals, names and prunes (v0, which nobody needs); rank 1 writes. Each step of them in turn is the last one."""
    made = versions(4, SMALL)
    named: list[bool] = []
    killed = True
    while killed:
        run = tmp_path / f"run{len(named)}"
        for number, base in enumerate([None, None, 1]):
            save_by_all(run / f"v{number}", made[number], 2, base=base and run / f"v{base}")
        options = {"base": run / "v2", "keep_last": 1, "timeout": 20, "resume": True}
        if dying:  # what rank 0 begins is there
            with pytest.raises(DeadlineError, match="missing 1"):
                save(run / "v3", made[3], 0, 2, base=run / "v2", timeout=0.05)
        else:
            (run / ".v3.one.partial").mkdir()
            save(run / "v3", made[3], 1, 2, base=run / "v2")
        killed = gone_at(len(named) + 1, lambda: save(run / "v3", made[3], dying, 2, **options))
        named.append((run / "v3").exists())
        for number in (0, 1, 2, 3):  # of which v2 needs v1, and v3 both
            if number in (1, 2) or (run / f"v{number}" / native.MANIFEST).exists():
                loads(run / f"v{number}", made[number], 2)
        on_all([lambda r=r: save(run / "v3", made[3], r, 2, **options) for r in range(2)])
        loads(run / "v3", made[3], 3)
        assert {"v1", "v2", "v3"} <= {path.name for path in run.iterdir()} <= {"v0", "v1", "v2", "v3"}
        assert stored(run / "v3")[1] == [".safetensors.delta"] and not (run / "v0" / native.MANIFEST).exists()
        shutil.rmtree(run)
    assert len(named) > (5 if dying else 20)
    assert not any(named) if dying else named == sorted(named) and 0 < sum(named) < len(named)


def test_what_a_kept_version_is_based_on_is_kept(tmp_path):
    made, one = versions(6, SMALL), {"keep_last": 2}
    bases = {1: None, 2: 1, 3: 2, 4: None, 5: 4}
    kept = {}
    for number, base in bases.items():
        save_by_all(tmp_path / f"step_{number}", made[number], 2, base=base and tmp_path / f"step_{base}", **one)
        kept[number] = sorted(int(path.name[5:]) for path in tmp_path.iterdir())
        for other in kept[number]:
            loads(tmp_path / f"step_{other}", made[other], 1)
    assert kept == {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 3, 4], 5: [4, 5]}
    # A folder of another name has its base, too, by way of a symbolic link; without it that is removed.
    (tmp_path / "last").symlink_to("step_4")
    save_by_all(tmp_path / "best", made[0], 2, base=tmp_path / "last")
    (tmp_path / "last").unlink()
    for number in (6, 7, 8):
        save_by_all(tmp_path / f"step_{number}", made[number - 5], 2, **one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step_4", "step_7", "step_8"]
    loads(tmp_path / "best", made[0], 3)
    assert checkpoint.compact(tmp_path / "best")
    save_by_all(tmp_path / "step_9", made[5], 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "step_9"]
    loads(tmp_path / "best", made[0], 3)


def test_beside_a_manifest_that_does_not_tell_nothing_is_removed(tmp_path, caplog):
    made = versions(3, SMALL)
    for number in (1, 2):
        save_by_all(tmp_path / f"v{number}", made[number], 2)
    save_by_all(tmp_path / "best", made[0], 2, base=tmp_path / "v1")
    manifest = tmp_path / "best" / native.MANIFEST
    text = manifest.read_text()
    manifest.write_text(text[:-9])
    save_by_all(tmp_path / "v3", made[0], 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "v1", "v2", "v3"]
    assert f"{manifest} does not tell what it is based on" in caplog.text
    manifest.write_text(text)
    loads(tmp_path / "best", made[0], 1)
    save_by_all(tmp_path / "v4", made[0], 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "v1", "v4"]
    (tmp_path / "v4" / native.MANIFEST).write_text("{")  # an old one that is damaged goes like any other
    save_by_all(tmp_path / "v5", made[0], 2, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "v1", "v5"]


def test_versions_are_removed_before_what_they_are_based_on(tmp_path, monkeypatch):
    made = versions(4, SMALL)
    for number in (1, 2, 3):
        save_by_all(tmp_path / f"v{number}", made[number], 2, base=tmp_path / f"v{number - 1}" if number > 1 else None)
    remove, removed = shutil.rmtree, []

    def cut(path):
        removed.append(path.name)
        if len(removed) == 2:
            raise OSError("the disk is gone")
        remove(path)
    with monkeypatch.context() as planted, pytest.raises(OSError, match="the disk is gone"):
        planted.setattr(attempts.shutil, "rmtree", cut)
        save(tmp_path / "v4", made[0], 0, 1, keep_last=1)
    assert removed == ["v3", "v2"]
    loads(tmp_path / "v1", made[1], 1)


def refused(match: str, *arguments, **options) -> None:
    with pytest.raises(checkpoint.CheckpointError, match=match):
        save(*arguments, timeout=2, **options)


def test_a_base_that_cannot_be_one_is_refused_and_nothing_is_there(tmp_path):
    made = versions(2, SMALL)
    save_by_all(tmp_path / "v1", made[0], 2)
    new = tmp_path / "v2"
    now = made[1]
    (tmp_path / "begun").mkdir()
    refused("v2 cannot be its own base", new, now, 0, 2, base=new)
    refused("begun has no weightwire.json.*not complete", new, now, 0, 2, base=tmp_path / "begun")
    refused("nowhere has no weightwire.json", new, now, 0, 2, base=tmp_path / "nowhere")
    refused("is 2 ranks of 'boxes', this is 3 of 'boxes'", new, now, 0, 3, base=tmp_path / "v1")
    with pytest.raises(checkpoint.CheckpointError, match="is 2 ranks of 'boxes', this is 2 of 'fsdp:dp2'"):
        checkpoint.save_rank(new, "fsdp:dp2", 0, 2, part(now, 0, 2)[1], config="{}", attempt="one", timeout=2, base=tmp_path / "v1")
    refused("only in .*v1.*tensor odd", new, {name: bits for name, bits in now.items() if name != "odd"}, 0, 2, base=tmp_path / "v1")
    longer = {**now, "long": np.zeros(17, np.uint8)}
    with pytest.raises(checkpoint.CheckpointError, match="only in .*v2.*tensor long"):
        spec, arrays = part(now, 0, 2)
        held = [*spec.held, boxes.whole(TensorMeta("long", "U8", (17,)))]
        checkpoint.save_rank(new, Explicit({**spec.canonical, "long": held[-1].meta}, held), 0, 2, {**arrays, "long": longer["long"]},
                             config="{}", attempt="one", timeout=2, base=tmp_path / "v1")
    spec, arrays = part(now, 0, 2)
    halves = Explicit(spec.canonical, [boxes.Held(TensorMeta(h.meta.name, "F16", h.meta.shape), h.boxes) if h.meta.name == "odd" else h
                                       for h in spec.held])
    with pytest.raises(checkpoint.CheckpointError, match=r"BF16 .* in .*v1, F16 .* in .*v2.*tensor odd"):
        checkpoint.save_rank(new, halves, 0, 2, {**arrays, "odd": arrays["odd"].view(np.float16)}, config="{}", attempt="one", timeout=2,
                             base=tmp_path / "v1")
    size, total = arrays["odd"].size, SHAPES["odd"][1][0] * SHAPES["odd"][1][1] * SHAPES["odd"][1][2]
    moved = Explicit(spec.canonical, [boxes.cut(boxes.whole(meta("odd")), total - size, total) if h.meta.name == "odd" else h
                                      for h in spec.held])
    with pytest.raises(checkpoint.CheckpointError, match="in .*v1 this rank holds other boxes"):
        checkpoint.save_rank(new, moved, 0, 2, arrays, config="{}", attempt="one", timeout=2, base=tmp_path / "v1")
    damaged = shutil.copytree(tmp_path / "v1", tmp_path / "damaged") / native.MANIFEST
    damaged.write_text(damaged.read_text().replace('"digest": "', '"digest": "0', 1))
    refused("its digest is not", new, now, 0, 2, base=tmp_path / "damaged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "damaged", "v1"]
    save_by_all(new, now, 2, base=tmp_path / "v1")
    loads(new, now, 2)


def test_a_chain_has_64_links_and_no_more(tmp_path):
    whole = {"one": np.zeros(1, np.uint16)}
    for number in range(native_delta.CHAIN_MAX + 1):
        whole["one"][0] = number
        save(tmp_path / f"v{number}", whole, 0, 1, base=tmp_path / f"v{number - 1}" if number else None)
    loads(tmp_path / "v64", whole, 1)
    refused("v65 is based on a chain of more than 64", tmp_path / "v65", whole, 0, 1, base=tmp_path / "v64")
    with pytest.raises(checkpoint.CheckpointError, match="other is based on a chain of more than 64"):
        shutil.copytree(tmp_path / "v64", tmp_path / "hf")  # any source: what is refused is the base
        checkpoint.convert(tmp_path / "hf", tmp_path / "other", "weightwire", base=tmp_path / "v64")
    assert not [path for path in tmp_path.iterdir() if "v65" in path.name or "other" in path.name]
    assert checkpoint.compact(tmp_path / "v40")
    save(tmp_path / "v65", whole, 0, 1, base=tmp_path / "v64")
    loads(tmp_path / "v65", whole, 1)


@pytest.mark.parametrize("other", ["v0", None])
def test_ranks_that_name_different_bases_are_told(tmp_path, other):
    made = versions(3, SMALL)
    for number in (0, 1):
        save_by_all(tmp_path / f"v{number}", made[number], 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(save, tmp_path / "v2", made[2], 0, 2, base=tmp_path / "v1")
        pool.submit(save, tmp_path / "v2", made[2], 1, 2, base=other and tmp_path / other).result()
    with pytest.raises(checkpoint.CheckpointError, match="since v1, this rank another layout or .*another base.*rank 1"):
        first.result()
    assert not (tmp_path / "v2").exists()
    with pytest.raises(checkpoint.CheckpointError, match="a part of this rank with another base"):
        save(tmp_path / "v2", made[2], 1, 2, base=tmp_path / "v1", resume=True)


def test_a_base_that_goes_while_ranks_save_is_named(tmp_path):
    made = versions(2, SMALL)
    save_by_all(tmp_path / "v0", made[0], 2)
    with pytest.raises(DeadlineError, match="missing 1"):
        save(tmp_path / "v1", made[1], 0, 2, base=tmp_path / "v0", timeout=0.05)
    save(tmp_path / "v1", made[1], 1, 2, base=tmp_path / "v0")
    os.rename(tmp_path / "v0", tmp_path / "away")
    refused("v0/weightwire.json", tmp_path / "v1", made[1], 0, 2, base=tmp_path / "v0", resume=True)
    save_by_all(tmp_path / "v0", made[1], 2)
    refused("v0, which is another checkpoint now", tmp_path / "v1", made[1], 0, 2, base=tmp_path / "v0", resume=True)
    assert not (tmp_path / "v1").exists()
    shutil.rmtree(tmp_path / "v0")
    os.rename(tmp_path / "away", tmp_path / "v0")
    save(tmp_path / "v1", made[1], 0, 2, base=tmp_path / "v0", resume=True)
    loads(tmp_path / "v1", made[1], 3)


def test_a_rank_that_ends_early_names_the_base_that_rank_0_has_not_sealed_yet(tmp_path):
    """Without a barrier: rank 1 begins the next version as soon as its part of this one is written."""
    made = versions(5, SMALL)

    def all_versions(rank: int) -> None:
        for number, whole in enumerate(made):
            save(tmp_path / f"v{number}", whole, rank, 2, base=tmp_path / f"v{number - 1}" if number else None)
    on_all([lambda r=r: all_versions(r) for r in range(2)])
    for number, whole in enumerate(made):
        loads(tmp_path / f"v{number}", whole, 2)


def test_neither_saves_nor_loads_keep_files_open_nor_more_than_two_of_a_chain_elsewhere(tmp_path, monkeypatch):
    made, sizes, expand = versions(6, SMALL), [], native_delta.DeltaFile.expand
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()

    def opened() -> dict[str, int]:
        return {os.readlink(path): path.stat().st_size for path in pathlib.Path("/proc/self/fd").iterdir()
                if path.exists() and str(tmp_path) in os.readlink(path)}

    def measured(*arguments):
        descriptor = expand(*arguments)
        sizes.append(sum(size for name, size in opened().items() if "elsewhere" in name))
        return descriptor
    monkeypatch.setattr(native_delta.DeltaFile, "expand", measured)
    for number, whole in enumerate(made):
        save(tmp_path / f"v{number}", whole, 0, 1, base=tmp_path / f"v{number - 1}" if number else None)
    loads(tmp_path / "v5", made[5], 1)
    unread = checkpoint.open_checkpoint(tmp_path / "v5")
    assert not opened() and unread.ranks
    assert checkpoint.compact(tmp_path / "v5")
    # When one is made, what it was made of is gone.
    assert len(sizes) == 0 + 1 + 2 + 3 + 4 + 5 + 5 and {*sizes} == {stored(tmp_path / "v0")[0]}
    assert not opened()


class Step:
    """What a trainer holds after a number of steps: whole tensors made by NumPy, which `trainer_ranks` cuts for its layouts."""

    def __init__(self, monkeypatch):
        self._patch, self._weights, self._states = monkeypatch, WEIGHTS, states()

    def to(self, number: int) -> None:
        random = np.random.default_rng(number)
        weights = {name: np.where(random.random(bits.shape) < 0.02, bits + np.uint16(number), bits) for name, bits in self._weights.items()}
        groups = {group: {name: (values * np.float32(1 - 1e-6 * number)) for name, values in whole.items()}
                  for group, whole in self._states.items()}
        self._patch.setattr(trainer_ranks, "WEIGHTS", weights)
        self._patch.setattr(trainer_ranks, "states", lambda: groups)

    def trainer(self, maker: str, number: int, filled: bool = True, **options) -> list:
        self.to(number)
        made = MAKERS[maker](filled=filled, **options)
        for one in made if filled else []:  # a tree whose text grows
            one.schedule = {"step": 10 ** number}
        return made


def kinds(folder) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in folder.rglob("rank*"):
        found.setdefault(str(path.parent.relative_to(folder)), set()).add(path.suffix)
    return found


@pytest.mark.parametrize("saved", ["tp2pp2", "flat3"])
def test_a_trainer_keeps_what_changed_of_weights_and_optimizer(tmp_path, monkeypatch, saved):
    step = Step(monkeypatch)
    for number in (1, 2, 3):
        options = {"base": tmp_path / f"step_{number - 1}"} if number > 1 else {}
        save_all(step.trainer(saved, number, keep_last=1), tmp_path / f"step_{number}", **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1", "step_2", "step_3"]
    for number in (1, 2, 3):
        for loaded in ("tp4pp1", "flat3", saved):
            into = step.trainer(loaded, number, filled=False, verify=True)
            on_all([lambda r=r: r.state.load(tmp_path / f"step_{number}") for r in into])
            same(into, step.trainer(loaded, number))
    coded = {"model", "optimizer/exp_avg", "optimizer/master"}
    assert kinds(tmp_path / "step_3") == {part: {".delta" if part in coded else ".safetensors"}
                                          for part in (*coded, "optimizer/state", "extra/shared", "extra/own")}
    sizes = [sum(path.stat().st_size for path in (tmp_path / f"step_{number}").rglob("rank*")) for number in (1, 3)]
    assert sizes[1] < sizes[0] / 1.5
    assert checkpoint.compact(tmp_path / "step_3")
    save_all(step.trainer(saved, 4, keep_last=2), tmp_path / "step_4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_3", "step_4"]
    into = step.trainer("tp4pp1", 3, filled=False, verify=True)
    on_all([lambda r=r: r.state.load(tmp_path / "step_3") for r in into])
    same(into, step.trainer("tp4pp1", 3))


def test_what_cannot_be_a_trainers_base_is_refused_and_nothing_is_there(tmp_path):
    two = ranks("megatron:tp2", filled=True)
    save_all(ranks("megatron:tp2", filled=True, save_contents=["model", "extra"], load_contents=["model"]), tmp_path / "s1")
    save_all(ranks("megatron:tp4", filled=True), tmp_path / "s2")
    hf = ranks("megatron:tp2", filled=True, save_contents=["hf_model"], load_contents=["hf_model"])
    (tmp_path / "begun").mkdir()
    for trainer, base, match in [(two, "s1/model", "s1/model has no weightwire_state.json.*not complete"), (two, "begun", "begun has no"),
                                 (two, "s1", "s1 was saved without optimizer/exp_avg"), (two, "s9", "s9 cannot be its own base"),
                                 (two, "s2", "is 4 ranks of 'megatron:tp4', this is 2 of 'megatron:tp2'"),
                                 (hf, "s1", "nothing of save_contents is kept as what changed")]:
        with pytest.raises(checkpoint.CheckpointError, match=match):
            trainer[0].state.save(tmp_path / "s9", attempt="one", base=tmp_path / base)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "s1", "s2"]


@pytest.mark.parametrize("dying", [0, 1])
def test_a_trainers_rank_killed_at_any_step_leaves_the_version_or_none(tmp_path, monkeypatch, dying):
    step = Step(monkeypatch)
    options = {"save_contents": ["model", "extra"], "load_contents": ["model", "extra"]}
    monkeypatch.setitem(MAKERS, "tp2", lambda **o: ranks("megatron:tp2", **options, **o))
    named = []
    for number in range(1, 1000, 3):
        run = tmp_path / f"run{number}"
        save_all(step.trainer("tp2", 1), run / "s1")
        trainer = step.trainer("tp2", 2)
        trainer[0].state._timeout = 0.05  # begins, and waits for rank 1
        with pytest.raises(DeadlineError, match="missing 1"):
            trainer[0].state.save(run / "s2", attempt="one", base=run / "s1")
        trainer[0].state._timeout = 40
        if not dying:
            trainer[1].state.save(run / "s2", attempt="one", base=run / "s1")
        killed = gone_at(number, lambda: trainer[dying].state.save(run / "s2", attempt="one", base=run / "s1", resume=True))
        named.append((run / "s2").exists())
        for version in (1, 2) if named[-1] else (1,):
            loads_trainer(step, run, version)
        save_all(trainer, run / "s2", resume=True, base=run / "s1")
        loads_trainer(step, run, 2)
        assert sorted(path.name for path in run.iterdir()) == ["s1", "s2"] and kinds(run / "s2")["model"] == {".delta"}
        shutil.rmtree(run)
        if not killed:
            break
    assert len(named) > (4 if dying else 8)
    assert not any(named) if dying else named == sorted(named) and 0 < sum(named) < len(named)


def loads_trainer(step: Step, run, version: int) -> None:
    into = step.trainer("tp2", version, filled=False, verify=True)
    on_all([lambda r=r: r.state.load(run / f"s{version}") for r in into])
    for got, want in zip(into, step.trainer("tp2", version)):
        assert got.schedule == want.schedule and all(np.array_equal(got.weights[name], bits) for name, bits in want.weights.items())
