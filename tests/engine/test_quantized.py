"""Real engines that run weights in a format that weightwire makes, as a CPU can: floats of a trainer reach one packed, and it answers as
an engine that was started on the file which compressed-tensors itself has written. Its parameters, as vLLM has repacked them, are
equal too."""

import contextlib
import shutil
from pathlib import Path

import pytest

from tests.engine import rig
from tests.engine.trainer_hf import read
from weightwire.checkpoint import quantizing

KIND = "qwen2"
KV_CACHE = dict(num_bits=8, type="float", strategy="tensor", symmetric=True, dynamic=False)
CALIBRATED = (".k_scale", ".v_scale", ".input_scale")
INSPECT = dict(worker_extension_cls="tests.engine.extension.Inspect")
#: format -> what compressed-tensors is told of weights and of activations, and the mode that makes them of floats.
FORMATS = {
    "int4-32-compressed-tensors": (dict(num_bits=4, type="int", strategy="group", group_size=32), None, "fused"),
    "fp8-channel": (dict(num_bits=8, type="float", strategy="channel"), dict(num_bits=8, type="float", strategy="token", dynamic=True),
                    "hf_sharded"),
}


def needs_avx512(what: str) -> None:
    """Skips, by name, where this CPU's vLLM cannot run it: an engine on the library's own file could not either."""
    import torch
    if not torch.cpu._is_avx512_supported():
        pytest.skip(f"vLLM runs {what} on CPUs with AVX-512 only")


def library_file(folder: Path, out: Path, weights: dict, activations: dict | None, calibrated: float | None = None) -> Path:
    """The checkpoint as compressed-tensors quantizes and saves it, rounded to nearest with scales of the largest magnitudes. `calibrated`:
    scales of the KV cache, and of activations that are not dynamic, begin at it, each with a value of its own."""
    import torch
    import transformers
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(symmetric=True, dynamic=False, **weights),
                                input_activations=activations and QuantizationArgs(symmetric=True, **activations))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], kv_cache_scheme=KV_CACHE if calibrated else None))
    fused = {getattr(parent, name): [getattr(parent, one).weight for one in names] for parent in model.modules()
             for names in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) for name in names if hasattr(parent, name)}
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                whole_tensor = weights["strategy"] == "tensor"
                groups = module.weight.reshape(1, -1) if whole_tensor else module.weight.unflatten(
                    1, (-1, weights.get("group_size", module.weight.shape[1])))
                whole = getattr(module, "weight_global_scale", None)  # NVFP4's
                if whole is not None:  # llm-compressor gives what vLLM fuses one in common
                    together = fused.get(module, [module.weight])
                    whole.copy_(generate_gparam(min(one.min() for one in together), max(one.max() for one in together)))
                scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=whole)
                module.weight_scale.copy_(scale)
        scales = [one for name, one in model.named_parameters() if name.endswith(CALIBRATED)]
        for place, one in enumerate(scales):
            one.fill_(calibrated * (1 + place / len(scales)))
        assert bool(scales) == bool(calibrated)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(out)
    for path in folder.iterdir():
        if not (out / path.name).exists() and path.suffix != ".safetensors":
            shutil.copy(path, out)
    return out


def quantized(checkpoint, tmp_path, format: str, kind: str = KIND) -> dict[int, Path]:
    """seed -> the checkpoint of that seed as weightwire converts it."""
    own = {seed: tmp_path / f"own-{seed}" for seed in (0, 1)}
    for seed, folder in own.items():
        quantizing.quantize(checkpoint(kind, seed), folder, "hf", format)
    return own


def block_file(folder: Path, of: Path, out: Path) -> Path:
    """The weights of `folder` as DeepSeek's weight_quant makes them (blocks of 128 × 128, amax / 448), beside the configuration of `of`."""
    import torch
    from safetensors.torch import load_file, save_file
    made = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        made[name] = tensor
        if name.endswith("_proj.weight"):
            blocks = tensor.float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [rows, 128, columns, 128]
            scale = blocks.abs().amax((1, 3)) / 448
            made[name] = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(tensor.shape)
            made[name.replace(".weight", ".weight_scale_inv")] = scale
    shutil.copytree(of, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(made, out / "model.safetensors", metadata={"format": "pt"})
    return out


def state_of(engine) -> tuple:
    return engine.answers(), engine.run(engine.llm.collective_rpc("parameter_digests"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_trainers_floats_answer_as_the_librarys_file(format, checkpoint, tmp_path, stack):
    if format.startswith("int4"):
        needs_avx512(format)
    *said, mode = FORMATS[format]
    library = library_file(checkpoint(KIND, 1), tmp_path / "library", *said)
    own = quantized(checkpoint, tmp_path, format)
    theirs, made = read(library), read(own[1])
    assert made.keys() == theirs.keys()
    assert [name for name, (meta, data) in theirs.items() if made[name][0] != meta or made[name][1].tobytes() != data.tobytes()] == []
    with contextlib.closing(rig.Engine(library, **INSPECT)) as fresh:
        want = state_of(fresh)
    engine = stack.add(rig.Engine(own[0], **INSPECT))
    before = state_of(engine)
    assert before[0] != want[0]
    # A trainer of floats; after it one that holds what was quantized already, and sends it as it is.
    with contextlib.closing(rig.Trainer(stack.agent, checkpoint(KIND, 1))) as trainer:
        if mode != "fused":  # vLLM holds the scales in float32, checkpoints in the dtype that the weights had
            stack.add(engine.driver(name="engine", agent=stack.agent)).init()
            trainer.send(1, checkpoint(KIND, 1))
            refused = trainer.released()["error"]
            assert "weight_scale" in refused and "source/0 holds BF16, target/0 wants F32" in refused and "hf_sharded" in refused, refused
        driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
        assert [told["mode"] for told in driver.init()] == [mode]
        publish(trainer, driver, 2, checkpoint(KIND, 1))
        assert state_of(engine) == want
    with contextlib.closing(rig.Trainer(stack.agent, own[0])) as trainer:
        publish(trainer, driver, 3, own[0])
        assert state_of(engine) == before


@pytest.mark.parametrize("mode", ["fused", "hf_sharded"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe"])
def test_fp8_in_blocks_answers_as_a_file_of_it(kind, mode, checkpoint, tmp_path, stack):
    import torch
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM runs fp8 in blocks on CPUs with AMX only")
    own = quantized(checkpoint, tmp_path, "fp8-block", kind)
    files = [block_file(checkpoint(kind, seed), own[seed], tmp_path / f"file-{seed}") for seed in (0, 1)]
    for seed, file in enumerate(files):
        theirs, made = read(file), read(own[seed])
        assert made.keys() == theirs.keys() and any("weight_scale_inv" in name for name in made)
        assert [name for name, (meta, data) in theirs.items() if made[name][0] != meta or made[name][1].tobytes() != data.tobytes()] == []
    with contextlib.closing(rig.Engine(files[1], **INSPECT)) as fresh:
        want = state_of(fresh)
    engine = stack.add(rig.Engine(files[0], **INSPECT))
    before = state_of(engine)
    assert before[0] != want[0]
    driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
    assert [told["mode"] for told in driver.init()] == [mode]
    # A trainer of floats, and one that holds what was quantized already.
    for version, (source, wanted) in enumerate(((checkpoint(kind, 1), want), (files[0], before)), 1):
        with contextlib.closing(rig.Trainer(stack.agent, source)) as trainer:
            publish(trainer, driver, version, source)
            assert state_of(engine) == wanted


@pytest.mark.parametrize("format, mode", [("int4-32-compressed-tensors", "fused"), ("fp8-channel", "hf_sharded")])
def test_calibrated_scales_of_the_kv_cache_arrive_and_stay(format, mode, checkpoint, tmp_path, stack):
    """As in engines that were started on the files: an update brings the source's, and a source without them is refused."""
    needs_avx512("an fp8 KV cache")
    said = FORMATS[format][:2]
    files = [library_file(checkpoint(KIND, seed), tmp_path / f"library-{seed}", *said, calibrated=scale) for seed, scale in ((0, 0.02), (1, 0.11))]
    options = dict(kv_cache_dtype="fp8", **INSPECT)
    with contextlib.closing(rig.Engine(files[1], **options)) as fresh:
        want = state_of(fresh), fresh.run(fresh.llm.collective_rpc("kv_scales"))
    engine = stack.add(rig.Engine(files[0], **options))
    before = state_of(engine), engine.run(engine.llm.collective_rpc("kv_scales"))
    assert before[0][0] != want[0][0] and before[1] != want[1] and len(set(want[1][0].values())) > 2
    driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
    driver.init()
    with contextlib.closing(rig.Trainer(stack.agent, files[1])) as trainer:
        for version, (folder, wanted) in enumerate(((files[1], want), (files[0], before), (files[1], want)), 1):
            publish(trainer, driver, version, folder)
            assert (state_of(engine), engine.run(engine.llm.collective_rpc("kv_scales"))) == wanted
    with contextlib.closing(rig.Trainer(stack.agent, checkpoint(KIND, 0))) as trainer:  # of floats: it has none
        trainer.send(4, checkpoint(KIND, 0))
        refused = trainer.released()["error"]
        assert "k_scale" in refused and "publish a checkpoint that has them, as engines with vLLM's plug-in need it" in refused, refused
    assert (state_of(engine), engine.run(engine.llm.collective_rpc("kv_scales"))) == want


def publish(trainer, driver, version: int, folder: Path) -> None:
    trainer.send(version, folder)
    serving = driver.step(120)
    assert (serving.version, serving.recovered) == (version, ""), trainer.released()
    assert trainer.released()["version"] == version
