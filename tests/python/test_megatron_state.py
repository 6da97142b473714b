"""The spec that is derived from what Megatron's ranks say of themselves, without Megatron."""

import dataclasses

import pytest

from weightwire import RefusedError
from weightwire.megatron_state import RankState, spec_of

DENSE = frozenset({"decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.input_layernorm.weight"})
MOE = frozenset({"decoder.layers.0.mlp.experts.linear_fc1.weight0"})


def world(*, tp=1, cp=1, dp=1, pp=1, ep=1, etp=1, order="tp-cp-dp-pp", layers=4, names=DENSE) -> list[RankState]:
    """Ranks as Megatron numbers them, from its definition: `order` from the fastest dimension to the slowest."""
    sizes = dict(tp=tp, cp=cp, dp=dp, pp=pp, ep=ep, etp=etp)
    states = []
    for rank in range(tp * cp * dp * pp):
        place, rest = {}, rank
        for dim in order.split("-"):
            place[dim], rest = rest % sizes[dim], rest // sizes[dim]
        r = place["tp"] + tp * (place["cp"] + cp * place["dp"])
        place.update(etp=r % etp, ep=r // etp % ep)
        each = layers // pp
        states.append(RankState(rank, sizes, place, (tuple(range(place["pp"] * each + 1, (place["pp"] + 1) * each + 1)),),
                                names, 256 if place["pp"] == 0 else 0))
    return states


@pytest.mark.parametrize("sizes,spec", [
    (dict(tp=2, pp=2), "megatron:tp2,pp2,vocab_pad=256"),
    (dict(tp=2, cp=2, dp=3), "megatron:tp2,pp1,cp2,dp3,vocab_pad=256"),
    (dict(dp=2, pp=2, order="tp-cp-pp-dp"), "megatron:tp1,pp2,dp2,order=tp-cp-ep-pp-dp,vocab_pad=256"),
    (dict(dp=1, pp=2, order="tp-cp-pp-dp"), "megatron:tp1,pp2,vocab_pad=256"),
    (dict(tp=2, dp=2, ep=2, etp=2, names=MOE), "megatron:tp2,pp1,dp2,ep2,etp2,experts=te,vocab_pad=256"),
])
def test_the_spec_says_how_the_world_is_parallel(sizes, spec):
    assert spec_of(world(**sizes), {}) == spec


@pytest.mark.parametrize("name,words", [
    ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "spec=te"),  # latent attention with an indexer has no norm of q there
    ("decoder.layers.0.self_attention.core_attention.indexer.linear_wq_b.weight", "spec=te"),
    ("decoder.layers.0.self_attention.in_proj.layer_norm_weight", "spec=te"),
    ("decoder.layers.0.mixer.in_proj.layer_norm_weight", "spec=te"),
    ("decoder.layers.0.mixer.conv1d_weight", "conv=flat"),
    ("decoder.layers.0.mixer.conv1d.weight", ""),
    ("decoder.layers.0.self_attention.out_norm.weight", "out_norm=plain"),
    ("decoder.final_norm.weight", "model=hybrid"),
])
def test_names_say_how_a_model_was_built(name, words):
    spec = spec_of(world(names=DENSE | {name}), {"num_hidden_layers": 2})
    assert spec == ",".join(filter(None, ["megatron:tp1,pp1", words, "vocab_pad=256"]))


def test_a_hybrid_model_by_its_own_configuration_has_no_halves():
    assert "model=hybrid" not in spec_of(world(names=DENSE | {"decoder.final_norm.weight"}), {"num_hidden_layers": 4})
    assert "model=hybrid" in spec_of(world(names=DENSE | {"decoder.final_norm.weight"}),
                                     {"text_config": {"num_hidden_layers": 2}})


def test_an_unknown_rank_order_is_refused_with_the_rank_and_where_it_should_be():
    with pytest.raises(RefusedError) as refused:
        spec_of(world(tp=2, pp=2, order="pp-tp-cp-dp"), {})
    assert refused.value.rank == "1" and "rank 2" in str(refused.value) and "tp-cp-ep-dp-pp" in refused.value.remedy


def test_experts_elsewhere_than_the_scheme_has_them_are_refused():
    states = world(tp=2, dp=2, ep=4, etp=1, names=MOE)
    assert "ep4" in spec_of(states, {})
    states[1] = dataclasses.replace(states[1], place={**states[1].place, "ep": 2})
    with pytest.raises(RefusedError, match="rank 1: holds experts as etp 0, ep 2.*etp 0, ep 1"):
        spec_of(states, {})


def test_uneven_stages_are_listed_chunk_by_chunk():
    states = world(pp=2)
    states[0] = dataclasses.replace(states[0], layers=((1,),))
    states[1] = dataclasses.replace(states[1], layers=((2, 3, 4),))
    assert spec_of(states, {}) == "megatron:tp1,pp2,layers=1-3,vocab_pad=256"
    interleaved = [dataclasses.replace(states[0], layers=((1,), (4, 5))), dataclasses.replace(states[1], layers=((2, 3), (6,)))]
    assert spec_of(interleaved, {}) == "megatron:tp1,pp2,vpp2,layers=1-2-2-1,vocab_pad=256"


def test_layers_that_do_not_follow_each_other_are_refused():
    states = world(pp=2)
    states[1] = dataclasses.replace(states[1], layers=((4, 3),))
    with pytest.raises(RefusedError, match=r"\[1, 2, 4, 3\]"):
        spec_of(states, {})


def test_ranks_of_a_stage_must_agree():
    states = world(tp=2)
    states[1] = dataclasses.replace(states[1], layers=((1, 2, 3),))
    with pytest.raises(RefusedError, match="rank 1: chunk 0"):
        spec_of(states, {})
    with pytest.raises(RefusedError, match="make 2 ranks, but torch.distributed has 1"):
        spec_of(world(tp=2)[:1], {})


def test_mtp_layers_that_the_trainer_does_not_build_are_left_out():
    assert spec_of(world(), {"num_nextn_predict_layers": 1}).endswith("mtp=none")
    with_mtp = world(names=DENSE | {"mtp.layers.0.enorm.weight"})
    assert "mtp" not in spec_of(with_mtp, {"num_nextn_predict_layers": 1})
    for said in ("qwen3_next", "qwen3_5_text", "nemotron_h"):
        assert spec_of(with_mtp, {"model_type": said, "num_nextn_predict_layers": 1}).endswith("mtp=single")
        assert "mtp=single" not in spec_of(world(), {"model_type": said})
    assert "mtp" not in spec_of(with_mtp, {"model_type": "qwen3_5_moe_text"})  # which of two forms: said by the user


def test_transformer_engine_names_are_recognised():
    names = frozenset({"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"})
    assert "spec=te" in spec_of(world(names=names), {})
