#!/usr/bin/env python3
"""./dev bench regions: versions of one model in two sites with a slow network between them, directly and through a store.

Two network namespaces, joined by a link of 200 Mb/s and 50 ms there and back (tc netem, or a relay in user space where the kernel has
none; needs root; the round trip is measured). The model is in bf16 and has
the names and shapes of Qwen2.5-0.5B; each step moves about 3 per cent of its elements by one unit in the last place. In the far site
every version is compared with the trainer's arrays, in every engine, and so is every byte.

dense-tcp      the far site's agent reads from the trainer's agent over the link, everything
delta-tcp      the same, what changed
store-anchor   the first version through an S3 server in the trainer's site (--server), whole
store-delta    the versions after it, changes
Seconds: from the publish call until the far engines serve the version. wan_bytes: what the link carried to the far site for each
version, all protocols.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

from demo import checkpoint
from demo.fleet import Daemon
from report import add_options, write
from weightwire import Publisher, Subscriber, TensorMeta

_NEAR, _FAR = "10.77.0.1", "10.77.0.2"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _MTU = 0x400454CA, 0x0001, 0x1000, 9000  # linux/if_tun.h; jumbo frames


#: Milliseconds until a host says that nobody listens: the least of some.
_ROUND_TRIP = """import socket, sys, time
def ask():
    begin = time.perf_counter()
    try: socket.create_connection((sys.argv[1], 9), timeout=10)
    except ConnectionRefusedError: return 1e3 * (time.perf_counter() - begin)
print(min(ask() for _ in range(5)))"""


class Link:
    """Two namespaces and what joins them: a pair of devices with netem, or, where the kernel has none, two TUN devices and a process
    that carries packets between them (wan_relay.py)."""

    def __init__(self, mbit: int, round_trip_ms: int):
        self.names = [f"ww{os.getpid()}{end}" for end in "ab"]
        self._relay: subprocess.Popen | None = None
        try:
            self._join(mbit, round_trip_ms)
        except BaseException:
            self.close()
            raise

    def _join(self, mbit: int, round_trip_ms: int) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            self.run(name, "ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "wan", "netns", self.names[0], "type", "veth", "peer", "name", "wan", "netns", self.names[1])
        try:
            for name in self.names:
                self.run(name, "tc", "qdisc", "add", "dev", "wan", "root", "netem", "delay", f"{round_trip_ms / 2}ms", "rate", f"{mbit}mbit",
                         "limit", "20000")
            self.how = "netem"
        except subprocess.CalledProcessError:
            self.run(self.names[0], "ip", "link", "delete", "wan")
            devices = [self._tun(name) for name in self.names]
            self._relay = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).with_name("wan_relay.py")), *map(str, devices), str(mbit),
                                            str(round_trip_ms / 2)], stdin=subprocess.PIPE, pass_fds=devices)
            for device in devices:
                os.close(device)
            self.how = "a relay in user space"
        for name, address in zip(self.names, (_NEAR, _FAR)):
            self.run(name, "ip", "address", "add", f"{address}/24", "dev", "wan")
            self.run(name, "ip", "link", "set", "wan", "up")
        self.round_trip_ms = float(self.run(self.names[0], sys.executable, "-c", _ROUND_TRIP, _FAR))

    def _tun(self, name: str) -> int:
        """A file of packets, which are those of the device `wan` of that namespace."""
        device = os.open("/dev/net/tun", os.O_RDWR)
        made = f"wan{device}"
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", made.encode(), _IFF_TUN | _IFF_NO_PI))
        _run("ip", "link", "set", made, "netns", name)
        self.run(name, "ip", "link", "set", made, "name", "wan", "mtu", str(_MTU))
        return device

    def run(self, name: str, *command: str) -> str:
        return _run("ip", "netns", "exec", name, *command)

    def received(self) -> int:
        """Bytes that the far site's end has received."""
        return int(self.run(self.names[1], "cat", "/sys/class/net/wan/statistics/rx_bytes"))

    def script(self, folder: pathlib.Path, name: str, program: str) -> str:
        """A program that is started in that namespace."""
        path = folder / f"{name}-{pathlib.Path(program).name}"
        path.write_text(f'#!/bin/sh\nexec ip netns exec {name} "{program}" "$@"\n')
        path.chmod(0o755)
        return str(path)

    def close(self) -> None:
        if self._relay is not None:
            self._relay.stdin.close()
            self._relay.wait(10)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Model:
    """bf16 bits by name."""

    def __init__(self, config: dict):
        self.config = config
        self._random = np.random.Generator(np.random.SFC64(11))
        self.now = {}
        for name, shape in checkpoint.hf_shapes(config).items():
            values = 0.02 * self._random.standard_normal(int(np.prod(shape)), np.float32)
            self.now[name] = (values.view(np.uint32) >> 16).astype(np.uint16).reshape(shape)
        self.metas = [TensorMeta(name, "BF16", bits.shape) for name, bits in self.now.items()]
        self.nbytes = sum(bits.nbytes for bits in self.now.values())

    def step(self, share: float = 0.03) -> None:
        for bits in self.now.values():
            flat = bits.reshape(-1)
            chosen = self._random.random(flat.size, np.float32) < share
            flat[chosen] += np.where(self._random.random(int(chosen.sum()), np.float32) < 0.5, 1, -1).astype(np.int16).view(np.uint16)


class Engine:
    """One rank in hf layout, on a thread."""

    def __init__(self, agent: str, name: str, model: Model):
        self.subscriber = Subscriber(group=name, rank=0, world_size=1, agent=agent)
        self.subscriber.bind(model.config, "hf", model.metas)
        self._stop, self._served = threading.Event(), threading.Condition()
        self.version, self.when = 0, 0.0
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._stop.is_set():
            if (offer := self.subscriber.wait_offer(0.2)) is None:
                continue
            self.subscriber.flip(offer)
            self.subscriber.acknowledge(offer)
            with self._served:
                self.version, self.when = offer.version, time.perf_counter()
                self._served.notify_all()

    def wait(self, version: int, timeout: float) -> float:
        """When it began to serve it."""
        with self._served:
            if not self._served.wait_for(lambda: self.version >= version, timeout):
                raise AssertionError(f"version {version} did not come within {timeout} s; it serves {self.version}")
            return self.when

    def check(self, model: Model) -> None:
        params = self.subscriber.params
        wrong = [name for name, bits in model.now.items() if params is None or not np.array_equal(params[name], bits)]
        if wrong:
            raise AssertionError(f"version {self.version}: {len(wrong)} tensors differ, first {wrong[0]}")

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self.subscriber.close()


def versions(publisher: Publisher, params, engines: list[Engine], link: Link, model: Model, first: int, count: int, timeout: float):
    """Publishes so many; of each the seconds until the far engines serve it, and the bytes of the link."""
    found = []
    for version in range(first, first + count):
        if version > 1:
            model.step()
        for name, bits in model.now.items():
            params[name][...] = bits
        before, begin = link.received(), time.perf_counter()
        publisher.publish(version, deadline=timeout).wait_released(timeout)
        seconds = max(engine.wait(version, timeout) for engine in engines) - begin
        found.append((seconds, link.received() - before))
        for engine in engines:
            engine.check(model)
    return found


def direct(args: argparse.Namespace, link: Link, model: Model, folder: pathlib.Path, delta: str, rounds: int) -> list[tuple[float, int]]:
    near = Daemon(link.script(folder, link.names[0], args.binary), str(folder / f"near-{delta}"), "near", role="all", listen=f"{_NEAR}:0",
                  data_listen=f"{_NEAR}:0", insecure="true", delta=f'"{delta}"')
    far = Daemon(link.script(folder, link.names[1], args.binary), str(folder / f"far-{delta}"), "far", role="agent", coordinator=near.grpc,
                 data_listen=f"{_FAR}:0", transports="[tcp]", insecure="true", delta=f'"{delta}"')
    publisher, engines = Publisher(rank=0, world_size=1, agent=near.agent_socket), []
    try:
        params = publisher.bind(model.config, "hf", model.metas)
        engines.append(Engine(far.agent_socket, "far", model))
        return versions(publisher, params, engines, link, model, 1, rounds, 600)
    finally:
        for engine in engines:
            engine.close()
        publisher.close()
        far.stop()
        near.stop()


def through_store(args: argparse.Namespace, link: Link, model: Model, folder: pathlib.Path, rounds: int) -> list[tuple[float, int]]:
    in_near, in_far = (["ip", "netns", "exec", name, sys.executable, "-u", "-m"] for name in link.names)
    keys = {**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
            "WEIGHTWIRE_BIN_DIR": str(pathlib.Path(args.binary).resolve().parent)}
    url, config = f"s3://weights/bench?endpoint=http://{_NEAR}:5000", folder / "config.json"
    config.write_text(json.dumps(model.config))
    running: list[subprocess.Popen] = []
    ceph = None
    engines: list[Engine] = []
    near = Daemon(link.script(folder, link.names[0], args.binary), str(folder / "near"), "near", role="all", listen=f"{_NEAR}:0", insecure="true")
    far = Daemon(link.script(folder, link.names[1], args.binary), str(folder / "far"), "far", role="all", listen=f"{_FAR}:0", insecure="true")
    publisher = Publisher(rank=0, world_size=1, agent=near.agent_socket)
    try:
        logs = open(folder / "processes.log", "w")
        if args.server == "radosgw":
            sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/python"))
            from ceph_server import Ceph
            ceph = Ceph(disk_bytes=16 << 30, host=_NEAR, port=5000, prefix=tuple(in_near[:4]))
        else:
            running.append(subprocess.Popen([*in_near, "moto.server", "-H", _NEAR, "-p", "5000"], env=keys, stdout=logs, stderr=logs))
            _until("the S3 server is there", lambda: subprocess.run([*in_near[:4], "curl", "-sf", "-X", "PUT", f"http://{_NEAR}:5000/weights"],
                                                                    capture_output=True).returncode == 0)
        params = publisher.bind(model.config, "hf", model.metas)
        engines += [Engine(far.agent_socket, f"far-{number}", model) for number in range(args.engines)]
        for where, words, line in ((in_near, ["write", url, "--config", str(config), "--agent", near.agent_socket], "engine store"),
                                   (in_far, ["follow", url, "--site", "far", "--agent", far.agent_socket, "--poll", "0.1s"], "site far")):
            running.append(subprocess.Popen([*where, "weightwire.store", *words, "--quiet"], env=keys, stdout=logs, stderr=logs))
            _until(f"`{words[0]}` is there", lambda: line in (folder / "processes.log").read_text())
        return versions(publisher, params, engines, link, model, 1, rounds + 1, 600)
    except BaseException:
        print((folder / "processes.log").read_text()[-3000:], file=sys.stderr)
        raise
    finally:
        ours = running if ceph is not None else running[1:]  # the S3 server is the last to end
        for process in ours:
            process.terminate()
        for process in ours:
            process.wait(60)
        for engine in engines:
            engine.close()
        publisher.close()
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
        if ceph is not None:
            ceph.stop()
        far.stop()
        near.stop()


def _until(what: str, condition, timeout: float = 120) -> None:
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what}: not within {timeout} s")
        time.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench regions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--rounds", type=int, default=20, help="versions through the store, after the first [20]")
    parser.add_argument("--engines", type=int, default=3, help="in the far site [3]")
    parser.add_argument("--server", choices=["moto", "radosgw"], default="moto", help="the S3 server [moto]; radosgw: Ceph's, of Debian")
    parser.add_argument("--mbit", type=int, default=200)
    parser.add_argument("--round-trip-ms", type=int, default=50)
    parser.add_argument("--small", action="store_true")
    add_options(parser)
    args = parser.parse_args()
    model, rows = Model(checkpoint.SMALL if args.small else checkpoint.QWEN25_05B), []

    def add(name: str, found: list[tuple[float, int]]) -> dict:
        seconds, sent = [took for took, _ in found], [count for _, count in found]
        rows.append({"name": name, "bytes": model.nbytes, "wan_bytes": int(statistics.median(sent)), "wan_bytes_max": max(sent),
                     "seconds_median": statistics.median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds),
                     "versions": len(found), "rounds": len(found), "checked": True})
        print(f"{name:13s} {model.nbytes / 1e6:8,.0f} MB  link {rows[-1]['wan_bytes'] / 1e6:9.2f} MB  median {rows[-1]['seconds_median']:7.3f} s  "
              f"{len(found)} versions", flush=True)
        return rows[-1]
    folder, link = pathlib.Path(tempfile.mkdtemp(prefix="weightwire-bench-")), Link(args.mbit, args.round_trip_ms)
    try:
        dense = add("dense-tcp", direct(args, link, model, folder, "off", 3)[1:])
        add("delta-tcp", direct(args, link, model, folder, "auto", 5)[2:])
        found = through_store(args, link, model, folder, args.rounds)
        add("store-anchor", found[:1])
        delta = add("store-delta", found[1:])
        print(f"  through the store {dense['wan_bytes'] / delta['wan_bytes']:.1f} x fewer bytes, "
              f"{dense['seconds_median'] / delta['seconds_median']:.1f} x less time than dense-tcp; {args.engines} engines")
        print(f"  S3 server: {args.server}; line: {args.mbit} Mb/s and {link.round_trip_ms:.1f} ms there and back, by {link.how}")
    finally:
        link.close()
        shutil.rmtree(folder, ignore_errors=True)
    write(args, f"{model.nbytes / 1e6:,.0f} MB to another site, {args.mbit} Mb/s and {link.round_trip_ms:.0f} ms", rows,
          about={"engines": args.engines, "mbit": args.mbit, "round_trip_ms": link.round_trip_ms, "line": link.how, "server": args.server})
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    sys.exit(main())
