"""wwctl at a terminal: top, completion, and its reference in docs/wwctl.md (UPDATE_DOCS=1 writes it)."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest

from conftest import BINARIES, ROOT
from test_client import engine, trainer

WWCTL = str(BINARIES / "wwctl")
REFERENCE = ROOT / "docs/wwctl.md"
PYTHONS = {"convert", "load", "push", "save"}  # the help of `python -m weightwire.checkpoint`


def run(*arguments, **options):
    clean = {k: v for k, v in os.environ.items() if k not in ("WEIGHTWIRE_ADDRESS", "COLUMNS")}
    return subprocess.run([WWCTL, *arguments], timeout=60, capture_output=True, text=True, env=clean, **options)


def commands(*path) -> list[str]:
    """The commands below `path`, as its help lists them."""
    listed = run(*path, "--help").stdout.partition("Subcommands:\n")[2]
    return re.findall(r"^  ([a-z]\S*)", listed, re.M)


def test_top_is_one_picture_where_there_is_no_terminal(daemon, groups):
    groups += [trainer(daemon), engine(daemon)]
    groups[0].publish(3)
    groups[1].wait_version(3)
    shown = run("top", "--address", daemon.grpc)
    assert shown.returncode == 0, shown.stderr
    head, waiting, *rest = shown.stdout.splitlines()
    assert head.startswith("job default: ") and "1 of 1 engines ready; 6 ranks, 1 agents" in head
    assert waiting.startswith("waiting for: ") and any(line.startswith("engine-a") for line in rest)
    assert "\x1b" not in shown.stdout
    assert run("top", "--address", "127.0.0.1:1", "--timeout", "2").returncode == 64 + 29


def test_top_draws_over_itself_on_a_terminal_and_outlives_the_coordinator(daemon, groups):
    groups.append(engine(daemon))
    main, side = pty.openpty()
    top = subprocess.Popen([WWCTL, "top", "--interval-ms", "100", "--timeout", "1", "--address", daemon.grpc], stdin=side, stdout=side,
                           stderr=side, env={**os.environ, "TERM": "xterm"},
                           preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # a shell's background ignores it
    os.close(side)
    seen = b""
    waiting = select.poll()  # select() knows no descriptor above 1023
    waiting.register(main, select.POLLIN)

    def read_until(condition, what):
        nonlocal seen
        end = time.monotonic() + 60
        while not condition(seen):
            assert time.monotonic() < end, f"{what}: {seen[-2000:]!r}"
            if waiting.poll(100):
                with contextlib.suppress(OSError):  # of a terminal whose last program has ended
                    seen += os.read(main, 1 << 16)

    try:
        read_until(lambda s: s.count(b"\x1b[H") >= 3 and b"engine-a" in s, "it draws again and again")
        assert seen.count(b"\x1b[2J") == 1, "cleared once, drawn over after that"
        for picture in seen.split(b"\x1b[H")[1:-1]:
            assert len(picture.splitlines()) <= 24
        groups.append(trainer(daemon))
        read_until(lambda s: b"trainer/" in s or b"6 ranks" in s, "it follows")
        daemon._popen.send_signal(signal.SIGSTOP)
        read_until(lambda s: b"NO ANSWER: " in s, "it says that the coordinator does not answer")
        seen = b""
        daemon._popen.send_signal(signal.SIGCONT)
        read_until(lambda s: b"job default" in s.split(b"NO ANSWER: ")[-1].split(b"\x1b[H")[-1], "and goes on")
        top.send_signal(signal.SIGINT)
        read_until(lambda _: top.poll() is not None, "it ends")  # (one that nobody reads may stand in a write)
        assert top.returncode == -signal.SIGINT
    finally:
        daemon._popen.send_signal(signal.SIGCONT)
        top.kill()
        top.wait(10)
        os.close(main)


@pytest.mark.parametrize("words, offered", [
    (["wwctl", "st"], {"status"}), (["wwctl", "layout", ""], {"show", "diff", "lint", "--help"}),
    (["wwctl", "doctor", "--co"], {"--config"}), (["wwctl", "completion", "b"], {"bash"}),
    (["wwctl", "epochs", "--js"], {"--json"}), (["wwctl", "plan", "--config", ""], set())])
def test_bash_completes_commands_and_options(words, offered):
    script = run("completion", "bash")
    assert script.returncode == 0
    array = " ".join(f"'{word}'" for word in words)
    asked = subprocess.run(["bash", "--norc", "-c", f'{script.stdout}\nCOMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _wwctl; '
                            'printf "%s\\n" "${COMPREPLY[@]}"'], capture_output=True, text=True, timeout=30)
    assert asked.returncode == 0 and not asked.stderr, asked.stderr
    assert set(asked.stdout.split()) == offered


def test_completion_refuses_an_unknown_shell():
    assert run("completion", "fish").returncode == 2
    assert "bashcompinit" in run("completion", "zsh").stdout


def in_order(text: str) -> str:
    """CLI11 lists what an option needs and excludes by where it lies in memory."""
    return re.sub(r"(?<=Needs: |ludes: )--[\w-]+(?: --[\w-]+)+", lambda names: " ".join(sorted(names[0].split())), text)


def test_the_reference_is_what_help_says():
    top = run("--help").stdout
    parts = ["# wwctl\n\nWhat `--help` says, written by `UPDATE_DOCS=1` pytest `tests/python/test_wwctl.py`. How to use it: "
             "[operations](operations.md).\n", f"```\n{top.strip()}\n```\n"]
    for command in sorted(set(commands()) - PYTHONS, key=commands().index):
        for path in [(command,), *((command, below) for below in commands(command))]:
            parts.append(f"## wwctl {' '.join(path)}\n```\n{run(*path, '--help').stdout.strip()}\n```\n")
    text = in_order("\n".join(re.sub(r"[ \t]+$", "", part, flags=re.M) for part in parts))
    if os.environ.get("UPDATE_DOCS"):
        REFERENCE.write_text(text)
    assert REFERENCE.read_text() == text, "UPDATE_DOCS=1 writes docs/wwctl.md anew"
    for command in ("status", "top", "doctor", "verify", "layout show", "completion"):
        assert f"## wwctl {command}\n" in text
