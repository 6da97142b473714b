"""deploy/manifests is what the chart renders, for those who use no helm."""

import os
import re

import pytest
import yaml
from kubernetes_validate.utils import latest_version, validate

import chart
from conftest import ROOT
from weightwire.store.__main__ import _parser

MANIFESTS = ROOT / "deploy/manifests"
VERL = ROOT / "deploy/verl-disaggregated.values.yaml"
#: file → values over the chart's own
FILES = {
    "tcp": [chart.profile("tcp")],
    "verl-disaggregated": [chart.profile("tcp"), chart.load(VERL)],
}


class Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read."""


Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar(
    "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None))
Dumper.ignore_aliases = lambda *_: True


def manifests_of(name):
    return chart.objects(*FILES[name], chart.ACCEPT, release="rl", namespace="train")


@pytest.mark.parametrize("name", FILES)
def test_the_plain_manifests_are_what_the_chart_renders(name):
    head = "# Rendered from helm/weightwire, release rl in namespace train; UPDATE_DOCS=1 ./dev test python writes it again.\n" \
           "# Plaintext: certificates are of your own making (docs/security.md). No image is published yet: replace weightwire:0.1.0 by one of yours.\n"
    text = head + yaml.dump_all(manifests_of(name), Dumper=Dumper, sort_keys=False, width=120)
    path = MANIFESTS / f"{name}.yaml"
    if os.environ.get("UPDATE_DOCS"):
        path.write_text(text)
    assert path.read_text() == text


def test_no_manifest_is_left_over():
    assert {path.stem for path in MANIFESTS.iterdir()} == FILES.keys()


def test_the_verl_job_has_an_agent_in_every_pod_and_is_valid():
    manifests = manifests_of("verl-disaggregated")
    for item in manifests:
        for version in ("1.29", latest_version()):
            validate(item, version, strict=True)
    trainer, rollout = chart.one(manifests, "StatefulSet", "trainer"), chart.one(manifests, "Deployment", "rollout")
    address = "rl-weightwire-coordinator.train.svc:7411"
    for item in (trainer, rollout):
        spec = item["spec"]["template"]["spec"]
        assert chart.sidecar(spec)["restartPolicy"] == "Always"
        environment = {entry["name"]: entry["value"] for entry in spec["containers"][0]["env"]}
        assert environment["WEIGHTWIRE_ADDRESS"] == address and "WEIGHTWIRE_AGENT_SOCKET" in environment
        assert {mount["name"] for mount in spec["containers"][0]["volumeMounts"]} <= {v["name"] for v in spec["volumes"]}
    # Workers look for the head by the name that the trainer's Service gives it.
    service = chart.one(manifests, "Service", "trainer")
    assert service["spec"]["clusterIP"] == "None" and trainer["spec"]["serviceName"] == "trainer"
    assert "trainer-0.trainer:6379" in rollout["spec"]["template"]["spec"]["containers"][0]["command"]
    assert service["spec"]["ports"] == [{"name": "ray", "port": 6379}]


def test_the_verl_jobs_checkpoint_engine_is_that_of_the_verl_page():
    config = yaml.safe_load(chart.one(manifests_of("verl-disaggregated"), "ConfigMap", "verl-separate")["data"]["separate.yaml"])
    page = yaml.safe_load(re.search(r"```yaml\n(# separate\.yaml.*?)```", (ROOT / "docs/verl.md").read_text(), re.S)[1])
    ours, told = (c["actor_rollout_ref"]["rollout"]["checkpoint_engine"] for c in (config, page))
    # In pods the coordinator's address comes by WEIGHTWIRE_ADDRESS.
    assert told["engine_kwargs"]["weightwire"].pop("coordinator") and ours == told
    assert config["trainer"]["v1"] == page["trainer"]["v1"] and config["defaults"] == page["defaults"]


@pytest.mark.parametrize("command", ["writer", "follower"])
def test_the_values_for_regions_start_commands_that_exist_beside_an_agent(command):
    manifests = chart.objects(chart.profile("tcp"), chart.load(ROOT / f"deploy/regions-{command}.values.yaml"), chart.ACCEPT, release="rl",
                              namespace="train")
    for item in manifests:
        for version in ("1.29", latest_version()):
            validate(item, version, strict=True)
    deployment = chart.one(manifests, "Deployment", f"store-{command}")
    assert deployment["spec"]["replicas"] == 1 and deployment["spec"]["strategy"] == {"type": "Recreate"}
    spec = deployment["spec"]["template"]["spec"]
    assert chart.sidecar(spec)["restartPolicy"] == "Always"
    (container,) = spec["containers"]
    assert {"WEIGHTWIRE_AGENT_SOCKET", "WEIGHTWIRE_ADDRESS"} <= {entry["name"] for entry in container["env"]}
    assert container["command"][:3] == ["python3", "-m", "weightwire.store"]
    args = _parser("x").parse_args([*container["command"][3:], *container["args"]])
    assert args.command == {"writer": "write", "follower": "follow"}[command]
    (port,) = {named["port"] for named in deployment_service(manifests, f"store-{command}")}
    assert args.metrics == f"0.0.0.0:{port}"


def deployment_service(manifests, name):
    return chart.one(manifests, "Service", name)["spec"]["ports"]
