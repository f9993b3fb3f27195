#!/usr/bin/env bash
# Runs the default tier of the tests, with --all every test, with --part K/N a part of what --all adds (tests/README.md),
# after setting the project up if needed. Other arguments go to pytest; `-n 0` runs in one process. Fails if anything is
# left behind in /dev/shm.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

workers=$(($(env -u OMP_NUM_THREADS nproc) + 1)) # one more than cores: unit tests mostly wait for sockets and processes
# One thread per rank: a test runs many ranks on few cores. Nothing here compiles.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONUNBUFFERED=1

exec bash tests/apart.sh .venv/bin/python -m pytest -n "$workers" --maxprocesses 8 "$@" </dev/null
