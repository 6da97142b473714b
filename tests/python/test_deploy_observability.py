"""Rules, dashboard and scrape configuration: promtool's own tests, and every query put to a real Prometheus that watches
a fleet, so that a metric or label that no longer exists is found here."""

import collections
import importlib.util
import json
import os
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import yaml

import certificates
import chart
from conftest import BINARIES, ROOT
from demo.fleet import Daemon
from ports import free_ports
from test_client import engine, load, trainer
from weightwire import Client
from weightwire.store import Figures, MetricsServer

RULES = chart.CHART / "files/rules.yaml"
DASHBOARD = chart.CHART / "files/dashboard.json"
CASES = ROOT / "tests/helm/rules_test.yaml"
#: Set by the scrape, not by weightwired.
TARGET_LABELS = {"job", "instance", "namespace", "weightwire_job", "weightwire_role"}

pytestmark = pytest.mark.skipif(not (shutil.which("promtool") and shutil.which("prometheus")),
                                reason="no prometheus here: `./dev test python` installs it")


def generator():
    spec = importlib.util.spec_from_file_location("weightwire_dashboard", ROOT / "deploy/dashboard.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules_and_proves_their_cases():
    promtool("check", "rules", RULES)
    promtool("test", "rules", CASES)


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not():
    seen = collections.defaultdict(set)
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for check in case["alert_rule_test"]:
            seen[check["alertname"]].add(bool(check["exp_alerts"]))
    assert seen == {rule["alert"]: {True, False} for rule in rules() if "alert" in rule}


ALERTS = ROOT / "docs/alerts.md"
ALERTS_HEAD = """# Alerts

What each alert of `helm/weightwire/files/rules.yaml` says, and when. `{{ }}` is what Prometheus fills in. Generated:
`UPDATE_DOCS=1 ./dev test python` writes this file again. By symptom: [troubleshooting](troubleshooting.md).
"""


def test_the_page_of_alerts_has_every_alert():
    page = ALERTS_HEAD
    for rule in rules():
        if "alert" in rule:
            said = rule["annotations"]
            after = f", for {rule['for']}" if "for" in rule else ""
            page += (f"\n## {rule['alert']}\n{said['summary']}. Severity {rule['labels']['severity']}{after}.\n\n{said['description']}\n\n"
                     f"```promql\n{rule['expr']}\n```\n")
    if os.environ.get("UPDATE_DOCS"):
        ALERTS.write_text(page)
    assert ALERTS.read_text() == page, "UPDATE_DOCS=1 ./dev test python writes it again"


def test_an_alert_leads_to_its_section_where_the_page_is_served():
    def installed(**more):
        (item,) = [item for item in chart.objects(chart.profile("tcp"), chart.ACCEPT, {"monitoring": {"rules": {"enabled": True, **more}}})
                   if item["kind"] == "PrometheusRule"]
        return item["spec"]

    as_they_are = yaml.safe_load(RULES.read_text())
    assert installed() == as_they_are
    sections = {line[3:].lower() for line in ALERTS.read_text().splitlines() if line.startswith("## ")}
    led = installed(runbooks="https://docs.example/alerts/")
    alerts = [rule for group in led["groups"] for rule in group["rules"] if "alert" in rule]
    assert {rule["annotations"].pop("runbook_url") for rule in alerts} == {f"https://docs.example/alerts/#{name}" for name in sections}
    assert led == as_they_are


def test_the_scrape_configurations_are_prometheus_own(tmp_path):
    promtool("check", "config", ROOT / "deploy/prometheus.yml")
    config = yaml.safe_load((ROOT / "deploy/prometheus-kubernetes.yml").read_text())
    for scrape in config["scrape_configs"]:  # Debian's promtool is built without Kubernetes
        assert scrape.pop("kubernetes_sd_configs") == [{"role": "pod"}]
    config["rule_files"] = [str(RULES)]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    promtool("check", "config", tmp_path / "prometheus.yml")


def test_the_scrape_in_kubernetes_finds_the_charts_pods_and_sets_the_monitors_labels():
    manifests = chart.objects(chart.profile("tcp"), chart.ACCEPT, chart.workload(), {"monitoring": {"podMonitor": {"enabled": True}}})
    (scrape,) = yaml.safe_load((ROOT / "deploy/prometheus-kubernetes.yml").read_text())["scrape_configs"]
    (endpoint,) = chart.one(manifests, "PodMonitor", "rl-weightwire")["spec"]["podMetricsEndpoints"]
    assert scrape["relabel_configs"][0]["regex"] == endpoint["port"]
    labels = {f"__meta_kubernetes_pod_label_{re.sub('[^a-z]', '_', name)}" for item in manifests if item["kind"] == "Deployment"
              for name in item["spec"]["template"]["metadata"]["labels"]}
    used = {label for part in (scrape["relabel_configs"], endpoint["relabelings"]) for rule in part
            for label in rule.get("source_labels", rule.get("sourceLabels", []))}
    assert {label for label in used if "_label_" in label} <= labels
    targets = {rule["targetLabel"] for rule in endpoint["relabelings"]}
    assert {"weightwire_job", "weightwire_role"} <= targets & {rule.get("target_label") for rule in scrape["relabel_configs"]}


def test_the_dashboard_is_generated_and_its_panels_do_not_overlap():
    made = json.dumps(generator().dashboard(), indent=1) + "\n"
    if os.environ.get("UPDATE_DOCS"):
        DASHBOARD.write_text(made)
    assert DASHBOARD.read_text() == made, "UPDATE_DOCS=1 ./dev test python writes it again"
    taken = set()
    for panel in json.loads(made)["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in json.loads(made)["panels"]}) == len(json.loads(made)["panels"])


class Prometheus:
    """A real one, with the delivered rules, that scrapes `targets` (role → HOST:PORT) every second; `more` are settings of
    the scrape."""

    def __init__(self, directory, targets, **more):
        self._address = f"127.0.0.1:{free_ports(1)[0]}"
        static = [{"targets": [address], "labels": {"weightwire_job": "rl", "weightwire_role": role, "namespace": "train"}}
                  for role, address in targets]
        config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(RULES)],
                  "scrape_configs": [{"job_name": "weightwire", "static_configs": static, **more}]}
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = open(directory / "prometheus.log", "w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
             f"--web.listen-address={self._address}"], stdout=self._log, stderr=subprocess.STDOUT)

    def query(self, text):
        """The result's series. Raises for a query that Prometheus refuses."""
        try:
            return self._get("query?" + urllib.parse.urlencode({"query": text}))["result"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it has not started yet
                raise
            raise AssertionError(f"{text}: {error.read().decode()}") from error

    def why_down(self):
        """The last error of the only target; empty when it was scraped."""
        (target,) = self._get("targets")["activeTargets"]
        return target["lastError"]

    def _get(self, path):
        return json.load(urllib.request.urlopen(f"http://{self._address}/api/v1/{path}", timeout=30))["data"]

    def wait(self, text, until, limit=60):
        end = time.monotonic() + limit
        while True:
            try:
                found = self.query(text)
            except (urllib.error.URLError, ConnectionError):
                found = []
            if until(found):
                return found
            assert time.monotonic() < end and self._process.poll() is None, f"{text}: {found}\n{open(self._log.name).read()}"
            time.sleep(0.2)

    def stop(self):
        self._process.terminate()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._log.close()


@pytest.fixture
def watched(daemon, groups, tmp_path):
    """A Prometheus that has watched a fleet move versions over tcp and shm."""
    remote = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "remote"), "remote", role="agent",
                    coordinator=daemon.grpc, transports="[tcp]")
    store = MetricsServer(Figures(), "127.0.0.1:0")
    prometheus = Prometheus(tmp_path, [("coordinator", daemon.http), ("agent", remote.http), ("agent", store.address)])
    try:
        prometheus.wait("count_over_time(weightwire_build_info[1m])", lambda found: len(found) == 2)
        groups += [trainer(daemon), engine(daemon, "near", 2), engine(remote, "far", 1)]
        for version in (1, 2):
            load(groups[0], version)
            groups[0].publish(version)
        for fleet in groups[1:]:
            fleet.wait_version(2)
        with Client(daemon.grpc) as client:
            client.wait_version(2, timeout=30)
        # Scraped again, and recorded again, after the last commit.
        prometheus.wait("sum(weightwire_epochs_total{outcome='committed'})", lambda found: found and found[0]["value"][1] == "2")
        now = time.time()
        prometheus.wait("min(timestamp(weightwire_build_info))",
                        lambda found: found and float(found[0]["value"][1]) > now + 1)
        yield prometheus
    finally:
        prometheus.stop()
        store.__exit__()
        while len(groups) > 1:
            groups.pop().close()
        assert remote.stop() == 0


def scrape_of(endpoint, files):
    """What the operator makes of a PodMonitor's endpoint: its Secret's keys as the files of `files`."""
    given = endpoint["tlsConfig"]
    paths = {"ca.crt": files.ca, "tls.crt": files.cert, "tls.key": files.key}
    tls = {"ca_file": paths[given["ca"]["secret"]["key"]], "cert_file": paths[given["cert"]["secret"]["key"]],
           "key_file": paths[given["keySecret"]["key"]]}
    for ours, theirs in (("serverName", "server_name"), ("insecureSkipVerify", "insecure_skip_verify")):
        if ours in given:
            tls[theirs] = given[ours]
    return {"scheme": endpoint["scheme"], "metrics_path": endpoint["path"], "tls_config": tls}


NAME = "weightwire.train.svc"


@pytest.mark.parametrize("server_name, named, role, why", [
    ("", "DNS:localhost", "metrics", ""), (NAME, f"DNS:{NAME}", "metrics", ""),
    (NAME, "DNS:localhost", "metrics", f"certificate is valid for localhost, not {NAME}"),
    ("", "DNS:localhost", "coordinator", "403 Forbidden")], ids=("any name", "its name", "another name", "a role that may not"))
def test_prometheus_scrapes_pages_over_tls_as_the_monitor_says(server_name, named, role, why, tmp_path):
    """With its own certificate; a name that the certificate lacks, or a role that may not look, gives nothing."""
    tls = {"tls": {"coordinatorSecret": "c", "pages": True}}
    watch = {"monitoring": {"podMonitor": {"enabled": True, "tls": {"secret": "m", "serverName": server_name}}}}
    (endpoint,) = chart.one(chart.objects(chart.profile("tcp"), tls, watch), "PodMonitor", "rl-weightwire")["spec"]["podMetricsEndpoints"]
    authority = certificates.Authority(tmp_path / "ca")
    served = authority.issue("served", "coordinator", job="rl", san=named)
    shown = authority.issue("shown", role, job="rl")
    daemon = Daemon(str(BINARIES / "weightwired"), str(tmp_path / "d"), "d", role="coordinator", job="rl", listen="127.0.0.1:0",
                    http_tls="true", **certificates.settings(served))
    prometheus = Prometheus(tmp_path, [("coordinator", daemon.http)], **scrape_of(endpoint, shown))
    try:
        prometheus.wait("up", lambda found: found and found[0]["value"][1] == ("0" if why else "1"))
        last = prometheus.why_down()
        assert why in last and bool(why) == bool(last), last
    finally:
        prometheus.stop()
        assert daemon.stop() == 0


def matchers(query):
    """metric → {label: values that the query asks for by = or =~}."""
    found = collections.defaultdict(dict)
    for metric, inside in re.findall(r"(weightwire_\w+)\{([^}]*)\}", query):
        for label, operator, values in re.findall(r'(\w+)(=~|=|!=)"([^"]*)"', inside):
            found[metric][label] = set(values.split("|")) if operator != "!=" else set()
    return found


def test_every_query_of_rules_and_dashboard_has_an_answer(watched):
    live = collections.defaultdict(list)
    for series in watched.query('{__name__=~"weightwire_.+"}'):
        live[series["metric"]["__name__"]].append(series["metric"])
    targets = [target for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])]
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {"$__rate_interval": "30s", "$namespace": "train", "$weightwire_job": "rl"}
    for query in [target["expr"] for target in targets] + [rule["expr"] for rule in rules()]:
        for name in re.findall(r"weightwire_\w+(?::\w+)*(?=[{\[ )]|$)", query):
            if name in ("weightwire_job", "weightwire_role"):
                continue
            assert name in (recorded if ":" in name else live), f"no metric {name} in a live scrape: {query}"
        for metric, labels in matchers(query).items():
            for label, values in labels.items():
                offered = {series.get(label) for series in live[metric]}
                assert offered != {None}, f"{metric} has no label {label}: {query}"
                assert label in TARGET_LABELS or values <= offered, f"{metric} has no {label} {values - offered}: {query}"
    for target in targets:
        query = target["expr"]
        for variable, value in asked.items():
            query = query.replace(variable, value)
        answer = watched.query(query)
        assert answer, f"no data: {query}"
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert "or vector(0)" in query or all(shown <= series["metric"].keys() for series in answer), target
    for rule in rules():
        if "record" in rule:
            watched.wait(rule["record"], bool, limit=30)
    # What this fleet is: plaintext, but on loopback, and well.
    assert watched.query('ALERTS{alertstate="firing"}') == []
