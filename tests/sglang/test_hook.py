"""The hook behind SGLang's own WeightUpdater and plug-in framework, on a CPU. The model is ours: no SGLang model runs
without a GPU."""

import time

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.managers.scheduler_components import weight_updater as scheduler
from sglang.srt.model_executor.model_runner_components import weight_updater
from sglang.srt.plugins.hook_registry import HookRegistry

import weightwire.sglang
import weightwire.torch
from weightwire import AbortedError, Client, DeadlineError, RefusedError
from weightwire.sglang import LOADER, NOT_YET, ticket


class Model(torch.nn.Module):
    """A model with a loader of its own that fuses, as SGLang's models have."""

    def __init__(self):
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(6, 5, dtype=torch.bfloat16), requires_grad=False)
        self.fail = False

    def load_weights(self, weights):
        for name, tensor in weights:
            if self.fail is True or self.fail == (name, 1):
                self.fail = self.fail is True
                raise KeyError(name)
            self.qk[{"q": slice(0, 4), "k": slice(4, 6)}[name]] = tensor


def weights(seed):
    g = torch.Generator().manual_seed(seed)
    return {"q": torch.randn(4, 5, generator=g).bfloat16(), "k": torch.randn(2, 5, generator=g).bfloat16()}


@pytest.fixture
def checkpoint(tmp_path):
    save_file(weights(0), tmp_path / "model.safetensors")
    return str(tmp_path)


@pytest.fixture
def updater_of():
    """updater_of(model) -> SGLang's updater around it; what it needs of the accelerator and of the process is stood in for."""
    yield lambda model: weight_updater.WeightUpdater(
        tp_rank=0, device="cpu", gpu_id=0, model_config=None, custom_weight_loaders=[LOADER], get_model=lambda: model,
        update_model_fields=None, recapture_cuda_graph=None, get_model_runner=lambda: None)
    for rank in weightwire.sglang._ranks.values():
        rank.close()
    weightwire.sglang._ranks.clear()


@pytest.fixture
def engine(updater_of):
    return updater_of(Model())


@pytest.fixture(autouse=True)
def process(monkeypatch):
    from types import SimpleNamespace

    monkeypatch.setattr(weight_updater, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    monkeypatch.setattr(weight_updater.WeightUpdater, "_assert_weight_cache_inactive", lambda *_: None)
    monkeypatch.setattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda *_: None)
    monkeypatch.setattr(weight_updater.torch, "get_device_module",
                        lambda *_: SimpleNamespace(current_device=lambda: "cpu"))


def update(updater, daemon, checkpoint, version, deadline=30.0, **more):
    return updater.update_weights_from_tensor(
        ticket("engine-a", checkpoint, version, agent=daemon.agent_socket, deadline=deadline, **more), load_format=LOADER)


def wait(condition):
    """Until it holds of the engine's subscriber."""
    subscriber = weightwire.sglang._ranks["engine-a"]._subscriber
    with subscriber._lock:
        assert subscriber._lock.wait_for(lambda: condition(subscriber), 30)


def test_a_ticket_brings_each_version_through_sglangs_own_updater(daemon, checkpoint, engine):
    now = {}
    with weightwire.torch.Publisher(lambda: now["w"].items() if now else weights(0).items(), rank=0, world_size=1,
                                    agent=daemon.agent_socket) as trainer, Client(daemon.grpc) as client:
        for version in (1, 2, 3):
            now["w"] = weights(version)
            release = trainer.publish(version)
            assert update(engine, daemon, checkpoint, version) == (True, "Success")
            release.wait_released(30)
            want = weights(version)
            assert torch.equal(engine.get_model().qk, torch.cat([want["q"], want["k"]]))
            client.wait_version(version, timeout=30, engines=["engine-a"])


def test_a_loader_that_fails_is_told_and_the_same_ticket_loads_again(daemon, checkpoint, engine):
    with weightwire.torch.Publisher(weights(5), rank=0, world_size=1, agent=daemon.agent_socket) as trainer, \
            Client(daemon.grpc) as client:
        trainer.publish(1)
        engine.get_model().fail = True
        with pytest.raises(AbortedError, match="KeyError: 'k'"):
            update(engine, daemon, checkpoint, 1)
        assert client.status().engines[0].state == "installing"  # not acknowledged: nobody may take it for served
        engine.get_model().fail = False
        update(engine, daemon, checkpoint, 1)
        client.wait_version(1, timeout=30)
        assert torch.equal(engine.get_model().qk, torch.cat([weights(5)["q"], weights(5)["k"]]))


def test_catching_up_loads_what_lies_where_the_next_version_goes_and_nothing_else(daemon, checkpoint, engine):
    def holds(version) -> bool:
        return torch.equal(engine.get_model().qk, torch.cat([weights(version)["q"], weights(version)["k"]]))

    now = {"w": weights(1)}
    with weightwire.torch.Publisher(lambda: now["w"].items(), rank=0, world_size=1, agent=daemon.agent_socket) as trainer, \
            Client(daemon.grpc) as client:
        update(engine, daemon, checkpoint, 0, catch_up=True)
        assert not engine.get_model().qk.any()  # it has joined, and there was nothing
        trainer.publish(1)
        update(engine, daemon, checkpoint, 1)
        now["w"] = weights(2)
        trainer.publish(2).wait_released(30)
        wait(lambda subscriber: subscriber._events)
        assert holds(1)
        engine.get_model().fail = True
        with pytest.raises(AbortedError, match="KeyError: 'k'"):
            update(engine, daemon, checkpoint, 0, catch_up=True)
        engine.get_model().fail = False
        update(engine, daemon, checkpoint, 0, catch_up=True)
        assert holds(2)
        client.wait_version(2, timeout=30, engines=["engine-a"])
        engine.get_model().qk.zero_()
        update(engine, daemon, checkpoint, 0, catch_up=True)
        assert not engine.get_model().qk.any()  # that was loaded


def test_catching_up_does_not_pass_a_model_that_was_loaded_in_part(daemon, checkpoint, engine):
    with weightwire.torch.Publisher(weights(5), rank=0, world_size=1, agent=daemon.agent_socket) as trainer:
        trainer.publish(1)
        engine.get_model().fail = True
        with pytest.raises(AbortedError, match="KeyError: 'k'"):
            update(engine, daemon, checkpoint, 1)
        engine.get_model().fail = False
    with Client(daemon.grpc) as client:
        client.evict("engine-a")
    wait(lambda subscriber: subscriber.serving is None)
    with pytest.raises(AbortedError, match="loaded in part"):
        update(engine, daemon, checkpoint, 0, catch_up=True)


def test_a_version_that_does_not_come_leaves_the_model_alone(daemon, checkpoint, engine):
    with pytest.raises(DeadlineError, match="version 7 did not come"):
        update(engine, daemon, checkpoint, 7, deadline=1.0)
    assert not engine.get_model().qk.any()


def test_anything_but_a_ticket_is_refused(engine, tmp_path):
    with pytest.raises(RefusedError, match="one ticket"):
        engine.update_weights_from_tensor([("model.norm.weight", torch.ones(2))], load_format=LOADER)
    with pytest.raises(FileNotFoundError):
        engine.update_weights_from_tensor(ticket("e", str(tmp_path), 1), load_format=LOADER)


@pytest.fixture
def plugged(engine):
    """As a scheduler process has it where weightwire is installed beside SGLang; the loader's flag is not given."""
    hooked = [weight_updater.WeightUpdater, scheduler.SchedulerWeightUpdaterManager]
    originals = [owner.update_weights_from_tensor for owner in hooked]
    weightwire.sglang.register()
    HookRegistry.apply_hooks()
    engine.custom_weight_loaders.clear()
    yield engine
    for owner, original in zip(hooked, originals):
        owner.update_weights_from_tensor = original
    HookRegistry.reset()


def until_loaded(updater, daemon, checkpoint, version, **more):
    end = time.monotonic() + 60
    while (answer := update(updater, daemon, checkpoint, version, **more)) != (True, "Success"):
        assert NOT_YET in answer[1] and time.monotonic() < end, answer
    return answer


def test_without_the_plug_in_the_loader_has_to_be_named(engine):
    engine.custom_weight_loaders.clear()
    with pytest.raises(NotImplementedError):
        engine.update_weights_from_tensor([("x", torch.ones(1))], load_format=LOADER)


def test_with_the_plug_in_a_scheduler_goes_on_until_the_version_has_come(daemon, checkpoint, plugged):
    begun = time.monotonic()
    good, why = update(plugged, daemon, checkpoint, 1)
    assert not good and NOT_YET in why and time.monotonic() - begun < 5
    with weightwire.torch.Publisher(weights(5), rank=0, world_size=1, agent=daemon.agent_socket) as trainer, \
            Client(daemon.grpc) as client:
        until_loaded(plugged, daemon, checkpoint, 0)
        for _ in range(2):
            good, why = update(plugged, daemon, checkpoint, 1)
            assert not good and "version 1 has not come to rank 0" in why and not plugged.get_model().qk.any()
        trainer.publish(1)
        assert until_loaded(plugged, daemon, checkpoint, 1, ask=True) and not plugged.get_model().qk.any()
        until_loaded(plugged, daemon, checkpoint, 1)
        assert torch.equal(plugged.get_model().qk, torch.cat([weights(5)["q"], weights(5)["k"]]))
        client.wait_version(1, timeout=30, engines=["engine-a"])


def test_with_the_plug_in_an_agent_that_is_not_there_holds_nobody(checkpoint, plugged, tmp_path):
    begun = time.monotonic()
    order = ticket("engine-a", checkpoint, 1, agent=str(tmp_path / "nobody.sock"), deadline=3.0)
    said = [plugged.update_weights_from_tensor(order, load_format=LOADER) for _ in range(3)]
    assert not any(good for good, _ in said) and time.monotonic() - begun < 10
    end = time.monotonic() + 60
    while "could not join" not in (why := plugged.update_weights_from_tensor(order, load_format=LOADER)[1]):
        assert time.monotonic() < end, why


def test_with_the_plug_in_a_loader_that_fails_leaves_the_version_before(daemon, checkpoint, plugged, monkeypatch):
    now = {"w": weights(1)}
    with weightwire.torch.Publisher(lambda: now["w"].items(), rank=0, world_size=1, agent=daemon.agent_socket) as trainer, \
            Client(daemon.grpc) as client:
        trainer.publish(1)
        until_loaded(plugged, daemon, checkpoint, 1)
        now["w"] = weights(2)
        trainer.publish(2)
        until_loaded(plugged, daemon, checkpoint, 2, ask=True)
        plugged.get_model().fail = "k", 1  # once, after q was loaded
        good, why = update(plugged, daemon, checkpoint, 2)
        assert not good and "KeyError: 'k'" in why and why.endswith("The engine is on version 1")
        assert torch.equal(plugged.get_model().qk, torch.cat([weights(1)["q"], weights(1)["k"]]))
        assert client.status().engines[0].state == "installing"  # not acknowledged
        until_loaded(plugged, daemon, checkpoint, 2)
        assert torch.equal(plugged.get_model().qk, torch.cat([weights(2)["q"], weights(2)["k"]]))
        client.wait_version(2, timeout=30, engines=["engine-a"])


def test_with_the_plug_in_anything_but_a_ticket_is_answered(plugged):
    assert "one ticket" in plugged.update_weights_from_tensor([("x", torch.ones(1))], load_format=LOADER)[1]


def test_version_zero_only_joins(daemon, checkpoint, engine):
    with Client(daemon.grpc) as client:
        assert update(engine, daemon, checkpoint, 0) == (True, "Success")
        assert [e.name for e in client.status().engines] == ["engine-a"]
    assert not engine.get_model().qk.any()
