#!/usr/bin/env python3
"""./dev bench transport: one region between two processes by every bare transport, in one run.

memcpy      one thread, in one process
raw-N       N loopback sockets, one blocking thread each side and socket, calls of 4 MiB
shm, tcp-N  the transports, Gets of 4 MiB (tcp-N: over N connections), 16 posted at a time
tcp-N-mac   tcp with `integrity: mac`; -tls: with `integrity: tls`
ucx:TLS     the transport ucx with UCX_TLS=TLS, the same Gets
perftest:TLS        ucx_perftest -t ucp_get of the same UCX, with error handling as weightwire needs it, 4 MiB, 16 outstanding.
                    It reads one buffer of 4 MiB again and again, which stays in the cache
perftest-all:TLS    the same, the whole region as one message: the same memory traffic as the other rows

Contenders run in turns, so that a busy minute of the machine hits all of them. Before the first round each has run once.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys
import time

from report import Report, add_options, write

_CALL = 4 << 20
_SECONDS = 300
#: what is measured of ucx
UCX_TLS = ("tcp", "tcp,posix,cma")
#: of one UCX transport the ratio that issue 6 asks for
_ASKED = 0.95


class Contender:
    """A transport_bench process that moves the region when it is told to."""

    def __init__(self, binary: str, way: str, nbytes: int) -> None:
        self.name = way
        self._process = subprocess.Popen([binary, "run", way, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True)
        if self._line() != "ready":
            raise RuntimeError(f"{way} did not start: see above")
        self.first = self.run()[0]

    def _line(self) -> str:
        return self._process.stdout.readline().strip()

    def _ask(self, command: str) -> str:
        print(command, file=self._process.stdin, flush=True)
        return self._line()

    def run(self) -> tuple[float, float]:
        """Seconds, and processor seconds of both processes."""
        seconds, cpu = self._ask("run").split()
        return float(seconds), float(cpu)

    def close(self) -> bool:
        """Moves the region once more, into a cleared target. Whether it arrived."""
        right = self._ask("check") == "right"
        self._process.stdin.close()
        self._process.wait(timeout=60)
        return right


def libraries_beside(tool: str) -> dict[str, str]:
    """The environment for a tool of UCX: PyPI's do not find their own libraries."""
    return {**os.environ, "LD_LIBRARY_PATH": str(pathlib.Path(tool).parents[1] / "lib")}


class Perftest:
    """ucx_perftest against itself, on the settings of the transport ucx."""

    first = None

    def __init__(self, binary: str, name: str, nbytes: int) -> None:
        self.name = name
        whole = name.startswith("perftest-all:")
        self._binary, self._nbytes = binary, nbytes
        self._env = {**libraries_beside(binary), "UCX_TLS": name.split(":", 1)[1], "UCX_POSIX_ERROR_HANDLING": "y",
                     "UCX_KEEPALIVE_INTERVAL": "1s", "UCX_RNDV_THRESH": "inf", "UCX_LOG_LEVEL": "error"}
        size, count = (nbytes, 1) if whole else (_CALL, nbytes // _CALL)
        self._args = ["-t", "ucp_get", "-e", "-f", "-s", str(size), "-n", str(count), "-w", "1" if whole else "16",
                      "-O", "1" if whole else "16"]

    def run(self) -> tuple[float, None]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        serving = subprocess.Popen([self._binary, "-p", str(port)], env=self._env, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        try:
            self._await_listener(port)
            done = subprocess.run([self._binary, "127.0.0.1", "-p", str(port), *self._args], env=self._env, check=True,
                                  stdout=subprocess.PIPE, text=True, timeout=_SECONDS)
            serving.wait(timeout=60)
        finally:
            serving.kill()
            serving.wait()
        mib_per_second = float(done.stdout.split()[-3])
        return self._nbytes / (mib_per_second * (1 << 20)), None

    @staticmethod
    def _await_listener(port: int) -> None:
        """It takes one connection, so nothing may try."""
        listening = re.compile(rf":{port:04X} [0-9A-F]+:0000 0A ")
        for _ in range(1000):
            if any(listening.search(open(table).read()) for table in ("/proc/net/tcp", "/proc/net/tcp6")):
                return
            time.sleep(0.01)
        raise RuntimeError("ucx_perftest does not listen after 10 s")

    def close(self) -> bool:
        return True  # it does not look at what arrived


def ucx_of(build: pathlib.Path) -> tuple[bool, str | None]:
    """Whether the plug-in was built, and the ucx_perftest of the UCX that it was built with."""
    found = re.search(r"^ucx_DIR:\w+=(/.+)/lib(?:/[^/]+)?/cmake/ucx$", (build / "CMakeCache.txt").read_text(), re.M)
    if not found:
        return False, None
    return True, shutil.which("ucx_perftest", path=f"{found[1]}/bin")


def version_of(perftest: str) -> str:
    """libucp's own."""
    said = subprocess.run([pathlib.Path(perftest).with_name("ucx_info"), "-v"], stdout=subprocess.PIPE, text=True,
                          env=libraries_beside(perftest), check=True).stdout
    return re.search(r"version[: ]+([\d.]+)", said, re.I)[1]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench transport", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of transport_bench")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=256, help="size of the region; each contender has two of them")
    add_options(parser)
    args = parser.parse_args()
    nbytes = args.mib << 20
    built, perftest = ucx_of(pathlib.Path(args.binary).parents[1])
    contenders = [Contender(args.binary, way, nbytes)
                  for way in ("memcpy", "raw-1", "raw-2", "raw-4", "shm", "tcp-1", "tcp-1-mac", "tcp-1-tls", "tcp-4",
                              "tcp-4-mac", "tcp-4-tls")]
    for tls in UCX_TLS if built else ():
        contenders.append(Contender(args.binary, f"ucx:{tls}", nbytes))
        if perftest:
            contenders += [Perftest(perftest, f"{kind}:{tls}", nbytes) for kind in ("perftest", "perftest-all")]
    times: dict[str, list] = {contender.name: [] for contender in contenders}
    for _ in range(args.rounds):
        for contender in contenders:
            times[contender.name].append(contender.run())
    report = Report()
    medians = {}
    for contender in contenders:
        seconds, cpu = zip(*times[contender.name])
        row = report.add(contender.name, nbytes, list(seconds), contender.close(), contender.first,
                         None if None in cpu else list(cpu))
        medians[contender.name] = row["seconds_median"]
    for row in report.rows:
        kind, _, tls = row["name"].partition(":")
        if kind.startswith("perftest"):
            row["ucx"] = version_of(perftest)
            row["transport_rate_of_this"] = row["seconds_median"] / medians[f"ucx:{tls}"]
            print(f"the transport ucx has {row['transport_rate_of_this']:.2f} of the rate of {row['name']} (asked: {_ASKED})")
    if not perftest:
        print("without rows of " + ("ucx_perftest: none beside this UCX (Debian: ucx-utils)" if built else
              "ucx: not built; `./dev build` builds it with the libucx-cu13 of .venv"))
    write(args, f"{args.mib} MiB between two processes", report.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
