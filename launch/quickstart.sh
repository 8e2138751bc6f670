#!/usr/bin/env bash
# Two agents learn a task together: the embedded model on a CPU (or the first GPU), five minutes on 2 cores that multiply bf16.
# Further arguments are settings: bash launch/quickstart.sh args.seed=1
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh requirements.txt
# Ctrl-C and SIGTERM reach the worker, which saves before it ends.
exec python launch/forward.py accelerate launch --quiet \
    --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    train_magrpo.py --config configs/quickstart.yaml "$@"
