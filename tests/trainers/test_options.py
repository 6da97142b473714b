"""Options of megatron-core that move, permute, shift or delay parameters: engines have what mcore's own description gives,
or the option is refused by its name."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import mcore
import option_ranks
from conftest import ROOT, read_safetensors
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from weightwire import Publisher, RefusedError, Subscriber, TensorMeta, export_check, megatron, megatron_options
from weightwire.adapter import as_tensor
from weightwire.boxes import Box, Held
from world import World

FIXTURES = ROOT / "tests/data/megatron"


def same(folder, path) -> None:
    """The checkpoint of one file holds the tensors of `path`, bit for bit."""
    got, want = read_safetensors(folder / "model.safetensors"), read_safetensors(path)
    assert got.keys() == want.keys()
    assert [name for name, (_, bits) in want.items() if not np.array_equal(got[name][1], bits)] == []


@pytest.mark.parametrize("model,world_size,sizes,wrapped", [
    ("qwen2", 2, {}, True), ("qwen2", 2, {}, False), ("qwen3_moe", 2, dict(ep=2), True), ("qwen2_tied", 4, dict(tp=2), True)])
def test_parameters_that_wait_for_the_next_forward_pass_are_gathered(daemon, hf_engine, tmp_path, model, world_size, sizes,
                                                                    wrapped):
    folder = FIXTURES / model / "hf"
    engine = hf_engine(folder)
    with World(option_ranks.overlapped, world_size, daemon.agent_socket, str(folder), str(tmp_path), sizes, wrapped) as world:
        for version in range(1, 6):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()
    for version in range(1, 6):
        same(tmp_path / f"step_{version}/hf_model", tmp_path / f"v{version}.safetensors")


@pytest.mark.skipif(not hasattr(LayerWiseDistributedOptimizer, "set_bucket_layerwise_params_list"),
                    reason="this megatron-core's gathers within the step")
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("model,world_size,sizes", [("qwen2", 2, {}), ("qwen3_moe", 4, dict(ep=2))])
def test_whole_parameters_of_other_ranks_are_gathered_too(daemon, hf_engine, tmp_path, model, world_size, sizes, begun):
    folder = FIXTURES / model / "hf"
    engine = hf_engine(folder)
    with World(option_ranks.layer_wise, world_size, daemon.agent_socket, str(folder), str(tmp_path), sizes, begun) as world:
        for version in range(1, 6):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


def test_what_was_offloaded_before_it_was_gathered_is_refused(daemon, hf_engine, tmp_path):
    folder = FIXTURES / "qwen2" / "hf"
    engine = hf_engine(folder)
    with World(option_ranks.offloaded, 2, daemon.agent_socket, str(folder), str(tmp_path)) as world:
        engine.expect(1, tmp_path / "v1.safetensors", world)
        world.join()


@pytest.mark.parametrize("model,world_size,sizes", [("qwen3", 2, dict(tp=2)), ("qwen3_moe", 2, dict(ep=2))])
def test_norms_that_are_held_less_one_arrive_whole(daemon, hf_engine, tmp_path, model, world_size, sizes):
    folder = FIXTURES / model / "hf"
    engine = hf_engine(folder)
    with World(option_ranks.zero_centred, world_size, daemon.agent_socket, str(folder), str(tmp_path), sizes) as world:
        for version in (1, 2):
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


GLM = dict(model_type="glm4_moe", hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
           num_key_value_heads=4, head_dim=16, n_routed_experts=8, n_shared_experts=0, first_k_dense_replace=0,
           moe_intermediate_size=16, vocab_size=250, tie_word_embeddings=False, use_qk_norm=True, attention_bias=False,
           num_nextn_predict_layers=0, dtype="bfloat16", num_experts_per_tok=2, rms_norm_eps=1e-6, max_position_embeddings=128)


@pytest.mark.parametrize("when", ["before", "opened", "later"])
def test_the_routers_correction_is_followed_from_bf16_to_fp32(daemon, tmp_path, when):
    with World(option_ranks.expert_bias, 1, daemon.agent_socket, GLM, str(tmp_path), when) as world, \
            Subscriber(group="hf", rank=0, world_size=1, agent=daemon.agent_socket) as engine:
        engine.bind(GLM, "hf", glm_tensors())
        for version in (1, 2):
            offer = world.next_offer(engine)
            got = engine.flip(offer)
            want = read_safetensors(tmp_path / f"v{version}.safetensors")
            assert len(want) == 2
            for name, (_, bits) in want.items():
                assert np.array_equal(got[name].view(np.uint32), bits), name
            engine.acknowledge(offer)
        world.join()


def glm_tensors() -> list[TensorMeta]:
    """A whole-tensor engine's, with fp32 corrections, as GLM-4.5's checkpoints have them."""
    out = [("model.embed_tokens.weight", (250, 64)), ("model.norm.weight", (64,)), ("lm_head.weight", (250, 64))]
    for at in (f"model.layers.{i}." for i in range(2)):
        out += [(at + "input_layernorm.weight", (64,)), (at + "post_attention_layernorm.weight", (64,)),
                (at + "self_attn.q_proj.weight", (128, 64)), (at + "self_attn.k_proj.weight", (64, 64)),
                (at + "self_attn.v_proj.weight", (64, 64)), (at + "self_attn.o_proj.weight", (64, 128)),
                (at + "self_attn.q_norm.weight", (16,)), (at + "self_attn.k_norm.weight", (16,)),
                (at + "mlp.gate.weight", (8, 64))]
        for e in range(8):
            out += [(f"{at}mlp.experts.{e}.{part}_proj.weight", (16, 64)) for part in ("gate", "up")]
            out.append((f"{at}mlp.experts.{e}.down_proj.weight", (64, 16)))
    return [TensorMeta(name, "BF16", shape) for name, shape in out] + [
        TensorMeta(f"model.layers.{i}.mlp.gate.e_score_correction_bias", "F32", (8,)) for i in range(2)]


@pytest.mark.parametrize("what,said", [
    ("fsdp2", "use-torch-fsdp2"), ("megatron-fsdp", "Megatron-FSDP"), ("quantized", "it is a Quantized"),
    ("moe_single_grouped_weight", "moe_single_grouped_weight"), ("gtp_weight_remat_size", "gtp_weight_remat_size=2"),
    ("use_grouped_gemm_for_dense_mlp", "use_grouped_gemm_for_dense_mlp"),
    ("mtp_use_repeated_layer", "mtp_use_repeated_layer"), ("use_mup", "use_mup"), ("rotary_interleaved", "rotary_interleaved"),
    ("fp8_param", "fp8_param"), ("quantile_balancing", "qb_beta"), ("adapter", "it belongs to an adapter"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "reuse_grad_buf_for_mxfp8_param_ag=True"), ("fp8_param_gather", "fp8_param_gather=True")])
def test_what_is_not_read_is_refused_by_its_name(daemon, what, said):
    with World(option_ranks.refused, 2, daemon.agent_socket, str(FIXTURES / "qwen3" / "hf"), what, said) as world:
        world.join()


def options(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{**dict(gated_linear_unit=True), **changes})


@pytest.mark.parametrize("name,option", [
    ("decoder.layers.0.mlp.experts.linear_fc1.weight3", "moe_mlp_glu_interleave_size"),
    ("decoder.layers.0.mlp.experts.linear_fc1.bias3", "moe_mlp_glu_interleave_size"),
    ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "moe_shared_expert_glu_interleave_size")])
def test_which_rows_alternate(name, option):
    rest = () if "bias" in name else (5,)
    plain = torch.arange(24 * (5 if rest else 1)).view(24, *rest).float()
    held = plain[mcore.interleaved_rows(24, 4)]
    write = megatron_options.transform(options(**{option: 4}), {}, name, held.shape)
    into = torch.empty_like(plain)
    write(into, held)
    assert torch.equal(into, plain) and not torch.equal(held, plain)
    assert megatron_options.transform(options(**{option: 12}), {}, name, held.shape) is None
    ungrouped = megatron_options.transform(options(**{option: 4}, use_grouped_gemm_for_shared_expert=False), {}, name, held.shape)
    assert (ungrouped is None) == ("shared" in option), "mcore 0.19 reads the shared experts' option for its grouped kernel alone"
    with pytest.raises(RefusedError, match=f"{option}=5 does not divide the 12 rows"):
        megatron_options.transform(options(**{option: 5}), {}, name, held.shape)
    other = {"moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size"} - {option}
    assert megatron_options.transform(options(**{other.pop(): 4}), {}, name, held.shape) is None
    assert megatron_options.transform(options(**{option: 4, "gated_linear_unit": False}), {}, name, held.shape) is None


def test_experts_one_by_one_do_not_say_how_their_rows_lie():
    with pytest.raises(RefusedError, match="moe_mlp_glu_interleave_size=4 is set, and these are not grouped experts"):
        megatron_options.transform(options(moe_mlp_glu_interleave_size=4), {},
                                   "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight", (24, 5))


@pytest.mark.parametrize("model_type,centred,said", [
    ("qwen3", True, "shifted"), ("qwen3", False, "as it is"), ("gemma2", True, "as it is"), ("gemma3_text", False, "refused"),
    ("qwen3_next", True, "as it is"), ("qwen3_moe", True, "shifted"), ("nemotron", True, "as it is"), ("nemotron", False, "refused"),
    ("nemotron_h", True, "shifted"), ("nemotron_h", False, "as it is"), ("gemma4", True, "shifted"), ("gemma4", False, "as it is"),
    ("step3p5", True, "as it is"), ("step3p5", False, "refused"), ("of_tomorrow", False, "as it is"),
    ("of_tomorrow", True, "unknown"), ("", True, "unknown")])
@pytest.mark.parametrize("name", ["decoder.layers.0.input_layernorm.weight", "decoder.final_layernorm.weight",
                                  "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
                                  "decoder.layers.0.self_attention.q_layernorm.weight", "mtp.layers.0.enorm.weight",
                                  "decoder.final_norm.weight",
                                  "decoder.layers.0.self_attention.core_attention.indexer.k_norm.weight"])
def test_which_norms_are_shifted(model_type, centred, said, name):
    def transform():
        return megatron_options.transform(options(layernorm_zero_centered_gamma=centred), dict(model_type=model_type), name, (4,))
    if said in ("refused", "unknown"):
        with pytest.raises(RefusedError, match="gamma is not set" if said == "refused" else "it is not known whether") as error:
            transform()
        assert error.value.tensor == name
        return
    write = transform()
    assert (write is None) == (said == "as it is")
    if write is not None:
        into = torch.empty(4, dtype=torch.bfloat16)
        write(into, torch.tensor([-0.5, 0.0, 0.25, 1.0], dtype=torch.bfloat16))
        assert into.tolist() == [0.5, 1.0, 1.25, 2.0]
    assert megatron_options.transform(options(layernorm_zero_centered_gamma=True), {},
                                      "decoder.layers.0.self_attention.linear_qkv.weight", (4, 4)) is None


def test_a_norm_that_is_not_known_is_refused_where_norms_are_held_less_one():
    def transform(name, centred=True, exported=False):
        return megatron_options.transform(options(layernorm_zero_centered_gamma=centred), dict(model_type="qwen3"), name, (4,),
                                          exported=exported)
    name = "decoder.layers.0.self_attention.of_tomorrow.norm.weight"
    with pytest.raises(RefusedError, match="not known whether mcore holds this norm less one") as error:
        transform(name)
    assert error.value.tensor == name
    assert transform(name, centred=False) is None and transform(name, exported=True) is None
    assert transform("decoder.layers.0.mixer.norm.weight") is None, "Mamba's knows no such option"


def test_the_text_part_and_its_fields_say_whether_norms_are_held_less_one():
    def shifts(config, **more):
        return megatron_options.transform(options(layernorm_zero_centered_gamma=True), config, "decoder.final_layernorm.weight", (4,),
                                          **more) is not None
    assert shifts(dict(model_type="minimax_m3", text_config=dict(model_type="minimax_m3", use_gemma_norm=False)))
    assert not shifts(dict(model_type="minimax_m3", text_config=dict(model_type="minimax_m3")))
    assert not shifts(dict(model_type="paligemma", text_config=dict(model_type="gemma")))
    assert shifts(dict(model_type="llava", text_config=dict(model_type="llama")))
    assert not shifts(dict(model_type="of_tomorrow"), exported=True), "as the bridge that made the model maps it"


def test_a_towers_norms_follow_its_own_options():
    def part(centred):
        module = torch.nn.Module()
        module.config = options(layernorm_zero_centered_gamma=centred)
        module.final_layernorm = torch.nn.LayerNorm(4)
        return module

    def shifts(text, tower, name, model_type="qwen3_vl"):
        model = part(text)
        model.language_model, model.vision_model = part(text), part(tower)
        config = dict(model_type=model_type, text_config=dict(model_type=f"{model_type}_text"))
        return megatron_options.transform_exported(model, config, f"{name}.final_layernorm.weight", (4,)) is not None

    assert shifts(True, False, "language_model") and not shifts(True, False, "vision_model")
    assert shifts(True, True, "vision_model") and not shifts(False, False, "vision_model")
    assert not shifts(True, False, "language_model", "qwen3_5") and not shifts(True, False, "vision_model", "qwen3_5")
    with pytest.raises(RefusedError, match="for this part of the model and not for its text part"):
        shifts(False, True, "vision_model")


def test_an_option_that_nobody_has_heard_of_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(megatron_options, "_warned", set())

    @dataclass
    class TransformerConfig:
        hidden_size: int = 8
        rotate_all_experts: bool = False
        fold_norms: int = 0
        shuffle: list = field(default_factory=list)

    TransformerConfig.__module__ = "megatron.core.transformer.transformer_config"

    @dataclass
    class Provider(TransformerConfig):  # of a bridge: its own fields are not mcore's
        seq_length: int = 4096

    model = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "weightwire"):
        for config in (Provider(hidden_size=16, seq_length=5), Provider(rotate_all_experts=True, shuffle=[1]),
                       Provider(rotate_all_experts=True)):
            model.config = config
            megatron_options.check([model], [model])
    assert len(caplog.records) == 1
    assert "rotate_all_experts=True, shuffle=[1]" in caplog.text and "fold_norms" not in caplog.text


def test_an_option_of_the_wrapper_that_nobody_has_heard_of_is_named_once(caplog, monkeypatch):
    monkeypatch.setattr(megatron_options, "_warned", set())

    @dataclass
    class DistributedDataParallelConfig:
        overlap_param_gather: bool = False
        gather_at_the_next_but_one: bool = False

    DistributedDataParallelConfig.__module__ = "megatron.core.distributed.distributed_data_parallel_config"
    model = torch.nn.Linear(2, 2)
    wrapper = torch.nn.Module()
    wrapper.module, wrapper.start_param_sync = model, lambda: None
    with caplog.at_level(logging.WARNING, "weightwire"):
        for config in (DistributedDataParallelConfig(True), DistributedDataParallelConfig(True, True), DistributedDataParallelConfig(True, True)):
            wrapper.ddp_config = config
            megatron_options.check([wrapper], [model])
    assert [record.getMessage().count("gather_at_the_next_but_one=True") for record in caplog.records] == [1]


@pytest.mark.parametrize("model,world_size,sizes", [("qwen2", 4, dict(tp=2, pp=2)), ("qwen3_moe", 2, dict(ep=2)),
                                                    ("qwen3", 1, {})])
def test_a_version_that_differs_from_the_trainers_own_export_is_named_before_it_is_published(daemon, hf_engine, tmp_path, model,
                                                                                             world_size, sizes):
    folder = FIXTURES / model / "hf"
    engine = hf_engine(folder)
    with World(option_ranks.verified, world_size, daemon.agent_socket, str(folder), str(tmp_path), sizes) as world:
        for version in range(1, 7):  # the next after 5 is the one that was right
            engine.expect(version, tmp_path / f"v{version}.safetensors", world)
        world.join()


@pytest.mark.parametrize("change,said", [
    (lambda t: t + 1, "less by one"), (lambda t: t - 1, "more by one"), (lambda t: torch.cat([t[4:], t[:4]]), "halves are swapped"),
    (lambda t: torch.stack([t[:4].view(2, 2, 8), t[4:].view(2, 2, 8)], 1).reshape(8, 8), ""), (lambda t: t.t(), "transposed"),
    (lambda t: t[[3, 1, 0, 2, 7, 6, 5, 4]], "another order"), (lambda t: torch.cat([t[:2], t[2:] * 2]), "a stale shard"),
    (lambda t: t * 2, "other values")])
def test_what_a_difference_looks_like(change, said):
    held = torch.arange(64, dtype=torch.float32).view(8, 8) / 7 + 1
    boxes = [Held(TensorMeta("local", "F32", (8, 8)), [Box("w", (0, 0), (8, 8), 0, (8, 1))])]
    found = export_check.differences(lambda: [("w", change(held))], boxes, {"local": held})["w"]
    assert found.compared == 64 and found.different > 0 and said in found.guess, found
    interleaved = torch.stack([held[:4].view(2, 2, 8), held[4:].view(2, 2, 8)], 1).reshape(8, 8)
    found = export_check.differences(lambda: [("w", held)], boxes, {"local": interleaved})["w"]
    assert "alternate in blocks of 2 rows" in found.guess
    assert not export_check.differences(lambda: [("w", held.clone())], boxes, {"local": held})["w"].different
    wide = torch.arange(8 * 100, dtype=torch.float32).view(8, 100)
    boxes = [Held(TensorMeta("local", "F32", (8, 100)), [Box("w", (0, 0), (8, 100), 0, (100, 1))])]
    found = export_check.differences(lambda: [("w", torch.cat([wide[:, :90], wide[:, 90:] + 5], 1))], boxes, {"local": wide})["w"]
    assert "a stale shard" in found.guess and found.different == 80


def test_a_difference_in_fp8_has_a_guess_too():
    held = (torch.arange(64, dtype=torch.float32).view(8, 8) / 7 + 1).to(torch.float8_e4m3fn)
    boxes = [Held(TensorMeta("local", "F8_E4M3", (8, 8)), [Box("w", (0, 0), (8, 8), 0, (8, 1))])]
    swapped = torch.cat([held.float()[4:], held.float()[:4]]).to(torch.float8_e4m3fn)
    assert "halves are swapped" in export_check.differences(lambda: [("w", swapped)], boxes, {"local": held})["w"].guess
    assert not export_check.differences(lambda: [("w", held.clone())], boxes, {"local": held})["w"].different


def test_parts_in_another_dtype_are_compared_as_both_can_say():
    held = torch.arange(64, dtype=torch.float32).view(8, 8) / 7
    boxes = [Held(TensorMeta("local", "F32", (4, 8)), [Box("w", (2, 0), (4, 8), 0, (8, 1))])]
    local = {"local": held[2:6].contiguous()}
    assert not export_check.differences(lambda: [("w", held.bfloat16())], boxes, local)["w"].different
    assert export_check.differences(lambda: [("w", held.bfloat16() * 2)], boxes, local)["w"].different == 32


def module_of(tensors: dict[str, torch.Tensor], config) -> torch.nn.Module:
    """A model that has parameters of these names."""
    root = torch.nn.Module()
    root.config = config
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        at = root
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, torch.nn.Module())
            at = getattr(at, part)
        if leaf == "expert_bias":
            at.register_buffer(leaf, tensor)
        else:
            at.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def newest(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As megatron-core 0.19 names and keeps them with mla_down_proj_fusion: its attention's shared input norm goes with it."""
    out = {}
    for name, tensor in tensors.items():
        name = name.replace(".transformer_layer.", ".mtp_model_layer.")
        if "linear_kv_down_proj" in name:
            continue
        if "linear_q_down_proj" in name:
            tensor = torch.cat([tensor, tensors[name.replace(".mtp_model_layer.", ".transformer_layer.").replace("q_down", "kv_down")]])
            name = name.replace("linear_q_down", "linear_qkv_down")
        if name.endswith(".input_layernorm.weight"):
            name = name.replace("input_layernorm.weight", "self_attention.linear_qkv_down_proj.layer_norm_weight")
        out[name] = tensor
    return out


@pytest.mark.parametrize("model,case,sizes", [("deepseek_v3", "tp2pp2ep2", "tp2,pp2,ep2,etp1"),
                                              ("deepseek_v3_mtp", "pp2ep2", "pp2,ep2,dp2,first=31")])
def test_latent_attention_and_mtp_arrive_by_the_newest_names(daemon, hf_engine, model, case, sizes):
    """Real dumps of megatron-core with Transformer Engine's names, kept as 0.19 keeps them."""
    base = ROOT / "tests/data/megatron-te" / model
    config = json.loads((base / "hf/config.json").read_text())
    options = SimpleNamespace(gated_linear_unit=True, multi_latent_attention=True, q_lora_rank=config["q_lora_rank"],
                              kv_lora_rank=config["kv_lora_rank"], qk_pos_emb_head_dim=config["qk_rope_head_dim"])
    padded = json.loads((base / case / "rank00.json").read_text())["padded_vocab"] or "none"
    engine, publishers = hf_engine(base / "hf"), []
    paths = sorted((base / case).glob("rank*.safetensors"))
    for rank, path in enumerate(paths):
        held = {name: torch.from_numpy(bits.copy()).view(torch.bfloat16 if bits.dtype == np.uint16 else torch.float32)
                for name, (_, bits) in read_safetensors(path).items()}
        kept = newest(held)
        assert sum("linear_qkv_down_proj.weight" in name for name in kept) > 0 and len(kept) < len(held)
        lives = megatron._read([module_of(kept, options)], config)
        publishers.append(Publisher(rank=rank, world_size=len(paths), agent=daemon.agent_socket))
        arrays = publishers[-1].bind(config, f"megatron:{sizes},spec=te,vocab_pad={padded}", [live.held.meta for live in lives])
        for live in lives:
            if live.tensor.numel():
                meta = live.held.meta
                as_tensor(arrays[meta.name], meta).copy_(live.tensor)
    releases = [publisher.publish(1) for publisher in publishers]
    engine.expect(1, base / "hf/model.safetensors")
    for release in releases:
        release.wait_released(30)
    with ThreadPoolExecutor(len(publishers)) as pool:
        list(pool.map(Publisher.close, publishers))
