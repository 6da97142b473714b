"""Certificates for tests, by deploy/certs.sh."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess

import grpc

from conftest import ROOT
from weightwire import Tls

SAN = "DNS:localhost,IP:127.0.0.1"


class Authority:
    """A CA in `directory` and what it issued."""

    def __init__(self, directory):
        self.directory = pathlib.Path(directory)
        self._run("ca")

    def _run(self, *arguments) -> None:
        done = subprocess.run([ROOT / "deploy/certs.sh", self.directory, *map(str, arguments)], capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr

    def issue(self, name: str, role: str, **options) -> Tls:
        if role == "coordinator":
            options.setdefault("san", SAN)
        self._run("issue", name, role, *(part for key, value in options.items() for part in (f"--{key}", value)))
        return self.files(name)

    def files(self, name: str) -> Tls:
        folder = self.directory / name
        return Tls(str(folder / "tls.crt"), str(folder / "tls.key"), str(folder / "ca.crt"))


class Place:
    """Where one process finds its files; `put` changes all of them at once, as the kubelet does in a mounted secret."""

    def __init__(self, directory, name: str):
        self.link = pathlib.Path(directory) / name
        self.link.parent.mkdir(exist_ok=True)
        self.count = 0
        self.tls = Tls(*(str(self.link / file) for file in ("tls.crt", "tls.key", "ca.crt")))

    def put(self, own: Tls, *authorities: Authority) -> Tls:
        """`own`'s certificate, and belief in `authorities`."""
        self.count += 1
        fresh = self.link.with_name(f".{self.link.name}.{self.count}")
        fresh.mkdir()
        shutil.copy(own.cert, fresh / "tls.crt")
        shutil.copy(own.key, fresh / "tls.key")
        (fresh / "ca.crt").write_text("".join((a.directory / "ca.crt").read_text() for a in authorities))
        temporary = self.link.with_name(f".{self.link.name}.link")
        temporary.symlink_to(fresh.name)
        os.replace(temporary, self.link)
        return self.tls


def settings(tls: Tls) -> dict[str, str]:
    """For a Daemon."""
    return {"tls_cert": tls.cert, "tls_key": tls.key, "tls_ca": tls.ca}


def channel(address: str, tls: Tls | None) -> grpc.Channel:
    """One of its own, so that channels with other certificates do not lend it a connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    if tls is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.credentials(), options)
