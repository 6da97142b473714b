#!/usr/bin/env bash
# Runs the tests with the real TRL on a CPU, on top of the environment of tests/verl. Arguments go to pytest. Never
# skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
places=$("$root/tests/envs/overlay.sh" verl trl "$here/requirements-trl.txt") || { echo "trl: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
{ read -r python; read -r extra; } <<<"$places"
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "trl: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$root/client/python:$here:$extra
exec "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
