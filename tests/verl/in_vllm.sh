#!/usr/bin/env bash
# Runs the tests that need verl and vLLM in one process, in vLLM's environment with verl's behind it: what both have is vLLM's.
# weightwire is installed into a folder of its own, so that its entry points are those of pyproject.toml. WEIGHTWIRE_VLLM=0.32.0: with
# that vLLM, see tests/envs/other_vllm.py. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/../envs/make.sh" vllm) && verl=$("$here/../envs/make.sh" verl) ||
  { echo "verl with vLLM: NOT RUN: an environment could not be made (see above)" >&2; exit 1; }
# As verl 0.9.1 asks for; 0.32 has no pause_generation as verl's server calls it.
version=${WEIGHTWIRE_VLLM:-0.24.0}
vllm=$("$python" -B "$here/../envs/other_vllm.py" "$version") || { echo "verl with vLLM: NOT RUN: no vLLM $version (see above)" >&2; exit 1; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r "$root/client/python" "$site/source"  # pip leaves its own files beside what it builds
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$site/packages" "$site/source"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin}
export PYTHONPATH=$vllm:$site/packages:$root/client/python:$here:$(packages "$python"):$(packages "$verl")
"$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "$@"
