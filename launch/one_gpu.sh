#!/usr/bin/env bash
# One process on one GPU (or a CPU): bash launch/one_gpu.sh --config configs/quickstart.yaml args.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
exec python launch/forward.py accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no \
    --dynamo_backend no "${SCRIPT:-train_magrpo.py}" "$@"
