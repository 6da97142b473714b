"""Says whether libweightwire_cuda.so has every kernel as machine code for the architectures given, and PTX for the last one.

    cuda_architectures.py LIBRARY 80 90 100

Reads the fat binary itself, since a toolkit may come without cuobjdump; where `cuobjdump` is on PATH, its `--list-elf` and
`--list-ptx` must say the same. The layout of a fat binary (nvcc 13, cuobjdump beside it): a header of 16 bytes (magic,
version, its own size, the bytes that follow), then entries, each with its kind, header size, payload size and architecture.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import struct
import subprocess
import sys

MAGIC = struct.pack("<IHH", 0xBA55ED50, 1, 16)
PTX, ELF = 1, 2
KERNELS = [b"CopyKernel", b"SumKernel", b"QuantizeKernel", b"FourBitKernel"]


def entries(data: bytes):
    """(kind, architecture, payload) of every fat binary in a library."""
    at = data.find(MAGIC)
    while at >= 0:
        end = at + 16 + struct.unpack_from("<Q", data, at + 8)[0]
        at += 16
        while at < end:
            kind, _, header, payload = struct.unpack_from("<HHIQ", data, at)
            yield kind, struct.unpack_from("<I", data, at + 28)[0], data[at + header:at + header + payload]
            at += header + payload
        at = data.find(MAGIC, end)


def defects(library: str, wanted: list[int]) -> list[str]:
    found = list(entries(pathlib.Path(library).read_bytes()))
    wrong = []
    for arch in wanted:
        codes = [payload for kind, a, payload in found if kind == ELF and a == arch]
        wrong += [f"no machine code for sm_{arch}"] if not codes else [
            f"sm_{arch} lacks {name.decode()}" for name in KERNELS if not any(name in code for code in codes)]
    if not any(kind == PTX and arch == wanted[-1] for kind, arch, _ in found):
        wrong.append(f"no PTX for compute_{wanted[-1]}")
    tool = shutil.which("cuobjdump")
    for kind, option in ((ELF, "--list-elf"), (PTX, "--list-ptx")):
        if tool is None:
            continue
        listed = subprocess.run([tool, option, library], capture_output=True, text=True, timeout=60, check=True).stdout
        ours = {arch for k, arch, _ in found if k == kind}
        theirs = {int(arch) for arch in re.findall(r"\.sm_(\d+)", listed)}
        if ours != theirs:
            wrong.append(f"cuobjdump {option} lists {sorted(theirs)}, the fat binary has {sorted(ours)}")
    return wrong


if __name__ == "__main__":
    found = defects(sys.argv[1], [int(arch) for arch in sys.argv[2:]])
    print("\n".join(found) or f"{sys.argv[1]}: all kernels for sm_{', sm_'.join(sys.argv[2:])}, and PTX")
    sys.exit(bool(found))
