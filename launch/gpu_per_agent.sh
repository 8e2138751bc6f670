#!/usr/bin/env bash
# Two agents on two GPUs, a process each: they generate and learn at the same time.
#   bash launch/gpu_per_agent.sh --config configs/quickstart.yaml
# For n agents: --nproc_per_node n, and n groups in the placement.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python launch/forward.py torchrun --standalone --nproc_per_node 2 "${SCRIPT:-train_magrpo.py}" \
    "args.placement={agents: [[0], [1]]}" "$@"
