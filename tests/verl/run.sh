#!/usr/bin/env bash
# Runs the tests against the real verl in its environment; arguments go to pytest. Never skips: without the
# environment it makes it, and fails when it cannot.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/../envs/make.sh" verl) || { echo "verl: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "verl: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$root/client/python:$here:$root/tests/support
exec "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
