#!/usr/bin/env bash
# Runs the kit's checks with the Python that is there (PYTHON=…); nothing is downloaded or installed. run.sh --help
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
unpacked=$(mktemp -d)
trap 'rm -rf "$unpacked"' EXIT
for wheel in "$here"/*.whl; do "${PYTHON:-python3}" -m zipfile -e "$wheel" "$unpacked"; done
chmod +x "$unpacked"/weightwire/bin/*
unset WEIGHTWIRE_BIN_DIR
PYTHONPATH="$unpacked${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-python3}" "$here/run.py" "$@"
