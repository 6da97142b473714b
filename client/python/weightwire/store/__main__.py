"""python -m weightwire.store write|follow|ls|show|verify|gc|pull|push URL; all are commands of `wwctl store`, too."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import socket
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from weightwire.checkpoint.__main__ import _Progress, size
from weightwire.errors import WeightwireError
from weightwire.store import transfer
from weightwire.store.barrier import Barrier
from weightwire.store.figures import Figures, MetricsServer
from weightwire.store.follower import Follower, sites
from weightwire.store.format import ANCHOR, MANIFEST, PART_BYTES, Manifest, folder_version
from weightwire.store.objects import Objects, StoreError
from weightwire.store.reading import WORKERS, OnProgress, Reader, no_progress
from weightwire.store.retention import GRACE_SECONDS, gc
from weightwire.store.signing import signer, trusted
from weightwire.store.uploading import ANCHOR_EVERY
from weightwire.store.writer import Writer, read_config

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(text: str) -> float:
    """90, 90s, 15m, 12h, 7d."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time, such as 90s, 15m, 12h or 7d")
    return value


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description="Versions in object storage, for engines of other regions.")
    commands = parser.add_subparsers(dest="command", required=True)
    url = argparse.ArgumentParser(add_help=False)
    url.add_argument("url", help="s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or file:///FOLDER")
    url.add_argument("--endpoint", help="of an S3 server that is not Amazon's; default: ?endpoint= in the URL, $AWS_ENDPOINT_URL")
    url.add_argument("--trust", action="append", default=[], metavar="PUBLIC", help="a public key in PEM: manifests that it did not sign are "
                                                                                     "refused; may be repeated")
    url.add_argument("--retry", type=seconds, default=60.0, metavar="TIME", help="how long a request is tried again [60s]")
    url.add_argument("--workers", type=int, default=WORKERS, help=f"parts that move at the same time [{WORKERS}]")
    url.add_argument("--wwctl", help="the wwctl beside which libweightwire_checkpoint.so lies; default: in $WEIGHTWIRE_BIN_DIR, then on PATH")
    told = argparse.ArgumentParser(add_help=False)
    told.add_argument("--json", action="store_true")
    progress = argparse.ArgumentParser(add_help=False)
    progress.add_argument("--quiet", action="store_true", help="no progress")
    live = argparse.ArgumentParser(add_help=False)
    live.add_argument("--agent", help="its socket; default: $WEIGHTWIRE_AGENT_SOCKET")
    live.add_argument("--coordinator", help="its address; default: $WEIGHTWIRE_ADDRESS, and none without")
    live.add_argument("--job", default="")
    live.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics there; port 0 takes a free one")
    writing = argparse.ArgumentParser(add_help=False)
    writing.add_argument("--sign", metavar="KEY", help="an Ed25519 key in PEM, with which manifests are signed")
    writing.add_argument("--anchor-every", type=int, default=ANCHOR_EVERY, metavar="N",
                         help=f"versions from one whole one to the next; earlier when the changes have more bytes [{ANCHOR_EVERY}]")
    writing.add_argument("--part-size", type=size, default=PART_BYTES, help="of weights for each object [64MiB]")

    one = commands.add_parser("write", parents=[url, live, writing, progress], help="the writer: an engine of this site that stores versions")
    one.add_argument("--config", required=True, help="the model's config.json")
    one.add_argument("--layout", default="hf", metavar="SPEC", help="in which versions are stored; its ranks are written side by side: "
                                                                    "hf, fsdp:dp8, … [hf]")
    one.add_argument("--group", default="store", help="its name among the engines [store]")
    one.add_argument("--model-name", default="", metavar="NAME", help="which of the trainer's models, where it publishes several; each has "
                                                                      "a URL of its own")
    two = commands.add_parser("follow", parents=[url, live, progress], help="the follower: the trainer of this site, which publishes what is stored")
    two.add_argument("--site", default=socket.gethostname(), help="the name of this site in the store [this host's]")
    two.add_argument("--group", default="trainer", help="its name as a trainer [trainer]")
    two.add_argument("--version", type=int, help="publish exactly this version, and end when it is served")
    two.add_argument("--poll", type=seconds, default=1.0, metavar="TIME", help="between two looks for a new version [1s]")
    two.add_argument("--deadline", type=seconds, default=600.0, metavar="TIME", help="of a version, in this site [600s]")
    two.add_argument("--barrier", metavar="NAME", help="publish what enough sites have, or nobody does; with --sites")
    two.add_argument("--sites", type=int, metavar="N", help="how many are enough")
    two.add_argument("--barrier-deadline", type=seconds, default=120.0, metavar="TIME", help="after which a version is passed over [120s]")

    commands.add_parser("ls", parents=[url, told], help="versions, and what each site has published")
    show = commands.add_parser("show", parents=[url, told], help="one version: its parts, what it is made of, the way to it")
    show.add_argument("--version", type=int, help="[the newest]")
    check = commands.add_parser("verify", parents=[url, told, progress], help="read every object, make its bytes, compare all digests")
    check.add_argument("--version", type=int, help="this one and what it is made of [all]")
    collect = commands.add_parser("gc", parents=[url, told], help="delete old versions, but what a chain or a reader needs")
    collect.add_argument("--keep", type=int, default=8, metavar="N", help="newest versions that stay [8]")
    collect.add_argument("--keep-age", type=seconds, default=0.0, metavar="TIME", help="younger ones stay, too [0]")
    collect.add_argument("--grace", type=seconds, default=GRACE_SECONDS, metavar="TIME", help="before what has no manifest is taken for torn [1d]")
    collect.add_argument("--dry-run", action="store_true", help="say what would be deleted")
    take = commands.add_parser("pull", parents=[url, told, progress], help="write a version as a checkpoint")
    take.add_argument("target", help="must not exist")
    take.add_argument("--version", type=int, help="[the newest]")
    take.add_argument("--to", default="weightwire", help="weightwire (in the stored layout), hf, or any format of wwctl convert [weightwire]")
    take.add_argument("--shard-size", type=size, default=size("5GB"), help="of safetensors files [5GB]")
    put = commands.add_parser("push", parents=[url, told, writing, progress], help="store a checkpoint as a version")
    put.add_argument("folder")
    put.add_argument("--version", type=int, required=True, help="greater than what is stored")
    put.add_argument("--lineage", type=int, default=1, help="[1]")
    put.add_argument("--from", dest="source_spec", metavar="SPEC", help="the checkpoint's layout, where its files do not tell it")
    put.add_argument("--config", help="the model's config.json; default: the one in the checkpoint")
    put.add_argument("--whole", action="store_true", help="an anchor, whatever is stored")
    return parser


def main(arguments: Optional[List[str]] = None, prog: str = "python -m weightwire.store") -> int:
    args = _parser("wwctl store" if prog == "wwctl" else prog).parse_args(arguments)
    if args.wwctl:
        os.environ["WEIGHTWIRE_BIN_DIR"] = str(Path(args.wwctl).resolve().parent)
    try:
        if args.workers < 1:
            raise StoreError(f"--workers {args.workers}", kind="refused", remedy="at least 1")
        objects = Objects(args.url, endpoint=args.endpoint, retry_seconds=args.retry)
        reader = Reader(objects, trusted=trusted(args.trust), workers=args.workers)
        return _COMMANDS[args.command](args, reader)
    except (WeightwireError, OSError) as error:
        print(f"store: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("store: interrupted", file=sys.stderr)
        return 130


def _write(args: argparse.Namespace, reader: Reader) -> int:
    figures = Figures()
    writer = Writer(reader, read_config(Path(args.config)), args.layout, agent=args.agent, group=args.group, job=args.job,
                    coordinator=args.coordinator or os.environ.get("WEIGHTWIRE_ADDRESS"), signer=signer(args.sign),
                    anchor_every=args.anchor_every, part_bytes=args.part_size, workers=args.workers, figures=figures, on_stored=_say,
                    on_progress=_progress(args), model_name=args.model_name)
    return _serve(args, figures, writer.run, writer.stop)


def _follow(args: argparse.Namespace, reader: Reader) -> int:
    if (args.barrier is None) != (args.sites is None):
        raise StoreError("--barrier and --sites go together", kind="refused", remedy="--barrier NAME --sites N")
    barrier = args.barrier and Barrier(reader.objects, args.barrier, args.site, args.sites, deadline_seconds=args.barrier_deadline)
    figures = Figures()
    follower = Follower(reader, args.site, agent=args.agent, coordinator=args.coordinator or os.environ.get("WEIGHTWIRE_ADDRESS"),
                        group=args.group, job=args.job, poll_seconds=args.poll, deadline_seconds=args.deadline, barrier=barrier or None,
                        figures=figures, on_published=_say, on_progress=_progress(args))
    run = follower.run if args.version is None else lambda: follower.publish_exactly(args.version)
    return _serve(args, figures, run, follower.stop)


def _serve(args: argparse.Namespace, figures: Figures, run: Callable[[], None], stop: Callable[[], None]) -> int:
    """Until it ends by itself, SIGTERM or SIGINT; a second signal ends it at once."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(name)s: %(message)s")

    def told(number: int, _frame: object) -> None:
        stop()
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    with ExitStack() as stack:
        if args.metrics:
            server = stack.enter_context(MetricsServer(figures, args.metrics))
            _say(f"metrics at http://{server.address}/metrics")
        run()
    return 0


def _ls(args: argparse.Namespace, reader: Reader) -> int:
    rows: List[Dict[str, Any]] = []
    latest = reader.latest()
    for folder in reader.versions():
        record = reader.objects.find(f"{folder}/{MANIFEST}")
        if record is None:
            rows.append({"version": folder_version(folder), "folder": folder, "torn": True})
            continue
        made = reader.manifest_at(record.path)
        beside = reader.objects.find(f"{folder}/{ANCHOR}") is not None
        rows.append({"version": made.version, "lineage": made.lineage, "kind": made.kind, "anchor_beside": beside, "bytes": made.nbytes,
                     "chain": made.chain, "chain_bytes": made.chain_bytes, "written": record.modified.isoformat(), "folder": folder,
                     "latest": latest is not None and latest.manifest.path == made.path, "content_root": made.content_root, "torn": False})
    rows.sort(key=lambda row: (row.get("lineage", 0), row["version"]))
    told = [{"site": name, "version": version, "lineage": lineage} for name, version, lineage in sites(reader)]
    if args.json:
        print(json.dumps({"url": reader.objects.url, "versions": rows, "sites": told}, indent=1))
        return 0
    print(f"{'VERSION':>10}  LINEAGE  KIND           {'BYTES':>15}  CHAIN  WRITTEN                    FOLDER")
    for row in rows:
        if row["torn"]:
            print(f"{row['version']:10}  {'':7}  torn, or being written{'':29}{'':23}{row['folder']}")
            continue
        kind = row["kind"] + ("+anchor" if row["anchor_beside"] else "")
        print(f"{row['version']:10}  {row['lineage']:7}  {kind:13}  {row['bytes']:15,}  {row['chain']:5}  {row['written'][:25]:25}  {row['folder']}"
              + ("  (newest)" if row["latest"] else ""))
    for one in told:
        print(f"site {one['site']}: version {one['version']}" + (f" of lineage {one['lineage']}" if one["lineage"] != 1 else ""))
    return 0


def _chosen(args: argparse.Namespace, reader: Reader) -> Manifest:
    if args.version is not None:
        return reader.version(args.version)
    latest = reader.latest()
    if latest is None:
        raise StoreError(f"{reader.objects.url} has no version", kind="missing", remedy="`wwctl store write` and `push` store some")
    return reader.manifest(latest.manifest)


def _show(args: argparse.Namespace, reader: Reader) -> int:
    made = _chosen(args, reader)
    layout, route = reader.layout(made.layout), reader.route(made)
    said = {"version": made.version, "lineage": made.lineage, "kind": made.kind, "path": made.path, "digest": made.digest, "state": made.state,
            "layout": layout.spec, "layout_digest": made.layout, "ranks": len(layout.ranks), "tensors": sum(map(len, layout.ranks)),
            "weights_bytes": layout.nbytes, "bytes": made.nbytes, "objects": len(made.objects()), "base": made.base and made.base.path,
            "anchor": made.anchor and made.anchor.path, "chain": made.chain, "content_root": made.content_root,
            "content_class": made.content_class, "job": made.job, "created": made.created,
            "route": [{"path": step.path, "bytes": step.nbytes} for step in route], "route_bytes": sum(step.nbytes for step in route)}
    if args.json:
        print(json.dumps(said, indent=1))
    else:
        for name, value in said.items():
            if name != "route":
                print(f"{name.replace('_', ' '):15}  {value}")
        for step in route:
            print(f"{'route':15}  {step.path}, {step.nbytes} bytes")
    return 0


def _verify(args: argparse.Namespace, reader: Reader) -> int:
    found = transfer.verify(reader, args.version, workers=args.workers, on_progress=_progress(args))
    bad = [one for one in found if one.error]
    if args.json:
        print(json.dumps({"manifests": [asdict(one) for one in found], "bytes": sum(one.bytes for one in found), "damaged": len(bad)}, indent=1))
    else:
        for one in bad:
            print(f"{one.path}: {one.error}")
        print(f"{len(found)} manifests, {sum(one.bytes for one in found)} bytes: " + (f"{len(bad)} are damaged" if bad else "every byte is right"))
    return 1 if bad else 0


def _gc(args: argparse.Namespace, reader: Reader) -> int:
    report = gc(reader, keep=args.keep, keep_seconds=args.keep_age, grace_seconds=args.grace, dry_run=args.dry_run)
    if args.json:
        print(json.dumps({"dry_run": args.dry_run, **asdict(report)}, indent=1))
        return 0
    word = "would be deleted" if args.dry_run else "deleted"
    for folder in [*report.deleted, *report.torn]:
        print(f"{folder}: {word}" + (", torn" if folder in report.torn else ""))
    for folder, why in report.kept.items():
        print(f"{folder}: kept, {why}")
    for folder, why in report.unknown.items():
        print(f"{folder}: kept, not understood: {why}")
    print(f"{report.bytes_deleted} bytes {word}, {report.bytes_kept} kept")
    return 0


def _pull(args: argparse.Namespace, reader: Reader) -> int:
    made = _chosen(args, reader)
    read = transfer.pull(reader, made, args.target, args.to, shard_bytes=args.shard_size, on_progress=_progress(args))
    print(json.dumps({"version": made.version, "lineage": made.lineage, "target": args.target, "bytes_read": read}) if args.json else
          f"{args.target}: {made.name}, {read} bytes were read")
    return 0


def _push(args: argparse.Namespace, reader: Reader) -> int:
    stored = transfer.push(reader, args.folder, args.version, lineage=args.lineage, source_spec=args.source_spec, config=args.config,
                           whole=args.whole, signer=signer(args.sign), anchor_every=args.anchor_every, part_bytes=args.part_size,
                           workers=args.workers, on_progress=_progress(args))
    made = stored.manifest
    print(json.dumps({"version": made.version, "lineage": made.lineage, "kind": made.kind, "bytes_written": stored.bytes,
                      "objects": stored.objects, "folder": made.folder}) if args.json else
          f"{made.name}: {made.kind}, {stored.bytes} bytes in {stored.objects} objects, {made.folder}")
    return 0


def _progress(args: argparse.Namespace) -> OnProgress:
    return no_progress if args.quiet else _Progress()


def _say(line: str) -> None:
    print(line, flush=True)


_COMMANDS: Dict[str, Callable[[argparse.Namespace, Reader], int]] = {
    "write": _write, "follow": _follow, "ls": _ls, "show": _show, "verify": _verify, "gc": _gc, "pull": _pull, "push": _push}

if __name__ == "__main__":
    sys.exit(main())
