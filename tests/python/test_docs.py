"""What the documentation says to type. Blocks of a page that are fenced as `sh run` are one script, run in an empty folder;
those fenced as `sh check` need a cluster, a GPU or root, or take too long: what they call must exist, and every option of it.
The same goes for commands in running text. No shell block is neither."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from conftest import BINARIES, ROOT
from ports import free_ports

PAGES = sorted([*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "client/python/README.md", ROOT / "SECURITY.md",
                *ROOT.glob("client/python/examples/*.md")])
GENERATED = {"wwctl.md", "metrics.md", "python.md", "python-frameworks.md"}
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)
#: Programs of others: what they are told is theirs to refuse. `weightwire` without a command is the package's own.
FOREIGN = {"openssl", "python3", "weightwire", "helm", "kubectl", "vllm", "python", "cd", "export", "source", "curl", "docker", "systemctl", "pip", "pytest", "wget"}
#: wwctl's commands that are `python -m weightwire.checkpoint`, and `python -m weightwire.store`.
_BY_PYTHON = (["compact"], ["convert"], ["load"], ["push"], ["save"], ["delta"], ["quantize"], ["store"])
_OURS = ("wwctl", "weightwired", "weightwire demo", "weightwire vllm", "./dev", "python -m weightwire.checkpoint", "deploy/certs.sh")


def blocks(page, kind: str) -> list[str]:
    return [body for info, body in _BLOCK.findall(page.read_text()) if info.strip() == kind]


def named(pages) -> list:
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "sh run")))
def test_what_is_to_be_typed_works(page, tmp_path):
    """On ports of its own in place of the defaults: others may test here."""
    ports = dict(zip(("7411", "7412"), map(str, free_ports(2))))
    script = "\n".join(blocks(page, "sh run"))
    script = re.sub(r"\b741[12]\b", lambda port: ports[port[0]], script)
    environment = {**os.environ, "ROOT": str(ROOT), "XDG_RUNTIME_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "client/python"),
                   "PATH": f"{BINARIES}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}",
                   "WEIGHTWIRE_ADDRESS": f"127.0.0.1:{ports['7411']}", "WEIGHTWIRE_LISTEN": f"127.0.0.1:{ports['7411']}",
                   "WEIGHTWIRE_HTTP": f"127.0.0.1:{ports['7412']}"}
    # Job control, as at a prompt; whatever was started ends with the script.
    done = subprocess.run(["timeout", "--kill-after=10", "200", "bash", "-c",
                           "set -euo pipefail; trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n" + script],
                          cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    print(done.stdout)
    logs = "".join(f"\n{log.name}: {log.read_text()[-1500:]}" for log in tmp_path.glob("*.log"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}{logs}"


@functools.lru_cache(maxsize=None)
def help_of(*command: str) -> str:
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, cwd=ROOT,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "client/python")})
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def subcommands(*command: str) -> list[str]:
    return re.findall(r"^  ([a-z]\S*)", help_of(*command).partition("Subcommands:\n")[2], re.M)


def wwctl_help(words: list[str]) -> str:
    """Of the command that `words` name; alternatives are written show|diff."""
    path: list[str] = []
    while words and path[:1] not in _BY_PYTHON and (names := subcommands(str(BINARIES / "wwctl"), *path)):
        if not re.fullmatch(r"[a-z|]+", words[0]):
            break
        alternatives = words.pop(0).split("|")
        assert set(alternatives) <= set(names), f"wwctl {' '.join(path)}: no {alternatives}; there are {names}"
        path.append(alternatives[0])
    assert path or not words or words[0].startswith("-"), f"wwctl: no command {words}"
    if path[:1] in _BY_PYTHON:
        return checkpoint_help([*path, *words])
    everywhere = help_of(str(BINARIES / "wwctl")) if path else ""  # its options stand before or after the command
    return help_of(str(BINARIES / "wwctl"), *path) + everywhere


def checkpoint_help(words: list[str]) -> str:
    if words[:1] == ["store"]:
        return help_of(sys.executable, "-m", "weightwire.store", *[word for word in words[1:2] if re.fullmatch("[a-z]+", word)])
    depth = 2 if words[:1] in (["delta"], ["quantize"]) else 1
    return help_of(sys.executable, "-m", "weightwire.checkpoint", *[word for word in words[:depth] if re.fullmatch("[a-z]+", word)])


def what_it_takes(words: list[str]) -> str:
    """The text that names every option of the command that `words` begin with; eats the words of its name."""
    program = words.pop(0)
    if program == "wwctl":
        return wwctl_help(words)
    if program == "weightwired":
        return help_of(str(BINARIES / "weightwired"))
    if program == "weightwire":
        return help_of(sys.executable, "-m", "weightwire", *([words.pop(0)] if words and words[0].isalpha() else []))
    if program == "deploy/certs.sh":
        return (ROOT / "deploy/certs.sh").read_text().split("set -euo")[0]
    if program == "./dev":
        text = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, timeout=60).stdout
        known = dict(re.findall(r"^  ([\w-]+) +(.*)$", text, re.M))
        assert words and words[0] in known, f"./dev: no {words}"
        said = known[words[0]]
        if words[0] in ("test", "bench") and len(words) > 1 and not words[1].startswith("-"):
            assert re.search(rf"\b{words[1]}\b", said), f"./dev {words[0]}: no {words[1]}"
        if words[0] == "bench" and len(words) > 1 and (ROOT / (tool := f"bench/{words[1].replace('-', '_')}.py")).exists():
            return help_of(sys.executable, tool)
        whose = {"demo": (sys.executable, "-m", "demo.run"), "up": (str(BINARIES / "weightwired"),)}.get(words[0])
        return help_of(*whose) if whose else said
    assert words[:2] == ["-m", "weightwire.checkpoint"], words
    return checkpoint_help(words[2:])


def check_command(line: str) -> None:
    """One command, perhaps with brackets, dots and alternatives as a synopsis has them."""
    words = [word.strip("[]…") for word in line.split()]
    text = what_it_takes(words)
    for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line):
        assert not text or re.search(rf"{option}(?![\w-])", text), f"{line!r}: {option} is unknown"


def commands(script: str) -> list[str]:
    """Its lines, continued ones joined, without comments and variables in front."""
    lines = re.sub(r"\\\n", " ", script).splitlines()
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in lines]
    return [re.sub(r"^([A-Z_]+=\S+\s+)+", "", line) for line in lines if line]


@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "sh check")))
def test_what_cannot_be_run_here_calls_what_exists(page):
    for script in blocks(page, "sh check"):
        syntax = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=60)
        assert syntax.returncode == 0, f"{script}\n{syntax.stderr}"
        for line in commands(script):
            if line.startswith(_OURS):
                check_command(line)
            else:
                assert line.split()[0] in FOREIGN, f"{line!r}: whose program is that?"
                for file in re.findall(r"\s-f ((?:helm|deploy)/\S+)", line):
                    assert (ROOT / file).exists(), f"{line!r}: there is no {file}"


@pytest.mark.parametrize("page", named(page for page in PAGES if page.name not in GENERATED))
def test_commands_in_running_text_exist(page):
    text = _BLOCK.sub("", page.read_text())
    for span in re.findall(r"`([^`]+)`", text):
        span = " ".join(span.split())
        if span.startswith(tuple(f"{program} " for program in _OURS)):
            check_command(span)


@pytest.mark.parametrize("page", named(page for page in PAGES if page.name not in GENERATED))
def test_every_shell_block_says_which_it_is_and_every_link_leads_somewhere(page):
    for info, body in _BLOCK.findall(page.read_text()):
        if info.strip() in ("", "sh", "bash", "console"):
            ours = [line for line in commands(body) if line.startswith(_OURS)]
            assert not ours, f"fence it as `sh run` or `sh check`: {ours}"
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", _BLOCK.sub("", page.read_text())):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: there is no {target}"


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_what_runs_with_what_says_one_of_three_things():
    rows = re.findall(r"^\| ([^|]+) \|([^\n]+)\|$", (ROOT / "README.md").read_text().partition("## What runs with what\n")[2]
                      .partition("\n## ")[0], re.M)[1:]
    cells = {cell.strip().removeprefix("FSDP2 ") for _, row in rows for cell in row.split("|")}
    assert len(rows) >= 8 and cells == {"real", "simulated", "not run", "–"}


def test_what_a_plan_costs_is_what_wwctl_says():
    """The lines of docs/cost.md up to "…", with the page's own command on the model that it names."""
    page = ROOT / "docs/cost.md"
    command = blocks(page, "sh check")[0].split()
    at = command.index("--config") + 1
    command[at] = str(ROOT / "tests/data/configs/qwen2.5-0.5b.json")
    said = subprocess.run([BINARIES / "wwctl", *command[1:]], check=True, capture_output=True, text=True, timeout=60).stdout
    quoted = [line.removesuffix(" …") for line in blocks(page, "")[0].splitlines()]
    assert len(quoted) == 4 and [line for line in quoted if line not in said] == []


@pytest.mark.parametrize("spec, change, row", [("megatron:tp5", {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64}, "indivisible heads"),
                                               ("megatron:ep3", {"num_experts": 4}, "wrong expert count")])
def test_a_layout_that_does_not_divide_is_refused_as_the_page_says(spec, change, row, tmp_path):
    table = dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", (ROOT / "docs/layouts.md").read_text(), re.M))
    message, hint = table[row].split(" | ")
    config = json.loads((ROOT / "tests/data/configs" / ("qwen3-235b-a22b.json" if "num_experts" in change else "qwen2.5-0.5b.json")).read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    done = subprocess.run([BINARIES / "wwctl", "layout", "show", "--config", tmp_path / "config.json", "--spec", spec, "--rank", "0"],
                          capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and re.search(r"`(.+?)`", message)[1] in done.stderr and hint.split(";")[0] in done.stderr, done.stderr


@pytest.mark.parametrize("page", named(page for page in PAGES if blocks(page, "python") and page.name not in GENERATED))
def test_python_of_pages_can_be_read(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_figures_are_drawings_that_a_page_shows():
    shown = "".join(page.read_text() for page in PAGES)
    for figure in ROOT.glob("docs/figures/*.svg"):
        assert ElementTree.parse(figure).getroot().get("viewBox") and f"figures/{figure.name}" in shown


@pytest.mark.parametrize("name", ["troubleshooting.md", "concepts.md", "getting-started.md"])
def test_settings_and_reasons_exist(name):
    reasons = {word.lower() for word in re.findall(r"REASON_(\w+) = ", (ROOT / "proto/weightwire/v1/types.proto").read_text())}
    keys = {key.replace("-", "_") for key in re.findall(r"--([a-z][a-z-]+)", help_of(str(BINARIES / "weightwired")))}
    spans = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", (ROOT / "docs" / name).read_text()))
    assert spans <= reasons | keys, spans - reasons - keys


@functools.lru_cache(maxsize=None)
def known_tests() -> frozenset[str]:
    """Of the Python tests their functions; of gtest suite and name, a suite that is instantiated also by its own one; of ctest
    what CMake names."""
    sources = [path.read_text() for path in [*ROOT.glob("tests/**/*.cc"), *ROOT.glob("tests/**/*.h")]]
    found = {f"{suite}.{name}" for text in sources for suite, name in re.findall(r"^TEST(?:_[FP])?\(\s*(\w+),\s*(\w+)", text, re.M)}
    for path in ROOT.glob("tests/**/*.py"):
        found |= set(re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)) | {path.name}
    for path in ROOT.glob("tests/**/CMakeLists.txt"):
        found |= {f"sim.{seeds}" for seeds in re.findall(r"^\s*seeds\((\w+)", path.read_text(), re.M)}
        found |= set(re.findall(r"(?:add_test\(NAME|weightwire_engine_suite\() ?([\w.]+)", path.read_text()))
    return frozenset(found)


def test_the_tests_that_hold_faults_exist():
    """By name; with * for all that begin so."""
    known = known_tests()
    spans = re.findall(r"`([^`\n]+)`", (ROOT / "docs/faults.md").read_text())
    named = [span for span in spans if re.fullmatch(r"test_\w+(\.py)?|[A-Z]\w+\.(\w+|\w*\*)|[a-z]+\.[A-Z]\w+", span)]
    assert len(named) > 10
    gone = [span for span in named if span not in known and
            not (span.endswith("*") and any(one.startswith(span[:-1]) for one in known))]
    assert not gone


#: Of the walk of one publish; where one goes, this goes down.
HOPS_MAX = 136


def code_of(text: str) -> str:
    """C++ without comments, and with nothing in its literals."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'",
                  lambda found: "" if found[0].startswith("/") else '""', text, flags=re.S)
    return re.sub(r"^#.*$", "", text, flags=re.M)


def end_of(code: str, begin: int) -> int:
    """Behind the bracket that closes the one at `begin`."""
    depth = 0
    for at in range(begin, len(code)):
        depth += (code[at] in "({") - (code[at] in ")}")
        if depth == 0:
            return at + 1
    return len(code)


def has_body(code: str, opened: int) -> bool:
    """Behind the parameters that begin there is a body, or a constructor's members: behind a call's arguments is neither."""
    behind = code[end_of(code, opened):][:200]
    return re.match(r"(?:\s|const\b|override\b|final\b|noexcept\b)*(?:\{|:[^:])", behind) is not None


def defined_in_cpp(text: str, function: str) -> bool:
    """Outside of its class, within it, or, of a namespace, from the first column on."""
    code = code_of(text)
    owner, _, name = function.rpartition("::")
    begins = rf"^(?:[A-Za-z][^\n;={{}}()]*[\s*&])?{function}\("
    if any(has_body(code, found.end() - 1) for found in re.finditer(begins, code, re.M)):
        return True
    bodies = [code[found.end():end_of(code, found.end() - 1)]
              for found in re.finditer(rf"\b(?:class|struct) {owner}\b[^;{{}}()]*\{{", code) if owner]
    return any(has_body(body, found.end() - 1) for body in bodies for found in re.finditer(rf"(?<![\w.>:~]){name}\(", body))


def defined_in_python(text: str, function: str) -> bool:
    owner, _, name = function.partition(".")
    return any(isinstance(node, ast.ClassDef) and node.name == owner and
               any(isinstance(method, ast.FunctionDef) and method.name == name for method in node.body)
               for node in ast.walk(ast.parse(text)))


def test_every_hop_of_the_walk_exists():
    """Each function is defined in the file of its row, the rows are numbered, and what only forwards is listed."""
    walk = (ROOT / "docs/life-of-an-epoch.md").read_text().partition("\n## One publish, hop by hop\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \| `([^`|]+)` \| `([^`|]+)` \| (.+) \|$", walk, re.M)
    assert 20 < len(rows) <= HOPS_MAX and f"The walk has {len(rows)} hops." in walk
    assert len(rows) == len(re.findall(r"^\| \d", walk, re.M)), "a row is not as the others"
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1))
    assert len({(function, file) for _, _, function, file, _ in rows}) == len(rows), "a function has two rows"
    gone = []
    for number, _, function, file, _ in rows:
        text = (ROOT / file).read_text()
        defined = defined_in_python if file.endswith(".py") else defined_in_cpp
        if not defined(text, function):
            gone.append(f"{number}: {file} defines no {function}")
    assert not gone
    listed = re.search(r"^Candidates for removal.*?\.\n", walk, re.M | re.S)
    assert listed and re.findall(r"`([^`]+)`\s+\((\d+)\)", listed[0]) == [
        (function, number) for number, _, function, _, what in rows if "`forwards`" in what]
