"""Quantized models under SGLang's own linear layers and weight loaders, which need no kernel until they are used: what a rank holds after
weightwire is what SGLang's loader makes of the same checkpoint, byte for byte."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.runtime_context import get_parallel
from test_hook import process, update, updater_of  # noqa: F401

import weightwire.sglang
import weightwire.torch
from weightwire import Publisher, RefusedError, Subscriber
from weightwire.adapter import meta_of
from weightwire.checkpoint import quantizing

HIDDEN, HEADS, KV, SIZE, INNER, WORDS = 512, 8, 4, 64, 512, 64
CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
          "num_key_value_heads": KV, "head_dim": SIZE, "intermediate_size": INNER, "vocab_size": WORDS, "torch_dtype": "bfloat16",
          "tie_word_embeddings": False}
READERS = {"fp8-block": Fp8Config, "fp8-block-ue8m0": Fp8Config, "fp8-channel": CompressedTensorsConfig}
LAYER = "model.layers.0."
#: SGLang's layer -> the checkpoint's, with the loader's name for each
FUSED = {"self_attn.qkv_proj": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}, "self_attn.o_proj": {None: "self_attn.o_proj"},
         "mlp.gate_up_proj": {0: "mlp.gate_proj", 1: "mlp.up_proj"}, "mlp.down_proj": {None: "mlp.down_proj"}}


class Model(torch.nn.Module):
    """A decoder layer's linear layers as SGLang's Qwen2 makes them, and its way to load them."""

    def __init__(self, format, config, rank=0, ranks=1):
        super().__init__()
        quantization = READERS[format].from_config(config["quantization_config"])
        with get_parallel().override(tp_size=ranks, tp_rank=rank, tp_group=None):
            def made(kind, name, *sizes):
                return kind(*sizes, bias="qkv" in name, params_dtype=torch.bfloat16, quant_config=quantization, prefix=LAYER + name)
            self.layers = {"self_attn.qkv_proj": made(QKVParallelLinear, "self_attn.qkv_proj", HIDDEN, SIZE, HEADS, KV),
                           "self_attn.o_proj": made(RowParallelLinear, "self_attn.o_proj", HEADS * SIZE, HIDDEN),
                           "mlp.gate_up_proj": made(MergedColumnParallelLinear, "mlp.gate_up_proj", HIDDEN, [INNER, INNER]),
                           "mlp.down_proj": made(RowParallelLinear, "mlp.down_proj", INNER, HIDDEN)}
        self._place = rank, ranks
        for name, layer in self.layers.items():
            self.add_module((LAYER + name).replace(".", "/"), layer)
        self.own = {f"{LAYER}{name}.{key}": parameter for name, layer in self.layers.items() for key, parameter in layer.named_parameters()}
        others = {"model.embed_tokens": WORDS // ranks, "lm_head": WORDS // ranks, "model.norm": 0, f"{LAYER}input_layernorm": 0,
                  f"{LAYER}post_attention_layernorm": 0}
        for name, rows in others.items():
            self.own[f"{name}.weight"] = torch.nn.Parameter(torch.zeros([rows, HIDDEN] if rows else [HIDDEN], dtype=torch.bfloat16))

    def named_parameters(self, *_, **__):
        return iter(self.own.items())

    def load_weights(self, weights):
        rank, ranks = self._place
        places = {LAYER + part: (fused, shard) for fused, parts in FUSED.items() for shard, part in parts.items()}
        with get_parallel().override(tp_size=ranks, tp_rank=rank, tp_group=None):
            for name, tensor in weights:
                module, _, key = name.rpartition(".")
                if module in places:
                    fused, shard = places[module]
                    parameter = self.own[f"{LAYER}{fused}.{key}"]
                    parameter.weight_loader(parameter, tensor, *(() if shard is None else (shard,)))
                else:
                    self.own[name].data.copy_(tensor if tensor.ndim == 1 else tensor.chunk(ranks)[rank])

    def bytes(self):
        return {name: parameter.data.contiguous().view(torch.uint8).numpy().tobytes() for name, parameter in self.own.items()}


@pytest.fixture(autouse=True)
def any_device(monkeypatch):
    """Schemes of compressed-tensors ask the GPU for its capability before they make parameters."""
    monkeypatch.setattr(CompressedTensorsConfig, "_check_scheme_supported", lambda *_, **__: True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(format, seed) -> the folder that `wwctl convert --quantize` makes."""
    folder = tmp_path_factory.mktemp("quantized")

    def get(format, seed):
        plain, out = folder / f"bf16-{seed}", folder / f"{format}-{seed}"
        if not plain.exists():
            shapes = {"self_attn.q_proj": (HEADS * SIZE, HIDDEN), "self_attn.k_proj": (KV * SIZE, HIDDEN), "self_attn.v_proj": (KV * SIZE, HIDDEN),
                      "self_attn.o_proj": (HIDDEN, HEADS * SIZE), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
                      "mlp.down_proj": (HIDDEN, INNER)}
            shapes = {f"{LAYER}{name}.weight": shape for name, shape in shapes.items()}
            shapes |= {f"{LAYER}self_attn.{name}_proj.bias": (rows,) for name, rows in (("q", HEADS * SIZE), ("k", KV * SIZE), ("v", KV * SIZE))}
            shapes |= {f"{LAYER}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {"model.embed_tokens.weight": (WORDS, HIDDEN), "lm_head.weight": (WORDS, HIDDEN), "model.norm.weight": (HIDDEN,)}
            random = torch.Generator().manual_seed(seed)
            plain.mkdir()

            def drawn(shape):  # with a magnitude of its own for each tile, so that no two scales are the same by chance alone
                tiles = torch.exp2(torch.randint(-9, 9, [-(-size // 64) for size in shape], generator=random).float())
                for dim in range(len(shape)):
                    tiles = tiles.repeat_interleave(64, dim)
                return (torch.randn(shape, generator=random) * tiles).bfloat16()
            save_file({name: drawn(shape) for name, shape in shapes.items()}, plain / "model.safetensors")
            (plain / "config.json").write_text(json.dumps(CONFIG))
        if not out.exists():
            quantizing.quantize(plain, out, "hf", format)
        return out
    return get


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def loaded(format, folder, rank=0, ranks=1):
    model = Model(format, config_of(folder), rank, ranks)
    model.load_weights(load_file(folder / "model.safetensors").items())
    return model.bytes()


@pytest.mark.parametrize("format", ["fp8-block", "fp8-block-ue8m0"])
def test_the_layout_of_blocks_is_where_sglangs_loader_puts_codes_and_scales(format, checkpoint, daemon):
    """At TP 2, from a checkpoint that was quantized already; before SGLang repacks them for its kernels."""
    folder = checkpoint(format, 1)
    tensors = load_file(folder / "model.safetensors")
    models = [Model(format, config_of(folder), rank, 2) for rank in range(2)]
    ranks = [Subscriber(group="engine", rank=rank, world_size=2, agent=daemon.agent_socket) for rank in range(2)]
    try:
        with Publisher(rank=0, world_size=1, agent=daemon.agent_socket) as trainer:
            held = trainer.bind(config_of(folder), "hf", [meta_of(name, tensor) for name, tensor in tensors.items()])
            for name, array in held.items():
                array.reshape(-1).view("u1")[:] = tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy()
            for rank, model in zip(ranks, models):
                rank.bind(config_of(folder), "sglang:tp2", [meta_of(name, one) for name, one in model.own.items()])
            published = trainer.publish(1)
            offers = [rank.wait_offer(60) for rank in ranks]
            arrays = [rank.flip(offer) for rank, offer in zip(ranks, offers)]
            for at, held in enumerate(arrays):
                want = loaded(format, folder, at, 2)
                assert held.keys() == want.keys() and len(want) == 14
                assert [name for name in want if held[name].tobytes() != want[name]] == [], at
            ranks[0].acknowledge(offers[0])
            published.wait_released(60)
    finally:
        for rank in ranks:
            rank.close()


@pytest.mark.parametrize("format", READERS)
def test_a_quantized_model_takes_whole_tensors_and_sglangs_loader_puts_them(format, checkpoint, daemon, updater_of):  # noqa: F811
    first, second = checkpoint(format, 0), checkpoint(format, 1)
    model = Model(format, config_of(first))
    model.load_weights(load_file(first / "model.safetensors").items())
    assert model.bytes() == loaded(format, first) != loaded(format, second)
    tensors = load_file(second / "model.safetensors")
    with weightwire.torch.Publisher(lambda: tensors.items(), rank=0, world_size=1, agent=daemon.agent_socket) as trainer:
        published = trainer.publish(1)
        assert update(updater_of(model), daemon, str(first), 1) == (True, "Success")
        published.wait_released(60)
    assert model.bytes() == loaded(format, second)


@pytest.mark.parametrize("format", ["fp8-block", "fp8-channel"])
def test_sglangs_own_layout_is_refused_for_a_quantized_model(format, checkpoint, daemon, updater_of):  # noqa: F811
    folder = checkpoint(format, 0)
    model = Model(format, config_of(folder))
    with pytest.raises(RefusedError, match="quantized"):
        update(updater_of(model), daemon, str(folder), 1, deadline=10.0, layout="sglang")
