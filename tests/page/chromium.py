"""A headless Chromium, spoken to over its DevTools pipe: JSON messages that end with a zero byte."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import tempfile
import time

_FIRST_FREE = 10  # of descriptors: 3 and 4 are the browser's ends


class Browser:
    """One process with one tab. Its errors and requests are kept; every call has a deadline."""

    def __init__(self, binary: str):
        self._folder = tempfile.TemporaryDirectory(prefix="weightwire-chromium-")
        their_in, our_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in os.pipe())
        our_in, their_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in os.pipe())
        self._popen = subprocess.Popen(
            [binary, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(3, 4),
            preexec_fn=lambda: (os.dup2(their_in, 3), os.dup2(their_out, 4)))
        os.close(their_in), os.close(their_out)
        self._in, self._out, self._buffer, self._number = our_in, our_out, b"", 0
        self._answers, self.errors, self.requests = {}, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    _session = None

    def call(self, method: str, timeout: float = 60, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while self._number not in self._answers:
            self._read(end, method)
        answer = self._answers.pop(self._number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def _read(self, end: float, what: str) -> None:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0, end - time.monotonic()))
            assert ready, f"chromium did not answer {what} in time"
            read = os.read(self._in, 1 << 20)
            assert read, f"chromium ended with {self._popen.poll()} during {what}"
            self._buffer += read
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        if "id" in message:
            self._answers[message["id"]] = message
        elif message["method"] == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded":  # a blocked resource or script, a failed request
            self.errors.append(json.dumps(message["params"]["entry"]))
        elif message["method"] == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])

    def view(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia",
                  features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url: str) -> None:
        self.errors.clear()
        self.requests.clear()
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def ask(self, expression: str):
        """The value of a JavaScript expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, f"{expression}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def until(self, expression: str, timeout: float = 60):
        """The first truthy value of `expression`; fails with what the page shows."""
        end = time.monotonic() + timeout
        while not (value := self.ask(expression)):
            assert time.monotonic() < end, f"{expression}: not within {timeout} s; the page shows:\n" \
                                           f"{self.ask('document.body.innerText')}\nerrors: {self.errors}"
            time.sleep(0.05)
        return value

    def picture(self, path: str, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        with open(path, "wb") as out:
            out.write(base64.b64decode(answer["data"]))

    def close(self) -> None:
        self._popen.terminate()
        try:
            self._popen.wait(20)
        finally:
            self._popen.kill()
            os.close(self._in), os.close(self._out)
            self._folder.cleanup()
