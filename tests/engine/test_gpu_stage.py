"""Versions that arrive in memory of the engine's GPU. There is none here: the fake library has the agent's and the trainer's, and lets
nobody copy a byte between a GPU and the host; the engine's parameters and what torch does stand for a GPU's (tests/support/gpu_standin)."""

import contextlib
import ctypes
import logging
import os
import signal

import pytest

import weightwire
from tests.engine import rig, trainer_hf
from tests.engine.conftest import Stack
from tests.support.gpu_standin import FAKE, GPUS
from weightwire.vllm import InstallError

KIND = "qwen2"
LENT = 14 << 20  # the trainer's 4 MB, and a stage of two buffers; not one more buffer
LENT_FOR_ONE = 10 << 20  # for a stage of one buffer
EXTENSION = "tests.engine.extension.Inspect"


def gpu_stack(folder, **config) -> Stack:
    env = {**os.environ, "FAKE_CUDA_DEVICES": "0,1", "FAKE_CUDA_HOST_BYTES": "forbidden"}
    return Stack(folder, **{**dict(env=env, gpu="required", gpu_slab_bytes=LENT, gpu_library=FAKE, transports="[cuda_ipc, shm, tcp]",
                                   gpu_direct="off", slot_bytes=128 << 10, chunk_bytes=64 << 10, segment_bytes_max=100_000), **config})


class GpuTrainer:
    """A rank whose parameters lie on GPU 0."""

    def __init__(self, agent, folder):
        self._publisher = weightwire.Publisher(rank=0, world_size=1, agent=agent, device=weightwire.Device(GPUS[0], FAKE))
        assert self._publisher.device_refused is None
        held = trainer_hf.read(folder)
        self._params = self._publisher.bind(trainer_hf.config_of(folder), "hf", [meta for meta, _ in held.values()])

    def publish(self, version, folder, **options):
        for name, (_, raw) in trainer_hf.read(folder).items():  # vLLM loads its plug-ins here, too: copies from the host are refused
            ctypes.CDLL(FAKE).fake_cuda_write(ctypes.c_void_p(self._params[name].pointer), raw.tobytes(), ctypes.c_size_t(raw.nbytes))
        return self._publisher.publish(version, **options)

    def close(self):
        self._publisher.close()
        self._params = None  # lent no more


@contextlib.contextmanager
def served(folder, open_driver, checkpoint, install):
    """A stack, a trainer, and the engine's driver on version 1 of seed 1."""
    with contextlib.closing(gpu_stack(folder)) as stack:
        driver = open_driver(stack, install=install)
        driver.init()
        trainer = stack.add(GpuTrainer(stack.agent, checkpoint(KIND, 1)))
        trainer.publish(1, checkpoint(KIND, 1))
        assert driver.step(60).version == 1
        yield stack.add(weightwire.Client(stack.daemon.grpc)), trainer, driver


@contextlib.contextmanager
def environment(**values):
    """Of engines that are started inside."""
    os.environ.update(values)
    yield
    for name in values:
        del os.environ[name]


def gpu_engine(folder, tp, **options) -> rig.Engine:
    with environment(WEIGHTWIRE_ENGINE_GPU="1", FAKE_CUDA_HOST_BYTES="forbidden", FAKE_CUDA_DEVICES="0,1", WEIGHTWIRE_CUDA=FAKE):
        return rig.Engine(folder, tp, **options)


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def engine(request, checkpoint):
    """One for all installs: a driver that comes later takes it over."""
    with contextlib.closing(gpu_engine(checkpoint(KIND, 0), request.param, worker_extension_cls=EXTENSION)) as made:
        made.tp = request.param
        yield made


@pytest.fixture
def open_driver(engine):
    """The last one is closed before its agent is."""
    drivers = []

    def make(stack, **options):
        drivers.append(engine.driver(name="engine", agent=stack.agent, **options))
        return drivers[-1]
    yield make
    for driver in drivers:
        driver.close()


@pytest.mark.parametrize("options", [dict(install="auto"), dict(install="device-stage"), dict(install="device-stage", mode="hf_sharded")],
                         ids=["auto", "device-stage", "hf_sharded"])
def test_versions_go_from_gpu_to_gpu(engine, open_driver, tmp_path, checkpoint, fresh, options):
    with contextlib.closing(gpu_stack(tmp_path, gpu_slab_bytes=LENT if options["install"] == "auto" else LENT_FOR_ONE)) as stack:
        driver = open_driver(stack, **options)
        assert [rank["stage"] for rank in driver.init()] == GPUS[:engine.tp]
        trainer = stack.add(GpuTrainer(stack.agent, checkpoint(KIND, 1)))
        for version, seed in enumerate((1, 2, 1, 2), 1):
            release = trainer.publish(version, checkpoint(KIND, seed))
            serving = driver.step(60)
            assert (serving.version, serving.recovered) == (version, ""), driver.last_error
            release.wait_released(30)
            assert engine.answers() == fresh(KIND, engine.tp, seed)
        assert driver.ready


def test_it_answers_while_the_next_version_is_written_to_the_only_buffer(engine, open_driver, tmp_path, checkpoint, fresh):
    """And when that is given up: the weights are the engine's own."""
    with served(tmp_path, open_driver, checkpoint, "device-stage") as (client, trainer, driver):
        driver.start()
        trainer.publish(2, checkpoint(KIND, 2), manual_commit=True)
        epoch = client.wait_staged(2, 60)  # its bytes lie where those of version 1 were
        assert engine.answers() == fresh(KIND, engine.tp, 1)
        client.abort(epoch.epoch)
        rig.until("the driver hears of it", lambda: "given up" in str(driver.last_error) or not driver.ready)
        assert engine.answers() == fresh(KIND, engine.tp, 1)
        trainer.publish(3, checkpoint(KIND, 2))
        assert driver.wait_version(3, 60).version == 3
        assert engine.answers() == fresh(KIND, engine.tp, 2)


def test_an_engine_that_was_fenced_gives_its_buffers_back_and_gets_new_ones(engine, open_driver, tmp_path, checkpoint, fresh):
    """There is no room for both."""
    with served(tmp_path, open_driver, checkpoint, "auto") as (client, trainer, driver):
        def there():
            return [(one.state, one.ranks_present) for one in client.status().engines] == [("empty", engine.tp)]

        for version, seed in enumerate((2, 1, 2), 2):
            assert not there()
            engine.run(engine.llm.collective_rpc("be_fenced"))
            rig.until("it has attached again", there)
            assert engine.answers() == fresh(KIND, engine.tp, 3 - seed), "it serves on"
            trainer.publish(version, checkpoint(KIND, seed))
            assert driver.step(60).version == version
            assert engine.answers() == fresh(KIND, engine.tp, seed)


def test_an_engine_comes_back_to_its_gpu_when_its_agent_was_killed(engine, open_driver, tmp_path, checkpoint, fresh):
    """More than once."""
    stack = gpu_stack(tmp_path)
    driver = open_driver(stack, install="auto")
    assert [rank["stage"] for rank in driver.init()] == GPUS[:engine.tp]
    driver.start()
    for version, seed in enumerate((1, 2, 1), 1):
        trainer = GpuTrainer(stack.agent, checkpoint(KIND, 1))
        trainer.publish(version, checkpoint(KIND, seed))
        assert driver.wait_version(version, 60).version == version
        assert engine.answers() == fresh(KIND, engine.tp, seed)
        trainer.close()
        if version == 3:
            break
        os.kill(stack.daemon.pid, signal.SIGKILL)
        stack.daemon.stop()
        assert engine.answers() == fresh(KIND, engine.tp, seed), "it serves on, from parameters of its own"
        stack = gpu_stack(tmp_path)
    assert driver.ready
    driver.close()
    stack.close()


def test_what_an_engine_has_lost_is_installed_again_from_the_gpu(engine, open_driver, tmp_path, checkpoint, fresh):
    with served(tmp_path, open_driver, checkpoint, "device-stage") as (client, _, driver):
        engine.run(engine.llm.collective_rpc("lose_parameters"))
        assert not client.verify().equal
        assert "not what was installed" in driver.step(60).recovered
        assert engine.answers() == fresh(KIND, engine.tp, 1)


def test_where_the_agent_lends_too_little_auto_takes_the_hosts_memory_and_device_stage_says_why(engine, open_driver, tmp_path, checkpoint, fresh):
    with contextlib.closing(gpu_stack(tmp_path, env=None, gpu_slab_bytes=64 << 10, transports="[shm, tcp]")) as stack:
        with pytest.raises(weightwire.RefusedError, match="gpu_slab_bytes"):
            open_driver(stack, install="device-stage").init()
        driver = open_driver(stack, install="auto")
        assert [rank["stage"] for rank in driver.init()] == ["cpu"] * engine.tp
        trainer = stack.add(rig.Trainer(stack.agent, checkpoint(KIND, 1)))
        trainer.send(1, checkpoint(KIND, 2))
        assert driver.step(60).version == 1 and trainer.released()["version"] == 1
        assert engine.answers() == fresh(KIND, engine.tp, 2)


def test_a_version_that_cannot_be_installed_leaves_the_one_before(checkpoint, fresh, faults, tmp_path):
    """With two buffers, as auto has them; with one there is no way back, and the engine stays paused until a version installs."""
    with contextlib.closing(gpu_engine(checkpoint(KIND, 0), 1)) as engine, contextlib.closing(gpu_stack(tmp_path)) as stack:
        trainer = stack.add(GpuTrainer(stack.agent, checkpoint(KIND, 1)))
        with contextlib.closing(engine.driver(name="engine", agent=stack.agent, install="auto")) as driver:
            driver.init()
            trainer.publish(1, checkpoint(KIND, 1))
            assert driver.step(60).version == 1
            faults.arm("update", 0, 2)
            trainer.publish(2, checkpoint(KIND, 2))
            with pytest.raises(InstallError) as failed:
                driver.step(60)
            assert failed.value.serving.version == 1 and not failed.value.broken
            assert engine.answers() == fresh(KIND, 1, 1)
            assert driver.step(60).version == 2, "it is tried again"
        with contextlib.closing(engine.driver(name="engine", agent=stack.agent, install="device-stage")) as driver:
            driver.init()
            trainer.publish(3, checkpoint(KIND, 2))
            assert driver.step(60).version == 3
            faults.arm("update", 0, 2)
            trainer.publish(4, checkpoint(KIND, 1))
            with pytest.raises(InstallError) as failed:
                driver.step(60)
            assert failed.value.serving is None and failed.value.broken
            assert driver.step(60).version == 4
            assert engine.answers() == fresh(KIND, 1, 1)


def test_a_model_on_no_gpu_has_no_stage_there(checkpoint, tmp_path, caplog):
    with contextlib.closing(rig.Engine(checkpoint(KIND, 0), 1)) as engine, contextlib.closing(gpu_stack(tmp_path)) as stack:
        with contextlib.closing(engine.driver(name="engine", agent=stack.agent, install="device-stage")) as driver, \
                pytest.raises(weightwire.RefusedError, match="on no GPU"):
            driver.init()
        with contextlib.closing(engine.driver(name="engine", agent=stack.agent)) as driver, caplog.at_level(logging.WARNING):
            assert [rank["stage"] for rank in driver.init()] == ["cpu"]
