#!/usr/bin/env bash
# Makes the virtual environment NAME of a suite with real engines or trainers, when it is missing or its lists have
# changed, and prints the path of its python. NAME.txt is installed with dependencies, NAME-bare.txt without them,
# where packages pin what PyPI does not have or what exists for CUDA alone. PyPI only; minutes, and about 6 GB each. A line
# "# interpreter: NAME" says whose Python it is to have, where python3's is too old.
#
# It lies outside the tree, so that worktrees share it and CI can keep it: ${WEIGHTWIRE_VENVS:-~/.cache/weightwire/venvs}
set -euo pipefail
name=${1:?usage: make.sh NAME}

# On the PATH, or among pyenv's, whose shims only name the versions that somebody has chosen.
find_interpreter() {
  local found
  if "$1" --version >/dev/null 2>&1; then echo "$1"; return; fi
  for found in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"${1#python}"*/bin/python3; do
    if [ -x "$found" ]; then echo "$found"; return; fi
  done
  echo "make.sh: no $1 here: install it, or have pyenv install ${1#python}" >&2
  return 1
}

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
  interpreter=$(cd "$here" && sed -n 's/^# interpreter: //p' $lists | head -n1)
  "$(find_interpreter "${interpreter:-python3}")" -m venv "$venv" >&2
  install=("$venv/bin/python" -m pip install -q --disable-pip-version-check)
  [ ! -e "$here/$name.txt" ] || "${install[@]}" -r "$here/$name.txt" >&2
  [ ! -e "$here/$name-bare.txt" ] || "${install[@]}" --no-deps -r "$here/$name-bare.txt" >&2
  printf '%s\n' "$wanted" >"$venv/.weightwire"
fi
echo "$venv/bin/python"
