"""The chart in helm/weightwire as objects: merged values, checked by its schema, rendered by Helm (tests/helm/render.py)."""

from __future__ import annotations

import atexit
import copy
import functools
import json
import pathlib
import subprocess
import sys

import jsonschema
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
def _helm() -> subprocess.Popen:
    running = subprocess.Popen([sys.executable, str(ROOT / "tests/helm/render.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(running.kill)
    return running


def ask_helm(**asked: object) -> dict:
    """One request to Helm (tests/helm/render.py). Raises Refused."""
    running = _helm()
    print(json.dumps({"chart": str(CHART), **asked}), file=running.stdin, flush=True)
    said = json.loads(running.stdout.readline() or '{"error": "helm ended"}')
    if "error" in said:
        raise Refused(said["error"])
    return said


def texts(*layers: dict, release: str = "rl", namespace: str = "train") -> dict[str, str]:
    """What the chart renders for values over its own: file → text. Raises Refused."""
    values = merged(load(CHART / "values.yaml"), *layers)
    try:
        jsonschema.Draft7Validator(load(CHART / "values.schema.json")).validate(values)
    except jsonschema.ValidationError as error:
        raise Refused(f"{error.json_path}: {error.message}") from error
    return ask_helm(values=values, release=release, namespace=namespace)


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
