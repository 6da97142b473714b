#!/usr/bin/env bash
# Runs the tests with the real DeepSpeed on a CPU, on top of the environment of tests/verl. Arguments go to pytest. Never
# skips.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
places=$("$root/tests/envs/overlay.sh" verl deepspeed "$here/requirements-deepspeed.txt") || { echo "deepspeed: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
{ read -r python; read -r extra; } <<<"$places"
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "deepspeed: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} PYTHONPATH=$root/client/python:$here:$extra
# DeepSpeed compiles its collectives when they are first used, which takes longer than a test's ranks are waited for; a rank that is
# killed meanwhile leaves a lock that all later ones wait for.
export TORCH_EXTENSIONS_DIR=${XDG_CACHE_HOME:-$HOME/.cache}/weightwire/torch_extensions
find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true
"$python" -c 'from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)' >/dev/null
exec "$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "${@:-$here}"
