"""The rendered pods run the disaggregated job: trainer and engine pods that share nothing but the network, each with its
own sidecar, as user 10001 on read-only roots, with a certificate for each role; the coordinator is killed in the middle."""

import contextlib
import json
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
TLS = {"tls": {"coordinatorSecret": "coordinator"}}


def app(command):
    return {"containers": [{"name": "app", "image": "app:1", "command": ["sh", "-ec", command],
                            "env": [{"name": "APP", "value": "/run/app/app.sock"}],
                            "volumeMounts": [{"name": "models", "mountPath": "/models", "readOnly": True},
                                             {"name": "app", "mountPath": "/run/app"}]}],
            "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}, {"name": "app", "emptyDir": {}}]}


RUN = "exec python -m demo.processes $APP"
WORKLOADS = {"workloads": {
    "trainer": {"kind": "StatefulSet", "replicas": 2,
                "tlsSecret": "trainer",
                "podSpec": app(f"{RUN} trainer $WEIGHTWIRE_AGENT_SOCKET /models 2 1 ${{HOSTNAME##*-}}")},
    "engine": {"kind": "Deployment", "replicas": 2, "tlsSecret": "engine", "podSpec": app(f"{RUN} engine $WEIGHTWIRE_AGENT_SOCKET /models $HOSTNAME 1 0")},
}}


@contextlib.contextmanager
def running_cluster(image=""):
    """All pods of the job; not started yet."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="wwpod-", dir="/tmp"))  # short: sockets lie in it
    directory.chmod(0o755)
    models = directory / "models"
    models.mkdir()
    (models / "config.json").write_text(json.dumps(CONFIG))
    for version in (1, 2):
        checkpoint.write(str(models / f"v{version}"), CONFIG, seed=version)
    manifests = chart.objects(chart.profile("tcp"), TLS, WORKLOADS,
                              {"coordinator": {"config": {"min_engines": 2, "lease_ms": 30_000}}})
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


def move_versions_across_a_coordinators_death(cluster):
    trainers, engines = (sorted(name for name in cluster.pods if name.startswith(kind)) for kind in ("trainer", "engine"))
    coordinator = cluster.pods[COORDINATOR].containers["coordinator"]
    cluster.pods[COORDINATOR].start()
    for name in trainers + engines:  # not in threads: a container ends with the thread that started it
        cluster.pods[name].start()

    def tell(name, *request):
        path = cluster.pods[name].volume("app") / "app.sock"

        def listening():
            try:
                return ask(str(path), *request), True
            except (FileNotFoundError, ConnectionRefusedError):
                return None
        end = time.monotonic() + 60
        while not (answer := listening()):
            assert time.monotonic() < end, f"{name}: {cluster.pods[name].containers['app'].log.read_text()}"
            time.sleep(0.1)
        return answer[0]

    def move(version):
        each(trainers, lambda name: tell(name, "load", f"/models/v{version}"))
        for name in engines:
            tell(name, "expect", version, f"/models/v{version}")
        epochs = {epoch for epoch, _ in each(trainers, lambda name: tell(name, "publish", version))}
        for name in engines:
            until(f"{name} serves version {version}", lambda: tell(name, "verify", version, f"/models/v{version}")[2] == version)
            compared, wrong, _ = tell(name, "verify", version, f"/models/v{version}")
            assert compared > 100_000 and wrong == 0
        assert len(epochs) == 1
        return epochs.pop()

    def wwctl(verb):
        # An operator beside the coordinator.
        namespace, person = cluster.pods[COORDINATOR].namespace, cluster.person
        return json.loads(pods.run(*namespace.enter(
            str(pods.BINARIES / "wwctl"), verb, "--json", "--address", "localhost:7411", "--tls-cert", person.cert, "--tls-key",
            person.key, "--tls-ca", person.ca)))

    first = move(1)
    coordinator.await_probe("readinessProbe")
    assert int(wwctl("status")["committed_version"]) == 1
    (epoch,) = wwctl("epochs")
    assert epoch["engines"] == engines and epoch["bytes_by_transport"] == {"tcp": epoch["bytes"]}  # no two pods share memory
    for name in (COORDINATOR, *trainers, *engines):
        cluster.pods[name].assert_confined()

    coordinator.kill()
    coordinator.start()
    coordinator.await_probe("startupProbe")
    assert int(wwctl("status")["committed_version"]) == 1  # from the journal on its volume
    for name in trainers + engines:
        cluster.pods[name].containers["weightwire-agent"].await_page(7412, "/readyz")
    for name in trainers:  # a publisher does not attach again by itself: its container ends, the kubelet starts it
        container = cluster.pods[name].containers["app"]
        container.kill()
        (cluster.pods[name].volume("app") / "app.sock").unlink()
        container.start()
    assert move(2) > first
    # Everything ends well on the kubelet's SIGTERM: applications, then sidecars, then the coordinator.
    for name in trainers + engines:
        cluster.pods[name].containers["app"].kill()
    codes = each(trainers + engines, lambda name: cluster.pods[name].containers["weightwire-agent"].terminate())
    assert codes == [0] * 4 and coordinator.terminate() == 0
