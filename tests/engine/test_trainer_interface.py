"""vLLM's trainer-side interface, as its factory makes it, with weightwire below it."""

import contextlib
import inspect
import math
import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from weightwire import RefusedError, torch as ww_torch, vllm_trainer


class Client:
    """vLLM's control plane; weightwire's driver stands in its place, so nobody may call it."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def trainer_init(info, **given):
    """As vLLM's factory is called: 0.26 takes a back end's name and a configuration, too."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    init = WeightTransferTrainerFactory.trainer_init
    return init(*(("weightwire", None) if "config" in inspect.signature(init).parameters else ()), info, **given)


@pytest.mark.parametrize("by", ["publisher", "source"])
def test_send_weights_publishes_version_after_version(by, stack):
    from vllm.distributed.weight_transfer.base import ModuleSource
    vllm_trainer.register()
    vllm_trainer.register()
    model, follower = (torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, dtype=torch.bfloat16))
                       for _ in range(2))
    options = {}
    if by == "publisher":
        options["publisher"] = stack.add(ww_torch.Publisher(model, agent=stack.agent))
    info = vllm_trainer.InitInfo(rank=0, agent=stack.agent, first_version=4, **options)
    engine = trainer_init(info, client=Client(), source=ModuleSource(model) if by == "source" else None)
    receiver = stack.add(ww_torch.Receiver(follower, group="follower", agent=stack.agent))
    with contextlib.ExitStack() as closing:
        closing.callback(engine.shutdown)
        for version in (4, 5, 6):
            train(model)
            engine.send_weights()
            assert receiver.receive(30).version == version
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), follower.parameters()))


def test_without_anything_to_publish_it_is_refused():
    with pytest.raises(ValueError, match="publisher"):
        vllm_trainer.TrainerEngine.trainer_init(vllm_trainer.InitInfo(rank=0), client=Client())


class Replicate:
    """As vLLM 0.33 says it."""


def meta(name, whole, owners, mesh, placements):
    return SimpleNamespace(name=name, dtype=whole.dtype, shape=tuple(whole.shape), owners=owners, mesh_shape=mesh, placements=placements)


def pieces_of(whole, mesh, placements):
    """By owner: cut by torch.chunk, the outer axis first."""
    pieces = [whole]
    for size, placement in zip(mesh, placements):
        cut = []
        for piece in pieces:
            if isinstance(placement, Replicate):
                cut += [piece] * size
                continue
            parts = list(piece.chunk(size, placement.dim))
            cut += parts + [piece.narrow(placement.dim, 0, 0)] * (size - len(parts))
        pieces = cut
    return pieces


@pytest.mark.parametrize("seed", range(40))
def test_pieces_lie_where_torch_cuts_them(seed):
    random.seed(seed)
    mesh = tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    whole = torch.arange(math.prod(shape := [random.randint(1, 7) for _ in range(2)])).reshape(shape)
    placements = tuple(random.choice([Replicate(), SimpleNamespace(dim=0), SimpleNamespace(dim=1)]) for _ in mesh)
    owners = tuple(random.sample(range(100), math.prod(mesh)))
    what = meta("w", whole, owners, mesh, placements)
    for owner, piece in zip(owners, pieces_of(whole, mesh, placements)):
        held = vllm_trainer.piece_of(what, SimpleNamespace(name="w", dtype="I64", shape=tuple(shape)), owner)
        assert held.meta.shape == tuple(piece.shape)
        for box in held.boxes:
            block = whole[tuple(slice(at, at + n) for at, n in zip(box.begin, box.extent))]
            assert torch.equal(block, piece)


class Pieces:
    """A source as vLLM 0.33 has them: rank `rank`'s pieces of tensors on a mesh of 2 x 2 and of 2, and one that every rank has."""

    def __init__(self, wholes, rank):
        mesh = (2, 2)
        layouts = {"cut": ((0, 1, 2, 3), mesh, (Replicate(), SimpleNamespace(dim=0))),
                   "twice": ((3, 2, 1, 0), mesh, (SimpleNamespace(dim=1), SimpleNamespace(dim=0))),
                   "few": ((1, 3), (2,), (SimpleNamespace(dim=0),)), "all": (None, None, None)}
        self.metadata = [meta(name, wholes[name], *layout) for name, layout in layouts.items()]
        self._wholes, self._rank = wholes, rank

    def implements_iter_local(self):
        return True

    def iter_local(self):
        for what in self.metadata:
            whole = self._wholes[what.name]
            if what.owners is None:
                yield what.name, whole
            elif self._rank in what.owners:
                yield what.name, pieces_of(whole, what.mesh_shape, what.placements)[what.owners.index(self._rank)].contiguous()


def test_every_rank_publishes_the_pieces_that_it_owns(stack):
    wholes = {"cut": torch.randn(7, 5), "twice": torch.randn(6, 9), "few": torch.randn(3), "all": torch.randn(4, 4)}
    follower = {name: torch.zeros_like(whole) for name, whole in wholes.items()}

    def engine(rank):
        return vllm_trainer.TrainerEngine.trainer_init(
            vllm_trainer.InitInfo(rank=rank, world_size=4, agent=stack.agent), client=Client(), source=Pieces(wholes, rank))

    with ThreadPoolExecutor(4) as pool, contextlib.ExitStack() as closing:
        engines = list(pool.map(engine, range(4)))
        for each in engines:
            closing.callback(each.shutdown)
        receiver = stack.add(ww_torch.Receiver(follower, group="follower", agent=stack.agent))
        for version in (1, 2):
            for whole in wholes.values():
                whole.normal_()
            sent = [pool.submit(each.send_weights) for each in engines]
            assert receiver.receive(30).version == version
            for each in sent:
                each.result(30)
            assert all(torch.equal(follower[name], whole) for name, whole in wholes.items())


def test_a_piece_of_another_shape_is_refused_by_name(stack):
    source = Pieces({"cut": torch.randn(7, 5), "twice": torch.randn(6, 9), "few": torch.randn(3), "all": torch.randn(4, 4)}, 0)
    source.metadata[0].placements = (Replicate(), SimpleNamespace(dim=1))
    source.iter_local = lambda: iter([("cut", torch.randn(4, 5))])
    with pytest.raises(RefusedError, match=r"iter_local yields .*\(4, 5\).*rank 0 owns .*\(7, 3\)"):
        vllm_trainer.TrainerEngine.trainer_init(vllm_trainer.InitInfo(rank=0, world_size=1, agent=stack.agent), client=Client(),
                                                source=source)
