#!/usr/bin/env python3
"""The Grafana dashboard, from one table: deploy/dashboard.py > helm/weightwire/files/dashboard.json

tests/python/test_deploy_observability.py checks that the file is up to date, and asks a real Prometheus every query.
"""

import json
import sys

JOB = 'namespace=~"$namespace", weightwire_job=~"$weightwire_job"'

MADE, CODE, CHANGED, ALL = 'kind="made"', 'kind="code"', 'kind="changed"', 'kind="all"'
ABORTED, IN, FAILED = 'outcome=~"aborted|fill_aborted"', 'direction="in"', 'code!="OK"'


def of(metric: str, more: str = "") -> str:
    return f"weightwire_{metric}{{{JOB}{', ' + more if more else ''}}}"


def rate(metric: str, by: str, more: str = "") -> str:
    return f"sum by ({by}) (rate({of(metric, more)}[$__rate_interval]))"


def quantiles(metric: str, more: str = "", by: str = "") -> list[tuple[str, str]]:
    grouped = f"le, {by}" if by else "le"
    label = f"{{{{{by}}}}} " if by else ""
    return [(f"histogram_quantile({q}, {rate(metric + '_bucket', grouped, more)})", f"{label}p{q * 100:g}") for q in (0.5, 0.99)]


#: row → panels: (title, kind, unit, width of 24, [(query, legend)], what a reader should see)
ROWS = {
    "Now": [
        ("Committed epoch", "stat", "none", 4, [(f"max({of('epoch_committed')})", "")], "The last epoch whose commit is durable."),
        ("Ranks", "stat", "none", 8, [(f"sum by (role, state) ({of('members')})", "{{role}} {{state}}")],
         "registered: no layout agreed yet. Only ready groups take part."),
        ("Transfers under way", "stat", "none", 4,
         [(f"sum({of('transfers_started_total')}) - sum({of('transfers_finished_total')})", "")], "Ranks that receive a version now."),
        ("Aborts, 15 min", "stat", "percentunit", 4,
         [(f"sum(increase({of('epochs_total', ABORTED)}[15m])) / sum(increase({of('epochs_total')}[15m]))",
           "")], "Nothing where no epoch ended."),
        ("Processes down", "stat", "none", 4, [(f'count(up{{job="weightwire", {JOB}}} == 0) or vector(0)', "")], ""),
        ("Committed version", "stat", "none", 4, [(f"max({of('version_committed')})", "")], "What engines are to serve."),
        ("Since the last commit", "stat", "s", 4, [(f"time() - max({of('last_commit_timestamp_seconds')} > 0)", "")],
         "Nothing where this coordinator has committed nothing."),
        ("Engines not ready", "stat", "none", 4, [(f"sum({of('engines_not_ready')})", "")], "Complete, and not serving what is committed."),
        ("Furthest behind", "stat", "none", 4, [(f"max({of('versions_behind_max')})", "")], "In versions."),
        ("Installing", "stat", "none", 4, [(f"sum({of('engines_installing')})", "")], "For minutes: a flip hangs."),
        ("Everyone waits", "stat", "s", 4, [(f"max({of('waiting_seconds')})", "")], "`wwctl status` says for what."),
    ],
    "Engines": [
        ("Version served", "timeseries", "none", 8, [(f"max by (engine) ({of('engine_version')})", "{{engine}}"),
                                                      (f"max({of('version_committed')})", "committed")], "At most 256 engines."),
        ("Versions behind", "timeseries", "short", 8, [(f"max by (engine) ({of('engine_versions_behind')}) > 0 or vector(0)", "{{engine}}")],
         ""),
        ("Not ready", "timeseries", "short", 8, [(f"1 - max by (engine) ({of('engine_ready')}) > 0 or vector(0)", "{{engine}}")], ""),
        ("Left behind by versions", "timeseries", "short", 8,
         [(f"sum(increase({of('engines_left_behind_total')}[$__rate_interval]))", "")], "A version went on without them."),
        ("Another transport than the preferred one", "timeseries", "short", 8,
         [(f"sum by (from, to) (increase({of('transport_failovers_total')}[$__rate_interval])) > 0 or vector(0)", "{{from}} to {{to}}")],
         ""),
        ("Drained", "timeseries", "short", 8, [(f"sum({of('engines_drained')})", "")], "They take no part in versions."),
    ],
    "Epochs": [
        ("Epochs that ended", "timeseries", "short", 8, [(f"sum by (outcome) (increase({of('epochs_total')}[$__rate_interval]))",
                                                         "{{outcome}}")], ""),
        ("Time of an epoch", "timeseries", "s", 8, quantiles("epoch_duration_seconds"), ""),
        ("Time by phase (mean)", "timeseries", "s", 8,
         [(f"{rate('epoch_phase_seconds_sum', 'phase')} / {rate('epoch_phase_seconds_count', 'phase')}", "{{phase}}")], ""),
        ("Aborts by reason", "timeseries", "short", 8,
         [(f"sum by (reason) (increase({of('epoch_aborts_total')}[$__rate_interval])) > 0 or vector(0)", "{{reason}}")], ""),
        ("Versions given up, by reason", "timeseries", "short", 8,
         [(f"sum by (reason) (increase({of('publishes_given_up_total')}[$__rate_interval])) > 0 or vector(0)", "{{reason}}")], ""),
        ("Plans: copies, and versions that reused one", "timeseries", "short", 8,
         [(f"max({of('plan_copies')})", "copies"), (f"sum({of('plan_cache_hits_total')})", "reused")], ""),
    ],
    "Bytes": [
        ("Received, by transport", "timeseries", "Bps", 8, [(rate("transfer_bytes_total", "transport", IN),
                                                            "{{transport}}")], "shm is memory of one pod."),
        ("Slowest and fastest receiver", "timeseries", "Bps", 8,
         [(f"min({rate('transfer_bytes_total', 'instance', IN)} > 0) or vector(0)", "slowest"),
          (f"max({rate('transfer_bytes_total', 'instance', IN)})", "fastest")], "Far apart: a straggler."),
        ("Time of one rank's transfer", "timeseries", "s", 8, quantiles("transfer_seconds", by="transport"), ""),
        ("Made of changes", "timeseries", "Bps", 12,
         [(f"sum(rate({of('transfer_bytes_delta_total', MADE)}[$__rate_interval]))", "not moved"),
          (f"sum(rate({of('transfer_bytes_delta_total', CODE)}[$__rate_interval]))", "moved instead")],
         "What engines made of changes, and the code that they read for it."),
        ("Elements that changed", "timeseries", "percentunit", 12,
         [(f"sum(rate({of('delta_elements_total', CHANGED)}[$__rate_interval])) / "
           f"sum(rate({of('delta_elements_total', ALL)}[$__rate_interval]))", "")], "Nothing where no changes were sent."),
        ("Waiting for rate limits", "timeseries", "percentunit", 12, [(rate("rate_limited_seconds_total", "direction"),
                                                                     "{{direction}}")], "Seconds waited in a second."),
        ("Memory", "timeseries", "bytes", 12, [(f"sum({of('staging_bytes')})", "stages, snapshots"),
                                              (f"sum({of('registered_memory_bytes')})", "bound by applications")], ""),
    ],
    "Safety: flat zero": [
        ("Invariants broken", "timeseries", "short", 6, [(f"sum by (id) ({of('invariant_violations_total')})", "{{id}}")], ""),
        ("Bytes that differed from their sums", "timeseries", "short", 6,
         [(f"sum by (transport) ({of('digest_failures_total')})", "{{transport}}"),
          (f"sum by (transport) ({of('delta_mismatches_total')})", "made of changes, {{transport}}")], "Read again; never committed."),
        ("Parts tried again", "timeseries", "short", 6, [(f"sum by (cause) ({of('transfer_retries_total')})", "{{cause}}")], ""),
        ("Too old to count", "timeseries", "short", 6, [(f"sum by (cause) ({of('fenced_requests_total')})", "{{cause}}")], ""),
        ("Ranks lost", "timeseries", "short", 6, [(f"sum by (role) ({of('lease_expiries_total')})", "{{role}}")], ""),
        ("Layouts refused", "timeseries", "short", 6, [(f"sum({of('layout_rejections_total')})", "")], ""),
        ("Connections refused", "timeseries", "short", 6, [(f"sum by (reason) ({of('auth_failures_total')})", "{{reason}}")], ""),
        ("Plaintext beyond loopback", "timeseries", "short", 6, [(f"max by (weightwire_job) ({of('insecure_mode')})",
                                                                 "{{weightwire_job}}")], "1 while started with --insecure."),
    ],
    "Service": [
        ("RPCs", "timeseries", "reqps", 8, [(rate("rpc_handled_total", "method"), "{{method}}")], ""),
        ("Time of RPCs (p99)", "timeseries", "s", 8, quantiles("rpc_seconds", by="method")[1:], ""),
        ("RPCs that failed", "timeseries", "reqps", 8,
         [(f"{rate('rpc_handled_total', 'method, code', FAILED)} or vector(0)", "{{method}} {{code}}")], ""),
        ("Journal: time of a commit's write", "timeseries", "s", 8, quantiles("journal_fsync_seconds"), ""),
        ("Journal: size", "timeseries", "bytes", 8, [(f"max({of('journal_bytes')})", "")], ""),
        ("File descriptors in use", "timeseries", "percentunit", 8, [(f"max({of('open_fds')} / {of('max_fds')})", "fullest")], ""),
        ("Data connections", "timeseries", "short", 12, [(f"sum by (transport, state) ({of('connections')})",
                                                         "{{transport}} {{state}}")], ""),
        ("CPU", "timeseries", "percentunit", 8, [(f"sum by (weightwire_role) (rate(process_cpu_seconds_total{{{JOB}}}[$__rate_interval]))",
                                                 "{{weightwire_role}}")], "1 is a core."),
        ("Resident memory", "timeseries", "bytes", 8, [(f"max by (weightwire_role) (process_resident_memory_bytes{{{JOB}}})",
                                                       "{{weightwire_role}}")], "Of the largest process."),
        ("Age of the youngest process", "timeseries", "s", 8,
         [(f"time() - max by (weightwire_role) (process_start_time_seconds{{{JOB}}})", "{{weightwire_role}}")], "It falls when one is restarted."),
        ("Processes by version", "timeseries", "short", 12,
         [(f"count by (version, revision) ({of('build_info')})", "{{version}} {{revision}}")],
         "Two lines: an upgrade is under way."),
    ],
}
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
HEIGHT = {"stat": 4, "timeseries": 7}


def panel(number: int, place: dict, title: str, kind: str, unit: str, queries: list, note: str) -> dict:
    return {"id": number, "type": kind, "title": title, "description": note, "datasource": SOURCE, "gridPos": place,
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "options": {"legend": {"displayMode": "list", "placement": "bottom"}} if kind == "timeseries" else {},
            "targets": [{"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend or "__auto"}
                        for i, (query, legend) in enumerate(queries)]}


def panels() -> list[dict]:
    out, y = [], 0
    for row, items in ROWS.items():
        out.append({"id": len(out) + 1, "type": "row", "title": row, "collapsed": False, "panels": [],
                    "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        x, y = 0, y + 1
        for title, kind, unit, width, queries, note in items:
            if x + width > 24:
                x, y = 0, y + HEIGHT[kind]
            place = {"x": x, "y": y, "w": width, "h": HEIGHT[kind]}
            out.append(panel(len(out) + 1, place, title, kind, unit, queries, note))
            x += width
        y += HEIGHT[items[-1][1]]
    return out


def variable(name: str, query: str) -> dict:
    return {"name": name, "type": "query", "datasource": SOURCE, "query": query, "definition": query, "refresh": 2,
            "multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}


def dashboard() -> dict:
    return {"uid": "weightwire", "title": "weightwire", "tags": ["weightwire"], "schemaVersion": 39, "editable": True,
            "time": {"from": "now-1h", "to": "now"}, "refresh": "15s", "panels": panels(),
            "templating": {"list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "current": {}},
                variable("namespace", "label_values(weightwire_build_info, namespace)"),
                variable("weightwire_job", "label_values(weightwire_build_info, weightwire_job)")]}}


if __name__ == "__main__":
    json.dump(dashboard(), sys.stdout, indent=1)
    print()
