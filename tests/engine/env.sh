#!/usr/bin/env bash
# Makes the virtual environment of one real engine (or trainer) and prints the path of its python.
#   tests/engine/env.sh vllm
# It lies outside the tree, so that worktrees share it and CI can cache it between runs:
# ${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/NAME. PyPI only; about 2 minutes and 6 GB for vllm.
set -euo pipefail
name=${1:?usage: env.sh NAME}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
wanted=$here/requirements-$name.txt
[ -e "$wanted" ] || { echo "env.sh: no $wanted" >&2; exit 64; }
venvs=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}
venv=$venvs/$name
mkdir -p "$venvs"
exec 9>"$venvs/$name.lock"
flock 9  # two checkouts may ask at once
if ! cmp -s "$wanted" "$venv/.requirements"; then
  echo "env.sh: making $venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check --no-deps -r "$wanted" >&2
  cp "$wanted" "$venv/.requirements"
fi
echo "$venv/bin/python"
