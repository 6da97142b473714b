#!/usr/bin/env bash
# Makes (once) the environment in which weightwire meets the real verl, and prints its python.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/verl
verl="verl==0.9.1"
wanted="$verl $(sha256sum <"$here/requirements-verl.txt")"
mkdir -p "$(dirname "$venv")"
exec 9>"$venv.lock"
flock 9
if [ "$(cat "$venv/.weightwire" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$venv"
  "${WEIGHTWIRE_PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/pip" install -q --disable-pip-version-check -r "$here/requirements-verl.txt" >&2
  "$venv/bin/pip" install -q --disable-pip-version-check --no-deps "$verl" >&2
  echo "$wanted" >"$venv/.weightwire"
fi
echo "$venv/bin/python"
