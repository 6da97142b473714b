#!/usr/bin/env bash
# Builds the version before this one (the commit in PREVIOUS) beside this tree and runs both together. Needs the history:
# a shallow clone says so and fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
previous=$PWD/build/previous commit=$(cat tests/upgrade/PREVIOUS)
git rev-parse -q --verify "$commit^{commit}" >/dev/null || { echo "upgrade: commit $commit is not in this clone; git fetch --unshallow" >&2; exit 1; }
if [ "$(git -C "$previous" rev-parse HEAD 2>/dev/null)" != "$(git rev-parse "$commit")" ]; then
  rm -rf "$previous"
  git clone -q --no-checkout . "$previous"
  git -C "$previous" checkout -q "$commit"
fi
export CCACHE_BASEDIR=$previous CCACHE_NOHASHDIR=1
cmake -S "$previous" -B "$previous/build/release" --preset release >/dev/null
cmake --build "$previous/build/release" -j "${WEIGHTWIRE_JOBS:-$(nproc)}" --target weightwired wwctl >/dev/null
WEIGHTWIRE_PREVIOUS_BIN_DIR=$previous/build/release/bin exec .venv/bin/python -m pytest -q -s -p no:cacheprovider tests/python/test_upgrade.py
