"""`weightwire demo`: the main job on this machine. `weightwire vllm`: a vLLM server follows every
version. `weightwire run`: a command with an agent of its own. `weightwire --version`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import List, Optional

from weightwire import __version__, run_command
from weightwire.binaries import program
from weightwire.errors import WeightwireError
from weightwire.vllm import command


def _demo_folder() -> Path:
    """Of the package `demo`: within this one where it was installed, else beside it."""
    package = Path(__file__).resolve().parent
    return package / "_demo" if (package / "_demo").is_dir() else package.parent


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="weightwire", description="Moves weights from a trainer fleet to a rollout fleet.",
                                     epilog="The service is `weightwired`, its command line `wwctl`.")
    parser.add_argument("--version", action="version", version=f"weightwire {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="4 trainer ranks and 3 engines on this machine: versions are published, two processes "
                                            "killed, every byte compared")
    demo.add_argument("--small", action="store_true", help="a small model [default]")
    demo.add_argument("--full", action="store_true", help="a model of 988 MB: needs 8 GB of memory")
    command.add_to(commands)
    run_command.add_to(commands)
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["run"] and given[1:2] not in (["-h"], ["--help"]):
        return run_command.run(given[1:])
    asked = parser.parse_args(given)
    if asked.command == "vllm":
        return command.run(asked)
    try:
        binary = program("weightwired")
    except WeightwireError as error:
        print(f"weightwire: {error}", file=sys.stderr)
        return 1
    folder = str(_demo_folder())
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])  # for its processes
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from demo import run
    return int(run.main(["--binary", str(binary), *([] if asked.full else ["--small"])], prog="weightwire demo"))


if __name__ == "__main__":
    sys.exit(main())
