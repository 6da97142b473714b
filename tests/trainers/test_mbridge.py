"""Every model type of the installed mbridge whose tiny model builds on a CPU; a process of its own, for the stub."""

import collections
import importlib.metadata
import json
import types

import pytest
import torch
from every_mbridge import check
from weightwire import RefusedError, TensorMeta, mbridge
from world import World, preload

preload("every_mbridge")
VERSION = importlib.metadata.version("mbridge")


#: mbridge's MTP of MiMo gives megatron-core its options as a layer's description; its tied models spoil later ones of their kind.
NOT_BUILT, REFUSED = {"mimo with MTP"}, {"qwen2 after a tied one"}
#: Checkpoints have them, and mbridge's models do not: the gate of Qwen2-MoE's shared expert, the head of SigLIP's tower.
WITHOUT = {"gemma3": "vision_tower.vision_model.head.", "qwen2_moe": ".shared_expert_gate."}


@pytest.mark.parametrize("sizes,only,also", [
    (dict(), (), {}),
    (dict(tp=2, ep=2, etp=1), (), {}),
    (dict(tp=2, pp=2), (), {}),  # experts are cut, too
    (dict(pp=2, vpp=2), ("qwen3_moe",), dict(num_hidden_layers=4)),
], ids=lambda value: ",".join(f"{key}{n}" for key, n in value.items()) if isinstance(value, dict) else None)
def test_what_mbridge_exports_arrives(daemon, tmp_path, sizes, only, also, capsys):
    """Where there are no experts, the ranks of ep are data-parallel."""
    tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
    with World(check, tp * pp, daemon.agent_socket, str(tmp_path / "rows.json"), sizes, only, also) as world:
        world.join(timeout=500)
    rows = json.loads((tmp_path / "rows.json").read_text())
    kinds = collections.defaultdict(list)
    for name, (kind, *_) in rows.items():
        kinds[kind].append(name)
    equal = {name: rows[name][1:] for name in kinds["equal"]}
    with capsys.disabled():
        print(f"\nmbridge {VERSION}, {sizes}: " + ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items())
              + f"; {sum(count for count, *_ in equal.values())} tensors equal")
        for name, (kind, what, *more) in rows.items():
            if kind != "equal" or more[1] != "loaded" or more[2]:
                print(f"  {name}: {kind}: {what if kind != 'equal' else more[1]}"
                      + (f"; mbridge's export joins copies of {len(more[2])} tensors" if kind == "equal" and more[2] else ""))
    assert not kinds["different"]
    assert set(kinds["refused"]) <= REFUSED
    assert set(kinds["not built"]) <= NOT_BUILT | ({"deepseek_v3 with MTP"} if pp > 1 else set())  # 61 layers are not even
    if not only:
        assert len(equal) >= 16 and REFUSED <= set(kinds["refused"]), rows
    # A model that only the export has been seen of has no more names than that.
    assert all(WITHOUT.get(name, "?") in one for name, (_, missing, *_) in equal.items() for one in missing)
    assert {name for name, row in equal.items() if row[3]} == ({name for name in equal if name.startswith("deepseek")} if tp > 1 else set())
    loaded = {name for name, row in equal.items() if row[2] == "loaded"}
    assert set(equal) - loaded <= {"internvl_chat", "mimo", "deepseek_v3 with MTP"} | ({"llama, tied"} if pp > 1 else set())


class Stand:
    """What convert() asks of a bridge, on two tensor-parallel ranks. `hf` gives names and tensors of a parameter."""

    def __init__(self, hf, join=torch.cat, rank=1, size=2, experts=(0, 1)):
        self.mpu = types.SimpleNamespace(tp_rank=rank, tp_size=size, etp_rank=experts[0], etp_size=experts[1], ep_rank=1, ep_size=4)
        self.config = types.SimpleNamespace(num_moe_experts=12)
        self._weight_to_hf_format = lambda name, tensor: hf(tensor)
        self._weight_merge_across_tp = lambda name, shards, parameter: join(shards)

    def convert(self, shape, whole, name="decoder.layers.0.x.weight", marked=True, known=None):
        parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
        parameter.tensor_model_parallel = marked
        metas = {key: TensorMeta(key, "BF16", size) for key, size in whole.items()}
        return mbridge.convert(self, name, parameter, shape, metas, {} if known is None else known)


def moved(found, local, shapes):
    """The checkpoint's tensors of these shapes with what `found` says of a rank's shard `local`; the rest is NaN."""
    out = {}
    for box in [*found.boxes, *(box for its in found.copies.values() for box in its)]:
        tensor = out.setdefault(box.name, torch.full(shapes[box.name], float("nan")))
        part = local.reshape(-1).as_strided(box.extent, box.stride, box.offset)
        tensor[tuple(slice(b, b + e) for b, e in zip(box.begin, box.extent))] = part
    return out


@pytest.mark.parametrize("join", [
    torch.cat,
    lambda shards: torch.cat(shards, dim=1),
    lambda shards: torch.cat([half for k in (0, 1) for half in (shard.chunk(2)[k] for shard in shards)]),  # gate and up
    lambda shards: torch.cat([shard.flip(1) if shard.shape[1] == 9 else shard for shard in shards]),  # looks at its columns' number
    lambda shards: torch.cat(shards).reshape(9, -1),  # fits no other number of columns
], ids=["rows", "columns", "gate and up", "permuted columns", "reshaped"])
def test_a_shard_lies_where_the_export_joins_it(join):
    shards = [torch.randn(8, 9) for _ in range(2)]
    want = join(shards).clone()
    got = {}
    for rank in range(2):
        found = Stand(lambda tensor: (["w"], [tensor]), join, rank).convert((8, 9), {"w": tuple(want.shape)})
        part = moved(found, shards[rank], {"w": want.shape})["w"]
        assert int((~part.isnan()).sum()) == shards[rank].numel()
        got[rank] = part
    assert torch.equal(torch.where(got[0].isnan(), got[1], got[0]), want)


def test_what_another_layer_does_is_taken_where_it_is_so():
    """Heads one after another, alternating ones of two, and those of layer 3 in another order."""
    known, calls = {}, []
    for layer in range(5):
        def hf(tensor):
            calls.append(layer)
            heads = tensor.view(4, 2, 2, 3)
            return [f"layers.{layer}.q", f"layers.{layer}.k"], [part.flip(0) if layer == 3 else part for part in (
                heads[:, 0].reshape(8, 3), heads[:, 1].reshape(8, 3))]
        local = torch.randn(16, 3)
        names, want = hf(local)
        calls.clear()
        found = Stand(hf, size=1).convert((16, 3), dict.fromkeys(names, (8, 3)), f"decoder.layers.{layer}.x.weight", False, known)
        got = moved(found, local, dict.fromkeys(names, (8, 3)))
        assert all(torch.equal(got[name], tensor) for name, tensor in zip(names, want)), layer
        assert len(calls) == 2 or layer in (0, 3, 4), (layer, len(calls))


def test_rows_beyond_the_vocabulary_are_nobodys():
    bridge = Stand(lambda tensor: (["w"], [tensor[:13]]))
    found = bridge.convert((8, 3), {"w": (13, 3)}, "embedding.word_embeddings.weight")
    assert [(box.begin, box.extent) for box in found.boxes] == [((8, 0), (5, 3))]
    with pytest.raises(RefusedError, match="gives 39 of its 48 elements"):  # of anything else they are missing
        bridge.convert((8, 3), {"w": (13, 3)})


def test_tensors_that_are_given_the_same_elements_are_copies():
    local = torch.randn(4, 3)
    found = Stand(lambda tensor: (["w", "again"], [tensor] * 2)).convert((4, 3), {"w": (8, 3), "again": (8, 3)})
    got = moved(found, local, dict.fromkeys(("w", "again"), (8, 3)))
    assert list(found.copies) == ["again"] and all(torch.equal(tensor[4:], local) for tensor in got.values())


def test_copies_that_are_marked_as_shards_are_said_and_published_whole(caplog):
    """Transformer Engine marks MLA's down projections, which every rank has whole, as it marks what is cut."""
    name = "decoder.layers.0.self_attention.linear_q_down_proj.weight"
    found = Stand(lambda tensor: (["w"], [tensor])).convert((4, 3), {"w": (4, 3)}, name)
    assert [(box.begin, box.extent) for box in found.boxes] == [((0, 0), (4, 3))]
    assert "export_weights() is wrong" in caplog.text and "linear_q_down_proj" in caplog.text


def test_what_mbridge_adds_is_added():
    found = Stand(lambda tensor: (["w"], [tensor + 1])).convert((8,), {"w": (8,)}, marked=False)
    assert found.added == 1


def test_what_is_added_while_shards_are_joined_is_refused():
    with pytest.raises(RefusedError, match="it adds a number while it joins shards"):
        Stand(lambda tensor: (["w"], [tensor]), lambda shards: torch.cat(shards) + 1).convert((4, 3), {"w": (8, 3)})


def unknown(tensor):
    raise NotImplementedError("Unsupported parameter name: x")


@pytest.mark.parametrize("hf,said", [
    (lambda tensor: (["w"], [tensor * 2]), "computes it"),
    (lambda tensor: (["w"], [tensor[:3]]), "gives 9 of its 24 elements"),
    (lambda tensor: (["w"], [tensor.t()]), r"the shape \[3, 8\] for w, which is \[8, 3\] in the checkpoint"),
    (lambda tensor: (["other"], [tensor]), "the checkpoint has no such tensor"),
    (unknown, "no conversion of it: NotImplementedError: Unsupported parameter name"),
])
def test_what_does_not_only_move_is_refused_by_name(hf, said):
    with pytest.raises(RefusedError, match=said) as error:
        Stand(hf).convert((4, 3), {"w": (8, 3)})
    assert "decoder.layers.0.x.weight" in str(error.value)


def test_an_expert_has_its_number_in_the_whole_model():
    name = "decoder.layers.3.mlp.experts.linear_fc1.weight"
    assert mbridge.global_name(Stand(None), name + "2") == name + "5"  # of 12 on 4 ranks
    assert mbridge.global_name(Stand(None), "decoder.layers.3.mlp.shared_experts.linear_fc1.weight") == (
        "decoder.layers.3.mlp.shared_experts.linear_fc1.weight")


def test_a_checkpoint_in_fp8_is_what_mbridge_loads_from_it():
    metas = [TensorMeta("w", "F8_E4M3", (256, 256)), TensorMeta("w_scale_inv", "F32", (2, 2)), TensorMeta("norm", "BF16", (256,))]
    assert list(mbridge.dequantized(metas).values()) == [TensorMeta("w", "BF16", (256, 256)), metas[2]]
