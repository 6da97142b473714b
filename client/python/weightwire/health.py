"""`python -m weightwire.health`: whether the weightwired of this container is alive. The image's HEALTHCHECK; Kubernetes has probes.

Where it listens, and whether over TLS, it is asked itself: with the arguments and the environment of process 1, or of `--pid`.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Dict, List, Optional

from weightwire.binaries import program
from weightwire.errors import WeightwireError

_SECONDS = 5


def settings_of(pid: int) -> Dict[str, str]:
    """`weightwired --print-config` with the arguments and the environment of that process; with those of this one, and without a
    word on TLS, where no weightwired is to be seen there."""
    try:
        called, *words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        seen = os.path.basename(called) == b"weightwired"
    except (OSError, ValueError):
        seen = False
    environment = dict(os.fsdecode(one).split("=", 1) for one in variables if b"=" in one) if seen else dict(os.environ)
    words = words if seen else []
    done = subprocess.run([str(program("weightwired")), *map(os.fsdecode, words), "--print-config"], env=environment, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, timeout=_SECONDS)
    settings = {name: value.strip('"') for name, value in re.findall(r"^(\w+): *(\S*)", done.stdout, re.M)}
    return settings if seen else {"http": settings.get("http", "127.0.0.1:7412")}


def alive(settings: Dict[str, str]) -> bool:
    """Whether /healthz answers, in either way where it is not known in which. Over TLS nobody is authenticated: the question is
    whether somebody is there."""
    known = settings.get("http_tls")
    return any(_answers(settings["http"], scheme) for scheme in (["https"] if known == "true" else ["http"] if known else ["http", "https"]))


def _answers(address: str, scheme: str) -> bool:
    host, _, port = address.rpartition(":")
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    anyone = ssl._create_unverified_context() if scheme == "https" else None
    try:
        with urllib.request.urlopen(f"{scheme}://{host}:{port}/healthz", timeout=_SECONDS, context=anyone) as answer:
            return bool(answer.read().startswith(b"alive"))
    except (OSError, http.client.HTTPException):
        return False


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m weightwire.health", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pid", type=int, default=1, help="of the weightwired [1]")
    asked = parser.parse_args(arguments)
    try:
        settings = settings_of(asked.pid)
    except (WeightwireError, subprocess.TimeoutExpired) as error:
        print(f"weightwire.health: {error}", file=sys.stderr)
        return 1
    if settings.get("http") == "":
        print("weightwire.health: it has no HTTP listener to ask (http is empty)", file=sys.stderr)
        return 1
    return 0 if alive(settings) else 1


if __name__ == "__main__":
    sys.exit(main())
