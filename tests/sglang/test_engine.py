"""Real SGLang engines on a CPU, at TP 1 and 2: what they answer after an update equals what they answered when they had loaded the
same checkpoint by themselves, from disk, bit for bit. In the place of SGLang's GPU kernels is `stub`."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import BINARIES
from demo.fleet import Daemon
from gpu_standin import FAKE, GPUS, FakeTorchCuda
from safetensors.torch import load_file

import weightwire.torch
from weightwire import Client

HERE = pathlib.Path(__file__).resolve().parent
ENGINE = "engine-a"


class Host:
    def __init__(self, model, tp, env=None, **options):
        self._process = subprocess.Popen([sys.executable, str(HERE / "engine_host.py"), str(model), str(tp), json.dumps(options)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, env=env)
        assert self._answer() == {"answer": "ready"}

    def _answer(self):
        line = self._process.stdout.readline()
        assert line, f"the engine ended with {self._process.wait(10)}"
        return json.loads(line)

    def ask(self, do, **arguments):
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def __call__(self, do, **arguments):
        answer = self.ask(do, **arguments)
        assert "error" not in answer, answer
        return answer["answer"]

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        self._process.stdin.close()
        self._process.wait(120)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")

    def get(seed):
        path = folder / str(seed)
        if not path.exists():
            subprocess.run([sys.executable, str(HERE.parent / "engine/models.py"), str(path), "qwen2", str(seed)], check=True)
        return str(path)
    return get


def said(answers):
    return [(answer["tokens"], answer["logprobs"]) for answer in answers]


def labels(answers):
    return {tuple(map(tuple, answer["spans"])) for answer in answers}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", ["sglang", "whole"])
def test_versions_arrive_on_the_engines_gpu(tp, layout, checkpoint, tmp_path, monkeypatch):
    """From the trainer's, and no byte goes by the host: the fake library's agent, and it in every process, refuse that."""
    fake = {"FAKE_CUDA_DEVICES": "0,1", "FAKE_CUDA_HOST_BYTES": "forbidden", "WEIGHTWIRE_CUDA": FAKE}
    hub = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "gpus"), "hub", env={**os.environ, **fake}, role="all", listen="127.0.0.1:0",
                 gpu="required", gpu_slab_bytes=64 << 20, gpu_library=FAKE, transports="[cuda_ipc, shm, tcp]", slot_bytes=128 << 10, segment_bytes_max=100_000,
                 chunk_bytes=64 << 10)
    for name, value in {**fake, "WEIGHTWIRE_ENGINE_GPU": "1"}.items():
        monkeypatch.setenv(name, value)
    cuda = FakeTorchCuda().install()
    now = {}

    def load(seed):
        cuda.back()
        now.clear()
        now.update({name: cuda.move(tensor.clone()) for name, tensor in load_file(f"{checkpoint(seed)}/model.safetensors").items()})
    load(1)
    with contextlib.closing(Host(checkpoint(0), tp)) as host, \
            weightwire.torch.Publisher(lambda: now.items(), rank=0, world_size=1, agent=hub.agent_socket) as trainer:
        assert trainer.device == GPUS[0]
        want = {0: said(host("answers"))}
        for seed in (1, 2):
            assert host("from_disk", model=checkpoint(seed))[0]
            want[seed] = said(host("answers"))
        for version, seed in enumerate((1, 0, 2, 1), 1):
            load(seed)
            release = trainer.publish(version)
            host("update", engine=ENGINE, checkpoint=checkpoint(0), version=version, agent=hub.agent_socket, deadline=60, device="cuda",
                 layout=layout)
            release.wait_released(30)
            assert said(host("answers")) == want[seed], f"version {version}"
    cuda.back()
    assert hub.stop() == 0


def test_a_ticket_that_one_rank_cannot_read_is_refused_by_all_and_the_engine_answers_on(checkpoint, daemon):
    now = load_file(f"{checkpoint(1)}/model.safetensors")
    with contextlib.closing(Host(checkpoint(0), 2)) as host, \
            weightwire.torch.Publisher(lambda: now.items(), rank=0, world_size=1, agent=daemon.agent_socket) as trainer:
        started = said(host("answers", afresh=True))
        trainer.publish(1)
        answers = host("send_tickets_that_differ", engine=ENGINE, checkpoint=checkpoint(0), version=1, agent=daemon.agent_socket)
        assert answers == [[False, "another rank could not read its ticket, as its log says, or was sent another one"]] * 3
        assert said(host("answers", afresh=True)) == started
        host("update", engine=ENGINE, checkpoint=checkpoint(0), version=1, agent=daemon.agent_socket, deadline=60)
        assert said(host("answers", afresh=True)) != started


@pytest.mark.parametrize("tp", [1, 2])
def test_versions_requests_in_flight_and_one_that_does_not_come(tp, checkpoint, daemon):
    now = load_file(f"{checkpoint(1)}/model.safetensors")
    with contextlib.closing(Host(checkpoint(0), tp)) as host, Client(daemon.grpc) as client, \
            weightwire.torch.Publisher(lambda: now.items(), rank=0, world_size=1, agent=daemon.agent_socket) as trainer:
        want = {0: said(host("answers"))}  # of an engine that was started on it
        for seed in (1, 2):
            assert host("from_disk", model=checkpoint(seed))[0]
            want[seed] = said(host("answers"))
        assert len({str(answers) for answers in want.values()}) == 3

        def update(version, **more):
            return dict(engine=ENGINE, checkpoint=checkpoint(0), version=version, agent=daemon.agent_socket, deadline=300, **more)

        def publish(version, seed):
            now.clear()
            now.update(load_file(f"{checkpoint(seed)}/model.safetensors"))
            return trainer.publish(version)
        for version, seed in enumerate((1, 0, 2), 1):
            publish(version, seed)
            host("update", **update(version))
            answers = host("answers")
            assert said(answers) == want[seed], f"version {version}"
            assert labels(answers) == {((str(version), 0, 16),)}
            client.wait_version(version, timeout=60, engines=[ENGINE])
        assert {p.spec for p in client.status().participants if p.group == ENGINE} == {f"sglang:tp{tp}"}, "a rank's own part, not all"

        late = host.ask("update", **{**update(9), "deadline": 3})
        assert "version 9 did not come within 3 s" in late["error"] and said(host("answers")) == want[2]

        publish(4, 1)
        host("begin", prompt=[5, 6, 7], tokens=300)
        host("update", **update(4, pause="retract"))
        got = host("result")
        before, after = got["spans"]
        assert (before[0], after[0], before[1], after[2]) == ("3", "4", 0, 300) and before[2] == after[1] >= 3
        cut = after[1]
        assert got["tokens"][cut:] == host("continued", prompt=[5, 6, 7, *got["tokens"][:cut]], tokens=300 - cut)["tokens"]
        assert said(host("answers", afresh=True)) == want[1]
        assert host("from_disk", model=checkpoint(2))[0]
        assert got["tokens"][:cut] == host("continued", prompt=[5, 6, 7], tokens=cut)["tokens"]


def test_two_engines_get_each_version_together_and_one_that_is_killed_holds_nothing_up(checkpoint, daemon):
    now = load_file(f"{checkpoint(1)}/model.safetensors")
    names = [ENGINE, "engine-b"]
    with contextlib.ExitStack() as opened:
        hosts = [opened.enter_context(contextlib.closing(Host(checkpoint(0), 1, env={**os.environ, "SGLANG_CPU_OMP_THREADS_BIND": str(core)})))
                 for core in (0, 1)]
        want = {}
        for seed in (1, 2, 0):
            assert hosts[0]("from_disk", model=checkpoint(seed))[0]
            want[seed] = said(hosts[0]("answers"))
        client = opened.enter_context(Client(daemon.grpc))
        trainer = opened.enter_context(weightwire.torch.Publisher(lambda: now.items(), rank=0, world_size=1, agent=daemon.agent_socket))

        def update(who, version):
            hosts[who]("update", engine=names[who], checkpoint=checkpoint(0), version=version, agent=daemon.agent_socket, deadline=120)

        def publish(version, seed):
            now.clear()
            now.update(load_file(f"{checkpoint(seed)}/model.safetensors"))
            return trainer.publish(version)
        for who in (0, 1):  # each engine takes part from its first ticket on
            release = publish(1 + who, 1)
            update(0, 1 + who)
        update(1, 2)
        for version, seed in enumerate((2, 1), 3):
            release = publish(version, seed)
            with ThreadPoolExecutor(2) as both:
                list(both.map(lambda who: update(who, version), (0, 1)))
            release.wait_released(60)
            assert [said(host("answers")) for host in hosts] == [want[seed]] * 2, f"version {version}"
            (epoch,) = [e for e in client.status().epochs if e.version == version and e.kind == "publish"]
            assert (epoch.phase, sorted(epoch.engines), epoch.attempt) == ("committed", names, 1)

        release = publish(5, 2)
        os.killpg(hosts[1].pid, signal.SIGKILL)
        update(0, 5)
        release.wait_released(60)
        assert said(hosts[0]("answers")) == want[2]
        assert client.status().committed_version == 5
