"""The charts of the benchmarks: what is drawn is what was measured."""

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

from conftest import ROOT

SVG = "{http://www.w3.org/2000/svg}"
ROWS = [{"name": "memcpy & co", "seconds_median": 0.1, "seconds_min": 0.05, "seconds_max": 0.4},
        {"name": "two series", "bars": {"before": {"median": 0.3, "min": 0.2, "max": 0.8}, "stopped": 0.2}}]


@pytest.fixture
def drawn(tmp_path):
    about = {"title": "A < B", "unit": "seconds", "rows": ROWS, "machine": {"cpu": "a CPU", "cores": 2, "date": "2026-11-22"}}
    (tmp_path / "rows.json").write_text(json.dumps(about))
    subprocess.run([sys.executable, ROOT / "bench/report.py", tmp_path / "rows.json", tmp_path / "out.svg"], check=True, timeout=60)
    return ET.parse(tmp_path / "out.svg").getroot()


def test_bars_and_whiskers_have_the_lengths_of_the_figures(drawn):
    bars = [(float(r.get("x")), float(r.get("width"))) for r in drawn.iter(f"{SVG}rect") if r.get("height") == "14"]
    assert len({x for x, _ in bars}) == 1
    left, scale = bars[0][0], bars[0][1] / 0.1
    assert [width / scale for _, width in bars] == pytest.approx([0.1, 0.3, 0.2], abs=1e-3)
    ends = [re.match(r"M([\d.]+) [\d.]+H([\d.]+)", path.get("d")).groups() for path in drawn.iter(f"{SVG}path")]
    assert [[(float(x) - left) / scale for x in pair] for pair in ends] == [pytest.approx([0.05, 0.4], abs=1e-3),
                                                                         pytest.approx([0.2, 0.8], abs=1e-3)]
    assert max(float(x) for _, x in ends) < float(drawn.get("viewBox").split()[2])


def test_everything_is_named(drawn):
    texts = [text.text for text in drawn.iter(f"{SVG}text")]
    for wanted in ("A < B", "memcpy & co", "two series", "before", "stopped", "0.1", "0.3", "0.2"):
        assert wanted in texts, wanted
    assert any("least to most" in text and "a CPU, 2026-11-22" in text for text in texts)


def test_curves_go_through_their_points_and_strikes_are_marked(tmp_path):
    about = {"title": "A < B", "axis": "seconds", "series": ["one", "two"], "marks": [30], "panels": [
        ["MiB", [["one", [[0, 0], [40, 20]]], ["two", [[10, 5], [40, 10]]]]], ["descriptors", [["one", [[0, 100], [40, 50]]]]]]}
    (tmp_path / "in.json").write_text(json.dumps(about))
    subprocess.run([sys.executable, ROOT / "bench/curves.py", tmp_path / "in.json", tmp_path / "out.svg"], check=True, timeout=60)
    svg = ET.parse(tmp_path / "out.svg").getroot()
    one, two, fds = ([[float(n) for n in point.split(",")] for point in line.get("points").split()]
                     for line in svg.iter(f"{SVG}polyline"))
    (left, zero), (right, full) = one
    assert two == [[pytest.approx(left + (right - left) / 4, abs=0.1), pytest.approx(zero + (full - zero) / 4, abs=0.1)],
                   [right, pytest.approx(zero + (full - zero) / 2, abs=0.1)]]
    assert fds[0][1] < fds[1][1] and min(y for _, y in fds) > zero  # below the first panel
    marks = [path.get("d") for path in svg.iter(f"{SVG}path") if path.get("stroke") == "#b00"]
    assert len(marks) == 1 and float(marks[0][1:].split()[0]) == pytest.approx(left + (right - left) * 3 / 4, abs=0.1)
    texts = [text.text for text in svg.iter(f"{SVG}text")]
    assert {"A < B", "one", "two", "MiB", "descriptors", "seconds"} <= set(texts)
