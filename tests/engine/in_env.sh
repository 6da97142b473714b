#!/usr/bin/env bash
# Runs vLLM's python with the given arguments: makes its environment, and installs this checkout's package and the
# suite's faults into a folder of their own, so that the entry points are those of pyproject.toml. WEIGHTWIRE_VLLM=0.28.0: with
# that vLLM, see tests/envs/other_vllm.py.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/../envs/make.sh" vllm) || { echo "engine: NOT RUN: the vLLM environment could not be made (see above)" >&2; exit 1; }
other=
if [ -n "${WEIGHTWIRE_VLLM:-}" ]; then
  other=$("$python" -B "$here/../envs/other_vllm.py" "$WEIGHTWIRE_VLLM") || { echo "engine: NOT RUN: no vLLM $WEIGHTWIRE_VLLM (see above)" >&2; exit 1; }
fi
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r "$root/client/python" "$site/source"  # pip leaves its own files beside what it builds
cp -r "$here/faults" "$site/faults"
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$site/packages" \
  "$site/source" "$site/faults"
cd "$root"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin}
PYTHONPATH=${other:+$other:}$site/packages:$root:$root/client/python "$python" "$@"
