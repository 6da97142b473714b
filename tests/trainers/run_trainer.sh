#!/usr/bin/env bash
# megatron_trainer.py in the environment of the trainer tests.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$("$here/../envs/make.sh" megatron)
unset PYTHONPATH
OMP_NUM_THREADS=1 exec "$python" "$here/megatron_trainer.py" "$@"
