"""`wwctl doctor`: each misconfiguration that it knows is planted once, found, and said how to mend."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from conftest import BINARIES, stand_still, until
from demo import oracle
from demo.fleet import Daemon
from soak_engine import EngineProcess
from test_client import CONFIG, engine, trainer
from weightwire import Publisher, Subscriber, TensorMeta
from weightwire.errors import WeightwireError
from weightwire.v1 import coordinator_pb2 as pb
from weightwire.v1 import coordinator_pb2_grpc, types_pb2


def doctor(*arguments, environment=None, limits=(), prefix=()):
    """(findings by check, the run) of `wwctl doctor --json`; its exit code must agree with them."""
    lower = ["prlimit", *limits] if limits else []  # a fork with code of our own does not go with gRPC's threads
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WEIGHTWIRE_")}
    run = subprocess.run([*lower, *prefix, BINARIES / "wwctl", "doctor", "--json", "--timeout", "20", *map(str, arguments)], timeout=60,
                         capture_output=True, text=True, env={**clean, **(environment or {})})
    assert run.returncode in (0, 1), run.stderr
    findings = json.loads(run.stdout)["findings"]
    assert (run.returncode == 1) == bool(findings), run.stdout
    for finding in findings:
        assert set(finding) == {"check", "where", "what", "remedy"} and all(finding.values()), finding
    return {f["check"]: f for f in findings}


@pytest.fixture
def config(tmp_path):
    """Writes a configuration in which the doctor finds nothing, changed by options; None leaves a key out."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    count = iter(range(100))

    def write(**options):
        agent = options.get("role") == "agent"
        settings = {"role": "coordinator", "listen": "127.0.0.1:0", "http": "127.0.0.1:0", "state_dir": folder / "state",
                    "agent_socket": folder / "agent.sock", "data_listen": "127.0.0.1:0", "stage_bytes_max": 64 << 20,
                    "slots_in_pool": 2, "tcp_connections": 1, **({"state_dir": None} if agent else {}), **options}
        path = tmp_path / f"config-{next(count)}.yaml"
        path.write_text("".join(f"{k}: {v}\n" for k, v in settings.items() if v is not None))
        return path
    return write


@contextlib.contextmanager
def claimed(status):
    """A coordinator that answers Status with `status`."""
    class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
        def Status(self, request, context):
            return status
    server = grpc.server(ThreadPoolExecutor(2))
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Coordinator(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait(10)


def healthy(**changes) -> pb.StatusResponse:
    """A job of one trainer rank and one engine rank that serves version 3."""
    status = pb.StatusResponse(job="default", committed_epoch=3, committed_version=3, committed_unix_seconds=time.time() - 60,
                               deciding=True, agents=1)
    for role, group in ((types_pb2.GROUP_ROLE_TRAINER, "trainer"), (types_pb2.GROUP_ROLE_ENGINE, "engine-a")):
        status.participants.add(role=role, group=group, world_size=1, agent=1, agent_name="pod-1", pid=7, has_layout=True,
                                tensors=3, bytes=1 << 30)
    status.engines.add(name="engine-a", state=pb.ENGINE_STATE_SERVING, serving_epoch=3, version=3, ranks_present=1,
                       world_size=1, ready=True)
    status.MergeFrom(pb.StatusResponse(**changes))
    return status


def test_nothing_is_found_where_nothing_is_wrong(config, daemon, groups):
    assert doctor("--config", config()) == {}
    with claimed(healthy()) as address:
        assert doctor("--address", address) == {}
        assert doctor("--config", config(role="agent", coordinator=address)) == {}
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(1)
    groups[1].wait_version(1)
    assert doctor("--address", daemon.grpc) == {}


@pytest.mark.parametrize("options, what", [
    ({"listn": "127.0.0.1:0"}, "did you mean"), ({"slot_bytes": 9000}, "4096"), ({"listen": "0.0.0.0:7411"}, "reached from other hosts"),
    ({"role": "agent"}, "coordinator")])
def test_settings_that_weightwired_refuses(config, options, what):
    found = doctor("--config", config(**options))["config"]
    assert what in found["what"] + found["remedy"]


def test_a_journal_that_does_not_outlive_its_process(config):
    assert "in memory" in doctor("--config", config(state_dir=None))["state_dir"]["what"]
    found = doctor("--config", config(state_dir="/dev/shm/weightwire-doctor/state"))
    assert "lies in memory" in found["state_dir"]["what"]
    assert not os.path.exists("/dev/shm/weightwire-doctor"), "the doctor changes nothing"


def test_a_state_dir_that_cannot_be_written(config, tmp_path):
    (tmp_path / "file").write_text("")
    found = doctor("--config", config(state_dir=tmp_path / "file/state"))["state_dir"]
    assert f"{tmp_path}/file is no directory" in found["what"]


def test_a_socket_folder_that_others_can_enter(config, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    with claimed(healthy()) as address:
        found = doctor("--config", config(role="agent", coordinator=address, agent_socket=tmp_path / "open/agent.sock"))["agent_socket"]
    assert "entered by others" in found["what"] and "chmod 700" in found["remedy"]


def test_a_listener_that_is_open_to_all(config):
    found = doctor("--config", config(listen="0.0.0.0:0", http="0.0.0.0:0", insecure="true"))["insecure"]
    assert "listen, http" in found["what"]


def test_a_port_that_is_taken(config):
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = doctor("--config", config(listen=f"127.0.0.1:{other.getsockname()[1]}"))["port"]
    assert found["what"].startswith("listen: ") and "in use" in found["what"]


def test_a_coordinator_that_is_not_there(config):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    found = doctor("--config", config(role="agent", coordinator=f"127.0.0.1:{port}"))["coordinator"]
    assert found["where"].endswith(".yaml")
    assert doctor("--address", f"127.0.0.1:{port}")["coordinator"]["where"] == f"127.0.0.1:{port}"


def test_an_agent_of_another_job(config):
    with claimed(healthy()) as address:
        found = doctor("--config", config(role="agent", coordinator=address, job="other"))["job"]
    assert "job other" in found["what"] and "set job to default" in found["remedy"]


def test_agents_that_do_not_fit_each_other(config):
    with claimed(healthy()) as address:
        agent = {"role": "agent", "coordinator": address}
        found = doctor("--config", config(**agent, transports="[shm]"), "--config", config(**agent, transports="[tcp]"))
        assert "cannot send each other anything" in found["transports"]["what"]
        assert "job" in doctor("--config", config(**agent), "--config", config(**agent, job="other"))


def test_gpu_memory_that_goes_through_the_hosts(config):
    lending = {"role": "agent", "coordinator": "127.0.0.1:1", "gpu": "auto", "gpu_slab_bytes": 1}
    found = doctor("--config", config(**lending))["gpu"]
    assert "cuda_ipc" in found["what"] and "cuda_ipc" in found["remedy"]
    assert "gpu" not in doctor("--config", config(**lending, transports="[cuda_ipc, tcp]"))


def test_a_data_plane_that_peers_cannot_reach(config):
    # 192.0.2.0/24 is nobody's (RFC 5737)
    found = doctor("--config", config(role="agent", coordinator="192.0.2.1:7411", advertise_host="127.0.0.1"))
    assert "can be reached from this one only" in found["data_listen"]["what"] and "advertise_host" in found


def test_limits_that_are_too_low(config):
    assert "1024" in doctor("--config", config(), limits=["--nofile=512:"])["open_files"]["remedy"]
    with claimed(healthy()) as address:
        path = config(role="agent", coordinator=address, transports="[ucx, tcp]")
        assert "IPC_LOCK" in doctor("--config", path, limits=["--memlock=65536:"])["locked_memory"]["remedy"]


def may_mount() -> bool:
    """Not without root, nor in a chroot, whose root is no mount."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=30).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="mounts a file system")
def test_a_dev_shm_that_is_too_small(config):
    with claimed(healthy()) as address:
        path = config(role="agent", coordinator=address, transports="[ucx]")
        small = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh"]
        assert "1.0 MB" in doctor("--config", path, prefix=small)["dev_shm"]["what"]


def test_stages_that_do_not_fit_into_memory(config):
    with claimed(healthy()) as address:
        found = doctor("--config", config(role="agent", coordinator=address, stage_bytes_max=1 << 50))["memory"]
        assert "stage_bytes_max" in found["remedy"]
        # pod-1 has an engine rank of 1 GiB, which takes two buffers
        found = doctor("--config", config(role="agent", coordinator=address, name="pod-1", stage_bytes_max=1 << 30))
        assert "2 buffers" in found["stage_bytes_max"]["what"]


def test_a_rate_at_which_no_version_arrives_in_time(config):
    with claimed(healthy()) as address:
        found = doctor("--config", config(role="agent", coordinator=address, rate_limit=8 << 20))["rate_limit"]
    assert "128.00 s" in found["what"]


def test_the_environment_counts_as_it_does_for_weightwired(config):
    assert "state_dir" in doctor("--config", config(), environment={"WEIGHTWIRE_STATE_DIR": ""})


def test_ranks_that_are_missing_in_a_running_job(daemon, groups):
    with Subscriber(group="engine-b", rank=1, world_size=3, agent=daemon.agent_socket), \
            Publisher(rank=0, world_size=1, agent=daemon.agent_socket):
        found = doctor("--address", daemon.grpc)
    assert "ranks 0, 2 are missing (3 ranks expected)" in found["ranks"]["what"] and found["ranks"]["where"] == "engine-b"
    assert "layout" in found


def test_an_empty_job(daemon):
    assert "no rank has registered" in doctor("--address", daemon.grpc)["members"]["what"]


def first_words(address) -> str:
    """The first line of `wwctl status`."""
    shown = subprocess.run([BINARIES / "wwctl", "status", "--address", address], timeout=60, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout.splitlines()[0]


def page(daemon) -> dict:
    """What the status page draws."""
    return json.loads(urllib.request.urlopen(f"http://{daemon.http}/api/status", timeout=20).read())


def test_a_missing_trainer_rank(daemon, groups):
    groups.append(engine(daemon))
    with Publisher(rank=0, world_size=2, agent=daemon.agent_socket):
        found = doctor("--address", daemon.grpc)
        assert next(iter(found)) == "trainer", "it comes first"
        assert found["trainer"]["where"] == "trainer" and "rank 1 is missing (2 ranks expected)" in found["trainer"]["what"]
        assert first_words(daemon.grpc).startswith("waiting for: trainer/0 has not sent its layout, trainer/1 has not registered")
        assert page(daemon)["waiting_for"].startswith("trainer/0: layout, trainer/1: register")


def test_a_publish_that_a_rank_does_not_join_and_that_is_given_up(coordinator_job):
    job = coordinator_job()
    job.attach_trainer(time.monotonic() + 60)
    release = job.publishers[0].publish(1, deadline=30)
    found = until("the doctor finds it", lambda: doctor("--address", job.address).get("held_up"))
    assert "version 1: trainer/1 has not published" in found["what"]
    assert first_words(job.address) == "waiting for: version 1: trainer/1 has not published"
    with pytest.raises(WeightwireError, match="trainer/1"):
        release.wait_released(120)
    [row] = job.status().epochs
    assert row.version == 1 and row.phase == types_pb2.EPOCH_PHASE_ABORTED and "every rank" in row.why.message
    assert job.coordinator.counter('weightwire_publishes_given_up_total{reason="missing_rank"}') == 1


def test_an_agent_that_is_stopped(coordinator_job):
    job = coordinator_job(lease_ms=120_000)
    stopped = job.agents[1]
    stand_still(stopped.pid)
    try:
        found = until("the doctor finds it", lambda: (f := doctor("--address", job.address)) and "silent" in f and f)
        assert next(iter(found)) == "silent" and found["silent"]["where"] == "rollout"
        assert "engine-1/0, engine-2/0" in found["silent"]["what"]
        assert first_words(job.address) == "waiting for: engine-1/0 has said nothing for a while, engine-2/0 has said nothing for a while"
        assert page(job.coordinator)["waiting_for"] == "engine-1/0: silent, engine-2/0: silent"
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    until("it is heard again", lambda: job.status().waiting_for == "")


def test_an_engine_that_is_stopped_and_does_not_flip(coordinator_job, tmp_path):
    job = coordinator_job(commit_deadline_ms=600_000)
    job.attach_trainer(time.monotonic() + 60)
    stuck = EngineProcess("engine-9", job.agents[1].agent_socket, str(tmp_path))
    try:
        until("engine-9 is complete", lambda: len([p for p in job.status().participants if p.has_layout]) == 6)
        stand_still(stuck.process.pid)
        releases = job.publish(deadline=600)
        found = until("the doctor finds it", lambda: doctor("--address", job.address).get("flip"))
        assert "for engine-9/0 still switching to the new version" in found["what"] and "and have not acknowledged it" in found["remedy"]
        line = "epoch 1 (version 1) committing: engine-9/0: swapped"
        assert first_words(job.address) == "waiting for: epoch 1 (version 1) committing: engine-9/0 still switching to the new version"
        assert page(job.coordinator)["waiting_for"] == line
        os.kill(stuck.process.pid, signal.SIGCONT)
        for release in releases:
            release.wait_released(120)
        until("it is served everywhere", lambda: job.status().committed_version == 1 and stuck.version == 1)
        until("nothing is found", lambda: doctor("--address", job.address) == {})
    finally:
        os.kill(stuck.process.pid, signal.SIGCONT)
        stuck.close()


def test_an_on_offer_that_goes_on_raising(daemon, groups):
    """It attaches again after ever longer pauses; meanwhile status and doctor have its reason, not its log alone."""
    def wake():
        raise ValueError("the consumer's own mistake")
    groups += [trainer(daemon), engine(daemon)]
    like = groups[1].ranks[0]
    failing = Subscriber(group="engine-b", rank=0, world_size=1, agent=daemon.agent_socket, on_offer=wake)
    groups.append(failing)
    shapes = oracle.vllm_shapes(CONFIG, 1)
    failing.bind(CONFIG, "vllm:tp1", [TensorMeta(name, "BF16", shape) for name, shape in shapes.items()])
    groups[0].publish(1)
    groups[1].wait_version(1)

    def ranks():
        found = doctor("--address", daemon.grpc).get("ranks")
        return found if found and "on_offer" in found["what"] else None
    found = until("the doctor names the reason", ranks)
    assert found["where"] == "engine-b" and "version 1 cannot be taken: on_offer: ValueError: the consumer's own mistake" in found["what"]
    assert like.last_fence is None


@pytest.mark.parametrize("whose", ["engine", "trainer"])
def test_an_idle_process_that_is_stopped(coordinator_job, tmp_path, whose):
    """Nothing is published: nobody waits for it yet."""
    job = coordinator_job()
    if whose == "engine":
        idle = EngineProcess("engine-9", job.agents[1].agent_socket, str(tmp_path))
        pid, rank, agent, close = idle.process.pid, "engine-9/0", "rollout", idle.close
        job.attach_trainer(time.monotonic() + 60)
    else:
        idle = subprocess.Popen([sys.executable, "-c", "import sys, weightwire\n"
                                 "weightwire.Publisher(rank=0, world_size=1, agent=sys.argv[1])\n"
                                 "print('there', flush=True)\nsys.stdin.read()", job.agents[0].agent_socket],
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert idle.stdout.readline() == "there\n"
        pid, rank, agent = idle.pid, "trainer/0", "trainer"

        def close():
            idle.stdin.close()
            assert idle.wait(60) == 0
    try:
        until("it is there", lambda: any(f"{p.group}/{p.rank}" == rank for p in job.status().participants))
        stand_still(pid)
        began = time.monotonic()
        found = until("the doctor finds it", lambda: doctor("--address", job.address).get("process"))
        seconds = time.monotonic() - began
        assert found["where"] == rank and f"its process {pid} is stopped (agent {agent})" in found["what"]
        assert f"kill -CONT {pid}" in found["remedy"]
        line = f"{rank}: its process {pid} is stopped"
        assert first_words(job.address) == f"waiting for: {line}" and page(job.coordinator)["waiting_for"] == line
        assert seconds < 5, seconds
    finally:
        os.kill(pid, signal.SIGCONT)
        until("nothing is said of it", lambda: not job.status().troubles)
        close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_process_that_its_agent_refused_for_its_user(coordinator_job):
    """Here the agent's user is the other one: root passes the socket's mode, and is refused for its uid."""
    job = coordinator_job()
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, nobody, nobody)
        shutil.copy(BINARIES / "weightwired", f"{folder}/weightwired")
        program = f"{folder}/as-nobody"
        with open(program, "w") as out:
            out.write(f'#!/bin/sh\nexec setpriv --reuid={nobody} --clear-groups "{folder}/weightwired" "$@"\n')
        os.chmod(program, 0o755)
        os.mkdir(f"{folder}/agent", 0o700)
        os.chown(f"{folder}/agent", nobody, nobody)
        agent = Daemon(program, f"{folder}/agent", "nobodys", role="agent", coordinator=job.address)
        job.agents.append(agent)
        with pytest.raises(WeightwireError):
            Subscriber(group="engine-b", rank=0, world_size=1, agent=agent.agent_socket, timeout=3)
        began = time.monotonic()
        found = until("the doctor finds it", lambda: doctor("--address", job.address).get("process"))
        assert time.monotonic() - began < 5
        assert found["where"] == "nobodys" and "refused a process of uid 0" in found["what"] and "runAsUser" in found["remedy"]
        assert first_words(job.address).startswith("waiting for: nobodys: refused a process of uid 0")
        assert page(job.coordinator)["waiting_for"].startswith("nobodys: refused a process of uid 0")
        job.agents.remove(agent)
        assert agent.stop() == 0


def test_wrong_hosts_of_the_coordinator_are_asked_at_once(config):
    with contextlib.ExitStack() as stack:
        # They take the connection and never say a word, as a wrong service behind a right port does.
        deaf = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(5)]
        hosts = [f"127.0.0.1:{s.getsockname()[1]}" for s in deaf]
        path = config(role="agent", coordinator=f"[{', '.join(hosts)}]")
        began = time.monotonic()
        run = subprocess.run([BINARIES / "wwctl", "doctor", "--json", "--config", path], timeout=60, capture_output=True, text=True)
        assert time.monotonic() - began < 15, "4 s for all of them together, not for each"
    found = {f["check"]: f for f in json.loads(run.stdout)["findings"]}
    assert next(iter(found)) == "coordinator" and all(host in found["coordinator"]["what"] for host in hosts)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_process_of_another_user_than_its_agent(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    other = ["setpriv", "--reuid=65534", "--clear-groups"]
    environment = {"WEIGHTWIRE_AGENT_SOCKET": daemon.agent_socket}
    found = doctor("--address", daemon.grpc, environment=environment, prefix=other)
    assert set(found) == {"uid"} and "uid 0" in found["uid"]["what"] and "has uid 65534" in found["uid"]["what"]
    assert doctor("--address", daemon.grpc, environment=environment) == {}


def test_an_agent_that_is_not_there(daemon, groups, tmp_path):
    groups += [trainer(daemon), engine(daemon)]
    found = doctor("--address", daemon.grpc, environment={"WEIGHTWIRE_AGENT_SOCKET": f"{tmp_path}/nobody.sock"})
    assert set(found) == {"agent_socket"} and "no agent listens there" in found["agent_socket"]["what"]


def epoch(number, phase, **fields):
    return pb.StatusResponse.Epoch(epoch=number, kind=types_pb2.EPOCH_KIND_PUBLISH, version=number, phase=phase, **fields)


def test_what_a_status_shows(config):
    now = time.time()
    aborted = [epoch(n, types_pb2.EPOCH_PHASE_ABORTED, why=types_pb2.Outcome(code=10, message="no route to pod-2"),
                     started_unix_seconds=now - 90, total_seconds=1) for n in (6, 5, 4)]
    stuck = epoch(7, types_pb2.EPOCH_PHASE_COMMITTING, waiting_for=["engine-a/0: swapped"], started_unix_seconds=now - 41,
                  transfer_seconds=1, commit_seconds=40, total_seconds=41)
    cases = [
        ({"epochs": aborted}, "aborts", "the last 3 epochs aborted: no route to pod-2"),
        ({"epochs": [stuck]}, "flip", "has waited for 40.00 s for engine-a/0 still switching to the new version"),
        ({"engines": [pb.StatusResponse.Engine(name="engine-b", ranks_present=1, world_size=1, lag_versions=2, last_error="no room")]},
         "engine", "2 versions behind: no room"),
        ({"committed_unix_seconds": now + 600}, "clock", "ahead of this host's"),
    ]
    for changes, check, what in cases:
        with claimed(healthy(**changes)) as address:
            found = doctor("--address", address)
            assert set(found) == {check} and what in found[check]["what"], found
    stopped = healthy(waiting_for="an operator: the journal failed: disk full")
    stopped.deciding = False
    with claimed(stopped) as address:
        assert "disk full" in doctor("--address", address)["journal"]["what"]


def test_text_for_people_names_the_remedy(config):
    run = subprocess.run([BINARIES / "wwctl", "doctor", "--config", config(state_dir=None)], timeout=60, capture_output=True, text=True)
    assert run.returncode == 1 and "\n  fix: set state_dir" in run.stdout and run.stdout.endswith("1 found\n")
