"""What a save takes of a running trainer's memory, as the kernel counts it."""

import json
import math
import multiprocessing
import pathlib
import re
import tempfile

import numpy as np
import pytest

from conftest import BINARIES
from demo import checkpoint as model_files
from weightwire import checkpoint
from weightwire.checkpoint import export, native
from weightwire.checkpoint.planner import planner_of

#: 166 MB; a rank's part of one matrix that is cut by columns, and so is no run of its file, is larger than a step
CONFIG = json.dumps({**model_files.SMALL, "num_hidden_layers": 1, "intermediate_size": 36864})
#: What is held of the weights at one time: of a file that is digested, of a block that is written.
STEP = max(native.LEAF_BYTES, export._STEP_BYTES)

#: Of what is no tensor: code that is paged in, names, stacks of threads. glibc 2.39 (Ubuntu 24.04) comes to 0.4 MB more than 2.36.
BESIDE = 1 << 20


def resident(what: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    return 1024 * int(re.search(rf"^{what}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(), re.M)[1])


def _save(rank: int, folder: str, spec: str, contents: tuple, links: int, said) -> None:
    held = planner_of(CONFIG).rank_boxes(spec, rank)
    weights = {one.meta.name: np.full(one.meta.shape, rank, np.uint16) for one in held}
    whole = checkpoint.Contents(checkpoint.Model(spec, lambda: weights, CONFIG))
    state = checkpoint.State(checkpoint.Options(contents, ("model",) if "model" in contents else ()), whole, rank=rank,
                             world_size=2, timeout=60)
    for number in range(links + 1):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
        before = resident("VmRSS")
        state.save(f"{folder}{number}", attempt="one", base=f"{folder}{number - 1}" if number else None).result(60)
        extra = resident("VmHWM") - before
        for array in weights.values():
            array[..., ::31] += np.uint16(1)
    said.put((sum(math.prod(one.meta.shape) * 2 for one in held), extra))


@pytest.mark.parametrize("contents,links", [(("model",), 0), (("hf_model",), 0), (("model",), 3)])
def test_a_save_takes_two_steps_of_memory_beside_what_the_rank_holds(monkeypatch, contents, links):
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if pathlib.Path("/dev/shm").is_dir() else None) as folder:
        ranks = [context.Process(target=_save, args=(rank, f"{folder}/s", "megatron:tp2", contents, links, said)) for rank in range(2)]
        for process in ranks:
            process.start()
        answers = [said.get(timeout=90) for _ in ranks]
        for process in ranks:
            process.join(60)
        checkpoint.check(f"{folder}/s{links}/{contents[0]}")
    print(answers)
    for held, extra in answers:
        assert held > 4 * STEP and extra <= 2 * STEP + BESIDE, f"{extra} bytes beside {held}; a step has {STEP}"
