#!/usr/bin/env python3
"""./dev bench store: a model that no memory of this machine holds, into a store and out of it, beside a bare client of the same library.

The model is fake: its tensors are windows of one piece of memory, which they all share, so that 100 GB take 256 MiB, and every
byte is coded, sent, fetched, decoded and compared all the same. Writer and follower's reader each run in a process, in a cgroup
whose limit is --limit-mib (needs root); more would be the end of it.

bare-put, bare-get   obstore alone, objects of 64 MiB of the same bytes, as many at a time; no coding, no digests
anchor, delta        the writer's part: every block coded, two digests; 3 per cent of the elements changed
load                 the follower's part of the anchor: fetched, both digests compared, decoded
--url file:///DIR    a folder; without it an S3 server of this file, of HTTP alone, that keeps equal objects once. It takes part of the
                     same cores.
--server radosgw     Ceph's S3 gateway, of Debian, on the same cores and this disk, which must hold all that is moved
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import json
import mmap
import os
import pathlib
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import unquote, urlsplit

import numpy as np

from report import add_options, write
from weightwire import TensorMeta

_WINDOW = 256 << 20
_PART = 64 << 20
_CGROUP = pathlib.Path("/sys/fs/cgroup/memory")


class Server:
    """What obstore asks of an S3 server for whole objects, in memory, equal objects once. No signatures are looked at."""

    def __init__(self) -> None:
        objects: dict[str, bytes] = {}
        once: dict[bytes, bytes] = {}
        lock = threading.Lock()

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            rbufsize = 1 << 20

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def do_PUT(self) -> None:
                path, data = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with lock:
                    held = objects.get(path)
                    wanted = self.headers.get("If-Match")
                    if self.headers.get("If-None-Match") == "*" and held is not None or wanted is not None and (held is None or etag(held) != wanted):
                        return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
                    key = data[:4096] + len(data).to_bytes(8, "little")
                    if once.setdefault(key, data) == data:
                        data = once[key]
                    objects[path] = data
                self.answer(200, ETag=etag(data))

            def do_GET(self) -> None:
                held = objects.get(unquote(urlsplit(self.path).path))
                if held is None:
                    return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                self.answer(200, held, ETag=etag(held), Last_Modified="Mon, 30 Nov 2026 00:00:00 GMT")

            do_HEAD = do_GET

            def do_DELETE(self) -> None:
                objects.pop(unquote(urlsplit(self.path).path), None)
                self.answer(204)

            def do_POST(self) -> None:  # one that deletes several
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.answer(200, b'<?xml version="1.0"?><DeleteResult></DeleteResult>')

        def etag(data: bytes) -> str:
            return f'"{hashlib.md5(data[:4096] + len(data).to_bytes(8, "little")).hexdigest()}"'
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        print(f"http://127.0.0.1:{self._server.server_port}", flush=True)
        self._server.serve_forever()


def window(seed: int, share: float, base: np.ndarray | None = None) -> int:
    """A file of memory with bf16 bits: `base` with that share of the elements changed by one, or normal numbers in that share of them."""
    file = os.memfd_create("window")
    os.ftruncate(file, _WINDOW)
    bits = np.frombuffer(mmap.mmap(file, _WINDOW), np.uint16)
    random = np.random.Generator(np.random.SFC64(seed))
    if base is not None:
        bits[:] = base
    for begin in range(0, bits.size, 1 << 22):
        part = bits[begin:begin + (1 << 22)]
        chosen = random.random(part.size, np.float32) < share
        if base is not None:
            part[chosen] += 1
        else:
            part[chosen] = ((0.02 * random.standard_normal(int(chosen.sum()), np.float32)).view(np.uint32) >> 16).astype(np.uint16)
    return file


def tensors(file: int, count: int) -> dict[str, np.ndarray]:
    return {f"t{number}": np.frombuffer(mmap.mmap(file, _WINDOW), np.uint16) for number in range(count)}


class Peak:
    """The most anonymous memory that this process had, looked at 50 times a second; of the cgroup, the most of everything."""

    def __init__(self) -> None:
        self.anonymous, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.02):
            said = pathlib.Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]
            self.anonymous = max(self.anonymous, int(said) << 10)

    def stop(self) -> int:
        self._stop.set()
        self._thread.join()
        return self.anonymous


def work(args: argparse.Namespace) -> None:
    """In a process of its own: one row, as JSON."""
    import obstore
    from weightwire.store import Image, Layout, Objects, Reader, Uploader
    count = max(1, round(args.gb * 1e9 / _WINDOW))
    metas = tuple(TensorMeta(f"t{number}", "BF16", (_WINDOW // 2,)) for number in range(count))
    layout, objects = Layout("hf", "{}", (metas,), _PART), Objects(args.url)
    first = window(1, args.share)
    data = np.frombuffer(mmap.mmap(first, _WINDOW), np.uint16)
    peak, number, started = Peak(), count * (_WINDOW // _PART), 0.0
    if args.work.startswith("bare"):
        raw = memoryview(data).cast("B")

        def put(index: int) -> int:
            at = index % (_WINDOW // _PART) * _PART
            obstore.put(objects._store, f"bare/{index:05d}", raw[at:at + _PART], use_multipart=False)
            return _PART

        def get(index: int) -> int:
            return len(obstore.get(objects._store, f"bare/{index:05d}").bytes())
        started = time.perf_counter()
        with ThreadPoolExecutor(args.workers) as pool:
            moved = sum(pool.map(put if args.work == "bare-put" else get, range(number)))
    elif args.work == "load":
        reader = Reader(objects, workers=args.workers)
        empty = os.memfd_create("empty")
        os.ftruncate(empty, _WINDOW)
        image = Image(layout, [tensors(empty, count)])
        started = time.perf_counter()
        moved = reader.load(reader.version(1) if args.url.startswith("file:") else reader.manifest(reader.latest().manifest), image).bytes
        if not np.array_equal(np.frombuffer(mmap.mmap(empty, _WINDOW), np.uint16), data):
            raise AssertionError("what was loaded is not what was stored")
    else:
        uploader = Uploader(Reader(objects, workers=args.workers), layout, workers=args.workers)
        image, base = Image(layout, [tensors(first, count)]), None
        if args.work == "delta":
            uploader.head, base = uploader.adopt(), image
            image = Image(layout, [tensors(window(2, 0.03, data), count)])
        started = time.perf_counter()
        moved = uploader.store(2 if args.work == "delta" else 1, 1, image, base).bytes
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "bytes": layout.nbytes, "moved": moved, "anonymous": peak.stop()}))


def in_group(limit: int, command: list[str], env: dict[str, str]) -> tuple[dict, int | None]:
    """The row of a process, and the most memory that its cgroup had; None where there are no cgroups."""
    group = _CGROUP / f"weightwire-bench-{os.getpid()}"
    grouped = os.geteuid() == 0 and (_CGROUP / "memory.limit_in_bytes").exists()
    if grouped:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(limit))
        command = ["sh", "-c", f'echo $$ >{group}/tasks; exec "$@"', "sh", *command]
    try:
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            raise AssertionError(f"it ended with {done.returncode}; -9: more than {limit >> 20} MiB")
        return json.loads(done.stdout.splitlines()[-1]), int((group / "memory.max_usage_in_bytes").read_text()) if grouped else None
    finally:
        if grouped:
            group.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True, help="path of weightwired")
    parser.add_argument("--gb", type=float, default=100, help="of weights [100]")
    parser.add_argument("--bare-gb", type=float, default=20, help="of the bare client [20]")
    parser.add_argument("--share", type=float, default=0.02, help="of the elements that are not 0 [0.02]; 1: they hardly get shorter")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--limit-mib", type=int, default=3072, help="memory of the writer, and of the reader [3072]")
    parser.add_argument("--url", help="file:///DIR, which is emptied; without, the S3 server of --server")
    parser.add_argument("--server", choices=["plain", "radosgw"], default="plain", help="plain: the one of this file [plain]")
    parser.add_argument("--work", choices=["bare-put", "bare-get", "anchor", "delta", "load"], help=argparse.SUPPRESS)
    add_options(parser)
    args = parser.parse_args()
    if args.work:
        work(args)
        return 0
    env = {**os.environ, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
           "WEIGHTWIRE_BIN_DIR": str(pathlib.Path(args.binary).resolve().parent)}
    server, ceph, rows, url = None, None, [], args.url
    try:
        if url is None and args.server == "radosgw":
            sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/python"))
            from ceph_server import Ceph
            ceph = Ceph(disk_bytes=64 << 30)
            url = ceph.url("bench")
        elif url is None:
            server = subprocess.Popen([sys.executable, __file__, "--binary", "-", "--serve"], env=env, stdout=subprocess.PIPE, text=True)
            url = f"s3://weights/bench?endpoint={server.stdout.readline().strip()}"
        for name in ("bare-put", "bare-get", "anchor", "load", "delta"):
            gb = args.bare_gb if name.startswith("bare") else args.gb
            found, most = in_group(args.limit_mib << 20, [sys.executable, __file__, "--binary", args.binary, "--work", name, "--gb", str(gb), "--url", url,
                                                          "--workers", str(args.workers), "--share", str(args.share)], env)
            rows.append({"name": name, "rounds": 1, "checked": name == "load", "bytes": found["bytes"], "moved": found["moved"],
                         "anonymous_peak": found["anonymous"], "cgroup_peak": most,
                         **{f"seconds_{which}": found["seconds"] for which in ("median", "min", "max")}})
            print(f"{name:9s} {found['bytes'] / 1e9:6.1f} GB of weights, {found['moved'] / 1e9:7.2f} GB moved, {found['seconds']:7.1f} s, "
                  f"{found['bytes'] / 1e6 / found['seconds']:7.0f} MB/s; memory {found['anonymous'] >> 20} MiB"
                  + (f", with shared and cached {most >> 20} MiB" if most else ""), flush=True)
    finally:
        if server is not None:
            server.kill()
            server.wait()
        if ceph is not None:
            ceph.stop()
    speed = {row["name"]: row["bytes"] / row["seconds_median"] for row in rows}
    print(f"  anchor {speed['anchor'] / speed['bare-put']:.2f} of the bare client's speed, load {speed['load'] / speed['bare-get']:.2f}")
    write(args, f"{args.gb:g} GB through a store", rows, about={"url": "file" if args.url else "s3", "server": args.server, "workers": args.workers, "share": args.share})
    return 0


if __name__ == "__main__":
    if "--serve" in sys.argv:
        Server()
    sys.exit(main())
