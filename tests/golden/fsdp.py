#!/usr/bin/env python3
"""Records what torch itself makes of small models: FSDP2, HSDP, tensor parallelism, FSDP1.

    python tests/golden/fsdp.py        writes tests/data/fsdp/{shards,orders}.json

Needs torch and transformers 4.57 (recorded in the files), not the project. Every rank of a world is run in
turn in this process, with torch's fake process group: sharding at construction needs no communication.
Parameters hold their own row-major element numbers, so that what a rank holds says where it comes from.
"""

import json
import pathlib

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

OUT = pathlib.Path(__file__).resolve().parents[1] / "data/fsdp"

DENSE = dict(model_type="qwen2", vocab_size=37, hidden_size=12, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=3, intermediate_size=20, tie_word_embeddings=False)
TIED = dict(DENSE, model_type="qwen3", tie_word_embeddings=True)
MOE = dict(model_type="qwen3_moe", vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
           num_key_value_heads=1, head_dim=4, intermediate_size=12, moe_intermediate_size=5, num_experts=3,
           num_experts_per_tok=1, mlp_only_layers=[1], decoder_sparse_step=1, tie_word_embeddings=False)
LATENT = dict(model_type="deepseek_v3", vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=2, intermediate_size=12, moe_intermediate_size=6, n_routed_experts=4, n_group=1,
              topk_group=1, num_experts_per_tok=1, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=6,
              kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, num_nextn_predict_layers=0,
              tie_word_embeddings=False)
OSS = dict(model_type="gpt_oss", vocab_size=19, hidden_size=6, num_hidden_layers=1, num_attention_heads=4,
           num_key_value_heads=2, head_dim=3, intermediate_size=5, num_local_experts=3, num_experts_per_tok=1,
           attention_bias=True, layer_types=["full_attention"], tie_word_embeddings=False)

# (config, spec): the spec is the scheme's; this file reads it by itself.
CASES = [
    (DENSE, "fsdp:dp4"), (DENSE, "fsdp:dp3,hsdp2"), (DENSE, "fsdp:dp5"), (DENSE, "fsdp:dp50"),
    (DENSE, "fsdp:dp4,dim=1"), (DENSE, "fsdp:dp2,tp2"), (DENSE, "fsdp:dp3,tp2"), (DENSE, "fsdp:dp2,hsdp2,tp3"),
    (DENSE, "fsdp:dp4,tp5"), (TIED, "fsdp:dp3,tp2"), (LATENT, "fsdp:dp3,mtp=none"), (OSS, "fsdp:dp2"),
    (DENSE, "fsdp:dp3,kind=fsdp1"), (TIED, "fsdp:dp4,kind=fsdp1"), (MOE, "fsdp:dp3,kind=fsdp1"),
    (LATENT, "fsdp:dp3,kind=fsdp1"), (OSS, "fsdp:dp4,kind=fsdp1"), (DENSE, "fsdp:dp3,kind=fsdp1-orig"),
    (MOE, "fsdp:dp7,kind=fsdp1-orig"), (LATENT, "fsdp:dp2,kind=fsdp1-orig"), (OSS, "fsdp:dp5,kind=fsdp1-orig"),
    (DENSE, "fsdp:dp1,kind=fsdp1-orig"), (DENSE, "fsdp:dp3,hsdp2,kind=fsdp1"),
]
# Placements that FSDP2 does not make itself: distribute_tensor on a mesh of one dimension.
DTENSOR_CASES = [(DENSE, "fsdp:dp5,dim=1"), (OSS, "fsdp:dp4,dim=2"), (DENSE, "fsdp:dp50,dim=1")]

COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
ROW = ("o_proj", "down_proj")


def read_spec(text):
    words = {"dp": 1, "hsdp": 1, "tp": 1, "kind": "fsdp2", "dim": "0"}
    for word in text.split(":")[1].split(","):
        key, equals, value = word.partition("=")
        if equals:
            words[key] = value
        else:
            key = word.rstrip("0123456789")
            words[key] = int(word[len(key):])
    return words


def build(config):
    """The model on the CPU; each parameter holds its row-major element numbers."""
    values = dict(config)
    cls = transformers.CONFIG_MAPPING[values.pop("model_type")]
    model = transformers.AutoModelForCausalLM.from_config(cls(**values)).float()
    for parameter in model.parameters():
        parameter.data = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
    return model


def runs(values):
    """[[first, count], …] of consecutive numbers."""
    out = []
    for value in values:
        value = int(value)
        if out and value == out[-1][0] + out[-1][1]:
            out[-1][1] += 1
        else:
            out.append([value, 1])
    return out


def tensor_parallel(model, mesh):
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        for key, parameter in list(module.named_parameters(recurse=False)):
            placement = Replicate()
            if leaf in COLUMN:
                placement = Shard(0)
            elif leaf in ROW and parameter.dim() == 2:
                placement = Shard(1)
            whole = parameter.data
            tensor = distribute_tensor(whole, mesh, [placement], src_data_rank=None)
            module.register_parameter(key, torch.nn.Parameter(tensor))
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


MISMATCHES = set()


def check_offsets(spec, words, name, parameter):
    """Does torch's own description of the placement agree with what the rank holds?

    Its public form asks the mesh, which is that of the first rank that ran in this process.
    """
    rank = dist.get_rank()
    at = {"tp": rank % words["tp"], "shard": rank // words["tp"] % words["dp"],
          "replicate": rank // words["tp"] // words["dp"]}
    mesh = parameter.device_mesh
    shape, offset = _compute_local_shape_and_global_offset(
        parameter.shape, mesh.shape, lambda dim: at[mesh.mesh_dim_names[dim]], parameter.placements)
    local = parameter.to_local().detach()
    block = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
    for dim, (begin, size) in enumerate(zip(offset, shape)):
        block = block.narrow(dim, min(begin, block.shape[dim] - size), size)
    if tuple(shape) != tuple(local.shape) or not torch.equal(block, local):
        MISMATCHES.add(f"{spec} {name} {parameter.placements} says {tuple(shape)} at {tuple(offset)}, "
                       f"holds {tuple(local.shape)} from {runs(local.flatten())[:1]}")


def held_fsdp2(config, spec, words):
    model = build(config)
    mesh = init_device_mesh("cpu", (words["hsdp"], words["dp"], words["tp"]),
                            mesh_dim_names=("replicate", "shard", "tp"))
    if words["tp"] > 1:
        tensor_parallel(model, mesh["tp"])
    data = mesh["replicate", "shard"] if words["hsdp"] > 1 else mesh["shard"]
    dim = int(words["dim"])
    placement = (lambda p: Shard(dim if p.dim() > dim else 0)) if dim else None
    for layer in model.model.layers:
        fully_shard(layer, mesh=data, shard_placement_fn=placement)
    fully_shard(model, mesh=data, shard_placement_fn=placement)
    held = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        local = parameter.to_local().detach()
        held[name] = [list(local.shape), runs(local.flatten())]
        check_offsets(spec, words, name, parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            held[name] = [list(buffer.shape), [[0, buffer.numel()]]]
    return held


def held_dtensor(config, words):
    mesh = init_device_mesh("cpu", (words["dp"],))
    dim = int(words["dim"])
    held = {}
    for name, parameter in build(config).named_parameters():
        placement = Shard(dim if parameter.dim() > dim else 0)
        local = distribute_tensor(parameter.data, mesh, [placement], src_data_rank=None).to_local()
        held[name] = [list(local.shape), runs(local.flatten())]
    return held


def held_fsdp1(config, words):
    model = build(config)
    # One number for each element of the model: elements of flat parameters have no name.
    numbers, first = {}, 1
    for name, parameter in model.named_parameters():
        parameter.data += first
        numbers[name] = [first, parameter.numel()]
        first += parameter.numel()
    assert first < 1 << 24
    kinds = {type(layer) for layer in model.model.layers}
    options = dict(device_id=torch.device("cpu"), use_orig_params=words["kind"] == "fsdp1-orig")
    if words["hsdp"] > 1:
        options["sharding_strategy"] = torch.distributed.fsdp.ShardingStrategy.HYBRID_SHARD
        options["device_mesh"] = init_device_mesh("cpu", (words["hsdp"], words["dp"]))
    policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy(kinds)
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)
    held = {}
    for name, parameter in model.named_parameters():
        name = name.replace("_fsdp_wrapped_module.", "")
        held[name] = [list(parameter.shape), runs(parameter.detach().flatten())]
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            held[name.replace("_fsdp_wrapped_module.", "")] = [list(buffer.shape), []]
    return held, numbers


def record(config, spec, dtensor):
    words = read_spec(spec)
    world = words["dp"] * words["hsdp"] * words["tp"]
    case = {"config": config, "spec": spec, "ranks": []}
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        if dtensor:
            held = held_dtensor(config, words)
        elif words["kind"] == "fsdp2":
            held = held_fsdp2(config, spec, words)
        else:
            held, case["numbers"] = held_fsdp1(config, words)
        dist.destroy_process_group()
        case["ranks"].append(held)
    return case


def order_of(config):
    return [name for name, _ in build(config).named_parameters()]


BASE = dict(vocab_size=19, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            head_dim=4, intermediate_size=12, tie_word_embeddings=False)
OF_EXPERTS = dict(BASE, moe_intermediate_size=6, num_experts_per_tok=1)
ORDERS = [
    DENSE, TIED, MOE, LATENT, OSS,
    dict(BASE, model_type="llama", attention_bias=True, mlp_bias=True),
    dict(BASE, model_type="mistral"),
    dict(BASE, model_type="gemma", tie_word_embeddings=True),
    dict(BASE, model_type="gemma2", tie_word_embeddings=True),
    dict(BASE, model_type="gemma3_text", tie_word_embeddings=True),
    dict(BASE, model_type="mixtral", num_local_experts=3, num_experts_per_tok=1),
    dict(OF_EXPERTS, model_type="qwen2_moe", num_experts=3, shared_expert_intermediate_size=10),
    dict(OF_EXPERTS, model_type="glm4_moe", n_routed_experts=3, n_shared_experts=1, first_k_dense_replace=1,
         n_group=1, topk_group=1, use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=0),
    dict({**LATENT, "model_type": "deepseek_v2", "moe_layer_freq": 1, "topk_method": "greedy"}, q_lora_rank=None),
]


def write(name, content):
    content = {"torch": torch.__version__, "transformers": transformers.__version__, **content}
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in content.pop("cases"))
    head = json.dumps(content)[:-1]
    (OUT / name).write_text(f'{head}, "cases": [\n{rows}\n]}}\n')


def main():
    OUT.mkdir(exist_ok=True)
    shards = [record(config, spec, False) for config, spec in CASES]
    shards += [record(config, spec, True) for config, spec in DTENSOR_CASES]
    write("shards.json", {"cases": shards})
    write("orders.json", {"cases": [{"config": config, "order": order_of(config)} for config in ORDERS]})
    for line in sorted(MISMATCHES):
        print(line)


main()
