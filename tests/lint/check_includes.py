#!/usr/bin/env python3
"""Checks every #include against the table in docs/architecture.md ("Who may include whom"), and the table against CMake.

A row reads `room : rooms it includes : packages`, where a room is a folder below server/ (or
kernels, client/cpp, client/cli). A nested room (transport/tcp) inherits its parent's row. `pure` among
the packages forbids threads, files, clocks and every network, GPU or RPC header. A row names exactly the rooms that
its files include, and CMake links exactly those. Prints each violation and exits 1 if there is one.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = {  # package -> prefixes of its headers
    "expected": ("tl/",),
    "json": ("nlohmann/",),
    "xxhash": ("xxhash.h",),
    "asio": ("boost/",),
    "grpc": ("grpc", "google/protobuf"),
    "proto": ("weightwire/v1/", "google/protobuf"),
    "etcd": ("etcd/",),
    "prometheus": ("prometheus/",),
    "spdlog": ("spdlog/", "fmt/"),
    "cli11": ("CLI/",),
    "yaml": ("yaml-cpp/",),
    "sqlite": ("sqlite3.h",),
    "openssl": ("openssl/",),
    "zstd": ("zstd.h",),
    "cuda": ("cuda_runtime_api.h",),
    "ucx": ("ucp/", "ucs/"),
}
IMPURE = {"thread", "mutex", "condition_variable", "shared_mutex", "future", "fstream", "filesystem", "iostream",
          "semaphore", "random"}
# Contracts that name no thread type, so that a fleet can run in one thread.
QUIET_HEADERS = {"server/coordinator/coordinator.h", "server/coordinator/journal.h", "server/agent/agent.h",
                 "server/transfer/transfer.h"}


def table():
    text = (ROOT / "docs/architecture.md").read_text()
    block = re.search(r"```include-table\n(.*?)```", text, re.S).group(1)
    rows = {}
    for line in block.strip().splitlines():
        room, rooms, packages = (part.strip() for part in line.split(":"))
        rows[room] = (set(rooms.split()), set(packages.split()))
    return rows


def room_of(path, rows):
    """Longest room that `path` (relative to the root) lies in; None outside of all."""
    parts = path.parts[1:] if path.parts[0] == "server" else path.parts
    for size in range(len(parts) - 1, 0, -1):
        if "/".join(parts[:size]) in rows:
            return "/".join(parts[:size])
    return None


def complaint(path, room, include, angled, rows):
    rooms, packages = rows[room]
    for package, prefixes in PACKAGES.items():
        if include.startswith(prefixes):
            inherited = packages if "/" not in room else packages | rows.get(room.rsplit("/", 1)[0], (0, set()))[1]
            return None if package in inherited or (package == "grpc" and "proto" in inherited
                                                   and include.startswith("google/protobuf")) else f"package {package}"
    if include.startswith(("cuda", "nccl", "uct/")):
        return "GPU or RDMA header"
    if angled:
        if "pure" in packages and (include in IMPURE or include.startswith("sys/")):
            return f"<{include}> in a pure room"
        if path.as_posix() in QUIET_HEADERS and include in IMPURE:
            return f"<{include}> in a contract"
        return None
    target = room_of(pathlib.Path(include), rows)
    if target is None:
        return f"'{include}' is in no room"
    same_tree = target == room or target == room.rsplit("/", 1)[0]
    return None if same_tree or target in rooms or target.rsplit("/", 1)[0] in rooms and "transport/" not in room else f"room {target}"


def linked(text, folder):
    """The rooms that a CMakeLists.txt of the room `folder` links: in ww_component's DEPS, or by target_link_libraries."""
    parts = {"config": "daemon", "store_etcd": "store", "metrics_prometheus": "metrics", "checkpoint": "client/checkpoint",
             "collective": "client/collective", "client": "client/cpp"}
    named = set()
    for arguments in re.findall(r"\bww_component\(([^)]*)\)", text):
        taken = False
        for word in arguments.split():
            taken = word in ("DEPS", "PRIVATE_DEPS") or taken and word != "SOURCES"
            named |= {word} if taken and word not in ("DEPS", "PRIVATE_DEPS") else set()
    for arguments in re.findall(r"\b(?:target_link_libraries|_ww_link)\(([^)]*)\)", text):
        named |= {word.removeprefix("weightwire_") for word in arguments.split()[1:] if word.startswith("weightwire_")}
    rooms = {parts.get(name, name) for name in named if re.fullmatch(r"[a-z_]+", name)}
    return rooms - {folder, "flags", "proto", "etcd_proto"}


def differences(room, row, included, links):
    """What a row of the table, the room's includes and its links (None: it is a part of its parent's library) disagree in."""
    found = [f"the table names '{other}' for '{room}', which does not include it" for other in sorted(row - included)]
    if links is not None:
        found += [f"CMake links '{other}' to '{room}', and the table does not name it" for other in sorted(links - row)]
        found += [f"the table names '{other}' for '{room}', and CMake does not link it" for other in sorted(row - links)]
    return found


def main():
    rows = table()
    bad = []
    included = {room: set() for room in rows}
    files = [p for top in ("server", "kernels", "client") for p in (ROOT / top).rglob("*") if p.suffix in (".h", ".cc", ".cu")]
    for file in sorted(files):
        path = file.relative_to(ROOT)
        room = room_of(path, rows)
        if room is None:
            bad.append(f"{path}: lies in no room of the table")
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            match = re.match(r'#include\s+([<"])([^>"]+)[>"]', line)
            if match:
                target = room_of(pathlib.Path(match.group(2)), rows)
                if match.group(1) == '"' and target is not None:
                    # A part of another room (transport/tcp) counts as that room.
                    included[room] |= {target, target.rsplit("/", 1)[0]} - {"client"}
                why = complaint(path, room, match.group(2), match.group(1) == "<", rows)
                if why:
                    bad.append(f"{path}:{number}: room '{room}' may not include {why} ({match.group(2)})")
    for room, (others, _) in rows.items():
        lists = ROOT / (room if room.startswith(("kernels", "client")) else f"server/{room}") / "CMakeLists.txt"
        bad += differences(room, others, included[room], linked(lists.read_text(), room) if lists.exists() else None)
    print("\n".join(bad) if bad else f"include table holds: {len(files)} files, {len(rows)} rooms")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
