#!/usr/bin/env python3
"""One file with what long suites said: results.py OUT.md JUNIT.xml…; a file that is not there did not run."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path


def result(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.get("status") == "fail":
        return "FAILED"
    return "not run" if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled") else "passed"


def rows(path: Path) -> list[str]:
    """One line for each test of a JUnit file of ctest."""
    suite = ElementTree.parse(path).getroot()
    when = suite.get("timestamp", "")[:10] or datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).strftime("%Y-%m-%d")
    return [f"| {case.get('name')} | {result(case)} | {float(case.get('time', 0)):.0f} | {when} |" for case in suite.iter("testcase")]


def main(out: str, *files: str) -> int:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines = [line for file in files if Path(file).exists() for line in rows(Path(file))]
    lines = lines or ["| nothing | not run | 0 | |"]
    Path(out).write_text("\n".join([f"Long suites at {commit.stdout.strip() or 'no commit'}", "", "| test | result | seconds | date |",
                                    "|---|---|---|---|", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
