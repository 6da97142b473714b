"""What the ranks of the torch and FSDP tests do. Oracle: torch's own gather of the whole tensors."""

from __future__ import annotations

import pathlib

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

# Sizes that no world divides: 37 rows on 2, 3 or 4 ranks leave short shards.
TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6,
            num_key_value_heads=2, max_position_embeddings=64)


def make_checkpoint(folder: pathlib.Path, model_type: str = "qwen2", dtype=torch.float32, **changes) -> pathlib.Path:
    """A tiny Hugging Face checkpoint with random weights, biases and norms included."""
    torch.manual_seed(7)
    config = transformers.CONFIG_MAPPING[model_type](**{**TINY, "tie_word_embeddings": False, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
    model.to(dtype).save_pretrained(folder)
    return folder


def load(folder: pathlib.Path, dtype=torch.float32) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, version: int) -> None:
    """One real training step on random tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(version)
    tokens = torch.randint(0, 37, (2, 8), generator=generator)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_full(state: dict[str, torch.Tensor], tied: bool, path: pathlib.Path) -> None:
    state = {name: tensor.contiguous() for name, tensor in state.items() if not (tied and name == "lm_head.weight")}
    save_file(state, str(path))


def gather_dtensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
            for name, t in model.named_parameters()}


def gather_fsdp1(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT,
                                                  FullStateDictConfig(rank0_only=False)):
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def shard_fsdp2(model, world_size, replicas=1, dim=0):
    shape = (replicas, world_size // replicas) if replicas > 1 else (world_size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
    placement = (lambda p: Shard(dim if p.dim() > dim else 0)) if dim else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=placement)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement)


def shard_tp_fsdp2(model, world_size):
    """Tensor parallelism by 2 (rows and columns), then FSDP2 over what remains: strided shards."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    plan = {name: RowwiseParallel() if name in ("o_proj", "down_proj") else ColwiseParallel()
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], {f"*.{name}": how for name, how in plan.items()})
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def shard_fsdp1(model, world_size, use_orig_params, replicas=1):
    options = {}
    if replicas > 1:
        options = dict(sharding_strategy=torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD,
                       device_mesh=init_device_mesh("cpu", (replicas, world_size // replicas)))
    policy = ModuleWrapPolicy({type(model.model.layers[0])})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"),
                                    use_orig_params=use_orig_params, **options)


SHARDINGS = {
    "fsdp2": lambda model, world: shard_fsdp2(model, world),
    "fsdp2-dim1": lambda model, world: shard_fsdp2(model, world, dim=1),
    "hsdp": lambda model, world: shard_fsdp2(model, world, replicas=2),
    "fsdp2-tp": lambda model, world: shard_tp_fsdp2(model, world),
    "fsdp1": lambda model, world: shard_fsdp1(model, world, False),
    "fsdp1-orig": lambda model, world: shard_fsdp1(model, world, True),
    "hsdp1": lambda model, world: shard_fsdp1(model, world, False, replicas=2),
}


def train_sharded(rank: int, world_size: int, agent: str, checkpoint: str, out: str, kind: str, dtype, versions: int):
    """Loads, shards, trains and publishes `versions` versions; rank 0 leaves what torch gathers in <out>/v<n>."""
    import weightwire.fsdp
    whole = load(pathlib.Path(checkpoint), dtype)
    tied = whole.config.tie_word_embeddings
    model = SHARDINGS[kind](whole, world_size)
    gather = gather_fsdp1 if isinstance(model, FullyShardedDataParallel) else gather_dtensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with weightwire.fsdp.Publisher(model, agent=agent) as publisher:
        for version in range(1, versions + 1):
            if version > 1:
                step(model, optimizer, version)
            state = gather(model)
            if rank == 0:
                save_full(state, tied, pathlib.Path(out) / f"v{version}.safetensors")
            dist.barrier()
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def train_replicated(rank: int, world_size: int, agent: str, checkpoint: str, out: str, versions: int):
    """A DDP trainer: every rank holds everything, all publish, none gathers."""
    import weightwire.torch
    model = load(pathlib.Path(checkpoint))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.05)
    with weightwire.torch.Publisher(ddp, agent=agent) as publisher:
        for version in range(1, versions + 1):
            step(ddp, optimizer, version)
            if rank == 0:
                save_full(dict(model.named_parameters()), False, pathlib.Path(out) / f"v{version}.safetensors")
            dist.barrier()
            publisher.publish(version).wait_released(timeout=30)
            dist.barrier()


def receive_apart(rank: int, world_size: int, agent: str, out: str):
    """Two ranks receive; the second one's offer comes after its timeout."""
    import json

    import weightwire.torch
    target = {"a": torch.zeros(4)}
    with weightwire.torch.Receiver(target, group="follower", agent=agent) as receiver:
        wait, late = receiver._subscriber.wait_offer, [rank == 1]
        receiver._subscriber.wait_offer = lambda timeout: None if late.pop(0) else wait(timeout)
        late += [False] * 9
        offers = [receiver.receive(timeout=60) for _ in range(2)]
        told = {"versions": [offer and offer.version for offer in offers], "values": target["a"].tolist()}
        (pathlib.Path(out) / f"{rank}.json").write_text(json.dumps(told))
        dist.barrier()  # both leave together: a rank alone is a lost one


def receive_alone(rank: int, world_size: int, agent: str, out: str):
    """The first rank receives, the second one does something else."""
    import weightwire.torch
    with weightwire.torch.Receiver({"a": torch.zeros(4)}, group="follower", agent=agent) as receiver:
        if rank == 0:
            receiver.together_seconds = 1.0
            try:
                receiver.receive(timeout=0.5)
            except weightwire.AbortedError as error:
                (pathlib.Path(out) / "error").write_text(str(error))
        dist.barrier()


def receive_freed(rank: int, world_size: int, agent: str, out: str):
    """The second rank's parameter is away when the version comes, and is back at the next call."""
    import json

    import weightwire.torch
    target = {"a": torch.zeros(4)}
    with weightwire.torch.Receiver(target, group="follower", agent=agent) as receiver:
        if rank == 1:
            target["a"].untyped_storage().resize_(0)
        try:
            receiver.receive(timeout=60)
            said = ""
        except weightwire.WeightwireError as error:
            said = f"{type(error).__name__}: {error}"
        if rank == 1:
            target["a"].untyped_storage().resize_(16)
        offer = receiver.receive(timeout=60)
        (pathlib.Path(out) / f"{rank}.json").write_text(json.dumps([said, offer and offer.version, target["a"].tolist()]))
        dist.barrier()


def parts_under_one_name(rank: int, world_size: int, agent: str, how: str, adapter: str):
    """Expert parallelism as plain tensors: every rank has its own half under the same names. Refused on every rank."""
    import weightwire.fsdp
    import weightwire.torch
    from weightwire import RefusedError
    whole = torch.arange(1, 25, dtype=torch.float32).view(4, 2, 3)
    mine = whole[rank * 2:rank * 2 + 2].clone()
    model = torch.nn.Module()
    model.norm = torch.nn.Parameter(torch.ones(3))
    if how == "stack":
        model.experts = torch.nn.Parameter(mine)
    else:
        for number in range(2):
            model.register_parameter(f"experts_{number}", torch.nn.Parameter(mine[number].clone()))
    parts = [p for name, p in model.named_parameters() if "experts" in name]
    begin_alike = how == "alike"
    if begin_alike:
        with torch.no_grad():
            for p in parts:
                p.fill_(1.0)
    kind = weightwire.fsdp.Publisher if adapter == "fsdp" else weightwire.torch.Publisher
    try:
        with kind(model, agent=agent) as publisher:
            assert begin_alike, "it was opened"
            publisher.publish(1).wait_released(timeout=30)
            assert all(p.untyped_storage().resizable() for p in model.parameters())  # offloading takes it away
            with torch.no_grad():
                parts[0].add_(rank)
            publisher.publish(2)
        raise AssertionError("a mixture was published")
    except RefusedError as error:
        assert "ranks 0 and 1 hold different bytes under this name" in str(error) and "experts" in error.tensor, error


def one_cannot_read(rank: int, world_size: int, agent: str):
    """What is wrong on one rank is told on all, and none waits for it."""
    import weightwire.torch
    from weightwire import RefusedError
    model = torch.nn.Linear(3, 2)
    if rank == 1:
        model.weight.data = model.weight.data.to(torch.complex64)
    try:
        weightwire.torch.Publisher(model, agent=agent)
        raise AssertionError("it was opened")
    except RefusedError as error:
        assert "complex64" in str(error) and "weight" in str(error) and ("rank 1 cannot publish" in str(error)) == (rank == 0), error


class Wrapper(torch.Tensor):
    """A quantized parameter as libraries wrap them: says bf16, holds something else."""

    @staticmethod
    def __new__(cls, data, plain):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.bfloat16, device=data.device)

    def __init__(self, data, plain):
        self._data, self._plain = data, plain

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return Wrapper(args[0]._data, args[0]._plain)
        if not next(a for a in args if isinstance(a, Wrapper))._plain:
            raise NotImplementedError(f"{function} is not there")
        return function(*[a._data.to(torch.bfloat16) if isinstance(a, Wrapper) else a for a in args], **(kwargs or {}))


def wrapped_parameter(rank: int, world_size: int, agent: str, out: str, plain: bool):
    """One that can be read is published as what it reads as; the other is named."""
    import weightwire.torch
    from weightwire import RefusedError
    data = torch.arange(12, dtype=torch.float32).view(3, 4)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(Wrapper(data, plain), requires_grad=False)
    save_file({"w": data.to(torch.bfloat16)}, f"{out}/v1.safetensors")
    with weightwire.torch.Publisher(model, agent=agent) as publisher:
        try:
            publisher.publish(1).wait_released(timeout=30)
            assert plain
        except RefusedError as error:
            assert not plain and error.tensor == "w" and "a Wrapper cannot be copied as BF16" in str(error), error
