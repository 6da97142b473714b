"""What people and programs ask a coordinator, timed from outside: a part of `./dev bench scale`."""

from __future__ import annotations

import pathlib
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/page"))

from chromium import Browser  # noqa: E402

TIMES = 5
COMMANDS = {"status": ["status"], "status-json": ["status", "-o", "json"], "top": ["top", "--once"], "doctor": ["doctor"],
            "epochs": ["epochs"]}
#: The engines are drawn, and each part of the page after them.
DRAWN = "document.querySelectorAll('#engines tbody tr').length > 0 && document.getElementById('ranks-summary').textContent !== 'Ranks'"


def command_seconds(wwctl: str, address: str, arguments: list[str]) -> float:
    began = time.monotonic()
    done = subprocess.run([wwctl, *arguments, "--address", address, "--timeout", "60"], capture_output=True)
    took = time.monotonic() - began
    # A doctor that finds something ends with 1; here it finds what is not there: a process behind each stand-in.
    if done.returncode not in ((0, 1) if arguments == ["doctor"] else (0,)) or not done.stdout:
        sys.exit(f"scale: wwctl {' '.join(arguments)} ended with {done.returncode}: {done.stderr.decode()}")
    return took


def document_seconds(url: str) -> tuple[float, int]:
    began = time.monotonic()
    with urllib.request.urlopen(url, timeout=60) as reply:
        size = len(reply.read())
    return time.monotonic() - began, size


def page_seconds(browser: Browser, url: str) -> float:
    """From the request for the page until it shows the job."""
    browser.open("about:blank")
    began = time.monotonic()
    browser.open(url)
    browser.until(DRAWN)
    return time.monotonic() - began


def ask(wwctl: str, grpc: str, http: str) -> dict:
    """Seconds of each, as {name: [of each time]}, and bytes of the documents; without a Chromium no "page"."""
    seconds = {name: [command_seconds(wwctl, grpc, arguments) for _ in range(TIMES)] for name, arguments in COMMANDS.items()}
    documents = {"page-document": f"http://{http}/api/page", "status-document": f"http://{http}/api/status"}
    sizes = {}
    for name, url in documents.items():
        answers = [document_seconds(url) for _ in range(TIMES)]
        seconds[name], sizes[name] = [took for took, _ in answers], answers[-1][1]
    if binary := shutil.which("chromium"):
        browser = Browser(binary)
        try:
            browser.view(width=1280, height=800)
            page_seconds(browser, f"http://{http}/")  # the browser's own start
            seconds["page"] = [page_seconds(browser, f"http://{http}/") for _ in range(TIMES)]
        finally:
            browser.close()
    return {"seconds": seconds, "bytes": sizes}


def show(name: str, answers: dict) -> None:
    print(f"{name:<16} median (most) of {TIMES}: " + "  ".join(
        f"{what} {statistics.median(times):.2f} ({max(times):.2f}) s" for what, times in answers["seconds"].items()) +
        "  " + "  ".join(f"{what} {size / 1e6:.2f} MB" for what, size in answers["bytes"].items()), flush=True)
