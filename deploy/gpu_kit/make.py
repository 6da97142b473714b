#!/usr/bin/env python3
"""./dev gpu-kit DIR: a folder that has all that a bare GPU machine lacks; run.sh in it runs every check there, offline.

    make.py BUILD WHEEL DIR
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import wheel  # noqa: E402

PROGRAMS = ("gpu_test", "gpu_ipc_test", "gpu_direct_test", "gpu_collective_test")
BYTES_MAX = 60 << 20


def main(build: Path, package: Path, kit: Path) -> None:
    if kit.exists() and any(kit.iterdir()):
        sys.exit(f"make.py: {kit} is not empty")
    (kit / "bin").mkdir(parents=True)
    known = wheel.run(["ninja", "-C", str(build), "-t", "targets", "all"])
    programs = [name for name in PROGRAMS if f"\n{name}: phony" in known]
    if absent := [name for name in PROGRAMS if name not in programs]:
        print(f"make.py: without {', '.join(absent)}, which this build has not (no CUDA toolkit): their checks are named as not run")
    if programs:
        wheel.run(["ninja", "-C", str(build), *programs])
    own, compat = wheel.prepare(build.parent / "wheel")
    for name in programs:
        wheel.link(build, name, kit / "bin" / name, own, compat, ())
        wheel.check(kit / "bin" / name, ("libweightwire_cuda.so",))  # the one in the package
    shutil.copy(package, kit)
    wheel.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--platform", "any", "-d", str(kit), "protobuf"])
    for name in ("run.sh", "run.py", "checks.py"):
        shutil.copy(HERE / name, kit)
    size = sum(path.stat().st_size for path in kit.rglob("*") if path.is_file())
    if size > BYTES_MAX:
        sys.exit(f"make.py: the kit has {size / 2**20:.1f} MiB, more than {BYTES_MAX >> 20}")
    print(f"{kit}: {size / 2**20:.1f} MiB; on the machine: {kit.name}/run.sh --out results")


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:4]))
