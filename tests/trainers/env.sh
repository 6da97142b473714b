#!/usr/bin/env bash
# Makes the environment of the trainer tests and prints the path of its interpreter.
#
#   tests/trainers/env.sh           makes it when it is missing or its requirements changed
#   tests/trainers/env.sh --check   exit 1 instead of making it
#
# Under ${WEIGHTWIRE_VENVS:-~/.cache/weightwire/venvs}/megatron; about 6 GB. The package is on its path
# by WEIGHTWIRE_SOURCE_DIR or PYTHONPATH, never installed, so that one environment serves every tree.
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
VENV=${WEIGHTWIRE_VENVS:-$HOME/.cache/weightwire/venvs}/megatron
BARE=(megatron-core==0.16.1 mbridge==0.15.1 megatron-bridge==0.3.1)
WANTED=$(grep -v '^#' "$HERE/requirements-megatron.txt"; printf '%s\n' "${BARE[@]}")
PIP=("$VENV/bin/python" -m pip install -q --disable-pip-version-check)

# Trees of different ages share it: what another one wanted besides stays, so that none undoes the other's.
current() { [ -e "$VENV/.weightwire" ] && [ -z "$(grep -Fxv -f "$VENV/.weightwire" <<<"$WANTED")" ]; }

if ! current; then
  if [ "${1:-}" = --check ]; then
    echo "env.sh: $VENV is missing or old; tests/trainers/env.sh makes it" >&2
    exit 1
  fi
  mkdir -p "$VENV"
  exec 9>"$VENV.lock"
  flock 9
  if ! current; then
    [ -e "$VENV/.weightwire" ] || python3 -m venv --clear "$VENV" >&2
    "${PIP[@]}" -r "$HERE/requirements-megatron.txt" >&2
    "${PIP[@]}" --no-deps "${BARE[@]}" >&2
    printf '%s\n' "$WANTED" >>"$VENV/.weightwire"
  fi
fi
echo "$VENV/bin/python"
