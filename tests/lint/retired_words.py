#!/usr/bin/env python3
"""Refuses names that were replaced once (retired_words.txt), so that they do not come back, and comments of C++ that name a
file of ours which is not there (any more).

Whole identifiers count, in tracked sources, tests, benchmarks, build files and docs. Not looked at: recorded data, the log in
docs/history, and proto/ with what names its messages (`v1::…`, a golden copy of the contract).
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SUFFIXES = {".cc", ".h", ".cu", ".cuh", ".py", ".md", ".txt", ".cmake", ".sh"}
NOT_LOOKED_AT = ("proto/", "docs/history/", "tests/data/", "tests/golden/contract.txt", "tests/golden/descriptor_test.py",
                 "tests/lint/retired_words", "client/python/weightwire/v1/")
OTHERS = {"nccl.h", "xxhash.h"}  # of libraries


def table() -> dict[str, str]:
    """Old name -> what to say."""
    lines = (ROOT / "tests/lint/retired_words.txt").read_text().splitlines()
    return dict(line.split(None, 1) for line in lines if line and not line.startswith("#"))


def is_looked_at(path: str) -> bool:
    return pathlib.Path(path).suffix in SUFFIXES and not path.startswith(NOT_LOOKED_AT)


def complaints(text: str, words: dict[str, str]) -> list[tuple[int, str]]:
    """(line, old name) of each use in `text`."""
    # Nested messages of v1 (v1::DescribeEpochResponse::Track) are contract, too.
    pattern = re.compile(r"\bv1::[\w:]+|\b(" + "|".join(map(re.escape, words)) + r")\b")
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        found += [(number, match[1]) for match in pattern.finditer(line) if match[1]]
    return found


def tails(paths: list[str]) -> set[str]:
    """All names under which a file may be spoken of: its path, and that without its first folders."""
    return {"/".join(parts[i:]) for parts in (path.split("/") for path in paths) for i in range(len(parts))}


def missing_files(text: str, known: set[str]) -> list[tuple[int, str]]:
    """(line, file) of each C++ header or source that a comment of `text` names and that nobody knows."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.split(r"(?<!:)//", line, maxsplit=1)[1:]
        named = re.findall(r"(?<![\w/.<])([a-z][\w/]*\.(?:h|cc|cu))\b", "".join(comment))
        found += [(number, name) for name in named if name not in known | OTHERS]
    return found


def tracked() -> list[str]:
    """Paths below the root; without git (an archive of the tree) every file."""
    shown = subprocess.run(["git", "-C", ROOT, "ls-files"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    if shown.returncode == 0:
        return shown.stdout.splitlines()
    return [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file()]


def main() -> int:
    words, count, failures, paths = table(), 0, [], tracked()
    known = tails(paths)
    for path in filter(is_looked_at, paths):
        file = ROOT / path
        if not file.exists():
            continue
        count += 1
        text = file.read_text(encoding="utf-8")
        for line, old in complaints(text, words):
            failures.append(f"{path}:{line}: {old} was replaced: say {words[old]}")
        if path.startswith(("server/", "client/", "kernels/")) and file.suffix in (".h", ".cc", ".cu", ".cuh"):
            failures += [f"{path}:{line}: there is no {name}" for line, name in missing_files(text, known)]
    if count == 0:
        failures.append("no file was looked at")
    print("\n".join(failures) or f"{len(words)} retired words, none in {count} files")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
