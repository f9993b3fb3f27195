#!/usr/bin/env bash
# Runs the exactness tests against other versions of the frameworks, after setting the project up if needed.
#
#     tests/matrix.sh                                      the versions that tests/matrix.py names: half an hour
#     tests/matrix.sh deepspeed-0.16.9 megatron-core      only these; without a number: the installed, the newest one
#     tests/matrix.sh deepspeed+torch-2.10.0               with another torch, in an environment of its own
#     tests/matrix.sh --megatron-lm ROOT                   pretrain_gpt.py of each checkout in ROOT: two minutes for each
#     tests/matrix.sh --clients ROOT                       each checkout of Megatron-DeepSpeed and gpt-neox in ROOT
#     tests/matrix.sh --docs ...                           also writes the result into docs/versions.md
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh

export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
exec .venv/bin/python tests/matrix.py "$@"
