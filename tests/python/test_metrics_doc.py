"""docs/metrics.md lists what a daemon exports, at once or once it has something to say, no more and no less."""

import os
import re

from conftest import ROOT

PAGE = ROOT / "docs/metrics.md"
CATALOGUE = ROOT / "server/metrics/catalogue.cc"
HEAD = """# Metrics

Every family of `/metrics`. A daemon that just started exports all of them but those marked *later*, which have a series once there is an
engine, a call or an error of theirs. Histograms are in seconds. Generated: `UPDATE_DOCS=1 ./dev test python` writes this file again.

| family | kind | meaning |
|---|---|---|
"""


def declared() -> dict[str, tuple[str, str]]:
    """(kind, help) of every family that the catalogue declares."""
    found = re.findall(r'Declare(Counter|Gauge|Histogram)\(\s*"(\w+)",((?:\s*"[^"\n]*")+)', CATALOGUE.read_text())
    return {f"weightwire_{name}": (kind.lower(), "".join(re.findall(r'"([^"]*)"', text))) for kind, name, text in found}


def test_the_page_is_what_a_daemon_exports(daemon):
    text = daemon.metrics()
    helps = dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.M))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    assert helps.keys() == kinds.keys() and helps
    assert all(helps.values()), "a family without a help text"
    catalogue = declared()
    assert {name: catalogue.get(name) for name in helps if name.startswith("weightwire_")} == \
        {name: (kinds[name], said) for name, said in helps.items() if name.startswith("weightwire_")}, "the catalogue was read right"
    later = {name: (kind, f"*Later.* {said}") for name, (kind, said) in catalogue.items() if name not in helps}
    rows = {**{name: (kinds[name], said) for name, said in helps.items()}, **later}
    page = HEAD + "".join(f"| `{name}` | {kind} | {said} |\n" for name, (kind, said) in sorted(rows.items()))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
