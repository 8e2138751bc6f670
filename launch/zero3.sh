#!/usr/bin/env bash
# Every GPU of this machine, each model divided over all of them by ZeRO-3: bash launch/zero3.sh --config configs/...
# PROCESSES: how many (default: all GPUs). SCRIPT: which script (default: train_magrpo.py).
set -euo pipefail
cd "$(dirname "$0")/.."
exec python launch/forward.py accelerate launch --config_file launch/accelerate/zero3.yaml \
    --num_processes "${PROCESSES:-$(python -c 'import torch; print(max(torch.cuda.device_count(), 1))')}" \
    "${SCRIPT:-train_magrpo.py}" "$@"
