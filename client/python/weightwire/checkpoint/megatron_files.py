"""`megatron`: legacy per-rank files, mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt, as Megatron-LM names them.

A file is of one tensor, pipeline and expert rank, so there are as many as ranks of `megatron:tpT,ppP,epE,dpE`: the
data-parallel rank of a layout is the expert rank here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from weightwire.checkpoint import pickles, torch_files
from weightwire.checkpoint.formats import Opened, Wanted, padding
from weightwire.checkpoint.stored import CheckpointError, Files, Stored, damaged
from weightwire.memory import TensorMeta

LATEST = "latest_checkpointed_iteration.txt"
_FOLDER = re.compile(r"mp_rank_(\d{2,4})(?:_(\d{3,4}))?(?:_(\d{3,4}))?")
_FILES = ("model_optim_rng.pt", "model_rng.pt")
_EMBEDDING = "embedding.word_embeddings.weight"
Grid = Tuple[int, int, int]


def found_at(folder: Path) -> bool:
    return _iteration(folder) is not None


def _iteration(folder: Path) -> Optional[str]:
    """The folder, below `folder` or "", that holds the mp_rank folders."""
    if (folder / LATEST).is_file():
        text = (folder / LATEST).read_text(errors="replace")[:64].strip()
        if text == "release":
            return "release/"
        return f"iter_{int(text):07d}/" if re.fullmatch(r"\d{1,12}", text) else None
    return "" if folder.is_dir() and any(_FOLDER.fullmatch(path.name) for path in folder.iterdir()) else None


def rank_spec(spec: str) -> Tuple[str, Grid]:
    """The layout whose ranks are the files of `spec`, and (tp, pp, ep)."""
    words = spec.partition(":")[2].split(",")
    sizes = {m.group(1): int(m.group(2)) for m in (re.fullmatch(r"([a-z]+)(\d+)", word) for word in words) if m}
    tp, pp, ep = (sizes.get(name, 1) for name in ("tp", "pp", "ep"))
    wrong = [word for word in words if word.startswith(("order=", "cp")) and word not in ("cp1", "order=tp-cp-ep-dp-pp")]
    if wrong or sizes.get("etp", tp) != tp or sizes.get("dp", ep) != ep:
        raise CheckpointError(f"'{spec}': legacy files have a tensor, a pipeline and an expert rank, nothing else",
                              remedy="leave out cp, dp, order and an etp other than tp, or write torch_dist")
    return (f"{spec},dp{ep}" if ep > 1 and "dp" not in sizes else spec), (tp, pp, ep)


def _places(grid: Grid) -> List[Grid]:
    """(t, p, e) by rank: tp is fastest, then the data-parallel rank, which is e, then pp."""
    tp, pp, ep = grid
    return [(t, p, e) for p in range(pp) for e in range(ep) for t in range(tp)]


def _name(place: Grid, grid: Grid) -> str:
    (t, p, e), (_, pp, ep) = place, grid
    return f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")


def open_at(folder: Path) -> Opened:
    base = _iteration(folder)
    assert base is not None
    files, zips, left_out = Files(folder), [], []
    found: Dict[Tuple[int, ...], Dict[str, Stored]] = {}
    if not (folder / base).is_dir():
        raise damaged(LATEST, f"there is no {base}")
    for path in sorted((folder / base).iterdir()):
        match = _FOLDER.fullmatch(path.name)
        file = next((f"{base}{path.name}/{name}" for name in _FILES if match and (path / name).is_file()), None)
        if match and file:
            archive = pickles.TorchZip(files, file)
            found[tuple(int(n) for n in match.groups() if n)], dropped = _rank(archive)
            left_out += dropped
            zips.append((file, 0, archive.size))
    grid, ranks = _by_rank(found)
    return Opened("megatron", _spec(grid, ranks), files, ranks, sorted(set(left_out)), zips)


def _rank(archive: pickles.TorchZip) -> Tuple[Dict[str, Stored], List[str]]:
    content = archive.content
    if not isinstance(content, dict):
        raise damaged(archive.file, "no state dict")
    tensors: Dict[str, Stored] = {}
    chunks = {key: value for key, value in content.items() if isinstance(key, str) and re.fullmatch(r"model\d*", key)}
    for chunk, state in chunks.items():
        prefix = f"vpp{chunk[5:]}." if chunk != "model" else ""
        for name, tensor in pickles.tensors(archive, state):
            if not name.endswith("_extra_state"):
                tensors[prefix + name] = Stored(prefix + name, tensor.dtype, tensor.shape, tensor.regions)
    if not tensors:
        raise damaged(archive.file, "no model in it")
    return tensors, [str(key)[:80] for key in content if key not in chunks]


def _by_rank(found: Dict[Tuple[int, ...], Dict[str, Stored]]) -> Tuple[Grid, List[Dict[str, Stored]]]:
    """The ranks in the layout's order. A second number alone is pp, unless all of its ranks hold the embedding."""
    lengths = {len(key) for key in found}
    if len(lengths) != 1:
        raise damaged("mp_rank folders", "none, or of several forms")
    placed: Dict[Grid, Dict[str, Stored]] = {}
    only_experts = lengths == {2} and all(any(n.endswith(_EMBEDDING) for n in rank) for rank in found.values())
    for key, rank in found.items():
        t, p, e = (*key, 0, 0)[:3]
        placed[(t, 0, p) if only_experts else (t, p, e)] = rank
    tp, pp, ep = (max(key[axis] for key in placed) + 1 for axis in range(3))
    missing = [place for place in _places((tp, pp, ep)) if place not in placed]
    if missing:
        raise damaged(_name(missing[0], (tp, pp, ep)), "is missing")
    return (tp, pp, ep), [placed[place] for place in _places((tp, pp, ep))]


def _spec(grid: Grid, ranks: List[Dict[str, Stored]]) -> str:
    tp, pp, ep = grid
    names = set().union(*ranks)
    chunks = {name.split(".", 1)[0] for name in names if name.startswith("vpp")}
    kinds = {"grouped": "mlp.experts.weight1", "te": "mlp.experts.linear_fc1.weight0",
             "sequential": "mlp.experts.local_experts.0.linear_fc1.weight"}
    kind = next((kind for kind, end in kinds.items() if any(name.endswith(end) for name in names)), "")
    spec = f"megatron:tp{tp},pp{pp}" + (f",vpp{len(chunks)}" if chunks else "") + (f",ep{ep},dp{ep}" if ep > 1 else "")
    spec += ",spec=te" if any(name.endswith("layer_norm_weight") for name in names) else ""
    first = "vpp0." if chunks else ""
    return spec + (f",experts={kind}" if kind else "") + padding(first + _EMBEDDING, ranks[0], tp)


def lay_out(folder: Path, wanted: Wanted) -> None:
    _, grid = rank_spec(wanted.spec)
    (folder / LATEST).write_text("release")
    for place, tensors in zip(_places(grid), wanted.ranks):
        path = folder / "release" / _name(place, grid)
        path.mkdir(parents=True)
        chunks: Dict[str, Any] = {}
        for t in tensors:
            match = re.fullmatch(r"vpp(\d+)\.(.*)", t.name)
            chunk, name = (f"model{match.group(1)}", match.group(2)) if match else ("model", t.name)
            chunks.setdefault(chunk, []).append(TensorMeta(name, t.dtype, t.shape))
        torch_files.write_megatron(path / _FILES[0], chunks)


def seal(opened: Opened, wanted: Wanted) -> None:
    for file, start, size in opened.zips:
        pickles.TorchZip(opened.files, file, start, size).write_sums()
