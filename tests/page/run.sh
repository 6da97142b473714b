#!/usr/bin/env bash
# Runs the tests of the status page in a real Chromium. Arguments go to pytest; `pictures FOLDER` makes pictures of its states instead
# (pictures.py). Never skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
"$root/dev" browser || { echo "page: NOT RUN: no Chromium (see above)" >&2; exit 1; }
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "page: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$root/client/python:$here
if [ "${1:-}" = pictures ]; then
  shift
  exec "$root/.venv/bin/python" "$here/pictures.py" "$@"
fi
exec "$root/.venv/bin/python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
