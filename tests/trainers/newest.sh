#!/usr/bin/env bash
# What touches megatron-core and Megatron-Bridge, in the environment with their newest versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export WEIGHTWIRE_TRAINERS_ENV=megatron-next
./run.sh test_megatron.py test_options.py test_optimizer.py test_checkpoint_parts.py test_torch.py test_fsdp.py
./run.sh test_bridges.py -k "not mbridge"  # mbridge is at its end
./run.sh test_every_bridge.py
./run.sh test_hybrid.py
