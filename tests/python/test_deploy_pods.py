"""The rendered pods run the disaggregated job: trainer and engine pods that share nothing but the network, each with its
own sidecar, as user 10001 on read-only roots, with a certificate for each role and pages over TLS; the coordinator is killed while a version is on
its way to the engines, and started again."""

import contextlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import certificates
import chart
import pods
from demo import checkpoint
from demo.processes import ask

WHY_NOT = pods.possible()
CONFIG = {**checkpoint.SMALL, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 4, "vocab_size": 1001}
COORDINATOR = "rl-weightwire-coordinator-0"
TLS = {"tls": {"coordinatorSecret": "coordinator", "pages": True}}
VERSIONS = (1, 2, 3)
# So that a version of 1.2 MB is 2 s under way.
NARROW = {"agent": {"config": {"rate_limit": 600_000, "slot_bytes": 128 << 10, "chunk_bytes": 64 << 10, "segment_bytes_max": 32 << 10}}}


def app(command):
    return {"containers": [{"name": "app", "image": "app:1", "command": ["sh", "-ec", command],
                            "env": [{"name": "APP", "value": "/run/app/app.sock"}],
                            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True},
                                             {"name": "app", "mountPath": "/run/app"}]}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}, {"name": "app", "emptyDir": {}}]}


RUN = "exec python -m demo.processes $APP"
WORKLOADS = {"workloads": {
    "trainer": {"kind": "StatefulSet", "replicas": 2,
                "tlsSecret": "trainer", "drainSeconds": 0,
                "podSpec": app(f"{RUN} trainer $WEIGHTWIRE_AGENT_SOCKET /models 2 1 ${{HOSTNAME##*-}}")},
    "engine": {"kind": "Deployment", "replicas": 2, "tlsSecret": "engine", "podSpec": app(f"{RUN} engine $WEIGHTWIRE_AGENT_SOCKET /models $HOSTNAME 1 0")},
}}


@contextlib.contextmanager
def running_cluster(image="", min_engines=2):
    """All pods of the job; not started yet."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="wwpod-", dir="/tmp"))  # short: sockets lie in it
    directory.chmod(0o755)
    models = directory / "models"
    models.mkdir()
    (models / "config.json").write_text(json.dumps(CONFIG))
    for version in VERSIONS:
        checkpoint.write(str(models / f"v{version}"), CONFIG, seed=version)
    manifests = chart.objects(chart.profile("tcp"), TLS, NARROW, WORKLOADS,
                              {"coordinator": {"config": {"min_engines": min_engines, "lease_ms": 30_000}}})
    authority = certificates.Authority(directory / "authority")
    service = "DNS:rl-weightwire-coordinator.train.svc,DNS:localhost"
    for name, role in (("coordinator", "coordinator"), ("trainer", "trainer"), ("engine", "engine"), ("person", "operator")):
        authority.issue(name, role, job="rl", ns="train", **({"san": service} if role == "coordinator" else {}))
    secrets = {name: authority.directory / name for name in ("coordinator", "trainer", "engine")}
    running = pods.Cluster(manifests, directory, {"models": models}, secrets, image)
    running.person = authority.files("person")
    try:
        yield running
    finally:
        running.close()
        shutil.rmtree(directory, ignore_errors=True)


def each(names, call):
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(call, names))


def until(what, condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.1)


@pytest.mark.skipif(bool(WHY_NOT), reason=f"pods cannot run here: {WHY_NOT}")
def test_the_disaggregated_job_runs_in_the_rendered_pods_across_a_coordinators_death():
    with running_cluster() as cluster:
        move_versions_across_a_coordinators_death(cluster)


class RunningJob:
    """The cluster's applications, once all pods have started."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.trainers, self.engines = (sorted(name for name in cluster.pods if name.startswith(kind)) for kind in ("trainer", "engine"))
        self.coordinator = cluster.pods[COORDINATOR].containers["coordinator"]
        cluster.pods[COORDINATOR].start()
        for name in self.trainers + self.engines:  # not in threads: a container ends with the thread that started it
            cluster.pods[name].start()

    def tell(self, name, *request):
        path = self.cluster.pods[name].volume("app") / "app.sock"

        def listening():
            try:
                return ask(str(path), *request), True
            except (FileNotFoundError, ConnectionRefusedError):
                return None
        end = time.monotonic() + 60
        while not (answer := listening()):
            assert time.monotonic() < end, f"{name}: {self.cluster.pods[name].containers['app'].log.read_text()}"
            time.sleep(0.1)
        return answer[0]

    def load(self, version):
        each(self.trainers, lambda name: self.tell(name, "load", f"/models/v{version}"))
        for name in self.engines:
            self.tell(name, "expect", version, f"/models/v{version}")

    def publish(self, version):
        epochs = {epoch for epoch, _ in each(self.trainers, lambda name: self.tell(name, "publish", version))}
        assert len(epochs) == 1
        return epochs.pop()

    def assert_served(self, version):
        for name in self.engines:
            check = lambda: self.tell(name, "verify", version, f"/models/v{version}")
            until(f"{name} serves version {version}", lambda: check()[2] == version)
            compared, wrong, _ = check()
            assert compared > 100_000 and wrong == 0

    def wwctl(self, verb, pod=COORDINATOR, address="localhost:7411", certificate=True):
        # An operator beside the coordinator, or somebody else elsewhere.
        person = self.cluster.person
        own = ["--tls-cert", person.cert, "--tls-key", person.key, "--tls-ca", person.ca] if certificate else []
        command = self.cluster.pods[pod].namespace.enter(str(pods.BINARIES / "wwctl"), verb, "--json", "--address", address, *own)
        return json.loads(pods.run(*command))

    def end(self):
        """Everything ends well on the kubelet's SIGTERM: applications, then sidecars, then the coordinator."""
        for name in self.trainers + self.engines:
            self.cluster.pods[name].containers["app"].kill()
        codes = each(self.trainers + self.engines, lambda name: self.cluster.pods[name].containers["weightwire-agent"].terminate())
        assert set(codes) == {0} and self.coordinator.terminate() == 0


def move_versions_across_a_coordinators_death(cluster):
    job = RunningJob(cluster)
    trainers, engines, coordinator = job.trainers, job.engines, job.coordinator
    job.load(1)
    first = job.publish(1)
    job.assert_served(1)
    coordinator.await_probe("readinessProbe")
    assert int(job.wwctl("status")["committed_version"]) == 1
    (epoch,) = job.wwctl("epochs")
    assert epoch["engines"] == engines and epoch["bytes_by_transport"] == {"tcp": epoch["bytes"]}  # no two pods share memory
    for name in (COORDINATOR, *trainers, *engines):
        cluster.pods[name].assert_confined()
    assert_apart([cluster.pods[name] for name in (COORDINATOR, *trainers, *engines)])
    with pytest.raises(AssertionError, match="UNAVAILABLE"):  # who has no certificate is not heard
        job.wwctl("status", trainers[0], f"{cluster.pods[COORDINATOR].address}:7411", certificate=False)

    applications = {name: cluster.pods[name].containers["app"].pid for name in trainers + engines}
    job.load(2)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(job.publish, 2)
        until("version 2 moves", lambda: job.wwctl("epochs")[0]["phase"] == "EPOCH_PHASE_TRANSFERRING")
        coordinator.kill()
        assert not publishing.done()
        job.assert_served(1)  # by engines without a coordinator
        coordinator.start()
        coordinator.await_probe("startupProbe")
        assert int(job.wwctl("status")["committed_version"]) >= 1  # from the journal on its volume
        assert publishing.result(100) > first
    job.assert_served(2)
    for name in trainers + engines:
        cluster.pods[name].containers["weightwire-agent"].await_page(7412, "/readyz", scheme="HTTPS")
    job.load(3)
    job.publish(3)
    job.assert_served(3)
    assert int(job.wwctl("status")["committed_version"]) == 3
    # Nobody but the coordinator was started again.
    assert applications == {name: cluster.pods[name].containers["app"].pid for name in trainers + engines}
    job.end()


@pytest.mark.skipif(bool(WHY_NOT), reason=f"pods cannot run here: {WHY_NOT}")
def test_an_engines_pod_that_is_deleted_while_a_version_moves_costs_it_nothing():
    with running_cluster(min_engines=1) as cluster:
        job = RunningJob(cluster)
        job.load(1)
        job.publish(1)
        job.assert_served(1)
        leaving = job.engines[1]
        job.load(2)
        with ThreadPoolExecutor(1) as pool:
            publishing = pool.submit(job.publish, 2)
            until("version 2 moves", lambda: job.wwctl("epochs")[0]["phase"] == "EPOCH_PHASE_TRANSFERRING")
            hooks = cluster.pods[leaving].stop()
            assert set(hooks) == {"app", "weightwire-agent"}
            drained = hooks["weightwire-agent"]
            assert drained.returncode == 0 and f"{leaving} is drained; safe to stop" in drained.stdout, drained.stderr
            assert hooks["app"].returncode == 0
            publishing.result(100)
        moved = job.wwctl("epochs")
        assert [(epoch["version"], epoch["engines"], epoch["phase"]) for epoch in moved] == [
            (str(version), job.engines, "EPOCH_PHASE_COMMITTED") for version in (2, 1)], "no attempt was lost, and nobody was left out"
        assert not (cluster.pods[leaving].volume("weightwire-run") / "draining").exists()
        job.engines.remove(leaving)
        job.load(3)
        job.publish(3)
        job.assert_served(3)
        newest = job.wwctl("epochs")[0]
        assert (newest["engines"], newest["attempt"]) == (job.engines, 1)
        job.end()


def assert_apart(running):
    """The containers of a pod share a network and the agent's socket; those of two pods share neither."""
    networks, sockets = {}, {}
    for pod in running:
        networks[pod.name] = {os.readlink(f"/proc/{container.pid}/ns/net") for container in pod.containers.values()}
        sockets[pod.name] = {os.stat(f"/proc/{container.pid}/root{path}").st_ino for container in pod.containers.values()
                             if (path := container.environment.get("WEIGHTWIRE_AGENT_SOCKET"))}
        assert len(networks[pod.name]) == 1 and len(sockets[pod.name]) == (pod.name != COORDINATOR)
    assert len(set().union(*networks.values())) == len(running) and len(set().union(*sockets.values())) == len(running) - 1
