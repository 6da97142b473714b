"""MkDocs calls these: the README is the home page, links out of docs/ lead to the repository, and what GitHub's Markdown reads
and Python's does not is written as Python's wants it."""

from __future__ import annotations

import pathlib
import posixpath
import re

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|!?\[[^\[\]]*\](?:\([^()]*\))?)*\])\((?P<target>[^()\s]+)\)")
_FENCE = re.compile(r"^\s*```")
_LIST = re.compile(r"^\s*(?:[-*]|\d+\.)\s")


def on_files(files, config):
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    folder = "" if page.file.src_uri == "index.md" else posixpath.join("docs", posixpath.dirname(page.file.src_uri))
    here = posixpath.dirname(page.file.src_uri)
    return "\n".join(blocks(lines_with_links(markdown, lambda target: leads(target, folder, here, page, config))))


def leads(target: str, folder: str, here: str, page, config) -> tuple[str, bool]:
    """Where a link of a page that lies in `folder` goes; False: it is a path of the repository, and nobody says where that is."""
    path, hash_, anchor = target.partition("#")
    if not path or "://" in target or target.startswith("mailto:"):
        return target, True
    inside = posixpath.normpath(posixpath.join(folder, path))
    if inside == "README.md":
        return posixpath.relpath("index.md", here or ".") + hash_ + anchor, True
    if inside.startswith("docs/"):
        return posixpath.relpath(inside.removeprefix("docs/"), here or ".") + hash_ + anchor, True  # MkDocs looks whether it exists
    if not (ROOT / inside).exists():
        raise PluginError(f"{page.file.src_uri}: there is no {target}")
    if not config.repo_url:
        return inside, False
    return f"{config.repo_url.rstrip('/')}/blob/main/{inside}{hash_}{anchor}", True


def lines_with_links(markdown: str, to) -> list[str]:
    def link(found: re.Match) -> str:
        text = _LINK.sub(link, found["text"][1:-1]) if not found["text"].startswith("!") else None  # an image in a link
        target, linked = to(found["target"])
        shown = found["text"] if text is None else f"[{text}]"
        if linked:
            return f"{shown}({target})"
        return f"`{target}`" if target in shown else f"{shown[1:-1]} (`{target}`)"

    parts, fenced = [], False
    prose: list[str] = []
    for line in [*markdown.split("\n"), None]:
        if line is None or _FENCE.match(line):
            if prose:
                text = "\n".join(prose)  # links may be broken over two lines
                parts += (text if fenced else _LINK.sub(link, text)).split("\n")
                prose = []
            if line is not None:
                fenced = not fenced
                parts.append(re.sub(r"^(\s*```\w*).*", r"\1", line))  # `sh run` and `sh check` are the tests' words
        else:
            prose.append(line)
    return parts


def blocks(lines: list[str]) -> list[str]:
    """A list and a table are blocks of their own, and a list in a list is indented by four."""
    out: list[str] = []
    fenced = listed = False  # `listed`: this paragraph is a list
    before = ""
    for line in lines:
        fence = _FENCE.match(line) is not None
        if not fenced and not fence:
            item, table = _LIST.match(line) is not None, line.startswith("|")
            if before and (item and not listed or table and not before.startswith("|")):
                out.append("")
            listed = item or (listed and line != "")
            if item and re.match(r" {1,3}\S", line):
                line = "    " + line.lstrip()
        out.append(line)
        fenced ^= fence
        before = line
    return out
