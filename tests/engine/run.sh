#!/usr/bin/env bash
# Runs the suite against a real vLLM: tests/engine/run.sh test_draft.py [-k …]; no file: all of them.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
files=$here
case ${1:-} in test_*) files=$here/$1; shift ;; esac
exec "$here/in_env.sh" -m pytest -q -p no:cacheprovider -rs "$files" "$@"
