#!/usr/bin/env bash
# Makes the virtual environment NAME of a suite with real engines or trainers, when it is missing or its lists have
# changed, and prints the path of its python. NAME.txt is installed with dependencies, NAME-bare.txt without them,
# where packages pin what PyPI does not have or what exists for CUDA alone. PyPI only; minutes, and about 6 GB each.
#
# It lies outside the tree, so that worktrees share it and CI can keep it: ${WEIGHTWIRE_VENVS:-~/.cache/weightwire/venvs}
set -euo pipefail
name=${1:?usage: make.sh NAME}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lists=$(cd "$here" && ls "$name.txt" "$name-bare.txt" 2>/dev/null) || [ -n "$lists" ] || { echo "make.sh: no environment '$name'" >&2; exit 64; }
venv=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/$name
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9  # two checkouts may ask at once
wanted=$(cd "$here" && grep -hv '^#' $lists)
if [ "$(cat "$venv/.weightwire" 2>/dev/null)" != "$wanted" ]; then
  echo "make.sh: making $venv" >&2
  rm -rf "$venv"
  python3 -m venv "$venv" >&2
  install=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
  [ ! -e "$here/$name.txt" ] || "${install[@]}" -r "$here/$name.txt" >&2
  [ ! -e "$here/$name-bare.txt" ] || "${install[@]}" --no-deps -r "$here/$name-bare.txt" >&2
  printf '%s\n' "$wanted" >"$venv/.weightwire"
fi
echo "$venv/bin/python"
