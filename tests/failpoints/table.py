"""The table of docs/failpoints.md: one row for each point, process and occasion."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/failpoints.md"
_ROW = re.compile(r"^\| `([a-z]+\.[a-z_]+)` \| (\w+) \| ([a-z ]+?)(?:, after (\d+))? \| (.+) \|$")


@dataclass(frozen=True)
class Row:
    point: str
    process: str
    scenario: str
    skip: int  # crossings that pass first
    what: str

    @property
    def name(self) -> str:
        return f"{self.point}-{self.process}-{self.scenario.replace(' ', '_')}-{self.skip}"


def rows() -> list[Row]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    found = [_ROW.match(line) for line in lines]
    assert found and all(found), [line for line, row in zip(lines, found) if not row]
    return [Row(r[1], r[2], r[3], int(r[4] or 0), r[5]) for r in found]


def points_in_code() -> list[str]:
    """Each as often as it is placed."""
    return [name for path in sorted((ROOT / "server").rglob("*.cc"))
            for name in re.findall(r'WW_FAILPOINT\(\s*"([^"]+)"\s*\)', path.read_text())]
