#!/usr/bin/env bash
# Runs the examples in the vLLM environment with this checkout's package installed beside it, as a user would have it.
# Arguments go to pytest. Never skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$root/tests/envs/make.sh" vllm) || { echo "examples: NOT RUN: the vLLM environment could not be made" >&2; exit 1; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r "$root/client/python" "$site/source"
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$site/packages" "$site/source"
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin}
PYTHONPATH=$site/packages "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
