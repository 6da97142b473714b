"""Checkpoints in which every element is a number of its own, and where a loader put the numbers: traces."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from vllm_fp8 import numbered, parts_of  # noqa: F401

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
TP = 2


def add_part(found, params, tensors, byte):
    """Adds what the parameters hold of part `byte` to `found`, numbers by the parameter's name."""
    import numpy as np
    import torch
    for name, param in params:
        bits = 8 * param.element_size()
        kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[param.element_size()]
        raw = param.detach().reshape(-1).view(torch.uint8).numpy().view(kind).astype(np.int64)
        if param.dtype == torch.float32 and all(dtype == torch.bfloat16 for dtype, _ in tensors.values()):
            raw, bits = raw >> 16, 16  # a bf16 element became the upper half
        if bits * byte < 32:
            found[name] = found.get(name, 0) + (raw << (bits * byte))


def row_of(name_of_param, param, name, shape, index, at):
    """The row of the elements `index` of a checkpoint tensor, which lie at `at`."""
    import numpy as np
    begin, end = index.min(axis=1), index.max(axis=1) + 1
    extent = end - begin
    place = {tuple(i): int(p) for i, p in zip(index.T, at)}
    assert tuple(begin) in place, (name_of_param, name, begin, extent, len(at))
    offset = place[tuple(begin)]
    stride = []
    for d in range(len(shape)):
        step = begin.copy()
        step[d] += 1
        stride.append(place[tuple(step)] - offset if extent[d] > 1 else param.stride()[d - len(shape)])
    assert len(place) == len(at) == int(np.prod(extent)), (name_of_param, name)
    assert all(p == offset + sum((i[d] - begin[d]) * stride[d] for d in range(len(shape))) for i, p in place.items())
    ops = [["narrow", d, int(begin[d]), int(extent[d])] for d in range(len(shape)) if extent[d] < shape[d]]
    return {"src": name, "ops": ops, "param": name_of_param, "offset": offset,
            "shape": [int(e) for e in extent], "stride": [int(s) for s in stride],
            "dtype": str(param.dtype).removeprefix("torch.")}


def rows_of(name_of_param, param, flat, tensors, first, together=True):
    """One row for each run of rows of a checkpoint tensor that is found in the parameter: a box, row-major or not.

    together: rows that are neighbours in the checkpoint lie as they do there; otherwise runs also end where they do not.
    """
    import numpy as np
    rows = []
    for name, (_, shape) in tensors.items():
        size = int(np.prod(shape))
        at = np.nonzero((flat >= first[name]) & (flat < first[name] + size))[0]
        if len(at) == 0:
            continue
        whole = np.stack(np.unravel_index(flat[at] - first[name], shape))
        held, begins = np.unique(whole[0], return_index=True)
        ends = np.diff(held) > 1
        if not together:
            ends |= np.diff(at[begins]) != np.bincount(whole[0])[held[:-1]]
        for run in np.split(held, np.nonzero(ends)[0] + 1):
            mine = (whole[0] >= run[0]) & (whole[0] <= run[-1])
            rows.append(row_of(name_of_param, param, name, shape, whole[:, mine], at[mine]))
    return rows


def trace(name, config, script, engine):
    """Both ranks are processes that run `script`: a group of two."""
    with tempfile.TemporaryDirectory() as top:
        ranks = []
        for rank in range(TP):
            folder = pathlib.Path(top) / f"rank{rank}"
            folder.mkdir()
            command = [sys.executable, "-B", script, "--rank", str(rank), "--model", name, "--folder", str(folder)]
            # Which group's shared memory is whose; vLLM's worker sets it.
            group = {"VLLM_DIST_IDENT": f"weightwire-{os.getpid()}", "VLLM_LOGGING_LEVEL": "ERROR"}
            ranks.append(subprocess.Popen(command, env=os.environ | group))
        if any([process.wait() for process in ranks]):
            raise SystemExit(f"{name}: a rank failed")
        copies = [json.loads((pathlib.Path(top) / f"rank{rank}" / "rows.json").read_text()) for rank in range(TP)]
    lines = ",\n".join(f'{{"rank":{rank},"copies":[\n' + ",\n".join(json.dumps(row) for row in rows) + "]}"
                       for rank, rows in enumerate(copies))
    return (f'{{"engine":"{engine}","tensor_parallel_size":{TP},\n"config":{json.dumps(config)},\n'
            f'"ranks":[\n{lines}]}}\n')


def main(models, load, script, description, folder, engine):
    """Writes data/<folder>/<model>-tp2.json of every model, or says which would change; exit status.

    models: configs by the file's name; load(config, rank, folder): the rows of one rank, in a process of its own;
    engine: what loads, and of which version; None where it is not the one that the files are of.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help="write the files")
    parser.add_argument("--only", default="", help="models whose name begins so")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if engine is None:
        parser.error("the files are of another version than this environment's")
    if options.rank is not None:
        rows = load(models[options.model], options.rank, options.folder)
        (options.folder / "rows.json").write_text(json.dumps(rows))
        return 0
    changed = []
    for name, config in models.items():
        if not name.startswith(options.only):
            continue
        path, text = DATA / folder / f"{name}-tp2.json", trace(name, config, script, engine)
        if not path.exists() or path.read_text() != text:
            changed.append(path.name)
        if options.update:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    for name in changed:
        print(f"{name}: {'written' if options.update else 'would change'}")
    return 1 if changed and not options.update else 0
