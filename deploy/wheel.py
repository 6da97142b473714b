#!/usr/bin/env python3
"""./dev wheel: puts the service's programs into the Python wheel, so that they run on any Linux with glibc 2.34 or newer.

    wheel.py BUILD PURE_WHEEL DIST [MACHINE]

MACHINE is x86_64, or aarch64: BUILD is then of Debian's cross compiler (deploy/cross.sh).

The programs are the release build's own objects (BUILD, made by ninja), linked again: every library is Debian's static one, but for
glibc, libgcc_s and, in the plug-in of the transport ucx, PyPI's libucx. Of spdlog, fmt and prometheus-cpp Debian has no static
library: they are compiled from Debian's source packages. A program that needs anything else, or a newer glibc, is refused.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, List, Tuple

ROOT = Path(__file__).resolve().parents[1]
GLIBC_MAX = (2, 34)
#: Target of the build -> file in the wheel, and what it may need besides.
PROGRAMS: Dict[str, Tuple[str, Tuple[str, ...]]] = {
    "weightwired": ("weightwired", ()),
    "wwctl": ("wwctl", ()),
    "weightwire_checkpoint_abi": ("libweightwire_checkpoint.so", ()),
    "weightwire_nccl": ("libweightwire_nccl.so", ()),
    "weightwire_cuda": ("libweightwire_cuda.so", ()),
    "weightwire_ucx": ("libweightwire_ucx.so", ("libucp.so.0", "libucs.so.0")),
}
#: Of these only headers are used.
COMPILED_IN = ("libboost1.81-dev", "libexpected-dev", "libcli11-dev", "nlohmann-json3-dev")
#: From the folder weightwire/bin of an installed wheel to PyPI's libucx beside the package.
UCX_PATH = "$ORIGIN/../../libucx/lib"


@dataclass(frozen=True)
class Machine:
    """A processor, as wheels call it, and what makes programs for it here."""

    name: str
    #: In front of the tools' names: empty for this machine's own.
    prefix: str
    #: The system's libraries that are there on every Linux; the loader is glibc's.
    loader: str
    #: Debian's package of libstdc++.
    runtime: str

    @property
    def libraries(self) -> Path:
        return Path(f"/usr/lib/{self.name}-linux-gnu")

    @property
    def tag(self) -> str:
        return f"py3-none-manylinux_{GLIBC_MAX[0]}_{GLIBC_MAX[1]}_{self.name}"

    def is_system(self, library: str) -> bool:
        return library == self.loader or re.fullmatch(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d+", library) is not None

    def tool(self, name: str) -> str:
        return self.prefix + {"c++": "g++", "cc": "gcc"}.get(name, name) if self.prefix else name


X86_64 = Machine("x86_64", "", "ld-linux-x86-64.so.2", "libstdc++-12-dev")
MACHINES = {machine.name: machine for machine in
            (X86_64, Machine("aarch64", "aarch64-linux-gnu-", "ld-linux-aarch64.so.1", "libstdc++-12-dev-arm64-cross"))}


@dataclass(frozen=True)
class Source:
    """A Debian source package of which a static library is made."""

    package: str
    library: str
    #: (folder of sources, flags); the files are all of it but those that `without` names.
    folders: Tuple[str, ...]
    includes: Tuple[str, ...]
    flags: Tuple[str, ...] = ()
    without: Tuple[str, ...] = ()


SOURCES = (
    Source("spdlog", "spdlog", ("src",), ("include",), ("-DSPDLOG_COMPILED_LIB", "-DSPDLOG_FMT_EXTERNAL"), ("fmt.cpp",)),
    Source("fmtlib", "fmt", ("src",), ("include",), (), ("fmt.cc",)),
    Source("prometheus-cpp", "prometheus-cpp-core", ("core/src", "core/src/detail"), ("core/include", "core/src")),
)


def run(command: List[str], cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"wheel.py: {shlex.join(command)[:300]}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def installed(library: str) -> Tuple[str, str]:
    """Debian's package of a file, and its version."""
    owner = run(["dpkg-query", "-S", library]).split(":")[0].split(",")[0]
    return owner, run(["dpkg-query", "-W", "-f", "${Version}", owner])


def fetch(work: Path, source: Source) -> Path:
    """The unpacked source package, its signature checked by apt."""
    found = sorted(path for path in work.glob(f"{source.package}-*") if path.is_dir())
    if not found:
        (work / "lists").mkdir(parents=True, exist_ok=True)
        listed = work / "deb-src.sources"
        codename = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)["VERSION_CODENAME"]
        listed.write_text(f"Types: deb-src\nURIs: http://deb.debian.org/debian\nSuites: {codename}\nComponents: main\n"
                          "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n")
        apt = ["apt-get", "-q", "-o", f"Dir::Etc::sourcelist={listed}", "-o", "Dir::Etc::sourceparts=-", "-o", f"Dir::State::lists={work}/lists",
               "-o", "APT::Sandbox::User="]
        if not any((work / "lists").glob("*Sources*")):
            run([*apt, "update"], work)
        run([*apt, "source", source.package], work)
        found = sorted(path for path in work.glob(f"{source.package}-*") if path.is_dir())
    return found[-1]


def compile_source(work: Path, source: Source, machine: Machine) -> Path:
    archive = work / machine.name / f"lib{source.library}.a"
    folder = fetch(work, source)
    if archive.exists():
        return archive
    objects = work / machine.name / f"objects-{source.library}"
    objects.mkdir(exist_ok=True)
    made = []
    for name in source.folders:
        for file in sorted((folder / name).glob("*.c*")):
            if file.name in source.without:
                continue
            made.append(objects / f"{name.replace('/', '_')}_{file.name}.o")
            run([machine.tool("c++"), "-std=c++17", "-O2", "-DNDEBUG", "-fPIC", *source.flags, *(f"-I{folder / path}" for path in source.includes),
                 "-c", str(file), "-o", str(made[-1])])
    run([machine.tool("ar"), "rcs", str(archive), *map(str, made)])
    return archive


def link_words(build: Path, target: str) -> List[str]:
    """The build's own command that links a target."""
    last = run(["ninja", "-C", str(build), "-t", "commands", target]).strip().splitlines()[-1]
    words = shlex.split(last)
    begin = words.index("&&") + 1
    return words[begin:words.index("&&", begin)]


def link(build: Path, target: str, out: Path, own: Dict[str, Path], compat: Path, kept: Iterable[str], machine: Machine = X86_64) -> List[Path]:
    """Links a target again; the static libraries that went in. What is not named by a link line (abseil under gRPC) is added."""
    words, libraries, rest = link_words(build, target), [], []
    for word in words:
        if word.startswith("-Wl,-rpath"):
            continue
        found = (re.fullmatch(r"/usr/lib/.*/lib([^/]+?)\.so[.\d]*", word) or re.fullmatch(r"-l(.+)", word))
        if not found or any(f"lib{found[1]}.so" in one for one in kept):
            rest.append(word)
        elif found[1] == "atomic":
            libraries.append(Path(run([machine.tool("c++"), "-print-file-name=libatomic.a"]).strip()))
        elif found[1] in ("cudadevrt", "cudart_static"):
            rest.append(word)  # static already, from the toolkit's folder
        elif found[1] not in ("m", "dl", "rt", "pthread"):
            libraries.append(own.get(found[1]) or machine.libraries / f"lib{found[1]}.a")
    if any("grpc" in library.name for library in libraries):
        libraries += sorted(machine.libraries.glob("libabsl_*.a"))
    if missing := [str(library) for library in libraries if not library.exists()]:
        sys.exit(f"wheel.py: {target}: no static library {', '.join(missing)}")
    libraries = list(dict.fromkeys(libraries))
    rest[rest.index("-o") + 1] = str(out)
    run([*rest, "-static-libstdc++", str(compat), *([f"-Wl,-rpath,{UCX_PATH}"] if kept else []), "-Wl,--start-group", *map(str, libraries),
         "-Wl,--end-group", "-lm", "-ldl", "-lpthread", "-lrt"], build)
    run([machine.tool("strip"), "--strip-unneeded", str(out)])
    return libraries


def check(file: Path, allowed: Tuple[str, ...], machine: Machine = X86_64) -> Tuple[int, int]:
    """The newest glibc that the file needs. Ends where it needs more than every machine has, or is another processor's."""
    header = file.read_bytes()[:20]
    processor = {62: "x86_64", 183: "aarch64"}.get(int.from_bytes(header[18:20], "little"), "an unknown processor") if header[:4] == b"\x7fELF" else "no machine"
    if processor != machine.name:
        sys.exit(f"wheel.py: {file.name} is for {processor}, the wheel for {machine.name}")
    needed = re.findall(r"NEEDED.*\[(.+)\]", run([machine.tool("readelf"), "-d", str(file)]))
    if strange := [name for name in needed if not machine.is_system(name) and name not in allowed]:
        sys.exit(f"wheel.py: {file.name} needs {', '.join(strange)}, which not every machine has: link it statically (docs/install.md)")
    newest = max((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", run([machine.tool("objdump"), "-T", str(file)])))
    if newest > GLIBC_MAX:
        names = [line.split()[-1] for line in run([machine.tool("objdump"), "-T", str(file)]).splitlines() if f"GLIBC_{newest[0]}.{newest[1]}" in line]
        sys.exit(f"wheel.py: {file.name} needs glibc {newest[0]}.{newest[1]} ({', '.join(names)}); the wheel is for {GLIBC_MAX[0]}.{GLIBC_MAX[1]}")
    return newest


def sbom(version: str, libraries: Iterable[Path], sources: Iterable[Tuple[str, Path]], machine: Machine) -> Tuple[Dict[str, object], List[str]]:
    """SPDX 2.3 of what is linked in, and Debian's packages of it."""
    packages = dict(installed(str(library)) for library in libraries if library.is_relative_to("/usr"))
    packages.update((name, folder.name[len(name) + 1:]) for name, folder in sources)
    packages.update((name, run(["dpkg-query", "-W", "-f", "${Version}", name])) for name in (*COMPILED_IN, machine.runtime))
    rows = [{"SPDXID": f"SPDXRef-{name}", "name": name, "versionInfo": version_of, "downloadLocation": "NOASSERTION", "filesAnalyzed": False,
             "licenseConcluded": "NOASSERTION", "licenseDeclared": "NOASSERTION", "copyrightText": "NOASSERTION",
             "externalRefs": [{"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
                               "referenceLocator": f"pkg:deb/debian/{name}@{version_of}"}]} for name, version_of in sorted(packages.items())]
    main = {"SPDXID": "SPDXRef-weightwire", "name": "weightwire", "versionInfo": version, "downloadLocation": "NOASSERTION",
            "filesAnalyzed": False, "licenseDeclared": "Apache-2.0"}
    relations = [{"spdxElementId": "SPDXRef-DOCUMENT", "relationshipType": "DESCRIBES", "relatedSpdxElement": "SPDXRef-weightwire"},
                 *({"spdxElementId": "SPDXRef-weightwire", "relationshipType": "STATIC_LINK", "relatedSpdxElement": row["SPDXID"]} for row in rows)]
    return {"spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT", "name": f"weightwire-{version}",
            "documentNamespace": f"https://spdx.org/spdxdocs/weightwire-{version}-wheel-{machine.name}",
            "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: weightwire-wheel.py"]},
            "packages": [main, *rows], "relationships": relations}, sorted(packages)


def licences(folder: Path, packages: Iterable[str], sources: Iterable[Tuple[str, Path]]) -> None:
    """Debian's copyright files of what is linked in."""
    for name in packages:
        file = Path("/usr/share/doc") / name / "copyright"
        if file.exists():
            shutil.copy(file.resolve(), folder / f"{name}.copyright")
    for name, source in sources:
        shutil.copy(source / "debian/copyright", folder / f"{name}.copyright")


def prepare(work: Path, machine: Machine = X86_64) -> Tuple[Dict[str, Path], Path]:
    """What links need beside Debian's static libraries: the archives made here, by their names, and the object of wheel_compat.c."""
    (work / machine.name).mkdir(parents=True, exist_ok=True)
    compat = work / machine.name / "compat.o"
    run([machine.tool("cc"), "-O2", "-fPIC", "-fvisibility=hidden", "-c", str(ROOT / "deploy/wheel_compat.c"), "-o", str(compat)])
    return {source.library: compile_source(work, source, machine) for source in SOURCES}, compat


def main(build: Path, pure: Path, dist: Path, machine: Machine = X86_64) -> None:
    work = build.parent / "wheel"
    shutil.rmtree(work / "tree", ignore_errors=True)
    known = run(["ninja", "-C", str(build), "-t", "targets", "all"])
    programs = {target: entry for target, entry in PROGRAMS.items() if f"\n{target}: phony" in known}
    if absent := sorted(PROGRAMS.keys() - programs.keys()):
        print(f"wheel.py: without {', '.join(PROGRAMS[target][0] for target in absent)}, which this build has not")
    run(["ninja", "-C", str(build), *programs])
    archives, compat = prepare(work, machine)
    folders = [(source.package, fetch(work, source)) for source in SOURCES]
    run([sys.executable, "-m", "wheel", "unpack", "-d", str(work / "tree"), str(pure)])
    (tree,) = (work / "tree").iterdir()
    binaries, used = tree / "weightwire/bin", set()
    binaries.mkdir()
    for target, (name, allowed) in programs.items():
        used.update(link(build, target, binaries / name, archives, compat, allowed, machine))
        newest = check(binaries / name, allowed, machine)
        print(f"{name}: {(binaries / name).stat().st_size / 1e6:.1f} MB, glibc {newest[0]}.{newest[1]}")
    shutil.copytree(ROOT / "client/python/demo", tree / "weightwire/_demo/demo", ignore=shutil.ignore_patterns("__pycache__"))
    (info,) = tree.glob("*.dist-info")
    document, packages = sbom(info.name.split("-")[1].removesuffix(".dist"), used, folders, machine)
    (info / "sboms").mkdir()
    (info / "sboms/weightwire.spdx.json").write_text(json.dumps(document, indent=1))
    (info / "licenses").mkdir(exist_ok=True)
    shutil.copy(ROOT / "LICENSE", info / "licenses")
    licences(info / "licenses", packages, folders)
    text = (info / "WHEEL").read_text()
    (info / "WHEEL").write_text(re.sub(r"^Tag: .*$", f"Tag: {machine.tag}", text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false"), flags=re.M))
    run([sys.executable, "-m", "wheel", "pack", "-d", str(dist), str(tree)])
    pure.unlink()
    (made,) = dist.glob("*.whl")
    print(f"{made}: {made.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(*(Path(argument).resolve() for argument in sys.argv[1:4]), *(MACHINES[name] for name in sys.argv[4:5]))
