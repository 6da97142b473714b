"""Thousands of members on one coordinator: `./dev bench control`. Says what the coordinator took for it, and whether anybody
was lost. Its load (bench/load) registers and sends heartbeats over real connections; nothing is published. With `--epochs N`
instead: versions of a fleet whose agents say everything and move no byte, which is what an epoch costs beside its bytes."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "client/python"))

from demo.fleet import Daemon  # noqa: E402
from report import add_options, write  # noqa: E402
from weightwire import Client, Tls  # noqa: E402


def processor_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) / 1024


def allow_connections(count: int) -> None:
    """Coordinator and clients inherit this limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < count:
        sys.exit(f"load: {count} descriptors are needed, {hard} are allowed; raise `ulimit -Hn`, or use fewer agents "
                 "with more ranks")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


def certificates(directory: str) -> tuple[Tls, Tls]:
    """Of a coordinator and of its engines."""
    script, folder = str(ROOT / "deploy/certs.sh"), pathlib.Path(directory, "certificates")
    subprocess.run([script, folder, "ca"], check=True, timeout=60)
    for role in ("coordinator", "engine"):
        subprocess.run([script, folder, "issue", role, role, "--san", "IP:127.0.0.1"], check=True, timeout=60)
    files = [Tls(*(str(folder / role / file) for file in ("tls.crt", "tls.key", "ca.crt"))) for role in ("coordinator", "engine")]
    return files[0], files[1]


def run(binary: str, clients: str, agents: int, ranks: int, hold: int, calls: int, in_flight: int, tls: bool = False) -> dict:
    """One load on a coordinator of its own."""
    allow_connections(agents + 512)
    with tempfile.TemporaryDirectory(prefix="weightwire-load-") as directory:
        own, engine = certificates(directory) if tls else (None, None)
        files = {"tls_cert": own.cert, "tls_key": own.key, "tls_ca": own.ca} if own else {}
        coordinator = Daemon(binary, directory, "coordinator", role="coordinator", listen="127.0.0.1:0",
                             state_dir=f"{directory}/state", **files)
        command = [clients, "--coordinator", coordinator.grpc, "--agents", str(agents), "--ranks", str(ranks), "--hold", str(hold),
                   "--calls", str(calls), "--in-flight", str(in_flight)]
        if engine:
            command += ["--tls-cert", engine.cert, "--tls-key", engine.key, "--tls-ca", engine.ca]
        began, took = time.monotonic(), processor_seconds(coordinator.pid)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = process.stdout.readline()
        if not line:
            process.stdin.close()
            sys.exit(f"load: {clients} ended with {process.wait(60)}")
        took, began = processor_seconds(coordinator.pid) - took, time.monotonic() - began
        with Client(coordinator.grpc, timeout=60, tls=engine) as client:
            present = len(client.status().participants)
        row = {**json.loads(line), "present_at_the_end": present, "processor_seconds": round(took, 2),
               "processor_share": round(took / began, 3), "peak_mib": round(peak_mib(coordinator.pid), 1),
               "lease_expiries": sum(map(float, re.findall(r"^weightwire_lease_expiries_total\{.*\} (\S+)$", coordinator.metrics(),
                                                           re.M)))}
        process.stdin.close()
        row["ok"] = process.wait(60) == 0 and present == agents * ranks and row["lease_expiries"] == 0
        coordinator.stop()
    return row


def run_epochs(binary: str, fake_members: str, agents: int, ranks: int, epochs: int) -> dict:
    """Seconds in the median of `epochs` versions, the first one apart: it makes the plan and fetches slices."""
    allow_connections(agents + 512)
    with tempfile.TemporaryDirectory(prefix="weightwire-load-") as directory:
        coordinator = Daemon(binary, directory, "coordinator", role="coordinator", listen="127.0.0.1:0",
                             state_dir=f"{directory}/state", min_engines=agents - 1)
        command = [fake_members, "--coordinator", coordinator.grpc, "--engines", str(agents - 1), "--ranks", str(ranks)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if not process.stdout.readline().startswith("ready"):
            sys.exit(f"load: {fake_members} ended with {process.wait(60)}")
        rows, took = [], processor_seconds(coordinator.pid)
        with Client(coordinator.grpc, timeout=60) as client:
            for version in range(1, epochs + 2):
                process.stdin.write("\n")
                process.stdin.flush()
                released = float(process.stdout.readline())
                client.wait_version(version, timeout=60)
                status = client.status()
                epoch = next(e for e in status.epochs if e.version == version and e.phase == "committed")
                rows.append({"released": released, **epoch.seconds})
        took = (processor_seconds(coordinator.pid) - took) / len(rows)
        process.stdin.close()
        ok = process.wait(60) == 0 and all(e.version == epochs + 1 for e in status.engines)
        row = {"members": agents * ranks, "agents": agents, "epochs": epochs, "processor_seconds_each": round(took, 3),
               "peak_mib": round(peak_mib(coordinator.pid), 1), "ok": ok}
        coordinator.stop()
    for phase in rows[0]:
        row[f"{phase}_ms_min"] = round(1e3 * min(r[phase] for r in rows[1:]), 1)
        row[f"{phase}_ms_median"] = round(1e3 * statistics.median(r[phase] for r in rows[1:]), 1)
        row[f"{phase}_ms_max"] = round(1e3 * max(r[phase] for r in rows[1:]), 1)
        row[f"{phase}_ms_first"] = round(1e3 * rows[0][phase], 1)
    return row


def timed_row(row: dict) -> dict:
    """As every benchmark's: seconds of a call, or of COMMIT until every engine has acknowledged."""
    if "epochs" in row:
        name, rounds = f"commit-{row['members']}", row["epochs"]
        median, most = row["commit_ms_median"], row["commit_ms_max"]
        least = row["commit_ms_min"]
    else:
        name, rounds = f"call-{row['members']}", row["calls"]
        least, median, most = row["call_min_ms"], row["call_p50_ms"], row["call_max_ms"]
    return {"name": name, "bytes": 0, "rounds": rounds, "seconds_median": median / 1e3, "seconds_min": least / 1e3,
            "seconds_max": most / 1e3, "ratio_to_memcpy": None, "checked": row["ok"], **row}


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench control", description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--agents", type=int, default=256, help="sessions, each on its own connection")
    parser.add_argument("--ranks", type=int, default=1, help="members behind each agent")
    parser.add_argument("--hold", type=int, default=60, help="seconds of heartbeats and nothing else")
    parser.add_argument("--calls", type=int, default=5, help="seconds of unary calls afterwards")
    parser.add_argument("--in-flight", type=int, default=64, help="calls at a time")
    parser.add_argument("--tls", action="store_true", help="mTLS, by certificates of its own; not with --epochs")
    parser.add_argument("--epochs", type=int, default=0, help="versions to publish; one agent is the trainer then")
    add_options(parser)
    args = parser.parse_args()
    beside = pathlib.Path(args.binary).with_name
    row = (run_epochs(args.binary, str(beside("epochs_bench")), args.agents, args.ranks, args.epochs) if args.epochs else
           run(args.binary, str(beside("load_bench")), args.agents, args.ranks, args.hold, args.calls, args.in_flight, args.tls))
    for name, value in row.items():
        print(f"{name:<20} {value}")
    write(args, "One coordinator, many members", [timed_row(row)])
    return 0 if row["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
