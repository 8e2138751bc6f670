#!/usr/bin/env bash
# Several machines with a shared folder for runs/. On each of them, with its own number:
#   MACHINES=2 MACHINE=0 MAIN_ADDRESS=10.0.0.1 bash launch/machines.sh --config configs/...
# GPUS: GPUs a machine (default 8). By default every model is divided over all processes by ZeRO-3.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python launch/forward.py torchrun --nnodes "$MACHINES" --node_rank "$MACHINE" --nproc_per_node "${GPUS:-8}" \
    --master_addr "$MAIN_ADDRESS" --master_port "${MAIN_PORT:-29500}" "${SCRIPT:-train_magrpo.py}" \
    "args.deepspeed_config=${DEEPSPEED_CONFIG:-ds_configs/zero3.json}" "$@"
