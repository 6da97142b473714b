#!/usr/bin/env bash
# Runs the trainer tests in their environment: tests/trainers/run.sh test_fsdp.py [-k …]; no file: all of them.
# WEIGHTWIRE_TRAINERS_ENV: another environment than `megatron`, e.g. megatron-next.
# Never skips: without the environment it makes it, and fails when it cannot.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
python=$("$here/../envs/make.sh" "${WEIGHTWIRE_TRAINERS_ENV:-megatron}") || { echo "trainers: NOT RUN: the environment could not be made (see above)" >&2; exit 1; }
[ -e "$root/client/python/weightwire/v1/agent_pb2.py" ] || { echo "trainers: NOT RUN: no generated stubs; ./dev setup" >&2; exit 1; }
cd "$here"
export WEIGHTWIRE_BIN_DIR=${WEIGHTWIRE_BIN_DIR:-$root/build/release/bin} OMP_NUM_THREADS=1
if [ $# -gt 0 ]; then exec "$python" -m pytest -p no:cacheprovider "$@"; fi
status=0
for file in test_*.py; do "$python" -m pytest -p no:cacheprovider "$file" || status=1; done
exit $status
