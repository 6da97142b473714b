"""What scripts here have in common that write one file of tests/data from what libraries give."""

import argparse
import pathlib
import sys


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--update", action="store_true", help="write the file")
    return made


def settle(file: pathlib.Path, text: str, update: bool, library: str = "the libraries") -> None:
    """Writes the file, or ends with status 1 when it would change."""
    if update:
        file.write_text(text)
    elif text != file.read_text():
        sys.exit(f"{file} differs from what {library} gave; look why, then --update")
