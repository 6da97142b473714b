#!/usr/bin/env bash
# For packages that another environment's Python imports from a folder of their own: overlay.sh BASE NAME LIST installs LIST without
# dependencies, when it has changed, and prints BASE's python and the folder, a line each.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$here/make.sh" "$1")
extra=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/$2
wanted=$(grep -v '^#' "$3")
exec 9>"$extra.lock"
flock 9
if [ "$(cat "$extra/.weightwire" 2>/dev/null)" != "$wanted" ]; then
  rm -rf "$extra"
  "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$extra" -r "$3" >&2
  printf '%s\n' "$wanted" >"$extra/.weightwire"
fi
printf '%s\n' "$python" "$extra"
