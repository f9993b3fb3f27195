#!/usr/bin/env bash
# Makes .venv in the project's root and installs the project with the pins of launch/constraints.txt.
# Idempotent: returns at once if nothing has changed. Shared by quickstart, tests and CI.
#
# torch comes from pip's configured index, or from FTP_TORCH_INDEX_URL.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
extras=megatron,deepspeed,hf,dev,report
stamp=.venv/ft_plugins.stamp

say() { printf 'setup: %s\n' "$*" >&2; }

# The installation depends on these files, its path and its Python.
fingerprint() {
    { cat setup.py launch/constraints.txt launch/setup.sh; echo "$root"; grep '^version' .venv/pyvenv.cfg; } | sha256sum
}
ready() { [ -x .venv/bin/python ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; }

suits() { "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }
find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.10 python3 python; do
        if command -v "$name" >/dev/null && suits "$name"; then
            command -v "$name"
            return
        fi
    done
    say "no Python from 3.10 to 3.13 with its venv module was found on PATH ($PATH);"
    say "install one (on Debian and Ubuntu: python3.11 and python3.11-venv) and run this again"
    return 1
}

has_gpu() { command -v nvidia-smi >/dev/null || compgen -G '/dev/nvidia[0-9]*' >/dev/null; }
pip_is_configured() { # by configuration files or PIP_* variables, to use other indexes than the default
    local settings
    settings=$(.venv/bin/python -m pip config list 2>/dev/null)
    grep -Eq '\.(index-url|extra-index-url|find-links|no-index)=' <<<"$settings"
}
announce_cuda() {
    if [ -n "${FTP_TORCH_INDEX_URL:-}" ] || has_gpu || pip_is_configured; then return; fi
    say "this machine has no GPU, and pip's default index serves torch with several gigabytes of CUDA packages."
    say "To avoid them, interrupt now and set FTP_TORCH_INDEX_URL to the address of PyTorch's index of CPU builds"
    say "(PyTorch's installation page shows it for 'Compute Platform: CPU'), or configure pip to use another index."
}

exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9; fi # of two concurrent runs the second waits, then has nothing to do
if ready; then exit 0; fi

quiet=(--disable-pip-version-check --no-input)
if [ ! -t 2 ]; then quiet+=(--quiet --quiet --progress-bar off); fi
pip_install() { .venv/bin/python -m pip install "${quiet[@]}" "$@" >&2; }

if [ ! -x .venv/bin/python ] || ! suits .venv/bin/python; then
    python=$(find_python)
    say "making .venv with $python"
    "$python" -m venv --clear .venv
fi
announce_cuda
torch=$(grep '^torch==' launch/constraints.txt)
if [ -n "${FTP_TORCH_INDEX_URL:-}" ]; then
    say "installing $torch from the index of FTP_TORCH_INDEX_URL"
    pip_install --no-deps --index-url "$FTP_TORCH_INDEX_URL" "$torch"
fi
say "installing $torch and the other packages of .[$extras] into .venv; this takes minutes the first time"
pip_install --constraint launch/constraints.txt --editable ".[$extras]"
fingerprint >"$stamp"
say "done"
