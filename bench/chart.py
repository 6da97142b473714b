"""Bars of medians with whiskers from least to most, as an SVG file. A chart of this kind is a page of text; a library for it
would be the largest dependency of all benchmarks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import Sequence

COLOURS = ("#31688e", "#e08214", "#35b779", "#8c6bb1", "#c33")
FONT = 12
_ROOM, _BAR, _GAP, _TOP = 480, 16, 12, 62


@dataclass(frozen=True)
class Bar:
    series: str
    median: float
    low: float
    high: float


Group = tuple[str, Sequence[Bar]]


def write(path: str, title: str, unit: str, groups: Sequence[Group], note: str = "") -> None:
    """One group of bars below another, each with its label; series have one colour throughout."""
    series = list(dict.fromkeys(bar.series for _, bars in groups for bar in bars))
    left = 20 + 7 * max(len(label) for label, _ in groups)
    width = left + _ROOM + 70  # the figures stand behind the bars
    step, end = scale(max(bar.high for _, bars in groups for bar in bars))
    body, y = [], _TOP
    for label, bars in groups:
        height = _BAR * len(bars)
        body.append(text(left - 8, y + height / 2 + 4, label, "end"))
        for bar in bars:
            body += _bar(bar, COLOURS[series.index(bar.series) % len(COLOURS)], left, y, _ROOM / end)
            y += _BAR
        y += _GAP
    grid = []
    for i in range(round(end / step) + 1):
        x = left + _ROOM * i * step / end
        grid.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{y - _GAP / 2:.1f}" stroke="#ddd"/>')
        grid.append(text(x, y + 10, f"{i * step:g}", "middle"))
    legend, x = [], left
    for number, name in enumerate(series):
        if not name:
            continue
        legend.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{COLOURS[number % len(COLOURS)]}"/>')
        legend.append(text(x + 16, 46, name))
        x += 34 + 7 * len(name)
    foot = f"{unit}; median, whiskers from least to most" + (f"; {note}" if note else "")
    with open(path, "w") as out:
        out.write("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 40}" font-family="sans-serif" '
            f'font-size="{FONT}">', f'<rect width="{width}" height="{y + 40}" fill="white"/>',
            f'<text x="{left}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
            *legend, *grid, *body, text(left, y + 30, foot, colour="#555"), "</svg>", ""]))


def scale(most: float) -> tuple[float, float]:
    """A round step, and the multiple of it that holds everything: four to eight steps."""
    power = 10.0 ** math.floor(math.log10(most / 4)) if most > 0 else 1.0
    step = next(factor * power for factor in (1, 2, 5, 10) if most / (factor * power) <= 8)
    return step, step * max(1, math.ceil(most / step - 1e-9))


def _bar(bar: Bar, colour: str, left: float, y: float, scale: float) -> list[str]:
    low, median, high = (left + scale * value for value in (bar.low, bar.median, bar.high))
    middle = y + _BAR / 2
    out = [f'<rect x="{left}" y="{y + 1}" width="{max(median - left, 0.5):.1f}" height="{_BAR - 2}" fill="{colour}"/>']
    if high - low > 1:  # pixels
        out.append(f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 3}v6M{high:.1f} {middle - 3}v6" '
                   'stroke="#222" fill="none"/>')
    return [*out, text(max(high, median) + 6, middle + 4, f"{bar.median:.3g}")]


def text(x: float, y: float, text: str, anchor: str = "start", colour: str = "#222") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
