#!/usr/bin/env bash
# Runs the tests with the real DeepSpeed on a CPU, on top of the
# environment of tests/verl. Arguments go to pytest. Never skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$root/tests/envs/make.sh" verl) || { echo "deepspeed: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "deepspeed: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
extra=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/deepspeed
wanted=$(grep -v '^#' "$here/requirements-deepspeed.txt")
exec 9>"$extra.lock"
flock 9
if [ "$(cat "$extra/.weightwire" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$extra"
  "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$extra" -r "$here/requirements-deepspeed.txt" >&2
  printf '%s\n' "$wanted" >"$extra/.weightwire"
fi
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$root/client/python:$here:$extra
exec "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
