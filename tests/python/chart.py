"""The chart in helm/weightwire as objects: merged values, checked by its schema, rendered by helm or tests/helm/render.go."""

from __future__ import annotations

import copy
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import jsonschema
import pytest
import yaml

from conftest import ROOT

CHART = ROOT / "helm/weightwire"
PROFILES = ("cpu-dev", "tcp", "rdma", "ha")
#: What a user must say beside each profile; ha is added to one that moves bytes.
SAID = {"rdma": {"rdma": {"resource": "rdma/hca_shared_devices_a"}}}
ACCEPT = {"acceptPlaintext": True}


class Refused(Exception):
    """The chart's schema, or its checks, refuse the values."""


@functools.lru_cache(maxsize=None)
def load(path: pathlib.Path) -> dict:
    """Not to be changed by the caller."""
    return json.loads(path.read_text()) if path.suffix == ".json" else yaml.safe_load(path.read_text()) or {}


def merged(*layers: dict) -> dict:
    """As helm merges value files: maps by key, everything else replaced."""
    out: dict = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(out.get(key), dict)
            out[key] = merged(out[key], value) if both else copy.deepcopy(value)
    return out


def profile(name: str) -> dict:
    layers = [load(CHART / f"profiles/{p}.yaml") for p in (("tcp", "ha") if name == "ha" else (name,))]
    return merged(*layers, SAID.get(name, {}))


@functools.lru_cache(maxsize=None)
def _go_renderer() -> str:
    if not shutil.which("go"):
        pytest.skip("neither helm nor go is here: `./dev test python` installs go")
    out = os.path.join(tempfile.mkdtemp(prefix="weightwire-render-"), "render")
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    subprocess.run(["go", "build", "-o", out, str(ROOT / "tests/helm/render.go")], env=environment, check=True, timeout=300)
    return out


def _by_go(values: dict, release: str, namespace: str) -> dict[str, str]:
    chart = load(CHART / "Chart.yaml")
    context = {"Values": values, "Chart": {key[0].upper() + key[1:]: value for key, value in chart.items()},
               "Release": {"Name": release, "Namespace": namespace, "Service": "Helm", "IsInstall": True}}
    inside = lambda folder: {str(path.relative_to(CHART)): path.read_text() for path in (CHART / folder).iterdir()}
    asked = {"context": context, "templates": inside("templates"), "files": inside("files")}
    done = subprocess.run([_go_renderer()], input=json.dumps(asked), capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return json.loads(done.stdout)


def _by_helm(values: dict, release: str, namespace: str) -> dict[str, str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        done = subprocess.run(["helm", "template", release, str(CHART), "--namespace", namespace, "--kube-version", "1.29.0",
                               "-f", file.name],
                              capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Refused(done.stderr)
    return {"helm.yaml": done.stdout}


def texts(*layers: dict, release: str = "rl", namespace: str = "train") -> dict[str, str]:
    """What the chart renders for values over its own: file → text. Raises Refused."""
    values = merged(load(CHART / "values.yaml"), *layers)
    try:
        jsonschema.Draft7Validator(load(CHART / "values.schema.json")).validate(values)
    except jsonschema.ValidationError as error:
        raise Refused(f"{error.json_path}: {error.message}") from error
    return (_by_helm if shutil.which("helm") else _by_go)(values, release, namespace)


def objects(*layers: dict, **where) -> list[dict]:
    """The manifests, in a stable order."""
    found = [item for name, text in texts(*layers, **where).items() if name.endswith(".yaml")
             for item in yaml.safe_load_all(text) if item]
    return sorted(found, key=lambda item: (item["kind"], item["metadata"]["name"]))


def one(manifests: list[dict], kind: str, name: str) -> dict:
    found = [item for item in manifests if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    assert len(found) == 1, f"{len(found)} of {kind} {name}; there are " \
                            f"{[(item['kind'], item['metadata']['name']) for item in manifests]}"
    return found[0]


def workload(kind: str = "Deployment", **more) -> dict:
    """Values with one workload, `app`."""
    spec = {"containers": [{"name": "app", "image": "app:1"}], **more.pop("podSpec", {})}
    return {"workloads": {"app": {"kind": kind, "podSpec": spec, **more}}}


def sidecar(pod: dict) -> dict:
    return next(item for item in pod["initContainers"] if item["name"] == "weightwire-agent")
