"""Runs every check of the kit, each with a time of its own, whatever becomes of the others; writes results.json and gpu-results.md.

    run.sh [--out DIR] [--library LIB] [--small] [--only NAME…]

A machine needs NVIDIA's driver and a Python with grpcio, protobuf and numpy (torch for two checks): nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional

HERE = Path(__file__).resolve().parent
#: name -> (seconds, command); GTest programs are in bin/, the others in checks.py. Nine minutes in all at most.
GTESTS = {"kernels-bit-for-bit": (120, "gpu_test"), "cuda-ipc": (60, "gpu_ipc_test"), "gpu-direct": (60, "gpu_direct_test"),
          "nccl-two-ranks": (60, "gpu_collective_test")}
CHECKS = {"kernels": 45, "publish-1g": 45, "publish-8g": 90, "snapshot": 45, "over-nccl": 45, "torch-ipc": 45, "torch-adapter": 45, "killed-holder": 45}
TOTAL_SECONDS = 540
#: These programs call CUDA's runtime themselves, so that a library in its place does not do.
NEED_CUDA = {"kernels-bit-for-bit", "gpu-direct", "nccl-two-ranks"}


def gtest(name: str, seconds: float, program: str, library: str, fake: bool) -> Dict[str, object]:
    if fake and name in NEED_CUDA:
        return {"skipped": "it calls CUDA's runtime itself: needs a GPU"}
    if not (HERE / "bin" / program).exists():
        return {"skipped": f"the kit was made without {program}"}
    report = HERE / f".{program}.json"
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join([str(Path(library).parent), os.environ.get("LD_LIBRARY_PATH", "")]),
                   "WEIGHTWIRE_GPU_TEST_LIBRARY": library}
    done = bounded([str(HERE / "bin" / program), f"--gtest_output=json:{report}"], seconds, environment)
    if isinstance(done, str):
        return {"passed": False, "error": done}
    ran, failed = re.search(r"\[==========\] (\d+) tests? from", done.stdout), re.findall(r"^\[  FAILED  \] (\S+)", done.stdout, re.M)
    skipped = re.findall(r"^\[  SKIPPED \] (\S+)", done.stdout, re.M)
    report.unlink(missing_ok=True)
    if done.returncode != 0:
        return {"passed": False, "error": f"{', '.join(sorted(set(failed))) or done.returncode}: {done.stdout[-800:]}"}
    if ran and skipped and len(set(skipped)) >= int(ran[1]):
        return {"skipped": " ".join(re.findall(r"^.*: Skipped\n(.*)$", done.stdout, re.M))[:400] or "the program says so"}
    return {"passed": True, "tests": int(ran[1]) if ran else 0, "tests_skipped": len(set(skipped))}


def check(name: str, seconds: float, library: str, small: bool) -> Dict[str, object]:
    done = bounded([sys.executable, str(HERE / "checks.py"), name, "--library", library, *(["--small"] if small else [])], seconds, dict(os.environ))
    if isinstance(done, str):
        return {"passed": False, "error": done}
    try:
        said: Dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        return said
    except (IndexError, ValueError):
        return {"passed": False, "error": f"it ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}"}


def bounded(command: List[str], seconds: float, environment: Dict[str, str]) -> "subprocess.CompletedProcess[str] | str":
    """What it said, or that its time was over; with it goes all that it started."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        out, err = process.communicate(timeout=seconds)
        return subprocess.CompletedProcess(command, process.returncode, out, err)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.communicate()
        return f"not done within {seconds:.0f} s"


def machine() -> Dict[str, Optional[str]]:
    def said(*command: str) -> Optional[str]:
        try:
            return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, timeout=20).stdout.strip() or None
        except (OSError, subprocess.TimeoutExpired):
            return None
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), None)
    return {"gpus": said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"), "cpu": cpu,
            "cores": str(os.cpu_count()), "kernel": platform.release(), "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d %H:%M:%S %z")}


def as_markdown(about: Dict[str, Optional[str]], results: Dict[str, Dict[str, object]], seconds: float) -> str:
    lines = ["# Checks of a GPU machine", "", *(f"- {key}: {value}" for key, value in about.items() if value), f"- all of it: {seconds:.0f} s", "",
             "| check | result | figures |", "|---|---|---|"]
    for name, said in results.items():
        result = "passed" if said.get("passed") else f"not run: {said['skipped']}" if "skipped" in said else f"**FAILED**: {said.get('error')}"
        figures = ", ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in said.items()
                            if key not in ("passed", "skipped", "error"))
        lines.append(f"| {name} | {' '.join(result.split())} | {figures} |")
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=".", help="where results.json and gpu-results.md go [.]")
    parser.add_argument("--library", help="libweightwire_cuda.so, or one of the same interface [the package's]")
    parser.add_argument("--small", action="store_true", help="small models, to try the kit")
    parser.add_argument("--only", nargs="+", choices=[*GTESTS, *CHECKS], metavar="NAME", help="of " + ", ".join([*GTESTS, *CHECKS]))
    asked = parser.parse_args()
    from weightwire import binaries
    library = asked.library or binaries.library("libweightwire_cuda.so")
    fake = "libfake_cuda" in Path(library).name
    began, results = time.monotonic(), {}
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    about = machine()
    for name in asked.only or [*GTESTS, *CHECKS]:
        left = TOTAL_SECONDS - (time.monotonic() - began)
        limit = GTESTS[name][0] if name in GTESTS else CHECKS[name]
        print(f"{name} …", flush=True)
        started = time.monotonic()
        if left < 5:
            results[name] = {"skipped": f"the kit's {TOTAL_SECONDS} s are over"}
        elif name in GTESTS:
            results[name] = gtest(name, min(left, limit), GTESTS[name][1], library, fake)
        else:
            results[name] = check(name, min(left, limit), library, asked.small)
        print(f"  {'passed' if results[name].get('passed') else results[name].get('skipped') or results[name].get('error')}"
              f" ({time.monotonic() - started:.1f} s)", flush=True)
        document = {"machine": about, "library": library, "seconds": time.monotonic() - began, "results": results}
        (out / "results.json").write_text(json.dumps(document, indent=1) + "\n")  # after each: a machine may go away
        (out / "gpu-results.md").write_text(as_markdown(about, results, time.monotonic() - began))
    bad = [name for name, said in results.items() if not said.get("passed") and "skipped" not in said]
    print(f"gpu-kit: {sum(bool(said.get('passed')) for said in results.values())} passed, {len(bad)} failed, "
          f"{sum('skipped' in said for said in results.values())} not run; {out}/results.json")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
