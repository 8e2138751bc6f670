#!/usr/bin/env bash
# The core tests (under 12 minutes on 2 cores). Further arguments go to pytest: bash launch/test.sh -m full
set -euo pipefail
cd "$(dirname "$0")/.."
source launch/setup.sh requirements.txt requirements-dev.txt
export HF_HUB_OFFLINE=1
# The models are tiny: a second thread costs more than it gives, a second worker halves the time.
export OMP_NUM_THREADS=1
if [ $# -eq 0 ]; then set -- -m "not full"; fi
python -m pytest -n logical --maxprocesses 4 --dist worksteal "$@"
