#!/usr/bin/env bash
# Two agents on four GPUs: each is divided over two of them by ZeRO-3, and both work at the same time.
#   bash launch/groups.sh --config configs/quickstart.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
exec python launch/forward.py torchrun --standalone --nproc_per_node 4 "${SCRIPT:-train_magrpo.py}" \
    args.deepspeed_config=ds_configs/zero3.json "args.placement={agents: [[0, 1], [2, 3]]}" "$@"
