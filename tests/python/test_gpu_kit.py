"""The kit for a GPU machine, over the fake library: each check runs to its end and compares its bytes; what fails or hangs is named and
the others go on. `./dev test wheel` makes a whole kit and runs it."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from conftest import BINARIES, ROOT

KIT = ROOT / "deploy/gpu_kit"
FAKE = str(BINARIES.parent / "lib/libfake_cuda.so")
_SPEC = importlib.util.spec_from_file_location("gpu_kit_run", KIT / "run.py")
kit = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(kit)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("WEIGHTWIRE_BIN_DIR", str(BINARIES))


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.sh", "--small", "--library", FAKE, "--out", str(tmp_path), *arguments])
    code = kit.main()
    return code, json.loads((tmp_path / "results.json").read_text())["results"]


def test_every_check_runs_to_its_end_and_compares_its_bytes(monkeypatch, tmp_path):
    code, results = run(monkeypatch, tmp_path)
    assert code == 0, results
    assert results.keys() == {*kit.GTESTS, *kit.CHECKS}
    passed = {name for name, said in results.items() if said.get("passed")}
    assert passed == {"kernels", "publish-1g", "publish-8g", "snapshot", "over-nccl", "killed-holder"}
    assert all(results[name]["skipped"] for name in results.keys() - passed)  # with the reason
    for name in ("publish-1g", "publish-8g", "snapshot"):
        assert results[name]["bytes_checked"] == 3 * results[name]["bytes"] > 0 and results[name]["over_device_copy"] > 0
    assert {"pack_over_copy", "unpack_over_copy", "quantize_over_copy", "copy_gb_s"} <= results["kernels"].keys()
    assert results["over-nccl"]["bytes_checked"] == 5 * results["over-nccl"]["bytes"] > 0
    table = (tmp_path / "gpu-results.md").read_text()
    assert all(f"\n| {name} | " in table for name in results) and "**FAILED**" not in table


def test_a_machine_without_nccl_is_told_so_and_the_check_is_not_run(monkeypatch, tmp_path):
    alone = tmp_path / "libfake_cuda.so"  # without the fake NCCL beside it
    shutil.copy(FAKE, alone)
    code, results = run(monkeypatch, tmp_path, "--library", str(alone), "--only", "over-nccl")
    assert code == 0 and "libfake_nccl_pair.so" in results["over-nccl"]["skipped"]


def test_the_time_of_all_checks_is_nine_minutes_at_most():
    assert sum(seconds for seconds, _ in kit.GTESTS.values()) + sum(kit.CHECKS.values()) <= 705  # some end early
    assert kit.TOTAL_SECONDS <= 540


def test_what_hangs_is_named_and_the_others_go_on(monkeypatch, tmp_path):
    monkeypatch.setitem(kit.CHECKS, "publish-1g", 0.05)  # before Python has begun
    code, results = run(monkeypatch, tmp_path, "--only", "kernels", "publish-1g", "snapshot")
    assert code == 1 and results["publish-1g"]["error"] == "not done within 0 s"
    assert results["kernels"]["passed"] and results["snapshot"]["passed"]
    assert "**FAILED**: not done within 0 s" in (tmp_path / "gpu-results.md").read_text()


def test_a_gpu_that_gives_no_memory_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_CUDA_BYTES", "1000000")
    code, results = run(monkeypatch, tmp_path, "--only", "kernels", "publish-1g", "killed-holder")
    assert code == 1 and not any(said.get("passed") for said in results.values())
    assert all(said["error"] for said in results.values())


def test_time_that_is_over_leaves_the_rest_out_by_name(monkeypatch, tmp_path):
    began = kit.time.monotonic()
    monkeypatch.setattr(kit, "TOTAL_SECONDS", 6)
    monkeypatch.setattr(kit, "check", lambda *_: {"passed": True})
    clock = iter([began, began, began, began + 1, began + 1] + [began + 1.5] * 99)  # the first check takes more than the spare second
    monkeypatch.setattr(kit.time, "monotonic", lambda: next(clock))
    _, results = run(monkeypatch, tmp_path, "--only", "kernels", "publish-1g", "snapshot")
    assert results["kernels"]["passed"]
    assert [results[name]["skipped"] for name in ("publish-1g", "snapshot")] == ["the kit's 6 s are over"] * 2


def test_without_a_driver_the_real_library_says_so():
    """Where there is one: a build without the CUDA toolkit has none."""
    library = BINARIES.parent / "lib/libweightwire_cuda.so"
    if not library.exists():
        pytest.skip("built without the CUDA toolkit")
    done = subprocess.run([sys.executable, KIT / "checks.py", "kernels", "--library", library], stdout=subprocess.PIPE, text=True, timeout=60)
    said = json.loads(done.stdout)
    assert done.returncode == 0 if said.get("passed") else "ww_cuda_" in said["error"]
