"""Pictures of the whole status page in five states of a real fleet, on a desktop and a phone, light and dark: to be looked at.

    tests/page/run.sh pictures FOLDER [--page FILE]

--page serves that file over the fleet's documents in place of the page that weightwired was built with."""

from __future__ import annotations

import argparse
import contextlib
import http.server
import itertools
import os
import pathlib
import shutil
import signal
import sys
import threading
import urllib.request
from collections.abc import Iterator

from chromium import Browser
from demo import checkpoint
from demo.fleet import Engine, Fleet
from test_page import FAINT

VIEWS = {"desktop": dict(width=1440, height=900), "phone": dict(width=390, height=844, phone=True)}
RATE = 8 << 20  #: bytes/s of the slow engine: 140 MB move for as long as four pictures take
#: Cells and lines whose text is wider than they are; on a phone the heads of tables are for screen readers only.
CUT = """[...document.querySelectorAll('td, th, dd, dt, h1, h2, p, li, .chip')].filter(node => node.scrollWidth > node.clientWidth + 1
  && getComputedStyle(node).display !== 'inline' && !(node.closest('thead') && innerWidth <= 760)).map(node => node.innerText.trim()).filter(Boolean)"""


class Pictures:
    def __init__(self, browser: Browser, url: str, folder: pathlib.Path):
        self._browser, self._url, self._folder = browser, url, folder
        self.faults: list[str] = []

    def take(self, state: str, shown: str) -> None:
        """Of a state that the page shows when `shown` (JavaScript) is true, and still does when the last one is made."""
        for (view, size), dark in itertools.product(VIEWS.items(), (False, True)):
            name = f"{state}-{view}-{'dark' if dark else 'light'}"
            self._browser.view(dark=dark, **size)
            self._browser.open(self._url)
            self._browser.until(shown, timeout=120)
            self._browser.until("document.querySelector('#engines tbody tr') !== null")
            self._browser.picture(str(self._folder / f"{name}.png"), whole=True)
            for what, script in (("cut off", CUT), ("faint", FAINT), ("errors", "[]"),
                                 ("scrolls sideways", "document.documentElement.scrollWidth > innerWidth ? ['by ' + (document.documentElement.scrollWidth - innerWidth)] : []")):
                found = self._browser.errors if what == "errors" else self._browser.ask(script)
                self.faults += [f"{name}: {what}: {one}" for one in found]
            print(f"{name}: {self._browser.ask('document.title')}", flush=True)
        if not self._browser.ask(shown):
            self.faults.append(f"{state}: was over before its last picture was made")


@contextlib.contextmanager
def served(daemon: str, page: str | None) -> Iterator[str]:
    """The address of the page: the daemon's own, or `page` over its documents."""
    if not page:
        yield f"http://{daemon}/"
        return

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                body, kind = pathlib.Path(page).read_bytes().replace(b"{{nonce}}", b"n"), "text/html; charset=utf-8"
            else:
                with urllib.request.urlopen(f"http://{daemon}{self.path}", timeout=30) as reply:
                    body, kind = reply.read(), reply.headers["Content-Type"]
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def publish(fleet: Fleet, version: int, ranks: slice = slice(None)) -> threading.Thread:
    """The trainer's ranks, or some of them, publish changed weights."""
    fleet.each(fleet.trainers[ranks], "change")
    thread = threading.Thread(target=fleet.each, args=(fleet.trainers[ranks], "publish", version, "hold"), daemon=True)
    thread.start()
    return thread


def title(text: str) -> str:
    return f"document.getElementById('waiting').textContent === {text!r}"


def held_up(text: str) -> str:
    return f"document.getElementById('label').textContent.startsWith('Held up') && {title(text)}"


def states(fleet: Fleet, pictures: Pictures) -> None:
    slow_to_commit, lost = fleet.engines[0], fleet.engines[2]
    for version in (1, 2, 3):
        publish(fleet, version).join()
        fleet.wait_serving(version, timeout=120)
    pictures.take("idle", title("all 3 engines serve version 3"))

    moving = publish(fleet, 4)
    part = "Number(document.querySelector('#progress [role=progressbar]')?.getAttribute('aria-valuenow'))"
    pictures.take("transfer", f"{part} >= 60 && {title('rollout-b/0')}")
    moving.join()
    fleet.wait_serving(4, timeout=120)

    os.kill(slow_to_commit.ranks[0].pid, signal.SIGSTOP)
    try:
        flipping = publish(fleet, 5)
        pictures.take("stuck-flip", held_up("rollout-a/0"))
    finally:
        os.kill(slow_to_commit.ranks[0].pid, signal.SIGCONT)
    flipping.join()
    fleet.wait_serving(5, timeout=120)

    some = publish(fleet, 6, slice(0, 3))
    pictures.take("stuck-publish", held_up("trainer/3"))
    publish(fleet, 6, slice(3, 4)).join()
    some.join()
    fleet.wait_serving(6, timeout=120)

    fleet.kill_agent(lost)
    pictures.take("lost-agent", title("rollout-c/0"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--page")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    slow = {"rate_limit": RATE, "progress_timeout_ms": 120000}
    engines = [Engine("rollout-a", 2, "shm"), Engine("rollout-b", 1, "tcp", slow), Engine("rollout-c", 1, "tcp")]
    config = {**checkpoint.SMALL, "num_hidden_layers": 2, "vocab_size": 130003}
    settings = {"commit_deadline_ms": 600000, "transfer_deadline_ms": 600000, "delta": "off"}
    browser = Browser(shutil.which("chromium") or "chromium")
    try:
        with Fleet(config, os.environ["WEIGHTWIRE_BIN_DIR"] + "/weightwired", engines=engines, options=settings) as fleet:
            checkpoint.write(fleet.directory + "/v1", config, 1)
            fleet.each(fleet.trainers, "load", fleet.directory + "/v1")
            with served(fleet.hub.http, options.page) as url:
                pictures = Pictures(browser, url, options.folder)
                states(fleet, pictures)
    finally:
        browser.close()
    for fault in pictures.faults:
        print(fault, file=sys.stderr)
    return 1 if pictures.faults else 0


if __name__ == "__main__":
    sys.exit(main())
