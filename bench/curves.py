"""Curves over one axis, panel above panel, as an SVG file: `bench/curves.py FILE.json FILE.svg`. The file has what `write` takes,
a curve as [series, [[x, y], …]]."""

from __future__ import annotations

import json
import sys
from html import escape
from typing import NamedTuple, Sequence

from chart import COLOURS, FONT, scale, text

_LEFT, _ROOM, _HEIGHT, _TOP = 60, 640, 170, 62


class Curve(NamedTuple):
    series: str
    points: Sequence[tuple[float, float]]


def write(path: str, title: str, axis: str, series: Sequence[str], panels: Sequence[tuple[str, Sequence[Curve]]],
          marks: Sequence[float] = ()) -> None:
    """`series`: in the legend's order, a colour each; curves of one series may be several. `marks`: moments on the axis."""
    step, end = scale(max(x for _, curves in panels for curve in curves for x, _ in curve.points))
    body, y = [], _TOP
    for label, curves in panels:
        body += _panel(label, curves, series, y, step, end)
        y += _HEIGHT + 34
    bottom = y - 34
    body += [f'<path d="M{_x(mark, end):.1f} {bottom}v-5" stroke="#b00"/>' for mark in marks]
    body += [text(_x(i * step, end), bottom + 16, f"{i * step:g}", "middle") for i in range(round(end / step) + 1)]
    legend, x = [], _LEFT
    for number, name in enumerate(series):
        legend.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{_colour(number)}"/>')
        legend.append(text(x + 16, 46, name))
        x += 34 + 7 * len(name)
    width = max(_LEFT + _ROOM + 20, x)
    with open(path, "w") as out:
        out.write("\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 46}" font-family="sans-serif" '
            f'font-size="{FONT}">', f'<rect width="{width}" height="{bottom + 46}" fill="white"/>',
            f'<text x="{_LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
            *legend, *body, text(_LEFT, bottom + 36, axis, colour="#555"), "</svg>", ""]))


def _panel(label: str, curves: Sequence[Curve], series: Sequence[str], top: float, x_step: float, x_end: float) -> list[str]:
    y_step, y_end = scale(max(y for curve in curves for _, y in curve.points))
    out = [text(_LEFT, top + 8, label, colour="#555")]
    top, height = top + 14, _HEIGHT - 14
    for i in range(round(y_end / y_step) + 1):
        y = top + height * (1 - i * y_step / y_end)
        out.append(f'<path d="M{_LEFT} {y:.1f}h{_ROOM}" stroke="#ddd"/>')
        out.append(text(_LEFT - 6, y + 4, f"{i * y_step:g}", "end"))
    out += [f'<path d="M{_x(i * x_step, x_end):.1f} {top}v{height}" stroke="#eee"/>' for i in range(round(x_end / x_step) + 1)]
    for curve in curves:
        points = " ".join(f"{_x(x, x_end):.1f},{top + height * (1 - y / y_end):.1f}" for x, y in curve.points)
        out.append(f'<polyline points="{points}" fill="none" stroke="{_colour(series.index(curve.series))}"/>')
    return out


def _x(value: float, end: float) -> float:
    return _LEFT + _ROOM * value / end


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def main() -> None:
    with open(sys.argv[1]) as given:
        about = json.load(given)
    about["panels"] = [(label, [Curve(*curve) for curve in curves]) for label, curves in about["panels"]]
    write(sys.argv[2], **about)


if __name__ == "__main__":
    main()
