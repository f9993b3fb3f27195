#!/usr/bin/env bash
# Installs the project into .venv (once), trains a small GPT twice on 8 processes, kills one of them in the second run,
# and compares the final states. With --baft: on two emulated nodes, one of which is killed, with a picture of what was
# sent in pipeline bubbles. For all arguments: bash launch/quickstart.sh --help
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/setup.sh"
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
exec "$root/.venv/bin/python" "$root/launch/quickstart.py" "$@"
