#!/usr/bin/env bash
# Runs SGLang's own code on a CPU, on top of the environment of tests/verl: its modules around the hook, and whole engines over a stub
# of its GPU kernels. Arguments go to pytest. Never skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
places=$("$root/tests/envs/overlay.sh" verl sglang "$here/requirements-sglang.txt") || { echo "sglang: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
{ read -r python; read -r extra; } <<<"$places"
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "sglang: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r "$root/client/python" "$site/source"  # installed, for SGLang finds plug-ins by their entry points
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$site/packages" "$site/source"
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$site/packages:$root/client/python:$here:$here/stub:$root/tests/support:$extra
"$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
