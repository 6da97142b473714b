"""A vLLM that is not as weightwire knows it starts and serves, and says what is missing where somebody asks for weights."""

import logging
import sys

import pytest

from tests.engine import rig
from weightwire import RefusedError
from weightwire.vllm import entry, features, register

BASE, RELOAD = "vllm.distributed.weight_transfer.base", "vllm.model_executor.model_loader.reload"


@pytest.fixture
def probed_anew():
    features.changed.cache_clear()
    yield
    features.changed.cache_clear()


@pytest.mark.parametrize("module,name", [(BASE, "WeightTransferInitInfo"), (f"{RELOAD}.layerwise", "_place_kernel_tensors"),
                                         (f"{RELOAD}.meta", "materialize_layer"), (RELOAD, "finalize_layerwise_reload")])
def test_what_is_missing_is_named(module, name, monkeypatch, probed_anew):
    __import__(module)
    monkeypatch.delattr(sys.modules[module], name)
    assert features.changed() == (f"{module} has no {name}",)
    with pytest.raises(RefusedError, match=f"{features.version()}.* is not supported: .*{name}"):
        features.check()


def test_other_arguments_are_named(monkeypatch, probed_anew):
    from vllm.model_executor.model_loader.reload import layerwise
    monkeypatch.setattr(layerwise, "_place_kernel_tensors", lambda layer, info, places: None)
    assert features.changed() == (f"{RELOAD}.layerwise._place_kernel_tensors takes other arguments: (layer, info, places)",)


def test_a_module_that_went_is_named(monkeypatch, probed_anew):
    monkeypatch.setitem(sys.modules, f"{RELOAD}.meta", None)
    assert any(f"{RELOAD}.meta cannot be imported" in why for why in features.changed())


@pytest.mark.parametrize("number,warns", [("0.24.0", False), ("0.33.1rc1", False), ("0.34.0", True), ("1.0.0", True), ("0.23.0", True),
                                          ("dev", True)])
def test_a_version_that_was_never_tried_is_tried_with_a_warning(number, warns, monkeypatch, caplog):
    features._warn_untried.cache_clear()
    monkeypatch.setattr(features, "version", lambda: number)
    with caplog.at_level(logging.WARNING, "weightwire.vllm"):
        features.check()
        features.check()
    assert [number in record.getMessage() for record in caplog.records] == [True] * warns


@pytest.mark.parametrize("plant", ["module", "method"])
def test_registering_stops_no_vllm(plant, monkeypatch, caplog):
    from vllm.distributed.weight_transfer import factory
    if plant == "module":
        monkeypatch.setitem(sys.modules, factory.__name__, None)
    else:
        monkeypatch.delattr(factory.WeightTransferEngineFactory, "register_engine")
    register()
    assert "starts without it" in caplog.text


def test_an_engine_that_cannot_be_made_says_why(monkeypatch, caplog):
    made = entry.WeightwireEngine("of", "something", "else")  # as a vLLM that gives its engines other arguments
    assert isinstance(made, entry.Unsupported) and "TypeError" in made.why and "starts without it" in caplog.text
    made.set_weight_update_target(None, None)
    with pytest.raises(RuntimeError, match="TypeError"):
        made.start_weight_update()
    made.shutdown()


@pytest.mark.parametrize("missing", [f"{BASE}:WeightTransferUpdateInfo", f"{RELOAD}.layerwise:_place_kernel_tensors"])
def test_a_real_engine_starts_and_answers_without_it(missing, checkpoint, stack, monkeypatch):
    monkeypatch.setenv("WEIGHTWIRE_ENGINE_MISSING", missing)
    engine = stack.add(rig.Engine(checkpoint("qwen2", 0)))
    before = engine.answers()
    driver = stack.add(engine.driver(name="engine", agent=stack.agent))
    with pytest.raises(RefusedError, match=missing.partition(":")[2]) as refused:
        driver.init()
    assert refused.value.code == "UNIMPLEMENTED", "start() would try for ever"
    assert engine.answers() == before
