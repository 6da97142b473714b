"""helm/weightwire: what each profile renders is valid, safe and what weightwired understands; what is unsafe is refused."""

import json
import os
import re
import shutil
import subprocess

import jsonschema
import pytest
import yaml
from kubernetes_validate.utils import latest_version, validate

import chart
from conftest import BINARIES

#: The parts of the Prometheus operator's resources that the chart uses; kubernetes-validate has no custom resources.
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def only(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


META = only(("name",), name={"type": "string"}, namespace={"type": "string"}, labels=TEXTS)
RELABELING = only(("targetLabel",), targetLabel={"type": "string"}, replacement={"type": "string"},
                  sourceLabels={"type": "array", "items": {"type": "string"}})
IN_SECRET = only(("secret",), secret=only(("name", "key"), name={"type": "string"}, key={"type": "string"}))
TLS_CONFIG = only((), ca=IN_SECRET, cert=IN_SECRET, keySecret=IN_SECRET["properties"]["secret"], serverName={"type": "string"},
                  insecureSkipVerify={"type": "boolean"})
ENDPOINT = only(("port",), port={"type": "string"}, path={"type": "string"}, interval={"pattern": "^[0-9]+(ms|s|m)$"},
                scheme={"enum": ["http", "https"]}, tlsConfig=TLS_CONFIG,
                relabelings={"type": "array", "items": RELABELING})
RULE = only(("expr",), record={"type": "string"}, alert={"type": "string"}, expr={"type": "string"},
            labels=TEXTS, annotations=TEXTS, **{"for": {"pattern": "^[0-9]+[smh]$"}})
GROUP = only(("name", "rules"), name={"type": "string"}, interval={"type": "string"},
             rules={"type": "array", "minItems": 1, "items": RULE})
CUSTOM = {
    "PodMonitor": only(("selector", "podMetricsEndpoints"), selector=only(("matchLabels",), matchLabels=TEXTS),
                       podMetricsEndpoints={"type": "array", "minItems": 1, "items": ENDPOINT}),
    "PrometheusRule": only(("groups",), groups={"type": "array", "minItems": 1, "items": GROUP}),
}

WATCHED = {"monitoring": {name: {"enabled": True} for name in ("podMonitor", "rules", "dashboard")}}
CLAIM = {"metadata": {"name": "scratch"}, "spec": {"accessModes": ["ReadWriteOnce"],
                                                   "resources": {"requests": {"storage": "1Gi"}}}}
WORKLOADS = {"stateful": chart.workload("StatefulSet", replicas=4, volumeClaimTemplates=[CLAIM]),
             "stateless": chart.workload("Deployment", ports=[{"name": "api", "port": 8000}], labels={"team": "rl"},
                                         annotations={"note": "x"}, strategy={"type": "Recreate"})}


POD = {"containers": [{"name": "app", "image": "app:1"}]}
#: Manifests of others, as their operators' examples have them, and where their pod templates are: how many of each.
YOURS = {
    "StatefulSet": ("apps/v1", {"selector": {"matchLabels": {"a": "b"}}, "serviceName": "x",
                                "template": {"metadata": {"labels": {"a": "b"}}, "spec": POD}}, 1),
    "Deployment": ("apps/v1", {"selector": {"matchLabels": {"a": "b"}}, "template": {"metadata": {"labels": {"a": "b"}}, "spec": POD}}, 1),
    "Job": ("batch/v1", {"template": {"spec": {**POD, "restartPolicy": "Never"}}}, 1),
    "JobSet": ("jobset.x-k8s.io/v1alpha2", {"replicatedJobs": [{"name": "w", "template": {"spec": {"template": {"spec": POD}}}}]}, 1),
    "RayCluster": ("ray.io/v1", {"headGroupSpec": {"rayStartParams": {}, "template": {"spec": POD}},
                                 "workerGroupSpecs": [{"groupName": "a", "template": {"spec": POD}},
                                                      {"groupName": "b", "template": {"spec": POD}}]}, 3),
    "RayJob": ("ray.io/v1", {"entrypoint": "x", "rayClusterSpec": {"headGroupSpec": {"template": {"spec": POD}}}}, 1),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io/v1", {"replicas": 2, "leaderWorkerTemplate": {"size": 4, "workerTemplate": {"spec": POD}}}, 1),
    "PyTorchJob": ("kubeflow.org/v1", {"pytorchReplicaSpecs": {"Master": {"replicas": 1, "template": {"spec": POD}},
                                                               "Worker": {"replicas": 3, "template": {"spec": POD}}}}, 2),
}


def yours(kind, **more):
    api, spec, _ = YOURS[kind]
    return {"sidecars": {"mine": {"manifest": {"apiVersion": api, "kind": kind, "metadata": {"name": "x"}, "spec": spec}, **more}}}


def rendered(name, *layers):
    return chart.objects(chart.profile(name), chart.ACCEPT, *layers)


def pods(manifests):
    return {item["metadata"]["name"]: item["spec"]["template"]
            for item in manifests if item["kind"] in ("StatefulSet", "Deployment")}


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def selects(selector, template):
    return selector.items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", chart.PROFILES)
def test_manifests_are_strictly_valid_for_the_oldest_and_the_newest_kubernetes(name):
    both = {"workloads": {kind: values["workloads"]["app"] for kind, values in WORKLOADS.items()}}
    manifests = rendered(name, WATCHED, both)
    assert {"PodMonitor", "PrometheusRule"} <= {item["kind"] for item in manifests}
    for item in manifests:
        if item["kind"] in CUSTOM:
            assert item["apiVersion"] == "monitoring.coreos.com/v1"
            schema = only(("spec",), apiVersion={}, kind={}, metadata=META, spec=CUSTOM[item["kind"]])
            jsonschema.Draft7Validator(schema).validate(item)
            continue
        for version in ("1.29", latest_version()):
            validate(item, version, strict=True)


@pytest.mark.parametrize("name", chart.PROFILES)
@pytest.mark.parametrize("version", ("v1.29.0", f"v{latest_version()}.0"))
def test_helm_lints_every_profile_and_mode(name, version):
    for values in (WORKLOADS["stateful"], yours("RayCluster"), yours("Job")):
        report = chart.ask_helm(values=chart.merged(chart.profile(name), chart.ACCEPT, WATCHED, values), lint=version)
        assert report["total_charts_linted"] == 1 and not report["errors"], report
        assert not [message for message in report["messages"] if message["severity"] > 1], report


UNSAFE = [
    ({"acceptPlaintext": False}, "no certificates"),
    ({"tls": {"agentSecret": "a"}, **chart.workload()}, "would speak TLS to a coordinator in plaintext"),
    ({"tls": {"coordinatorSecret": "c"}, **chart.workload()}, "workloads.app: its agents have no certificate"),
    ({"agent": {"config": {"tls_key": "/x"}}}, "agent.config.tls_key is set by the chart"),
    ({"tls": {"tokenKeySecret": "k"}}, "tokens are taken over TLS only"),
    ({"tls": {"coordinatorSecret": "c", "agentSecret": "a", "agentTokens": True}}, "could not tell whose the agents' tokens are"),
    ({"agent": {"config": {"token_file": "/x"}}}, "agent.config.token_file is set by the chart"),
    ({"tls": {"pages": True}}, "tls.pages: pages are served with the certificates of coordinator and agents"),
    ({"tls": {"coordinatorSecret": "c", "agentSecret": "a", "tokenKeySecret": "k", "agentTokens": True, "pages": True}},
     "no certificate to serve their pages with"),
    ({"tls": {"coordinatorSecret": "c", "pages": True}, "monitoring": {"podMonitor": {"enabled": True}}},
     "nobody is shown metrics without a certificate"),
    ({"tls": {"coordinatorSecret": "c"}, "monitoring": {"podMonitor": {"enabled": True, "tls": {"secret": "m"}}}},
     "would speak TLS to pages in plaintext"),
    ({"agent": {"config": {"integrity": "tls"}}, **chart.workload()}, "agents show each other their certificates"),
    ({"tls": {"coordinatorSecret": "c", "agentSecret": "a"},
      "agent": {"config": {"integrity": "tls"}, "transports": ["shm", "ucx"]}, **chart.workload()},
     "agents show each other their certificates"),
    ({"agent": {"config": {"http_tls": True}}}, "agent.config.http_tls is set by the chart: use"),
    ({"coordinator": {"config": {"http_tls": True}}}, "coordinator.config.http_tls is set by the chart: use tls.pages"),
    ({"monitoring": {"podMonitor": {"tls": {"secret": "m", "skip": True}}}}, "$.monitoring.podMonitor.tls"),
    ({"tls": {"secret": "c"}}, "$.tls"),
    ({"networkPolicy": {"enabled": False}}, "every pod of the cluster could reach what is plaintext"),
    ({"networkPolicy": {"agentEgress": {"allow": [{}]}}}, "agents may call anybody as it is"),
    ({"networkPolicy": {"enabled": False, "agentEgress": {"restricted": True}}, "acceptOpenNetwork": True}, "nothing is held back"),
    ({"agent": {"drainHook": "bash"}}, "$.agent.drainHook"),
    ({"coordinator": {"replicas": 2}}, "without etcd a job has one coordinator"),
    ({"coordinator": {"replicas": 0}}, "nothing could be published"),
    ({"coordinator": {"etcd": ["etcd"]}}, "$.coordinator.etcd"),
    ({"coordinator": {"config": {"etcd": "a:2379"}}}, "coordinator.config.etcd is set by the chart"),
    ({"coordinator": {"config": {"etcd_user": "a"}}}, "coordinator.config.etcd_user is set by the chart"),
    ({"coordinator": {"etcdAccess": {"secret": "s"}}}, "coordinator.etcd is not"),
    ({"coordinator": {"etcd": ["a:2379"], "etcdAccess": {"user": "a"}}}, "coordinator.etcdAccess.secret is not set"),
    ({"coordinator": {"persistence": {"enabled": False}}}, "hand out epoch numbers again"),
    ({"coordinator": {"config": {"state_dir": "/tmp/x"}}}, "coordinator.config.state_dir is set by the chart"),
    ({"agent": {"config": {"stage_bytes_max": 1}}}, "agent.stageGiB"),
    ({"agent": {"config": {"allow_uids": [0], "socket_group": 5}}}, "agent.config.socket_group is set by the chart"),
    ({"agent": {"config": {"advertise_host": "10.0.0.1"}}}, "agent.config.advertise_host is set by the chart"),
    ({"rdma": {"enabled": True, "resource": "rdma/hca"}}, "does not name ucx"),
    ({"agent": {"gpu": {"claim": "gpu", "visibleDevices": "all", "slabGiB": 1}}}, "two ways to the same GPUs"),
    ({"agent": {"gpu": {"visibleDevices": "all"}}}, "agent.gpu.slabGiB=0"),
    ({"agent": {"gpu": {"slabGiB": 1}}}, "no agent would see a GPU to take it of"),
    ({"agent": {"config": {"gpu_direct": "required"}}}, "agent.config.gpu_direct=required"),
    ({"agent": {"config": {"gpu_slab_bytes": 1}}}, "agent.config.gpu_slab_bytes is set by the chart"),
    ({"agent": {"gpu": {"claim": "gpu", "slabGiB": 1}}, **chart.workload()}, "they would not share a GPU"),
    ({"agent": {"gpu": {"claim": "gpu", "slabGiB": 1}}, **chart.workload(podSpec={"resourceClaims": [{"name": "gpu"}]})},
     "they would not share a GPU"),
    ({"rdma": {"enabled": True}, "agent": {"transports": ["ucx"]}}, "needs rdma.resource"),
    (chart.workload(podSpec={"hostPID": True}), "hostPID is refused"),
    (chart.workload(podSpec={"hostIPC": True}), "hostIPC is refused"),
    (chart.workload(podSpec={"hostNetwork": True}), "hostNetwork is refused"),
    (chart.workload(podSpec={"securityContext": {"runAsUser": 1000}}), "the pod runs as user 1000, its agent as 10001"),
    (chart.workload(podSpec={"containers": [{"name": "a", "image": "b", "securityContext": {"runAsUser": 0}}]}),
     "container a runs as user 0"),
    (chart.workload(podSpec={"containers": [{"name": "a", "image": "b", "securityContext": {"privileged": True}}]}),
     "container a is privileged"),
    (chart.workload(podSpec={"containers": [{"name": "a", "image": "b", "volumeMounts": [
        {"name": "x", "mountPath": "/dev/shm"}]}]}), "devShmGiB"),
    (chart.workload(podSpec={"volumes": [{"name": "weightwire-run", "emptyDir": {}}]}), "the chart's own"),
    # refused by the schema
    ({"user": 0}, "$.user"),
    ({"bindHost": "127.0.0.1"}, "$.bindHost"),
    ({"acceptPlainText": True}, "acceptPlainText"),
    ({"agent": {"config": {"slot_byte": 1}}}, "slot_byte"),
    ({"agent": {"config": {"slot_bytes": "8MiB"}}}, "$.agent.config.slot_bytes"),
    ({"agent": {"config": {"slot_bytes": {"a": 1}}}}, "$.agent.config.slot_bytes"),
    ({"agent": {"transports": ["rdma"]}}, "$.agent.transports"),
    ({"agent": {"stageGiB": "8Gi"}}, "$.agent.stageGiB"),
    ({"coordinator": {"terminationGracePeriodSeconds": 2}}, "terminationGracePeriodSeconds"),
    (chart.workload(podSpec={"terminationGracePeriodSeconds": 60}), "terminationGracePeriodSeconds 60 ends before its preStop hook may"),
    ({"agent": {"drainSeconds": 300}, **chart.workload(podSpec={"terminationGracePeriodSeconds": 120})}, "waits 300 s"),
    ({"agent": {"drainSeconds": -1}}, "$.agent.drainSeconds"),
    (chart.workload("DaemonSet"), "$.workloads.app.kind"),
    ({"job": "a b"}, "$.job"),
]


@pytest.mark.parametrize("values,reason", UNSAFE, ids=lambda value: json.dumps(value)[:60])
def test_an_unsafe_combination_is_refused_with_its_reason(values, reason):
    with pytest.raises(chart.Refused) as refused:
        rendered("tcp", values)
    assert reason in str(refused.value)


def test_open_network_needs_a_second_word():
    manifests = rendered("tcp", {"networkPolicy": {"enabled": False}, "acceptOpenNetwork": True})
    assert not [item for item in manifests if item["kind"] == "NetworkPolicy"]


def weightwired(arguments, **environment):
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WEIGHTWIRE_")}
    done = subprocess.run([BINARIES / "weightwired", "--print-config", *arguments], env={**clean, **environment},
                          capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return yaml.load(done.stdout, yaml.BaseLoader)  # every value as its text


def test_the_schema_knows_the_settings_of_weightwired():
    schema = chart.load(chart.CHART / "values.schema.json")
    assert set(schema["definitions"]["settings"]["properties"]) == set(weightwired([]))


def test_the_values_state_the_defaults_of_weightwired():
    assert chart.load(chart.CHART / "values.yaml")["agent"]["config"].items() <= \
        {key: int(value) for key, value in weightwired([]).items() if value.isdigit()}.items()


def settings_of(manifests, container, file, tmp_path):
    """The file in the ConfigMap under the container's environment, as weightwired takes both."""
    path = tmp_path / file
    path.write_text(chart.one(manifests, "ConfigMap", "rl-weightwire")["data"][file])
    assert container["args"] == ["--config", f"/etc/weightwire/{file}"]
    fields = {"metadata.name": "pod-0", "status.podIP": "10.1.2.3"}
    environment = {entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
                   for entry in container["env"]}
    return weightwired(["--config", str(path)], **environment)


def test_certificates_replace_what_was_insecure(tmp_path):
    """Who gets which secret, and that weightwired takes all of it without `insecure`."""
    secrets = {"acceptPlaintext": False, "tls": {"coordinatorSecret": "c", "agentSecret": "a"}}
    own = chart.workload()["workloads"]["app"]
    manifests = rendered("rdma", secrets, {"workloads": {"trainer": {**own, "tlsSecret": "t"}, "engine": own}})
    for item in manifests:
        if item["kind"] not in CUSTOM:
            validate(item, "1.29", strict=True)
    templates = {name: pod["spec"] for name, pod in pods(manifests).items()}
    for name, secret in (("rl-weightwire-coordinator", "c"), ("trainer", "t"), ("engine", "a")):
        volume = {"name": "weightwire-tls", "secret": {"secretName": secret, "defaultMode": 0o440}}
        assert volume in templates[name]["volumes"]
        for container in containers(templates[name]):
            assert {"name": "weightwire-tls", "mountPath": "/run/weightwire-tls", "readOnly": True} in container["volumeMounts"]
            environment = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert {environment[f"WEIGHTWIRE_TLS_{file}"] for file in ("CERT", "KEY", "CA")} == \
                {f"/run/weightwire-tls/{file}" for file in ("tls.crt", "tls.key", "ca.crt")}
    for container, file, plain in ((templates["rl-weightwire-coordinator"]["containers"][0], "coordinator.yaml", "http"),
                                   (chart.sidecar(templates["engine"]), "agent.yaml", "http,data")):
        settings = settings_of(manifests, container, file, tmp_path)
        assert (settings["insecure"], settings["allow_plaintext"]) == ("false", plain)
        assert settings["tls_cert"] == "/run/weightwire-tls/tls.crt"
    assert not [item for item in rendered("tcp", WORKLOADS["stateless"]) if "weightwire-tls" in json.dumps(item)]


def probes(spec):
    return [container[probe]["httpGet"] for container in containers(spec)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe") if probe in container]


@pytest.mark.parametrize("name", chart.PROFILES)
@pytest.mark.parametrize("server_name", ("", "weightwire.train.svc"))
def test_pages_over_tls_are_probed_and_scraped_over_tls(name, server_name, tmp_path):
    secrets = {"acceptPlaintext": False, "tls": {"coordinatorSecret": "c", "agentSecret": "a", "pages": True}}
    scraper = {"monitoring": {"podMonitor": {"enabled": True, "tls": {"secret": "m", "serverName": server_name}}}}
    manifests = rendered(name, secrets, scraper, {"agent": {"readinessGatesPod": True}}, WORKLOADS["stateless"])
    coordinator, app = (pods(manifests)[pod]["spec"] for pod in ("rl-weightwire-coordinator", "app"))
    assert [len(probes(spec)) for spec in (coordinator, app)] == [3, 3]
    assert all(probe["scheme"] == "HTTPS" for probe in probes(coordinator) + probes(app))
    (endpoint,) = chart.one(manifests, "PodMonitor", "rl-weightwire")["spec"]["podMetricsEndpoints"]
    within = lambda file: {"name": "m", "key": file}
    shown = {"ca": {"secret": within("ca.crt")}, "cert": {"secret": within("tls.crt")}, "keySecret": within("tls.key")}
    checked = {"serverName": server_name} if server_name else {"insecureSkipVerify": True}
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {**shown, **checked})
    for item in manifests:
        if item["kind"] not in CUSTOM:
            validate(item, "1.29", strict=True)
        elif item["kind"] == "PodMonitor":
            jsonschema.Draft7Validator(CUSTOM["PodMonitor"]).validate(item["spec"])
    for container, file, plain in ((coordinator["containers"][0], "coordinator.yaml", ""), (chart.sidecar(app), "agent.yaml", "data")):
        settings = settings_of(manifests, container, file, tmp_path)
        assert (settings["http_tls"], settings["insecure"], settings["allow_plaintext"]) == ("true", "false", plain)


def test_data_over_tls_needs_no_leave_for_plaintext(tmp_path):
    secrets = {"acceptPlaintext": False, "tls": {"coordinatorSecret": "c", "agentSecret": "a", "pages": True}}
    manifests = rendered("tcp", secrets, {"agent": {"config": {"integrity": "tls"}}}, chart.workload())
    settings = settings_of(manifests, chart.sidecar(pods(manifests)["app"]["spec"]), "agent.yaml", tmp_path)
    assert (settings["integrity"], settings["insecure"], settings["allow_plaintext"]) == ("tls", "false", "")


def test_tokens_replace_the_agents_certificates(tmp_path):
    """The coordinator has a certificate and the key, agents and applications a token and whom to believe."""
    secrets = {"acceptPlaintext": False,
               "tls": {"coordinatorSecret": "c", "agentSecret": "a", "tokenKeySecret": "k", "agentTokens": True}}
    manifests = rendered("tcp", secrets, chart.workload())
    for item in manifests:
        if item["kind"] not in CUSTOM:
            validate(item, "1.29", strict=True)
    templates = {name: pod["spec"] for name, pod in pods(manifests).items()}
    coordinator, app = templates["rl-weightwire-coordinator"], templates["app"]
    assert {"name": "weightwire-token", "secret": {"secretName": "k", "defaultMode": 0o440}} in coordinator["volumes"]
    assert "weightwire-token" not in json.dumps(app)
    for container in containers(app):
        environment = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert environment["WEIGHTWIRE_TOKEN_FILE"] == "/run/weightwire-tls/token"
        assert not {"WEIGHTWIRE_TLS_CERT", "WEIGHTWIRE_TLS_KEY"} & set(environment)
    settings = settings_of(manifests, chart.sidecar(app), "agent.yaml", tmp_path)
    assert (settings["token_file"], settings["tls_ca"]) == ("/run/weightwire-tls/token", "/run/weightwire-tls/ca.crt")
    settings = settings_of(manifests, coordinator["containers"][0], "coordinator.yaml", tmp_path)
    assert settings["token_key"] == "/run/weightwire-token/token-key" and settings["tls_cert"]


def test_several_coordinators_over_etcd(tmp_path):
    own = {"coordinator": {"replicas": 3, "etcd": ["etcd-0.etcd:2379", "etcd-1.etcd:12379", "etcd-2.etcd:2379"]}}
    manifests = rendered("ha", own, WORKLOADS["stateless"])
    for item in manifests:
        if item["kind"] not in CUSTOM:
            validate(item, latest_version(), strict=True)
    by_kind = {(item["kind"], item["metadata"]["name"]): item for item in manifests}
    service, coordinators = (by_kind[kind, "rl-weightwire-coordinator"]["spec"] for kind in ("Service", "StatefulSet"))
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"]
    assert coordinators["replicas"] == 3 and coordinators["podManagementPolicy"] == "Parallel"
    assert "volumeClaimTemplates" not in coordinators
    pod = coordinators["template"]["spec"]
    assert [volume["name"] for volume in pod["volumes"]] == ["config"] and pod["topologySpreadConstraints"]
    assert pod["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/healthz"
    assert by_kind["PodDisruptionBudget", "rl-weightwire-coordinator"]["spec"]["maxUnavailable"] == 1
    egress = by_kind["NetworkPolicy", "rl-weightwire-coordinator"]["spec"]["egress"]
    assert {port["port"] for rule in egress for port in rule["ports"]} == {53, 2379, 12379}
    settings = settings_of(manifests, pod["containers"][0], "coordinator.yaml", tmp_path)
    assert settings["etcd"] == ",".join(own["coordinator"]["etcd"]) and not settings["state_dir"]


def test_an_etcd_with_tls_and_a_user(tmp_path):
    access = {"secret": "etcd-client", "certificate": True, "user": "weightwire", "serverName": "etcd"}
    manifests = rendered("ha", {"coordinator": {"etcd": ["etcd:2379"], "etcdAccess": access}}, WORKLOADS["stateless"])
    for item in manifests:
        if item["kind"] not in CUSTOM:
            validate(item, latest_version(), strict=True)
    pod = chart.one(manifests, "StatefulSet", "rl-weightwire-coordinator")["spec"]["template"]["spec"]
    mounted = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted["weightwire-etcd"] == "etcd-client"
    settings = settings_of(manifests, pod["containers"][0], "coordinator.yaml", tmp_path)
    files = {"etcd_ca": "ca.crt", "etcd_cert": "tls.crt", "etcd_key": "tls.key", "etcd_password_file": "password"}
    assert {key: settings[key] for key in files} == {key: f"{mounts['weightwire-etcd']}/{file}" for key, file in files.items()}
    assert settings["etcd_user"] == "weightwire" and settings["etcd_server_name"] == "etcd"


@pytest.mark.parametrize("name", chart.PROFILES)
def test_weightwired_takes_the_settings_of_every_profile(name, tmp_path):
    manifests = rendered(name, WORKLOADS["stateless"])
    coordinator, app = (pods(manifests)[pod]["spec"] for pod in ("rl-weightwire-coordinator", "app"))
    settings = settings_of(manifests, coordinator["containers"][0], "coordinator.yaml", tmp_path)
    assert (settings["role"], settings["job"], settings["name"]) == ("coordinator", "rl", "pod-0")
    # A directory of its own below the mount: weightwired wants mode 0700, a volume's own is the kubelet's.
    mounts = {mount["mountPath"]: mount["name"] for mount in coordinator["containers"][0]["volumeMounts"]}
    assert os.path.dirname(settings["state_dir"]) in mounts
    grpc = {port["name"]: str(port["containerPort"]) for port in coordinator["containers"][0]["ports"]}
    assert (settings["listen"], settings["http"]) == (f"0.0.0.0:{grpc['grpc']}", f"0.0.0.0:{grpc['ww-http']}")

    agent = chart.sidecar(app)
    settings = settings_of(manifests, agent, "agent.yaml", tmp_path)
    service = chart.one(manifests, "Service", "rl-weightwire-coordinator")
    assert settings["coordinator"] == f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:7411"
    assert (settings["role"], settings["advertise_host"], settings["insecure"]) == ("agent", "10.1.2.3", "true")
    ports = {port["name"]: str(port["containerPort"]) for port in agent["ports"]}
    assert (settings["http"], settings["data_listen"]) == (f"0.0.0.0:{ports['ww-http']}", f"0.0.0.0:{ports['ww-data']}")
    assert ("ucx" in settings["transports"]) == (name == "rdma")
    # The application is told the socket that the agent opens, on a volume that both mount.
    environment = {entry["name"]: entry["value"] for entry in app["containers"][0]["env"]}
    assert environment == {"WEIGHTWIRE_AGENT_SOCKET": settings["agent_socket"], "WEIGHTWIRE_ADDRESS": settings["coordinator"]}
    for container in (agent, app["containers"][0]):
        assert {"name": "weightwire-run", "mountPath": "/run/weightwire"} in container["volumeMounts"]
    assert os.path.dirname(os.path.dirname(settings["agent_socket"])) == "/run/weightwire"


@pytest.mark.parametrize("config", [{}, {"slots_in_pool": 64, "slot_bytes": 33554432}, {"segment_bytes_max": 8388480},
                                    {"chunk_bytes": 33554432}], ids=str)
def test_an_agent_may_use_what_it_is_told_it_may(config, tmp_path):
    own = chart.workload(stageGiB=40)
    manifests = rendered("tcp", {"agent": {"stageGiB": 40, "config": config}}, WORKLOADS["stateless"])
    assert pods(rendered("tcp", {"agent": {"config": config}}, own))["app"]["spec"]["initContainers"] == \
        pods(manifests)["app"]["spec"]["initContainers"]
    agent = chart.sidecar(pods(manifests)["app"]["spec"])
    settings = settings_of(manifests, agent, "agent.yaml", tmp_path)
    number = lambda key: int(settings[key])
    assert number("stage_bytes_max") == 40 << 30
    scratch = max(number("chunk_bytes"), number("segment_bytes_max")) + 4096
    needed = number("stage_bytes_max") + number("slots_in_pool") * (number("slot_bytes") + scratch)
    limit = agent["resources"]["limits"]["memory"]
    assert agent["resources"]["requests"]["memory"] == limit and limit.endswith("Mi")
    assert needed + (256 << 20) <= int(limit[:-2]) << 20 <= needed + (258 << 20)


CLAIMING = {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
            "containers": [{"name": "app", "image": "app:1", "resources": {"claims": [{"name": "gpu"}]}}]}


@pytest.mark.parametrize("gpu,pod", [({"claim": "gpu"}, CLAIMING), ({"visibleDevices": "all"}, {"runtimeClassName": "nvidia"})],
                         ids=["claim", "visible-devices"])
def test_agents_that_share_a_gpu_lend_of_it(gpu, pod, tmp_path):
    without, within = (pods(rendered("tcp", own, chart.workload(podSpec=pod)))["app"]["spec"]
                       for own in ({}, {"agent": {"gpu": {**gpu, "slabGiB": 24, "hostMiB": 700}}}))
    manifests = rendered("tcp", {"agent": {"gpu": {**gpu, "slabGiB": 24}}}, chart.workload(podSpec=pod))
    for item in manifests:
        validate(item, latest_version(), strict=True)
    plain, agent = chart.sidecar(without), chart.sidecar(within)
    assert agent["resources"].get("claims") == ([{"name": "gpu"}] if "claim" in gpu else None)
    added = {entry["name"]: entry["value"] for entry in agent["env"] if entry not in plain["env"]}
    assert added == ({} if "claim" in gpu else {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"})
    for kind in ("requests", "limits"):
        memory = [int(one["resources"][kind]["memory"].removesuffix("Mi")) for one in (plain, agent)]
        assert memory[1] - memory[0] == 700
    settings = settings_of(manifests, agent, "agent.yaml", tmp_path)
    assert (settings["gpu"], int(settings["gpu_slab_bytes"])) == ("required", 24 << 30)
    assert within["containers"] == without["containers"], "the application's own are left alone"


@pytest.mark.parametrize("name", chart.PROFILES)
def test_pods_meet_restricted_pod_security_but_for_rdma(name):
    for pod in pods(rendered(name, WORKLOADS["stateful"])).values():
        spec = pod["spec"]
        assert not {"hostPID", "hostIPC", "hostNetwork", "shareProcessNamespace"} & spec.keys()
        assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
        context = spec["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] == context["fsGroup"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all("hostPath" not in volume for volume in spec.get("volumes", []))
        for container in containers(spec):
            own = container["securityContext"]
            ours = container["name"] != "app"
            assert own["allowPrivilegeEscalation"] is False and own["capabilities"]["drop"] == ["ALL"]
            assert own.get("readOnlyRootFilesystem", False) is ours
            added = ["IPC_LOCK"] if name == "rdma" and container["name"] == "weightwire-agent" else None
            assert own["capabilities"].get("add") == added


def test_the_agent_is_a_native_sidecar_that_gates_the_application():
    spec = pods(rendered("tcp", chart.workload(podSpec={"initContainers": [{"name": "first", "image": "x"}]})))["app"]["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["weightwire-agent", "first"]
    agent = spec["initContainers"][0]
    assert agent["restartPolicy"] == "Always"
    assert agent["startupProbe"]["httpGet"] == agent["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "ww-http"}
    assert "readinessProbe" not in agent
    gated = pods(rendered("tcp", WORKLOADS["stateless"], {"agent": {"readinessGatesPod": True}}))["app"]["spec"]
    assert chart.sidecar(gated)["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize("name", chart.PROFILES)
def test_a_pod_that_is_stopped_is_drained_first(name):
    both = {"containers": [{"name": "app", "image": "app:1", "lifecycle": {"postStart": {"exec": {"command": ["true"]}}}},
                           {"name": "own", "image": "own:1", "lifecycle": {"preStop": {"httpGet": {"path": "/stop", "port": 80}}}}]}
    own = {"kind": "Deployment", "podSpec": both}
    pods_of = pods(rendered(name, {"workloads": {"app": own, "long": {**own, "drainSeconds": 600}, "trainer": {**own, "drainSeconds": 0}}}))
    for workload, seconds in (("app", 60), ("long", 600)):
        spec = pods_of[workload]["spec"]
        agent, (app, its_own) = chart.sidecar(spec), spec["containers"]
        command = agent["lifecycle"]["preStop"]["exec"]["command"]
        assert command[:2] == ["sh", "-c"] and f'"$WEIGHTWIRE_NAME" --address rl-weightwire-coordinator.train.svc:7411 --wait {seconds};' in command[2]
        waits = app["lifecycle"]["preStop"]["exec"]["command"][2]
        assert re.findall(r"f=(\S+);", command[2]) == re.findall(r"f=(\S+);", waits) == ["/run/weightwire/draining"]
        assert f"-lt {seconds} ]" in waits and app["lifecycle"]["postStart"] == {"exec": {"command": ["true"]}}
        assert its_own["lifecycle"] == both["containers"][1]["lifecycle"]
        assert spec["terminationGracePeriodSeconds"] == seconds + 30
    spec = pods_of["trainer"]["spec"]
    assert "lifecycle" not in chart.sidecar(spec) and "terminationGracePeriodSeconds" not in spec
    assert spec["containers"][0]["lifecycle"].keys() == {"postStart"}


@pytest.mark.parametrize("version", ("1.29", latest_version()))
def test_images_without_a_shell_wait_otherwise(version):
    """Of the chart's workloads and of others' manifests: what is said there beats what all agents have."""
    kinds = {"all": {}, "shell": {"drainHook": "sh"}, "none": {"drainHook": "none"}, "undrained": {"drainSeconds": 0}}
    own = {name: {"kind": "Deployment", "podSpec": POD, **more} for name, more in kinds.items()}
    manifests = rendered("tcp", {"agent": {"drainHook": "sleep", "drainSeconds": 45}}, {"workloads": own}, yours("Deployment", drainHook="none"))
    hooks = {name: template["spec"]["containers"][0].get("lifecycle", {}).get("preStop") for name, template in pods(manifests).items()}
    assert hooks["all"] == {"sleep": {"seconds": 45}} and "-lt 45 ]" in hooks["shell"]["exec"]["command"][2]
    assert hooks["none"] is hooks["undrained"] is hooks["x"] is None
    drained = {name for name, template in pods(manifests).items() if template["spec"].get("initContainers") and "lifecycle" in chart.sidecar(template["spec"])}
    assert drained == {"all", "shell", "none", "x"}, "the agent's image has a shell"
    for name in own:
        validate(chart.one(manifests, "Deployment", name), version, strict=True)


ELSEWHERE = {"ipBlock": {"cidr": "10.1.0.0/16"}}


def test_people_and_metrics_reach_the_coordinators_page_and_nobody_else_does():
    people = {"namespaceSelector": {"matchLabels": {"name": "ingress"}}}
    manifests = rendered("tcp", WORKLOADS["stateless"], {"networkPolicy": {"monitoringFrom": [ELSEWHERE], "pagesFrom": [people]}})
    who = {name: {rule["ports"][0]["port"]: rule["from"] for rule in chart.one(manifests, "NetworkPolicy", name)["spec"]["ingress"] if "ports" in rule}
           for name in ("rl-weightwire-coordinator", "rl-weightwire-agents")}
    assert who["rl-weightwire-coordinator"][7412] == [ELSEWHERE, people] and who["rl-weightwire-agents"] == {7412: [ELSEWHERE]}
    only = rendered("tcp", {"networkPolicy": {"monitoringFrom": [], "pagesFrom": [people]}})
    assert chart.one(only, "NetworkPolicy", "rl-weightwire-coordinator")["spec"]["ingress"][1:] == [{"from": [people], "ports": [{"protocol": "TCP", "port": 7412}]}]


def test_agents_call_only_whom_they_may():
    rule = {"to": [ELSEWHERE], "ports": [{"protocol": "TCP", "port": 443}]}
    wide = chart.one(rendered("tcp", WORKLOADS["stateless"]), "NetworkPolicy", "rl-weightwire-agents")["spec"]
    assert wide["policyTypes"] == ["Ingress"] and "egress" not in wide
    manifests = rendered("tcp", WORKLOADS["stateless"], {"networkPolicy": {"agentEgress": {"restricted": True, "allow": [rule]}}})
    policy = chart.one(manifests, "NetworkPolicy", "rl-weightwire-agents")
    for version in ("1.29", latest_version()):
        validate(policy, version, strict=True)
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    peers, coordinator, names, theirs = policy["spec"]["egress"]
    templates = pods(manifests)
    reached = [{name for name, template in templates.items() if selects(to["to"][0]["podSelector"]["matchLabels"], template)} for to in (peers, coordinator)]
    assert reached == [{"app"}, {"rl-weightwire-coordinator"}] and "ports" not in peers
    assert [port["port"] for port in coordinator["ports"]] == [7411] and theirs == rule
    assert names == {"ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}]}


@pytest.mark.parametrize("kind", ("stateful", "stateless"))
def test_services_policies_and_monitors_select_the_pods_they_mean(kind):
    manifests = rendered("ha", WATCHED, WORKLOADS[kind])
    templates = pods(manifests)
    meant = {("Service", "rl-weightwire-coordinator"): {"rl-weightwire-coordinator"}, ("Service", "app"): {"app"},
             ("NetworkPolicy", "rl-weightwire-coordinator"): {"rl-weightwire-coordinator"},
             ("NetworkPolicy", "rl-weightwire-agents"): {"app"},
             ("PodDisruptionBudget", "rl-weightwire-coordinator"): {"rl-weightwire-coordinator"},
             ("PodMonitor", "rl-weightwire"): {"rl-weightwire-coordinator", "app"}}
    for (group, name), expected in meant.items():
        spec = chart.one(manifests, group, name)["spec"]
        selector = spec["podSelector"] if "podSelector" in spec else spec["selector"]
        found = {pod for pod, template in templates.items() if selects(selector.get("matchLabels", selector), template)}
        assert found == expected, (group, name)
        for port in spec.get("ports", []) if group == "Service" else []:
            offered = {p["name"]: p["containerPort"] for pod in found for c in containers(templates[pod]["spec"])
                       for p in c.get("ports", [])}
            assert name == "app" or offered[port["targetPort"]] == port["port"]
    # Agents find the coordinator before it is ready, which it is not between the first publish and its commit.
    assert chart.one(manifests, "Service", "rl-weightwire-coordinator")["spec"]["publishNotReadyAddresses"] is True
    caller = chart.one(manifests, "NetworkPolicy", "rl-weightwire-coordinator")["spec"]["ingress"][0]
    assert selects(caller["from"][0]["podSelector"]["matchLabels"], templates["app"]) and caller["ports"][0]["port"] == 7411
    stranger = {"metadata": {"labels": {**templates["app"]["metadata"]["labels"], "weightwire.dev/job": "other"}}}
    assert not selects(caller["from"][0]["podSelector"]["matchLabels"], stranger)


def test_a_changed_setting_rolls_the_pods_that_read_it():
    sums = [{name: pod["metadata"]["annotations"]["checksum/weightwire"] for name, pod in
             pods(rendered("tcp", WORKLOADS["stateless"], layer)).items()}
            for layer in ({}, {"agent": {"config": {"window": 4}}}, {"coordinator": {"config": {"lease_ms": 9000}}})]
    assert sums[1]["app"] != sums[0]["app"] and sums[1]["rl-weightwire-coordinator"] == sums[0]["rl-weightwire-coordinator"]
    assert sums[2]["app"] == sums[0]["app"] and sums[2]["rl-weightwire-coordinator"] != sums[0]["rl-weightwire-coordinator"]


def test_only_what_changes_in_it_restarts_a_pod(tmp_path):
    """A chart of another version, and a coordinator that goes first in an upgrade, leave the agents' pods as they are."""
    layers = [WORKLOADS["stateless"], {"image": {"tag": "1.0"}}]
    before = pods(rendered("tcp", *layers))
    first = pods(rendered("tcp", *layers, {"coordinator": {"imageTag": "1.1"}}))
    assert first["app"] == before["app"]
    image = lambda found: found["rl-weightwire-coordinator"]["spec"]["containers"][0]["image"]
    assert (image(before), image(first)) == ("weightwire:1.0", "weightwire:1.1")
    after = pods(rendered("tcp", *layers, {"image": {"tag": "1.1"}}))
    assert image(after) == "weightwire:1.1" == chart.sidecar(after["app"]["spec"])["image"]
    newer = tmp_path / "weightwire"
    shutil.copytree(chart.CHART, newer)
    about = newer / "Chart.yaml"
    about.write_text(re.sub(r"(?m)^(version|appVersion): .*", r"\1: 9.9.9", about.read_text()))
    values = chart.merged(chart.load(chart.CHART / "values.yaml"), chart.profile("tcp"), chart.ACCEPT, *layers)
    told = chart.ask_helm(chart=str(newer), values=values, release="rl", namespace="train")
    newest = pods([item for name, text in told.items() if name.endswith(".yaml") for item in yaml.safe_load_all(text) if item])
    assert newest == before
    assert "9.9.9" in json.dumps(told)


def test_the_notes_say_how_the_coordinator_goes_first():
    notes = lambda *layers: chart.texts(chart.profile("tcp"), chart.ACCEPT, {"image": {"tag": "1.0"}}, *layers)["templates/NOTES.txt"]
    said = notes({"coordinator": {"imageTag": "1.1"}})
    assert "The coordinator runs weightwire:1.1, agents still weightwire:1.0." in said
    assert "rollout status statefulset/rl-weightwire-coordinator" in said
    assert "helm upgrade rl CHART -n train --reuse-values --set image.tag=1.1 --set coordinator.imageTag=\n" in said + "\n"
    assert "agents still" not in notes()


@pytest.mark.parametrize("uids", [[0, 1690000000], "0, 1690000000", "0,1690000000"], ids=str)
def test_containers_of_other_users_attach_when_they_are_named(uids, tmp_path):
    of = lambda uid: chart.workload(podSpec={"containers": [{"name": "a", "image": "b", "securityContext": {"runAsUser": uid}}]})
    named = {"agent": {"config": {"allow_uids": uids}}}
    for uid in (0, 1690000000, 10001):
        manifests = rendered("tcp", named, of(uid))
        spec = pods(manifests)["app"]["spec"]
        # The kubelet adds fsGroup to the groups of every container: by it they reach the socket.
        assert spec["securityContext"]["fsGroup"] == 10001
        assert spec["containers"][0]["securityContext"].get("runAsNonRoot") == (False if uid == 0 else None)
        settings = settings_of(manifests, chart.sidecar(spec), "agent.yaml", tmp_path)
        assert (settings["allow_uids"], settings["socket_group"]) == ("0,1690000000", "10001")
    for layers in ((named, of(1000)), (named, chart.workload(podSpec={"securityContext": {"runAsUser": 0}})), (of(0),)):
        with pytest.raises(chart.Refused, match="name a container's user in agent.config.allow_uids"):
            rendered("tcp", *layers)
    plain = settings_of(rendered("tcp", of(10001)), chart.sidecar(pods(rendered("tcp", of(10001)))["app"]["spec"]), "agent.yaml", tmp_path)
    assert (plain["allow_uids"], plain["socket_group"]) == ("", "")


def test_an_applications_own_settings_stay():
    own = {"name": "app", "image": "app:1", "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"nvidia.com/gpu": 8}},
           "securityContext": {"readOnlyRootFilesystem": True}, "volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    spec = pods(rendered("tcp", chart.workload(devShmGiB=16, podSpec={
        "containers": [own], "volumes": [{"name": "data", "emptyDir": {}}], "terminationGracePeriodSeconds": 90})))["app"]["spec"]
    app = spec["containers"][0]
    assert app["env"][-1] == own["env"][0] and app["volumeMounts"][-1] == own["volumeMounts"][0]
    assert app["resources"] == own["resources"] and app["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["volumes"][-1] == {"name": "data", "emptyDir": {}} and spec["terminationGracePeriodSeconds"] == 90
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "weightwire-shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}


def templates_in(at):
    """Every pod template below, wherever it is: what has a spec with containers."""
    if isinstance(at, list):
        return [found for item in at for found in templates_in(item)]
    if not isinstance(at, dict):
        return []
    if isinstance(at.get("spec"), dict) and "containers" in at["spec"]:
        return [at]
    return [found for item in at.values() for found in templates_in(item)]


def without_agents(at):
    """What the user said: an object as it is below the pod templates, and of these the application's container."""
    if isinstance(at, list):
        return [without_agents(item) for item in at]
    if not isinstance(at, dict):
        return at
    if isinstance(at.get("spec"), dict) and "containers" in at["spec"]:
        return [item["name"] for item in at["spec"]["containers"]]
    return {key: without_agents(value) for key, value in at.items()}


@pytest.mark.parametrize("kind", YOURS)
def test_pods_of_any_workload_get_what_the_charts_own_get(kind):
    secrets = {"acceptPlaintext": False, "tls": {"coordinatorSecret": "c", "agentSecret": "a"}}
    manifests = rendered("tcp", secrets, yours(kind, stageGiB=16), chart.workload(stageGiB=16))
    (mine,) = [item for item in manifests if item["metadata"]["name"] == "x"]
    own = pods(manifests)["app"]
    _, spec, count = YOURS[kind]
    assert mine["metadata"]["namespace"] == "train" and without_agents(mine["spec"]) == without_agents(spec)
    found = templates_in(mine["spec"])
    assert len(found) == count
    for template in found:
        assert template["metadata"]["labels"].items() >= {"weightwire.dev/job": "rl", "weightwire.dev/role": "agent",
                                                          "app.kubernetes.io/component": "mine"}.items()
        assert template["metadata"]["annotations"].items() >= own["metadata"]["annotations"].items()
        assert {**template["spec"], "restartPolicy": None} == {**own["spec"], "restartPolicy": None}
    policy = chart.one(manifests, "NetworkPolicy", "rl-weightwire-agents")
    assert all(selects(policy["spec"]["podSelector"]["matchLabels"], template) for template in found)
    if kind in ("StatefulSet", "Deployment", "Job"):
        for version in ("1.29", latest_version()):
            validate(mine, version, strict=True)


@pytest.mark.parametrize("values,reason", [
    ({"sidecars": {"mine": {"manifest": {"apiVersion": "a/v1", "kind": "Own", "metadata": {"name": "x"}, "spec": {}}}}}, "where a Own keeps its pod templates is not known"),
    ({**yours("Job", templates=["spec.pods.*.template"])}, "no pod template at spec.pods.*.template"),
    ({**yours("Job"), "workloads": {"mine": chart.workload()["workloads"]["app"]}}, "a workload has this name too"),
    ({"sidecars": {"mine": {"manifest": {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x", "namespace": "other"},
                                         "spec": {"template": {"spec": POD}}}}}}, "it is in namespace other"),
    ({"sidecars": {"mine": {"manifest": {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"},
                                         "spec": {"template": {"spec": {**POD, "hostPID": True}}}}}}}, "hostPID is refused"),
    ({"tls": {"coordinatorSecret": "c"}, **yours("Job")}, "mine: its agents have no certificate"),
    ({"sidecars": {"mine": {"kind": "Job"}}}, "$.sidecars.mine"),
], ids=range(7))
def test_a_manifest_that_gets_no_agent_is_refused_with_its_reason(values, reason):
    with pytest.raises(chart.Refused) as refused:
        rendered("tcp", values)
    assert reason in str(refused.value)


def test_another_kind_says_where_its_pods_are():
    own = {"apiVersion": "a/v1", "kind": "Own", "metadata": {"name": "x"}, "spec": {"groups": {"a": {"template": {"spec": POD}}}}}
    manifests = rendered("tcp", {"sidecars": {"mine": {"manifest": own, "templates": ["spec.groups.*.template"]}}})
    (mine,) = [item for item in manifests if item["kind"] == "Own"]
    assert chart.sidecar(mine["spec"]["groups"]["a"]["template"]["spec"])


def test_two_releases_live_in_one_namespace():
    both = {"workloads": {kind: values["workloads"]["app"] for kind, values in WORKLOADS.items()}, "namesByRelease": True}
    found = [{(item["kind"], item["metadata"]["name"]): item
              for item in chart.objects(chart.profile("tcp"), chart.ACCEPT, WATCHED, both, release=release)} for release in ("one", "two")]
    assert len(found[0]) == len(found[1]) and not found[0].keys() & found[1].keys()
    stateful = found[0]["StatefulSet", "one-stateful"]["spec"]
    assert ("Service", stateful["serviceName"]) in found[0]
    # A selector of one release takes no pod of the other.
    for mine, others in (found, found[::-1]):
        pods_of = [item["spec"]["template"] for item in others.values() if item["kind"] in ("StatefulSet", "Deployment")]
        for (kind, _), item in mine.items():
            selector = {"Service": item.get("spec", {}).get("selector"), "NetworkPolicy": item.get("spec", {}).get("podSelector", {}).get("matchLabels")}.get(kind)
            assert not selector or not any(selects(selector, template) for template in pods_of), (kind, selector)
    assert {name for kind, name in {(item["kind"], item["metadata"]["name"]) for item in rendered("tcp", WORKLOADS["stateless"])}
            if kind == "Deployment"} == {"app"}


def test_replicas_are_an_autoscalers_unless_somebody_says_them():
    own = chart.workload()["workloads"]["app"]
    manifests = rendered("tcp", {"workloads": {"free": own, "none": {**own, "replicas": 0}, "two": {**own, "replicas": 2}}})
    assert {name: chart.one(manifests, "Deployment", name)["spec"].get("replicas", "-") for name in ("free", "none", "two")} == \
        {"free": "-", "none": 0, "two": 2}


def test_cert_manager_makes_the_certificates_that_weightwired_takes():
    issuer = {"name": "rl-ca", "kind": "Issuer", "group": "cert-manager.io"}
    values = {"acceptPlaintext": False, "tls": {"coordinatorSecret": "c", "agentSecret": "a", "pages": True,
                                                "certManager": {"issuerRef": {"name": "rl-ca"}, "domain": "example.org"}},
              "monitoring": {"podMonitor": {"enabled": True, "tls": {"secret": "m"}}}}
    manifests = rendered("tcp", values, {"job": "step"}, chart.workload())
    made = {item["metadata"]["name"]: item for item in manifests if item["kind"] == "Certificate"}
    assert made.keys() == {"c", "a", "m"} and {item["apiVersion"] for item in made.values()} == {"cert-manager.io/v1"}
    for name, role in (("c", "coordinator"), ("a", "agent"), ("m", "metrics")):
        spec = made[name]["spec"]
        assert spec["secretName"] == name and spec["issuerRef"] == issuer
        assert spec["uris"] == [f"spiffe://example.org/ns/train/job/step/role/{role}"]
        assert set(spec["usages"]) == {"digital signature", "client auth", "server auth"}  # as deploy/certs.sh has them
    settings = yaml.safe_load(chart.one(manifests, "ConfigMap", "rl-weightwire")["data"]["agent.yaml"])
    assert settings["coordinator"].partition(":")[0] in made["c"]["spec"]["dnsNames"]
    assert not [item for item in rendered("tcp", chart.workload()) if item["kind"] == "Certificate"]


@pytest.mark.parametrize("values,reason", [
    ({"tls": {"certManager": {"issuerRef": {"name": "ca"}}}}, "the Secrets that it is to fill have no names"),
    ({"tls": {"coordinatorSecret": "c", "agentSecret": "a", "tokenKeySecret": "k", "agentTokens": True,
              "certManager": {"issuerRef": {"name": "ca"}}}}, "agents that have tokens get no certificate"),
    ({"tls": {"certManager": {"domain": "A B"}}}, "$.tls.certManager.domain")], ids=range(3))
def test_certificates_that_nobody_could_use_are_refused(values, reason):
    with pytest.raises(chart.Refused) as refused:
        rendered("tcp", values)
    assert reason in str(refused.value)


def test_the_notes_commands_reach_a_container_that_has_wwctl():
    secure = chart.texts(chart.profile("tcp"), {"tls": {"coordinatorSecret": "c", "agentSecret": "a", "pages": True}}, chart.workload())
    said = secure["templates/NOTES.txt"]
    assert "exec POD -c weightwire-agent -- wwctl status --address rl-weightwire-coordinator.train.svc:7411" in said
    assert "port-forward service/rl-weightwire-coordinator 7412" in said and "https://127.0.0.1:7412/" in said
    agent = chart.sidecar(pods(chart.objects(chart.profile("tcp"), {"tls": {"coordinatorSecret": "c", "agentSecret": "a"}}, chart.workload()))["app"]["spec"])
    assert agent["name"] == "weightwire-agent" and {"WEIGHTWIRE_TLS_CERT", "WEIGHTWIRE_TLS_CA"} <= {one["name"] for one in agent["env"]}


def test_the_notes_say_what_is_not_protected():
    notes = lambda name: chart.texts(chart.profile(name), chart.ACCEPT).get("templates/NOTES.txt", "")
    secure = chart.texts(chart.profile("tcp"), {"tls": {"coordinatorSecret": "c"}})["templates/NOTES.txt"]
    assert "PLAINTEXT" not in secure and "rejects callers without a certificate" in secure and "pages on port 7412 are plaintext" in secure
    hidden = chart.texts(chart.profile("tcp"), {"tls": {"coordinatorSecret": "c", "pages": True}})["templates/NOTES.txt"]
    assert "pages on port 7412 show themselves to certificates only" in hidden and "pages on port 7412 are plaintext" not in hidden
    assert "weights on the way are plaintext" in hidden
    sealed = chart.texts(chart.profile("tcp"), {"tls": {"coordinatorSecret": "c"}, "agent": {"config": {"integrity": "tls"}}})
    assert "weights on the way are encrypted" in sealed["templates/NOTES.txt"]
    assert "PLAINTEXT" in notes("tcp") and "RDMA" not in notes("tcp") and "RDMA has not been run" in notes("rdma")
    assert "There is no NetworkPolicy" in notes("cpu-dev") and "commits are forgotten" in notes("cpu-dev")
