"""python -m weightwire.checkpoint convert SRC DST --to FORMAT | load FOLDER | push FOLDER | save DST --to FORMAT |
delta inspect A B | quantize check A B | check FOLDER | show FOLDER; all but the last two are commands of `wwctl`, too."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from weightwire.checkpoint import composed, delta, quantizing
from weightwire.checkpoint.compaction import compact
from weightwire.checkpoint.conversion import convert
from weightwire.checkpoint.formats import Opened
from weightwire.checkpoint.live import push, save, start_engines
from weightwire.checkpoint.loading import try_load
from weightwire.checkpoint.sources import check, open_checkpoint
from weightwire.errors import WeightwireError
from weightwire.publisher import Lineage

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}


def size(text: str) -> int:
    """256MiB, 5GB, 1000000."""
    match = re.fullmatch(r"(\d{1,12})(K|M|G|KI|MI|GI)?B?", text.upper())
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 256MiB")
    return int(match.group(1)) * _UNITS[match.group(2) or ""]


class _Progress:
    """One line, rewritten on a terminal; elsewhere a line every ten seconds."""

    def __init__(self) -> None:
        self._what, self._since, self._last, self._first = "", 0.0, 0.0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now, terminal = time.monotonic(), sys.stderr.isatty()
        if what != self._what:
            self._what, self._since, self._first, self._last = what, now, done, 0.0
        if done < total and now - self._last < (0.2 if terminal else 10):
            return
        self._last = now
        rate = (done - self._first) / max(now - self._since, 1e-3)
        text = f"{what}: {done / 1e6:.1f} of {total / 1e6:.1f} MB, {rate / 1e6:.0f} MB/s"
        print(("\r" if terminal else "") + text, end="\n" if done == total or not terminal else "", file=sys.stderr,
              flush=True)


def _describe(opened: Opened) -> str:
    count = sum(len(tensors) for tensors in opened.ranks)
    total = sum(t.bytes for tensors in opened.ranks for t in tensors.values())
    left = [f"\n  beside the weights: {_kinds(opened.left_out)}"] if opened.left_out else []
    return "".join([f"{opened.format}, layout {opened.spec}: {count} tensors, {total} bytes, {len(opened.ranks)} ranks",
                    *left, *(f"\n  {note}" for note in opened.notes)])


def _kinds(names: Sequence[str]) -> str:
    """What was left out, in a line: how many of each kind, and the first of it."""
    kinds: Dict[str, List[str]] = {}
    for name in names:
        kind = ("of an optimizer" if "optimizer." in name else "extra states" if "_extra_state" in name else
                "random states" if name.startswith(("rng_state", "rerun_state")) else name)
        kinds.setdefault(kind if kind != name or name.startswith("iteration ") else "others", []).append(name)
    return "; ".join(own[0] if kind.startswith("iteration ") else f"{len(own)} {kind}, e.g. {own[0]}"
                     for kind, own in kinds.items())


def _lineage(word: str) -> Lineage:
    return "resume" if word == "resume" else int(word)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("convert", help="write a checkpoint in another format and layout")
    one.add_argument("source")
    one.add_argument("target", help="must not exist; run again after an interruption to go on")
    one.add_argument("--to", required=True, help="hf, torch_dist, megatron:tp4,pp1, weightwire, weightwire:SPEC")
    one.add_argument("--quantize", metavar="FORMAT", help="of a Hugging Face checkpoint, with --to hf: fp8-block, fp8-block-ue8m0, "
                                                           "fp8-channel, fp8-tensor, mxfp8, …; a wrong one names them all; or "
                                                           "as this config.json says")
    one.add_argument("--calibrated", metavar="FOLDER", help="with --quantize: a release of the model, from which scales of activations "
                                                            "and of the KV cache are copied")
    one.add_argument("--verify", action="store_true", help="check the source's digests, read back and compare all")
    one.add_argument("--quiet", action="store_true")
    get = commands.add_parser("load", help="start a job's engines from a checkpoint or a peer, or try what ranks would load")
    get.add_argument("folder")
    what = get.add_mutually_exclusive_group(required=True)
    what.add_argument("--version", type=int, help="end when every complete engine serves this version or a newer one: from a "
                                                  "peer that has it, else the checkpoint is published as it")
    what.add_argument("--to", metavar="SPEC", help="fill what ranks of this layout hold, e.g. vllm:tp2, in this process, and "
                                                   "let go of it: all is found, and this host's page cache has it")
    get.add_argument("--rank", type=int, action="append", default=[], help="of --to; may be repeated [all]")
    get.add_argument("--verify", action="store_true", help="with --to: check the source's digests first")
    put = commands.add_parser("push", help="publish a checkpoint as a version; ends when every complete engine serves it")
    put.add_argument("folder")
    put.add_argument("--version", type=int, required=True, help="greater than the job's last of its lineage")
    put.add_argument("--lineage", type=_lineage, help="a number, or resume: when the checkpoint is of an earlier step than what is "
                                                      "committed, see docs/operations.md [1]")
    take = commands.add_parser("save", help="write out the version that engines serve, from their memory")
    take.add_argument("target", help="must not exist")
    take.add_argument("--to", required=True, help="as for convert")
    take.add_argument("--config", required=True, help="the model's config.json")
    take.add_argument("--version", type=int, default=0, help="this or a newer one; default: what there is")
    take.add_argument("--model-name", default="", metavar="NAME", help="which of the trainer's models, where it publishes several")
    compare = commands.add_parser("delta", help="what changed between two checkpoints").add_subparsers(dest="what", required=True)
    tell = compare.add_parser("inspect", help="of each tensor: the share of elements that differ, and the bytes that its changes take")
    tell.add_argument("base", help="the older checkpoint")
    tell.add_argument("now", help="the newer one, in the same format and layout")
    tell.add_argument("--json", action="store_true")
    tell.add_argument("--all", action="store_true", help="all tensors [the 20 that take most]")
    tell.add_argument("--quiet", action="store_true", help="no progress")
    judge = commands.add_parser("quantize", help="how far two checkpoints are apart").add_subparsers(dest="what", required=True)
    far = judge.add_parser("check", help="of each tensor: the greatest and the mean difference of values, and the share of equal codes")
    far.add_argument("a", help="a Hugging Face checkpoint, quantized to fp8 or not")
    far.add_argument("b", help="another one of the model")
    far.add_argument("--json", action="store_true")
    for reading in (one, get, put):
        reading.add_argument("--from", dest="source_spec", metavar="SPEC",
                             help="the source's layout, where its files do not tell it, e.g. megatron:tp2,pp2,first=1")
        reading.add_argument("--config", help="the model's config.json; default: the one in the source")
        reading.add_argument("--leave-out", action="append", default=[], metavar="GLOB", help="tensors of the source to drop")
        reading.add_argument("--missing-from", metavar="FOLDER", help="a checkpoint of the whole model, from which all tensors "
                                                                       "are taken that the source lacks")
    for planning in (one, get):
        planning.add_argument("--memory", type=size, default=size("256MiB"),
                              help="bound of what is held of the source's weights [256MiB]")
    for writing in (one, take):
        writing.add_argument("--shard-size", type=size, default=size("5GB"), help="of safetensors files [5GB]")
    for planning in (one, get, take, tell):
        planning.add_argument("--wwctl", help="the wwctl beside which the planner lies; default: in $WEIGHTWIRE_BIN_DIR, then on PATH")
    for writing in (one, take):
        writing.add_argument("--base", metavar="FOLDER", help="with --to weightwire[:SPEC]: keep what changed since this checkpoint")
    for publishing in (get, put):
        publishing.add_argument("--coordinator", help="its address; default: $WEIGHTWIRE_ADDRESS")
    for live in (get, put, take):
        live.add_argument("--agent", help="its socket; default: $WEIGHTWIRE_AGENT_SOCKET")
        live.add_argument("--job", default="")
        live.add_argument("--timeout", type=float, default=600.0, help="seconds [600]")
    commands.add_parser("compact", help="store a native checkpoint whole that is stored as what changed since another one, which may "
                                        "then be removed").add_argument("folder")
    for name, text in (("check", "compare every byte with the digests or checksums that the format keeps"),
                       ("show", "format, layout and size")):
        commands.add_parser(name, help=text).add_argument("folder")
    return parser


def main(arguments: Optional[List[str]] = None, prog: str = "python -m weightwire.checkpoint") -> int:
    args = _parser(prog).parse_args(arguments)
    try:
        if args.command == "convert" and args.quantize:
            report = quantizing.quantize(args.source, args.target, args.to, args.quantize, config=args.config, memory=args.memory,
                                         shard_bytes=args.shard_size, verify=args.verify, leave_out=args.leave_out,
                                         calibrated=args.calibrated, wwctl=args.wwctl, on_progress=(lambda *_: None) if args.quiet else _Progress())
            print(f"{args.target}: {report.format}, {args.quantize}, {report.bytes} bytes"
                  + (f", {report.resumed} of them from before" if report.resumed else "") + (", verified" if args.verify else ""))
        elif args.command == "quantize":
            apart = quantizing.check(args.a, args.b)
            print(json.dumps(quantizing.as_json(apart), indent=1) if args.json else "\n".join(quantizing.as_text(apart)))
        elif args.command == "convert":
            report = convert(args.source, args.target, args.to, source_spec=args.source_spec, config=args.config,
                             memory=args.memory, shard_bytes=args.shard_size, verify=args.verify,
                             leave_out=args.leave_out, wwctl=args.wwctl, missing_from=args.missing_from, base=args.base,
                             on_progress=(lambda *_: None) if args.quiet else _Progress())
            if report.left_out and not args.quiet:
                print(f"skipped, no weights: {_kinds(report.left_out)}", file=sys.stderr)
            print(f"{args.target}: {report.format}, layout {report.spec}, {report.bytes} bytes"
                  + (f", {report.resumed} of them from before" if report.resumed else "")
                  + (", verified" if args.verify else ""))
        elif args.command == "load" and args.to:
            for trial in try_load(args.folder, args.to, args.rank, source_spec=args.source_spec, config=args.config,
                                  memory=args.memory, leave_out=args.leave_out, verify=args.verify, wwctl=args.wwctl,
                                  missing_from=args.missing_from):
                print(f"{args.to} rank {trial.rank}: {trial.tensors} tensors, {trial.bytes} bytes, "
                      f"{trial.bytes / max(trial.seconds, 1e-6) / 1e6:.0f} MB/s", flush=True)
        elif args.command == "load":
            peer = start_engines(args.folder, args.version, source_spec=args.source_spec, config=args.config,
                                 agent=args.agent, coordinator=args.coordinator, job=args.job, timeout=args.timeout,
                                 leave_out=args.leave_out, missing_from=args.missing_from)
            print(f"version {args.version} is served, from {'a peer' if peer else args.folder}")
        elif args.command == "push":
            push(args.folder, args.version, source_spec=args.source_spec, config=args.config, agent=args.agent,
                 coordinator=args.coordinator, job=args.job, timeout=args.timeout, lineage=args.lineage,
                 leave_out=args.leave_out, missing_from=args.missing_from)
            print(f"version {args.version} is served")
        elif args.command == "save":
            version = save(args.target, args.to, args.config, version=args.version, agent=args.agent, job=args.job,
                           shard_bytes=args.shard_size, wwctl=args.wwctl, timeout=args.timeout, base=args.base,
                           model_name=args.model_name)
            print(f"{args.target}: version {version}")
        elif args.command == "compact":
            print(f"{args.folder}: " + ("stored whole now" if compact(args.folder) else "was stored whole before"))
        elif args.command == "delta":
            found = delta.inspect(args.base, args.now, wwctl=args.wwctl, on_progress=(lambda *_: None) if args.quiet else _Progress())
            print(json.dumps(delta.as_json(found), indent=1) if args.json else
                  "\n".join(delta.as_text(found, None if args.all else 20)))
        else:
            read = check if args.command == "check" else open_checkpoint
            folder = Path(args.folder)
            if composed.found_at(folder):
                for part in composed.read(folder)[0]:
                    print(f"{part}: {_describe(read(folder / part))}")
            else:
                print(_describe(read(folder)))
    except (WeightwireError, OSError) as error:
        print(f"checkpoint: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("checkpoint: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
