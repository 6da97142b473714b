"""weightwire.peft against PEFT's own merge of a copy: bit for bit, and the model stays as it was."""

import copy

import numpy as np
import peft
import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

import weightwire.peft
import weightwire.torch
from weightwire import RefusedError, Subscriber, TensorMeta, boxes

TINY = dict(vocab_size=37, hidden_size=24, intermediate_size=52, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
            max_position_embeddings=64)


def build(dtype=torch.bfloat16, tie=False, **lora) -> torch.nn.Module:
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**TINY, tie_word_embeddings=tie)).to(dtype)
    return adapted(model, **lora)


def adapted(model, **lora) -> torch.nn.Module:
    options = {**dict(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False), **lora}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    shake(model)
    return model


def shake(model) -> None:
    """As a training step: what may be trained is something else."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.1)


def merged(model) -> dict[str, torch.Tensor]:
    """PEFT's own, of a copy."""
    whole = copy.deepcopy(model).merge_and_unload()
    return {name: p.detach().contiguous() for name, p in whole.named_parameters()}


def engine(daemon, tensors) -> Subscriber:
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32"}
    metas = {name: TensorMeta(name, kinds[t.dtype], tuple(t.shape)) for name, t in tensors.items()}
    one = Subscriber(group="engine-a", rank=0, world_size=1, agent=daemon.agent_socket)
    one.bind_submission(boxes.submission(metas, [boxes.whole(meta) for meta in metas.values()]))
    return one


def check_published(daemon, model, versions=2, change=shake, **options) -> None:
    with engine(daemon, merged(model)) as receiver, \
            weightwire.peft.Publisher(model, rank=0, world_size=1, agent=daemon.agent_socket, **options) as publisher:
        for version in range(1, versions + 1):
            if version > 1:
                change(model)
            before = {name: t.detach().clone() for name, t in model.state_dict().items()}
            want = merged(model)
            publisher.publish(version).wait_released(30)
            offer = receiver.wait_offer(30)
            got = receiver.flip(offer)
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                bits = tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).numpy()
                assert np.array_equal(got[name].view(bits.dtype), bits), name
            receiver.acknowledge(offer)
            now = model.state_dict()
            assert now.keys() == before.keys() and all(torch.equal(now[name], t) for name, t in before.items())
            assert not [m for m in model.modules() if getattr(m, "merged_adapters", [])]


@pytest.mark.parametrize("lora", [
    {}, dict(use_rslora=True, lora_alpha=7), dict(use_dora=True), dict(lora_bias=True, target_modules=["q_proj", "v_proj"]),
    dict(modules_to_save=["lm_head"]), dict(target_modules=["embed_tokens", "q_proj"]), dict(fan_in_fan_out=False, r=1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_versions_are_what_a_merge_would_give(daemon, lora, dtype):
    check_published(daemon, build(dtype, **lora))


def test_a_model_that_is_held_otherwise_than_saved_is_published_as_it_is_saved(daemon):
    """Experts of a layer in one tensor: transformers saves them one by one."""
    torch.manual_seed(6)
    model = adapted(transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(
        **TINY, head_dim=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False)).to(torch.bfloat16),
        target_modules=["q_proj", "o_proj"])
    whole = copy.deepcopy(model).merge_and_unload()
    want = {name: t.contiguous() for name, t in revert_weight_conversion(whole, dict(whole.named_parameters())).items()}
    assert any(".experts.3.gate_proj.weight" in name for name in want)
    with engine(daemon, want) as receiver, \
            weightwire.peft.Publisher(model, rank=0, world_size=1, agent=daemon.agent_socket) as publisher:
        publisher.publish(1).wait_released(30)
        offer = receiver.wait_offer(30)
        got = receiver.flip(offer)
        assert got.keys() == want.keys()
        for name, tensor in want.items():
            assert np.array_equal(got[name].view(np.int16), tensor.detach().view(torch.int16).numpy()), name
        receiver.acknowledge(offer)


def test_the_adapters_in_use_are_merged_and_no_others(daemon):
    model = build()
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj", "q_proj"], init_lora_weights=False))
    turns = iter(["second", "default"])
    check_published(daemon, model, 3, lambda m: m.set_adapter(next(turns)))


def test_an_adapter_that_is_switched_off_or_merged_is_not_merged_again(daemon):
    model = build()
    plain = {name: p.detach().clone() for name, p in model.get_base_model().named_parameters() if "base_layer" in name}
    name, base = next(iter(plain.items()))
    wanted = name.replace(".base_layer.", ".")
    with engine(daemon, merged(model)) as receiver, \
            weightwire.peft.Publisher(model, rank=0, world_size=1, agent=daemon.agent_socket) as publisher:
        def published(version: int) -> np.ndarray:
            publisher.publish(version).wait_released(30)
            offer = receiver.wait_offer(30)
            got = receiver.flip(offer)[wanted].copy()
            receiver.acknowledge(offer)
            return got.view(np.int16)
        with model.disable_adapter():
            assert np.array_equal(published(1), base.view(torch.int16).numpy())
        model.merge_adapter()
        held = dict(model.get_base_model().named_parameters())[name].detach().clone()
        assert np.array_equal(published(2), held.view(torch.int16).numpy()) and not torch.equal(held, base)


def test_names_are_those_that_are_given(daemon):
    model = build()
    lives = weightwire.peft.read_merged(model, lambda name: None if name.startswith("lm_head") else "x." + name)[1]
    assert {live.held.meta.name for live in lives} == {"x." + name for name in merged(model) if not name.startswith("lm_head")}


class Attention(torch.nn.Module):
    """Its adapter changes a parameter of a module within the one that it is on."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.MultiheadAttention(8, 2)


class Two(torch.nn.Module):
    """Parameters of one module with an adapter each: one around the other."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Module()
        self.inner.one = torch.nn.Parameter(torch.randn(8, 8))
        self.inner.two = torch.nn.Parameter(torch.randn(8, 8))


@pytest.mark.parametrize("make,said", [
    (lambda: adapted(Attention(), target_modules=["inner"]), "its adapter lies within that of inner"),
    (lambda: adapted(Two(), target_modules=[], target_parameters=["inner.one", "inner.two"]), "its adapter lies within that of inner"),
    (lambda: build(tie=True, modules_to_save=["lm_head"]), "trained apart from the input embeddings"),
    (lambda: peft.get_peft_model(build().unload(), peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")),
     "no layer that could be merged"),
    (lambda: torch.nn.Linear(2, 2), "a Linear is no PeftModel")])
def test_what_cannot_be_merged_is_refused(daemon, make, said):
    with pytest.raises(RefusedError, match=said):
        weightwire.peft.Publisher(make(), rank=0, world_size=1, agent=daemon.agent_socket)


@pytest.mark.parametrize("lora", [{}, dict(modules_to_save=["lm_head"])])
def test_a_peft_model_in_the_adapter_for_plain_ones_is_named(daemon, lora):
    with pytest.raises(RefusedError, match="PEFT model's.*use weightwire.peft"):
        weightwire.torch.Publisher(build(**lora), rank=0, world_size=1, agent=daemon.agent_socket)


def test_adapters_by_themselves_are_tensors_like_others(daemon):
    model = build()

    def adapter():
        return peft.get_peft_model_state_dict(model).items()
    want = {name: t.detach().clone() for name, t in adapter()}
    with engine(daemon, want) as receiver, \
            weightwire.torch.Publisher(adapter, rank=0, world_size=1, agent=daemon.agent_socket) as publisher:
        publisher.publish(1).wait_released(30)
        offer = receiver.wait_offer(30)
        got = receiver.flip(offer)
        assert want and all(np.array_equal(got[n].view(np.int16), t.view(torch.int16).numpy()) for n, t in want.items())
        receiver.acknowledge(offer)
