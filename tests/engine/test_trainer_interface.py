"""vLLM's trainer-side interface, as its factory makes it, with weightwire below it."""

import contextlib

import pytest
import torch

from weightwire import torch as ww_torch, vllm_trainer


class Client:
    """vLLM's control plane; weightwire's driver stands in its place, so nobody may call it."""

    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


def train(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("by", ["publisher", "source"])
def test_send_weights_publishes_version_after_version(by, stack):
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    vllm_trainer.register()
    vllm_trainer.register()
    model, follower = (torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, dtype=torch.bfloat16))
                       for _ in range(2))
    options = {}
    if by == "publisher":
        options["publisher"] = stack.add(ww_torch.Publisher(model, agent=stack.agent))
    info = vllm_trainer.InitInfo(rank=0, agent=stack.agent, first_version=4, **options)
    engine = WeightTransferTrainerFactory.trainer_init(
        info, client=Client(), source=ModuleSource(model) if by == "source" else None)
    receiver = stack.add(ww_torch.Receiver(follower, group="follower", agent=stack.agent))
    with contextlib.ExitStack() as closing:
        closing.callback(engine.shutdown)
        for version in (4, 5, 6):
            train(model)
            engine.send_weights()
            assert receiver.receive(30).version == version
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), follower.parameters()))


def test_without_anything_to_publish_it_is_refused():
    with pytest.raises(ValueError, match="publisher"):
        vllm_trainer.TrainerEngine.trainer_init(vllm_trainer.InitInfo(rank=0), client=Client())
