"""How far one coordinator reaches: `./dev bench scale`. Fleets of stand-ins, which say everything that real agents say and move
no byte: over real connections to a coordinator process of its own, and for more members than a machine has connections for in
one process with it, without sockets.

Of each fleet: the seconds until everybody is registered; what COMMIT takes, from its append until every engine has
acknowledged; the processor time of the coordinator's strand for a version; its memory for each member (simulated: what it has
allocated); the seconds of a status (simulated: of what `wwctl status` shows); the bytes that it sends for a version; the seconds of a new coordinator on its journal
(real: from exec until it listens). And of fleets with many epochs behind them: what `wwctl status`, `top`, `doctor` and the page
take (asked.py). The last line fits strand time ~ members ^ exponent."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "client/python"))

import asked  # noqa: E402
from control import allow_connections  # noqa: E402
from demo.fleet import Daemon  # noqa: E402
from report import add_options, spread, write  # noqa: E402
from weightwire import Client  # noqa: E402

ENDED = 'weightwire_epochs_total{outcome="committed"}'
FAILED = 'weightwire_epochs_total{outcome="aborted"}'


def memory_bytes(pid: int, what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+)", pathlib.Path(f"/proc/{pid}/status").read_text())[1]) * 1024


def strand_seconds(pid: int) -> float:
    """Of the thread that the coordinator's strand is; what gRPC's threads post runs nowhere else."""
    for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
        if (task / "comm").read_text().strip() == "coordinator":
            return int((task / "schedstat").read_text().split()[0]) / 1e9
    raise LookupError(f"process {pid} has no strand")


def sent_bytes(address: str) -> int:
    """By the sockets that are connected to the port now."""
    port = address.rsplit(":", 1)[1]
    lines = subprocess.check_output(["ss", "-tinH", "state", "established", f"sport = :{port}"], text=True)
    return sum(map(int, re.findall(r"\bbytes_sent:(\d+)", lines)))


def await_end(coordinator: Daemon, count: int, limit: float) -> None:
    """Asks /metrics, which costs the strand nothing."""
    end = time.monotonic() + limit
    while coordinator.counter(ENDED) < count:
        if coordinator.counter(FAILED) > 0 or time.monotonic() > end:
            sys.exit(f"scale: version {count} was not committed:\n{coordinator.status()}")
        time.sleep(0.02)


class LoadClients:
    """Stand-ins in a process of their own, registered over real connections."""

    def __init__(self, program: str, coordinator: Daemon, engines: int, ranks: int) -> None:
        self._program, self._coordinator, self._version = program, coordinator, 0
        self._process = subprocess.Popen([program, "--coordinator", coordinator.grpc, "--engines", str(engines), "--ranks", str(ranks)],
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.registered = float(self._line("registration").split()[1])

    def _line(self, what: str) -> str:
        if not (line := self._process.stdout.readline()):
            sys.exit(f"scale: {what}: {self._program} ended with {self._process.wait(60)}")
        return line

    def publish(self) -> None:
        """A version, until it is committed."""
        self._version += 1
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        self._line(f"version {self._version}")
        await_end(self._coordinator, self._version, 300)

    def end(self) -> bool:
        """True when nothing went wrong."""
        self._process.stdin.close()
        return self._process.wait(120) == 0


def coordinator_config(directory: str, engines: int, members: int) -> dict:
    return {"role": "coordinator", "listen": "127.0.0.1:0", "state_dir": f"{directory}/state", "min_engines": engines,
            "members_max": max(16_384, 2 * members)}


def real(binary: str, fake_members: str, engines: int, ranks: int, epochs: int) -> dict:
    allow_connections(engines + 512)
    members = (engines + 1) * ranks
    with tempfile.TemporaryDirectory(prefix="weightwire-scale-") as directory:
        config = coordinator_config(directory, engines, members)
        coordinator = Daemon(binary, directory, "coordinator", **config)
        idle = memory_bytes(coordinator.pid, "VmRSS")
        clients = LoadClients(fake_members, coordinator, engines, ranks)
        rows = []
        with Client(coordinator.grpc, timeout=120) as client:
            for version in range(1, epochs + 2):
                strand, sent = strand_seconds(coordinator.pid), sent_bytes(coordinator.grpc)
                clients.publish()
                strand, sent = strand_seconds(coordinator.pid) - strand, sent_bytes(coordinator.grpc) - sent
                asked = time.monotonic()
                status = client.status()
                asked = time.monotonic() - asked
                epoch = next(e for e in status.epochs if e.version == version and e.phase == "committed")
                rows.append({"strand": strand, "sent": sent, "status": asked, **epoch.seconds})
        peak = memory_bytes(coordinator.pid, "VmHWM") - idle
        checked = clients.end() and len(status.participants) == members
        coordinator.kill()
        began = time.monotonic()
        again = Daemon(binary, directory, "again", **config)
        recovery = time.monotonic() - began
        again.kill()
    steady = {key: [row[key] for row in rows[1:]] for key in rows[0]}
    return {"name": f"real-{engines}", "engines": engines, "ranks": ranks, "real": True, "members": members, "checked": checked,
            "registration_seconds": clients.registered, "commit_overhead_seconds": statistics.median(steady["commit"]),
            "strand_cpu_seconds": statistics.median(steady["strand"]), "rss_bytes_per_member": round(peak / members),
            "status_seconds": statistics.median(steady["status"]),
            "coordinator_egress_bytes": int(statistics.median(steady["sent"])),
            "coordinator_egress_bytes_first": rows[0]["sent"],
            "journal_recovery_seconds": recovery, "epoch_seconds": statistics.median(steady["total"]),
            "commit_spread": spread(steady["commit"])}


def simulated(bench: str, engines: int, ranks: int, epochs: int) -> dict:
    with tempfile.TemporaryDirectory(prefix="weightwire-scale-") as directory:
        text = subprocess.check_output([bench, "--journal", f"{directory}/journal.sqlite", "--engines", str(engines), "--ranks",
                                        str(ranks), "--epochs", str(epochs)], text=True, timeout=1800)
    row = json.loads(text)
    least, most = row.pop("commit_min"), row.pop("commit_max")
    return {"name": f"simulated-{engines}", "engines": engines, "ranks": ranks, "real": False, "members": (engines + 1) * ranks,
            "checked": True, **row, "commit_spread": {"median": row["commit_overhead_seconds"], "min": least, "max": most}}


@contextlib.contextmanager
def served(process: subprocess.Popen):
    """What a status_fleet says once it serves: addresses of its gRPC and HTTP."""
    try:
        line = process.stdout.readline().split()
        if not line:
            sys.exit(f"scale: status_fleet ended with {process.wait(60)}")
        yield line[1:]
        process.stdin.close()
        if process.wait(120) != 0:
            sys.exit(f"scale: status_fleet ended with {process.returncode}")
    finally:
        process.kill()


def asked_real(binary: str, fake_members: str, wwctl: str, engines: int, epochs: int) -> dict:
    """A coordinator process and as many connections as engines."""
    allow_connections(engines + 512)
    with tempfile.TemporaryDirectory(prefix="weightwire-scale-") as directory:
        coordinator = Daemon(binary, directory, "coordinator", **coordinator_config(directory, engines, engines + 1))
        clients = LoadClients(fake_members, coordinator, engines, 1)
        for _ in range(epochs):
            clients.publish()
        answers = asked.ask(wwctl, coordinator.grpc, coordinator.http)
        ended = clients.end()
        coordinator.kill()
    return {"name": f"asked-real-{engines}", "engines": engines, "ranks": 1, "epochs": epochs, "checked": ended, **answers}


def asked_simulated(fleet: str, wwctl: str, engines: int, ranks: int, epochs: int) -> dict:
    """A coordinator's gRPC and HTTP, and the fleet in the same process."""
    with tempfile.TemporaryDirectory(prefix="weightwire-scale-") as directory:
        process = subprocess.Popen([fleet, "--state-dir", f"{directory}/state", "--engines", str(engines), "--ranks", str(ranks),
                                    "--epochs", str(epochs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with served(process) as (grpc, http):
            answers = asked.ask(wwctl, grpc, http)
    return {"name": f"asked-{engines}x{ranks}", "engines": engines, "ranks": ranks, "epochs": epochs, "checked": True, **answers}


def exponent(rows: list[dict]) -> float | None:
    """Least squares of log(strand seconds) over log(members)."""
    points = [(math.log(row["members"]), math.log(row["strand_cpu_seconds"])) for row in rows]
    if len(points) < 2:
        return None
    return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope


def show(row: dict) -> None:
    print(f"{row['name']:<16} {row['members']:>6} members  registered {row['registration_seconds']:7.2f} s  version "
          f"{row['epoch_seconds']:6.2f} s  commit {row['commit_overhead_seconds'] * 1e3:8.1f} ms  strand "
          f"{row['strand_cpu_seconds']:7.3f} s  {row['rss_bytes_per_member'] / 1e3:6.1f} KB/member  status "
          f"{row['status_seconds']:6.3f} s  sent {row['coordinator_egress_bytes'] / 1e6:7.2f} MB  recovery "
          f"{row['journal_recovery_seconds']:5.3f} s", flush=True)


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench scale", description=__doc__)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--real", type=counts, default=[100, 300, 1_000], metavar="N,…", help="engines over real connections")
    parser.add_argument("--simulated", type=counts, default=[1_000, 3_000, 10_000], metavar="N,…", help="engines without sockets")
    parser.add_argument("--real-ranks", type=int, default=1, help="of the trainer and of each engine")
    parser.add_argument("--ranks", type=int, default=8, help="of the simulated ones")
    parser.add_argument("--epochs", type=int, default=3, help="versions that are timed, after the first one")
    parser.add_argument("--asked-real", type=counts, default=[1_000], metavar="N,…", help="engines over real connections that are asked")
    parser.add_argument("--asked", type=counts, default=[10_000], metavar="N,…", help="engines without sockets that are asked")
    parser.add_argument("--asked-ranks", type=counts, default=[1], metavar="N,…", help="of each of those without sockets")
    parser.add_argument("--asked-epochs", type=int, default=210, help="that those who are asked have committed")
    add_options(parser)
    args = parser.parse_args()
    beside = pathlib.Path(args.binary).with_name
    wwctl = str(beside("wwctl"))
    answered = []
    for engines in args.asked_real:
        answered.append(asked_real(args.binary, str(beside("epochs_bench")), wwctl, engines, args.asked_epochs))
        asked.show(answered[-1]["name"], answered[-1])
    for engines in args.asked:
        for ranks in args.asked_ranks:
            answered.append(asked_simulated(str(beside("status_fleet")), wwctl, engines, ranks, args.asked_epochs))
            asked.show(answered[-1]["name"], answered[-1])
    rows = []
    for engines in args.real:
        rows.append(real(args.binary, str(beside("epochs_bench")), engines, args.real_ranks, args.epochs))
        show(rows[-1])
    for engines in args.simulated:
        rows.append(simulated(str(beside("scale_bench")), engines, args.ranks, args.epochs))
        show(rows[-1])
    fits = {kind: exponent([row for row in rows if row["real"] == (kind == "real")]) for kind in ("real", "simulated")}
    fit = fits["simulated"] if fits["simulated"] is not None else fits["real"]
    print("strand time ~ members ^ exponent: " + (", ".join(f"{value:.2f} ({kind})" for kind, value in fits.items()
                                                            if value is not None) or "one size has none"))
    for row in rows:
        row["bars"] = {"commit": row.pop("commit_spread"), "strand": row["strand_cpu_seconds"]}
    for row in answered:
        row["bars"] = {what: spread(times) for what, times in row["seconds"].items()}
    write(args, "One coordinator, many engines", rows + answered, about={"exponent": fit, "exponents": fits})
    return 0 if all(row["checked"] for row in rows + answered) else 1


if __name__ == "__main__":
    sys.exit(main())
