"""docs/metrics.md lists what a daemon exports, no more and no less."""

import os
import re

from conftest import ROOT

PAGE = ROOT / "docs/metrics.md"
HEAD = """# Metrics

Every family of `/metrics`, as a daemon that just started exports it. Histograms are in seconds. Generated:
`UPDATE_DOCS=1 ./dev test python` writes this file again.

| family | kind | meaning |
|---|---|---|
"""


def test_the_page_is_what_a_daemon_exports(daemon):
    text = daemon.metrics()
    helps = dict(re.findall(r"^# HELP (\w+) (.*)$", text, re.M))
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    assert helps.keys() == kinds.keys() and helps
    assert all(helps.values()), "a family without a help text"
    page = HEAD + "".join(f"| `{name}` | {kinds[name]} | {helps[name]} |\n" for name in sorted(helps))
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
