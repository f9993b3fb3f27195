#!/usr/bin/env bash
# Checks on a machine with a GPU what no test without one can: copies from device memory, whole jobs over NCCL, and what
# a snapshot costs a training step. At most ten minutes.
#
#     bash launch/gpu_check.sh [--wheels FOLDER] [--python PYTHON] [--megatron-lm CHECKOUT] [--out FOLDER]
#                              [--skip PART]...
#
# Parts: copies (tests/gpu but for jobs), jobs (tests/gpu/test_jobs_cuda.py), snapshot (benchmarks/gpu_snapshot.py).
# Uses .venv if launch/setup.sh made one, else PYTHON (default python3), whose torch must see the GPU; what that lacks is
# installed from FOLDER into OUT/site. OUT (default build/gpu) gets log.txt and report.json. Status 1 if a part failed,
# if a wheel could not be installed, or if there is no report.
set -uo pipefail
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python out=build/gpu wheels='' skipped=' '
[ -x $python ] || python=python3
refuse() { echo "gpu_check: $*; see the first lines of $0" >&2 && exit 2; }
of_caller() { case $1 in /*) printf %s "$1" ;; *) printf %s "$caller/$1" ;; esac }
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || refuse "$1 needs a value"
    case $1 in
    --wheels) wheels=$(of_caller "$2") ;;
    --python) case $2 in */*) python=$(of_caller "$2") ;; *) python=$2 ;; esac ;;
    --megatron-lm) MEGATRON_LM_PATH=$(of_caller "$2") && export MEGATRON_LM_PATH ;;
    --out) out=$(of_caller "$2") ;;
    --skip)
        case $2 in copies | jobs | snapshot) skipped="$skipped$2 " ;; *) refuse "unknown part '$2'" ;; esac
        ;;
    *) refuse "unknown argument '$1'" ;;
    esac
    shift 2
done
mkdir -p "$out"
out=$(realpath "$out")
log=$out/log.txt parts=$out/parts.jsonl
: >"$log"
: >"$parts"
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/tests${PYTHONPATH:+:$PYTHONPATH}

failed=0
if [ -n "$wheels" ]; then
    "$python" -m pip install --quiet --no-index --no-deps --target "$out/site" "$wheels"/*.whl >>"$log" 2>&1 ||
        { failed=1 && echo "wheels: FAILED to install those of $wheels; see $log"; }
    export PYTHONPATH=$out/site:$PWD:$PYTHONPATH
fi

part() { # NAME SECONDS COMMAND...: run it, with its output in the log; a line for the report
    local name=$1 seconds=$2 code=0 began=$SECONDS
    shift 2
    case $skipped in *" $name "*) return ;; esac
    printf '\n== %s: %s\n' "$name" "$*" >>"$log"
    timeout --signal INT --kill-after 20 "$seconds" "$@" >"$out/$name.txt" 2>&1 </dev/null || code=$?
    cat "$out/$name.txt" >>"$log"
    [ $code -eq 0 ] || failed=1
    printf '{"part": "%s", "status": %d, "seconds": %d}\n' "$name" $code $((SECONDS - began)) >>"$parts"
    printf '%s: %s after %d s; %s\n' "$name" "$([ $code -eq 0 ] && echo passed || echo "FAILED with status $code")" \
        $((SECONDS - began)) "$(tail -n 1 "$out/$name.txt" | cut -c1-160)"
}

part copies 60 "$python" -m pytest -v --tb short -rs -p no:cacheprovider tests/gpu --ignore tests/gpu/test_jobs_cuda.py
part jobs 330 "$python" -m pytest -v --tb short -rs -p no:cacheprovider tests/gpu/test_jobs_cuda.py
small=$("$python" -c 'import torch; print("" if torch.cuda.is_available() else "--smoke")' 2>>"$log") || small=--smoke
part snapshot 190 "$python" benchmarks/gpu_snapshot.py $small # without a GPU: only that it runs

"$python" - "$out" <<'PYTHON' || failed=1
import json, pathlib, sys, torch

out = pathlib.Path(sys.argv[1])
parts = [json.loads(line) for line in (out / "parts.jsonl").read_text().splitlines()]
measured = out / "snapshot.txt"
lines = measured.read_text().splitlines() if measured.exists() else []
figures = json.loads(lines[-1])["figures"] if lines and lines[-1].startswith("{") else {}
device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
report = {"device": device, "torch": torch.__version__, "parts": parts, "figures": figures}
(out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
print(json.dumps(report))
PYTHON
exit $failed
