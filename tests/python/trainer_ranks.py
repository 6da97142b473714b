"""Trainers whose ranks hold parts of a real checkpoint's weights, and of an optimizer's states, under any layout."""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from conftest import DATA, read_safetensors
from weightwire import boxes
from weightwire.boxes import Held
from weightwire.checkpoint import Contents, Explicit, Extra, Model, Optimizer, Options, State
from weightwire.checkpoint.planner import planner_of
from weightwire.memory import TensorMeta

HF = DATA / "megatron/qwen2/hf"
CONFIG = (HF / "config.json").read_text()
WEIGHTS = {name: bits for name, (_, bits) in read_safetensors(HF / "model.safetensors").items()}
GROUPS = ("exp_avg", "master")


def states() -> dict:
    """Adam's and the master's values of every whole tensor."""
    return {group: {name: np.random.default_rng([number, len(name), *name.encode()]).standard_normal(bits.shape, np.float32)
                    for name, bits in WEIGHTS.items()} for number, group in enumerate(GROUPS)}


def layout_of(spec: str) -> list:
    return planner_of(CONFIG, None).boxes(spec)


def shard(rank: list, whole: dict) -> dict:
    """A rank's tensors, made element by element from whole ones."""
    made = {}
    for held in rank:
        flat = np.zeros(int(np.prod(held.meta.shape)), next(iter(whole.values())).dtype)
        for box in held.boxes:
            block = whole[box.name][tuple(slice(b, b + n) for b, n in zip(box.begin, box.extent))]
            at = box.offset + sum((np.arange(n) * s).reshape([-1 if k == d else 1 for k in range(len(box.extent))])
                                  for d, (n, s) in enumerate(zip(box.extent, box.stride)))
            flat[at] = block
        made[held.meta.name] = flat.reshape(held.meta.shape)
    return made


class Rank:
    """A trainer's rank: its part of the weights and of the optimizer's states, and what else it keeps."""

    def __init__(self, layout, held: list, rank: int, world_size: int, filled: bool, options: dict, config=CONFIG, changes=None):
        def part(whole: dict) -> dict:
            made = shard(held, whole)
            return made if filled else {name: np.zeros_like(array) for name, array in made.items()}
        self.weights, self.states = part(WEIGHTS), {group: part(whole) for group, whole in states().items()}
        self.schedule = {"step": 7, "lrs": [0.1, 1e-5], "betas": (0.9, 0.95)} if filled else None
        self.random = {"numpy": np.random.default_rng(rank).bit_generator.state, "python": random.Random(rank).getstate(),
                       "buffer": np.arange(5, dtype=np.uint32) + rank} if filled else None
        self.hyper = {"lr": 0.25, "step": 7} if filled else None
        self.state = State(Options.read(options), Contents(
            Model(layout, lambda: self.weights, config, changes or {}),
            Optimizer(layout, lambda: self.states, lambda: self.hyper, lambda s: setattr(self, "hyper", s)),
            Extra(lambda: self.schedule, lambda s: setattr(self, "schedule", s), lambda: self.random,
                  lambda s: setattr(self, "random", s))), rank=rank, world_size=world_size, timeout=40)


def ranks(spec: str, filled: bool, **options) -> list:
    layout = layout_of(spec)
    return [Rank(spec, held, rank, len(layout), filled, options) for rank, held in enumerate(layout)]


def fsdp_ranks(world_size: int, filled: bool, **options) -> list:
    """Explicit boxes: every tensor flat, cut into equal runs of elements wherever they fall, as ZeRO shards."""
    canonical = {name: TensorMeta(name, "U8", bits.shape) for name, bits in WEIGHTS.items()}
    made = []
    for rank in range(world_size):
        held = []
        for name, bits in WEIGHTS.items():
            cuts = [bits.size * r // world_size for r in range(world_size + 1)]
            held.append(boxes.cut(boxes.whole(TensorMeta(name, "U8", bits.shape)), cuts[rank], cuts[rank + 1]))
        one = Rank("", held, rank, world_size, filled, options)
        one.state._contents = Contents(*[_explicit(content, canonical, held, dtype) for content, dtype in
                                         ((one.state._contents.model, "BF16"), (one.state._contents.optimizer, "F32"))],
                                       one.state._contents.extra)
        made.append(one)
    return made


def _explicit(content, canonical: dict, held: list, dtype: str):
    return replace(content, layout=Explicit(canonical, [Held(replace(h.meta, dtype=dtype), h.boxes) for h in held]))


def on_all(called: list, timeout: float = 60) -> list:
    with ThreadPoolExecutor(len(called)) as pool:
        return [done.result(timeout) for done in [pool.submit(call) for call in called]]


def save_all(trainer: list, folder, attempt: str = "one", **options) -> None:
    on_all([lambda r=r: r.state.save(folder, attempt=attempt, **options).result(60) for r in trainer])


def same(got: list, want: list) -> None:
    for a, b in zip(got, want):
        assert all(np.array_equal(a.weights[name], bits) for name, bits in b.weights.items())
        assert all(np.array_equal(a.states[g][name], bits) for g in GROUPS for name, bits in b.states[g].items())
        assert (a.schedule, a.hyper) == (b.schedule, b.hyper)


MAKERS = {"tp2pp2": lambda **o: ranks("megatron:tp2,pp2", **o), "tp4pp1": lambda **o: ranks("megatron:tp4,pp1", **o),
          "fsdp4": lambda **o: ranks("fsdp:dp4", **o), "flat3": lambda **o: fsdp_ranks(3, **o)}
