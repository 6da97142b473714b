"""Helm, as a process that renders: its library brings Go's runtime, which has no business in the process of the tests.

A line of standard input is {"chart", "values", "release", "namespace"}, and a line of output {path: text} of what it renders, or
{"error": message}. With "lint" instead of "release": its report.
"""

from __future__ import annotations

import json
import sys

from helm_python.chart import Chart, lint
from helm_python.errors import HelmError


def answer(asked: dict) -> dict:
    if "lint" in asked:
        return lint(asked["chart"], asked["values"], strict=True, kube_version=asked["lint"])
    with Chart.load(asked["chart"]) as chart:
        chart.validate_schema(asked["values"])
        return {path.partition("/")[2]: text
                for path, text in chart.render(asked["values"], name=asked["release"], namespace=asked["namespace"]).items()}


for line in sys.stdin:
    try:
        said = answer(json.loads(line))
    except HelmError as error:
        said = {"error": str(error)}
    print(json.dumps(said), flush=True)
