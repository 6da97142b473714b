"""Parameters that an engine lost between two versions, as vLLM's sleep level 2 gives their memory away: `verify` names them, and
the version is installed again. vLLM has no sleep on CPUs, so the tests write zeros over them."""

import pytest

from tests.engine import rig
from weightwire.client import Client

EXTENSION = "tests.engine.extension.Inspect"


@pytest.fixture
def served(checkpoint, stack, request):
    """An engine on version 1, its driver, and what it answers then."""
    kind, tp, mode = request.param
    engine = stack.add(rig.Engine(checkpoint(kind, 0), tp, worker_extension_cls=EXTENSION))
    trainer = stack.add(rig.Trainer(stack.agent, checkpoint(kind, 1)))
    driver = stack.add(engine.driver(name="engine", agent=stack.agent, mode=mode))
    driver.init()
    trainer.send(1, checkpoint(kind, 1))
    assert driver.step(60).version == 1 and trainer.released()["version"] == 1
    return kind, engine, driver, trainer, Client(stack.daemon.grpc)


def ask(engine, method, *args):
    return engine.run(engine.llm.collective_rpc(method, args=args))


@pytest.mark.parametrize("served", [("qwen2", 1, "fused"), ("qwen3-moe", 2, "fused"), ("qwen2-tied", 1, "hf_sharded")], indirect=True,
                         ids=lambda p: "-".join(map(str, p)))
def test_verify_names_them_and_the_driver_installs_the_version_again(served, checkpoint):
    kind, engine, driver, trainer, client = served
    answers, bytes_before = engine.answers(), ask(engine, "parameter_digests")
    assert client.verify().equal, "nothing is lost"
    ask(engine, "lose_parameters")
    assert ask(engine, "parameter_digests") != bytes_before
    result = client.verify()
    assert not result.equal and [d.engine for d in result.differences] == ["engine"]
    assert "parameters of the engine are not what was installed" in result.differences[0].text
    again = driver.step(60)
    assert (again.version, "not what was installed" in again.recovered) == (1, True)
    assert ask(engine, "parameter_digests") == bytes_before
    assert engine.answers() == answers and client.verify().equal
    ask(engine, "lose_parameters", ["model.norm.weight"])  # one of them, which is small
    result = client.verify()
    assert result.differences[0].tensor == "model.norm.weight" and "1 parameters" in result.differences[0].text
    assert driver.step(60).version == 1 and ask(engine, "parameter_digests") == bytes_before
    trainer.send(2, checkpoint(kind, 2))
    assert driver.step(60).version == 2 and client.verify().equal, "what was summed is of the new version"
